"""`Clipped(AdamW, u="auto")` against loss spikes: which quantile of the gradients should u be?

    python benchmarks/spikes.py [--seeds 3] [--first-seed 0] [--steps 400] [--rules NAME ...]

A small decoder (one layer, 32 wide, 64 tokens, context 16) learns a Markov chain with Zipf frequencies, from scratch.
Spikes: none; "scaled", where 2 % of the steps have a gradient 1000 times too large; "batches", where 2 % of the batches
are random tokens with a loss 30 times too large; both after the 50 steps of calibration. "scaled, from the start" has
them in calibration too, which clips nothing.

The table has the mean loss on fresh sequences at the end over that of the chain itself, in nats per token, at the best
of two learning rates; bare AdamW and torch's clip_grad_norm_(1.0) stand beside.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import tailopt
from tailopt import thresholds
from tailopt.optimizers import clipped
from tailopt.thresholds import CALIBRATION

TOKENS, CONTEXT, BATCH, WIDTH = 64, 16, 16, 32
RATES = (3e-3, 1e-2)
SPIKES = ("none", "scaled", "batches", "scaled, from the start")
FACTORS = {"none": 1.0, "batches": 30.0}  # else 1000
SHARE = 0.02  # of the steps
RULES = {
    "median": thresholds.Rule(ratio=0.0),
    "tail": thresholds.Rule(factor=3.0, tail_power=1.0, ratio=0.0),
    "6 median": thresholds.Rule(factor=6.0, ratio=0.0),
    "q90": thresholds.Rule(quantile=0.9, ratio=0.0),
    "2 q90": thresholds.Rule(quantile=0.9, factor=2.0, ratio=0.0),
    "3 q90": thresholds.Rule(quantile=0.9, factor=3.0, ratio=0.0),
    "6 q90": thresholds.Rule(quantile=0.9, factor=6.0, ratio=0.0),
    "q97": thresholds.Rule(quantile=0.97, ratio=0.0),
    "q99": thresholds.Rule(quantile=0.99, ratio=0.0),
    "q99.9": thresholds.Rule(quantile=0.999, ratio=0.0),
}


class Chain:
    """A Markov chain: every token has eight successors, of which some tokens are much more frequent than others."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        zipf = 1 / torch.arange(1.0, TOKENS + 1)
        allowed = torch.stack([torch.randperm(TOKENS, generator=self.random) < 8 for _ in range(TOKENS)])
        weights = torch.where(allowed, zipf * torch.rand(TOKENS, TOKENS, generator=self.random), 0.0)
        self.next = weights / weights.sum(1, keepdim=True)

    def draw(self, n: int) -> Tensor:
        """n sequences of CONTEXT + 1 tokens."""
        rows = [torch.randint(TOKENS, (n,), generator=self.random)]
        for _ in range(CONTEXT):
            rows.append(torch.multinomial(self.next[rows[-1]], 1, generator=self.random)[:, 0])
        return torch.stack(rows, 1)

    def loss(self, sequences: Tensor) -> float:
        """Of the chain itself: the least that a model can have on average."""
        return -float(self.next[sequences[:, :-1], sequences[:, 1:]].log().mean())


class Decoder(nn.Module):
    """Embeddings, causal layers, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, TOKENS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, sequences: Tensor) -> Tensor:
        """The mean loss of predicting every next token."""
        x = self.tokens(sequences[:, :-1]) + self.places.weight
        logits = self.head(self.layers(x, mask=self.mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())


def train(seed: int, steps: int, lr: float, spikes: str, make: Callable[[Any, float], tuple[Any, float]]) -> float:
    """The loss at the end over that of the chain, on 256 fresh sequences."""
    torch.manual_seed(seed)
    chain, model = Chain(seed), Decoder()
    optimizer, norm = make(model.parameters(), lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1, (k + 1) / 50) * (1 - k / steps))
    first = 0 if spikes.endswith("start") else CALIBRATION
    for bad, batch in zip(spiked_steps(seed, steps, first), chain.draw(BATCH * steps).split(BATCH), strict=True):
        if bad and spikes == "batches":
            batch = torch.randint(TOKENS, batch.shape, generator=chain.random)
        factor = FACTORS.get(spikes, 1000.0) if bad else 1.0
        optimizer.zero_grad()
        (factor * model(batch)).backward()
        if norm:
            nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        schedule.step()
    fresh = chain.draw(256)
    with torch.no_grad():
        loss = float(model(fresh))
    return loss - chain.loss(fresh) if math.isfinite(loss) else math.inf


def spiked_steps(seed: int, steps: int, first: int) -> Iterator[bool]:
    """Which steps have a spike."""
    random = torch.Generator().manual_seed(1000 + seed)
    for step in range(steps):
        yield float(torch.rand((), generator=random)) < SHARE and step >= first


def ways(names: list[str] | None) -> dict[str, Callable[[Any, float], tuple[Any, float]]]:
    """The optimizers by name; the second value is the norm for clip_grad_norm_, or 0."""

    def adamw(params: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=lr, weight_decay=0.01)

    def gated(rule: str) -> Callable[[Any, float], tuple[Any, float]]:
        def make(params: Any, lr: float) -> tuple[Any, float]:
            clipped.RULE = rule  # what the library calls "gate"
            return tailopt.Clipped(adamw(params, lr), u="auto", d="auto"), 0.0

        return make

    thresholds.RULES = {**thresholds.RULES, **RULES}
    result = {"AdamW": lambda p, lr: (adamw(p, lr), 0.0), "clip_grad_norm_(1.0)": lambda p, lr: (adamw(p, lr), 1.0)}
    result |= {rule: gated(rule) for rule in RULES}
    return {name: result[name] for name in names} if names else result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rules", nargs="*", help="rows of the table; all of them by default")
    arguments = parser.parse_args()
    print(f"| u | {' | '.join(SPIKES)} |\n| --- |{' ---: |' * len(SPIKES)}", flush=True)
    for name, make in ways(arguments.rules).items():
        cells = []
        for spikes in SPIKES:
            seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
            by_rate = [torch.tensor([train(s, arguments.steps, lr, spikes, make) for s in seeds]) for lr in RATES]
            best = min(by_rate, key=lambda losses: float(losses.mean()))
            cells.append(f"{float(best.mean()):.3f} ± {float(best.std()):.3f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
