"""What would make nodes one, or leave them unable to go on, in the Trainer of Transformers: refused, or said."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tailopt
from tailopt.records.checkpoints import digest
from tests.distributed import forked
from tests.integrations import loops
from tests.integrations.nested_loops import nested

pytest.importorskip("resource", reason="processes are forked")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

HERE = "tests.integrations.test_trainer_nodes"
RUN = {"resume": True, "checkpoint_every": None}


def outcome(function: Callable[[], Any]) -> dict[str, Any]:
    """What a function raised, and what this library warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error, value = "", None
        try:
            value = function()
        except (ValueError, RuntimeError, FileNotFoundError) as raised:
            error = f"{type(raised).__name__}: {raised}"
    said = [str(w.message) for w in caught if re.search("max_grad_norm|local_steps|ignore_data_skip", str(w.message))]
    return {"error": error, "said": said, "value": value}


def train(node: int, folder: str, steps: int = 8, twice: bool = False, **more: Any) -> str:
    """Train as a node, and return the digest of the weights."""
    from tailopt.integrations.transformers import NestedCallback

    net = more.pop("net", None) or loops.Net()
    run = {"run": Path(folder, "run"), **RUN} if more.pop("run", False) else {}
    optimizer = nested(net, **run)
    callback = NestedCallback(optimizer)
    given = more.pop("optimizer", None) or optimizer
    resume = more.pop("resume", callback.resume_from)
    own = more.pop("own", Path(folder, f"node-{node}"))
    callbacks = [callback] * (2 if twice else 1)
    loops.with_trainer(net, given, node, own, steps, callbacks=callbacks, resume=resume, **more)
    return digest(net.state_dict())


# ---- refused ----


