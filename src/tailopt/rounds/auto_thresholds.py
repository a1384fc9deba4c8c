"""Thresholds that are "auto", at the two levels of an algorithm: fixed before a round starts, and equal on all nodes.

    inside, calibration     lr * sign(g), or lr * g / |g|, in whole rounds, until 50 gradients were seen
    outside, calibration    x + delta, in the first round
    every later round t     (lr / s_t) * clip(g; u_t, d_t), and outside (olr / s_t) * clip(delta; u_t, d_t)

At the end of a round the statistics of its gradients and of its mean displacement (`gradient_statistics.py`) are added
up in node order, over the nodes that counted, and every node computes the thresholds of the next round from the sums
(`tailopt.thresholds`). An engine carries these objects: it asks for numbers before a round and shows what it saw after.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from tailopt.arguments import is_number
from tailopt.clipping.counts import Counts
from tailopt.native.clip import BINS
from tailopt.rounds.gradient_statistics import GradientRecorder, Kind
from tailopt.rounds.settle import Settlement
from tailopt.rules.rule import Rule
from tailopt.thresholds import CALIBRATION, Norms, Scale, Statistics, Thresholds, choose, nonzero_rms, total

_NUMBERS = [f.name for f in fields(Counts) if f.name not in ("octaves", "logs")]


class AutoThresholds:
    """The thresholds of one level, from round to round.

    Args:
        side: "outer" or "inner".
        kind: what the rule clips.
        d: "auto" or 0.
        scale: "first" or "follow".
        momentum: of the rule.

    Attributes:
        version: changes whenever the thresholds do.

    Examples:
        >>> import torch
        >>> thresholds = AutoThresholds("inner", "elements")
        >>> thresholds.hparams()
        {'u': 1.0, 'd': 1.0, 's': 1.0}
        >>> recorder = thresholds.recorder(n_params=1)
        >>> for step in range(50):
        ...     recorder.add([0], [torch.linspace(-1, 1, 100)], step)
        >>> choice = thresholds.update_from([recorder.statistics()], gradients=50, steps=50)
        >>> choice[: choice.index(", by")], thresholds.hparams()["s"]
        ('Inner thresholds: u = 2.57, d = 0.333 u', 2.57222)
    """

    def __init__(
        self, side: str, kind: Kind, d: float | str = "auto", scale: Scale = "first", momentum: float = 0.0
    ) -> None:
        self.side, self.kind, self.momentum = side, kind, momentum
        self.version = 0
        self._d, self._scaling = d, scale
        self._chosen: Thresholds | None = None  # None during calibration
        self._gathered: list[Statistics] = []  # during calibration, by tensor
        self._gradients = 0  # how many these are

    @classmethod
    def of(cls, side: str, rule: Rule, hparams: Mapping[str, Any]) -> AutoThresholds:
        """The thresholds of a rule whose u is "auto"."""
        kind: Kind = "elements"
        if rule.auto_u_limits == "norms":
            kind = "tensor norms" if hparams.get("scope") == "tensor" else "norm"
        return cls(side, kind, hparams.get("d", 0.0), hparams["scale"], float(hparams.get("momentum", 0.0)))

    def described(self) -> str:
        """Return the settings in words."""
        return f"{self.side}: u = auto, d = {self._d}, scale = {self._scaling}"

    @property
    def is_calibrating(self) -> bool:
        """Whether the thresholds are not chosen yet."""
        return self._chosen is None

    @property
    def choice_message(self) -> str:
        """What was chosen and by which rule, in one line; empty during calibration."""
        return "" if self._chosen is None else f"{self.side.capitalize()} thresholds: {self._about}"

    @property
    def _about(self) -> str:
        assert self._chosen is not None
        return self._chosen.reason if self.side == "inner" else self._chosen.reason.replace("|g|", "|delta|")

    def hparams(self) -> dict[str, Any]:
        """Return u, d and s of the coming round, and what else a rule steps with: numbers, or one for each tensor."""
        # whether the gradients are clamped that enter the momentum; real nodes store the key in their checkpoints
        clamps = {"clamp_momentum": not self.is_calibrating} if self.momentum else {}
        if self._chosen is None:
            if self.side == "outer":  # x + delta
                return {"lr": 1.0, "u": math.inf, "d": 0.0, "s": 1.0, **clamps}
            return {"u": 1.0, "d": 1.0, "s": 1.0, **clamps}
        rows = [self._chosen.numbers(i) for i in range(len(self._chosen.u))]
        u, d, s = (list(column) if len(column) > 1 else column[0] for column in zip(*rows, strict=True))
        return {"u": u, "d": d, "s": s, **clamps}

    def recorder(self, n_params: int) -> GradientRecorder:
        """Return what records the gradients of a node in one round."""
        return GradientRecorder(self.kind, n_params)

    def history_entry(self) -> dict[str, Any] | None:
        """Return the thresholds of the coming round for the history: numbers, or one for each tensor."""
        return None if self._chosen is None else {key: self.hparams()[key] for key in ("u", "d", "s")}

    def update_from(self, by_node: Sequence[Sequence[Statistics]], gradients: int, steps: int) -> str:
        """Take the statistics of a round: the thresholds of the next one follow.

        Args:
            by_node: of the nodes that counted, in node order; outside, of the mean displacement alone.
            gradients: how many these are the statistics of.
            steps: local steps of the round.

        Returns:
            A line for the log, where the thresholds were chosen in this round, or could not be; else nothing.
        """
        if not by_node:
            return ""
        seen: Any = by_node
        if self._chosen is not None:
            self._replace(self._chosen.follow(total(seen), steps))
            return ""
        first = self._gradients
        self._gathered = total([self._gathered, *seen] if self._gathered else seen)
        self._gradients += gradients
        needed = CALIBRATION if self.side == "inner" else 1
        if self._gradients < needed:
            return ""
        if not any(nonzero_rms(statistics) > 0 for statistics in self._gathered):
            what = "gradient" if self.side == "inner" else "mean displacement"
            return (
                f'{self.side.capitalize()} thresholds: "auto" has seen no nonzero finite {what}, and keeps looking. '
                "Is the loss connected to the parameters?"
                if first < needed
                else ""
            )
        self._replace(choose(self._gathered, scale=self._scaling, d=self._d))
        self._gathered, self._gradients = [], 0
        return self.choice_message

    def _replace(self, thresholds: Thresholds) -> None:
        self._chosen = thresholds
        self.version += 1

    def state(self) -> dict[str, Any]:
        """Return everything that the next rounds depend on, as plain data; what was gathered too."""
        return {
            "chosen": None if self._chosen is None else self._chosen.state(),
            "gathered": [plain_statistics(statistics) for statistics in self._gathered],
            "gradients": self._gradients,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned."""
        chosen = state["chosen"]
        self._chosen = None if chosen is None else Thresholds.from_state(chosen)
        self._gathered = [statistics_from_plain(plain) for plain in state["gathered"]]
        self._gradients = int(state["gradients"])
        self.version += 1


