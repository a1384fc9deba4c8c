"""FSDP2 inside a node, nesting outside: 2 nodes of 2 ranks against the unsharded simulation.

Rows do not divide by the ranks, and the last layer has one: uneven and empty shards. The sharded gradient is averaged
in another order, so equality is to 1e-6, and d = 0: a dead zone's edge would turn a rounding into a step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tailopt
from tailopt.seeds import generator

ROOT = Path(__file__).parents[2]
NODES, RANKS, ROUNDS, STEPS, BATCH = 2, 2, 4, 3, 8
INNER = {"ilr": 0.05, "i_u": 0.1, "i_d": 0.0}
OUTER = {"olr": 0.5, "o_u": 0.05, "o_d": 0.0}
AUTO = {"ilr": 0.01, "i_u": "auto", "olr": 0.02, "o_u": "auto"}
BY_ROW = {"0.weight": torch.linspace(0.02, 0.2, 13).unsqueeze(1), "*": 0.1}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bi2clip": ("bi2clip", {**INNER, **OUTER}, {"statistics": "histograms"}),
    "thresholds by row": ("bi2clip", {**INNER, **OUTER, "i_u": BY_ROW, "o_u": BY_ROW}, {}),
    "outer state": ("adam-biclip", {**INNER, "olr": 0.05, "oeps": 1e-3}, {}),
    "kept inner state": (
        "diloco",
        {"ilr": 1e-3, "ieps": 1e-3, "olr": 0.5, "momentum": 0.9, "weight_decay": 0.01},
        {},
    ),
    "norms on both sides": ("bi2clip-l2", {**INNER, **OUTER, "o_u": 0.005, "weight_decay": 0.01}, {}),
    "norms by tensor": ("bi2clip-l2", {**INNER, **OUTER, "o_u": 0.002, "scope": "tensor"}, {}),
    "a sent preconditioner": ("adam2", {"ilr": 1e-3, "ieps": 1e-3, "olr": 0.01, "oeps": 1e-3}, {}),
    "projected": ("avg-sgd", {"ilr": 0.05}, {"projection": 2.0}),
    "proximal": ("bi2clip", {**INNER, **OUTER}, {"proximal": 5.0}),
    "one of two": ("avg-biclip", INNER, {"participants": 1, "statistics": True}),
    # chosen after 50 gradients: the last round steps with them
    "automatic thresholds": ("bi2clip", {**INNER, **OUTER, **AUTO}, {"rounds": 10}),
    "automatic norms": ("bi2clip-l2", {**INNER, **OUTER, **AUTO, "scope": "tensor"}, {"rounds": 10}),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 1))


def batches(node: int, round: int, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, 7, generator=generator), torch.randn(BATCH, 1, generator=generator) + node


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def gradients(net: nn.Module, node: int, shard: int, t: int, step: int) -> None:
    """This rank's half of the node's batch; FSDP2 takes the mean over the ranks."""
    half = slice(shard * BATCH // RANKS, (shard + 1) * BATCH // RANKS)
    x, y = batches(node, t, step, generator(0, "batch", t, node, step))
    loss(net, (x[half], y[half])).backward()


def whole(net: nn.Module) -> list[Any]:
    return [p.full_tensor().tolist() for p in net.parameters()]  # type: ignore[attr-defined]


def main(rank: int, store: str, out: str) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NODES * RANKS)
    mesh = init_device_mesh("cpu", (NODES, RANKS), mesh_dim_names=("node", "shard"))
    node, shard = mesh.get_coordinate()

    def sharded() -> Any:
        return fully_shard(model(), mesh=mesh["shard"])

    def train(opt: tailopt.NestedOptimizer, net: nn.Module, spoil: int = 0) -> dict[str, Any]:
        while not opt.finished:
            t = opt.node.round + 1
            for step in range(STEPS):
                opt.zero_grad()
                gradients(net, node, shard, t, step)
                if (t, step, node, shard) == (spoil, STEPS - 1, 1, 1):
                    net[0].weight.to_local().data[0, 0] = float("nan")
                opt.step()
        return {"weights": whole(net), "history": opt.history}

    found: dict[str, Any] = {"shapes": [list(p.to_local().shape) for p in sharded().parameters()]}  # type: ignore[attr-defined]
    for case, (name, settings, more) in CASES.items():
        net, algo = sharded(), tailopt.algorithm(name, **settings)
        opt = tailopt.NestedOptimizer.from_algorithm(
            net, algo, local_steps=STEPS, mesh=mesh["node"], **{"rounds": ROUNDS, **more}
        )
        found[case] = train(opt, net)
    for case, spoil in (("own loop", 0), ("one bad shard", 2)):
        net = sharded()
        inner = tailopt.BiClip(net.parameters(), lr=INNER["ilr"], u=INNER["i_u"], d=INNER["i_d"])
        opt = tailopt.NestedOptimizer(
            inner, "biclip", OUTER, local_steps=STEPS, model=net, mesh=mesh["node"], rounds=ROUNDS
        )
        found[case] = train(opt, net, spoil)
    try:
        net = sharded()
        tailopt.NestedOptimizer(tailopt.BiClip(net.parameters(), u=1.0), local_steps=STEPS, model=net)
    except ValueError as error:
        found["ranks as nodes"] = str(error)
    try:
        tailopt.NestedOptimizer(tailopt.BiClip(net.parameters(), u=1.0), local_steps=STEPS, model=net, mesh=mesh)
    except ValueError as error:
        found["two dimensions"] = str(error)
    Path(f"{out}/{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every rank saw."""
    here = tmp_path_factory.mktemp("sharded")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "tests.distributed.test_nested_sharded"]
    ranks = range(NODES * RANKS)
    processes = [
        subprocess.Popen([*command, str(rank), str(here / "store"), str(here)], env=environment, cwd=ROOT)
        for rank in ranks
    ]
    try:
        assert [process.wait(240) for process in processes] == [0] * len(processes)
    finally:
        for process in processes:
            process.kill()
    return [json.loads((here / f"{rank}.json").read_text()) for rank in ranks]


