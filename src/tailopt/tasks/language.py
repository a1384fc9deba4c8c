"""Language modelling where every node has its own texts: roles of plays, works, files; and pretraining on all of them.

    perplexity = exp(mean over predicted tokens of -log p(token | those before it in its block))

A token counts once, whichever node it belongs to, and padding does not count. `perplexity_with_padding` divides the
same sum by all positions, as if padding were predicted without error, for comparison with numbers computed like that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from tailopt.evaluation import evaluating
from tailopt.splits.partitions import iid
from tailopt.tasks import pretrained, tokens
from tailopt.tasks.blocks import BlockCorpus, BlockOptions, Blocks, load_blocks
from tailopt.tasks.dataset_options import (
    check_choice,
    check_dataset_options,
    check_minimum,
    check_share,
    held_out_share,
)
from tailopt.tasks.task import Baseline, Defaults

IGNORED = -100
# how many logits an evaluation holds at once: 64 blocks of 128 tokens would be 1.6 GB with GPT-2's vocabulary
LOGITS = {"cpu": 2**26, "cuda": 2**30}

USUAL = Defaults(nodes=8, rounds=3, local_epochs=1, batch_size=32, weights="samples", metric="perplexity")
FEW = Defaults(nodes=1144, rounds=3, local_epochs=1, weights="samples", metric="perplexity", participants=1)
FILES = Defaults(nodes=0, rounds=3, local_epochs=1, weights="samples", metric="perplexity")
DEALT = Defaults(nodes=4, rounds=20, local_steps=50, batch_size=16, metric="loss")

# kind -> what it is by default
NAMES: Mapping[str, Mapping[str, Any]] = {
    "shakespeare": {"pretrained": "distilgpt2", "tokenizer": "", "data": "flwrlabs/shakespeare", "defaults": FEW},
    "philosopher": {},
    "texts": {"defaults": FILES},
    "pretraining": {"test": 0.1, "defaults": DEALT},
}
# from scratch, and only the tokens that occur: with all 50,257 nearly all of the time goes into the last layer
_SCRATCH: Mapping[str, Any] = {
    "pretrained": "",
    "tokenizer": "gpt2",
    "length": 64,
    "dropout": 0.0,
    "width": 128,
    "compact": True,
}
_PIECES: Mapping[str, Any] = {**_SCRATCH, "characters": 30_000, "evaluated": 100}
_SHORT: Mapping[str, Any] = {"rounds": 6, "local_epochs": None, "local_steps": 16, "batch_size": 4}
PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "shakespeare": {
        "paper": {},
        "small": {
            **_PIECES,
            "largest": 20,
            "characters": 10_000,
            "defaults": replace(FEW, nodes=20, rounds=10, batch_size=4),
        },
    },
    "philosopher": {"paper": {}, "small": {**_PIECES, "defaults": replace(USUAL, **_SHORT)}},
    "texts": {"paper": {}, "small": {**_PIECES, "defaults": replace(FILES, **_SHORT)}},
    # over bytes: what a token costs should be the model's work and not that of its last layer
    "pretraining": {
        "paper": {},
        "small": {
            "tokenizer": "",
            "length": 64,
            "dropout": 0.0,
            "width": 64,
            "characters": 100_000,
            "evaluated": 64,
            "defaults": replace(DEALT, rounds=12, local_steps=10, batch_size=4),
        },
    },
}


@dataclass(frozen=True)
class Language:
    """A causal language model on texts that are split by where they come from, or dealt out in blocks.

    shakespeare: a node is a role of a play, one of them takes part in a round; DistilGPT-2. Data: the complete works as
    Project Gutenberg had them in 1994 (100.txt; a zip file will do), or LEAF's samples from the hub.
    philosopher: a node is one of eight works; a GPT-2 of two layers from scratch. Data: a folder of eight text files
    with kant, hazlitt, austen, plato, tolstoy, federalist, dumas and dostoevsky in their names. Hazlitt's essays may
    stand in for the first volume of his collected works, single novels in one file for Austen's.
    texts: a node is a text file of a folder: .txt or .md, UTF-8, perhaps compressed (.gz, .xz); sub-folders are not
    read. pretraining: the blocks of all such files, dealt to any number of nodes.

    Args:
        kind: one of these four.
        pretrained: a folder or public name of a causal model, with its tokenizer; empty: GPT-2 from scratch.
        tokenizer: of a model from scratch: a folder or public name; empty: bytes.
        data: a path as above, or a data set of the hub.
        layers, width, heads, dropout: of a model from scratch.
        length: tokens of a block.
        test: the share of every text that tests: its end.
        largest: only that many texts, the longest; 0 for all.
        characters: of a text at most, from its beginning; 0 for all.
        limit: training blocks of a text at most, drawn the same way for every seed; 0 for all.
        evaluated: blocks that are evaluated at most, likewise.
        judge: what `evaluate` measures on: "validation", the ends of the texts, or "held-out", the last training
            blocks of every text, which the nodes then do not get.
        hold_out: the share of those, rounded down.
        compact: of a model from scratch: its vocabulary is the tokens that occur in what is trained or tested on.

    Examples:
        >>> task = Language("philosopher", tokenizer="", length=32)
        >>> task.name, task.defaults.nodes, task.defaults.metric
        ('philosopher', 8, 'perplexity')
    """

    kind: str = "texts"
    pretrained: str = ""
    tokenizer: str = "gpt2"
    data: str = ""
    layers: int = 2
    width: int = 256
    heads: int = 4
    dropout: float = 0.1
    length: int = 128
    test: float = 0.2
    largest: int = 0
    characters: int = 0
    limit: int = 0
    evaluated: int = 0
    judge: str = "validation"
    hold_out: float = 0.1
    compact: bool = False
    defaults: Defaults = USUAL

    def __post_init__(self) -> None:
        """Refuse settings that fit no data."""
        check_choice("kind", self.kind, tuple(NAMES))
        check_dataset_options(self)
        check_minimum(self, layers=1, width=1, heads=1, length=2, largest=0, characters=0)
        check_share("test", self.test)
        if self.width % self.heads:
            raise ValueError(f"Invalid heads: got {self.heads} for a width of {self.width}; need a divisor of it.")
        if self.compact and self.pretrained:
            raise ValueError(
                f"Invalid compact: the model {self.pretrained!r} has a vocabulary of its own. Leave out one of the two."
            )

    @property
    def name(self) -> str:
        """The name in the table of tasks."""
        return self.kind

    @property
    def corpus(self) -> BlockCorpus:
        """The blocks that are trained and evaluated on."""
        options = BlockOptions(
            kind=self.kind,
            data=self.data,
            tokenizer=self.pretrained or self.tokenizer,
            length=self.length,
            test=self.test,
            largest=self.largest,
            characters=self.characters,
            limit=self.limit,
            evaluated=self.evaluated,
            hold_out=held_out_share(self),
            compact=self.compact,
        )
        return load_blocks(options)

    @property
    def data_description(self) -> str:
        """The texts and blocks to train and to evaluate on, and the perplexity of a unigram model."""
        corpus = self.corpus
        what = {"shakespeare": "roles", "philosopher": "works"}.get(self.kind, "files")
        cut = f", the first {self.characters:,} characters of each" if self.characters else ""
        return (
            f"{len(corpus.names):,} {what} from {self.data}{cut}: {sum(map(len, corpus.train)):,} blocks to train on, "
            f"{len(corpus.evaluated):,} blocks evaluated, {self.length} tokens a block, {corpus.vocabulary:,} "
            f"different ones; a unigram model has a perplexity of {corpus.unigram:.4g}."
        )

    @property
    def unigram(self) -> float:
        """The perplexity of a unigram model of the training tokens (add-one) on the predicted tokens of `evaluate`."""
        return self.corpus.unigram

    @property
    def baseline(self) -> Baseline:
        """The perplexity of a unigram model, and its loss."""
        return Baseline("unigram model", {"perplexity": self.unigram, "loss": math.log(self.unigram)})

    def model(self, seed: int) -> torch.nn.Module:
        """A copy of the pretrained model, or a GPT-2 with weights drawn from the seed."""
        if not self.pretrained:
            return self._fresh(seed)
        model = pretrained.model("causal", self.pretrained, seed)
        pretrained.check_fits(pretrained.tokenizer(self.pretrained), model, self.pretrained)
        longest = getattr(model.config, "max_position_embeddings", self.length)
        if self.length > longest:
            raise ValueError(
                f"Invalid length: got {self.length}; {self.pretrained!r} reads at most {longest}. Lower it."
            )
        return model

    def _fresh(self, seed: int) -> torch.nn.Module:
        vocabulary = self.corpus.vocabulary
        configuration = pretrained.transformers().GPT2Config(
            vocab_size=vocabulary,
            n_positions=self.length,
            n_embd=self.width,
            n_layer=self.layers,
            n_head=self.heads,
            resid_pdrop=self.dropout,
            embd_pdrop=self.dropout,
            attn_pdrop=self.dropout,
            bos_token_id=vocabulary - 1,
            eos_token_id=vocabulary - 1,
        )
        return pretrained.fresh("causal", configuration, seed)

    def nodes(self, seed: int, n: int) -> list[Dataset[tuple[Tensor, ...]]]:
        """One node per text, with n their number or 0; in pretraining the blocks of all, dealt to n nodes at random."""
        train = self.corpus.train
        if self.kind == "pretraining":
            blocks = Blocks.joined(train)
            return [TensorDataset(blocks.ids[part], blocks.counts[part]) for part in iid(len(blocks), n, seed)]
        if n not in (0, len(train)):
            raise ValueError(
                f"Invalid nodes: got {n}, and there are {len(train)} texts; need that number, or 0. "
                f"For fewer, take the longest: largest = {n}."
            )
        return [TensorDataset(part.ids, part.counts) for part in train]

    def loss(self, model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The mean negative log-likelihood of the predicted tokens."""
        return negative_log_likelihood(model, *batch)

    def evaluate(self, model: torch.nn.Module, seed: int) -> Mapping[str, float]:
        """Perplexity, the same with padding counted in, and the mean negative log-likelihood, as "loss"."""
        corpus = self.corpus
        counts = corpus.evaluated.counts
        total = total_negative_log_likelihood(model, corpus.evaluated, corpus.vocabulary)
        predicted = int((counts - 1).sum())
        positions = counts.numel() * (self.length - 1)
        return {
            "perplexity": _exp(total / predicted),
            "perplexity_with_padding": _exp(total / positions),
            "loss": total / predicted,
        }


