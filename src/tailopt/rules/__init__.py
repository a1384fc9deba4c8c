"""One file an update rule: its settings, its state, its step, and how far one step can move."""
