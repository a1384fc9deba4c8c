"""Experiments that end in a table, a figure and verdicts on claims of the paper."""
