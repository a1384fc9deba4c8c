"""Settings found by trying: random search, recorded and resumable."""
