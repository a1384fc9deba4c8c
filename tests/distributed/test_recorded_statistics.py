"""What real nodes record of their gradients: the counts of a simulation, and nothing where they were not asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tailopt
from tailopt import faults
from tailopt.distributed.errors import Disagreement
from tailopt.loggers import TensorBoard
from tailopt.loggers.row_numbers import row_numbers
from tailopt.records.checkpoints import digest
from tailopt.records.folder import Run
from tailopt.report.run_data import clipping, histograms
from tailopt.rounds.clipping_counts import HISTOGRAMS
from tailopt.seeds import generator
from tests.distributed import forked
from tests.distributed.test_auto_thresholds import batches, loss
from tests.loggers import small_runs, test_event_files

pytest.importorskip("resource", reason="processes are forked")

HERE = "tests.distributed.test_recorded_statistics"
NODES, ROUNDS, STEPS = 3, 4, 3
LOST = {2: {0, 1, 2}, 3: {1}}  # in round 2 nothing arrives
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "numbers": ("avg-biclip", {"ilr": 0.1, "i_u": 0.02, "i_d": 1e-3}, {"statistics": True}),
    "histograms": ("avg-biclip", {"ilr": 0.1, "i_u": 0.02, "i_d": 1e-3}, {"statistics": HISTOGRAMS}),
    "auto": (
        "bi2clip",
        {"ilr": 0.01, "olr": 0.02, **dict.fromkeys(("i_u", "i_d", "o_u", "o_d"), "auto")},
        {"statistics": HISTOGRAMS, "participants": 2, "local_steps": 20},
    ),
    "no coordinates": ("avg-sgd", {"ilr": 0.1}, {"statistics": HISTOGRAMS, "proximal": 0.1}),
    "none": ("avg-biclip", {"ilr": 0.1, "i_u": 0.02, "i_d": 1e-3}, {}),
}


def model() -> nn.Module:
    """A tensor that is sampled for its histogram, and a parameter without a gradient."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8300), nn.Tanh(), nn.Linear(8300, 1))
    net.unused = nn.Parameter(torch.ones(3))
    return net


def settings_of(case: str) -> dict[str, Any]:
    return {"local_steps": STEPS, "rounds": ROUNDS, **CASES[case][2]}


def trained(case: str, node: int, stop: tuple[int, int] | None = None, **more: Any) -> tailopt.NestedOptimizer:
    """stop: leave after a checkpoint at (round, step)."""
    name, given, _ = CASES[case]
    net, settings = model(), {**settings_of(case), **more}
    opt = tailopt.NestedOptimizer.from_algorithm(net, tailopt.algorithm(name, **given), **settings)
    faults.inject(opt, faults.Drop({t for t, who in LOST.items() if node in who}))
    begun = opt.resumed.step if opt.resumed is not None else 0
    while not opt.finished:
        t = opt.node.round + 1
        for step in range(begun, settings["local_steps"]):
            opt.zero_grad()
            loss(net, batches(node, t, step, generator(0, "batch", t, node, step))).backward()
            opt.step()
            if stop == (t, step):
                opt.checkpoint()
                return opt
        begun = 0
    opt.final = digest(net.state_dict())  # type: ignore[attr-defined]
    return opt


