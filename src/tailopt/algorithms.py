"""An algorithm is a pair of update rules with settings: one for the local steps, one for the mean displacement.

    tailopt.algorithm("adam-biclip", ilr=0.5, olr=1e-3, oeps=1e-5, i_u=1e-2, i_d=1e-3)

Names are outer-inner. Every pair of an outer and an inner rule is an algorithm; the table below lists the paper's.
Settings have the paper's column names: `ilr`, `i_u`, `i_d`, `ieps` for the inner rule, `olr`, `o_u`, `o_d`, `oeps` for
the outer one. i_u, i_d, o_u and o_d may be numbers, tensors that broadcast against a parameter (rows, columns), or
mappings from patterns of parameter names to either; or "auto", which `rounds.auto_thresholds` turns into numbers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch.optim import Optimizer

from tailopt.arguments import did_you_mean
from tailopt.optimizers.auto_thresholds import is_auto
from tailopt.rules.rule import Rule
from tailopt.rules.table import INNER, OUTER
from tailopt.rules.torch_optim import torch_rule
from tailopt.settings import FIXED_KEYS, PUBLIC_NAMES, check_rule_thresholds, check_values

InnerState = Literal["reset", "keep"]

# The paper's: name -> outer rule, inner rule. Any other name is the names of two rules.
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
# Algorithms that the paper does not have: what others use, and what ours are compared with.
OTHERS: Mapping[str, tuple[str, str]] = {
    "yogi-sgd": ("yogi", "sgd"),
    "muloco": ("nesterov", "muon"),  # MuLoCo (arXiv 2505.23725): diloco with Muon inside
}
NAMED: Mapping[str, tuple[str, str]] = {**ALGORITHMS, **OTHERS}
# Names of other papers: that of failing nodes, which are an argument of `simulate` (participation, drops), and those of
# federated averaging (arXiv 1602.05629) and of Adaptive Federated Optimization (arXiv 2003.00295).
ALIASES: Mapping[str, str] = {
    "sludgeclip": "avg-l2clip",
    "fedavg": "avg-sgd",
    "fedadagrad": "adagrad-sgd",
    "fedadam": "adam-sgd",
    "fedyogi": "yogi-sgd",
}
# Further arguments of `Algorithm`, for algorithms that are more than their two rules.
EXTRAS: Mapping[str, Mapping[str, Any]] = {
    "adam2": {"send_preconditioner": True},
    "diloco": {"inner_state": "keep"},
    "muloco": {"inner_state": "keep"},
}
# Settings that are optional for the rule, but required in this algorithm.
REQUIRED: Mapping[str, tuple[str, ...]] = {"diloco": ("weight_decay",), "muloco": ("weight_decay",)}


@dataclass(frozen=True)
class Algorithm:
    """Two optimizers: one for the local steps of a node, one for the mean displacement.

    Args:
        outer: a name (avg, sgd, nesterov, biclip, biclip-l2, adagrad, rmsprop, adam, yogi) or a class.
        inner: a name (sgd, l2clip, biclip, biclip-l2, adagrad, adam, adamw, sign, muon, biclip+adam,
            biclip+adamw) or a class.
        outer_settings: by the names of `algorithm`; for a class, its keyword arguments.
        inner_settings: the same for the inner optimizer.
        inner_state: "reset" creates a new inner optimizer in every round, "keep" lets every node keep its own.
        send_preconditioner: for adam over adam: the nodes start from the outer second moment (True), from it without
            its bias correction ("raw"), or from zero (False).
        name: for tables; outer-inner by default.

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
            raise ValueError(
                f"Invalid send_preconditioner: {self.send_preconditioner!r} with {_optimizer_name(self.outer)} over "
                f"{_optimizer_name(self.inner)}; only adam over adam (adam2) has one to send."
            )
        if self.send_preconditioner and self.inner_state == "keep":
            raise ValueError(f"Invalid inner_state: 'keep' excludes send_preconditioner={self.send_preconditioner!r}.")
        if not self.name:
            object.__setattr__(self, "name", f"{_optimizer_name(self.outer)}-{_optimizer_name(self.inner)}")
        check_side(self.outer, self.outer_settings, "outer", f"{self.name} (outer settings)")
        check_side(self.inner, self.inner_settings, "inner", f"{self.name} (inner settings)")
        named = isinstance(self.outer, str) and isinstance(self.inner, str)  # a class may have a `scale` of its own
        if (
            named
            and "scale" in {**self.outer_settings, **self.inner_settings}
            and not any(is_auto(self.hparams(side).get("u")) for side in ("outer", "inner"))
        ):
            raise ValueError('Invalid scale: no threshold is "auto", so it does nothing. Drop it, or set i_u="auto".')

    def rule(self, side: str) -> Rule:
        """Return the update rule of a side."""
        return rule_of(self.outer if side == "outer" else self.inner, side)

    def hparams(self, side: str) -> dict[str, Any]:
        """Return the hyperparameters of a side by the rule's own keys, defaults filled in, before any schedule."""
        if side == "outer":
            return hparams_of(self.outer, self.outer_settings, side)
        hparams = hparams_of(self.inner, self.inner_settings, side)
        if self.send_preconditioner == "raw":
            hparams["bias_correction"] = "first"
        return hparams

    @property
    def settings(self) -> dict[str, Any]:
        """All settings by their public names; `ilr`, `i_u`, ... also if the optimizers are classes.

        An argument that both classes have, with different values, gets its side as a prefix.
        """
        by_public_name: dict[str, Any] = {}
        sides = {
            "outer": (self.outer_settings, self.inner_settings),
            "inner": (self.inner_settings, self.outer_settings),
        }
        for side, (settings, other_settings) in sides.items():
            for key, value in self.hparams(side).items():
                public = PUBLIC_NAMES[side].get(key, key)
                # a momentum that was not given is left out: older run folders have the same text
                always = key in PUBLIC_NAMES[side] and key != "momentum"
                if always or (public != key and public in settings):
                    by_public_name[public] = value
                elif key in settings:
                    ambiguous = key in other_settings and other_settings[key] != value
                    by_public_name[f"{side}_{key}" if ambiguous else key] = value
        return by_public_name


