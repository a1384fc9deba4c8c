"""An algorithm is two rules with settings: what a node does, and what is done with the mean displacement.

    tailopt.algorithm("adam-biclip", ilr=0.5, olr=1e-3, oeps=1e-5, i_u=1e-2, i_d=1e-3)

Names are outer-inner. Every pair of an outer and an inner rule is an algorithm; the table below lists those of the
paper, with what differs from a plain pair. Settings have the paper's column names: `ilr`, `i_u`, `i_d`, `ieps` inside,
`olr`, `o_u`, `o_d`, `oeps` outside. i_u, i_d, o_u and o_d may be numbers, tensors that broadcast against a parameter
(rows, columns), or mappings from patterns of parameter names to either.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from tailopt.clipping.operators import check_thresholds
from tailopt.rules.l2clip import SCOPES
from tailopt.rules.rule import Rule
from tailopt.rules.table import INNER, OUTER
from tailopt.rules.torch_optim import torch_rule

InnerState = Literal["reset", "keep"]

# name -> outer, inner; what is not in this table is a plain pair of names
ALGORITHMS: Mapping[str, tuple[str, str]] = {
    "avg-sgd": ("avg", "sgd"),
    "avg-l2clip": ("avg", "l2clip"),
    "avg-biclip-l2": ("avg", "biclip-l2"),
    "avg-biclip": ("avg", "biclip"),
    "avg-adagrad": ("avg", "adagrad"),
    "avg-adam": ("avg", "adam"),
    "adagrad-sgd": ("adagrad", "sgd"),
    "rmsprop-sgd": ("rmsprop", "sgd"),
    "adam-sgd": ("adam", "sgd"),
    "adam-l2clip": ("adam", "l2clip"),
    "adagrad-biclip": ("adagrad", "biclip"),
    "rmsprop-biclip": ("rmsprop", "biclip"),
    "adam-biclip": ("adam", "biclip"),
    "adam-biclip-l2": ("adam", "biclip-l2"),
    "adam2": ("adam", "adam"),
    "bi2clip": ("biclip", "biclip"),
    "bi2clip-l2": ("biclip-l2", "biclip-l2"),
    "diloco": ("nesterov", "adamw"),
}
# What an algorithm has beyond its two rules.
EXTRAS: Mapping[str, Mapping[str, Any]] = {
    "adam2": {"send_preconditioner": True},
    "diloco": {"inner_state": "keep"},
}
# Settings that are options of a rule elsewhere and must be given here.
REQUIRED: Mapping[str, tuple[str, ...]] = {"diloco": ("weight_decay",)}

# A rule's own word -> the word of the public interface, by level. What is not here keeps its word.
PUBLIC = {
    "inner": {"lr": "ilr", "u": "i_u", "d": "i_d", "eps": "ieps", "betas": "inner_betas"},
    "outer": {"lr": "olr", "u": "o_u", "d": "o_d", "eps": "oeps", "betas": "outer_betas"},
}
# Nobody's to set: inside, Adam is torch's own.
FIXED = {"inner": {"bias_correction"}, "outer": set[str]()}


@dataclass(frozen=True)
class Algorithm:
    """Two optimizers, one inside a node and one for the mean displacement.

    Args:
        outer: a name (avg, sgd, nesterov, biclip, biclip-l2, adagrad, rmsprop, adam) or a class of torch.optim.
        inner: a name (sgd, l2clip, biclip, biclip-l2, adagrad, adam, adamw, sign, biclip+adam,
            biclip+adamw) or a class.
        outer_settings: by the names of `algorithm`; of a class, its own keyword arguments.
        inner_settings: likewise.
        inner_state: "reset" makes the inner optimizer anew in every round, "keep" lets every node keep its own.
        send_preconditioner: of adam over adam: the outer second moment starts the nodes' (True), without being
            corrected ("raw"), or not at all (False).
        name: how it is called in tables; outer-inner by default.

    Examples:
        >>> import torch
        >>> settings = {"outer_settings": {"lr": 1e-3}, "inner_settings": {"lr": 0.1}}
        >>> Algorithm(outer=torch.optim.Adam, inner=torch.optim.SGD, **settings).name
        'Adam-SGD'
    """

    outer: str | type[Optimizer]
    inner: str | type[Optimizer]
    outer_settings: Mapping[str, Any] = field(default_factory=dict)
    inner_settings: Mapping[str, Any] = field(default_factory=dict)
    inner_state: InnerState = "reset"
    send_preconditioner: bool | Literal["raw"] = False
    name: str = ""

    def __post_init__(self) -> None:
        if self.inner_state not in ("reset", "keep"):
            raise ValueError(f'Invalid inner_state: {self.inner_state!r}; need "reset" or "keep".')
        if self.send_preconditioner not in (True, False, "raw"):
            raise ValueError(f'Invalid send_preconditioner: {self.send_preconditioner!r}; need True, False or "raw".')
        if self.send_preconditioner and (self.outer, self.inner) != ("adam", "adam"):
            raise ValueError("Invalid send_preconditioner: only adam over adam (adam2) has one to send.")
        if self.send_preconditioner and self.inner_state == "keep":
            raise ValueError('Invalid inner_state: "keep" and a sent preconditioner exclude each other.')
        if not self.name:
            object.__setattr__(self, "name", f"{_called(self.outer)}-{_called(self.inner)}")
        check_half(self.outer, self.outer_settings, "outer", f"{self.name} (outer settings)")
        check_half(self.inner, self.inner_settings, "inner", f"{self.name} (inner settings)")

    def rule(self, level: str) -> Rule:
        """The update rule of "outer" or "inner"."""
        return rule_of(self.outer if level == "outer" else self.inner, level)

    def numbers(self, level: str) -> dict[str, Any]:
        """The rule's numbers by its own words, defaults filled in."""
        if level == "outer":
            return numbers_of(self.outer, self.outer_settings, level)
        filled = numbers_of(self.inner, self.inner_settings, level)
        if self.send_preconditioner == "raw":
            filled["bias_correction"] = "first"
        return filled

    @property
    def settings(self) -> dict[str, Any]:
        """All numbers by their public names, schedulable ones under `ilr`, `i_u`, ... whatever the optimizers are.

        An argument that two classes share, with another value for each, has its level before its name.
        """
        found: dict[str, Any] = {}
        levels = {
            "outer": (self.outer_settings, self.inner_settings),
            "inner": (self.inner_settings, self.outer_settings),
        }
        for level, (given, other) in levels.items():
            for word, value in self.numbers(level).items():
                if word in PUBLIC[level]:
                    found[PUBLIC[level][word]] = value
                elif word in given:
                    shared = word in other and other[word] != value
                    found[f"{level}_{word}" if shared else word] = value
        return found


