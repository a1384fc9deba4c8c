"""Real nodes go on from where they were: whatever ended them, and wherever, the bits are those of an unbroken run.

What is compared are the weights after the last round on every node, the history, and all of the last checkpoint: outer
state, average, inner states, generators and counters. Run as a script, this file is a server that forks the nodes of
every run it is asked for, so that torch is imported once; it kills all of them at the step it is told.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tailopt
from tailopt.records import checkpoints
from tailopt.records.folder import Run

resource = pytest.importorskip("resource", reason="processes are forked")

ROOT = Path(__file__).parents[2]
ROUNDS, STEPS = 5, 3
Job = dict[str, Any]
Answer = dict[str, Any]


# ---- what a node does ----


def model() -> nn.Module:
    """Buffers, dropout, and a tensor of two blocks, so that a cut may lie inside it."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Dropout(0.2), nn.Linear(9, 4000), nn.Tanh(), nn.Linear(4000, 3)
    )


def sharded(ranks: int, nodes: int) -> tuple[nn.Module, Any]:
    """FSDP2 inside every node, and the mesh across them; uneven shards, and an empty one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (nodes // ranks, ranks), mesh_dim_names=("node", "shard"))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 1), nn.Linear(1, 3))
    return fully_shard(net, mesh=mesh["shard"]), mesh["node"]  # type: ignore[return-value]


class Slowing(torch.optim.Adam):
    """Keeps something in its group that it changes itself."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 0.9
        return found


def optimizer(case: str, net: nn.Module, **settings: Any) -> tailopt.NestedOptimizer:
    build = tailopt.NestedOptimizer.from_algorithm
    settings = {"local_steps": STEPS, "rounds": ROUNDS, "timeout": 20.0, **settings}
    match case:
        case "adam2":
            algorithm = tailopt.algorithm("adam2", ilr=0.01, olr=0.1, ieps=1e-4, oeps=1e-3)
            return build(net, algorithm, average=True, **settings)
        case "diloco":
            algorithm = tailopt.algorithm("diloco", ilr=0.01, olr=0.7, ieps=1e-4, momentum=0.9, weight_decay=0.1)
            schedules = {"ilr": tailopt.schedules.cosine(40, per="step")}
            return build(net, algorithm, schedules=schedules, **settings)
        case "avg-biclip":
            return build(
                net,
                tailopt.algorithm("avg-biclip", ilr=0.1, i_u=1.0, i_d=0.01),
                projection=6.0,
                proximal=0.5,
                **settings,
            )
        case "two of three":
            algorithm = tailopt.algorithm("diloco", ilr=0.01, olr=0.7, ieps=1e-4, momentum=0.9, weight_decay=0.1)
            return build(net, algorithm, participants=2, **settings)
        case "AdamW inside":
            inner = torch.optim.AdamW(net.parameters(), lr=0.01)
            return tailopt.NestedOptimizer(inner, "adam", {"olr": 0.05, "oeps": 1e-3}, model=net, **settings)
        case "torch":
            inner = torch.optim.NAdam(net.parameters(), lr=0.01)
            return tailopt.NestedOptimizer(inner, Slowing, {"lr": 0.02}, model=net, **settings)
    raise ValueError(case)


def train(rank: int, job: Job, told: Callable[[], None]) -> Answer:
    """Train with data, a position in them and torch's generator that only a checkpoint can bring back."""
    net, across = sharded(job["ranks"], job["nodes"]) if "ranks" in job else (model(), None)
    place = {"position": 0}
    source = torch.Generator().manual_seed(rank)
    data = [(torch.randn(8, 7, generator=source), torch.randn(8, 3, generator=source) + rank) for _ in range(64)]
    torch.manual_seed(100 + rank)
    keeping = {"run": job["run"], "resume": True, "extra": lambda: place} if job.get("run") else {}
    opt = optimizer(job["case"], net, mesh=across, **keeping, **job.get("settings", {}))
    answer: Answer = {"resumed": None}
    if opt.resumed is not None:
        place = {"position": opt.resumed.extra.get("position", 0)}
        answer["resumed"] = [opt.resumed.round, opt.resumed.step, dict(opt.resumed.extra), opt.resumed.nodes]
    if job.get("at once"):
        opt.checkpoint()
    while not opt.finished:
        faults(rank, job, opt.node.round)
        x, y = data[place["position"]]
        opt.zero_grad()
        loss = (net(x + 0.1 * torch.randn(x.shape)) - y).square().mean() * 0.02
        opt.report(float(loss.detach()))
        loss.backward()
        if opt.node.round + 1 == job.get("all broken"):
            for p in net.parameters():
                p.grad.fill_(float("nan"))
        place["position"] += 1
        opt.step()
        often = job["each"][rank] if "each" in job else job.get("often")
        if often and place["position"] % often == 0:
            opt.checkpoint({**place, "one more": {1} if job.get("strange") == rank else torch.tensor([rank])})
        told()
        if place["position"] == job.get("hold"):
            time.sleep(60)  # until the kill comes
    own = {name: t.to_local() if hasattr(t, "to_local") else t for name, t in net.state_dict().items()}
    answer["digest"] = checkpoints.digest(own)
    if "ranks" in job:
        answer["whole"] = checkpoints.digest({name: t.full_tensor() for name, t in net.state_dict().items()})
    return answer


