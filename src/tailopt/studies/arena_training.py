"""One run of the study `arena`: a Llama-like decoder from scratch, on the same batches for every optimizer.

    rate at step k of n    rate * min(1, (k + 1) / warm-up) * (0.1 + 0.9 * (1 + cos(pi k / n)) / 2)

Rotary positions, RMS norms, SwiGLU, embeddings tied to the head, as Transformers has them. Batches are blocks drawn
without replacement, in an order that depends on the seed alone; the loss is the mean negative log-likelihood of a
token, in nats. Training stops where a loss is not finite, and its loss then counts as infinite.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer

from tailopt.evaluation import evaluating
from tailopt.seeds import generator
from tailopt.studies.arena_optimizers import Contender, state_bytes
from tailopt.tasks import pretrained
from tailopt.tasks.corpus import Corpus

WARM_UP = 0.1  # share of the steps
LAST = 0.1  # share of the rate at the end
AT_ONCE = 64  # blocks that an evaluation takes at once


@dataclass(frozen=True)
class DecoderSize:
    """The sizes of a decoder; parameters: about, without embeddings."""

    parameters: str
    layers: int
    width: int
    heads: int
    inner: int


SIZES = {
    size.parameters: size
    for size in (
        DecoderSize("1M", 5, 128, 4, 352),
        DecoderSize("10M", 8, 320, 5, 864),
        DecoderSize("30M", 10, 512, 8, 1376),
        DecoderSize("124M", 12, 768, 12, 2048),  # 124M with the embeddings of GPT-2's vocabulary
    )
}


def decoder(size: DecoderSize, vocabulary: int, length: int, seed: int) -> torch.nn.Module:
    """A decoder with weights drawn from the seed.

    Examples:
        >>> model = decoder(SIZES["1M"], vocabulary=256, length=64, seed=0)
        >>> sum(p.numel() for p in model.parameters())
        1037696
    """
    configuration = pretrained.transformers().LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return pretrained.fresh("causal", configuration, seed)


# --- Batches ----------------------------------------------------------------------------------------------------------

Corruption = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]  # (step, inputs, targets) -> both, perhaps others


def batches(blocks: Tensor, size: int, seed: int) -> Iterator[Tensor]:
    """Blocks without end: a permutation of all, then another one; what is left of a permutation is dropped.

    Examples:
        >>> stream = batches(torch.arange(4).view(4, 1), 2, seed=0)
        >>> sorted([*next(stream).flatten().tolist(), *next(stream).flatten().tolist()])
        [0, 1, 2, 3]
    """
    if len(blocks) < size:
        raise ValueError(f"Invalid data: {len(blocks)} blocks, fewer than a batch of {size}. Give more text.")
    passed = 0
    while True:
        order = torch.randperm(len(blocks), generator=generator(seed, "arena order", passed))
        for start in range(0, len(blocks) - size + 1, size):
            yield blocks[order[start : start + size]]
        passed += 1


def loss_of(model: torch.nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean negative log-likelihood of the targets."""
    logits = model(input_ids=inputs, use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


# --- A run ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """What all runs of one batch size share.

    Attributes:
        blocks: tokens of "train" as blocks.
        judged: the blocks that are evaluated.
        batch: blocks of a step.
        looks: how often the loss is evaluated on the way, at equal distances; the last time is at the end.
        precision: "bf16" trains with autocast, "fp32" does not.
        corruption: what happens to batches before they are trained on.
    """

    size: DecoderSize
    vocabulary: int
    blocks: Tensor
    judged: Tensor
    batch: int
    steps: int
    device: str
    looks: int = 4
    precision: str = "fp32"
    corruption: Corruption | None = None
    clip_norm: float | None = None

    @staticmethod
    def of(corpus: Corpus, size: DecoderSize, length: int, part: str, evaluated: int, **rest: Any) -> Setup:
        """The setup for a corpus, evaluated on so many blocks of a part."""
        judged = corpus.blocks(part, length)[:evaluated]
        return Setup(size, corpus.vocabulary, corpus.blocks("train", length), judged, **rest)


@dataclass(frozen=True)
class ArenaRun:
    """What a run leaves.

    Attributes:
        losses: where it was evaluated, the end last; infinite from where it broke down.
        seconds: of the training, without evaluations.
        state_bytes: what the optimizer kept at most, counted after the first step and at the end.
        peak_bytes: of the device's memory while it trained; None on the CPU, where nobody counts.
        parameters: how many the model has.
    """

    losses: tuple[float, ...]
    seconds: float
    state_bytes: int
    peak_bytes: int | None
    parameters: int

    @property
    def loss(self) -> float:
        """The loss at the end."""
        return self.losses[-1]


def train(setup: Setup, contender: Contender, rate: float, seed: int, tick: Callable[[int], None]) -> ArenaRun:
    """Train one decoder; tick(n) is called after n steps."""
    device = torch.device(setup.device)
    model = decoder(setup.size, setup.vocabulary, setup.blocks.shape[1], seed).to(device).train()
    optimizers = contender.build(model, rate)
    modes(optimizers, "train")
    stream = batches(setup.blocks, setup.batch, seed)
    looks = {round(setup.steps * i / setup.looks) for i in range(1, setup.looks + 1)} - {0}
    losses: list[float] = []
    kept = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    clock = _Clock(device)
    clock.start()
    for k in range(setup.steps):
        set_rates(optimizers, rate * factor(k, setup.steps, contender.decays))
        step(setup, model, optimizers, next(stream), k)
        if k == 0:
            kept = state_bytes(optimizers)
        if k + 1 in looks:
            clock.stop()
            modes(optimizers, "eval")
            losses.append(evaluate(model, setup))
            modes(optimizers, "train")
            clock.start()
            if not math.isfinite(losses[-1]):
                break
        tick(k + 1)
    clock.stop()
    losses = [loss if math.isfinite(loss) else math.inf for loss in losses]
    losses += [math.inf] * (len(looks) - len(losses))
    return ArenaRun(
        tuple(losses),
        clock.seconds,
        max(kept, state_bytes(optimizers)),
        torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        sum(p.numel() for p in model.parameters()),
    )


def step(setup: Setup, model: torch.nn.Module, optimizers: Sequence[Optimizer], blocks: Tensor, k: int) -> None:
    """Take one step on a batch."""
    inputs, targets = blocks[:, :-1], blocks[:, 1:]
    if setup.corruption is not None:
        inputs, targets = setup.corruption(k, inputs, targets)
    device = torch.device(setup.device)
    inputs, targets = (part.to(device, non_blocking=True).long() for part in (inputs, targets))
    with _precision(setup):
        loss = loss_of(model, inputs, targets)
    loss.backward()
    if setup.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), setup.clip_norm)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def evaluate(model: torch.nn.Module, setup: Setup) -> float:
    """The loss on the blocks that are evaluated."""
    total, device = 0.0, torch.device(setup.device)
    with evaluating(model), torch.no_grad(), _precision(setup):
        for some in setup.judged.split(AT_ONCE):
            ids = some.to(device).long()
            total += float(loss_of(model, ids[:, :-1], ids[:, 1:])) * len(some)
    return total / len(setup.judged)


def seconds_of_a_step(setup: Setup, contender: Contender) -> float:
    """How long a step takes, measured on three after two others."""
    short = replace(setup, steps=2, looks=1, judged=setup.judged[:1])
    train(short, contender, 1e-6, 0, lambda n: None)
    return train(replace(short, steps=3), contender, 1e-6, 0, lambda n: None).seconds / 3


def factor(k: int, steps: int, decays: bool = True) -> float:
    """What the rate is multiplied by in step k: a linear warm-up, then half a cosine down to a tenth.

    Examples:
        >>> [round(factor(k, 100), 3) for k in (0, 9, 50, 99)], factor(99, 100, decays=False)
        ([0.1, 0.982, 0.55, 0.1], 1.0)
    """
    warm = min(1.0, (k + 1) / max(1, round(WARM_UP * steps)))
    return warm * (LAST + (1 - LAST) * (1 + math.cos(math.pi * k / steps)) / 2) if decays else warm


def set_rates(optimizers: Sequence[Optimizer], rate: float) -> None:
    """Give all groups a learning rate; one that is a tensor stays that tensor, for steps that are compiled."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def modes(optimizers: Sequence[Optimizer], mode: str) -> None:
    """Put optimizers that have modes of their own, as schedule-free ones do, into "train" or "eval"."""
    for optimizer in optimizers:
        if hasattr(optimizer, mode):
            getattr(optimizer, mode)()


def _precision(setup: Setup) -> Any:
    if setup.precision == "bf16":
        return torch.autocast(torch.device(setup.device).type, torch.bfloat16)
    return nullcontext()


class _Clock:
    """Seconds of training, without what happens while it is stopped; a GPU is waited for wherever it is read."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._began = device, 0.0
        self.seconds = 0.0

    def start(self) -> None:
        self._began = self._now()

    def stop(self) -> None:
        self.seconds += self._now() - self._began

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
