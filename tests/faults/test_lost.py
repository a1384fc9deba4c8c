"""One of three real nodes crashes, is killed, stopped or cut off: the others end in time, and name it and the round.

And the disk of the run is full: the run says so, and ends with the bits of one that never heard of it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tailopt import faults
from tailopt.records.folder import Run
from tests.faults import lost

pytest.importorskip("resource", reason="processes are forked")

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
WITHIN = 15.0  # seconds, at a timeout of 10
SERVER = r"Node 0, which serves the store at [\d.:]+,"
# what the others say, in which time, and what the node itself does if it can: its status, and what it says
ENDS: dict[str, tuple[str, float, int, str]] = {
    "crash": (
        "Node 1 is gone in round 3: it failed with Crashed: This node was told to",
        10.0,
        1,
        "Crashed: This node",
    ),
    "hard crash": ("Node 1 is gone in round 3: its connection is closed, and no sign", 10.0, -6, ""),
    "kill": (f"{SERVER} is gone in round 3: ", 10.0, -9, ""),
    "stop": ("Node 2 is gone in round 3: no sign of life for 10 s", WITHIN, 1, "NodeLost"),
    "partition": (
        f"{SERVER} is gone in round 3: no answer for 10 s",
        WITHIN,
        1,
        r"NodeLost: Node [12] is gone in round 3",
    ),
    "cut from outside": (
        r"Node 2 is gone in round \d+: no sign of life for 10 s",
        WITHIN,
        1,
        f"NodeLost: {SERVER} is gone",
    ),
}


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """All scenes at once: most of their time is waiting."""
    here = tmp_path_factory.mktemp("lost")
    command = [sys.executable, "-m", "tests.faults.lost", str(here)]
    subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, check=True, timeout=2 * lost.WATCHDOG + 60)
    return here, json.loads((here / "found.json").read_text())


def seen(everything: tuple[Path, dict[str, Any]], scene: str) -> list[dict[str, Any]]:
    found = everything[1][scene]
    if isinstance(found, str):
        pytest.skip(found)
    rows: list[dict[str, Any]] = found
    return rows


@pytest.mark.parametrize("scene", ENDS)
def test_the_others_end_in_time_and_name_the_node_and_the_round(
    scene: str, everything: tuple[Path, dict[str, Any]]
) -> None:
    words, within, status, last = ENDS[scene]
    for node, row in enumerate(seen(everything, scene)):
        if node == lost.SCENES[scene]["node"]:
            assert row["status"] == status, row["said"]
            assert re.search(last, row["said"]), row["said"]
        else:
            assert row["status"] == 1, row["said"]
            assert re.search(f"NodeLost: {words}", row["said"]), row["said"]
            assert row["seconds"] < within


@pytest.mark.parametrize("scene", ["partition", "cut from outside"])
def test_a_node_that_is_cut_off_ends_too(scene: str, everything: tuple[Path, dict[str, Any]]) -> None:
    own = seen(everything, scene)[lost.SCENES[scene]["node"]]
    assert own["status"] == 1 and own["seconds"] < WITHIN, own


def test_a_full_disk_costs_checkpoints_and_nothing_else(everything: tuple[Path, dict[str, Any]]) -> None:
    here = everything[0]
    for scene in ("clean", "disk full"):
        assert [row["status"] for row in seen(everything, scene)] == [0] * lost.NODES, everything[1][scene]
    clean, full = (
        [json.loads((here / scene / f"{k}.json").read_text()) for k in range(lost.NODES)]
        for scene in ("clean", "disk full")
    )
    assert len({node["digest"] for node in [*clean, *full]}) == 1
    assert not any(node["warned"] for node in clean)
    for node in full:
        for t in (3, 4):
            words = f"The checkpoint after round {t} was not written: .*No space left on device.*The run goes on"
            assert any(re.search(words, text) for text in node["warned"]), node["warned"]
        assert not any(re.search("after round [1256]", text) for text in node["warned"])
    run = here / "disk full" / "run"
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [f"round-{t:06d}" for t in (0, 1, 2, 5, 6)]
    assert Run.open(run).history() == Run.open(here / "clean" / "run").history()  # rows that did not fit came later


# ---- torchrun ----


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "stop", "partition"])
def test_torchrun_goes_on_to_the_same_bits(fault: str, everything: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Killed or stopped, all under one agent; or cut off, with an agent on each of three machines, until all ended."""
    parted = fault == "partition"
    try:
        network = faults.Network(lost.NODES) if parted else None
    except faults.Unavailable as error:
        pytest.skip(str(error))
    scene = {"fault": fault, "node": 2, "out": str(tmp_path), "run": str(tmp_path / "run")}
    agents, nodes = (lost.NODES, 1) if parted else (1, lost.NODES)
    address, port = (network.address(0), 29500) if network else ("127.0.0.1", lost.free_port())
    command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=1", "--monitor-interval=0.5"]
    command += [f"--nnodes={agents}", f"--nproc-per-node={nodes}", f"--master-addr={address}", f"--master-port={port}"]
    logs = [tmp_path / f"{k}.log" for k in range(agents)]
    started = []
    with network or nullcontext():
        try:
            for k, log in enumerate(logs):
                own = [*command, f"--node-rank={k}", "-m", "tests.faults.lost", json.dumps(scene)]
                inside = network.command(k, own) if network else own
                with log.open("w") as file:
                    started.append(subprocess.Popen(inside, env=ENVIRONMENT, cwd=ROOT, stdout=file, stderr=file))
            until = time.monotonic() + 180
            if network:
                while not all("NodeLost: " in log.read_text() for log in logs):
                    assert time.monotonic() < until, [log.read_text() for log in logs]
                    time.sleep(0.1)
                network.mend(2)
            assert [agent.wait(until + 60 - time.monotonic()) for agent in started] == [0] * agents
        finally:
            for agent in started:
                agent.terminate()  # it ends its workers too
                agent.wait()
    said = "".join(log.read_text() for log in logs)
    if fault != "kill":  # of which the agent knows before the nodes can say it, and ends them
        # under one agent, it may end the second of the survivors as soon as the first has said it
        assert len(re.findall(r"NodeLost: Node 2 is gone in round 3: ", said)) in ({2} if parted else {1, 2}), said
    assert said.count("resumed after round 2") == lost.NODES
    clean = json.loads((everything[0] / "clean" / "0.json").read_text())["digest"]
    assert {json.loads((tmp_path / f"{k}.json").read_text())["digest"] for k in range(lost.NODES)} == {clean}
