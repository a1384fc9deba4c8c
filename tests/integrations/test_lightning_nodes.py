"""What would make nodes one, or leave them unable to go on, in the Trainer of Lightning: refused, or said."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tailopt
from tailopt.records.checkpoints import digest
from tests.distributed import forked
from tests.integrations import loops
from tests.integrations.nested_loops import nested
from tests.integrations.test_trainer_nodes import RUN, outcome

pytest.importorskip("resource", reason="processes are forked")
pytest.importorskip("lightning")

HERE = "tests.integrations.test_lightning_nodes"


def train(node: int, folder: str, steps: int = 8, every: int = 0, twice: bool = False, **more: Any) -> str:
    """Train as a node, with a checkpoint every so many steps, and return the digest of the weights."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from tailopt.integrations.lightning import NestedCallback

    net = loops.Net()
    run = {"run": Path(folder, "run"), **RUN} if more.pop("run", False) else {}
    optimizer = nested(net, **run)
    callback = NestedCallback(optimizer)
    callbacks: list[Any] = [callback] * (2 if twice else 1)
    own = more.pop("own", Path(folder, f"node-{node}"))
    if every:
        callbacks.append(ModelCheckpoint(dirpath=own, every_n_train_steps=every, save_top_k=-1, save_last=twice))
        more |= {"enable_checkpointing": True}
    given = more.pop("optimizer", None) or optimizer
    resume = more.pop("resume", callback.resume_from)
    loops.with_lightning(net, given, node, own, steps, callbacks=callbacks, resume=resume, **more)
    return digest(net.state_dict())


def refused(rank: int, folder: str) -> dict[str, str]:
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    from tailopt.integrations.lightning import connect

    node, found = connect(), {}

    def attempt(name: str, **more: Any) -> None:
        found[name] = outcome(lambda: train(node, f"{folder}/{name}", **more))["error"]

    attempt("other optimizer", optimizer=tailopt.BiClip(loops.trained(loops.Net()), lr=0.1, u=1.0, d=0.0))
    attempt("scaler", precision=None, plugins=[MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))])
    attempt("one folder", own=Path(folder, "all"), every=3)
    attempt("max_steps", steps=8 + node)
    attempt("async", run=True, every=3, plugins=[AsyncCheckpointIO()])
    # as if connect() had not been called: Lightning takes the nodes for replicas
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", TORCHELASTIC_RUN_ID="x"
    )
    attempt("replicas", devices=2, strategy="ddp")
    return found


MESSAGES = {
    "other optimizer": r"Invalid configure_optimizers: it returned BiClip; need the NestedOptimizer",
    "scaler": r"Invalid precision: .* Use \"bf16-mixed\"",
    "one folder": r"Invalid dirpath: nodes 0, 1 write .* to one folder, here .*all; .*all/node-\{node\}",
    "max_steps": r"Disagreement: .* on max_steps: it has 9, and node 0 has 8",
    "async": r"Invalid plugins: AsyncCheckpointIO",
    "replicas": r"one of 2 processes, whose gradients DDPStrategy averages; .*connect\(\) before Trainer",
}


def test_what_is_refused(server: forked.Server, tmp_path: Path) -> None:
    ends = server.run(f"{HERE}:refused", 2, 200.0, folder=str(tmp_path))
    assert [end.status for end in ends] == [0, 0], [end.said for end in ends]
    for end in ends:
        for name, expected in MESSAGES.items():
            assert re.search(expected, end.value[name].replace("\n", " ")), (name, end.value[name])


def odd(rank: int, folder: str) -> dict[str, Any]:
    from tailopt.integrations.lightning import connect

    node = connect()
    saves = {"every": 3, "run": True}

    def attempt(name: str, **more: Any) -> dict[str, Any]:
        return outcome(lambda: train(node, f"{folder}/{name}", **more))

    return {
        "clean": attempt("clean", steps=9),
        "evaluated": attempt("evaluated", steps=9, val_check_interval=5),
        "evaluated at ends": attempt("ends", steps=12, val_check_interval=20, check_val_every_n_epoch=None),
        "saved": attempt("saved", steps=9, **saves),
        "callback twice": attempt("twice", steps=9, twice=True, **saves),
        "stopped": attempt("stopped", steps=6, **saves),  # an epoch of Lightning is three steps, a round is four
        "resumed": attempt("stopped", steps=9, **saves),
        "resumed again": attempt("stopped", steps=9, **saves),  # nothing is left to do
        "not resumed": attempt("stopped", steps=12, resume=None, **saves),
    }


def test_what_is_said_and_what_changes_no_bit(server: forked.Server, tmp_path: Path) -> None:
    ends = server.run(f"{HERE}:odd", 2, 300.0, folder=str(tmp_path))
    assert [end.status for end in ends] == [0, 0], [end.said for end in ends]
    for end in ends:
        found = end.value
        (warned,) = found["evaluated"]["said"]
        assert "The validation after step 3 is in the middle of a round" in warned and "local_steps=4" in warned
        assert found["evaluated at ends"]["said"] == []
        for same in (("clean", "evaluated"), ("saved", "callback twice", "resumed", "resumed again")):
            assert {name: found[name]["error"] for name in same} == dict.fromkeys(same, "")
            assert {name: found[name]["value"] for name in same} == dict.fromkeys(same, ends[0].value[same[0]]["value"])
        assert "goes on after step 0, and the nodes after step 9" in found["not resumed"]["error"]
