"""Training loops and engines of other projects; each file needs the extra of its name."""