def algorithm(name: str, **settings: Any) -> Algorithm:
    """An algorithm by name, with all its settings.

    Args:
        name: outer-inner, or one of bi2clip, bi2clip-l2, adam2, diloco; the paper's spelling is understood too, in any
            case and with or without hyphens: `RMS-TailClip` is rmsprop-biclip. `SludgeClip`, the paper's Avg-L2Clip
            with failing nodes, is avg-l2clip; who fails is said to `simulate` (participation, drops).
        settings: the settings of both optimizers, and where they apply the keywords weight_decay, dead_zone, scope,
            momentum, inner_betas, outer_betas, bias_correction, inner_state and send_preconditioner.

    Raises:
        ValueError: for an unknown name, and for a setting that is unknown, missing or superfluous; it lists the right
            ones.

    Examples:
        >>> algo = algorithm("bi2clip", ilr=0.5, olr=1.0, i_u=1e-4, i_d=5e-5, o_u=1e-4, o_d=1e-4)
        >>> algo.outer, algo.inner, algo.inner_settings["i_u"]
        ('biclip', 'biclip', 0.0001)
    """
    known, (outer, inner) = _resolve(name)
    extras = dict(EXTRAS.get(known, {}))
    extras |= {key: settings.pop(key) for key in ("inner_state", "send_preconditioner") if key in settings}
    levels = {"outer": OUTER[outer], "inner": INNER[inner]}
    required: set[str] = set(REQUIRED.get(known, ()))
    optional: set[str] = set()
    parts: dict[str, dict[str, Any]] = {}
    for level, rule in levels.items():
        need, may = _names(rule, level)
        if level == "outer" and "dead_zone" in INNER[inner].options:
            may -= {"dead_zone"}  # a coordinate that no node moved has no displacement to lift; the scope is for both
        required |= need
        optional |= may
        parts[level] = {key: value for key, value in settings.items() if key in need | may}
    _check_names(known, settings, required, optional - required | {"inner_state", "send_preconditioner"})
    return Algorithm(outer, inner, parts["outer"], parts["inner"], name=known, **extras)


