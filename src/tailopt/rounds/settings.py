"""An algorithm's numbers at a moment: schedules applied, patterns resolved to parameters, the order of thresholds kept.

A schedule counts rounds, or with per="step" the local steps that the node itself has taken over the whole run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tailopt import schedules as scheduling
from tailopt.algorithms import PUBLIC, Algorithm, by_parameter, check_settings
from tailopt.rounds.guard import Bound, bound
from tailopt.rules.rule import Numbers, Rule

SCHEDULABLE = ("lr", "u", "d")
MOMENTS = (1, 2, 3, 10, 100, 1000)  # at which schedules are compared, beside quarters of the run
DRIVEN = 10_000  # at most for those of torch, which get to a moment one step at a time
T = TypeVar("T")


class Settings:
    """What both rules get, in any round and step, for parameters of these names."""

    def __init__(self, algorithm: Algorithm, schedules: Any, names: Sequence[str]) -> None:
        self.outer_rule: Rule = algorithm.rule("outer")
        self.inner_rule: Rule = algorithm.rule("inner")
        self._names = list(names)
        self._base = {level: algorithm.numbers(level) for level in ("outer", "inner")}
        known = {
            PUBLIC[level][word]: (level, word)
            for level in self._base
            for word in SCHEDULABLE
            if word in self._base[level]
        }
        self._schedules: dict[tuple[str, str], Any] = {
            known[name]: schedule for name, schedule in scheduling.check(schedules, known).items()
        }
        for (level, word), schedule in self._schedules.items():
            if level == "outer" and scheduling.per(schedule) == "step":
                name = PUBLIC[level][word]
                raise ValueError(
                    f'Invalid schedule of {name}: per="step" counts local steps, which an outer rule has not.'
                )
        self.by_step = any(scheduling.per(schedule) == "step" for schedule in self._schedules.values())
        self._cache: dict[Any, Any] = {}

    def outer(self, t: int) -> Numbers:
        """The outer rule's numbers in round t."""
        return self._cached(("outer", t if self._moves("outer") else 0), lambda: self._at("outer", t, t))

    def inner(self, t: int, taken: int) -> Numbers:
        """The inner rule's numbers in round t, for a node that has taken so many local steps before this one."""
        key = ("inner", t if self._moves("inner") else 0, taken if self.by_step else 0)
        return self._cached(key, lambda: self._at("inner", t, taken + 1))

    def limit(self, t: int, taken: int, steps: int) -> Bound:
        """How far a node can move in round t in so many steps."""
        key = ("limit", t if self._moves("inner") else 0, taken if self.by_step else 0, steps)
        return self._cached(key, lambda: bound(self.inner_rule, (self.inner(t, taken + k) for k in range(steps))))

    def schedules(self) -> dict[str, Any]:
        """The schedules, by the public name of what they change."""
        return {PUBLIC[level][word]: schedule for (level, word), schedule in sorted(self._schedules.items())}

    def scheduled(self, rounds: int | None, steps: int) -> dict[str, dict[str, Any]]:
        """What schedules give at some moments of a run, the last among them where it is known: to be compared.

        Numbers are rounded to 12 digits: the last one of a cosine is another on another machine, and harmless. A
        schedule that fails at a moment has the error as its value there.
        """
        found: dict[str, dict[str, Any]] = {}
        for (level, word), schedule in sorted(self._schedules.items()):
            name, per = PUBLIC[level][word], scheduling.per(schedule)
            last = None if rounds is None else rounds if per == "round" else rounds * steps
            most = min(last or DRIVEN, DRIVEN if isinstance(schedule, scheduling.FromTorch) else last or DRIVEN)
            quarters = () if last is None else (last // 4, last // 2, 3 * last // 4, last)
            moments = sorted({t for t in (*MOMENTS, *quarters) if 1 <= t <= most})
            base = self._base[level][word]
            found[name] = {f"{per} {t}": _tried(schedule, base, t, name) for t in moments}
        return found

    def _moves(self, level: str) -> bool:
        return any(of == level for of, _ in self._schedules)

    def _cached(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        if key not in self._cache:
            if len(self._cache) > 64:  # rounds gone by
                self._cache.clear()
            self._cache[key] = make()
        found: T = self._cache[key]
        return found

    def _at(self, level: str, t: int, step: int) -> Numbers:
        numbers: dict[str, Any] = {}
        for word, base in self._base[level].items():
            schedule, name = self._schedules.get((level, word)), PUBLIC[level].get(word, word)
            if schedule is not None:
                base = scheduling.value(schedule, base, step if scheduling.per(schedule) == "step" else t, name)
            numbers[word] = by_parameter(base, self._names, name)
        if "u" in numbers and self._moves(level):
            self._check_order(numbers, level, t)
        return numbers

    def _check_order(self, numbers: Numbers, level: str, t: int) -> None:
        zone = numbers.get("dead_zone", 0.0)
        uppers, lowers = ([v] if not isinstance(v, list) else v for v in (numbers["u"], numbers.get("d", 0.0)))
        n = max(len(uppers), len(lowers))
        try:
            for i in range(n):
                u, d = uppers[i if len(uppers) > 1 else 0], lowers[i if len(lowers) > 1 else 0]
                check_settings(u, d, 0.0 if zone == "auto" else zone, level)
        except ValueError as error:
            raise ValueError(f"{error} This is what the schedules give in round {t}.") from None


def _tried(schedule: Any, base: Any, t: int, name: str) -> Any:
    """A schedule's value, or why it has none."""
    try:
        value = scheduling.value(schedule, base, t, name)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return float(f"{value:.12g}") if isinstance(value, int | float) else value