@dataclass(frozen=True)
class AutoThresholdsByLevel:
    """The thresholds of both levels of an algorithm; None for a level where they are not "auto"."""

    inner: AutoThresholds | None = None
    outer: AutoThresholds | None = None

    @property
    def levels(self) -> dict[str, AutoThresholds]:
        """The levels that are "auto", by name."""
        return {name: level for name, level in vars(self).items() if level is not None}

    def settings(self) -> list[str]:
        """Return the settings, which real nodes compare before they start."""
        return [level.described() for level in self.levels.values()]

    @property
    def choice_messages(self) -> tuple[str, ...]:
        """What was chosen, a line for each level that has chosen."""
        return tuple(level.choice_message for level in self.levels.values() if level.choice_message)

    def history_entry(self) -> dict[str, Any]:
        """Return the entry of the coming round's row of the history; empty where nothing is "auto"."""
        entries = {name: level.history_entry() for name, level in self.levels.items()}
        return {"thresholds": entries} if entries else {}

    def update_from(
        self, settlement: Settlement, inner: Mapping[int, Sequence[Statistics]], outer: Sequence[Statistics]
    ) -> list[str]:
        """Take the statistics of a round that was settled; returns lines for the log.

        Args:
            inner: of every node that counted.
            outer: of the mean displacement; empty where nothing arrived.
        """
        counted = sorted(settlement.counted_shares)
        gradients = sum(settlement.steps[node] for node in counted)
        steps = max(1, round(gradients / max(len(counted), 1)))
        lines = []
        if self.inner is not None:
            lines.append(self.inner.update_from([inner[node] for node in counted], gradients, steps))
        if self.outer is not None:
            lines.append(self.outer.update_from([outer] if outer else [], 1, steps))
        return [line for line in lines if line]

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds; empty where nothing is "auto"."""
        return {name: level.state() for name, level in self.levels.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned."""
        if state.keys() != self.levels.keys():
            raise ValueError(
                f"Invalid checkpoint: it has automatic thresholds of {sorted(state)}, and the algorithm of "
                f"{sorted(self.levels)}. Resume with the same settings."
            )
        for name, level in self.levels.items():
            level.load_state(state[name])

    def state_bytes(self) -> bytes:
        """Return bytes that are equal on nodes with equal thresholds; empty where nothing is "auto"."""
        return json.dumps(self.state()).encode() if self.levels else b""


