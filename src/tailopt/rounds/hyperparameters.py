"""An algorithm's hyperparameters at a moment: schedules applied, name patterns resolved, the order of thresholds kept.

A schedule counts rounds, or with per="step" the local steps that the node itself has taken over the whole run.
Thresholds that are "auto" are those of the coming round (`auto_thresholds.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch.optim import Optimizer

from tailopt import schedules as scheduling
from tailopt.algorithms import Algorithm, check_side, hparams_of, rule_of
from tailopt.optimizers.auto_thresholds import is_auto
from tailopt.rounds.auto_thresholds import AutoThresholds, AutoThresholdsByLevel
from tailopt.rounds.guard import Bound, bound
from tailopt.rules.rule import Hyperparameters, Rule
from tailopt.settings import PUBLIC_NAMES, check_threshold_settings, lower_thresholds, per_parameter

SCHEDULABLE = ("lr", "lr_adamw", "u", "d")
CACHED = 64  # entries; those of past rounds are dropped together
MOMENTS = (1, 2, 3, 10, 100, 1000)  # at which schedules are compared, beside quarters of the run
TORCH_LIMIT = 10_000  # of those moments for torch's schedulers, which reach a moment one step at a time
T = TypeVar("T")


class RuleHyperparameters:
    """The hyperparameters of one rule, in any round and local step.

    Args:
        side: "outer" or "inner".
        rule: the update rule.
        base: its hyperparameters without schedules, by the rule's own names.
        schedules: by the rule's own names.
        names: of the parameters, against which patterns are resolved.
        dims: how many dimensions each of them has, for rules that ask for it.

    Attributes:
        auto_thresholds: those of the coming round, where u is "auto"; else None.
    """

    def __init__(
        self,
        side: str,
        rule: Rule,
        base: Mapping[str, Any],
        schedules: Mapping[str, Any],
        names: Sequence[str],
        dims: Sequence[int] = (),
    ) -> None:
        self.side, self.rule, self.base, self.schedules = side, rule, dict(base), dict(schedules)
        self.by_step = any(scheduling.per(schedule) == "step" for schedule in self.schedules.values())
        self._names, self._dims = list(names), list(dims)
        self._cache: dict[Any, Any] = {}
        self._resolved: dict[str, list[Any]] = {}
        self.auto_thresholds = AutoThresholds.of(side, rule, base) if is_auto(base.get("u")) else None
        # what `at` returns where nothing varies: with small models, even one look-up in a dict per step can be measured
        self._constant: Hyperparameters | None = None
        for key, schedule in self.schedules.items():
            if key in ("u", "d") and is_auto(self.base[key]):
                name = PUBLIC_NAMES[side][key]
                raise ValueError(f'Invalid schedule of {name}: "auto" is chosen anew in every round. Leave one out.')
            if side == "outer" and scheduling.per(schedule) == "step":
                name = PUBLIC_NAMES[side][key]
                raise ValueError(
                    f'Invalid schedule of {name}: per="step" counts local steps, which an outer rule has not.'
                )

    def at(self, t: int, steps_done: int = 0) -> Hyperparameters:
        """Return the hyperparameters in round t, for a node that has taken `steps_done` local steps before this one."""
        if self._constant is not None:
            return self._constant
        values = self._cached("hparams", t, steps_done, lambda: self._evaluated(t, steps_done + 1))
        if not self.schedules and self.auto_thresholds is None:
            self._constant = values
        return values

    def bound(self, t: int, steps_done: int, steps: int) -> Bound:
        """Return how far a node can move in `steps` local steps of round t."""
        return self._cached(
            ("bound", steps),
            t,
            steps_done,
            lambda: bound(self.rule, (self.at(t, steps_done + k) for k in range(steps))),
        )

    def sampled_schedules(self, rounds: int | None, steps: int) -> dict[str, dict[str, Any]]:
        """Return what the schedules give at some moments of a run, the last among them where it is known.

        Real nodes compare these. Numbers are rounded to 12 digits, since the last digit of a cosine differs between
        machines and is harmless. A schedule that fails at a moment has the error as its value there.
        """
        sampled: dict[str, dict[str, Any]] = {}
        for key, schedule in sorted(self.schedules.items()):
            name, per = PUBLIC_NAMES[self.side][key], scheduling.per(schedule)
            last = None if rounds is None else rounds if per == "round" else rounds * steps
            limit = last or TORCH_LIMIT
            if isinstance(schedule, scheduling.FromTorch):
                limit = min(limit, TORCH_LIMIT)
            quarters = () if last is None else (last // 4, last // 2, 3 * last // 4, last)
            moments = sorted({t for t in (*MOMENTS, *quarters) if 1 <= t <= limit})
            sampled[name] = {f"{per} {t}": _value_or_error(schedule, self.base[key], t, name) for t in moments}
        return sampled

    def _cached(self, quantity: str | tuple[str, int], t: int, steps_done: int, compute: Callable[[], T]) -> T:
        # what no schedule changes is computed once for the whole run
        version = 0 if self.auto_thresholds is None else self.auto_thresholds.version
        key = (quantity, t if self.schedules else 0, steps_done if self.by_step else 0, version)
        if key not in self._cache:
            if len(self._cache) > CACHED:
                self._cache.clear()
            self._cache[key] = compute()
        value: T = self._cache[key]
        return value

    def _evaluated(self, t: int, step: int) -> Hyperparameters:
        values: dict[str, Any] = {}
        for key, base in self.base.items():
            if self.auto_thresholds is not None and key in ("u", "d", "scale"):
                continue
            schedule, name = self.schedules.get(key), PUBLIC_NAMES[self.side].get(key, key)
            if schedule is not None:
                base = scheduling.value(schedule, base, step if scheduling.per(schedule) == "step" else t, name)
            values[key] = self._by_parameter(key) or per_parameter(base, self._names, name)
        if self.auto_thresholds is not None:
            return {**values, **self.auto_thresholds.hparams()}
        if is_auto(values.get("d")):
            values["d"] = lower_thresholds(values["u"])
        if "u" in values and self.schedules:
            self._check_order(values, t)
        return values

    def _by_parameter(self, key: str) -> list[Any]:
        """Return a hyperparameter that the rule itself resolves by parameter, once for the run; empty for any other."""
        if key not in self.rule.by_parameter:
            return []
        if key not in self._resolved:
            self._resolved[key] = self.rule.by_parameter[key](self.base[key], self._names, self._dims)
        return self._resolved[key]

    def _check_order(self, values: Hyperparameters, t: int) -> None:
        zone = values.get("dead_zone", 0.0)
        uppers, lowers = ([v] if not isinstance(v, list) else v for v in (values["u"], values.get("d", 0.0)))
        try:
            for i in range(max(len(uppers), len(lowers))):
                u, d = uppers[i if len(uppers) > 1 else 0], lowers[i if len(lowers) > 1 else 0]
                check_threshold_settings(u, d, 0.0 if zone == "auto" else zone, self.side)
        except ValueError as error:
            raise ValueError(f"{error} This is what the schedules give in round {t}.") from None


class AlgorithmHyperparameters:
    """The hyperparameters of both rules of an algorithm.

    Args:
        schedules: by public name (`ilr`, `o_u`, ...), or what `tailopt.theory` returns, or None.
        names: of the parameters.
        dims: how many dimensions each of them has, for rules that ask for it.
    """

    def __init__(self, algorithm: Algorithm, schedules: Any, names: Sequence[str], dims: Sequence[int] = ()) -> None:
        base = {side: algorithm.hparams(side) for side in ("outer", "inner")}
        schedulable = {
            PUBLIC_NAMES[side][key]: (side, key) for side in base for key in SCHEDULABLE if key in base[side]
        }
        by_side: dict[str, dict[str, Any]] = {"outer": {}, "inner": {}}
        for name, schedule in scheduling.check(schedules, schedulable).items():
            side, key = schedulable[name]
            by_side[side][key] = schedule
        self.outer, self.inner = (
            RuleHyperparameters(side, algorithm.rule(side), base[side], by_side[side], names, dims)
            for side in ("outer", "inner")
        )

    def check_first_round(self) -> None:
        """Evaluate both rules once: patterns that fit no parameter are refused before anything moves."""
        self.inner.at(1)
        self.outer.at(1)

    @property
    def auto_thresholds(self) -> AutoThresholdsByLevel:
        """The thresholds of both rules that are "auto"."""
        return AutoThresholdsByLevel(self.inner.auto_thresholds, self.outer.auto_thresholds)

    def schedules(self) -> dict[str, Any]:
        """Return the schedules, by the public name of what they change."""
        rules = (self.inner, self.outer)
        return {PUBLIC_NAMES[rule.side][key]: s for rule in rules for key, s in sorted(rule.schedules.items())}

    def sampled_schedules(self, rounds: int | None, steps: int) -> dict[str, dict[str, Any]]:
        """Return what all schedules give at some moments of a run."""
        return {**self.inner.sampled_schedules(rounds, steps), **self.outer.sampled_schedules(rounds, steps)}


def outer_hyperparameters(
    outer: str | type[Optimizer], settings: Mapping[str, Any], names: Sequence[str]
) -> RuleHyperparameters:
    """Return the hyperparameters of an outer optimizer alone, for an inner one that the user builds."""
    called = outer if isinstance(outer, str) else getattr(outer, "__name__", repr(outer))
    check_side(outer, settings, "outer", f"the outer optimizer {called}")
    return RuleHyperparameters("outer", rule_of(outer, "outer"), hparams_of(outer, settings, "outer"), {}, names)


def _value_or_error(schedule: Any, base: Any, t: int, name: str) -> Any:
    try:
        value = scheduling.value(schedule, base, t, name)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return float(f"{value:.12g}") if isinstance(value, int | float) else value
