"""Engines of other projects between the nodes; each file needs the extra of its name."""
