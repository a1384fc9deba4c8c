"""One file per implementation of the clipped step; all of them take the same batches and give the same bits."""
