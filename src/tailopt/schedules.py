"""Settings that change during a run: a schedule is a factor on the setting of the algorithm.

    value at t  =  setting * factor(t)        t = 1, 2, ...

`per="round"` counts rounds; `per="step"` counts the local steps of a node over the whole run. A plain function of the
round can replace a schedule; it returns the value itself, not a factor. Schedules are pure: they give the same numbers
for any t in any order, so a resumed run and another engine read the same ones.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from tailopt.arguments import did_you_mean, is_number, whole_number

Per: TypeAlias = Literal["round", "step"]
Setting: TypeAlias = float | Tensor | Mapping[str, float | Tensor]


class Schedule(ABC):
    """A factor that depends on time. Subclasses define `per` and `factor`; those with equal `per` can be multiplied.

    Examples:
        >>> (warmup(4) * power(-0.5)).factor(4)
        0.5
    """

    per: Per = "round"

    @abstractmethod
    def factor(self, t: int) -> float:
        """Return the factor on the setting at t = 1, 2, ...: finite and at least 0."""

    def __mul__(self, other: object) -> Schedule:
        """Return the schedule whose factor is the product of both."""
        if not isinstance(other, Schedule):
            return NotImplemented
        return Product(self, other)


Scheduled: TypeAlias = Schedule | Callable[[int], Setting]


def power(exponent: float, per: Per = "round", shift: float = 0.0) -> Power:
    """Return a power of t: factor(t) = ((t + shift) / (1 + shift)) ** exponent, which is 1 at t = 1.

    Args:
        exponent: negative decays, positive grows, 0 is constant.
        per: what t counts.
        shift: at least 0. `power(-1, "step", shift=1)` is 2 / (t + 1).

    Examples:
        >>> [round(power(-0.5).factor(t), 3) for t in (1, 4, 100)]
        [1.0, 0.5, 0.1]
    """
    return Power(float(exponent), per, float(shift))


def warmup(length: int, start: float = 0.0, per: Per = "round") -> Warmup:
    """Return a straight line up to 1: factor(t) = start + (1 - start) * min(t / length, 1).

    The first round has start + (1 - start) / length, so no round is spent at 0; round `length` is the first at 1.

    Examples:
        >>> [warmup(4).factor(t) for t in (1, 2, 4, 9)]
        [0.25, 0.5, 1.0, 1.0]
    """
    return Warmup(length, float(start), per)


def cosine(total: int, floor: float = 0.0, per: Per = "round") -> Cosine:
    """Return half a cosine: factor(t) = floor + (1 - floor) * (1 + cos(pi * min((t - 1) / total, 1))) / 2.

    This is torch's CosineAnnealingLR with T_max = total, except that it stays at `floor` once it has reached it.

    Examples:
        >>> [round(cosine(4).factor(t), 3) for t in (1, 2, 3, 4, 5)]
        [1.0, 0.854, 0.5, 0.146, 0.0]
    """
    return Cosine(total, float(floor), per)


def from_torch(make: Callable[[torch.optim.Optimizer], LRScheduler], per: Per = "round") -> FromTorch:
    """Return the schedule of a torch scheduler, which runs on a learning rate of 1.

    Args:
        make: builds the scheduler for the optimizer that it receives. Schedulers that wait for a metric
            (ReduceLROnPlateau) are rejected.
        per: what one `scheduler.step()` counts.

    Examples:
        >>> halved = from_torch(lambda opt: torch.optim.lr_scheduler.StepLR(opt, step_size=10, gamma=0.5))
        >>> [halved.factor(t) for t in (30, 10, 11)]
        [0.25, 1.0, 0.5]
    """
    return FromTorch(make, per)


def value(schedule: Scheduled | None, base: Setting, t: int, setting: str = "setting") -> Setting:
    """Return the setting at time t.

    Args:
        schedule: None leaves `base` unchanged; a Schedule multiplies it; a plain function of t returns the value.
        base: a number, a tensor, or a mapping from name patterns to either (every entry is scaled).
        t: 1, 2, ...
        setting: its name, for error messages.

    Examples:
        >>> value(power(-1.0), 0.5, 2, "ilr"), value(lambda t: 0.1 * t, 0.5, 2, "ilr")
        (0.25, 0.2)
    """
    check_time(t)
    if schedule is None:
        return base
    if not isinstance(schedule, Schedule):
        result = schedule(t)
        _check_setting(result, setting, t)
        return result
    try:
        factor = schedule.factor(t)
    except OverflowError:  # t ** 400
        factor = math.inf
    _check_number(factor, setting, t, what="factor")
    return _scaled(base, factor, setting, t)


def per(schedule: Scheduled | None) -> Per:
    """Return what a schedule counts: "round" or "step". Plain functions count rounds."""
    return schedule.per if isinstance(schedule, Schedule) else "round"


def check(schedules: object, known: Collection[str]) -> dict[str, Scheduled]:
    """Return schedules by setting; ValueError if the algorithm has no such setting.

    Args:
        schedules: a mapping from settings to schedules or functions, an object that has such a mapping as `.schedules`
            (what `theory` returns), or None for no schedules.
        known: the settings of the algorithm.

    Examples:
        >>> check({"irl": power(-0.5)}, ["ilr", "i_u"])
        Traceback (most recent call last):
        ValueError: Invalid schedules: 'irl' is no setting of this algorithm; did you mean 'ilr'? It has: i_u, ilr.
    """
    mapping = getattr(schedules, "schedules", schedules)
    if mapping is None:
        return {}
    if not isinstance(mapping, Mapping):
        raise TypeError(
            f"Invalid schedules: got {schedules!r}; need a mapping from settings to schedules, or a theory."
        )
    for name, schedule in mapping.items():
        if name not in known:
            raise ValueError(
                f"Invalid schedules: {name!r} is no setting of this algorithm{did_you_mean(name, known)} "
                f"It has: {', '.join(sorted(known))}."
            )
        if isinstance(schedule, LRScheduler) or (isinstance(schedule, type) and issubclass(schedule, LRScheduler)):
            raise TypeError(f"Invalid schedule of {name}: a torch scheduler. Wrap it: from_torch(lambda opt: ...).")
        if not isinstance(schedule, Schedule) and not callable(schedule):
            raise TypeError(
                f"Invalid schedule of {name}: got {schedule!r}; need a schedule or a function of the round. "
                "A constant belongs to the algorithm's settings."
            )
    return dict(mapping)


@dataclass(frozen=True)
class Power(Schedule):
    """The result of `power`."""

    exponent: float
    per: Per = "round"
    shift: float = 0.0

    def __post_init__(self) -> None:
        """Reject arguments whose factors would not be finite."""
        _check_per(self.per)
        if not math.isfinite(self.exponent):
            raise ValueError(f"Invalid exponent: got {self.exponent}; need a finite number.")
        if not 0 <= self.shift < math.inf:
            raise ValueError(f"Invalid shift: got {self.shift}; need 0 <= shift < inf.")

    def factor(self, t: int) -> float:
        """((t + shift) / (1 + shift)) ** exponent."""
        return float(((check_time(t) + self.shift) / (1.0 + self.shift)) ** self.exponent)


@dataclass(frozen=True)
class Warmup(Schedule):
    """The result of `warmup`."""

    length: int
    start: float = 0.0
    per: Per = "round"

    def __post_init__(self) -> None:
        """Reject a line without length, or one that begins above 1."""
        _check_per(self.per)
        whole_number("length", self.length, low=1)
        if not 0 <= self.start <= 1:
            raise ValueError(f"Invalid start: got {self.start}; need 0 <= start <= 1.")

    def factor(self, t: int) -> float:
        """start + (1 - start) * min(t / length, 1)."""
        return self.start + (1.0 - self.start) * min(check_time(t) / self.length, 1.0)


@dataclass(frozen=True)
class Cosine(Schedule):
    """The result of `cosine`."""

    total: int
    floor: float = 0.0
    per: Per = "round"

    def __post_init__(self) -> None:
        """Reject a curve without length, or one that rises."""
        _check_per(self.per)
        whole_number("total", self.total, low=1)
        if not 0 <= self.floor <= 1:
            raise ValueError(f"Invalid floor: got {self.floor}; need 0 <= floor <= 1.")

    def factor(self, t: int) -> float:
        """floor + (1 - floor) * (1 + cos(pi * min((t - 1) / total, 1))) / 2."""
        progress = min((check_time(t) - 1) / self.total, 1.0)
        return self.floor + (1.0 - self.floor) * (1.0 + math.cos(math.pi * progress)) / 2.0


@dataclass(frozen=True)
class Product(Schedule):
    """The product of two schedules with equal `per`."""

    first: Schedule
    second: Schedule

    def __post_init__(self) -> None:
        """Reject the product of a schedule of rounds and one of steps."""
        if self.first.per != self.second.per:
            raise ValueError(
                f"Invalid product: one schedule counts {self.first.per}s, the other {self.second.per}s. "
                "Give both the same `per`."
            )
        object.__setattr__(self, "per", self.first.per)

    def factor(self, t: int) -> float:
        """Return the product of both factors."""
        return self.first.factor(t) * self.second.factor(t)


@dataclass(eq=False)
class FromTorch(Schedule):
    """The result of `from_torch`."""

    make: Callable[[torch.optim.Optimizer], LRScheduler]
    per: Per = "round"
    # All factors so far: the scheduler can only step forwards, and t comes in any order.
    _factors: list[float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Build the scheduler once, so that one that cannot work is rejected before anything runs."""
        _check_per(self.per)
        # With momentum, because OneCycleLR and CyclicLR need it; the only parameter never gets a gradient.
        self._optimizer = torch.optim.SGD([torch.zeros((), requires_grad=True)], lr=1.0, momentum=0.9)
        scheduler: Any = self.make(self._optimizer)
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ValueError(
                "Invalid scheduler: ReduceLROnPlateau waits for a metric, and a schedule depends on t alone. "
                "Use one without a metric, such as StepLR or CosineAnnealingLR."
            )
        if not isinstance(scheduler, LRScheduler):
            raise TypeError(
                f"Invalid scheduler: make returned {scheduler!r}; need a torch.optim.lr_scheduler.LRScheduler."
            )
        if scheduler.optimizer is not self._optimizer:
            raise ValueError("Invalid scheduler: it drives another optimizer. Build it on the one that make is given.")
        self._scheduler = scheduler
        self._factors = [self._rate()]

    def factor(self, t: int) -> float:
        """Return the learning rate after t - 1 steps of the scheduler."""
        check_time(t)
        while len(self._factors) < t:
            self._optimizer.step()  # torch warns if a scheduler steps before its optimizer
            self._scheduler.step()
            self._factors.append(self._rate())
        return self._factors[t - 1]

    def __reduce__(self) -> tuple[type[FromTorch], tuple[Any, Per]]:
        """Build copies from `make`: torch's schedulers need not be copyable, and the factors can be computed again."""
        return FromTorch, (self.make, self.per)

    def _rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])