def faults(rank: int, job: Job, round: int) -> None:
    """The disk is full while this round lasts: for one node by a limit, for all by what fills it."""
    if "small files" in job and rank == 1:
        most = 4096 if round + 1 == job["small files"] else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    if "full disk" in job and rank == 0:
        ballast = Path(job["run"]).parent / "ballast"
        if round + 1 == job["full disk"] and not ballast.exists():
            with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1024))
        elif round + 1 != job["full disk"]:
            ballast.unlink(missing_ok=True)


def node(rank: int, job: Job, pipe: int) -> None:
    answer: Answer = {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            torch.set_num_threads(1)
            store = f"file://{job['out']}/store"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=job["nodes"])
            answer = train(rank, job, lambda: rank == 0 and os.write(pipe, b"."))  # type: ignore[arg-type]
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
    answer["said"] = [str(w.message) for w in said]
    if job.get("full disk"):
        answer["left"] = sorted(p.name for p in Path(job["run"]).glob("checkpoints/round-*"))
        answer["log"] = (Path(job["run"]) / "log.txt").read_text()
        answer["history"] = len(Run.open(job["run"]).history())
    Path(job["out"], f"{rank}.json").write_text(json.dumps(answer, default=str))
    if "error" not in answer:
        dist.barrier()


# ---- the server ----


def serve() -> None:
    for late in (
        "torch.distributed.tensor",
        "torch.distributed.fsdp",
        "torch._dynamo",
        "tomli_w",
    ):  # else every node imports them anew
        importlib.import_module(late)
    for line in sys.stdin:
        print(json.dumps(in_own_process(json.loads(line))), flush=True)


def in_own_process(job: Job) -> Any:
    """Fork, so that a mount of this run's own ends with it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if "full disk" in job and not own_disk(Path(job["run"]).parent, b"size=6m"):
                status = 3
            else:
                status = 0 if run_nodes(job) else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def run_nodes(job: Job) -> bool:
    """All nodes until they end by themselves (True), or are killed together (False)."""
    kill, delay = job.get("kill", (None, 0.0))
    watched, pipe = os.pipe()
    children = []
    for rank in range(job["nodes"]):
        child = os.fork()
        if child == 0:
            try:
                os.close(watched)
                node(rank, job, pipe)
            finally:
                os._exit(0)
        children.append(child)
    os.close(pipe)
    steps, killed = 0, False
    while data := os.read(watched, 1):
        steps += len(data)
        if steps == kill:
            time.sleep(delay)
            for child in children:
                os.kill(child, signal.SIGKILL)
            killed = True
            break
    for child in children:
        os.waitpid(child, 0)
    return not killed


def own_disk(folder: Path, options: bytes) -> bool:
    """A small disk of its own in a mount namespace of its own; False where the system does not let us."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, new_user, private = 0x20000, 0x10000000, (1 << 18) | (1 << 14)
    if libc.unshare(new_mounts) and libc.unshare(new_user | new_mounts):
        return False
    if libc.mount(b"none", b"/", None, private, None):
        return False
    return not libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, options)


# ---- the tests ----


class Server:
    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
        command = [sys.executable, "-m", "tests.distributed.test_checkpointing"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=ROOT)
        self.references: dict[str, tuple[Path, list[Answer]]] = {}

    def go(self, out: Path, case: str, nodes: int = 3, **job: Any) -> list[Answer] | None:
        """What every node said; None where they were killed."""
        out.mkdir(exist_ok=True)
        for left in [*out.glob("*.json"), out / "store"]:
            left.unlink(missing_ok=True)
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps({"case": case, "nodes": nodes, "out": str(out), **job}) + "\n")
        self.process.stdin.flush()
        status = json.loads(self.process.stdout.readline())
        if status == 3:
            pytest.skip("a process may not have a disk of its own here")
        assert status in (0, 2)
        return [json.loads((out / f"{rank}.json").read_text()) for rank in range(nodes)] if status == 0 else None


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = Server()
    with found.process:
        yield found
        assert found.process.stdin
        found.process.stdin.close()
        assert found.process.wait(60) == 0


