"""The C kernels and their loader."""
