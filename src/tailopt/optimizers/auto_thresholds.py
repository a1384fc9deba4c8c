"""`u="auto"` in a loop of one's own: what a param group counts, and when its thresholds change.

    steps 1 to 50       calibration: a step is lr * sign(g), and every gradient is counted
    then                (lr / s) * clip(g; u, d), where one gradient in 50 is counted, and u and d follow it

Everything is in the param group, so that a checkpoint has it: `group["thresholds"]` (None during calibration) and
`group["calibration"]`, the counters so far. The counters are where the parameters are, and read once per 50 steps.
`tailopt.thresholds` has the rules, and docs/results/thresholds.md what they were chosen by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tailopt.clipping.counts import Counts, add, read
from tailopt.clipping.dtensor import over_shards, positions_by_process_groups
from tailopt.clipping.operators import Number, check_kind
from tailopt.native.clip import Counters
from tailopt.optimizers.threshold_warning import warn_caller
from tailopt.thresholds import (
    AUTO,
    CALIBRATION,
    SCALES,
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
        return {**group, "d": lower_of_auto(group["u"])}
    ratio_of_auto(group["d"])
    if group["scale"] not in SCALES:
        raise ValueError(f"Invalid scale: {group['scale']!r}; need one of {', '.join(map(repr, SCALES))}.")
    for name in ("capturable", "differentiable"):
        if group[name]:
            raise ValueError(f"Invalid {name}: True with u='auto', which reads the gradients on the host; set u and d.")
    if group["thresholds"] is not None:
        tensors = len(Thresholds.from_state(group["thresholds"]).u)
        if tensors > 1 and tensors != len(group.get("params", ())):
            raise ValueError(
                f"Invalid thresholds: they are of {tensors} tensors, and the group has {len(group.get('params', ()))} "
                "parameters. Add parameters with add_param_group, or set group['thresholds'] = None to calibrate again."
            )
    return {**group, "u": float("inf"), "d": 0.0}


def numbers(group: Group) -> list[tuple[Number, Number, float]]:
    """u, d and s of every parameter of a group, or one entry for all; a step is (lr / s) * clip(g; u, d)."""
    if not is_auto(group["u"]):
        return [(group["u"], lower_of_auto(group["u"]) if is_auto(group["d"]) else group["d"], 1.0)]
    if group["thresholds"] is None:
        return [(1.0, 1.0, 1.0)]  # sign descent
    check_auto(group)  # the list of parameters may have changed since
    thresholds = Thresholds.from_state(group["thresholds"])
    return [thresholds.numbers(i) for i in range(len(thresholds.u))]


def is_calibrating(group: Group) -> bool:
    """Whether the thresholds of a group are not chosen yet."""
    return is_auto(group["u"]) and group["thresholds"] is None


def is_due(group: Group) -> bool:
    """Count a step of a group; returns whether its gradients are looked at."""
    progress = group["calibration"] = group["calibration"] or {"steps": 0, "seen": 0}
    progress["steps"] += 1
    return is_calibrating(group) or progress["steps"] % PERIOD == 0


def observe(group: Group, positions: Sequence[int], gradients: Sequence[Tensor]) -> None:
    """Look at the gradients of a step that was taken, and choose or move the thresholds where it is time.

    Args:
        positions: of the parameters in the group.
        gradients: of these parameters, or the means that the step clipped; of a sharded one this rank's part.
    """
    progress = group["calibration"]
    _count(progress, len(group["params"]), positions, gradients)
    progress["seen"] += 1
    if is_calibrating(group) and progress["seen"] < CALIBRATION:
        return
    counts = _read(progress, len(group["params"]), group["params"])
    if not any(nonzero_rms(c) > 0 for c in counts):
        # all gradients are zero: signs move nothing, and u stays as it is
        if not progress.get("warned") and is_calibrating(group):
            progress["warned"] = True
            warn_caller(
                f"u='auto' has seen no nonzero finite gradient of a group of {len(counts)} tensors in "
                f"{progress['seen']} steps, and keeps looking. Is the loss connected to these parameters?"
            )
        return
    if is_calibrating(group):
        chosen = choose(counts, scale=group["scale"], d=group["d"])
    else:
        chosen = Thresholds.from_state(group["thresholds"]).follow(counts, steps=PERIOD)
    group["thresholds"] = chosen.state()
    group["calibration"] = {"steps": progress["steps"], "seen": 0}


def _count(progress: dict[str, Any], n: int, positions: Sequence[int], gradients: Sequence[Tensor]) -> None:
    by_device: dict[torch.device, list[int]] = {}
    for i, g in enumerate(gradients):
        by_device.setdefault(g.device, []).append(i)
    for device, chosen in by_device.items():
        key = f"counters {device}"
        if key not in progress:
            empty = Counters.empty(n, histogram=True, device=device)
            progress[key] = {"table": empty.table, "bins": empty.bins, "logs": empty.logs}
        # a checkpoint may have been loaded onto another device
        progress[key] = {name: table.to(device) for name, table in progress[key].items()}
        counters = Counters(**progress[key], sample_offset=progress["steps"] % 32)
        add([gradients[i] for i in chosen], [positions[i] for i in chosen], _UNBOUNDED, counters)


def _read(progress: dict[str, Any], n: int, params: Sequence[Tensor]) -> list[Counts]:
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