def every_case(rank: int, out: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case in CASES:
        opt = trained(case, rank, run=f"{out}/{case}")
        found[case] = {"rows": [row["statistics"] for row in opt.history], "final": opt.final}  # type: ignore[attr-defined]
    trained("histograms", rank, (3, 1), run=f"{out}/stopped")
    opt = trained("histograms", rank, run=f"{out}/stopped", resume=True)
    found["stopped"] = {"rows": [row["statistics"] for row in opt.history], "final": opt.final}  # type: ignore[attr-defined]
    return found


def test_real_nodes_record_the_counts_of_the_simulation(server: forked.Server, tmp_path: Path) -> None:
    ends = server.run(f"{HERE}:every_case", NODES, out=str(tmp_path))
    assert [end.status for end in ends] == [0] * NODES, ends[0].said
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for case, (name, given, _) in CASES.items():
            result = tailopt.simulate(
                model(), tailopt.algorithm(name, **given), loss=loss, batches=batches, nodes=NODES, progress=False,
                drops=lambda t, source: LOST.get(t, ()), run=tmp_path / f"simulated {case}", **settings_of(case),
            )  # fmt: skip
            rows = [row["statistics"] for row in result.history]
            for end in ends:
                assert end.value[case]["rows"] == rows, case
            assert [row["statistics"] for row in Run.open(tmp_path / case).history()] == rows, case
            if case == "histograms":
                assert all(end.value["stopped"]["rows"] == rows for end in ends)
                assert rows[0]["2.weight"]["above"] and rows[0]["2.weight"]["below"] and rows[0]["2.weight"]["octaves"]
                assert rows[0]["unused"]["elements"] == 0 and rows[1]["2.weight"]["elements"] == 0
                assert rows[2]["2.weight"]["elements"] == 8300 * STEPS * 2, "the lost node does not count"
    finally:
        torch.set_num_threads(threads)
    first = ends[0].value
    assert first["none"]["rows"] == [{}] * ROUNDS
    finals = {first[case]["final"] for case in ("numbers", "histograms", "none", "stopped")}
    assert len(finals) == 1, "counting moves no weight"


def test_what_is_recorded_is_shown_and_loaded(server: forked.Server, tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    ends = server.run(f"{HERE}:one_run", NODES, out=str(tmp_path / "run"))
    assert [end.status for end in ends] == [0] * NODES, ends[0].said
    rows = Run.open(tmp_path / "run").history()
    assert clipping(rows, 100) and histograms(rows), "the report has charts of them"
    tensors = tailopt.records.load(tmp_path / "run").tensors
    assert {*tensors.reset_index()["tensor"]} == {*rows[0]["statistics"]} and tensors["above"].sum() > 0


def test_an_event_file_of_real_nodes_holds_every_number(server: forked.Server, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    ends = server.run(f"{HERE}:one_run", NODES, out=str(tmp_path / "run"), log=True)
    assert [end.status for end in ends] == [0] * NODES, ends[0].said
    numbers, _ = test_event_files.read(tmp_path / "run" / "tensorboard")
    rows = Run.open(tmp_path / "run").history()
    assert small_runs.by_round(numbers) == small_runs.same({row["round"]: row_numbers(row) for row in rows})
    assert numbers["gradients/2.weight/above"][1] == rows[0]["statistics"]["2.weight"]["above"] > 0


def one_run(rank: int, out: str, log: bool = False) -> None:
    trained("histograms", rank, run=out, loggers=[TensorBoard()] if log else [])


def test_a_model_of_which_nothing_moves_is_refused() -> None:
    """Before there is a group of processes."""
    frozen = model().requires_grad_(False)
    with pytest.raises(
        ValueError, match="Invalid model: no parameter requires a gradient, so there is nothing to train"
    ):
        tailopt.NestedOptimizer.from_algorithm(frozen, tailopt.algorithm("avg-sgd", ilr=0.1), local_steps=1)


def deviates(rank: int) -> list[str]:
    algorithm = tailopt.algorithm("avg-sgd", ilr=0.1)
    with pytest.raises(Disagreement) as disagreement:
        tailopt.NestedOptimizer.from_algorithm(model(), algorithm, local_steps=1, statistics=rank == 1)
    net = model()
    inner = torch.optim.AdamW(net.parameters())
    with pytest.raises(ValueError, match="Invalid statistics") as unknown:
        tailopt.NestedOptimizer(inner, model=net, local_steps=1, statistics=True)
    return [str(disagreement.value), str(unknown.value)]


def test_a_node_without_them_is_named_and_an_own_optimizer_refused(server: forked.Server) -> None:
    for end in server.run(f"{HERE}:deviates", 2):
        assert end.status == 0, end.said
        disagreement, unknown = end.value
        assert disagreement.startswith("Node 1 disagrees with node 0 on statistics: it has true, and node 0 has false.")
        assert (
            "do not know what an inner optimizer of yours clips, here AdamW" in unknown and "from_algorithm" in unknown
        )