def unsharded(name: str, settings: dict[str, Any], more: dict[str, Any]) -> tailopt.Result:
    return tailopt.simulate(
        model(),
        tailopt.algorithm(name, **settings),
        loss=loss,
        batches=batches,
        nodes=NODES,
        local_steps=STEPS,
        progress=False,
        **{"rounds": ROUNDS, **more},
    )


def assert_equal_weights(found: list[Any], expected: nn.Module) -> None:
    for value, p in zip(found, expected.parameters(), strict=True):
        torch.testing.assert_close(torch.tensor(value), p.detach(), rtol=0, atol=1e-6)


def assert_equal_counts(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, counts in expected.items():
        rounded = {key: pytest.approx(x, rel=1e-4) if key in ("squares", "largest") else x for key, x in counts.items()}
        assert found[name] == rounded, name


def test_there_are_uneven_and_empty_shards(trained: list[dict[str, Any]]) -> None:
    assert [saw["shapes"][1] for saw in trained] == [[7], [6], [7], [6]]
    assert [saw["shapes"][3] for saw in trained] == [[1], [0], [1], [0]]


@pytest.mark.parametrize("case", CASES)
def test_equal_to_the_unsharded_simulation(case: str, trained: list[dict[str, Any]]) -> None:
    expected = unsharded(*CASES[case])
    for saw in trained:
        assert_equal_weights(saw[case]["weights"], expected.model)
        for row, other in zip(saw[case]["history"], expected.history, strict=True):
            assert row["participants"] == other["participants"]
            assert row["excluded"] == other["excluded"] == []
            assert_equal_counts(row["statistics"], other["statistics"])
            for level, numbers in other.get("thresholds", {}).items():
                found = row["thresholds"][level]
                assert (found is None) == (numbers is None)
                for key in numbers or ():
                    assert found[key] == pytest.approx(numbers[key], rel=1e-4)
        if case.startswith("automatic"):
            assert saw[case]["history"][-1]["thresholds"]["inner"] is not None


def test_an_own_loop_is_the_same_algorithm(trained: list[dict[str, Any]]) -> None:
    expected = unsharded(*CASES["bi2clip"])
    for saw in trained:
        assert_equal_weights(saw["own loop"]["weights"], expected.model)


def test_a_bad_shard_excludes_its_node_on_every_rank(trained: list[dict[str, Any]]) -> None:
    for saw in trained:
        excluded = [row["excluded"] for row in saw["one bad shard"]["history"]]
        assert [[e["node"] for e in row] for row in excluded] == [[], [1], [], []]
        assert excluded[1][0]["tensor"] == "0.weight" and excluded[1][0]["reason"] == "not finite"
        for value in saw["one bad shard"]["weights"]:
            assert torch.isfinite(torch.tensor(value)).all()
        assert saw["one bad shard"]["weights"] == trained[0]["one bad shard"]["weights"]


def test_the_ranks_of_a_node_cannot_be_nodes(trained: list[dict[str, Any]]) -> None:
    for rank, saw in enumerate(trained):
        first = rank // RANKS * RANKS
        assert f"Invalid mesh: ranks [{first}, {first + 1}] hold shards of one node" in saw["ranks as nodes"]
        assert "Invalid mesh: it has 2 dimensions (node, shard); need one" in saw["two dimensions"]


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
