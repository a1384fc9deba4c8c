"""Every optimizer of the arena, step by step, against its reference: the authors' package, or the formula of its paper.

A baseline that is off would discredit the table. The gradients are those of a small decoder, the rates change from step
to step, and none of the references shares code with what it checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from tailopt.studies.arena_optimizers import BETAS, CONTENDERS, MOMENTUM, contenders_named, muon_split, state_bytes
from tailopt.studies.arena_training import SIZES, DecoderSize, decoder, loss_of, modes, set_rates

pytest.importorskip("transformers")

TINY = DecoderSize("tiny", layers=1, width=16, heads=2, inner=24)
RATES = (1e-3, 3e-3, 2e-3, 1e-3, 5e-4, 3e-4)
Reference = Callable[[str, Tensor, Tensor, float, dict], Tensor]  # (name, p, g, rate, state) -> the next p


def model() -> torch.nn.Module:
    return decoder(TINY, vocabulary=32, length=12, seed=0)


def batches() -> Iterator[Tensor]:
    draw = torch.Generator().manual_seed(1)
    while True:
        yield torch.randint(32, (4, 12), generator=draw)


def gradients(found: torch.nn.Module, ids: Tensor) -> None:
    found.zero_grad()
    loss_of(found, ids[:, :-1], ids[:, 1:]).backward()


def steps(name: str) -> Iterator[tuple[torch.nn.Module, Sequence[torch.optim.Optimizer], float]]:
    """The model with its gradients before every step, its optimizers and the rate; the step follows the yield."""
    if not CONTENDERS[name].is_installed:
        pytest.skip(f"{name} needs {CONTENDERS[name].source}, which is not installed: the extra arena has it")
    found = model()
    optimizers = CONTENDERS[name].build(found, RATES[0])
    modes(optimizers, "train")
    for rate, ids in zip(RATES, batches(), strict=False):
        set_rates(optimizers, rate)
        gradients(found, ids)
        yield found, optimizers, rate
        for optimizer in optimizers:
            optimizer.step()


def assert_follows(name: str, reference: Reference, tolerance: float = 2e-6) -> None:
    """The tolerance is relative to the rate: a step moves a weight by about as much."""
    states: dict[str, dict] = {}
    expected: dict[str, Tensor] = {}
    for found, _, rate in steps(name):
        for key, p in found.named_parameters():
            if key in expected:
                torch.testing.assert_close(p.detach(), expected[key], rtol=2e-6, atol=tolerance * rate * 100)
            g = p.grad.detach().clone()
            expected[key] = reference(key, p.detach().clone(), g, rate, states.setdefault(key, {"k": 0}))
    assert expected


def mean(state: dict, key: str, beta: float, value: Tensor) -> Tensor:
    """An exponential mean that begins at zero."""
    state[key] = beta * state.get(key, torch.zeros_like(value)) + (1 - beta) * value
    return state[key]


# --- Sign methods -----------------------------------------------------------------------------------------------------


def test_sign_is_sign_descent():
    assert_follows("sign", lambda name, p, g, rate, state: p - rate * g.sign())


def test_signum_steps_along_the_sign_of_a_mean_of_gradients():
    assert_follows("signum", lambda name, p, g, rate, state: p - rate * mean(state, "m", MOMENTUM, g).sign())


def test_signum_is_biclip_with_momentum_and_equal_thresholds():
    """So the table has it once; the correction of the mean's bias changes no sign."""
    from tailopt import BiClip

    ours = model()
    optimizer = BiClip(ours.parameters(), lr=RATES[0], u=1.0, d=1.0, momentum=MOMENTUM)
    theirs = None
    for (theirs, _, rate), ids in zip(steps("signum"), batches(), strict=False):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
        set_rates([optimizer], rate)
        gradients(ours, ids)
        optimizer.step()
    assert theirs is not None


def test_lion_is_the_one_of_its_paper():
    """arXiv 2302.06675: the sign of one mean, while another one is kept."""

    def lion(name: str, p: Tensor, g: Tensor, rate: float, state: dict) -> Tensor:
        kept = state.get("m", torch.zeros_like(g))
        direction = (0.9 * kept + 0.1 * g).sign()
        state["m"] = 0.99 * kept + 0.01 * g
        return p - rate * direction

    assert_follows("lion", lion)