def algorithm(name: str, **settings: Any) -> Algorithm:
    """Return an algorithm by its name, with all its settings.

    Args:
        name: outer-inner, or one of bi2clip, bi2clip-l2, adam2, diloco, muloco; the paper's spelling is understood too,
            in any case and with or without hyphens: `RMS-TailClip` is rmsprop-biclip. `SludgeClip`, the paper's
            Avg-L2Clip with failing nodes, is avg-l2clip; which nodes fail is an argument of `simulate` (participation,
            drops).
            `FedAvg`, `FedAdagrad`, `FedAdam` and `FedYogi` are avg-, adagrad-, adam- and yogi-sgd.
        settings: the settings of both optimizers, and if they apply the keywords weight_decay, dead_zone, scope,
            momentum, inner_momentum, inner_betas, outer_betas, bias_correction, inner_state and send_preconditioner.
            i_u="auto" chooses the threshold from the gradients, and o_u="auto" from the mean displacements: then ilr
            and olr are the most that a step moves, i_d and o_d are "auto" or 0, and `scale` is "first" or "follow".

    Raises:
        ValueError: the name is unknown, or a setting is unknown, missing or superfluous; the message lists the valid
            ones.

    Examples:
        >>> algo = algorithm("bi2clip", ilr=0.5, olr=1.0, i_u=1e-4, i_d=5e-5, o_u=1e-4, o_d=1e-4)
        >>> algo.outer, algo.inner, algo.inner_settings["i_u"]
        ('biclip', 'biclip', 0.0001)
        >>> algorithm("avg-biclip", ilr=0.05, i_u="auto", i_d="auto").settings
        {'ilr': 0.05, 'i_u': 'auto', 'i_d': 'auto'}
    """
    canonical, (outer, inner) = resolve_name(name)
    extras = dict(EXTRAS.get(canonical, {}))
    extras |= {key: settings.pop(key) for key in ("inner_state", "send_preconditioner") if key in settings}
    sides = {"outer": OUTER[outer], "inner": INNER[inner]}
    required: set[str] = set(REQUIRED.get(canonical, ()))
    optional: set[str] = set()
    by_side: dict[str, dict[str, Any]] = {}
    for side, rule in sides.items():
        need, may = _public_names(rule, side)
        if side == "outer" and "dead_zone" in INNER[inner].defaults:
            # A coordinate that no node moved has no displacement to lift, so dead_zone is for the inner rule alone;
            # `scope` is for both.
            may -= {"dead_zone"}
        required |= need
        optional |= may
        by_side[side] = {key: value for key, value in settings.items() if key in need | may}
    _check_names(canonical, settings, required, optional - required | {"inner_state", "send_preconditioner"})
    return Algorithm(outer, inner, by_side["outer"], by_side["inner"], name=canonical, **extras)