@pytest.fixture(scope="module")
def reference(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[Answer]]]:
    """An unbroken run with checkpoints; one without a run folder ends with the same weights."""

    def found(case: str) -> tuple[Path, list[Answer]]:
        if case not in server.references:
            here = tmp_path_factory.mktemp("unbroken")
            bare = server.go(here / "bare", case)
            kept = server.go(here / "kept", case, run=str(here / "run"))
            assert bare is not None and kept is not None
            assert [a["digest"] for a in bare] == [a["digest"] for a in kept], [*bare, *kept]
            assert len({a["digest"] for a in kept}) == 1
            server.references[case] = here / "run", kept
        return server.references[case]

    return found


def same_run(run: Path, unbroken: Path) -> None:
    assert (run / "history.jsonl").read_bytes() == (unbroken / "history.jsonl").read_bytes()
    ours, theirs = (checkpoints.load(one / "checkpoints" / f"round-{ROUNDS:06d}") for one in (run, unbroken))
    assert checkpoints.digest(ours.tensors) == checkpoints.digest(theirs.tensors)
    assert {n: checkpoints.digest(own) for n, own in ours.nodes.items()} == {
        n: checkpoints.digest(own) for n, own in theirs.nodes.items()
    }
    assert ours.meta == theirs.meta


def inner(snapshot: checkpoints.Snapshot, rank: int) -> str:
    tensors = {name: t for name, t in snapshot.nodes[rank].items() if name.startswith("node.optimizer")}
    assert tensors
    return checkpoints.digest(tensors)


def digests(answers: list[Answer] | None) -> list[str]:
    assert answers is not None
    assert not [a["error"] for a in answers if "error" in a]
    return [a["digest"] for a in answers]


@pytest.mark.parametrize("case", ["adam2", "diloco", "avg-biclip", "two of three", "torch"])
def test_killed_and_resumed(
    case: str, server: Server, reference: Callable[[str], tuple[Path, list[Answer]]], tmp_path: Path
) -> None:
    unbroken, expected = reference(case)
    luck = random.Random(case)
    often = None if case == "two of three" else 2  # local steps between checkpoints: mostly in the middle of rounds
    kills = 0
    for number in range(30):
        # steps since the last start; then at once, or in the middle of what follows
        kill = (luck.randrange(1, 4), luck.choice([0.0, luck.uniform(0, 0.3)])) if number < 4 else (None, 0.0)
        answers = server.go(tmp_path / "out", case, run=str(tmp_path / "run"), often=often, kill=kill)
        if answers is not None:
            break
        kills += 1
    assert kills >= 2
    assert digests(answers) == digests(expected)
    same_run(tmp_path / "run", unbroken)


def test_everything_comes_back_in_the_middle_of_a_round(
    server: Server, reference: Callable[[str], tuple[Path, list[Answer]]], tmp_path: Path
) -> None:
    """Killed after the checkpoint of 2 rounds and 2 steps, and resumed without others that could hide a fault."""
    unbroken, _ = reference("diloco")
    run = str(tmp_path / "run")
    assert server.go(tmp_path / "out", "diloco", run=run, often=2, kill=[8, 0.0], hold=8) is None
    answers = server.go(tmp_path / "out", "diloco", run=run)
    assert answers is not None
    for rank, answer in enumerate(answers):
        rounds, step, extra, nodes = answer["resumed"]
        assert (rounds, step, nodes) == (2, 2, 3), answers
        assert extra["position"] == 8 and extra["one more"] == f"tensor([{rank}])"
    same_run(tmp_path / "run", unbroken)


