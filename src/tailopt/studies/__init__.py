"""Experiments that end in a table, a figure and the claims that they judge."""