def canonical_name(name: str) -> str:
    """Return this library's spelling of an algorithm's name; ValueError for an unknown one.

    Examples:
        >>> canonical_name("RMS-TailClip")
        'rmsprop-biclip'
    """
    return resolve_name(name)[0]


def rule_names(name: str) -> tuple[str, str]:
    """Return the names of an algorithm's outer and inner rule; ValueError for an unknown algorithm.

    Examples:
        >>> rule_names("bi2clip"), rule_names("FedYogi")
        (('biclip', 'biclip'), ('yogi', 'sgd'))
    """
    return resolve_name(name)[1]


def rule_of(optimizer: str | type[Optimizer], side: str) -> Rule:
    """Return the update rule of a name, or of a class of torch.optim, on the side "outer" or "inner"."""
    table = OUTER if side == "outer" else INNER
    if not isinstance(optimizer, str):
        return torch_rule(optimizer)
    if optimizer not in table:
        raise ValueError(f"Unknown {side} optimizer: {optimizer!r}; need one of {', '.join(table)}, or a class.")
    return table[optimizer]


def hparams_of(optimizer: str | type[Optimizer], settings: Mapping[str, Any], side: str) -> dict[str, Any]:
    """Return a rule's hyperparameters by its own keys, from settings by their public names; defaults are filled in."""
    rule = rule_of(optimizer, side)
    # A class of torch has its own keyword arguments, and fills in its own defaults.
    public = PUBLIC_NAMES[side] if isinstance(optimizer, str) else {}
    defaults = dict(rule.defaults) if public else {}
    names = {key: public.get(key, key) for key in _keys(rule)}
    values = {key: settings[name] for key, name in names.items() if name in settings}
    for key in ("betas", "adamw_on"):  # elsewhere a list has a value for each parameter
        if isinstance(values.get(key), list):
            values[key] = tuple(values[key])
    hparams = {**defaults, **values}
    if public and not is_auto(hparams.get("u")):
        hparams.pop("scale", None)  # the thresholds are what they are
    return hparams


def check_side(optimizer: str | type[Optimizer], settings: Mapping[str, Any], side: str, what: str) -> None:
    """Refuse settings of one side that are unknown, missing or out of range; `what` names it in the message."""
    _check_names(what, settings, *_public_names(rule_of(optimizer, side), side))
    hparams = hparams_of(optimizer, settings, side)
    check_values(hparams, side)
    if "u" in hparams:
        check_rule_thresholds(rule_of(optimizer, side), hparams, side)


def _optimizer_name(optimizer: str | type[Optimizer]) -> str:
    return optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", repr(optimizer))


