"""The server: the outer step, the guard, and the run folder."""

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from federation.problem import algorithm, loss, model, samples
from tailopt.integrations.flower import TailOPT

app = ServerApp()


def evaluate(net: torch.nn.Module) -> dict[str, float]:
    with torch.no_grad():
        return {"huber": loss(net, samples(0, 500).tensors).item()}


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    folder = str(config["folder"])
    strategy = TailOPT(
        model(),
        algorithm(config),
        nodes=int(config["nodes"]),
        local_steps=int(config["local-steps"]),
        seed=int(config["seed"]),
        evaluate=evaluate,
        run=folder or None,
        resume=bool(folder),
    )
    strategy.start(grid, num_rounds=int(config["rounds"]), timeout=float(config["timeout"]))
