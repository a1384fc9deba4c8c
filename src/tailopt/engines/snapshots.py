"""A simulation as a checkpoint: what it writes to continue later, and how it is restored.

The global state is one file, and every node that keeps something has its own. A checkpoint of another run or model, or
an incomplete one, is refused before any state changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tailopt.engines.engine import Engine
from tailopt.engines.model_state import ModelState
from tailopt.engines.sequential import copied_to
from tailopt.records import checkpoints
from tailopt.records.folder import Run
from tailopt.records.model_check import ModelLayout, TensorSpec, check_same_model
from tailopt.rounds.auto_thresholds import NO_AUTO_THRESHOLDS, AutoThresholdsByLevel, checked_state
from tailopt.rounds.round import DivergedState, GlobalState
from tailopt.rules.rule import ParamState


def save(
    run: Run, state: GlobalState, engine: Engine, auto_thresholds: AutoThresholdsByLevel = NO_AUTO_THRESHOLDS
) -> Path:
    """Write everything that a run needs to continue."""
    tensors, packed_global_state = checkpoints.pack(
        {
            "weights": dict(zip(state.names, state.weights, strict=True)),
            "buffers": state.buffers,
            "outer": dict(zip(state.names, state.outer_state, strict=True)),
            "average": None if state.average is None else dict(zip(state.names, state.average, strict=True)),
        },
        "global",
    )
    nodes: dict[int, dict[str, Tensor]] = {}
    packed_optimizer_states: dict[str, Any] = {}
    for node, states in engine.optimizer_states.items():
        nodes[node], packed_optimizer_states[str(node)] = checkpoints.pack(states, "inner")
    packed_diverged_states: dict[str, Any] = {}
    for node, diverged in engine.diverged_states.items():
        values = {"weights": diverged.weights, "buffers": diverged.buffers}
        own, packed_diverged_states[str(node)] = checkpoints.pack(values, "own")
        nodes[node] = {**nodes.get(node, {}), **own}
    # "inner" are the optimizer states, "own" the diverged states, and "taken" the local steps done: the format keeps
    # the names that it began with
    meta = {
        "global": packed_global_state,
        "inner": packed_optimizer_states,
        "own": packed_diverged_states,
        "taken": engine.steps_done,
        "probe": engine.repeatability_probe,
        # left out where nothing is "auto": checkpoints keep their bytes
        **({"thresholds": auto_thresholds.state()} if auto_thresholds.levels else {}),
    }
    return checkpoints.save(run.path, state.round, tensors, nodes, meta, origin=run.checkpoint_origin)


def check(run: Run, snapshot: checkpoints.Snapshot, path: Path) -> None:
    """Refuse a checkpoint of another run; raise DamagedCheckpoint for one that `restore` could not read."""
    run.check_checkpoint(snapshot, path)
    try:
        _contents(snapshot)
    except checkpoints.MALFORMED as error:
        manifest = path / checkpoints.MANIFEST
        raise checkpoints.damaged_checkpoint(manifest, f"lacks what a run needs ({error!r:.300})") from error


class _Contents(NamedTuple):
    shared: dict[str, Any]  # weights, buffers, outer, average
    steps_done: list[int]
    probe: dict[str, Any]
    optimizer_states: dict[int, list[ParamState]]
    diverged_states: dict[int, DivergedState]
    auto_thresholds: dict[str, Any]


def _contents(snapshot: checkpoints.Snapshot) -> _Contents:
    """Return what a checkpoint holds, in the form in which `save` took it."""
    meta, nodes = snapshot.meta, snapshot.nodes
    shared = checkpoints.unpack(snapshot.tensors, meta["global"])
    diverged = meta.get("own", {})  # older checkpoints lack it
    if meta["probe"] and not meta["probe"].keys() >= {"node", "round", "taken", "digest"}:
        raise KeyError(f"probe has {sorted(meta['probe'])}")
    return _Contents(
        {key: shared[key] for key in ("weights", "buffers", "outer", "average")},
        [int(steps) for steps in meta["taken"]],
        dict(meta["probe"]),
        {int(n): checkpoints.unpack(nodes[int(n)], packed) for n, packed in meta["inner"].items()},
        {int(n): DivergedState(**checkpoints.unpack(nodes[int(n)], packed)) for n, packed in diverged.items()},
        checked_state(meta.get("thresholds", {})),
    )


def restore(
    snapshot: checkpoints.Snapshot,
    state: GlobalState,
    engine: Engine,
    auto_thresholds: AutoThresholdsByLevel = NO_AUTO_THRESHOLDS,
) -> None:
    """Load a checkpoint into a new state and engine; refuse one of another model."""
    contents = _contents(snapshot)
    shared = contents.shared
    check_same_model(*_layouts(shared, state))
    auto_thresholds.load_state(contents.auto_thresholds)
    device = state.weights[0].device if state.weights else torch.device("cpu")
    for name, weight in zip(state.names, state.weights, strict=True):
        weight.copy_(shared["weights"][name])
    state.buffers = {name: buffer.to(state.buffers[name].device) for name, buffer in shared["buffers"].items()}
    state.outer_state = [copied_to(shared["outer"][name], device) for name in state.names]
    if shared["average"] is not None:
        state.average = [shared["average"][name].to(device) for name in state.names]
    state.round = snapshot.round
    engine.steps_done, engine.repeatability_probe = contents.steps_done, contents.probe
    engine.optimizer_states, engine.diverged_states = contents.optimizer_states, contents.diverged_states


def load_weights(run: Run, model: torch.nn.Module) -> int:
    """Load the weights and buffers of a run's last checkpoint into a model; returns after how many rounds they were."""
    snapshot = checkpoints.load_latest(run.path, lambda snapshot, path: check(run, snapshot, path))
    if snapshot is None:
        raise FileNotFoundError(f"{run.path} has no checkpoint, so there are no weights to load.")
    shared = _contents(snapshot).shared
    held = ModelState(model)
    state = held.global_state(average=shared["average"] is not None)
    check_same_model(*_layouts(shared, state))
    for name, weight in zip(state.names, state.weights, strict=True):
        weight.copy_(shared["weights"][name])
    state.buffers = shared["buffers"]
    held.load(state)
    return snapshot.round


def _layouts(shared: dict[str, Any], state: GlobalState) -> tuple[ModelLayout, ModelLayout]:
    """Return the layouts of a checkpoint and of the model that continues from it."""

    def specs(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
        return {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}

    weights = dict(zip(state.names, state.weights, strict=True))
    saved = ModelLayout(specs(shared["weights"]), specs(shared["buffers"]), shared["average"] is not None)
    return saved, ModelLayout(specs(weights), specs(state.buffers), state.average is not None)
