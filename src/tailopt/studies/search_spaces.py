"""Where the comparisons look for settings, rule by rule. The study `convex` has its own space.

Weights that were trained before move by 1e-5 to 1e-3 per step, weights that start at random by more. The outer BiClip
is searched by its learning rate: around 1 a mean displacement between the thresholds is applied as it is.
"""

from __future__ import annotations

from collections.abc import Mapping

from tailopt.sweeps.search import Range
from tailopt.sweeps.space import Space

_SHARE, _EPS = Range(0.03, 1.0), Range(1e-8, 1e-5)
_NESTEROV = {"olr": Range(0.3, 1.0), "momentum": Range(0.3, 0.9, log=False)}
SPACES: Mapping[str, Space] = {
    "fine-tuning": Space(
        inner={
            "sgd": {"ilr": Range(1e-3, 0.3)},
            "l2clip": {"i_move": Range(3e-3, 0.3), "i_u": Range(0.03, 3.0)},
            "biclip-l2": {"i_move": Range(3e-3, 0.3), "i_u": Range(0.03, 3.0), "i_share": _SHARE},
            "biclip": {"i_move": Range(3e-5, 1e-3), "i_u": Range(1e-5, 3e-3), "i_share": _SHARE},
            "adagrad": {"ilr": Range(1e-4, 3e-3), "ieps": _EPS},
            "adam": {"ilr": Range(3e-5, 1e-3), "ieps": _EPS},
            "adamw": {"ilr": Range(3e-5, 1e-3), "ieps": _EPS, "weight_decay": Range(1e-4, 1e-1)},
        },
        outer={
            "avg": {},
            "adagrad": {"olr": Range(1e-4, 1e-2), "oeps": _EPS},
            "rmsprop": {"olr": Range(3e-5, 3e-3), "oeps": _EPS},
            "adam": {"olr": Range(1e-4, 1e-2), "oeps": _EPS},
            "biclip": {"olr": Range(0.3, 3.0), "o_u": Range(1e-4, 3e-3), "o_share": _SHARE},
            "biclip-l2": {"olr": Range(0.3, 3.0), "o_u": Range(0.1, 3.0), "o_share": _SHARE},
            "nesterov": _NESTEROV,
        },
    ),
    "scratch": Space(
        inner={
            "sgd": {"ilr": Range(0.03, 3.0)},
            "l2clip": {"i_move": Range(0.03, 3.0), "i_u": Range(0.03, 3.0)},
            "biclip-l2": {"i_move": Range(0.03, 3.0), "i_u": Range(0.03, 3.0), "i_share": _SHARE},
            "biclip": {"i_move": Range(5e-4, 3e-3), "i_u": Range(1e-4, 1e-2), "i_share": _SHARE},
            "adagrad": {"ilr": Range(1e-3, 3e-2), "ieps": _EPS},
            "adam": {"ilr": Range(3e-4, 2e-3), "ieps": _EPS},
            "adamw": {"ilr": Range(3e-4, 2e-3), "ieps": _EPS, "weight_decay": Range(1e-4, 1e-1)},
        },
        outer={
            "avg": {},
            "adagrad": {"olr": Range(3e-3, 0.1), "oeps": Range(1e-3, 1e-2)},
            "rmsprop": {"olr": Range(1e-3, 1e-2), "oeps": Range(1e-3, 1e-2)},
            "adam": {"olr": Range(3e-3, 3e-2), "oeps": Range(1e-3, 1e-2)},
            "biclip": {"olr": Range(0.5, 2.0), "o_u": Range(3e-3, 3e-2), "o_share": Range(1e-3, 0.1)},
            "biclip-l2": {"olr": Range(0.5, 2.0), "o_u": Range(1.0, 30.0), "o_share": _SHARE},
            "nesterov": _NESTEROV,
        },
    ),
    # The outer ranges lie about where a step is as long as the mean displacement, some 1e-3 to 1e-2 per coordinate:
    # olr = 1 where it is clipped, olr of the size of root(v) + oeps where it is divided by that.
    "pretraining": Space(
        inner={
            "adam": {"ilr": Range(3e-4, 5e-3), "ieps": _EPS},
            "adamw": {"ilr": Range(3e-4, 5e-3), "ieps": _EPS, "weight_decay": Range(1e-4, 1e-1)},
            "biclip": {"i_move": Range(3e-4, 3e-3), "i_u": Range(1e-4, 1e-2), "i_share": _SHARE},
        },
        outer={
            "adam": {"olr": Range(3e-3, 3e-2), "oeps": Range(1e-3, 1e-2)},
            "rmsprop": {"olr": Range(1e-3, 1e-2), "oeps": Range(1e-3, 1e-2)},
            "biclip": {"olr": Range(0.5, 2.0), "o_u": Range(3e-3, 3e-2), "o_share": Range(1e-3, 1e-1)},
            "nesterov": _NESTEROV,
        },
    ),
}
