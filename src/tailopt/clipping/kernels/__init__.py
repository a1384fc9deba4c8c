"""One file per implementation of the clipped step; all of them take the same groups and give the same bits."""
