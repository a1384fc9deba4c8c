"""A node of test_nested_loops.py, as torchrun starts it: nested training in the loop of a library, and in a plain one.

torchrun --nproc-per-node 2 -m tests.integrations.nested_loops LIBRARY FOLDER
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tailopt
from tailopt.records.checkpoints import digest
from tests.integrations import loops

STEPS, LOCAL_STEPS = 11, 4  # the last round has three steps


def nested(net: torch.nn.Module, **more: Any) -> tailopt.NestedOptimizer:
    outer = {"outer": "nesterov", "outer_settings": {"olr": 0.7, "momentum": 0.5}}
    return tailopt.NestedOptimizer(loops.inner(net), **outer, local_steps=LOCAL_STEPS, model=net, timeout=30.0, **more)


def compare(library: str, node: int, folder: Path, bf16: bool) -> dict[str, Any]:
    """Train in the library's loop, replay in a plain one; the digests of the weights after every local step."""
    integration = importlib.import_module(f"tailopt.integrations.{library}")
    net = loops.Net()
    optimizer = nested(net)
    inner: Any = optimizer.optimizer
    seen = loops.Seen(net, inner)
    callbacks = [integration.NestedCallback(optimizer)] if library != "accelerate" else []
    more = {"callbacks": callbacks} if callbacks else {}
    loops.LOOPS[library](net, optimizer, node, folder, STEPS, bf16=bf16, **more)
    if library == "accelerate":
        optimizer.synchronize()
    again = loops.Net()
    other = nested(again)
    replayed = loops.Seen(again, other.optimizer)
    loops.plain(again, other, seen.steps, library, bf16)
    other.synchronize()
    facts = ("round", "participants", "steps", "weights", "excluded")
    return {
        "names": list(inner.statistics()),
        "seen": [sum(len(batch["x"]) for batch in batches) for batches in seen.steps],
        "rows": sorted({round(float(v), 6) for batches in seen.steps[:3] for b in batches for v in b["labels"]}),
        "local": seen.weights,
        "replayed": replayed.weights,
        "end": digest(net.state_dict()),
        "end replayed": digest(again.state_dict()),
        "history": [{fact: row.get(fact) for fact in facts} for row in optimizer.history],
        "history replayed": [{fact: row.get(fact) for fact in facts} for row in other.history],
    }


def main(library: str, folder: Path) -> None:
    node = importlib.import_module(f"tailopt.integrations.{library}").connect()
    found = {str(bf16): compare(library, node, folder / f"{node}", bf16) for bf16 in (False, True)}
    (folder / f"{node}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]))
