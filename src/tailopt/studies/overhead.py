"""What the algorithms cost besides training: memory, traffic, time; measured on two real nodes, and by formula.

    on a node    4 bytes for the copy of the start weights (a displacement is a difference), and the inner state
    outside      the outer state, once for all nodes: here every node holds its share of it
    traffic      a node sends and receives 4 bytes of displacement and 4 of weights, each times (N - 1) / N;
                 through a server it would be 4 up and 4 down. adam2's second moment comes on top, with the weights

All per parameter, in fp32. Peak memory is what the process held at most above model and gradients.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tailopt.algorithms import ALGORITHMS, algorithm, rule_names
from tailopt.distributed.gloo import GlooTransport
from tailopt.distributed.header import Header
from tailopt.distributed.nested_optimizer import NestedOptimizer
from tailopt.figures.style import PALETTE, pyplot
from tailopt.progress import Progress
from tailopt.studies.plots import finish
from tailopt.studies.protocol import Claim, claim_lines, decide
from tailopt.studies.runner import RECORD, Grid, older_file, run_grid, write_results
from tailopt.studies.search_spaces import SPACES
from tailopt.studies.study import StudyOptions
from tailopt.studies.tables import markdown_table
from tailopt.sweeps.space import settings_at

SUMMARY = "memory, traffic and time of all algorithms, measured and by formula; minutes"
OPTIONS: tuple[str, ...] = ()

NODES, ROUNDS, PARAMETERS = 2, 3, 4_000_000
# bytes per parameter of a rule's state; of muon, those of a hidden matrix
STATE = {"adagrad": 4, "rmsprop": 4, "adam": 8, "adamw": 8, "yogi": 8, "nesterov": 4, "muon": 4}


@dataclass(frozen=True)
class Bytes:
    """Bytes per parameter: what is kept, and what a node sends and receives in a round."""

    inner_state: float
    start_weights: float
    outer_state: float
    sent: float
    received: float


@dataclass(frozen=True)
class Measured:
    """What two real nodes measured; peak: bytes per parameter; outer_step_ms: the outer rule alone."""

    bytes: Bytes
    peak: float
    outer_step_ms: float

    def as_json(self) -> dict[str, float]:
        """As the record has it."""
        return {**_with_spaces(self.bytes), "peak": self.peak, "outer step, ms": self.outer_step_ms}

    @classmethod
    def decode(cls, value: Mapping[str, float]) -> Measured:
        """From JSON."""
        return cls(Bytes(*(value[name] for name in _COLUMNS)), value["peak"], value["outer step, ms"])


_COLUMNS = tuple(field.name.replace("_", " ") for field in fields(Bytes))


def _with_spaces(values: Bytes) -> dict[str, float]:
    """By the names that tables and files use."""
    return {name.replace("_", " "): value for name, value in asdict(values).items()}


@dataclass(frozen=True)
class OverheadRow:
    """One algorithm, measured and by formula."""

    algorithm: str
    measured: Measured
    formula: Bytes

    @property
    def state(self) -> float:
        """Bytes per parameter that the rules keep."""
        return self.measured.bytes.inner_state + self.measured.bytes.outer_state

    def as_json(self) -> dict[str, Any]:
        """As results.json has it."""
        return {"algorithm": self.algorithm, **self.measured.as_json(), "formula": _with_spaces(self.formula)}


def run(out: Path, options: StudyOptions) -> Path:
    """Measure every algorithm that is not in `out` yet, and write table.md, results.json and overhead.png there."""
    parameters = 100_000 if options.quick else PARAMETERS
    grid = Grid[str, Measured](
        cells=("avg-biclip", "avg-adam", "adam2") if options.quick else tuple(ALGORITHMS),
        key=lambda name: {"algorithm": name, "parameters": parameters},
        measure=lambda name, tick: measured(name, parameters),
        encode=Measured.as_json,
        decode=Measured.decode,
        older=lambda name: older_file(out / "cells" / f"{name}-{parameters}.json"),
    )
    with Progress(options.progress) as bar:
        results = run_grid(grid, out / RECORD, bar)
    rows = [OverheadRow(name, result, formula(name)) for name, result in results.items()]
    claims = None if options.quick else [evaluate_claim(rows)]
    written: dict[str, Any] = {"parameters": parameters, "nodes": NODES, "rows": [row.as_json() for row in rows]}
    written["claim"] = claims[0] if claims else None
    write_results(out, written, report(rows, parameters, claims), options.command)
    draw(rows, out / "overhead.png")
    return out


def formula(name: str) -> Bytes:
    """Bytes per parameter, by what the rules keep and what is sent.

    Examples:
        >>> formula("bi2clip").inner_state, formula("adam2").inner_state, formula("adam2").received
        (0.0, 8.0, 6.0)
    """
    outer, inner = rule_names(name)
    share = (NODES - 1) / NODES
    # what is gathered: the new weights, and for adam2 the second moment that the nodes' Adam starts with
    sent = share * (4 + 4 + (4 if name == "adam2" else 0))
    return Bytes(float(STATE.get(inner, 0)), 4.0, float(STATE.get(outer, 0)), sent, sent)


# --- Measuring on two processes ---------------------------------------------------------------------------------------


def measured(name: str, parameters: int) -> Measured:
    """The same by two processes, with the peak of memory and the time of an outer step."""
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
    of_nodes: list[dict[str, float]] = [queue.get() for _ in nodes]
    values = {key: statistics.fmean(row[key] for row in of_nodes) for key in of_nodes[0]}
    values["outer state"] *= NODES  # every node holds its share
    return Measured.decode(values)


def _node(name: str, parameters: int, node: int, port: int, queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=node, world_size=NODES)
    method = algorithm(
        name, **settings_at({key: interval.at(0.5) for key, interval in SPACES["fine-tuning"].ranges(name).items()})
    )
    torch.manual_seed(0)
    tiny = torch.nn.Linear(10, 10)  # loads what is loaded once, and lets gloo allocate its buffers
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
        inner = _tensors(optimizer.state.values())  # in the middle of the round: its end may reset it
        _gradients(model)
        optimizer.step()
        counts.append((transport.sent, transport.received))
    peak = _peak() - before
    n = sum(p.numel() for p in model.parameters())
    queue.put(
        {
            "inner state": inner / n,
            "start weights": optimizer.node.x.nbytes / n,
            "outer state": _tensors(optimizer.node.outer_state) / n,
            "sent": counts[-1][0] / n,
            "received": counts[-1][1] / n,
            "peak": peak / n,
            "outer step, ms": _outer_step(method, n) * 1e3,
        }
    )
    dist.destroy_process_group()


def _tensors(states: Iterable[Mapping[str, Any]]) -> int:
    """Bytes of the tensors that scale with the parameters; step counters do not."""
    return sum(v.nbytes for s in states for v in s.values() if isinstance(v, Tensor) and v.dim())


class _Counting(GlooTransport):
    """Counts what it sends and receives."""

    sent = 0
    received = 0

    async def gather(self, mine: Tensor) -> Tensor:
        self._add([mine] * self.nodes, [mine] * self.nodes)
        return await super().gather(mine)

    async def exchange_with_header(
        self, header: Header, outgoing: Sequence[Tensor] = (), incoming: Sequence[Tensor] = ()
    ) -> list[Header]:
        words = header.packed(0)
        self._add([words] * self.nodes, [words] * self.nodes)
        self._add(outgoing, incoming)
        return await super().exchange_with_header(header, outgoing, incoming)

    async def exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        self._add(outgoing, incoming)
        await super().exchange(outgoing, incoming)

    def _add(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        self.sent += sum(t.nbytes for k, t in enumerate(outgoing) if k != self.node)
        self.received += sum(t.nbytes for k, t in enumerate(incoming) if k != self.node)


def _count(optimizer: NestedOptimizer) -> _Counting:
    exchange = optimizer.node.exchange
    transport = _Counting.replacing(exchange.transport)
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
    """Bytes that the process holds now; resets the peak to that, where the system can."""
    with contextlib.suppress(OSError):  # then the peak is that of the whole process, its imports included
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _memory("VmRSS")


def _peak() -> int:
    return _memory("VmHWM")


def _memory(what: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {what} here; need a Linux that reports it.")


# --- The claim, the page and the figure -------------------------------------------------------------------------------


def evaluate_claim(rows: Sequence[OverheadRow]) -> Claim:
    """The second half of claim 8: no algorithm keeps less state than bi2clip."""
    state = {row.algorithm: row.state for row in rows}
    least = min(state.values())
    same = [name for name in state if state[name] <= least + 0.01]
    return decide(
        8,
        "bi2clip has the smallest overhead (its rank is judged by the GLUE study).",
        state["bi2clip"] <= least + 0.01 if "bi2clip" in state else None,
        f"state of {least:.2f} bytes per parameter: {', '.join(same)}; most of all: {max(state.values()):.1f}. "
        "The copy of the start weights, 4 bytes, every nested method keeps",
    )


def report(rows: Sequence[OverheadRow], parameters: int, claims: Sequence[Claim] | None) -> str:
    """The study as a page."""
    head = ["algorithm", *_COLUMNS, "peak above model and gradients", "outer step, ms"]
    texts = []
    for row in rows:
        pairs = zip(astuple(row.measured.bytes), astuple(row.formula), strict=True)
        numbers = [f"{ours:.2f} / {theirs:g}" for ours, theirs in pairs]
        texts.append([row.algorithm, *numbers, f"{row.measured.peak:.1f}", f"{row.measured.outer_step_ms:.2f}"])
    lines = [
        "# Overhead",
        "",
        f"Bytes per parameter, measured / by formula; {NODES} nodes over gloo on one machine, "
        f"{parameters} parameters, fp32. The outer state is counted once, shared out over the nodes.",
        "",
        *markdown_table(head, texts, "lr"),
        "",
        "- sent and received: of one node in one round, headers and verdicts included. Through a server it would be "
        "4 bytes up and 4 down (adam2: 8 down).",
        "- peak: above model and gradients, in the process, buffers of the exchange included.",
        "- outer step: the rule alone on all parameters, one thread, the least of five.",
        "",
        *claim_lines(claims),
    ]
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[OverheadRow], path: Path) -> None:
    """What is kept, stacked: start weights, inner state, outer state; the sum beside each bar."""
    names = [row.algorithm for row in rows]
    figure, axis = pyplot().subplots(figsize=(7.5, 0.27 * len(rows) + 1.4), layout="constrained")
    left = [0.0] * len(rows)
    colours = {"start weights": "#bbbbbb", "inner state": PALETTE["orange"], "outer state": PALETTE["blue"]}
    for kind, colour in colours.items():
        widths = [_with_spaces(row.measured.bytes)[kind] for row in rows]
        axis.barh(names, widths, left=left, color=colour, label=kind)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, width in enumerate(left):
        axis.annotate(f"{width:.3g}", (width, place), (3, 0), textcoords="offset points", va="center", fontsize=8)
    axis.invert_yaxis()
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel("bytes per parameter")
    axis.legend(fontsize=8, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    finish(figure, f"What a node keeps in fp32, beside model and gradients, measured on {NODES} nodes", path)
