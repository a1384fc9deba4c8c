"""`u="auto"` in a loop of one's own: what a param group counts, and when its thresholds change.

    steps 1 to 50       calibration: a step is lr * sign(g), and every gradient is counted
    then                (lr / s) * clip(g; u, d), where one gradient in 50 is counted, and u and d follow it

Where norms are clipped, a step of calibration is lr * g / ||g||, and every norm is kept, because the step knows it
anyway: u and d follow the last 50.

Everything is in the param group, so that a checkpoint has it: `group["thresholds"]` (None during calibration) and
`group["calibration"]`, the counters or norms so far. They are where the parameters are, and read once per 50 steps.
`tailopt.thresholds` has the rules, and docs/results/thresholds.md what they were chosen by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tailopt.clipping.counts import Counts, add, read
from tailopt.clipping.dtensor import local_pair, over_shards, positions_by_process_groups
from tailopt.clipping.operators import Number, check_kind, real_parts
from tailopt.native.clip import Counters
from tailopt.optimizers.threshold_warning import warn_caller
from tailopt.thresholds import (
    AUTO,
    CALIBRATION,
    DEFAULT,
    NORM,
    SCALES,
    Norms,
    Scale,
    Statistics,
    Thresholds,
    choose,
    lower_of_auto,
    nonzero_rms,
    ratio_of_auto,
)

Group = dict[str, Any]
PERIOD = CALIBRATION  # steps between two looks at the gradients
_UNBOUNDED = (float("inf"), 0.0, 0.0)  # thresholds of the counting pass: quantiles need none


def is_auto(value: object) -> bool:
    """Whether a threshold is "auto"; a tensor is not."""
    return isinstance(value, str) and value == AUTO


def check_auto(group: Group) -> Group:
    """Raise for settings that cannot be used with "auto"; returns the group with numbers in its place, for the rest."""
    if not is_auto(group["u"]) and not is_auto(group["d"]):
        return group
    if not is_auto(group["u"]):
        check_kind("u", group["u"])
        return {**group, "d": _lower(group)}
    ratio_of_auto(group["d"])
    if group["scale"] not in SCALES:
        raise ValueError(f"Invalid scale: {group['scale']!r}; need one of {', '.join(map(repr, SCALES))}.")
    if group["thresholds"] is not None:
        _check_length(len(Thresholds.from_state(group["thresholds"]).u), len(group.get("params", ())), group)
    return {**group, "u": float("inf"), "d": 0.0}


def check_not_capturing() -> None:
    """Raise while a CUDA graph is captured."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "u='auto' reads counts of gradients on the host, which a CUDA graph does not repeat. Set u and d for steps "
            "that are captured, such as those in opt.param_groups[0]['thresholds'] after 50 steps."
        )


def _check_length(tensors: int, params: int, group: Group) -> None:
    """Raise for thresholds that belong to other tensors, or to norms over another scope."""
    again = "set group['thresholds'] = group['calibration'] = None to calibrate again."
    if tensors > 1 and tensors != params:
        raise ValueError(
            f"Invalid thresholds: they are of {tensors} tensors, and the group has {params} parameters. Add parameters "
            f"with add_param_group, or {again}"
        )
    if "scope" in group and tensors != (params if group["scope"] == "tensor" else 1):
        raise ValueError(
            f"Invalid thresholds: they are of {tensors} norms, and the group has {params} parameters with scope="
            f"{group['scope']!r}, which was another when they were chosen. Give it back, or {again}"
        )


def numbers(group: Group) -> list[tuple[Number, Number, float]]:
    """u, d and s of every parameter of a group, or one entry for all; a step is (lr / s) * clip(g; u, d)."""
    if not is_auto(group["u"]):
        return [(group["u"], _lower(group) if is_auto(group["d"]) else group["d"], 1.0)]
    if group["thresholds"] is None:
        return [(1.0, 1.0, 1.0)]  # sign descent
    check_auto(group)  # the list of parameters may have changed since
    thresholds = Thresholds.from_state(group["thresholds"])
    return [thresholds.numbers(i) for i in range(len(thresholds.u))]


def _lower(group: Group) -> Number:
    """d where it is "auto" and u is not; a group with a scope clips norms."""
    lower: Number = lower_of_auto(group["u"], NORM if "scope" in group else DEFAULT)
    return lower


