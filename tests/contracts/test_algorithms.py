"""Every algorithm against an independent implementation: float64 to 1e-10, float32 to 1e-5 of the largest weight."""

import numpy as np
import pytest
import torch

import tailopt
from tailopt.algorithms import NAMED as ALL
from tailopt.rules.table import INNER, OUTER
from tests.contracts import oracle

# Muon's iteration runs in bf16: tests/rules/test_muon.py compares it with torch, and with one in float64.
NAMED = [name for name in ALL if name != "muloco"]
NODES, ROUNDS, STEPS = 7, 30, 5
WEIGHTS = [1.0, 2.0, 0.5, 1.0, 3.0, 1.5, 0.25]
SHAPES = {"a": (3, 4), "b": (5,)}
SETTINGS = {
    "ilr": 0.05,
    "olr": 0.3,
    "ieps": 1e-3,
    "oeps": 1e-2,
    "i_u": 0.8,
    "i_d": 0.1,
    "o_u": 0.05,
    "o_d": 0.01,
    "momentum": 0.8,
    "weight_decay": 0.05,
}
PAIRS = [
    f"{outer}-{inner}"
    for outer, inner in (
        ("sgd", "sgd"),
        ("sgd", "biclip"),
        ("sgd", "adamw"),
        ("nesterov", "sgd"),
        ("nesterov", "biclip"),
        ("nesterov", "l2clip"),
        ("nesterov", "adamw"),
        ("biclip", "sgd"),
        ("biclip", "adam"),
        ("biclip", "l2clip"),
        ("biclip-l2", "sgd"),
        ("biclip-l2", "biclip"),
        ("adagrad", "adam"),
        ("adagrad", "biclip-l2"),
        ("rmsprop", "adagrad"),
        ("rmsprop", "l2clip"),
        ("adam", "adagrad"),
        ("adam", "sign"),
        ("avg", "sign"),
        ("avg", "adamw"),
        ("avg", "biclip+adam"),
        ("rmsprop", "biclip+adamw"),
        ("yogi", "biclip"),
    )
]


class Bowl(torch.nn.Module):
    """Two tensors, no data: the loss is written out below."""

    def __init__(self, start):
        super().__init__()
        for name, value in start.items():
            self.register_parameter(name, torch.nn.Parameter(value.clone()))


def hills(seed=0):
    """Curvatures and optima of every node."""
    rng = np.random.default_rng(seed)
    return [
        {name: (rng.uniform(0.5, 2.0, shape), rng.normal(size=shape)) for name, shape in SHAPES.items()}
        for _ in range(NODES)
    ]


def noise(node, t, step):
    """Heavy-tailed, fresh in every local step."""
    rng = np.random.default_rng([node, t, step])
    return {name: rng.standard_t(2.0, size=shape) for name, shape in SHAPES.items()}


def gradient(node, t, step, x):
    extra, own = noise(node, t, step), hills()[node]
    return {name: own[name][0] * (x[name] - own[name][1]) + 0.1 * np.cos(x[name]) + extra[name] for name in SHAPES}


def batches(dtype, wide=0.0):
    every = hills()

    def batch(node, t, step, generator):
        extra = noise(node, t, step)
        return {
            name: [torch.tensor(value, dtype=dtype) for value in (*every[node][name], extra[name] + wide)]
            for name in SHAPES
        }

    return batch


def loss(model, batch):
    """Its gradient is `gradient`."""
    total = 0.0
    for name, (curvature, optimum, extra) in batch.items():
        x = getattr(model, name)
        total = total + (curvature * (x - optimum) ** 2 / 2 + 0.1 * torch.sin(x) + extra * x).sum()
    return total


def start():
    rng = np.random.default_rng(99)
    return {name: rng.normal(size=shape) for name, shape in SHAPES.items()}


def needed(name):
    """The settings of an algorithm, asked of the algorithm itself through its error message."""
    with pytest.raises(ValueError, match="It needs") as found:
        tailopt.algorithm(name, nothing=1)
    listed = str(found.value).split("It needs ")[1].split(".")[0]
    return {key: SETTINGS[key] for key in listed.replace(" ", "").split(",") if key != "nosetting"}


def simulated(algo, dtype=torch.float64, rounds=ROUNDS, wide=0.0, **more):
    model = Bowl({name: torch.tensor(value, dtype=dtype) for name, value in start().items()})
    return tailopt.simulate(
        model,
        algo,
        loss=loss,
        batches=batches(dtype, wide),
        nodes=NODES,
        rounds=rounds,
        local_steps=STEPS,
        progress=False,
        **more,
    )


def distance(model, weights):
    return max(float(np.abs(getattr(model, name).detach().numpy() - weights[name]).max()) for name in SHAPES)


def few(t):
    """Who takes part in a round of the partial runs."""
    rng = np.random.default_rng([7, t])
    return sorted(rng.choice(NODES, size=4, replace=False).tolist())


