"""The rule muon: torch.optim.Muon and AdamW bit for bit, the iteration itself, and how parameters are split."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tailopt
from tailopt.algorithms import NAMED
from tailopt.distributed.rule_optimizer import RuleOptimizer
from tailopt.rules.muon import ADAMW_ON, on_adamw
from tailopt.rules.rule import ParamState
from tailopt.rules.table import INNER

MUON = INNER["muon"]
SHAPES = ((6, 4), (5,), (3, 9), (7, 7), (2, 3, 4))
ON_ADAMW = [False, True, False, True, True]  # one of the matrices too
NUMBERS: dict[str, Any] = {
    **MUON.defaults, "lr": 0.03, "lr_adamw": 0.01, "eps": 1e-6, "weight_decay": 0.2, "adamw_on": ON_ADAMW,
}  # fmt: skip


def tensors(seed: int, dtype: torch.dtype) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=source, dtype=torch.float64).to(dtype) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("numbers", "muon", "adamw"),
    [
        ({}, {}, {}),
        (
            {"momentum": 0.8, "adjust_lr_fn": "match_rms_adamw"},
            {"momentum": 0.8, "adjust_lr_fn": "match_rms_adamw"},
            {},
        ),
        ({"betas": (0.7, 0.95)}, {}, {"betas": (0.7, 0.95)}),
    ],
    ids=["defaults", "as AdamW", "betas"],
)
def test_it_has_the_bits_of_torch(
    numbers: dict[str, Any], muon: dict[str, Any], adamw: dict[str, Any], dtype: torch.dtype
) -> None:
    """Of single-tensor AdamW, as for the rule adamw; a parameter without a gradient keeps its value and its state."""
    params, states = tensors(0, dtype), [ParamState() for _ in SHAPES]
    theirs = [nn.Parameter(p) for p in tensors(0, dtype)]
    matrices, rest = ([p for p, other in zip(theirs, ON_ADAMW, strict=True) if other is own] for own in (False, True))
    both = [
        torch.optim.Muon(matrices, lr=0.03, weight_decay=0.2, **muon),
        torch.optim.AdamW(rest, lr=0.01, eps=1e-6, weight_decay=0.2, foreach=False, **adamw),
    ]
    for k in range(6):
        grads = tensors(100 + k, dtype)
        moving = [i for i in range(len(SHAPES)) if (i + k) % 3]
        chosen = {**NUMBERS, **numbers, "adamw_on": [ON_ADAMW[i] for i in moving]}
        MUON.step([params[i] for i in moving], [grads[i] for i in moving], [states[i] for i in moving], chosen)
        for i, p in enumerate(theirs):
            p.grad = grads[i] if i in moving else None
        for optimizer in both:
            optimizer.step()
        for p, q in zip(params, theirs, strict=True):
            assert torch.equal(p, q.detach()), f"step {k}"
    assert {key for key, value in states[0].items() if isinstance(value, Tensor)} == {"momentum_buffer"}
    assert {key for key, value in states[1].items() if isinstance(value, Tensor)} == {"exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(("adjust", "factor"), [("original", (9 / 3) ** 0.5), ("match_rms_adamw", 0.2 * 9**0.5)])
def test_a_step_is_nearly_the_nearest_orthogonal_matrix(adjust: str, factor: float) -> None:
    """An independent iteration in float64: five times 3.4445 x - 4.775 x^3 + 2.0315 x^5 on the singular values."""
    g = torch.randn(9, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = torch.zeros(9, 3, dtype=torch.float64)
    numbers = {**NUMBERS, "lr": 1.0, "weight_decay": 0.0, "adjust_lr_fn": adjust, "adamw_on": False}
    MUON.step([x], [g], [ParamState()], numbers)
    u, s, v = np.linalg.svd(g.numpy(), full_matrices=False)
    s = s / np.linalg.norm(s)  # the first step's momentum is a multiple of g, which the norm takes out
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    wanted = -factor * (u * s) @ v
    assert np.linalg.norm(x.numpy() - wanted) < 0.03 * np.linalg.norm(wanted), "the iteration runs in bf16"
    assert MUON.step_bound(numbers) is None


# Which parameters


TRANSFORMERS: dict[str, tuple[list[str], list[str]]] = {  # names on AdamW, names on Muon
    "gpt2": (
        ["transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.ln_1.weight", "lm_head.weight"],
        ["transformer.h.0.attn.c_attn.weight", "transformer.h.0.mlp.c_fc.weight"],
    ),
    "llama": (
        ["model.embed_tokens.weight", "model.layers.0.input_layernorm.weight", "model.norm.weight", "lm_head.weight"],
        ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"],
    ),
    "roberta": (
        ["roberta.embeddings.word_embeddings.weight", "roberta.encoder.layer.0.output.LayerNorm.weight",
         "classifier.dense.weight"],
        ["roberta.encoder.layer.0.attention.self.query.weight", "roberta.encoder.layer.0.output.dense.weight"],
    ),
    "t5": (
        ["shared.weight", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"],
        ["encoder.block.0.layer.0.SelfAttention.q.weight", "decoder.block.0.layer.2.DenseReluDense.wi.weight"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("adamw", "muon"), TRANSFORMERS.values(), ids=TRANSFORMERS)
def test_the_usual_names_are_split_as_they_should_be(adamw: list[str], muon: list[str]) -> None:
    names = [*adamw, *muon]
    dims = [1 if "norm" in name.lower() or ".ln_" in name else 2 for name in names]
    assert on_adamw(ADAMW_ON, names, dims) == [True] * len(adamw) + [False] * len(muon)


class Decoder(nn.Module):
    """Embedding, hidden matrix, norm and head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.fc, self.norm, self.head = nn.Embedding(7, 6), nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(torch.tanh(self.fc(self.emb(tokens)))))
        return logits


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(batch), batch.roll(1))


