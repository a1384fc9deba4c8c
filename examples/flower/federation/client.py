"""The clients: each takes the local steps on its own data."""

import functools

from flwr.app import Context

from federation.problem import algorithm, loss, model, samples
from tailopt.integrations.flower import Client, client_app


@functools.cache
def data(node: int):
    return samples(1 + node, 100 + 10 * node)


def client(context: Context) -> Client:
    config, node = context.run_config, int(context.node_config["partition-id"])
    return Client(
        model(),
        algorithm(config),
        node=node,
        nodes=int(config["nodes"]),
        loss=loss,
        data=data(node),
        batch_size=int(config["batch-size"]),
        local_steps=int(config["local-steps"]),
        seed=int(config["seed"]),
    )


app = client_app(client)
