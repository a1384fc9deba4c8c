"""tailopt: optimization under heavy-tailed gradient noise, on PyTorch.

`BiClip` in place of AdamW; the operators `biclip`, `biclip_l2`, `l2clip`; counts of what clipping does; nested training
by any algorithm of the paper, simulated on one machine; sweeps over its settings.
"""

import importlib as _importlib
import typing as _typing

from tailopt.algorithms import Algorithm, algorithm
from tailopt.calibration import calibrate
from tailopt.clipping.counts import Counts, count, standardised
from tailopt.clipping.operators import biclip, biclip_l2, l2clip
from tailopt.diagnose import diagnose
from tailopt.diagnosis import Diagnosis
from tailopt.distributed.nested_optimizer import NestedOptimizer
from tailopt.distributed.rendezvous import connect
from tailopt.engines.simulate import Result, simulate
from tailopt.optimizers.biclip import BiClip
from tailopt.optimizers.clipped import Clipped
from tailopt.optimizers.gradient_release import release_gradients
from tailopt.optimizers.l2clip import L2Clip
from tailopt.optimizers.state_by_name import load_named_state_dict, named_state_dict
from tailopt.paper import paper_settings
from tailopt.theory import Theory, theory
from tailopt.thresholds import Thresholds

__version__ = "0.1.0"

# Imported when they are first used: the library without tasks and sweeps stays a library of its own.
_LAZY = {"SweepResult": "tailopt.sweeps.result", "sweep": "tailopt.sweeps.sweep"}
if _typing.TYPE_CHECKING:
    from tailopt.sweeps.result import SweepResult
    from tailopt.sweeps.sweep import sweep

__all__ = [
    "Algorithm",
    "BiClip",
    "Clipped",
    "Counts",
    "Diagnosis",
    "L2Clip",
    "NestedOptimizer",
    "Result",
    "SweepResult",
    "Theory",
    "Thresholds",
    "algorithm",
    "biclip",
    "biclip_l2",
    "calibrate",
    "connect",
    "count",
    "diagnose",
    "l2clip",
    "load_named_state_dict",
    "named_state_dict",
    "paper_settings",
    "release_gradients",
    "simulate",
    "standardised",
    "sweep",
    "theory",
]


def __getattr__(name: str) -> _typing.Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'tailopt' has no attribute {name!r}")
    value = getattr(_importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
