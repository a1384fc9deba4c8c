"""Settings of an algorithm: their public names, their meanings, their ranges, and one value for each parameter.

A side is "outer" or "inner". A key is a rule's own name for a hyperparameter (`lr`, `u`); its public name tells the
sides apart (`ilr`, `o_u`).
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from tailopt.arguments import check_choice
from tailopt.clipping.operators import check_thresholds
from tailopt.optimizers.auto_thresholds import is_auto
from tailopt.rules.l2clip import SCOPES
from tailopt.rules.muon import ADJUST_LR_FNS
from tailopt.rules.rule import Rule
from tailopt.thresholds import SCALES, lower_of_auto, ratio_of_auto

# By side: key of a rule -> public name. Other keys are public names themselves.
PUBLIC_NAMES = {
    "inner": {
        "lr": "ilr",
        "lr_adamw": "ilr_adamw",
        "adamw_on": "adamw_on",
        "u": "i_u",
        "d": "i_d",
        "eps": "ieps",
        "betas": "inner_betas",
        "momentum": "inner_momentum",
    },
    "outer": {"lr": "olr", "u": "o_u", "d": "o_d", "eps": "oeps", "betas": "outer_betas"},
}
# By side: options of a rule that users cannot set. The inner Adam is torch's, which always corrects its bias.
FIXED_KEYS = {"inner": {"bias_correction"}, "outer": set[str]()}
# Public name -> what values it takes, and what it means.
MEANINGS: Mapping[str, tuple[str, str]] = {
    "ilr": ("number", "learning rate of the local steps; with automatic thresholds the most that a step moves"),
    "olr": ("number", "learning rate of the outer step; with automatic thresholds the most that a step moves"),
    "ilr_adamw": ("number", "learning rate of the local steps where muon leaves a parameter to AdamW"),
    "i_u": ("number, auto, or a table by parameter name", "upper threshold of the local steps; inf clips nothing"),
    "i_d": (
        "number, auto, or a table by parameter name",
        "lower threshold of the local steps; at most i_u, 0 lifts nothing",
    ),
    "o_u": ("number or auto", "upper threshold of the outer step; inf clips nothing"),
    "o_d": ("number or auto", "lower threshold of the outer step; at most o_u, 0 lifts nothing"),
    "ieps": ("number", "added to the denominator of the local steps"),
    "oeps": ("number", "added to the denominator of the outer step"),
    "inner_betas": ("two numbers", "decays of the moments of the local steps"),
    "outer_betas": ("two numbers", "decays of the moments of the outer step"),
    "inner_momentum": ("number", "momentum of the local steps, 0 to below 1; biclip with 0 keeps no state"),
    "momentum": ("number", "momentum of the outer step, 0 to below 1"),
    "weight_decay": ("number", "decoupled weight decay of the local steps"),
    "adamw_on": (
        "pattern of parameter names, or several",
        "what muon leaves to AdamW, besides all that is no matrix",
    ),
    "adjust_lr_fn": (
        "word",
        "how the learning rate of muon depends on the shape of a matrix: original or match_rms_adamw",
    ),
    "dead_zone": ("number or auto", "magnitudes up to it become 0 instead of d"),
    "scope": ("word", "whose norm is clipped: global (all parameters), group or tensor"),
    "scale": (
        "word",
        "of automatic thresholds, what a step is divided by: first (they shrink with the gradients) or follow",
    ),
    "bias_correction": ("true or false", "whether the outer Adam corrects the bias of its moments"),
    "inner_state": ("word", "reset begins every round with a new inner optimizer, keep lets every node keep its own"),
    "send_preconditioner": ("true, false or raw", "of adam2: nodes start from the outer second moment"),
}


def check_values(hparams: Mapping[str, Any], side: str) -> None:
    """Raise ValueError if a hyperparameter is outside its range."""
    public = PUBLIC_NAMES[side]
    for key, value in hparams.items():
        name = public.get(key, key)
        if key in ("lr", "lr_adamw", "eps", "weight_decay") and not isinstance(value, Tensor | Mapping):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"Invalid {name}: {value!r}; need 0 <= {name} < inf.")
        elif key == "momentum" and not _is_fraction(value):
            raise ValueError(f"Invalid {name}: {value!r}; need 0 <= {name} < 1.")
        elif key == "betas" and not (
            isinstance(value, Sequence) and len(value) == 2 and all(_is_fraction(beta) for beta in value)
        ):
            raise ValueError(f"Invalid {name}: {value!r}; need two numbers in [0, 1).")
        elif key == "adamw_on" and not _are_patterns(value):
            raise ValueError(
                f"Invalid adamw_on: {value!r}; need a pattern of parameter names such as '*emb*', or several."
            )
        elif key == "adjust_lr_fn":
            check_choice("adjust_lr_fn", value, ADJUST_LR_FNS)
        elif key == "scope" and value not in SCOPES:
            raise ValueError(f"Invalid scope: {value!r}; need one of {', '.join(SCOPES)}.")
        elif key == "scale" and isinstance(hparams.get("u"), str):
            check_choice("scale", value, SCALES)


def check_rule_thresholds(rule: Rule, hparams: Mapping[str, Any], side: str) -> None:
    """Raise ValueError unless the thresholds are in order, or "auto" where the rule can choose them."""
    u, d, zone = hparams["u"], hparams.get("d", 0.0), hparams.get("dead_zone", 0.0)
    name_of_u, name_of_d = (PUBLIC_NAMES[side][key] for key in ("u", "d"))
    zone = 0.0 if is_auto(zone) else zone
    for name, value in ((name_of_u, u), (name_of_d, d)):
        if isinstance(value, Mapping) and any(map(is_auto, value.values())):
            raise ValueError(f'Invalid {name}: {value}; "auto" is for all parameters. Write {name}="auto".')
    if is_auto(u):
        if rule.auto_u_limits is None:
            raise ValueError(
                f'Invalid {name_of_u}: "auto" is for biclip, biclip-l2 and l2clip, not for {rule.name}, whose step is '
                "not limited by it. Give a number."
            )
        try:
            ratio_of_auto(d)
        except ValueError as error:
            raise ValueError(_by_public_names(str(error), side)) from None
        check_threshold_settings(math.inf, 0.0, zone, side)
        return
    check_threshold_settings(u, 0.0 if is_auto(d) else d, zone, side)
    if is_auto(d):
        try:
            lower_thresholds(u)
        except ValueError as error:
            raise ValueError(_by_public_names(str(error), side)) from None


def lower_thresholds(u: Any) -> Any:
    """Return d="auto" for a u that is a number, a tensor, or several of them in a mapping or a list.

    Examples:
        >>> lower_thresholds({"*.bias": 3.0, "*": 1.5})
        {'*.bias': 1.0, '*': 0.5}
    """
    if isinstance(u, Mapping):
        return {pattern: lower_of_auto(upper) for pattern, upper in u.items()}
    return [lower_of_auto(upper) for upper in u] if isinstance(u, list) else lower_of_auto(u)


def _by_public_names(message: str, side: str) -> str:
    return re.sub(r"\b([ud])(?=[= ,.])", rf"{side[0]}_\1", message)


def _is_fraction(value: Any) -> bool:
    """Whether a value is a number in [0, 1), or a tensor with one such element."""
    return not isinstance(value, bool | str) and hasattr(value, "__float__") and 0 <= float(value) < 1


def _are_patterns(value: Any) -> bool:
    patterns = [value] if isinstance(value, str) else value
    return isinstance(patterns, Sequence) and all(isinstance(p, str) and p for p in patterns) and len(patterns) > 0


def check_threshold_settings(u: Any, d: Any, dead_zone: Any, side: str) -> None:
    """Raise ValueError unless 0 <= d <= u, for numbers, tensors, and mappings from patterns.

    If both are mappings, thresholds of equal patterns are compared; otherwise each with each.
    """
    if isinstance(u, Mapping) and isinstance(d, Mapping):
        for pattern in u.keys() & d.keys():
            check_threshold_settings(u[pattern], d[pattern], dead_zone, side)
        return
    for upper in u.values() if isinstance(u, Mapping) else [u]:
        for lower in d.values() if isinstance(d, Mapping) else [d]:
            try:
                check_thresholds(upper, lower, dead_zone)
            except ValueError as error:
                raise ValueError(_by_public_names(str(error), side)) from None


def per_parameter(value: Any, names: Sequence[str], setting: str) -> Any:
    """Return the setting of every parameter if it is a mapping from patterns, else the setting itself.

    The first pattern that fits a name counts; "*" fits all.

    Examples:
        >>> per_parameter({"*.bias": 1.0, "*": 0.5}, ["layer.weight", "layer.bias"], "i_u")
        [0.5, 1.0]
    """
    if not isinstance(value, Mapping):
        return value
    result = []
    for name in names:
        fitting = [pattern for pattern in value if fnmatch.fnmatchcase(name, pattern)]
        if not fitting:
            raise ValueError(
                f"Invalid {setting}: no pattern of {sorted(value)} fits the parameter {name!r}. "
                'Add it, or "*" as the last one.'
            )
        result.append(value[fitting[0]])
    return result
