"""tailopt: optimization under heavy-tailed gradient noise, on PyTorch.

`BiClip` in place of AdamW; the operators `biclip`, `biclip_l2`, `l2clip`; counts of what clipping does; nested training
by any algorithm of the paper, simulated on one machine.
"""

from tailopt.algorithms import Algorithm, algorithm
from tailopt.clipping.counts import Counts, count, standardised
from tailopt.clipping.operators import biclip, biclip_l2, l2clip
from tailopt.distributed.nested_optimizer import NestedOptimizer
from tailopt.engines.simulate import Result, simulate
from tailopt.optimizers.biclip import BiClip
from tailopt.optimizers.clipped import Clipped
from tailopt.optimizers.l2clip import L2Clip
from tailopt.optimizers.state_by_name import load_named_state_dict, named_state_dict
from tailopt.paper import paper_settings
from tailopt.theory import Theory, theory

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "BiClip",
    "Clipped",
    "Counts",
    "L2Clip",
    "NestedOptimizer",
    "Result",
    "Theory",
    "algorithm",
    "biclip",
    "biclip_l2",
    "count",
    "l2clip",
    "load_named_state_dict",
    "named_state_dict",
    "paper_settings",
    "simulate",
    "standardised",
    "theory",
]