@pytest.mark.parametrize("name", [*NAMED, *PAIRS])
def test_follows_the_oracle_in_float64(name):
    settings = needed(name)
    algo = tailopt.algorithm(name, **settings)
    trace = oracle.run(
        algo.outer,
        algo.inner,
        settings,
        start(),
        gradient,
        NODES,
        ROUNDS,
        STEPS,
        weights=WEIGHTS,
        participants=few,
        inner_state=algo.inner_state,
        send_preconditioner=algo.send_preconditioner,
        projection=2.5,
        average=True,
    )
    result = simulated(algo, weights=WEIGHTS, participation=lambda t, g: few(t), projection=2.5, average=True)
    assert distance(result.model, trace.weights[-1]) < 1e-10
    assert distance(result.average, trace.average) < 1e-10
    assert [row["participants"] for row in result.history] == [few(t) for t in range(1, ROUNDS + 1)]
    moved = max(float(np.abs(trace.weights[-1][name] - value).max()) for name, value in start().items())
    assert moved > 1e-2, "nothing happened"


@pytest.mark.parametrize("name", NAMED)
def test_the_proximal_term_follows_the_oracle(name):
    settings, options = needed(name), {"proximal": 0.7}
    algo = tailopt.algorithm(name, **settings)
    trace = oracle.run(
        algo.outer, algo.inner, settings, start(), gradient, NODES, ROUNDS, STEPS,
        weights=WEIGHTS, participants=few, inner_state=algo.inner_state, send_preconditioner=algo.send_preconditioner,
        **options,
    )  # fmt: skip
    result = simulated(algo, weights=WEIGHTS, participation=lambda t, g: few(t), **options)
    assert distance(result.model, trace.weights[-1]) < 1e-10
    assert distance(simulated(algo, weights=WEIGHTS, participation=lambda t, g: few(t)).model, trace.weights[-1]) > 1e-6


@pytest.mark.parametrize("send", [True, False, "raw"])
def test_adam2_with_and_without_its_preconditioner(send):
    algo = tailopt.algorithm("adam2", **needed("adam2"), send_preconditioner=send)
    trace = oracle.run(
        "adam", "adam", needed("adam2"), start(), gradient, NODES, ROUNDS, STEPS, send_preconditioner=send
    )
    assert distance(simulated(algo).model, trace.weights[-1]) < 1e-10


@pytest.mark.parametrize("options", [{"bias_correction": True}, {"outer_betas": (0.8, 0.95)}, {"inner_state": "keep"}])
def test_options_of_adam(options):
    settings = needed("adam-adam") if "inner_state" not in options else needed("avg-adam")
    outer = "adam" if "inner_state" not in options else "avg"
    more = {} if outer == "avg" else {"send_preconditioner": False}
    algo = tailopt.algorithm(f"{outer}-adam", **settings, **options, **more)
    trace = oracle.run(outer, "adam", settings, start(), gradient, NODES, ROUNDS, STEPS, **options, **more)
    assert distance(simulated(algo).model, trace.weights[-1]) < 1e-10


@pytest.mark.parametrize("name", ["avg-biclip", "bi2clip", "avg-biclip-l2", "adam-biclip"])
def test_scheduled_thresholds_dead_zone_and_scope(name):
    settings = needed(name)
    options = {"dead_zone": 0.02} if name.endswith("clip") else {"scope": "tensor"}
    schedules = {"ilr": lambda t: 0.05 / t**0.5, "i_u": lambda t: 0.8 * t**0.25}
    if name == "bi2clip":
        options = {}
    algo = tailopt.algorithm(name, **settings, **options)
    trace = oracle.run(
        algo.outer, algo.inner, settings, start(), gradient, NODES, ROUNDS, STEPS, schedules=schedules, **options
    )
    assert distance(simulated(algo, schedules=schedules).model, trace.weights[-1]) < 1e-10


@pytest.mark.parametrize("name", [*NAMED, *PAIRS])
def test_float32_stays_near(name):
    """Where no gradient comes near zero: noise of one sign, so that no rounding flips a clipped step."""
    settings, wide = needed(name), 8.0
    algo = tailopt.algorithm(name, **settings)
    double = simulated(algo, torch.float64, rounds=6, wide=wide).model
    single = simulated(algo, torch.float32, rounds=6, wide=wide).model
    largest = max(float(p.detach().abs().max()) for p in double.parameters())
    apart = max(
        float((p.detach() - q.detach().double()).abs().max())
        for p, q in zip(double.parameters(), single.parameters(), strict=True)
    )
    assert apart <= 1e-5 * largest


def test_every_rule_is_reached():
    """The names above cover both tables."""
    pairs = [tailopt.algorithm(name, **needed(name)) for name in (*NAMED, *PAIRS)]
    assert {algo.outer for algo in pairs} == set(OUTER)
    assert {algo.inner for algo in pairs} == set(INNER) - {"muon"}
