"""What the algorithms cost beside training: memory, traffic, time; measured on two real nodes, and by formula.

    on a node    4 bytes for the copy of the start weights (a displacement is a difference), and the inner state
    outside      the outer state, once for all nodes: here every node holds its share of it
    traffic      a node sends and receives 4 bytes of displacement and 4 of weights, each times (N - 1) / N;
                 through a server it would be 4 up and 4 down. adam2's second moment comes on top, with the weights

All per parameter, in fp32. Memory at its peak is what the process held at most above model and gradients.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tailopt.algorithms import ALGORITHMS, algorithm
from tailopt.distributed.header import Header
from tailopt.distributed.nested_optimizer import NestedOptimizer
from tailopt.distributed.transport import Transport
from tailopt.figures.style import pyplot
from tailopt.progress import Progress
from tailopt.records import disk
from tailopt.studies.protocol import Claim, claim_lines, decide
from tailopt.studies.search_spaces import SPACES
from tailopt.studies.study import StudyOptions
from tailopt.sweeps.search import draw_point
from tailopt.sweeps.space import settings_at

SUMMARY = "memory, traffic and time of all algorithms, measured and by formula; minutes"
OPTIONS: tuple[str, ...] = ()

NODES, ROUNDS, PARAMETERS = 2, 3, 4_000_000
# bytes a parameter of a rule's state
STATE = {"adagrad": 4, "rmsprop": 4, "adam": 8, "adamw": 8, "nesterov": 4}


def run(out: Path, options: StudyOptions) -> Path:
    """Measure every algorithm that is not in `out` yet, and write table.md, results.json and overhead.png there."""
    out.mkdir(parents=True, exist_ok=True)
    parameters = 100_000 if options.quick else PARAMETERS
    names = ("avg-biclip", "avg-adam", "adam2") if options.quick else tuple(ALGORITHMS)
    rows = []
    with Progress(options.progress) as bar:
        for number, name in enumerate(names, 1):
            where = out / "cells" / f"{name}-{parameters}.json"
            if not where.is_file():
                where.parent.mkdir(exist_ok=True)
                disk.replace(where, (json.dumps(measured(name, parameters)) + "\n").encode())
            rows.append({"algorithm": name, **json.loads(where.read_text(encoding="utf-8")), "formula": formula(name)})
            bar.update(number, len(names), name)
    claims = None if options.quick else [judge(rows)]
    found: dict[str, Any] = {"parameters": parameters, "nodes": NODES, "rows": rows}
    found["claim"] = asdict(claims[0]) if claims else None
    disk.replace(out / "results.json", (json.dumps(found, indent=1) + "\n").encode())
    disk.replace(out / "table.md", report(found, claims).encode())
    draw(rows, out / "overhead.png")
    return out


def formula(name: str) -> dict[str, float]:
    """Bytes a parameter, by what the rules keep and what is sent.

    Examples:
        >>> formula("bi2clip")["inner state"], formula("adam2")["inner state"], formula("adam2")["received"]
        (0.0, 8.0, 6.0)
    """
    outer, inner = ALGORITHMS[name]
    share = (NODES - 1) / NODES
    # what is gathered: the new weights, and for adam2 the second moment that the nodes' Adam starts with
    sent = share * (4 + 4 + (4 if name == "adam2" else 0))
    return {
        "inner state": float(STATE.get(inner, 0)),
        "start weights": 4.0,
        "outer state": float(STATE.get(outer, 0)),
        "sent": sent,
        "received": sent,
    }


def measured(name: str, parameters: int) -> dict[str, float]:
    """The same by two processes, with the peak of memory and the time of an outer step besides."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")  # a child of fork would begin with its parent's memory
    queue = context.SimpleQueue()
    nodes = [context.Process(target=_node, args=(name, parameters, k, port, queue)) for k in range(NODES)]
    for process in nodes:
        process.start()
    for process in nodes:
        process.join(120)
        if process.exitcode != 0:
            for other in nodes:
                other.kill()
            raise RuntimeError(f"A node of the measurement of {name} ended with {process.exitcode}; see above.")
    found = [queue.get() for _ in nodes]
    total = sum(row.pop("outer state") for row in found)  # every node holds its share
    mean = {key: statistics.fmean(row[key] for row in found) for key in found[0]}
    return {**mean, "outer state": total}