def rule_of(optimizer: str | type[Optimizer], level: str) -> Rule:
    """Return the update rule of a name or a class of torch.optim, as "outer" or "inner"."""
    table = OUTER if level == "outer" else INNER
    if not isinstance(optimizer, str):
        return torch_rule(optimizer)
    if optimizer not in table:
        raise ValueError(f"Unknown {level} optimizer: {optimizer!r}; need one of {', '.join(table)}, or a class.")
    return table[optimizer]


def numbers_of(optimizer: str | type[Optimizer], settings: Mapping[str, Any], level: str) -> dict[str, Any]:
    """Return the hyperparameters of a rule by its own names, from settings by public names; defaults are filled in."""
    rule = rule_of(optimizer, level)
    public = PUBLIC[level] if isinstance(optimizer, str) else {}
    filled = dict(rule.options) if public else {}
    names = {word: public.get(word, word) for word in _words(rule)}
    return {**filled, **{word: settings[name] for word, name in names.items() if name in settings}}


def check_half(optimizer: str | type[Optimizer], settings: Mapping[str, Any], level: str, what: str) -> None:
    """Refuse settings of one of the two optimizers that are unknown, missing or out of range."""
    _check_names(what, settings, *_names(rule_of(optimizer, level), level))
    _check_values(numbers_of(optimizer, settings, level), level)


def by_parameter(value: Any, names: Sequence[str], setting: str) -> Any:
    """A setting for each parameter: what a mapping from patterns gives, else the setting itself.

    The first pattern that fits a name counts; "*" fits all.

    Examples:
        >>> by_parameter({"*.bias": 1.0, "*": 0.5}, ["layer.weight", "layer.bias"], "i_u")
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


def _called(optimizer: str | type[Optimizer]) -> str:
    return optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", repr(optimizer))


def letters(name: str) -> str:
    """A name as letters and digits alone, in the library's words: what the paper's spellings have in common.

    TailClip is its word for BiClip or L2Clip, and here means BiClip, whose d may be 0; RMS is RMSProp; a clip of SGD is
    that clip.

    Examples:
        >>> letters("RMS-$TailClip$"), letters("Bi^2Clip (L_2)"), letters("SludgeClip-SGD")
        ('rmspropbiclip', 'bi2clipl2', 'sludgeclip')
    """
    plain = "".join(c for c in name.lower().replace("²", "2") if c.isalnum() and c.isascii())
    plain = plain.replace("tailclip", "biclip").replace("coordinatewise", "")
    plain = re.sub(r"^rms(?!prop)", "rmsprop", plain)
    return re.sub(r"clip(l2)?sgd$", r"clip\1", plain)


def _resolve(name: str) -> tuple[str, tuple[str, str]]:
    """The library's spelling of a name, with its two rules."""
    if not isinstance(name, str):
        raise TypeError(f"Invalid algorithm: {name!r}; need a name, such as 'adam-biclip'.")
    plain = name.strip().lower().replace("l_2", "l2")  # $L_2$Clip
    plain = re.sub(r"[\s_]+", "-", plain).replace("^", "").replace("(", "").replace(")", "")
    plain = plain.replace("$", "").replace("{", "").replace("}", "").replace("²", "2")
    if plain == "adam-adam":
        plain = "adam2"
    if plain in ALGORITHMS:
        return plain, ALGORITHMS[plain]
    for outer in OUTER:
        inner = plain.removeprefix(f"{outer}-")
        if inner != plain and inner in INNER:
            twin = [known for known, pair in ALGORITHMS.items() if pair == (outer, inner) and known not in EXTRAS]
            return (twin[0] if twin else plain), (outer, inner)
    found = _by_letters().get(letters(name))
    if found is not None:
        return found
    near = difflib.get_close_matches(plain, [*ALGORITHMS, *(f"{o}-{i}" for o in OUTER for i in INNER)], n=1)
    raise ValueError(
        f"Unknown algorithm: {name!r}{f'; did you mean {near[0]!r}?' if near else '.'} "
        f"The paper's: {', '.join(ALGORITHMS)}. Others are any of {', '.join(OUTER)} - any of {', '.join(INNER)}."
    )


