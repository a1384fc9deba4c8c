"""Momentum as a part of the rules biclip and sign, inside and outside."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tailopt
from tailopt.rules.table import INNER

NUMBERS = {"lr": 0.1, "u": 0.5, "d": 0.1, "weight_decay": 0.1, "dead_zone": 0.0, "momentum": 0.9}


def gradients(step: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(step)
    return [torch.randn(300, generator=source), torch.randn(4, 5, generator=source)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("u", [0.5, [0.5, 0.5]])
def test_the_rule_has_the_bits_of_the_optimizer(dtype: torch.dtype, u: Any) -> None:
    params = [torch.zeros(300, dtype=dtype), torch.ones(4, 5, dtype=dtype)]
    others = [nn.Parameter(p.clone()) for p in params]
    opt = tailopt.BiClip(others, lr=0.1, u=0.5, d=0.1, weight_decay=0.1, momentum=0.9)
    states: list[dict[str, Any]] = [{}, {}]
    for step in range(5):
        grads = [g.to(dtype) for g in gradients(step)]
        INNER["biclip"].step(params, grads, states, {**NUMBERS, "u": u})
        for p, g in zip(others, grads, strict=True):
            p.grad = g
        opt.step()
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
    assert all(
        torch.equal(s["momentum_buffer"], opt.state[p]["momentum_buffer"]) for s, p in zip(states, others, strict=True)
    )
    assert [s["step"] for s in states] == [5, 5]


def test_the_signs_of_a_mean() -> None:
    p, states = torch.zeros(3), [dict[str, Any]()]
    for g in ([1.0, -1.0, 0.0], [1.0, 0.5, 0.0], [-1.0, 0.9, 0.0]):
        INNER["sign"].step([p], [torch.tensor(g)], states, {"lr": 1.0, "dead_zone": 0.0, "momentum": 0.5})
    # means, corrected: 1, -1; then 1, 0; then -1/7, 0.51
    torch.testing.assert_close(p, torch.tensor([-1.0, 0.0, 0.0]))


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = (model(batch).squeeze(-1) - batch.sum(-1)).square().mean()
    return loss


def batch(node: int, round: int, step: int, generator: torch.Generator | None = None) -> Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(100 * round + 10 * node + step))


def simulate(model: nn.Module, **settings: Any) -> tailopt.Result:
    more = {key: settings.pop(key) for key in ("run", "resume", "rounds") if key in settings}
    algorithm = tailopt.algorithm("avg-biclip", ilr=0.1, i_u=1.0, i_d=0.1, inner_momentum=0.9, **settings)
    common: dict[str, Any] = {"loss": squares, "batches": batch, "nodes": 2, "local_steps": 3, "progress": False}
    return tailopt.simulate(model, algorithm, **{"rounds": 4, **common, **more})


@pytest.mark.parametrize("inner_state", ["reset", "keep"])
def test_a_simulation_as_by_hand(inner_state: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    centre = copy.deepcopy(model)
    nodes = [copy.deepcopy(model) for _ in range(2)]
    opts = [tailopt.BiClip(node.parameters(), lr=0.1, u=1.0, d=0.1, momentum=0.9) for node in nodes]
    for t in range(1, 5):
        for i, (node, opt) in enumerate(zip(nodes, opts, strict=True)):
            node.load_state_dict(centre.state_dict())
            if inner_state == "reset":
                opt.state.clear()
            for step in range(3):
                opt.zero_grad()
                squares(node, batch(i, t, step)).backward()
                opt.step()
        with torch.no_grad():
            for p, *each in zip(centre.parameters(), *(node.parameters() for node in nodes), strict=True):
                p.copy_(sum(each) / 2)
    found = simulate(model, inner_state=inner_state).model
    for p, q in zip(found.parameters(), centre.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("inner_state", ["reset", "keep"])
def test_a_resumed_simulation_has_the_same_bits(tmp_path: Path, inner_state: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    whole = simulate(model, inner_state=inner_state).model
    simulate(model, inner_state=inner_state, rounds=2, run=tmp_path / "run")
    resumed = simulate(model, inner_state=inner_state, rounds=4, run=tmp_path / "run", resume=True).model
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), resumed.parameters(), strict=True))
