"""Which node has which data, and in what order it reads them.

`iid`, `dirichlet`, `power_law` and `by_source` split the samples of one dataset among nodes; `subsets` turns the parts
into datasets; `sample_weights` returns the weights of nodes of unequal size; `NodeData` is the stream of batches of one
node.
"""

from tailopt.splits.loaders import NodeData, node_data, sample_weights
from tailopt.splits.partitions import by_source, dirichlet, iid, power_law, subsets

__all__ = ["NodeData", "by_source", "dirichlet", "iid", "node_data", "power_law", "sample_weights", "subsets"]
