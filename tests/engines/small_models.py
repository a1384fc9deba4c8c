"""Small models of every kind in float64 without dropout, with their losses and batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 23


@dataclass(frozen=True)
class Case:
    """A model, its loss, its batches, and which coordinates have a gradient that is 0 in exact arithmetic.

    What is computed there is rounding error, and a lower threshold lifts it to a whole step of random sign.
    """

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    batches: Callable[..., Any]
    null: Callable[[str, Tensor], Tensor]


def nowhere(name: str, value: Tensor) -> Tensor:
    return torch.zeros_like(value, dtype=torch.bool)


def squares(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    found: Tensor = (model(x).squeeze(-1) - y).square().mean()
    return found


def vectors(node: int, round: int, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    return x, x.sum(-1) + node + torch.randn(6, generator=generator, dtype=torch.float64)


def tokens(node: int, round: int, step: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Sentences of unequal length, padded at the end."""
    ids = torch.randint(3, VOCABULARY, (3, 7), generator=generator)
    lengths = torch.randint(4, 8, (3, 1), generator=generator)
    mask = (torch.arange(7) < lengths).long()
    return {"input_ids": torch.where(mask > 0, ids, 1), "attention_mask": mask, "labels": (ids.sum(-1) + node) % 2}


def next_tokens(model: nn.Module, batch: Any) -> Tensor:
    """Cross entropy from the logits: transformers' own loss of causal models computes in float32."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    targets = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=-100)


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    found: Tensor = model(**batch).loss
    return found


def translated(model: nn.Module, batch: Any) -> Tensor:
    targets = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)[:, :5].contiguous()
    found: Tensor = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=targets).loss
    return found


def linear() -> Case:
    return Case(nn.Linear(5, 1), squares, vectors, nowhere)


def mlp() -> Case:
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))

    def null(name: str, value: Tensor) -> Tensor:
        # the bias before BatchNorm, and the mean that contains it
        return torch.full_like(value, name in ("0.bias", "1.running_mean"), dtype=torch.bool)

    return Case(model, squares, vectors, null)


def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCABULARY, n_positions=8, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0,
                        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=2)  # fmt: skip

    def null(name: str, value: Tensor) -> Tensor:
        keys = torch.zeros_like(value, dtype=torch.bool)
        if name.endswith("c_attn.bias"):
            keys[len(value) // 3 : 2 * len(value) // 3] = True
        return keys

    return Case(GPT2LMHeadModel(config), next_tokens, tokens, null)


def roberta() -> Case:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                           intermediate_size=12, max_position_embeddings=12, hidden_dropout_prob=0.0,
                           attention_probs_dropout_prob=0.0, type_vocab_size=1)  # fmt: skip

    def null(name: str, value: Tensor) -> Tensor:
        return torch.full_like(value, name.endswith("key.bias"), dtype=torch.bool)

    return Case(RobertaForSequenceClassification(config), own_loss, tokens, null)


def t5() -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2, dropout_rate=0.0,
                      relative_attention_num_buckets=4, pad_token_id=1)  # fmt: skip
    config.decoder_start_token_id = 0
    return Case(T5ForConditionalGeneration(config), translated, tokens, nowhere)


CASES = {"linear": linear, "mlp": mlp, "gpt2": gpt2, "roberta": roberta, "t5": t5}


def case(name: str) -> Case:
    torch.manual_seed(0)
    found = CASES[name]()
    found.model.double().train()
    return found