def chosen_thresholds(groups: Sequence[Group]) -> list[str]:
    """What was chosen, in a line for each group that has thresholds of its own."""
    return [group["thresholds"]["reason"] for group in groups if group.get("thresholds") is not None]


def is_calibrating(group: Group) -> bool:
    """Whether the thresholds of a group are not chosen yet."""
    return is_auto(group["u"]) and group["thresholds"] is None


def is_due(group: Group) -> bool:
    """Count a step of a group; returns whether its gradients are looked at."""
    steps = _begin(group)["steps"]
    return is_calibrating(group) or steps % PERIOD == 0


def observe(
    group: Group,
    positions: Sequence[int],
    gradients: Sequence[Tensor],
    rule: str | None = None,
    scale: Scale | None = None,
) -> None:
    """Look at the gradients of a step that was taken, and choose or move the thresholds where it is time.

    Args:
        positions: of the parameters in the group.
        gradients: of these parameters, or the means that the step clipped; of a sharded one this rank's part.
        rule, scale: of the choice; by default those of `choose` and of the group.
    """
    count_gradients(group["calibration"], len(group["params"]), positions, gradients)
    _end_look(group, rule, scale)


def _end_look(group: Group, rule: str | None = None, scale: Scale | None = None) -> None:
    """Count a step whose gradients were all looked at, and choose or move the thresholds where it is time."""
    progress = group["calibration"]
    progress["seen"] += 1
    if not is_calibrating(group) or progress["seen"] >= CALIBRATION:
        _settle(group, read_counts(progress, len(group["params"]), group["params"]), rule, scale)