@pytest.mark.parametrize("case", ["AdamW inside", "diloco", "adam2"])  # DTensors as state, plain tensors, outer state
def test_nodes_of_several_ranks_killed_and_resumed(case: str, server: Server, tmp_path: Path) -> None:
    """2 nodes of 2 ranks, FSDP2 inside: killed in the middle of a round, resumed, and then with the newest damaged."""
    job: Job = {"nodes": 4, "ranks": 2}
    unbroken, run = tmp_path / "unbroken", tmp_path / "run"
    expected = server.go(tmp_path / "out", case, run=str(unbroken), **job)
    assert digests(expected)[:2] == digests(expected)[2:] and expected is not None
    bare = server.go(tmp_path / "out", case, **job)
    assert digests(bare) == digests(expected)
    last = checkpoints.load(unbroken / "checkpoints" / f"round-{ROUNDS:06d}")
    weights = {
        n.removeprefix("global.weights['").removesuffix("']"): t for n, t in last.tensors.items() if "weights" in n
    }
    assert {checkpoints.digest(weights)} == {a["whole"] for a in expected}  # the manifest's ranges make whole tensors

    assert server.go(tmp_path / "out", case, run=str(run), often=2, kill=[8, 0.0], hold=8, **job) is None
    assert sorted(p.name for p in (run / "checkpoints/round-000002-step-0002").glob("*.safetensors")) == [
        *(f"global-{k:05d}-of-00004.safetensors" for k in range(4)),
        *(f"node-{k:04d}.safetensors" for k in range(4)),
    ]
    assert server.go(tmp_path / "out", case, run=str(run), often=2, kill=[4, 0.0], hold=12, **job) is None
    newest = checkpoints.latest(run)
    assert newest is not None and checkpoints.round_and_step(newest) > (2, 2)
    broken = newest / "node-0003.safetensors"
    data = bytearray(broken.read_bytes())
    data[-3] ^= 4
    broken.write_bytes(data)
    answers = server.go(tmp_path / "out", case, run=str(run), **job)
    assert digests(answers) == digests(expected) and answers is not None
    for rank, answer in enumerate(answers):
        assert any(f"{newest.name} is passed over: node 1, rank 1" in text for text in answer["said"]), answer
        assert answer["resumed"][:2] != list(checkpoints.round_and_step(newest)) and answer["resumed"][3] == 2, rank
    same_run(run, unbroken)

    other = server.go(tmp_path / "out", case, run=str(run), nodes=2, ranks=1, settings={"rounds": 9})
    assert other is not None
    assert all("written by nodes of 2 ranks, and there are 1 rank per node now" in a["error"] for a in other), other


@pytest.mark.parametrize("damaged", ["global-00001-of-00003.safetensors", "node-0002.safetensors", "manifest.json"])
def test_one_bit_of_the_newest_is_flipped(
    damaged: str, server: Server, reference: Callable[[str], tuple[Path, list[Answer]]], tmp_path: Path
) -> None:
    unbroken, expected = reference("adam2")
    run = tmp_path / "run"
    assert server.go(tmp_path / "out", "adam2", run=str(run), kill=[10, 0.0], hold=10) is None
    newest = checkpoints.latest(run)
    assert newest is not None
    data = bytearray((newest / damaged).read_bytes())
    data[-3] ^= 4
    (newest / damaged).write_bytes(data)
    answers = server.go(tmp_path / "out", "adam2", run=str(run))
    assert answers is not None and digests(answers) == digests(expected)
    for answer in answers:  # those who read sound files too
        assert any(f"{newest.name} is passed over" in text and damaged in text for text in answer["said"])
        assert answer["resumed"][0] == int(newest.name.split("-")[1]) - 1
    assert "is passed over" in (run / "log.txt").read_text()
    same_run(run, unbroken)


def test_one_node_cannot_write(
    server: Server, reference: Callable[[str], tuple[Path, list[Answer]]], tmp_path: Path
) -> None:
    unbroken, expected = reference("diloco")
    run = tmp_path / "run"
    settings = {"keep": 9}
    answers = server.go(tmp_path / "out", "diloco", run=str(run), settings=settings, **{"small files": 3})
    assert answers is not None and digests(answers) == digests(expected)
    for answer in answers:
        (text,) = answer["said"]
        assert "checkpoint after round 3 was not written: node 1" in text and "last one is round-000002" in text
    assert "was not written" in (run / "log.txt").read_text()
    left = sorted(p.name for p in (run / "checkpoints").iterdir())
    assert left == [f"round-{t:06d}" for t in (0, 1, 2, 4, 5)]  # and nothing hidden
    same_run(run, unbroken)


def test_the_disk_is_full(
    server: Server, reference: Callable[[str], tuple[Path, list[Answer]]], tmp_path: Path
) -> None:
    _, expected = reference("avg-biclip")
    disk = tmp_path / "disk"
    disk.mkdir()
    job: Job = {"run": str(disk / "run"), "settings": {"keep": 9}, "full disk": 3}
    answers = server.go(tmp_path / "out", "avg-biclip", **job)
    assert answers is not None and digests(answers) == digests(expected)
    for answer in answers:
        assert any("after round 3 was not written" in t and "No space left" in t for t in answer["said"]), answer
        assert answer["left"] == [f"round-{t:06d}" for t in (0, 1, 2, 4, 5)]
        assert answer["history"] == ROUNDS  # the row that did not fit came later


