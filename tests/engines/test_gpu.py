"""On a CUDA device: the simulation, real nodes that share the device, and what NCCL can do with one device.

    python -m pytest -m gpu tests/engines/test_gpu.py -s

prints what was run. Real nodes compute on the device; what they moved is staged to the CPU and exchanged there, over
gloo, and the outer step is taken there. So they are compared with the simulation on the same device in fp64, to 1e-9,
and with each other to the bit; whether fp32 has the simulation's very bits is printed, not asked for: the outer step is
the CPU's there, and the device's in the simulation.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tailopt
from tailopt.algorithms import ALGORITHMS
from tailopt.records.checkpoints import digest
from tailopt.seeds import generator
from tests.distributed import nodes

ROOT = Path(__file__).parents[2]
COUNT, ROUNDS, STEPS = 2, 4, 3
KINDS = {"fp64": torch.float64, "fp32": torch.float32}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def model(dtype: torch.dtype = torch.float64) -> nn.Module:
    """No bias before BatchNorm: its gradient is rounding noise, which a lower threshold lifts to full steps."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 9, bias=False), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 3)).to(dtype)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = (part.to(next(model.parameters())) for part in batch)
    return (model(x) - y).square().mean()


def simulated(name: str, device: str, count: int = COUNT, dtype: torch.dtype = torch.float64) -> tailopt.Result:
    return tailopt.simulate(
        model(dtype),
        nodes.algorithm(name),
        loss=loss,
        batches=nodes.batches,
        nodes=count,
        rounds=ROUNDS,
        local_steps=STEPS,
        average=True,
        device=device,
        progress=False,
    )


# ---- what a process does ----


