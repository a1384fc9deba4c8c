"""Privacy of clients: what is released, with Flower's own clipping on the clients, and what it costs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tailopt
from tailopt.integrations.privacy import Privacy
from tailopt.rounds.block_norm import norm

pytest.importorskip("flwr", reason="flwr needs Python 3.11")

from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod

from tailopt.integrations.flower import TailOPT, client_app
from tests.integrations.federations import NODES, STEPS, LocalGrid, algorithm, client

WIDE = 4096  # coordinates, over which the noise is measured


def net(wide: int = 6) -> nn.Module:
    """Without BatchNorm, whose buffers would be sent without noise."""
    torch.manual_seed(0)
    return nn.Linear(wide, 1)


def grid(algo: tailopt.Algorithm, unclipped: int | None = None, **more: Any) -> LocalGrid:
    """Clients that clip, but one."""

    def app(node: int) -> Any:
        mods = [] if node == unclipped else [fixedclipping_mod]
        return client_app(lambda context: client(algo, node, **{"model": net()} | more), mods)

    return LocalGrid({node: app(node) for node in range(NODES)})


def moved(
    over: LocalGrid, privacy: Privacy, model: nn.Module | None = None, rounds: int = 1, **more: Any
) -> list[Tensor]:
    """By how much one round moves the weights, with the outer step x + delta."""
    trained = model or net()
    before = [p.detach().clone() for p in trained.parameters()]
    strategy = TailOPT(
        trained,
        algorithm("avg-sgd"),
        nodes=NODES,
        local_steps=STEPS,
        seed=3,
        privacy=privacy,
        connect_timeout=0.5,
        **more,
    )
    strategy.start(over, num_rounds=rounds, timeout=60)
    return [p.detach() - x for p, x in zip(trained.parameters(), before, strict=True)]


def displacements() -> list[list[Tensor]]:
    """The displacement of every client alone: the mean of a federation in which only this client takes part."""
    algo, alone = algorithm("avg-sgd"), []
    for node in range(NODES):
        trained = net()
        before = [p.detach().clone() for p in trained.parameters()]
        strategy = TailOPT(
            trained,
            algo,
            nodes=NODES,
            local_steps=STEPS,
            seed=3,
            participation=lambda t, generator, node=node: [node],
            connect_timeout=0.5,
        )
        strategy.start(plain(algo), num_rounds=1, timeout=60)
        alone.append([p.detach() - x for p, x in zip(trained.parameters(), before, strict=True)])
    return alone


def plain(algo: tailopt.Algorithm, **more: Any) -> LocalGrid:
    return LocalGrid(
        {n: client_app(lambda context, n=n: client(algo, n, **{"model": net()} | more)) for n in range(NODES)}
    )


def clipped_sum(clip: float, nodes: list[int]) -> list[Tensor]:
    own = displacements()
    scaled = [[d.double() * min(1.0, clip / norm(own[n])) for d in own[n]] for n in nodes]
    return [sum(parts[1:], parts[0]) for parts in zip(*scaled, strict=True)]


@pytest.mark.parametrize("clip", [0.01, 0.5, 100.0])
def test_the_mean_is_that_of_clipped_displacements(clip: float) -> None:
    found = moved(grid(algorithm("avg-sgd")), Privacy(clip, 0.0))
    expected = [x / NODES for x in clipped_sum(clip, list(range(NODES)))]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-6)


def test_the_denominator_is_the_planned_number_also_when_clients_fail() -> None:
    over = grid(algorithm("avg-sgd"))
    over.late = {(1, 1), (3, 1)}
    found = moved(over, Privacy(0.05, 0.0))
    for a, b in zip(found, clipped_sum(0.05, [0, 2, 4]), strict=True):
        torch.testing.assert_close(a.double(), b / NODES, rtol=1e-4, atol=1e-6)


def test_a_client_that_does_not_clip_is_excluded_by_name() -> None:
    over = grid(algorithm("avg-sgd"), unclipped=2)
    with pytest.warns(UserWarning, match="goes on without node 2: beyond what its optimizer can move in all tensors"):
        found = moved(over, Privacy(0.05, 0.0))
    for a, b in zip(found, clipped_sum(0.05, [0, 1, 3, 4]), strict=True):
        torch.testing.assert_close(a.double(), b / NODES, rtol=1e-4, atol=1e-6)


def test_the_noise_has_its_standard_deviation_and_is_new_in_every_run() -> None:
    def still(model: nn.Module, batch: Any) -> Tensor:
        """No gradient: what moves is the noise."""
        x: Tensor = (0.0 * model.weight).sum()  # type: ignore[operator, union-attr]
        return x

    clip, noise = 0.5, 2.0
    runs = []
    for _ in range(2):
        # without Flower's mod, which divides by the norm: nothing moves here
        over = plain(algorithm("avg-sgd"), model=net(WIDE), loss=still)
        runs.append(moved(over, Privacy(clip, noise), net(WIDE))[0])
        expected = noise * clip / NODES
        assert float(runs[-1].std()) == pytest.approx(expected, rel=6 / math.sqrt(2 * WIDE))
        assert abs(float(runs[-1].mean())) < 6 * expected / math.sqrt(WIDE)
    assert not torch.equal(*runs)


def test_epsilon_is_that_of_the_accountant() -> None:
    accounting = pytest.importorskip("dp_accounting")
    from dp_accounting import rdp

    replace_one = accounting.NeighboringRelation.REPLACE_ONE
    found = Privacy(1.0, 4.0).epsilon(delta=1e-4, rounds=50, nodes=100, participants=10)
    event = accounting.SampledWithoutReplacementDpEvent(100, 10, accounting.GaussianDpEvent(2.0))
    accountant = rdp.RdpAccountant(neighboring_relation=replace_one).compose(event, 50)
    assert found == accountant.get_epsilon(1e-4)
    known = Privacy(1.0, 4.0).epsilon(delta=1e-4, rounds=50, nodes=100, participants=10, secret_sampling=False)
    accountant = rdp.RdpAccountant(neighboring_relation=replace_one).compose(accounting.GaussianDpEvent(2.0), 50)
    assert known == accountant.get_epsilon(1e-4) > found


def test_epsilon_bounds_the_exact_one_of_gaussian_noise() -> None:
    """Without sampling, T rounds are one Gaussian mechanism: its exact delta at this epsilon is below the one given."""
    privacy, rounds, delta = Privacy(1.0, 8.0), 20, 1e-5
    epsilon = privacy.epsilon(delta=delta, rounds=rounds, nodes=10)
    mu = math.sqrt(rounds) * 2.0 / privacy.noise

    def below(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    def exact(e: float) -> float:
        return below(mu / 2 - e / mu) - math.exp(e) * below(-mu / 2 - e / mu)

    assert exact(epsilon) < delta < exact(0.8 * epsilon)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"weights": [1.0, 2.0, 1.0, 1.0, 1.0]}, "Invalid weights: privacy needs equal ones"),
        ({"aggregate": "median-norm"}, "Invalid mean: median-norm"),
        ({"participants": 2, "sampling": "proportional"}, "Invalid sampling"),
        ({"participation": lambda t, generator: [0]}, "Invalid participation"),
        ({"guard": False}, "Invalid guard"),
    ],
    ids=["weights", "aggregate", "sampling", "participation", "guard"],
)
def test_what_the_guarantee_does_not_cover_is_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TailOPT(net(), algorithm("avg-sgd"), nodes=NODES, local_steps=STEPS, privacy=Privacy(1.0, 1.0), **more)


def test_models_and_algorithms_that_send_more_are_refused() -> None:
    given: dict[str, Any] = {"nodes": NODES, "local_steps": STEPS, "privacy": Privacy(1.0, 1.0)}
    with pytest.raises(ValueError, match="Invalid model: its buffers would be sent without noise"):
        TailOPT(nn.BatchNorm1d(3), algorithm("avg-sgd"), **given)
    with pytest.raises(ValueError, match="Invalid algorithm: adam2 sends second moments"):
        TailOPT(net(), algorithm("adam2"), **given)
    automatic = tailopt.algorithm("avg-l2clip", ilr=0.1, i_u="auto")
    with pytest.raises(ValueError, match='Invalid thresholds: "auto" inside'):
        TailOPT(net(), automatic, **given)


@pytest.mark.parametrize("clip", [0.0, -1.0, math.inf, math.nan, True, "1"])
def test_a_clip_that_is_no_norm_is_refused(clip: Any) -> None:
    with pytest.raises(ValueError, match="Invalid clip"):
        Privacy(clip, 1.0)


@pytest.mark.parametrize("noise", [-1.0, math.inf, math.nan, None])
def test_noise_that_is_no_multiple_is_refused(noise: Any) -> None:
    with pytest.raises(ValueError, match="Invalid noise"):
        Privacy(1.0, noise)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"delta": 0}, "Invalid delta: 0; need a probability between 0 and 1"),
        ({"delta": 1.0}, "Invalid delta: 1.0"),
        ({"delta": True}, "Invalid delta: True"),
        ({"rounds": 0}, "Invalid rounds: 0"),
        ({"nodes": 0}, "Invalid nodes: 0"),
        ({"participants": 2.5}, "Invalid participants: got 2.5; need a whole number from 1 to 10"),
        ({"participants": True}, "Invalid participants: got True"),
        ({"participants": 11}, "Invalid participants: got 11"),
        ({"secret_sampling": "no"}, "Invalid secret_sampling: 'no'; need True or False"),
    ],
)
def test_an_epsilon_of_what_does_not_exist_is_refused(changed: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"delta": 1e-5, "rounds": 5, "nodes": 10}
    with pytest.raises(ValueError, match=said):
        Privacy(1.0, 4.0).epsilon(**given | changed)


def test_secure_aggregation_of_the_older_api_does_not_work_with_messages(caplog: pytest.LogCaptureFixture) -> None:
    """What docs/flower.md says: this fails as soon as Flower offers SecAgg+ for messages."""
    from flwr.client.mod import secaggplus_mod

    algo = algorithm("avg-sgd")
    over = LocalGrid(
        {n: client_app(lambda context, n=n: client(algo, n, model=net()), [secaggplus_mod]) for n in range(NODES)}
    )
    strategy = TailOPT(net(), algo, nodes=NODES, local_steps=STEPS, seed=3, connect_timeout=0.5)
    strategy.start(over, num_rounds=1, timeout=60)
    assert strategy.result is not None
    assert [e["node"] for e in strategy.result.history[0]["excluded"]] == list(range(NODES))


def test_noise_that_clients_add_is_beyond_the_bound_of_their_optimizer() -> None:
    algo = algorithm("avg-biclip")
    noisy = LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=1.0, delta=1e-5)

    def over() -> LocalGrid:
        def app(node: int) -> Any:
            return client_app(lambda context: client(algo, node, model=net()), [noisy] if node == 1 else [])

        return LocalGrid({node: app(node) for node in range(NODES)})

    given: dict[str, Any] = {"nodes": NODES, "local_steps": STEPS, "seed": 3, "connect_timeout": 0.5}
    with pytest.warns(UserWarning, match="goes on without node 1: beyond what its optimizer can move"):
        TailOPT(net(), algo, **given).start(over(), num_rounds=1, timeout=60)
    unguarded = TailOPT(net(), algo, guard=False, **given)
    unguarded.start(over(), num_rounds=1, timeout=60)
    assert unguarded.result is not None and unguarded.result.history[0]["excluded"] == []