def negative_log_likelihood(model: torch.nn.Module, ids: Tensor, counts: Tensor, reduction: str = "mean") -> Tensor:
    """Compute it for every token but the first of each block, given the tokens before it; padding is left out."""
    used = tokens.longest(counts, ids.shape[1])
    numbers = ids[:, :used].long()
    padding = torch.arange(1, used, device=counts.device) >= counts[:, None]
    targets = numbers[:, 1:].masked_fill(padding, IGNORED)
    logits = model(input_ids=numbers[:, :-1], use_cache=False).logits  # nothing before a token sees what is behind it
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction=reduction)


def total_negative_log_likelihood(model: torch.nn.Module, blocks: Blocks, vocabulary: int) -> float:
    """Return the sum over all predicted tokens, without dropout."""
    device = next(model.parameters()).device
    at_once = LOGITS.get(device.type, LOGITS["cpu"]) // (vocabulary * blocks.ids.shape[1])
    with evaluating(model):
        parts = [
            negative_log_likelihood(model, blocks.ids[some].to(device), blocks.counts[some].to(device), "sum")
            for some in torch.arange(len(blocks)).split(min(64, max(1, at_once)))
        ]
    return float(torch.stack(parts).double().sum())


def _exp(loss: float) -> float:
    return math.exp(loss) if not loss > 700 else math.inf
