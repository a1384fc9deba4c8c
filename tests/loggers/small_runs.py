"""Small runs for the tests of loggers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

import tailopt


class Stopped(Exception):
    """What `stop_after` raises."""


def stop_after(round: int) -> Callable[[dict[str, Any]], None]:
    """A logger that stops the run."""

    def stop(row: dict[str, Any]) -> None:
        if row["round"] == round:
            raise Stopped

    return stop


def simulate(**more: Any) -> list[dict[str, Any]]:
    """The history of a small run."""
    torch.manual_seed(0)
    given = {"nodes": 3, "rounds": 4, "local_steps": 2, "progress": False, **more}
    algorithm = given.pop("algorithm", tailopt.algorithm("avg-biclip", ilr=0.1, i_u=0.5, i_d=0.1))
    return tailopt.simulate(torch.nn.Linear(2, 1), algorithm, **{"loss": loss, "batches": batches, **given}).history


def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - 1).square().mean()


def batches(node: int, round: int, step: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(4, 2, generator=generator)


def eventful_history(**more: Any) -> list[dict[str, Any]]:
    """A history with everything that a row can have: statistics, exclusions, nodes drawn twice, NaN, texts."""

    def broken(node: int, round: int, step: int, generator: torch.Generator) -> torch.Tensor:
        value = batches(node, round, step, generator)
        return value * math.nan if (node, round) == (1, 2) else value

    def evaluate(model: torch.nn.Module) -> dict[str, Any]:
        return {"error": 1 / 3, "worst": math.inf, "whole": True, "note": "<fine>", "by": {"class": [1, 0.25]}}

    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exclusion
        rows = simulate(
            batches=broken, statistics=True, evaluate=evaluate, evaluate_every=2, nodes=4, participants=3,
            sampling="proportional", weights=[5, 3, 1, 1], rounds=6, seed=3, **more,
        )  # fmt: skip
    assert any(row["excluded"] for row in rows), "choose another seed"
    assert any(len({*row["participants"]}) < 3 for row in rows), "choose another seed"
    return rows


def by_round(values: Mapping[str, Mapping[int, Any]]) -> dict[int, dict[str, Any]]:
    """Tag -> step -> value as step -> tag -> value, comparable."""
    found: dict[int, dict[str, Any]] = {}
    for name, steps in values.items():
        for step, value in steps.items():
            found.setdefault(step, {})[name] = value
    return same(found)


def same(values: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Values with NaN as a text, since NaN differs from itself."""
    return {
        step: {name: "NaN" if isinstance(x, float) and math.isnan(x) else x for name, x in row.items()}
        for step, row in values.items()
    }