def check_time(t: int) -> int:
    """Return the number of a round or of a step, which is a whole number of 1 or more."""
    return whole_number("t", t, low=1, hint="Rounds and steps count from 1.")


def _check_per(unit: str) -> None:
    if unit not in get_args(Per):
        raise ValueError(f"Invalid per: got {unit!r}; need 'round' or 'step'.")


def _check_number(number: object, setting: str, t: int, what: str = "value") -> None:
    if not is_number(number):
        raise TypeError(f"Invalid schedule of {setting} at t={t}: {what} {number!r}; need a number, finite and >= 0.")
    if not 0 <= number < math.inf:
        raise ValueError(f"Invalid schedule of {setting} at t={t}: {what} {number}; need a finite number >= 0.")


def _check_setting(result: object, setting: str, t: int) -> None:
    """Check what a plain function returned: a number, a tensor, or a mapping to them."""
    if isinstance(result, Mapping):
        for pattern, entry in result.items():
            _check_setting(entry, f"{setting}[{pattern!r}]", t)
    elif isinstance(result, Tensor):
        # On a device the check would wait for it; there the clipping operators assert without a synchronisation.
        if result.device.type == "cpu" and not bool(((result >= 0) & result.isfinite()).all()):
            wrong = result[~((result >= 0) & result.isfinite())].flatten()[0].item()
            raise ValueError(f"Invalid schedule of {setting} at t={t}: value {wrong}; need finite numbers >= 0.")
    else:
        _check_number(result, setting, t)


def _scaled(base: Setting | str, factor: float, setting: str, t: int) -> Setting:
    if isinstance(base, Mapping):
        scaled = {pattern: _scaled(entry, factor, f"{setting}[{pattern!r}]", t) for pattern, entry in base.items()}
        return cast("dict[str, float | Tensor]", scaled)
    if isinstance(base, Tensor):
        return base * factor
    if isinstance(base, str):  # "auto"
        raise ValueError(f"Invalid schedule of {setting}: {base!r} cannot be scaled. Leave one of them out.")
    if math.isinf(base) and base > 0 < factor:  # an upper threshold of inf clips nothing, at any time
        return base
    product = base * factor
    _check_number(product, setting, t)
    return product
