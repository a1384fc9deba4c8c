"""tailopt: optimization under heavy-tailed gradient noise, on PyTorch.

`BiClip` in place of AdamW; the operators `biclip`, `biclip_l2`, `l2clip`; counts of what clipping does.
"""

from tailopt.clipping.counts import Counts, count
from tailopt.clipping.operators import biclip, biclip_l2, l2clip
from tailopt.optimizers.biclip import BiClip
from tailopt.optimizers.checkpoints import load_named_state_dict, named_state_dict
from tailopt.optimizers.l2clip import L2Clip

__version__ = "0.1.0"

__all__ = [
    "BiClip",
    "Counts",
    "L2Clip",
    "biclip",
    "biclip_l2",
    "count",
    "l2clip",
    "load_named_state_dict",
    "named_state_dict",
]