def test_four_nodes_go_on_where_three_were(server: Server, tmp_path: Path) -> None:
    run, there = tmp_path / "run", tmp_path / "three"
    assert server.go(tmp_path / "out", "diloco", run=str(run), often=2, kill=[8, 0.0], hold=8) is None
    whole = [path for path in checkpoints.list_checkpoints(run) if checkpoints.round_and_step(path) == (2, 0)]
    shutil.copytree(whole[0], there)
    answers = server.go(tmp_path / "out", "diloco", nodes=4, run=str(run), settings={"keep": 9}, **{"at once": True})
    assert len(set(digests(answers))) == 1 and answers is not None
    for rank, answer in enumerate(answers):
        rounds, step, extra, nodes = answer["resumed"]
        assert (rounds, step, extra.get("position"), nodes) == (2, 0, 6 if rank < 3 else None, 3)
        assert any("by 3 nodes in the middle of a round" in text for text in answer["said"])
    before, after = checkpoints.load(there), checkpoints.load(whole[0])
    assert after.meta["writers"] == 4 and len(list(whole[0].glob("global-*-of-00004.safetensors"))) == 4
    assert checkpoints.digest(before.tensors) == checkpoints.digest(after.tensors)
    for rank in range(3):
        assert inner(before, rank) == inner(after, rank)
    assert "nodes [3] start fresh" in after.meta["story"][0] and after.meta["taken"] == [6, 6, 6, 0]
    assert after.meta["story"][0] in (run / "log.txt").read_text()
    fewer = server.go(tmp_path / "out", "diloco", nodes=2, run=str(run), settings={"rounds": ROUNDS + 1})
    assert len(set(digests(fewer))) == 1 and fewer is not None and fewer[0]["resumed"][0] == ROUNDS


def test_a_round_without_a_sound_node_ends_with_the_last_checkpoint_named(server: Server, tmp_path: Path) -> None:
    for run, settings, which in (
        (tmp_path / "run", {}, "after round 3: {}/checkpoints/round-000003."),
        (tmp_path / "seldom", {"checkpoint_every": 2}, "after round 2: {}/checkpoints/round-000002."),
        (None, {}, ""),
    ):
        job = {"run": str(run), "settings": settings} if run else {}
        answers = server.go(tmp_path / "out", "avg-biclip", **job, **{"all broken": 4})
        assert answers is not None
        for answer in answers:
            expected = f" The last good checkpoint is that {which.format(run)} Lower" if run else " Lower"
            assert answer["error"].startswith("EveryoneExcluded: Round 4: no displacement can be used: node 0: not fin")
            assert f".{expected} the learning rate" in answer["error"], answer["error"]
        if run:
            assert "stopped: Round 4: no displacement" in (run / "log.txt").read_text()


def test_what_cannot_be_is_said_on_every_node(server: Server, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("")
    answers = server.go(tmp_path / "out", "adam2", nodes=2, run=str(tmp_path / "used"))
    assert answers is not None
    assert all("is not empty: it holds 'file'" in answer["error"] for answer in answers), answers

    run = str(tmp_path / "run")
    digests(server.go(tmp_path / "out", "adam2", nodes=2, run=run, settings={"rounds": 1}))
    other = server.go(tmp_path / "out", "adam2", nodes=2, run=run, settings={"seed": 3})
    assert other is not None
    assert all("cannot be resumed with another seed: it is 0" in answer["error"] for answer in other), other

    # in the first round, and in a later one, where nodes wait for displacements at once
    for each in ([2, None], [STEPS + 1, None], [STEPS + 1, STEPS + 2, None]):
        run = str(tmp_path / f"{each}")
        for answer in server.go(tmp_path / "out", "adam2", nodes=len(each), run=run, each=each) or [{}]:
            assert "Call checkpoint() on every node, after the same step" in answer["error"], (each, answer)

    strange = server.go(tmp_path / "out", "adam2", nodes=2, run=str(tmp_path / "strange"), often=2, strange=1)
    assert strange is not None
    assert all("node.extra['one more'] is a set; only tensors and" in answer["error"] for answer in strange), strange
    assert [p.name for p in (tmp_path / "strange" / "checkpoints").iterdir()] == ["round-000000"]

    partial = server.go(tmp_path / "out", "two of three", run=str(tmp_path / "partial"), often=1)
    assert partial is not None
    assert any("Not every node takes part in every round" in answer["error"] for answer in partial), partial


if __name__ == "__main__":
    serve()
