"""Federations in Flower's simulation: time per round beside `simulate`, and what privacy of clients costs.

    python benchmarks/flower.py time --data TEXTS [--nodes 100] [--participants 10] [--rounds 4]
    python benchmarks/flower.py privacy [--nodes 200] [--participants 50] [--rounds 10]

time: a GPT-2 of two layers over bytes on Shakespeare's longest roles, one client each, avg-biclip, 5 local steps of 4
blocks of 64 tokens. The seconds of rounds are those of the run folders; the first is left out, and the start of Ray and
of the clients is in none. privacy: logistic regression in 20 dimensions, 10 samples a client, displacements clipped to
norm 0.5; the accuracy on 5,000 fresh samples without clipping, with clipping, and with noise.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tailopt
from tailopt.engines.replay import recorded_digests, tensor_digests
from tailopt.integrations.flower import Client, Privacy, TailOPT, client_app
from tailopt.records.folder import Run
from tailopt.tasks.table import task

DIMENSIONS, SAMPLES, CLIP = 20, 10, 0.5
BACKEND = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": 2, "include_dashboard": False}}


def federated(build: Callable[[Context], Client], strategy: TailOPT, nodes: int, rounds: int, mods: Any = ()) -> None:
    """Run a federation to its end."""
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy.start(grid, num_rounds=rounds, timeout=600)

    run_simulation(server, client_app(build, mods), nodes, backend_config=BACKEND)


def partition(context: Context) -> int:
    return int(context.node_config["partition-id"])


def roles(data: str, nodes: int) -> tuple[Any, Any]:
    """The task and the data of all its nodes."""
    problem = task("shakespeare", "small", data=data, tokenizer="", largest=nodes, characters=5000)
    return problem, problem.nodes(0, nodes)


def time(arguments: argparse.Namespace) -> None:
    """Compare the time of a round, and the bits."""
    torch.set_num_threads(1)  # as Ray's actors have: bits depend on it
    problem, data = roles(arguments.data, arguments.nodes)
    algo = tailopt.algorithm("avg-biclip", ilr=0.01, i_u=0.1, i_d=0.01)
    common: dict[str, Any] = {"nodes": arguments.nodes, "local_steps": 5, "seed": 0}
    options: dict[str, Any] = {"participants": arguments.participants}
    name, nodes = arguments.data, arguments.nodes

    def build(context: Context) -> Client:
        problem, data = roles(name, nodes)
        return Client(
            problem.model(0),
            algo,
            node=partition(context),
            loss=problem.loss,
            data=data[partition(context)],
            batch_size=4,
            **common,
        )

    folder = Path(tempfile.mkdtemp())
    strategy = TailOPT(problem.model(0), algo, **common, **options, run=folder / "flower", connect_timeout=600)
    federated(build, strategy, arguments.nodes, arguments.rounds)
    digests: list[Any] = []

    def record(net: nn.Module) -> dict[str, float]:
        named = dict(net.named_parameters())
        digests.append(tensor_digests(list(named), list(named.values())))
        return {}

    del common["nodes"]
    tailopt.simulate(
        problem.model(0),
        algo,
        loss=problem.loss,
        data=data,
        batch_size=4,
        rounds=arguments.rounds,
        run=folder / "simulate",
        evaluate=record,
        progress=False,
        **common,
        **options,
    )
    same = [row["tensors"] for row in recorded_digests(folder / "flower").read()] == digests
    parameters = sum(p.numel() for p in problem.model(0).parameters())
    print(f"{arguments.nodes} clients, {arguments.participants} a round, {parameters:,} parameters; equal bits: {same}")
    for name in ("flower", "simulate"):
        seconds = [row["round_seconds"] for row in Run.open(folder / name).times()][1:]
        print(f"{name}: {statistics.median(seconds):.2f} s a round ({min(seconds):.2f} to {max(seconds):.2f})")


def samples(source: int, count: int) -> TensorDataset:
    """Two classes, of which a tenth of the labels are wrong."""
    generator = torch.Generator().manual_seed(source)
    x = torch.randn(count, DIMENSIONS, generator=generator)
    wrong = torch.rand(count, generator=generator) < 0.1
    return TensorDataset(x, ((x.sum(-1) > 0) ^ wrong).float())


def logistic(net: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return nn.functional.binary_cross_entropy_with_logits(net(x).squeeze(-1), y)


def zeros() -> nn.Module:
    net = nn.Linear(DIMENSIONS, 1)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    return net


def accuracy(net: nn.Module) -> float:
    x, y = samples(10**6, 5000).tensors
    with torch.no_grad():
        return ((net(x).squeeze(-1) > 0) == (y > 0)).float().mean().item()


def privacy(arguments: argparse.Namespace) -> None:
    """Accuracy and epsilon for several noises."""
    nodes, count, rounds = arguments.nodes, arguments.participants, arguments.rounds
    algo, delta = tailopt.algorithm("avg-l2clip", ilr=0.5, i_u=1.0), 1e-4
    common: dict[str, Any] = {"nodes": nodes, "local_steps": 5, "seed": 0}

    def build(context: Context) -> Client:
        own = samples(partition(context), SAMPLES)
        return Client(zeros(), algo, node=partition(context), loss=logistic, data=own, batch_size=5, **common)

    print(f"{nodes} clients, {count} a round, {rounds} rounds, delta {delta:g}")
    print(
        "| clipping | noise | epsilon | epsilon where it is known who takes part | accuracy |\n" + "| ---: " * 5 + "|"
    )
    for noise in (None, 0.0, *arguments.noise):
        chosen = None if noise is None else Privacy(CLIP, noise)
        net = zeros()
        strategy = TailOPT(net, algo, **common, participants=count, privacy=chosen, connect_timeout=600)
        federated(build, strategy, nodes, rounds, [] if chosen is None else [fixedclipping_mod])
        given: dict[str, Any] = {"delta": delta, "rounds": rounds, "nodes": nodes, "participants": count}
        secret = "" if chosen is None else f"{chosen.epsilon(**given):.2f}"
        known = "" if chosen is None else f"{chosen.epsilon(**given, secret_sampling=False):.2f}"
        cells = ("none", "none") if chosen is None else (f"{CLIP}", f"{noise:g}")
        print(f"| {' | '.join([*cells, secret, known, f'{accuracy(net):.3f}'])} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, function, nodes, participants, rounds in (("time", time, 100, 10, 4), ("privacy", privacy, 200, 50, 10)):
        command = commands.add_parser(name)
        command.add_argument("--nodes", type=int, default=nodes)
        command.add_argument("--participants", type=int, default=participants)
        command.add_argument("--rounds", type=int, default=rounds)
        command.set_defaults(function=function)
        if name == "time":
            command.add_argument("--data", required=True, help="Shakespeare's complete works, as the task takes them")
        else:
            command.add_argument("--noise", type=float, nargs="*", default=[1.0, 4.0, 8.0])
    arguments = parser.parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments.function(arguments)


if __name__ == "__main__":
    main()
