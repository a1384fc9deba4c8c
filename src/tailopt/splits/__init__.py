"""Who has which data, and in what order a node reads it.

`iid`, `dirichlet`, `power_law` and `by_source` part the samples of one dataset among nodes; `subsets` makes datasets of
the parts; `sample_weights` gives the weights of nodes of unequal size; `NodeData` is one node's stream of batches.
"""

from tailopt.splits.loaders import NodeData, node_data, sample_weights
from tailopt.splits.partitions import by_source, dirichlet, iid, power_law, subsets

__all__ = ["NodeData", "by_source", "dirichlet", "iid", "node_data", "power_law", "sample_weights", "subsets"]
