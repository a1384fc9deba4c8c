"""Whole rounds of avg-sgd on a GPU: all nodes and configurations as one compiled program, against a loop over nodes.

The model has the shape of granite-30m: RoBERTa with 6 layers of width 384, 12 heads and 50,265 words, random weights.
A round is 10 nodes x 5 local steps of batch 16 at length 96 (padded), bf16 autocast, dropout 0.1, the mean of the
displacements and the outer step. Batches lie on the GPU; drawing them is included.

    loop in one graph    model, backward pass and SGD step of one node after another, and the mean: a round is one CUDA
                         graph. Replaying it leaves no work for the host.
    n configurations     `tailopt.engines.configurations` on the compiled route: one graph per local step

Every competitor has its own process, in which it compiles and captures; then they take turns, the loop twice as a
control. The memory is planned in a further process, from 2 and 3 configurations, and compared with what 6 reserve.

    python benchmarks/vectorized_gpu.py [--configurations 1 6] [--runs 3] [--rounds 10] [--write]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from cpu_step import put
from torch import Tensor

import tailopt
from tailopt.engines.attention import batchable_copy
from tailopt.engines.batches import FunctionBatches
from tailopt.engines.captured_steps import CapturedPrograms
from tailopt.engines.configuration_rounds import ConfigurationBatch, Configurations, Replica
from tailopt.engines.configurations import _memory_plan as memory_plan
from tailopt.engines.memory_plan import peak
from tailopt.engines.routes import COMPILED, Route
from tailopt.rounds.policy import RoundPolicy

NODES, STEPS, BATCH, LENGTH, WORDS = 10, 5, 16, 96, 50265
POOL = 64  # batches of each node
LOOP, CONTROL, PLAN = "loop in one graph", "the same again", "plan"
GB = 1e9


def model() -> torch.nn.Module:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    torch.manual_seed(0)
    config = RobertaConfig(vocab_size=WORDS, hidden_size=384, num_hidden_layers=6, num_attention_heads=12,
                           intermediate_size=1536, max_position_embeddings=514, type_vocab_size=2)  # fmt: skip
    return RobertaForSequenceClassification(config)


def loss(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found: Tensor = model(**batch).loss
    return found


class Data:
    """A pool of batches on the device, and which of them a node takes."""

    def __init__(self) -> None:
        shape, source = (NODES, POOL, BATCH, LENGTH), torch.Generator().manual_seed(0)
        ids = torch.randint(3, WORDS, shape, generator=source)
        lengths = torch.randint(LENGTH // 4, LENGTH + 1, (*shape[:3], 1), generator=source)
        mask = (torch.arange(LENGTH) < lengths).long()
        labels = torch.randint(2, shape[:3], generator=source)
        whole = {"input_ids": torch.where(mask > 0, ids, 1), "attention_mask": mask, "labels": labels}
        self.whole = {name: t.cuda() for name, t in whole.items()}

    def __call__(self, node: int, t: int, step: int, generator: torch.Generator) -> dict[str, Tensor]:
        return {name: tensor[node, (t * STEPS + step) % POOL] for name, tensor in self.whole.items()}


def algorithms(count: int) -> list[tailopt.Algorithm]:
    return [tailopt.algorithm("avg-sgd", ilr=0.01 / (1 + k)) for k in range(count)]


def task() -> Configurations:
    replica = Replica(
        model=model(),
        batches=FunctionBatches(Data(), NODES, STEPS, 0),
        policy=RoundPolicy(rounds=2000, local_steps=STEPS, inner_state="reset", nodes=NODES, weights=(1.0,) * NODES),
    )
    return Configurations(replicas=(replica,), loss=loss, device=torch.device("cuda"), precision="bf16", route=COMPILED)


class SideBySide:
    """Rounds of several configurations by the engine."""

    def __init__(self, count: int) -> None:
        self.count, self._t = count, 0
        self.batch = ConfigurationBatch(task(), algorithms(count), Route(COMPILED, "asked for"), CapturedPrograms())

    def rounds(self, count: int) -> None:
        with torch.no_grad():
            for _ in range(count):
                self._t += 1
                self.batch.run_round(self._t)

    def note(self) -> str:
        last = [f"{value:.3f}" for value in self.batch.losses[0, :, self._t - 1].tolist()]
        return f"{self.batch.route}; losses of the last round: {', '.join(last)}"


class Loop:
    """Rounds of one configuration, node after node, as one CUDA graph."""

    count = 1

    def __init__(self) -> None:
        self._data, self._t = Data(), 0
        self._model = batchable_copy(model()).cuda()  # its attention masks without reading values, as capture needs
        self._params = [p for p in self._model.parameters() if p.requires_grad]
        self._x = [p.detach().clone() for p in self._params]
        self._batches = [[self._drawn(node, 0, step) for step in range(STEPS)] for node in range(NODES)]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._losses = self._round(range(1))
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._losses = self._round(range(NODES))

    def _drawn(self, node: int, t: int, step: int) -> dict[str, Tensor]:
        return {name: b.clone() for name, b in self._data(node, t, step, torch.Generator()).items()}

    def _round(self, nodes: range) -> Tensor:
        weights = [p.detach() for p in self._params]
        mean, losses = [torch.zeros_like(w) for w in weights], []
        for node in nodes:
            torch._foreach_copy_(weights, self._x)
            for step in range(STEPS):
                with torch.autocast("cuda", torch.bfloat16):
                    value = loss(self._model, self._batches[node][step])
                grads = torch.autograd.grad(value, self._params)
                torch._foreach_add_(weights, list(grads), alpha=-0.01)
                losses.append(value.detach().double())
                del value, grads
            torch._foreach_sub_(weights, self._x)
            torch._foreach_add_(mean, weights, alpha=1 / NODES)
        torch._foreach_add_(self._x, mean)
        return torch.stack(losses).mean()

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self._t += 1
            for node, of_node in enumerate(self._batches):
                for step, batch in enumerate(of_node):
                    drawn = self._data(node, self._t, step, torch.Generator())
                    torch._foreach_copy_(list(batch.values()), list(drawn.values()))
            self._graph.replay()
            self.loss = float(self._losses)

    def note(self) -> str:
        return f"loss of the last round: {self.loss:.3f}"


def serve(name: str, pipe: Any) -> None:
    """Prepare a competitor, then run rounds whenever asked to."""
    began = time.perf_counter()
    if name == PLAN:
        pipe.send(memory_plan(task(), algorithms(6), Route(COMPILED, "asked for")))
        return
    made: list[Any] = []

    def prepare() -> None:
        made.append(SideBySide(int(name)) if name.isdigit() else Loop())
        made[0].rounds(3)

    reserved = peak(prepare, torch.device("cuda"))
    pipe.send((time.perf_counter() - began, reserved, made[0].note()))
    while (rounds := pipe.recv()) is not None:
        torch.cuda.synchronize()
        start = time.perf_counter()
        made[0].rounds(rounds)
        torch.cuda.synchronize()
        pipe.send((time.perf_counter() - start) / rounds)


def title(name: str) -> str:
    return name if not name.isdigit() else f"{name} configuration{'s' if name != '1' else ''}"


def table(names: list[str], times: dict[str, list[float]], ready: dict[str, Any], plan: Any) -> list[str]:
    lines = [
        "| | examples/s: median [least, most] | relative to the loop | ms per round | reserved, GB | planned, GB | "
        "ready after, s |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    loop = statistics.median(times[LOOP])
    for name in names:
        each, count = times[name], int(name) if name.isdigit() else 1
        speeds = sorted(count * NODES * STEPS * BATCH / one for one in each)
        seconds, reserved, _ = ready[name]
        planned = ""
        if plan is not None and name.isdigit():
            planned = f"{plan.bytes(count) / GB:.1f} ({reserved / plan.bytes(count) - 1:+.1%})"
        lines.append(
            f"| {title(name)} | **{statistics.median(speeds):,.0f}** [{speeds[0]:,.0f}, {speeds[-1]:,.0f}] | "
            f"{count * loop / statistics.median(each):.2f} | {1e3 * statistics.median(each):.1f} | "
            f"{reserved / GB:.1f} | {planned} | {seconds:.0f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configurations", type=int, nargs="+", default=[1, 6])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10, help="rounds of each competitor in a run")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no CUDA device here, so nothing was measured.")
        return
    names = [LOOP, *map(str, arguments.configurations), CONTROL]
    context = torch.multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for name in [*names, PLAN]:
        pipes[name], end = context.Pipe()
        processes.append(context.Process(target=serve, args=(name, end), daemon=True))
        processes[-1].start()
        end.close()
    ready = {}
    for name in [*names, PLAN]:
        try:
            ready[name] = pipes[name].recv()
            print(f"{title(name)}: {ready[name]}", flush=True)
        except EOFError:
            print(f"{title(name)}: failed", flush=True)
    names, plan = [name for name in names if name in ready], ready.get(PLAN)
    times: dict[str, list[float]] = {name: [] for name in names}
    ask: Callable[[str, int], float] = lambda name, rounds: (pipes[name].send(rounds), pipes[name].recv())[1]  # noqa: E731
    for name in names:
        ask(name, 3)
    for _ in range(arguments.runs):
        for name in names:
            times[name].append(ask(name, arguments.rounds))
    for name in names:
        pipes[name].send(None)
    lines = [
        f"`python benchmarks/vectorized_gpu.py`: {torch.cuda.get_device_name()}; torch {torch.__version__}, "
        f"tailopt {tailopt.__version__}; {arguments.runs} runs of {arguments.rounds} rounds, competitors in turn. "
        "Goals: 6 configurations 3 times the loop and 19,000 examples/s, one 2.5 times, memory within 10 % of the "
        "plan.",
        "",
        *table(names, times, ready, plan),
    ]
    print("\n".join(lines))
    if arguments.write:
        put("\n".join(lines) + "\n", "vectorized_gpu", "All nodes and configurations at once, on a GPU")


if __name__ == "__main__":
    main()
