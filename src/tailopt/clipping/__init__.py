"""What clipping means, and the fast ways to do it."""