@functools.cache
def _by_letters() -> dict[str, tuple[str, tuple[str, str]]]:
    """Every algorithm by the letters of its name; a name of the table before a plain pair."""
    pairs = {letters(f"{outer}-{inner}"): _resolve(f"{outer}-{inner}") for outer in OUTER for inner in INNER}
    named = {letters(name): (name, pair) for name, pair in ALGORITHMS.items()}
    # Avg-L2Clip with failing nodes; who fails is for `simulate` to say (participation, drops).
    return {**pairs, **named, "sludgeclip": ("avg-l2clip", ALGORITHMS["avg-l2clip"])}


def _words(rule: Rule) -> tuple[str, ...]:
    return (*rule.settings, *rule.options)


def _names(rule: Rule, level: str) -> tuple[set[str], set[str]]:
    """The public names that a rule needs, and those that it may be given."""
    public = PUBLIC[level] if rule in (OUTER if level == "outer" else INNER).values() else {}
    fixed = FIXED[level] if public else set()
    options = {public.get(word, word) for word in rule.options if word not in fixed}
    return {public.get(word, word) for word in rule.settings}, options


def _check_names(what: str, given: Mapping[str, Any], required: set[str], optional: set[str]) -> None:
    unknown = [key for key in given if key not in required | optional]
    missing = sorted(required - given.keys())
    if unknown or missing:
        problems = [f"unknown {', '.join(map(repr, unknown))}"] if unknown else []
        problems += [f"missing {', '.join(map(repr, missing))}"] if missing else []
        allowed = f" It may have {', '.join(sorted(optional))}." if optional else ""
        need = f"needs {', '.join(sorted(required))}." if required else "needs no setting."
        raise ValueError(f"Invalid settings for {what}: {'; '.join(problems)}. It {need}{allowed}")


def _check_values(numbers: Mapping[str, Any], level: str) -> None:
    """Every number in its range, before anything moves."""
    public = PUBLIC[level]
    for word, value in numbers.items():
        name = public.get(word, word)
        if word in ("lr", "eps", "weight_decay") and not isinstance(value, Tensor | Mapping):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"Invalid {name}: {value!r}; need 0 <= {name} < inf.")
        elif word == "momentum" and not _is_share(value):
            raise ValueError(f"Invalid {name}: {value!r}; need 0 <= {name} < 1.")
        elif word == "betas" and not (
            isinstance(value, Sequence) and len(value) == 2 and all(_is_share(beta) for beta in value)
        ):
            raise ValueError(f"Invalid {name}: {value!r}; need two numbers in [0, 1).")
        elif word == "scope" and value not in SCOPES:
            raise ValueError(f"Invalid scope: {value!r}; need one of {', '.join(SCOPES)}.")
    if "u" in numbers:
        zone = numbers.get("dead_zone", 0.0)
        zone = 0.0 if isinstance(zone, str) and zone == "auto" else zone
        check_settings(numbers["u"], numbers.get("d", 0.0), zone, level)


def _is_share(value: Any) -> bool:
    """Whether this is a number in [0, 1), a tensor with one element included."""
    return not isinstance(value, bool | str) and hasattr(value, "__float__") and 0 <= float(value) < 1


def check_settings(u: Any, d: Any, dead_zone: Any, level: str) -> None:
    """0 <= d <= u for numbers and tensors, and pattern by pattern where both are mappings with the same patterns."""
    if isinstance(u, Mapping) and isinstance(d, Mapping):
        for pattern in u.keys() & d.keys():
            check_settings(u[pattern], d[pattern], dead_zone, level)
        return
    for upper in u.values() if isinstance(u, Mapping) else [u]:
        for lower in d.values() if isinstance(d, Mapping) else [d]:
            try:
                check_thresholds(upper, lower, dead_zone)
            except ValueError as error:
                prefix = level[0]
                message = re.sub(r"\b([ud])(?=[= ,.])", rf"{prefix}_\1", str(error))
                raise ValueError(message) from None
