"""Thresholds that are "auto" in a simulation: steps before and after calibration, who is looked at, resuming."""

from __future__ import annotations

import importlib
import math
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tailopt
from tailopt.engines.batches import FunctionBatches
from tailopt.engines.configuration_rounds import Configurations, Replica
from tailopt.engines.configurations import train_configurations
from tailopt.records import checkpoints
from tailopt.records.folder import Run
from tailopt.rounds.policy import RoundPolicy
from tailopt.tasks.synthetic import Synthetic

INNER = {"ilr": 0.02, "i_u": "auto", "i_d": "auto"}
OUTER = {"olr": 0.05, "o_u": "auto", "o_d": "auto"}
NODES, STEPS = 2, 13  # 26 gradients in a round: two rounds of calibration
ALGORITHMS = {
    "elements": ("bi2clip", {**INNER, **OUTER}),
    "momentum": (
        "bi2clip",
        {**INNER, **OUTER, "momentum": 0.5, "inner_momentum": 0.9, "inner_state": "keep", "weight_decay": 0.1},
    ),
    "norms": ("bi2clip-l2", {**INNER, **OUTER, "scale": "follow"}),
    "norms by tensor": ("adam-l2clip", {"ilr": 0.02, "i_u": "auto", "olr": 0.01, "oeps": 1e-3, "scope": "tensor"}),
}


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def squares(model: torch.nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = (model(batch).squeeze(-1) - batch.sum(-1)).square().mean()
    return found


def batches(node: int, round: int, step: int, generator: torch.Generator) -> Tensor:
    return torch.randn(8, 3, generator=generator)


def simulate(name: str, given: dict[str, Any], **more: Any) -> tailopt.Result:
    settings = {"loss": squares, "batches": batches, "nodes": NODES, "rounds": 4, "local_steps": STEPS, **more}
    model = settings.pop("model", None) or net()
    return tailopt.simulate(model, tailopt.algorithm(name, **given), progress=False, **settings)


def moved(model: torch.nn.Module) -> Tensor:
    pairs = zip(model.parameters(), net().parameters(), strict=True)
    return torch.cat([(a - b).detach().reshape(-1) for a, b in pairs])


def test_calibration_steps_by_the_sign_and_outside_by_the_mean() -> None:
    """One node, one step, then one round of it: x - lr * sign(g), and x + delta outside; norms have the length lr."""
    for name, given in (("avg-biclip", INNER), ("bi2clip", {**INNER, **OUTER})):
        one = moved(simulate(name, given, nodes=1, local_steps=1, rounds=1).model)
        torch.testing.assert_close(one.abs(), torch.full_like(one, 0.02), rtol=1e-5, atol=0)
    for given in (INNER, {**INNER, "inner_momentum": 0.9}):
        many = moved(simulate("avg-biclip", given, nodes=1, local_steps=7, rounds=1).model)
        assert many.abs().max() <= 7 * 0.02 * (1 + 1e-5)
    one = moved(simulate("bi2clip-l2", {**INNER, **OUTER}, nodes=1, local_steps=1, rounds=1).model)
    assert float(one.norm()) == pytest.approx(0.02, rel=1e-4)


def test_one_node_is_the_optimizer_in_a_plain_loop() -> None:
    """A round of 50 steps is the calibration of `BiClip(u="auto")`, and the next one has its thresholds."""
    for more in ({}, {"momentum": 0.9}):
        given = {**INNER, **({"inner_momentum": 0.9, "inner_state": "keep"} if more else {})}
        result = simulate("avg-biclip", {**given, "weight_decay": 0.1}, nodes=1, local_steps=50, rounds=2)
        model = net()
        opt = tailopt.BiClip(model.parameters(), lr=0.02, u="auto", d="auto", weight_decay=0.1, **more)  # type: ignore[arg-type]
        for k in range(100):
            t, step = divmod(k, 50)
            if k == 99:
                u = opt.param_groups[0]["thresholds"]["u"]
            opt.zero_grad()
            squares(model, batches(0, t + 1, step, tailopt.seeds.generator(0, "batch", t + 1, 0, step))).backward()
            opt.step()
        assert result.history[1]["thresholds"]["inner"]["u"] == u
        torch.testing.assert_close(moved(result.model), moved(model))


def test_steps_are_bounded_by_the_rate(recwarn: pytest.WarningsRecorder) -> None:
    """The guard's bound is z * lr in calibration and z * lr * u / s later, and excludes nobody."""
    for scale in ("first", "follow"):
        result = simulate("bi2clip", {**INNER, **OUTER, "scale": scale}, rounds=8)
        assert not any(row["excluded"] for row in result.history) and not recwarn.list
        assert [row["thresholds"]["inner"] is None for row in result.history] == [True] * 2 + [False] * 6
        assert [row["thresholds"]["outer"] is None for row in result.history] == [True] + [False] * 7
        for row in result.history[2:]:
            for level in row["thresholds"].values():
                for u, d, s in zip(level["u"], level["d"], level["s"], strict=True):
                    assert d == pytest.approx(u / 3) and (u <= s if scale == "first" else u == s)
        assert len(result.thresholds) == 2 and "|delta|" in result.thresholds[1]


def test_a_node_beyond_the_bound_is_excluded_and_not_looked_at() -> None:
    """An excluded node leaves the thresholds as if its contribution had been lost: neither is counted."""

    def poisoned(node: int, round: int, step: int, generator: torch.Generator) -> Tensor:
        x = batches(node, round, step, generator)
        return x * math.nan if (node, round, step) == (1, 2, 5) else x

    given = {**INNER, **OUTER}
    with pytest.warns(UserWarning, match="Round 2 goes on without node 1: not finite"):
        excluded = simulate("bi2clip", given, nodes=3, rounds=4, batches=poisoned)
    lost = simulate("bi2clip", given, nodes=3, rounds=4, drops=lambda t, source: [1] if t == 2 else [])
    assert [row["thresholds"] for row in excluded.history] == [row["thresholds"] for row in lost.history]
    assert checkpoints.digest(excluded.model.state_dict()) == checkpoints.digest(lost.model.state_dict())
    everybody = simulate("bi2clip", given, nodes=3, rounds=4)
    assert everybody.history[3]["thresholds"] != lost.history[3]["thresholds"]


@pytest.mark.parametrize(("case", "after"), [*((case, 1) for case in ALGORITHMS), ("momentum", 3)])
def test_resumed_in_calibration_and_later(case: str, after: int, tmp_path: Path) -> None:
    def stop(row: dict[str, Any]) -> None:
        if row["round"] == after:
            raise KeyboardInterrupt

    name, given = ALGORITHMS[case]
    more: dict[str, Any] = {"rounds": 5, "schedules": {"ilr": tailopt.schedules.cosine(90, per="step")}}
    if case == "norms":
        more["participants"] = 1
    whole = simulate(name, given, run=tmp_path / "whole", **more)
    with pytest.raises(KeyboardInterrupt):
        simulate(name, given, run=tmp_path / "stopped", loggers=[stop], **more)
    resumed = simulate(name, given, run=tmp_path / "stopped", resume=True, **more)
    assert resumed.history == whole.history and resumed.thresholds == whole.thresholds
    assert resumed.history[-1]["thresholds"]["inner"] is not None
    assert not any(row["excluded"] for row in whole.history)
    last = [checkpoints.load_latest(Run.open(tmp_path / run).path) for run in ("whole", "stopped")]
    assert last[0] is not None and last[1] is not None
    assert last[0].meta == last[1].meta
    assert checkpoints.digest(last[0].tensors) == checkpoints.digest(last[1].tensors)
    assert (tmp_path / "stopped" / "log.txt").read_text().count(whole.thresholds[0]) == 1


def test_the_reference_of_the_benchmark() -> None:
    """The same rule with exact quantiles, written for stacked settings."""
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        reference = importlib.import_module("thresholds")
    finally:
        sys.path.remove(folder)
    task, rounds, rate = Synthetic(), 15, 0.04
    order = reference.batch_rows(task, [0], rounds * reference.LOCAL_STEPS)
    problem = reference.Problem(task, [0], order, "cpu")
    expected = float(reference.rule_errors(problem, rounds, [reference.candidates()[reference.DEFAULT]], [rate]))
    found = tailopt.simulate(
        task.model(0),
        tailopt.algorithm("avg-biclip", ilr=rate, i_u="auto", i_d="auto"),
        loss=task.loss,
        data=task.nodes(0, reference.NODES),
        batch_size=reference.BATCH,
        rounds=rounds,
        local_steps=reference.LOCAL_STEPS,
        progress=False,
    )
    assert task.evaluate(found.model, 0)["error"] == pytest.approx(expected, rel=5e-3)


def test_gradients_of_zero_are_waited_out() -> None:
    """Nothing moves, and one warning says why; the first round with a gradient ends the calibration."""

    def late(node: int, round: int, step: int, generator: torch.Generator) -> Tensor:
        return torch.randn(8, 3, generator=generator) * (round > 5)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = torch.nn.Linear(3, 1, bias=False)
        result = simulate("bi2clip", {**INNER, **OUTER}, rounds=8, batches=late, model=model)
    assert [str(w.message).partition(":")[0] for w in said] == ["Outer thresholds", "Inner thresholds"]
    assert "has seen no nonzero finite gradient, and keeps looking" in str(said[1].message)
    assert [row["thresholds"]["inner"] is None for row in result.history] == [True] * 6 + [False] * 2


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("avg-biclip", {"i_d": 0.1}, "i_d=0.1 with i_u='auto'; need i_d='auto' or i_d=0"),
        ("bi2clip", {**OUTER, "o_d": 1e-3}, "o_d=0.001 with o_u='auto'; need o_d='auto' or o_d=0"),
        ("avg-biclip", {"scale": "last"}, "Invalid scale: 'last'; need one of 'first', 'follow'"),
        ("avg-biclip", {"i_u": 1.0, "scale": "first"}, 'Invalid scale: no threshold is "auto"'),
        ("avg-biclip", {"i_u": {"*.bias": "auto", "*": 1.0}}, '"auto" is for all parameters. Write i_u="auto"'),
        ("avg-biclip+adam", {"ieps": 1e-8}, 'Invalid i_u: "auto" is for biclip, biclip-l2 and l2clip, not for biclip'),
        ("avg-biclip", {"i_u": math.inf}, "i_u=inf with i_d='auto'; need a finite i_u >= 0"),
        ("avg-biclip", {"i_u": "none"}, "Invalid thresholds: i_u='none'; need a number or a tensor"),
    ],
)
def test_settings_that_do_not_fit(name: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        tailopt.algorithm(name, **{**INNER, **given})


def test_what_auto_cannot_be_combined_with() -> None:
    with pytest.raises(ValueError, match='Invalid schedule of i_u: "auto" is chosen anew in every round'):
        simulate("avg-biclip", INNER, schedules={"i_u": tailopt.schedules.power(-0.5)})
    with pytest.raises(ValueError, match='Invalid engine: "vectorized" with i_u="auto".*engine="sequential"'):
        simulate("avg-biclip", INNER, engine="vectorized")


def test_outer_thresholds_work_with_the_vectorized_engine_and_configurations_run_one_by_one() -> None:
    given = {**OUTER, "ilr": 0.05}
    rows = [simulate("biclip-sgd", given, engine=engine).history for engine in ("sequential", "vectorized")]
    for a, b in zip(*rows, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    policy = RoundPolicy(rounds=2, local_steps=5, inner_state="reset", nodes=NODES, weights=(1.0,) * NODES)
    replica = Replica(model=net(), batches=FunctionBatches(batches, nodes=NODES, steps=5, seed=0), policy=policy)
    task, algorithms = Configurations(replicas=(replica,), loss=squares), [tailopt.algorithm("avg-biclip", **INNER)]
    result = train_configurations(task, algorithms)
    assert result.route.name == "sequential" and '"auto" follow the gradients of one configuration' in str(result.route)
    with pytest.raises(ValueError, match='thresholds that are "auto" follow .* Take engine="auto"'):
        train_configurations(task, algorithms, engine="vectorized")


def test_a_lower_threshold_that_is_a_share_of_a_number() -> None:
    given = {"ilr": 0.1, "i_u": {"*.bias": 0.3, "*": 0.6}}
    found = simulate("avg-biclip", {**given, "i_d": "auto"}, schedules={"i_u": tailopt.schedules.power(-0.5)})
    lower = {"i_d": {"*.bias": 0.1, "*": 0.2}}
    schedules = dict.fromkeys(("i_u", "i_d"), tailopt.schedules.power(-0.5))
    torch.testing.assert_close(
        moved(found.model), moved(simulate("avg-biclip", {**given, **lower}, schedules=schedules).model)
    )
    assert "thresholds" not in found.history[0] and found.thresholds == ()