def _node(name: str, parameters: int, node: int, port: int, queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=node, world_size=NODES)
    method = algorithm(name, **settings_at(draw_point(SPACES["fine-tuning"].ranges(name), 0, 0)))
    torch.manual_seed(0)
    tiny = torch.nn.Linear(10, 10)  # loads what is loaded once, and has gloo make its buffers
    warm = NestedOptimizer.from_algorithm(tiny, method, local_steps=1)
    _gradients(tiny)
    warm.step()
    model = torch.nn.Sequential(*(torch.nn.Linear(parameters // 400, 100, bias=False) for _ in range(4)))
    _gradients(model)
    before = _resident()
    optimizer = NestedOptimizer.from_algorithm(model, method, local_steps=2)
    transport = _count(optimizer)
    counts = []
    for _ in range(ROUNDS):
        transport.sent = transport.received = 0
        _gradients(model)
        optimizer.step()
        inner = _tensors(optimizer.state.values())  # in the middle of the round: at its end it may be made anew
        _gradients(model)
        optimizer.step()
        counts.append((transport.sent, transport.received))
    peak = _peak() - before
    n = sum(p.numel() for p in model.parameters())
    queue.put(
        {
            "inner state": inner / n,
            "start weights": optimizer.node.x.nbytes / n,
            "outer state": _tensors(optimizer.node.outer) / n,
            "sent": counts[-1][0] / n,
            "received": counts[-1][1] / n,
            "peak": peak / n,
            "outer step, ms": _outer_step(method, n) * 1e3,
        }
    )
    dist.destroy_process_group()


def _tensors(states: Iterable[Mapping[str, Any]]) -> int:
    """Bytes of what scales with the parameters; step counters do not."""
    return sum(v.nbytes for s in states for v in s.values() if isinstance(v, Tensor) and v.dim())


class _Counting(Transport):
    """Counts what it sends and receives."""

    sent = 0
    received = 0

    def gather(self, mine: Tensor) -> Tensor:
        self._add([mine] * self.nodes, [mine] * self.nodes)
        return super().gather(mine)

    def exchange_with_header(
        self, head: Header, outgoing: Sequence[Tensor] = (), incoming: Sequence[Tensor] = ()
    ) -> list[Header]:
        words = head.packed()
        self._add([words] * self.nodes, [words] * self.nodes)
        self._add(outgoing, incoming)
        return super().exchange_with_header(head, outgoing, incoming)

    def exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        self._add(outgoing, incoming)
        super().exchange(outgoing, incoming)

    def _add(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        self.sent += sum(t.nbytes for k, t in enumerate(outgoing) if k != self.node)
        self.received += sum(t.nbytes for k, t in enumerate(incoming) if k != self.node)


def _count(optimizer: NestedOptimizer) -> _Counting:
    exchange = optimizer.node.exchange
    transport = _Counting(
        **{field.name: getattr(exchange.transport, field.name) for field in fields(exchange.transport)}
    )
    exchange.transport = transport
    return transport


def _gradients(model: torch.nn.Module) -> None:
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.empty_like(p)
        p.grad.normal_()


def _outer_step(method: Any, n: int) -> float:
    """Seconds of the outer rule's step on one vector of all parameters: the least of five, after a first one."""
    rule = method.rule("outer")
    x, delta = [torch.zeros(n)], [torch.full((n,), 1e-3)]
    state: list[dict[str, Any]] = [{}]
    times = []
    for _ in range(6):
        began = time.perf_counter()
        rule.step(x, delta, state, method.hparams("outer"))
        times.append(time.perf_counter() - began)
    return min(times[1:])


def _resident() -> int:
    """Bytes that the process holds now; the peak starts anew from here, where the system can do that."""
    with contextlib.suppress(OSError):  # then it is that of the whole process, its imports included
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _memory("VmRSS")


def _peak() -> int:
    return _memory("VmHWM")


def _memory(what: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"This system does not say {what}; the study needs Linux.")


def judge(rows: Sequence[Mapping[str, Any]]) -> Claim:
    """The second half of claim 8: nobody keeps less than bi2clip."""
    kept: dict[str, float] = {row["algorithm"]: row["inner state"] + row["outer state"] for row in rows}
    least = min(kept.values())
    same = [name for name in kept if kept[name] <= least + 0.01]
    return decide(
        8,
        "bi2clip has the smallest overhead (its rank is judged by the GLUE study).",
        kept["bi2clip"] <= least + 0.01 if "bi2clip" in kept else None,
        f"state of {least:.2f} bytes a parameter: {', '.join(same)}; most of all: {max(kept.values()):.1f}. "
        "The copy of the start weights, 4 bytes, every nested method keeps",
    )


def report(found: Mapping[str, Any], claims: Sequence[Claim] | None) -> str:
    """The study as a page."""
    columns = ("inner state", "start weights", "outer state", "sent", "received")
    lines = [
        "# Overhead",
        "",
        f"Bytes a parameter, measured / by formula; {found['nodes']} nodes over gloo on one machine, "
        f"{found['parameters']} parameters, fp32. The outer state stands once, shared out over the nodes.",
        "",
        "| algorithm | " + " | ".join(columns) + " | peak above model and gradients | outer step, ms |",
        "| --- |" + " ---: |" * (len(columns) + 2),
    ]
    for row in found["rows"]:
        cells = [f"{row[c]:.2f} / {row['formula'][c]:g}" for c in columns]
        lines.append(
            f"| {row['algorithm']} | " + " | ".join(cells) + f" | {row['peak']:.1f} | {row['outer step, ms']:.2f} |"
        )
    lines += [
        "",
        "- sent and received: of one node in one round, headers and verdicts included. Through a server it would be "
        "4 bytes up and 4 down (adam2: 8 down).",
        "- peak: above model and gradients, in the process, buffers of the exchange included.",
        "- outer step: the rule alone on all parameters, one thread, the least of five.",
        "",
        *claim_lines(claims),
    ]
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """What is kept, stacked: start weights, inner state, outer state."""
    plt = pyplot()
    names = [row["algorithm"] for row in rows]
    figure, axis = plt.subplots(figsize=(8, 0.32 * len(rows) + 1.4), layout="constrained")
    left = [0.0] * len(rows)
    for kind, colour in (("start weights", "#bbbbbb"), ("inner state", "#E69F00"), ("outer state", "#0072B2")):
        widths = [row[kind] for row in rows]
        axis.barh(names, widths, left=left, color=colour, label=kind)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.invert_yaxis()
    axis.set_xlabel("bytes a parameter, measured")
    axis.legend(fontsize=8, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