def refused(rank: int, folder: str) -> dict[str, Any]:
    from accelerate.optimizer import AcceleratedOptimizer
    from transformers import TrainingArguments

    from tailopt.integrations import transformers as ours

    node, found = ours.connect(), {}
    environment = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    saves = {"save_strategy": "steps", "save_steps": 3}
    best = {**saves, "eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True}

    def attempt(name: str, **more: Any) -> None:
        found[name] = outcome(lambda: train(node, f"{folder}/{name}", **more))["error"]

    attempt("other optimizer", optimizer=tailopt.BiClip(loops.Net().parameters(), lr=0.1, u=1.0, d=0.0))
    attempt("best at end", **best)
    attempt(
        "best saved",
        run=True,
        **{**best, "save_strategy": "best", "load_best_model_at_end": False, "metric_for_best_model": "loss"},
    )
    attempt("weights only", run=True, save_only_model=True, **saves)
    attempt("one checkpoint", run=True, save_total_limit=1, **saves)
    attempt("one folder", own=Path(folder, "all"), **saves)
    attempt("max_steps", steps=8 + node)
    for name, more in (("rounds", {"rounds": 3}), ("checkpoint_every", {"run": Path(folder, "run")})):
        net = loops.Net()
        optimizer = nested(net, **more)
        found[name] = outcome(lambda optimizer=optimizer: ours.NestedCallback(optimizer))["error"]
    bare = tailopt.BiClip(loops.Net().parameters(), lr=0.1, u=1.0, d=0.0)
    found["bare"] = outcome(lambda: ours.NestedCallback(bare))["error"]

    optimizer = nested(loops.Net())
    scaled = AcceleratedOptimizer(optimizer, scaler=torch.amp.GradScaler("cpu"))
    found["scaler"] = outcome(lambda: ours._check_stepped(optimizer, scaled))["error"]
    arguments = TrainingArguments(output_dir=folder, use_cpu=True, report_to=[])
    arguments._n_gpu = 2
    found["two GPUs"] = outcome(lambda: ours._check_alone(arguments))["error"]

    # as if connect() had not been called: Trainer takes the nodes for replicas
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    attempt("replicas")
    net = loops.Net()
    optimizer = nested(net)
    plain = {"node": node, "folder": Path(folder, "plain"), "steps": 8}
    found["replicas, no callback"] = outcome(lambda: loops.with_trainer(net, optimizer, **plain))["error"]
    return {"node": node, "environment": environment, "found": found}


MESSAGES = {
    "other optimizer": r"steps with BiClip, and not with the NestedOptimizer .* optimizers=\(optimizer, None\)",
    "best at end": r"Invalid load_best_model_at_end: True",
    "best saved": r'Invalid save_strategy: "best"; nodes would save at different steps',
    "weights only": r"Invalid save_only_model: True",
    "one checkpoint": r"Invalid save_total_limit: 1; .* Keep 2 or more",
    "one folder": r"Invalid output_dir: nodes 0, 1 write .* to one folder, here .*all; .*all/node-\{node\}",
    "max_steps": r"Disagreement: .* on max_steps: it has 9, and node 0 has 8",
    "rounds": r"Invalid rounds: 3; need None",
    "checkpoint_every": r"Invalid checkpoint_every: 1; need None",
    "bare": r"Invalid optimizer: got BiClip; need a tailopt.NestedOptimizer",
    "scaler": r"Invalid fp16: True; .* Use bf16=True",
    "two GPUs": r"spread the model over 2 GPUs; .*CUDA_VISIBLE_DEVICES",
    "replicas": r"one of 2 processes, and Trainer would wrap the model in DDP; .*connect\(\) before TrainingArguments",
    "replicas, no callback": r"wrapped in DistributedDataParallel over ranks \[0, 1\]",
}


def test_what_is_refused(server: forked.Server, tmp_path: Path) -> None:
    ends = server.run(f"{HERE}:refused", 2, 200.0, folder=str(tmp_path))
    assert [end.status for end in ends] == [0, 0], [end.said for end in ends]
    for node, end in enumerate(ends):
        assert end.value["node"] == node
        assert set(end.value["environment"].values()) == {None}
        assert end.value["found"].keys() == MESSAGES.keys()
        for name, expected in MESSAGES.items():
            message = end.value["found"][name]
            assert re.search(expected, message.replace("\n", " ")), (name, message)


# ---- said, or without effect ----


def odd(rank: int, folder: str) -> dict[str, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    from tailopt.integrations.transformers import NestedCallback, connect

    node = connect()
    saves = {"save_strategy": "steps", "save_steps": 3, "run": True}

    def attempt(name: str, **more: Any) -> dict[str, Any]:
        return outcome(lambda: train(node, f"{folder}/{name}", **more))

    found = {
        "clean": attempt("clean"),
        "norm": attempt("norm", max_grad_norm=1.0),
        "evaluated": attempt("evaluated", eval_strategy="steps", eval_steps=3),
        "evaluated at ends": attempt("ends", eval_strategy="steps", eval_steps=4),
        "saved": attempt("saved", **saves),
        "callback twice": attempt("twice", twice=True, **saves),
        # goes on from step 6 of 8, which is in the middle of round 2
        "stopped": attempt("stopped", **{**saves, "steps": 6}),
        "resumed": attempt("stopped", **saves),
        "resumed again": attempt("stopped", **saves),  # after the last step: nothing is left to do
        "not resumed": attempt("stopped", resume=None, **saves),
        "data again": attempt("saved", **{**saves, "steps": 12, "ignore_data_skip": True}),
    }
    (Path(folder) / f"stopped/node-{node}/checkpoint-8").rename(Path(folder) / f"moved-{node}")
    dist.barrier()
    found["lost"] = attempt("stopped", **saves)
    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, n_positions=8, vocab_size=16, bos_token_id=0, eos_token_id=0)
    optimizer = nested(model := GPT2LMHeadModel(config), run=Path(folder, "gpt2"), **RUN)
    written = Path(folder, f"gpt2-{node}")
    rows = loops.rows
    loops.rows = lambda node=0: [dict.fromkeys(("input_ids", "labels"), torch.arange(8)) for _ in range(8)]  # type: ignore[misc]
    try:
        keep = {"save_strategy": "steps", "save_steps": 1, "callbacks": [NestedCallback(optimizer)]}
        loops.with_trainer(model, optimizer, node, written, 1, **keep)
    finally:
        loops.rows = rows
    found["pretrained"] = {"value": sorted(path.name for path in written.glob("checkpoint-1/model.*"))}
    return found


def test_what_is_said_and_what_changes_no_bit(server: forked.Server, tmp_path: Path) -> None:
    ends = server.run(f"{HERE}:odd", 2, 300.0, folder=str(tmp_path))
    assert [end.status for end in ends] == [0, 0], [end.said for end in ends]
    for end in ends:
        found = end.value
        (warned,) = found["norm"]["said"]
        assert "max_grad_norm=1 before the optimizer clips it" in warned and "max_grad_norm=0" in warned
        (warned,) = found["evaluated"]["said"]
        assert "The evaluation after step 3 is in the middle of a round" in warned and "local_steps=4" in warned
        assert found["evaluated at ends"]["said"] == []
        same = ("clean", "evaluated", "evaluated at ends", "saved", "callback twice", "resumed")
        assert not [found[name]["error"] for name in same if found[name]["error"]]
        assert {name: found[name]["value"] for name in same} == dict.fromkeys(same, ends[0].value["clean"]["value"])
        assert "The run is finished: it has taken 8 steps of max_steps=8" in found["resumed again"]["error"]
        assert "goes on after step 0, and the nodes after step 8" in found["not resumed"]["error"]
        assert any(
            "ignore_data_skip=True: the data of this epoch begin again" in w for w in found["data again"]["said"]
        )
        assert "checkpoint-8, and that is not there. Bring it back" in found["lost"]["error"]
        assert found["pretrained"]["value"] == ["model.safetensors"]  # Transformers itself leaves it to rank 0


def alone(rank: int, folder: str) -> list[str]:
    from tailopt.integrations.transformers import connect

    connect()
    saves = {"save_strategy": "steps", "save_steps": 3, "run": True}
    for steps in (6, 8):
        stopped = train(0, f"{folder}/stopped", steps=steps, **saves)
    return [train(0, f"{folder}/whole", **saves), stopped]


def test_one_node_alone(server: forked.Server, tmp_path: Path) -> None:
    (end,) = server.run(f"{HERE}:alone", 1, 100.0, folder=str(tmp_path))
    assert end.status == 0, end.said
    assert end.value[0] == end.value[1]