def spelling_key(name: str) -> str:
    """Return a key that is equal for all spellings of an algorithm: its letters and digits, in this library's terms.

    The paper's TailClip is BiClip or L2Clip, and here means BiClip, whose d may be 0; RMS is RMSProp; a clip of SGD is
    that clip.

    Examples:
        >>> spelling_key("RMS-$TailClip$"), spelling_key("Bi^2Clip (L_2)"), spelling_key("SludgeClip-SGD")
        ('rmspropbiclip', 'bi2clipl2', 'sludgeclip')
    """
    plain = "".join(c for c in name.lower().replace("²", "2") if c.isalnum() and c.isascii())
    plain = plain.replace("tailclip", "biclip").replace("coordinatewise", "")
    plain = re.sub(r"^rms(?!prop)", "rmsprop", plain)
    return re.sub(r"clip(l2)?sgd$", r"clip\1", plain)


def resolve_name(name: str) -> tuple[str, tuple[str, str]]:
    """Return the library's spelling of a name, and its two rules."""
    if not isinstance(name, str):
        raise TypeError(f"Invalid algorithm: {name!r}; need a name, such as 'adam-biclip'.")
    plain = name.strip().lower().replace("l_2", "l2")  # $L_2$Clip
    plain = re.sub(r"[\s_]+", "-", plain).replace("^", "").replace("(", "").replace(")", "")
    plain = plain.replace("$", "").replace("{", "").replace("}", "").replace("²", "2")
    if plain == "adam-adam":
        plain = "adam2"
    if plain in NAMED:
        return plain, NAMED[plain]
    for outer in OUTER:
        inner = plain.removeprefix(f"{outer}-")
        if inner != plain and inner in INNER:
            # biclip-biclip is bi2clip; nesterov-adamw is not diloco, which also keeps its inner state
            same = [other for other, pair in NAMED.items() if pair == (outer, inner) and other not in EXTRAS]
            return (same[0] if same else plain), (outer, inner)
    algorithm = _by_spelling().get(spelling_key(name))
    if algorithm is not None:
        return algorithm
    pairs = [f"{outer}-{inner}" for outer in OUTER for inner in INNER]
    near = did_you_mean(plain, [*NAMED, *(pair for pair in pairs if pair not in NAMED)])
    raise ValueError(
        f"Unknown algorithm: {name!r}{near} "
        f"The paper's: {', '.join(ALGORITHMS)}. Others: {', '.join(OTHERS)}, "
        f"and any of {', '.join(OUTER)} - any of {', '.join(INNER)}."
    )


@functools.cache
def _by_spelling() -> dict[str, tuple[str, tuple[str, str]]]:
    """Return every algorithm by its spelling key; a name of the table wins over a pair of rules."""
    pairs = {spelling_key(f"{outer}-{inner}"): resolve_name(f"{outer}-{inner}") for outer in OUTER for inner in INNER}
    named = {spelling_key(name): (name, pair) for name, pair in NAMED.items()}
    return {**pairs, **named, **{alias: (name, NAMED[name]) for alias, name in ALIASES.items()}}


def _keys(rule: Rule) -> tuple[str, ...]:
    return (*rule.required, *rule.defaults)


def _public_names(rule: Rule, side: str) -> tuple[set[str], set[str]]:
    """Return the public names of a rule's required and of its optional settings."""
    public = PUBLIC_NAMES[side] if rule in (OUTER if side == "outer" else INNER).values() else {}
    fixed = FIXED_KEYS[side] if public else set()
    options = {public.get(key, key) for key in rule.defaults if key not in fixed}
    return {public.get(key, key) for key in rule.required}, options


def _check_names(owner: str, settings: Mapping[str, Any], required: set[str], optional: set[str]) -> None:
    """Raise ValueError unless the settings are all of the required and some of the optional ones."""
    unknown = [key for key in settings if key not in required | optional]
    missing = sorted(required - settings.keys())
    if unknown or missing:
        problems = [f"unknown {', '.join(map(repr, unknown))}"] if unknown else []
        problems += [f"missing {', '.join(map(repr, missing))}"] if missing else []
        allowed = f" It may have {', '.join(sorted(optional))}." if optional else ""
        need = f"needs {', '.join(sorted(required))}." if required else "needs no setting."
        raise ValueError(f"Invalid settings for {owner}: {'; '.join(problems)}. It {need}{allowed}")
