"""A federation on Flower, to start your own from."""