class Observation:
    """What one step shows to the groups with u="auto", at once or in parts; their thresholds change at its end."""

    def __init__(self) -> None:
        check_not_capturing()
        self._due: dict[int, bool] = {}  # by id of the group
        self._looked_at: list[Group] = []
        self._norms: list[tuple[Group, list[Tensor] | None, list[Tensor]]] = []

    def is_due(self, group: Group) -> bool:
        """Whether the gradients of a group are looked at in this step; the first question counts the step."""
        if id(group) not in self._due:
            self._due[id(group)] = is_due(group)
            if self._due[id(group)]:
                self._looked_at.append(group)
        return self._due[id(group)]

    def add_gradients(self, group: Group, positions: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Count gradients of a group that is due; the arguments are those of `observe`."""
        count_gradients(group["calibration"], len(group["params"]), positions, gradients)

    def add_norms(self, group: Group, owners: Sequence[Tensor] | None, norms: Sequence[Tensor]) -> None:
        """Keep norms of a group: of these parameters, or the one norm of a scope that is larger than a tensor."""
        for known, known_owners, known_norms in self._norms:
            if known is group and known_owners is not None and owners is not None:
                known_owners += owners
                known_norms += norms
                return
        self._norms.append((group, None if owners is None else list(owners), list(norms)))

    def settle(self) -> None:
        """Choose or move the thresholds where it is time."""
        for group in self._looked_at:
            _end_look(group)
        for group, owners, norms in self._norms:
            observe_norms(group, torch.stack(norms if owners is None else _of_all(group, owners, norms)))


def _of_all(group: Group, owners: Sequence[Tensor], norms: Sequence[Tensor]) -> list[Tensor]:
    """A norm for every parameter of a group, 0 for those without a gradient."""
    by_id = {id(p): norm for p, norm in zip(owners, norms, strict=True)}
    nothing = norms[0].new_zeros(())
    return [by_id.get(id(p), nothing) for p in group["params"]]


def observe_norms(group: Group, norms: Tensor) -> None:
    """The same for a step that clipped norms: keep them, and choose or move the thresholds after every 50.

    Args:
        norms: of the scopes of the group, one or one for each parameter; 0 where there was no gradient.
    """
    progress = _begin(group)
    kept = progress.get("norms")
    if kept is None or kept.shape[1] != norms.numel():  # a list of parameters that grew begins again
        kept, progress["seen"] = norms.new_zeros(CALIBRATION, norms.numel(), dtype=torch.float64), 0
    kept = progress["norms"] = kept.to(norms.device)  # a checkpoint may have been loaded onto another device
    kept[progress["seen"] % CALIBRATION] = norms
    progress["seen"] += 1
    if progress["seen"] >= CALIBRATION:
        _settle(group, [Norms(tuple(column)) for column in kept.T.tolist()])


def _begin(group: Group) -> dict[str, Any]:
    """Count a step of a group."""
    progress: dict[str, Any] = group["calibration"] or {"steps": 0, "seen": 0}
    group["calibration"] = progress
    progress["steps"] += 1
    return progress


def visible_parts(params: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    """This rank's part of the gradients, as `observe` takes them: dense and real."""
    local = (local_pair(p, g)[1] for p, g in zip(params, gradients, strict=True))
    return [real_parts(g) if g.is_sparse or g.is_complex() else g for g in local]


def _settle(group: Group, counts: Sequence[Statistics], rule: str | None = None, scale: Scale | None = None) -> None:
    """Choose the thresholds, or move them, and begin to count again."""
    progress = group["calibration"]
    if not any(nonzero_rms(c) > 0 for c in counts):
        # all gradients are zero: nothing moves, and u stays as it is
        if not progress.get("warned") and is_calibrating(group):
            progress["warned"] = True
            warn_caller(
                f"u='auto' has seen no nonzero finite gradient of a group of {len(group['params'])} tensors in "
                f"{progress['seen']} steps, and keeps looking. Is the loss connected to these parameters?"
            )
        return
    if is_calibrating(group):
        chosen = choose(counts, rule=rule, scale=scale or group["scale"], d=group["d"])
    else:
        chosen = Thresholds.from_state(group["thresholds"]).follow(counts, steps=PERIOD)
    group["thresholds"] = chosen.state()
    group["calibration"] = {"steps": progress["steps"], "seen": 0}


def count_gradients(progress: dict[str, Any], n: int, positions: Sequence[int], gradients: Sequence[Tensor]) -> None:
    """Add the gradients of a step to the counters in `progress`; there are n parameters."""
    by_device: dict[torch.device, list[int]] = {}
    for i, g in enumerate(gradients):
        by_device.setdefault(g.device, []).append(i)
    for device, chosen in by_device.items():
        key = f"counters {device}"
        if key not in progress:
            empty = Counters.empty(n, histogram=True, device=device)
            progress[key] = {"table": empty.table, "bins": empty.bins, "logs": empty.logs}
        # a checkpoint may have been loaded onto another device, and the group may have got another parameter
        progress[key] = {name: _with_rows(table.to(device), n) for name, table in progress[key].items()}
        counters = Counters(**progress[key], sample_offset=progress["steps"] % 32)
        add([gradients[i] for i in chosen], [positions[i] for i in chosen], _UNBOUNDED, counters)


def _with_rows(table: Tensor, n: int) -> Tensor:
    """A table with at least n rows, zeros for those that it did not have."""
    return torch.cat([table, table.new_zeros(n - len(table), *table.shape[1:])]) if len(table) < n else table


def read_counts(progress: dict[str, Any], n: int, params: Sequence[Tensor]) -> list[Counts]:
    """The counts of all devices and of all ranks that hold a part of a parameter; waits for the devices."""
    total = [Counts()] * n
    for key, stored in progress.items():
        if key.startswith("counters "):
            total = [a + b for a, b in zip(total, read(_of_all_ranks(Counters(**stored), params)), strict=True)]
    return total


def _of_all_ranks(counters: Counters, params: Sequence[Tensor]) -> Counters:
    """Counters summed over the ranks that a parameter is spread over, in rank order."""
    for groups, members in positions_by_process_groups(params).items():
        if not groups:
            continue
        where = torch.tensor(members, device=counters.table.device)
        assert counters.bins is not None and counters.logs is not None
        for table in (counters.integers, counters.bins, counters.logs):
            table[where] = over_shards(table[where], groups, lambda stacked: stacked.sum(0))
        squares, largest = counters.reals[where].unbind(1)
        squares = over_shards(squares, groups, lambda stacked: stacked.sum(0))
        largest = over_shards(largest, groups, lambda stacked: stacked.amax(0))
        counters.reals[where] = torch.stack([squares, largest], 1)
    return counters
