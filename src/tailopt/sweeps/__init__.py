"""Search for settings: random search, recorded and resumable, and the spaces it looks in."""