def train(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """As a node, on the device."""
    net, node = model(dtype).cuda(), dist.get_rank()
    opt = tailopt.NestedOptimizer.from_algorithm(net, nodes.algorithm(name), local_steps=STEPS, rounds=ROUNDS)
    assert all(p.is_cuda for p in net.parameters()) and not opt.node.x.is_cuda
    while not opt.finished:
        t = opt.node.round + 1
        for step in range(STEPS):
            opt.zero_grad()
            loss(net, nodes.batches(node, t, step, generator(0, "batch", t, node, step))).backward()
            opt.step()
    found = {key: value.cpu() for key, value in net.state_dict().items()}
    return {
        "digest": digest(found),
        "values": {key: value.double().reshape(-1).tolist() for key, value in found.items()},
        "excluded": sum(len(row["excluded"]) for row in opt.history),
    }


def main(what: str, rank: int, count: int, port: str, out: str) -> None:
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": str(count)})
    torch.set_num_threads(1)
    torch.cuda.set_device(0)
    answer: dict[str, Any] = {"pid": os.getpid(), "device": str(torch.cuda.get_device_properties(0).uuid)}
    try:
        dist.init_process_group(what)
        if "nccl" in what:  # the device's own collective
            ones = torch.ones(1000, device="cuda")
            dist.all_reduce(ones)
            torch.cuda.synchronize()
            answer["sum"] = float(ones.sum())
        begun = time.perf_counter()
        answer["trained"] = {f"{n}, {kind}": train(n, dtype) for n in ALGORITHMS for kind, dtype in KINDS.items()}
        answer["seconds"] = time.perf_counter() - begun
        answer["memory"] = torch.cuda.max_memory_allocated()
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    Path(out, f"{rank}.json").write_text(json.dumps(answer))
    if "error" in answer:
        os._exit(0)  # NCCL's threads may wait for the other for ever
    dist.destroy_process_group()


# ---- starting them ----


def started(what: str, count: int, out: Path, seconds: float = 400) -> list[dict[str, Any]]:
    """What every process answered; one that did not has ended without a word, or not at all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.engines.test_gpu", what]
    processes = [
        subprocess.Popen([*command, str(rank), str(count), port, str(out)], env=environment, cwd=ROOT)
        for rank in range(count)
    ]
    ended: list[int | str] = []
    until = time.monotonic() + seconds
    for process in processes:
        try:
            ended.append(process.wait(max(until - time.monotonic(), 0.1)))
        except subprocess.TimeoutExpired:
            process.kill()
            ended.append(f"killed after {seconds:g} s")
            process.wait()
    files = [out / f"{rank}.json" for rank in range(count)]
    return [
        json.loads(file.read_text()) if file.exists() else {"error": f"no answer; the process ended with {code}"}
        for file, code in zip(files, ended, strict=True)
    ]


def difference(found: dict[str, list[float]], expected: nn.Module) -> float:
    """The largest between a node's tensors and a model's, relative to 1 or to the element where that is larger."""
    worst = 0.0
    for key, value in expected.state_dict().items():
        there = value.cpu().double().reshape(-1)
        here = torch.tensor(found[key], dtype=torch.float64)
        worst = max(worst, float(((here - there).abs() / there.abs().clamp(min=1)).max()))
    return worst


def told(text: str) -> None:
    print(f"\n{text}", flush=True)


def same_as_simulated(answers: list[dict[str, Any]]) -> None:
    """All algorithms; prints what was found and asserts what is promised."""
    count, worst, equal = len(answers), dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0)
    for name in ALGORITHMS:
        for kind, dtype in KINDS.items():
            found = [answer["trained"][f"{name}, {kind}"] for answer in answers]
            expected = simulated(name, "cuda", count, dtype).model
            assert {one["digest"] for one in found} == {found[0]["digest"]}, f"{name}, {kind}: nodes differ"
            assert not any(one["excluded"] for one in found), f"{name}, {kind}"
            worst[kind] = max(worst[kind], difference(found[0]["values"], expected))
            there = {key: value.cpu() for key, value in expected.state_dict().items()}
            equal[kind] += digest(there) == found[0]["digest"]
    for kind in KINDS:
        told(
            f"{kind}, {len(ALGORITHMS)} algorithms, {ROUNDS} rounds of {STEPS} steps, {count} nodes: they are equal to "
            f"the bit, and at most {worst[kind]:.1e} from the simulation on the device; {equal[kind]} have its bits"
        )
    assert worst["fp64"] < 1e-9


# ---- the tests ----


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As the processes have it: batches are made on the CPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_simulation_as_on_the_cpu(name: str) -> None:
    here, there, again = simulated(name, "cpu", 3), simulated(name, "cuda", 3), simulated(name, "cuda", 3)
    for p, q, r in zip(*(result.model.parameters() for result in (here, there, again)), strict=True):
        assert q.is_cuda and torch.equal(q, r)
        torch.testing.assert_close(p, q.cpu(), rtol=1e-9, atol=1e-9)


def test_two_processes_share_the_device_over_gloo(tmp_path: Path) -> None:
    answers = started("gloo", COUNT, tmp_path)
    assert not [answer["error"] for answer in answers if "error" in answer], answers
    assert len({answer["pid"] for answer in answers}) == COUNT and len({answer["device"] for answer in answers}) == 1
    told(
        f"torch {torch.__version__}, {torch.cuda.get_device_name()}, python {sys.version.split()[0]}: processes "
        f"{[answer['pid'] for answer in answers]} on the one device, gloo between them, "
        f"{max(answer['seconds'] for answer in answers):.1f} s for everything"
    )
    same_as_simulated(answers)


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_nccl_alone_on_the_device(backend: str, tmp_path: Path) -> None:
    """With NCCL's group alone the exchange makes one over gloo beside it; the other group has both."""
    if not dist.is_nccl_available():
        pytest.skip("torch was built without NCCL")
    answers = started(backend, 1, tmp_path)
    assert "error" not in answers[0], answers[0]["error"]
    assert answers[0]["sum"] == 1000.0
    told(f"{backend}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, world size 1: an all-reduce, then training")
    same_as_simulated(answers)


def test_two_ranks_of_nccl_cannot_share_the_device(tmp_path: Path) -> None:
    """Not for us to change: what NCCL says of it is printed."""
    if not dist.is_nccl_available():
        pytest.skip("torch was built without NCCL")
    answers = started("nccl", 2, tmp_path, seconds=120)
    for rank, answer in enumerate(answers):
        told(f"NCCL, rank {rank} of two on one device: {answer.get('error', 'it worked')}")
    assert all("trained" not in answer for answer in answers), "NCCL lets two ranks share a device here: say so"
    assert any("Duplicate GPU" in answer["error"] or "NCCL" in answer["error"] for answer in answers), answers


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
