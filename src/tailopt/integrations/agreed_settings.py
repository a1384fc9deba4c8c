"""What the server and the clients of a federation must have in common, as JSON, and how two of them differ in words."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from tailopt.algorithms import Algorithm
from tailopt.distributed.agreement import as_fact, first_difference, shape
from tailopt.engines.model_state import trainable_parameters
from tailopt.records.tensor_bytes import digest
from tailopt.rounds.hyperparameters import AlgorithmHyperparameters


def agreed_settings(
    model: torch.nn.Module,
    algorithm: Algorithm,
    hyperparameters: AlgorithmHyperparameters,
    nodes: int,
    local_steps: int,
    seed: int,
    proximal: float = 0.0,
) -> dict[str, Any]:
    """Return the settings that decide what a client sends, with the model: what is frozen by its digest."""
    trained, buffers = trainable_parameters(model), dict(model.named_buffers())
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    auto_thresholds = hyperparameters.inner.auto_thresholds
    settings: dict[str, Any] = as_fact(
        {
            "algorithm": algorithm.name,
            "inner": hyperparameters.inner.at(1),
            "inner_state": algorithm.inner_state,
            "send_preconditioner": algorithm.send_preconditioner,
            "thresholds": None if auto_thresholds is None else auto_thresholds.described(),
            "schedules": hyperparameters.inner.sampled_schedules(None, local_steps),
            "nodes": nodes,
            "local_steps": local_steps,
            "seed": seed,
            "proximal": float(proximal),
            "parameters": {name: shape(p) for name, p in trained.items()},
            "buffers": {name: shape(b) for name, b in buffers.items()},
            "frozen parameters": digest(frozen) if frozen else None,
        }
    )
    return settings


def disagreement(server: Mapping[str, Any], client: Mapping[str, Any]) -> str:
    """Return the first setting in which a client differs from the server; empty where they agree.

    Examples:
        >>> disagreement({"local_steps": 5}, {"local_steps": 3})
        'local_steps is 3 there and 5 on the server'
    """
    found = first_difference(dict(server), dict(client))
    return "" if found is None else f"{found[0]} is {found[2]} there and {found[1]} on the server"


def settings_digest(settings: Mapping[str, Any]) -> str:
    """Return the SHA-256 of settings, which both sides compute."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
