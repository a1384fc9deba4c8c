"""What would make nodes one, or leave them unable to go on, in a loop with Accelerate: refused."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import forked
from tests.integrations import loops
from tests.integrations.nested_loops import nested
from tests.integrations.test_trainer_nodes import RUN, outcome

pytest.importorskip("resource", reason="processes are forked")
pytest.importorskip("accelerate")

HERE = "tests.integrations.test_accelerate_nodes"
MESSAGES = {
    "no run": r"There is no run folder, so the outer state would be lost. .*checkpoint_every=None",
    "one folder": r"Invalid folder: nodes 0, 1 write .* to one folder, here .*all; .*all/node-\{node\}",
    "lost": r"FileNotFoundError: .*moved.* and that is not there. Bring it back",
    "replicas": r"wrapped in DistributedDataParallel over ranks \[0, 1\]",
    "replicas saved": r"one of 2 processes, and wraps the model in DDP; .*connect\(\) before Accelerator",
}


def refused(rank: int, folder: str) -> dict[str, Any]:
    from tailopt.integrations.accelerate import connect, load_state, save_state

    node, found = connect(), {}
    own = f"{folder}/node-{node}"

    def loop(**options: Any) -> tuple[Any, Any]:
        net = loops.Net()
        return loops.with_accelerate(net, nested(net, **options), node, Path(folder), 5)

    accelerator, optimizer = loop()
    found["no run"] = outcome(lambda: save_state(accelerator, optimizer, own))["error"]
    run = {"run": Path(folder, "run"), **RUN}
    accelerator, optimizer = loop(**run)
    found["begun"] = load_state(accelerator, optimizer)
    found["one folder"] = outcome(lambda: save_state(accelerator, optimizer, f"{folder}/all"))["error"]
    save_state(accelerator, optimizer, f"{own}/moved", {"position": 7 + node})
    del accelerator, optimizer  # which hold the run folder
    gc.collect()
    accelerator, optimizer = loop_again(run, node)
    found["extra"] = load_state(accelerator, optimizer)
    Path(f"{own}/moved").rename(f"{own}/elsewhere")
    found["lost"] = outcome(lambda: load_state(accelerator, optimizer))["error"]

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    found["replicas"] = outcome(loop)["error"]
    from accelerate import Accelerator

    found["replicas saved"] = outcome(lambda: save_state(Accelerator(cpu=True), optimizer, own))["error"]
    return found


def loop_again(run: dict[str, Any], node: int) -> tuple[Any, Any]:
    from accelerate import Accelerator

    net = loops.Net()
    accelerator = Accelerator(cpu=True)
    optimizer = nested(net, **run)
    _, prepared, _ = accelerator.prepare(net, optimizer, loops.schedule(optimizer))
    return accelerator, prepared


def test_what_is_refused(server: forked.Server, tmp_path: Path) -> None:
    ends = server.run(f"{HERE}:refused", 2, 100.0, folder=str(tmp_path))
    assert [end.status for end in ends] == [0, 0], [end.said for end in ends]
    for node, end in enumerate(ends):
        assert end.value["begun"] is None
        assert end.value["extra"] == {"position": 7 + node}
        for name, expected in MESSAGES.items():
            assert re.search(expected, end.value[name].replace("\n", " ")), (name, end.value[name])