def test_lion_is_that_of_lion_pytorch():
    theirs = pytest.importorskip("lion_pytorch", reason="lion-pytorch is not installed: the extra test has it")
    other = model()
    optimizer = theirs.Lion(other.parameters(), lr=RATES[0], betas=(0.9, 0.99), weight_decay=0.0, use_triton=False)
    for (found, _, rate), ids in zip(steps("lion"), batches(), strict=False):
        for a, b in zip(found.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
        set_rates([optimizer], rate)
        gradients(other, ids)
        optimizer.step()


# --- Adam's family ----------------------------------------------------------------------------------------------------


def adam(p: Tensor, g: Tensor, v: Tensor, rate: float, state: dict) -> Tensor:
    """A step of Adam with a second moment of any shape that broadcasts."""
    state["k"] += 1
    m = mean(state, "m", BETAS[0], g) / (1 - BETAS[0] ** state["k"])
    return p - rate * m / ((v / (1 - BETAS[1] ** state["k"])).sqrt() + 1e-8)


def test_adamw_is_adam_without_decay():
    assert_follows("adamw", lambda n, p, g, rate, s: adam(p, g, mean(s, "v", BETAS[1], g * g), rate, s), 1e-5)


def test_adamw_has_a_longer_memory_where_its_name_says_so():
    (slow,) = CONTENDERS["adamw-0.999"].build(model(), 1e-3)
    assert type(slow) is torch.optim.AdamW and slow.param_groups[0]["betas"] == (0.9, 0.999)


def test_schedule_free_is_the_reference_of_its_package():
    package = pytest.importorskip("schedulefree", reason="the extra arena has schedulefree")
    other = model()
    optimizer = package.AdamWScheduleFreeReference(other.parameters(), lr=RATES[0], betas=BETAS)
    optimizer.train()
    for (found, optimizers, rate), ids in zip(steps("schedule-free"), batches(), strict=False):
        modes(optimizers, "eval")
        optimizer.eval()
        for a, b in zip(found.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-3 * rate)
        modes(optimizers, "train")
        optimizer.train()
        set_rates([optimizer], rate)
        gradients(other, ids)
        optimizer.step()


def test_adam_mini_shares_second_moments_by_head_by_row_and_by_norm():
    """arXiv 2406.16793: of queries and keys a head has one, of other matrices a row, of a norm all."""

    def adam_mini(name: str, p: Tensor, g: Tensor, rate: float, state: dict) -> Tensor:
        square = g * g
        if "q_proj" in name or "k_proj" in name:
            shared = square.view(TINY.heads, -1).mean(1).view(TINY.heads, 1, 1)
            shared = shared.expand(TINY.heads, p.shape[0] // TINY.heads, p.shape[1]).reshape(p.shape)
        elif p.dim() == 2:
            shared = square.mean(1, keepdim=True).expand(p.shape)
        else:
            shared = square.mean().expand(p.shape)
        return adam(p, g, mean(state, "v", BETAS[1], shared), rate, state)

    assert_follows("adam-mini", adam_mini, 1e-5)


def test_apollo_mini_scales_the_gradient_by_what_adam_does_to_its_projection():
    """arXiv 2412.05270, rank 1: the gradient times the ratio of two norms of its projection, limited in growth."""

    def projections(found: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
        return {
            name: optimizers[0].state[p]["projector"].ortho_matrix.clone()
            for name, p in found.named_parameters()
            if "projector" in optimizers[0].state[p]
        }

    states: dict[str, dict] = {}
    before: dict[str, tuple[Tensor, Tensor]] = {}
    last = 0.0
    for found, optimizers, rate in steps("apollo-mini"):
        matrices = projections(found, optimizers)
        for name, p in found.named_parameters():
            if name in before:
                start, g = before[name]
                state = states.setdefault(name, {"k": 0})
                expected = apollo(start, g, matrices.get(name), last, state)
                torch.testing.assert_close(p.detach(), expected, rtol=1e-5, atol=1e-3 * last)
            before[name] = p.detach().clone(), p.grad.detach().clone()
        last = rate
    assert len([state for state in states.values() if "norm" in state]) == 7  # the matrices of a layer


def apollo(p: Tensor, g: Tensor, projection: Tensor | None, rate: float, state: dict) -> Tensor:
    state["k"] += 1
    k = state["k"]
    rate *= (1 - BETAS[1] ** k) ** 0.5 / (1 - BETAS[0] ** k)  # here eps is added before the bias is corrected
    small = g if projection is None else g @ projection.T if g.shape[0] >= g.shape[1] else projection.T @ g
    m, v = mean(state, "m", BETAS[0], small), mean(state, "v", BETAS[1], small * small)
    direction = m / (v.sqrt() + 1e-6)
    if projection is None:
        return p - rate * direction
    scaled = g * direction.norm() / small.norm()
    if "norm" in state:
        scaled = scaled / max(1.0, float(scaled.norm()) / (1.01 * state["norm"]))
    state["norm"] = float(scaled.norm())
    return p - rate * 128**0.5 * scaled


@pytest.mark.slow  # it compiles its step
def test_adamw_in_8_bits_stays_close_to_adamw_with_a_quarter_of_its_state():
    """On a model whose tensors are large enough: those below 4,096 elements keep their moments in 32 bits."""
    pytest.importorskip("torchao", reason="torchao is not installed: the extra arena has it")
    pair = [decoder(SIZES["1M"], vocabulary=32, length=12, seed=0) for _ in range(2)]
    optimizers = [
        CONTENDERS[name].build(own, RATES[0]) for name, own in zip(("adamw", "adamw-8bit"), pair, strict=True)
    ]
    moved = 0.0
    for rate, ids in zip(RATES[:3], batches(), strict=False):
        for own, its in zip(pair, optimizers, strict=True):
            set_rates(its, rate)
            gradients(own, ids)
            its[0].step()
        moved += rate * sum(p.numel() for p in pair[0].parameters())
    with torch.no_grad():
        off = sum(float((a - b).abs().sum()) for a, b in zip(*(own.parameters() for own in pair), strict=True))
    assert 0 < off < 0.1 * moved
    assert state_bytes(optimizers[1]) < 0.3 * state_bytes(optimizers[0])


# --- Muon, and ours around others -------------------------------------------------------------------------------------


def test_muon_has_the_hidden_matrices_and_adamw_the_rest():
    found = model()
    muon, rest = muon_split(found, 1e-3)
    names = {id(p): name for name, p in found.named_parameters()}
    on_muon = sorted(names[id(p)] for group in muon.param_groups for p in group["params"])
    assert all("_proj.weight" in name for name in on_muon) and len(on_muon) == 7
    assert len(on_muon) + sum(len(group["params"]) for group in rest.param_groups) == len(names)


def test_muon_is_the_rule_that_nested_training_has():
    """Which is compared with an independent implementation among the contracts of algorithms."""
    from tailopt.rules.muon import MUON

    other = model()
    params = list(other.parameters())
    on_adamw = [p.dim() != 2 or "embed" in name for name, p in other.named_parameters()]
    states: list[dict] = [{} for _ in params]
    settings = {"betas": BETAS, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
    for (found, _, rate), ids in zip(steps("muon"), batches(), strict=False):
        for a, b in zip(found.parameters(), params, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-3 * rate)
        gradients(other, ids)
        grads = [p.grad for p in params]
        hparams = {**settings, "lr": rate, "lr_adamw": rate, "adamw_on": on_adamw}
        with torch.no_grad():
            MUON.step(params, grads, states, hparams)


@pytest.mark.parametrize("name", ["clipped-adamw", "clipped-muon"])
def test_a_gate_does_nothing_before_it_knows_the_gradients(name: str):
    pairs = zip(steps(name), steps(name.removeprefix("clipped-")), strict=True)
    for (ours, _, _), (theirs, _, _) in pairs:
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_momentum_in_bf16_takes_half_of_the_memory():
    kept = {}
    for name in ("biclip-momentum", "biclip-momentum-bf16"):
        *_, (found, optimizers, _) = steps(name)
        momenta = [optimizers[0].state[p]["momentum_buffer"] for p in found.parameters()]
        kept[name] = sum(m.numel() * m.element_size() for m in momenta)
    assert kept["biclip-momentum-bf16"] * 2 == kept["biclip-momentum"]


# --- What is counted --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bytes_per_parameter"), [("adamw", 8.0), ("sgd-momentum", 4.0), ("signum", 4.0), ("sign", 0.0)]
)
def test_the_state_is_what_an_optimizer_keeps(name: str, bytes_per_parameter: float):
    *_, (found, optimizers, _) = steps(name)
    count = sum(p.numel() for p in found.parameters())
    tensors = len(list(found.parameters()))
    counters = 4 * tensors if name == "adamw" else 0  # the numbers of steps
    assert state_bytes(optimizers) == bytes_per_parameter * count + counters


def test_unknown_optimizers_are_refused_by_name():
    with pytest.raises(ValueError, match=r"Unknown algorithm: 'adamv'; did you mean 'adamw'\?"):
        contenders_named("adamv")


def test_an_optimizer_whose_package_is_missing_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "schedulefree", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="This optimizer needs schedulefree"):
        contenders_named("schedule-free")