def batches(node: int, round: int, step: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 7, (8,), generator=generator)


MULOCO = {"ilr": 0.02, "ilr_adamw": 3e-3, "olr": 0.7, "momentum": 0.6, "weight_decay": 0.1}


def simulated(**options: Any) -> tailopt.Result:
    settings = {**MULOCO, **options.pop("settings", {})}
    given = {"nodes": 3, "rounds": 3, "local_steps": 2, **options}
    algo = tailopt.algorithm("muloco", **settings)
    return tailopt.simulate(Decoder(), algo, loss=loss, batches=batches, progress=False, **given)


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (
            "rnn.*",
            r"Invalid adamw_on: \['rnn.\*'\]; no parameter fits, of emb.weight, .*head.bias\. Name the",
        ),
        (["*.weight", "x"], r"nothing is left to Muon.* all of emb.weight, fc.weight, fc.bias, .* Narrow the patterns"),
        ([], "need a pattern of parameter names"),
        ([""], "need a pattern of parameter names"),
        (3, "Invalid adamw_on: 3; need a pattern of parameter names"),
    ],
)
def test_patterns_that_split_nothing_are_refused_before_anything_moves(patterns: Any, said: str, tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=said):
        simulated(settings={"adamw_on": patterns}, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_split_is_recorded_and_read_again(tmp_path: Any) -> None:
    from tailopt.records.folder import Run

    whole = simulated(rounds=4).history
    simulated(rounds=2, run=tmp_path)
    assert Run.open(tmp_path).config["algorithm"]["adamw_on"] == list(ADAMW_ON)
    with pytest.raises(ValueError, match="another adamw_on"):
        simulated(rounds=4, run=tmp_path, resume=True, settings={"adamw_on": ["*emb*"]})
    resumed = simulated(rounds=4, run=tmp_path, resume=True, settings={"adamw_on": list(ADAMW_ON)}).history
    assert [row["loss"] for row in resumed] == [row["loss"] for row in whole]


def test_each_rate_has_its_own_schedule() -> None:
    """Without a rate a part stands still, decay aside."""
    still = {"weight_decay": 0.0}
    for name, moving in (("ilr", "emb.weight"), ("ilr_adamw", "fc.weight")):
        found = simulated(settings=still, schedules={name: lambda t: 0.0}).model.state_dict()
        start = Decoder().state_dict()
        unmoved = {key for key, value in start.items() if torch.equal(value, found[key])}
        assert unmoved == ({"fc.weight"} if name == "ilr" else {*start} - {"fc.weight"}) and moving not in unmoved


# Engines


@pytest.mark.parametrize("options", [{}, {"participants": 2, "proximal": 0.5}], ids=["all", "two, proximal"])
def test_stacked_nodes_step_one_after_another(options: dict[str, Any]) -> None:
    stacked, alone = (simulated(engine=engine, **options) for engine in ("vectorized", "sequential"))
    for p, q in zip(stacked.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)  # a gradient at the edge may round otherwise in bf16
    assert [row["participants"] for row in stacked.history] == [row["participants"] for row in alone.history]


def test_configurations_run_in_turn_and_the_reason_is_kept() -> None:
    options: dict[str, Any] = {
        "space": {"ilr": [0.01, 0.02]}, "settings": {key: value for key, value in MULOCO.items() if key != "ilr"},
        "loss": loss, "batches": batches, "nodes": 2, "rounds": 2, "local_steps": 2, "seeds": 1, "report_seeds": 0,
        "progress": False,
    }  # fmt: skip
    result = tailopt.sweep(Decoder(), "muloco", **options)
    assert result.route.name == "sequential" and "muon steps on whole matrices" in result.route.reason
    with pytest.raises(ValueError, match='"vectorized", but the inner rule muon steps on whole matrices'):
        tailopt.sweep(Decoder(), "muloco", engine="vectorized", **options)


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_sharded_matrices_are_refused(alone: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    make: Callable[..., Any] = distribute_tensor
    shard = nn.Parameter(make(torch.zeros(4, 3), init_device_mesh("cpu", (1,)), [Shard(0)]))
    with pytest.raises(ValueError, match="inner rule muon steps on whole matrices.* Do not shard them"):
        RuleOptimizer([shard], MUON, NUMBERS)


def test_muloco_is_no_algorithm_of_the_paper() -> None:
    assert NAMED["muloco"] == ("nesterov", "muon")
    with pytest.raises(ValueError, match="muloco"):
        tailopt.paper_settings("muloco", "QNLI")
    algo = tailopt.algorithm("MuLoCo", **MULOCO)
    assert (algo.name, algo.inner_state) == ("muloco", "keep")
    assert tailopt.algorithm("nesterov-muon", **MULOCO).inner_state == "reset"
