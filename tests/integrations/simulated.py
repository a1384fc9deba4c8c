"""One federation in Flower's simulation, in a process of its own: `python -m tests.integrations.simulated CASE`.

Prints the digests of the model and the histories of the federation and of `simulate`, as JSON. Both are made here: bits
depend on the number of threads, and Ray gives every client one.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from torch import nn

import tailopt
from tailopt.integrations.flower import Client, TailOPT, client_app
from tests.integrations.federations import NODES, ROUNDS, STEPS, algorithm, client, data, digest, model, simulated

TIMEOUT = 180.0  # of messages, and to wait for clients: on a busy machine, Ray's actors take their time to start
# algorithm, options of the strategy, and how the client of a node fails: in which rounds, and in which way
CASES: dict[str, tuple[str, dict[str, Any], tuple[int, set[int], str] | None]] = {
    "3 of 5": ("bi2clip", {"participants": 3}, None),
    "median-norm": ("adam-biclip", {"aggregate": "median-norm"}, None),
    "nan": ("bi2clip", {}, (3, {1, 2, 3, 4, 5}, "nan")),
    # the inner state of a lost contribution moves on in a simulation: this client is not heard of again
    "crash": ("diloco", {}, (1, {4, 5}, "crash")),
    # nothing is kept: Flower begins the next round of a client that is still busy with this one from the context before
    "late": ("adam-biclip", {}, (2, {3}, "late")),
}


def expected(case: str, history: list[dict[str, Any]]) -> tailopt.Result:
    """What `simulate` makes of a case; on a busy machine, others than the one that sleeps may be late too."""
    name, options, failing = CASES.get(case, (case, {}, None))
    if failing is None:
        return simulated(algorithm(name), **options)
    node, _, how = failing
    if how == "nan":
        return simulated(algorithm(name), data=[data(n, poisoned=node) for n in range(NODES)])
    lost = {row["round"]: [e["node"] for e in row["excluded"]] for row in history}
    return simulated(algorithm(name), drops=lambda t, generator: lost[t])


def described(trained: nn.Module, history: list[dict[str, Any]]) -> dict[str, Any]:
    return {"digest": digest(trained), "history": history}


def build(name: str, failing: tuple[int, set[int], str] | None, late_s: float, context: Context) -> Client:
    node = int(context.node_config["partition-id"])
    if failing is None or node != failing[0]:
        return client(algorithm(name), node)
    _, rounds, how = failing
    built = client(algorithm(name), node, data=data(node, poisoned=node if how == "nan" else None))
    train = built.train

    def fails(request: Any, kept: Any) -> Any:
        if request.round in rounds and how == "crash":
            raise OSError("the disk is gone")
        reply = train(request, kept)
        if request.round in rounds and how == "late":
            time.sleep(late_s)
        return reply

    built.train = fails  # type: ignore[method-assign]
    return built


def main(case: str) -> None:
    name, options, failing = CASES.get(case, (case, {}, None))
    timeout = 8.0 if case == "late" else TIMEOUT
    trained, server = model(), ServerApp()
    strategy = TailOPT(
        trained, algorithm(name), nodes=NODES, local_steps=STEPS, seed=3, connect_timeout=TIMEOUT, **options
    )

    @server.main()
    def run(grid: Grid, context: Context) -> None:
        strategy.start(grid, num_rounds=ROUNDS, timeout=timeout)

    backend = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": 2, "include_dashboard": False}}
    app = client_app(lambda context: build(name, failing, timeout + 2.0, context))
    run_simulation(server, app, NODES, backend_config=backend)
    assert isinstance(strategy.result, tailopt.Result)
    simulation = expected(case, strategy.result.history)
    found = described(trained, strategy.result.history), described(simulation.model, simulation.history)
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