NO_AUTO_THRESHOLDS = AutoThresholdsByLevel()


def checked_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state that `load_state` can read; raises what reading it raises."""
    for name, of_level in state.items():
        AutoThresholds(name, "elements").load_state(of_level)
    return dict(state)


def plain_statistics(statistics: Statistics) -> dict[str, Any]:
    """Return statistics as plain data; of a histogram the octaves that are not empty."""
    if isinstance(statistics, Norms):
        return {"norms": list(statistics.values)}
    pairs = enumerate(zip(statistics.octaves, statistics.logs, strict=True))
    octaves = {str(k): [number, log] for k, (number, log) in pairs if number}
    return {**{name: getattr(statistics, name) for name in _NUMBERS}, "octaves": octaves}


def statistics_from_plain(plain: Mapping[str, Any]) -> Statistics:
    """Read what `plain_statistics` returned."""
    if "norms" in plain:
        return Norms(tuple(plain["norms"]))
    octaves, logs = [0] * BINS, [0.0] * BINS
    for k, (number, log) in plain["octaves"].items():
        octaves[int(k)], logs[int(k)] = number, log
    return Counts(**{name: plain[name] for name in _NUMBERS}, octaves=tuple(octaves), logs=tuple(logs))


def checked_statistics(found: Sequence[Statistics], wanted: Sequence[Statistics], steps: int) -> list[Statistics]:
    """Return statistics that somebody else sent; ValueError for those that no node can have, which would end the run.

    wanted: empty ones, of the same kind and of as many tensors; steps: local steps that they are of.
    """
    kinds = [[type(s).__name__ for s in statistics] for statistics in (found, wanted)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"Invalid statistics: {len(found)} of {set(kinds[0])}; need {len(wanted)} of {set(kinds[1])}.")
    for i, s in enumerate(found):
        possible = _possible_norms(s, steps) if isinstance(s, Norms) else _possible_counts(s)
        if not possible:
            raise ValueError(f"Invalid statistics of tensor {i}: {str(s):.120}; no gradients have these.")
    return list(found)


def _possible_norms(norms: Norms, steps: int) -> bool:
    return len(norms.values) <= steps and all(is_number(x) and not x < 0 for x in norms.values)


def _possible_counts(counts: Counts) -> bool:
    """Whether sums over elements are numbers of their type, and the logarithms are those of their octaves."""
    for name in _NUMBERS:
        value, is_float = getattr(counts, name), isinstance(getattr(Counts(), name), float)
        if not is_number(value) or not 0 <= value < math.inf or not (is_float or isinstance(value, int)):
            return False
    for k, (number, log) in enumerate(zip(counts.octaves, counts.logs, strict=True)):
        # an octave of slack on both sides, for rounding
        least, most = ((k - 128) * number, (k - 125) * number) if 0 < k < BINS - 1 else (0, 0)
        if not (isinstance(number, int) and 0 <= number <= counts.elements and least <= log <= most):
            return False
    return counts.elements < 1 << 53
