"""Translation by T5, measured by BLEU and METEOR of what it decodes greedily.

    input   "translate English to German: " + source          loss   mean cross-entropy of the target's tokens, no pads
    bleu    sacrebleu's corpus BLEU (13a); `signature` describes it exactly
    meteor  NLTK's, times 100, mean over the sentences; without WordNet it is another measure: meteor_exact_stem

`parallel_corpora` has the pairs of sentences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from tailopt.evaluation import evaluating
from tailopt.splits.partitions import iid
from tailopt.tasks import metrics, pretrained, tokens
from tailopt.tasks.blocks import unigram_perplexity
from tailopt.tasks.dataset_options import (
    EVAL_SPLITS,
    HELD_OUT,
    check_choice,
    check_dataset_options,
    check_minimum,
    held_out_share,
)
from tailopt.tasks.parallel_corpora import (
    LANGUAGES,
    PUBLIC_NAMES,
    ParallelCorpus,
    load_corpus,
    next_boundary,
    shuffled_by_source,
)
from tailopt.tasks.task import Baseline, Defaults

SPLITS = (*EVAL_SPLITS, "test")
METEORS = ("auto", "need", "off")
BATCH = 64  # of evaluation
IGNORED = -100  # labels that T5's loss leaves out

# CORPUS-SOURCE-TARGET: the names of the tasks, behind "translation/"
NAMES = (
    *("ted-en-de", "ted-en-fr", "newscomm-en-fr", "multi30k-en-de", "multi30k-en-fr"),
    *("news-en-de", "news-en-fr", "tatoeba-en-de", "tatoeba-en-fr"),
)
# the preset "small": T5 from scratch with its own tokenizer; the loss decides, since BLEU is near 0
SMALL: Mapping[str, Any] = {
    "pretrained": "",
    "tokenizer": "google-t5/t5-small",
    "length": 48,
    "width": 64,
    "pieces": 2500,
    "limit": 6000,
    "evaluated": 100,
    "defaults": Defaults(nodes=3, rounds=10, local_steps=60, batch_size=16, metric="loss"),
}


@dataclass(frozen=True)
class Translation:
    """Translation: 3 nodes, IID, 3 rounds of one local epoch, batches of 32, 128 tokens, T5-small.

    Files are `NAME.en` and `NAME.de`, line by line, in a folder or zip file (or in a folder `en-de` of it), where NAME
    is train, val (valid, validation, dev) or test...; or one file with one pair per line: source, tab, target. All may
    be compressed (.gz, .xz). Where there is no file to train on, the largest other set is used, and where there is none
    to validate on, the next; of a single file a twentieth validates, 2,000 sentences at most, and none of them is among
    the sentences to train on.

    Args:
        corpus: "ted", "newscomm", "multi30k", "news" or "tatoeba", or any name for other data.
        source, target: languages, such as "en" and "de".
        pretrained: a folder or public name of a T5; "" for one from scratch, of `layers` and `width`.
        tokenizer: a folder or public name, where it differs from the model's; needed from scratch.
        data: a folder, zip file, file or data set of the hub; "" for the public name of the corpus.
        length: tokens of a sentence at most, read and generated.
        layers, width: of a model from scratch.
        pieces: from scratch: how many of the tokenizer's pieces have an embedding, the most frequent ones in the
            training pairs; the others become the unknown one. 0 for all.
        limit: training pairs, drawn the same way for every seed; 0 for all.
        evaluated: pairs that are evaluated at most; 0 for all.
        judge: what `evaluate` measures on: "validation", "held-out" (a share of the training pairs that the nodes then
            do not get) or "test".
        hold_out: that share, 0 < hold_out < 1.
        meteor: "auto": with WordNet where its data are installed; "need": with WordNet, or an error before training;
            "off".

    Examples:
        >>> task = Translation("multi30k", "en", "fr", length=64)
        >>> task.name, task.prefix
        ('translation/multi30k-en-fr', 'translate English to French: ')
    """

    corpus: str = "multi30k"
    source: str = "en"
    target: str = "de"
    pretrained: str = "google-t5/t5-small"
    tokenizer: str = ""
    data: str = ""
    length: int = 128
    layers: int = 2
    width: int = 128
    pieces: int = 0
    limit: int = 0
    evaluated: int = 0
    judge: str = "validation"
    hold_out: float = 0.1
    meteor: str = "auto"
    defaults: Defaults = Defaults(
        nodes=3, rounds=3, local_epochs=1, batch_size=32, metric="bleu", lower_is_better=False
    )

    def __post_init__(self) -> None:
        """Refuse settings that fit no data."""
        for language in (self.source, self.target):
            if language not in LANGUAGES:
                raise ValueError(f"Unknown language: {language!r}; T5 knows {', '.join(LANGUAGES)}.")
        if self.source == self.target:
            raise ValueError(f"Invalid target: got {self.target!r}, which is the source too. Take another language.")
        check_dataset_options(self, SPLITS)
        check_choice("meteor", self.meteor, METEORS)
        check_minimum(self, length=8, layers=1, width=8, pieces=0)
        if self.width % 8:
            raise ValueError(f"Invalid width: got {self.width}; need a multiple of 8. Take {self.width // 8 * 8}.")
        if self.pieces and self.pretrained:
            raise ValueError(
                f"Invalid pieces: got {self.pieces}, but the embeddings of {self.pretrained!r} stay as they are. "
                'Leave it out, or start from scratch: pretrained="".'
            )

    @property
    def name(self) -> str:
        """The name in the table of tasks."""
        return f"translation/{self.corpus}-{self.source}-{self.target}"

    @property
    def prefix(self) -> str:
        """What T5 reads before the sentence."""
        return f"translate {LANGUAGES[self.source]} to {LANGUAGES[self.target]}: "

    @property
    def data_description(self) -> str:
        """The files or splits of the data, with their numbers of pairs, and what each is used for."""
        return self._corpus().description

    @property
    def signature(self) -> str:
        """How sacrebleu computes BLEU, in its own words."""
        return metrics.bleu_signature()

    @property
    def baseline(self) -> Baseline:
        """The loss of a model that knows how often a token occurs in training targets, and nothing else."""
        tokenizer = self._tokenizer()
        pad, vocabulary = (0, len(self._vocabulary())) if self.pieces else (tokenizer.pad_token_id, len(tokenizer))
        train, evaluated = (self._tokenised(split)[1] for split in ("train", self.judge))
        perplexity = unigram_perplexity(train[train != pad], evaluated[evaluated != pad], vocabulary)
        return Baseline("unigram model", {"loss": math.log(perplexity)})

    def model(self, seed: int) -> torch.nn.Module:
        """T5 as it was pretrained, or a small one from scratch without dropout."""
        tokenizer = self._tokenizer()
        if self.pretrained:
            model = pretrained.model("seq2seq", self.pretrained, seed)
            pretrained.check_fits(tokenizer, model, self.pretrained)
            return model
        heads = 4
        configuration = pretrained.transformers().T5Config(
            vocab_size=len(self._vocabulary()) if self.pieces else len(tokenizer),
            d_model=self.width,
            d_kv=self.width // heads,
            d_ff=4 * self.width,
            num_layers=self.layers,
            num_heads=heads,
            dropout_rate=0.0,
            pad_token_id=0 if self.pieces else tokenizer.pad_token_id,
            eos_token_id=1 if self.pieces else tokenizer.eos_token_id,
            decoder_start_token_id=0 if self.pieces else tokenizer.pad_token_id,
        )
        return pretrained.fresh("seq2seq", configuration, seed)

    def nodes(self, seed: int, n: int) -> list[Dataset[tuple[Tensor, ...]]]:
        """The training pairs, dealt out at random: token numbers of the source and of the target, padded."""
        if self.meteor == "need":
            metrics.wordnet()
        if self.judge != HELD_OUT:
            self._pairs(self.judge)  # a missing split raises before anything is trained
        sources, targets = self._tokenised("train")
        return [TensorDataset(sources[part], targets[part]) for part in iid(len(sources), n, seed)]

    def loss(self, model: torch.nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """The mean cross-entropy of the target's tokens, its end included."""
        return _cross_entropy(model, batch)

    def evaluate(self, model: torch.nn.Module, seed: int) -> Mapping[str, float]:
        """bleu, a METEOR and the loss, on the pairs that `judge` names."""
        inputs = self._tokenised(self.judge)
        _, references = self._pairs(self.judge)
        translations, loss = self._translations(model, inputs)
        values = {"bleu": metrics.bleu(translations, references)}
        if self.meteor != "off":
            name, value = metrics.meteor(translations, references, wordnet_needed=self.meteor == "need")
            values[name] = value
        return {**values, "loss": loss}

    def translated(self, model: torch.nn.Module, texts: Sequence[str]) -> list[str]:
        """Translate any sentences greedily."""
        numbers = _token_numbers(self._tokenizer(), [self.prefix + text for text in texts], self.length)
        return self._translations(model, (self._in_vocabulary(numbers), None))[0]

    def _translations(self, model: torch.nn.Module, inputs: tuple[Tensor, Tensor | None]) -> tuple[list[str], float]:
        """Return the greedy translation of each source, in order, and the mean loss of a token of the targets."""
        sources, targets = inputs
        tokenizer = self._tokenizer()
        device, pad = next(model.parameters()).device, _pad_token(model)
        order = (sources != pad).sum(1).argsort(stable=True)  # neighbours of one length need little padding
        translations, loss_sum, token_count = [""] * len(sources), 0.0, 0
        with evaluating(model):
            for some in order.split(BATCH):
                rows = sources[some, : tokens.trimmed(sources[some] != pad)].long().to(device)
                generated = model.generate(  # type: ignore[operator]
                    input_ids=rows,
                    attention_mask=(rows != pad).long(),
                    max_new_tokens=self.length,
                    num_beams=1,
                    do_sample=False,
                ).cpu()
                if self.pieces:
                    generated = self._vocabulary()[generated]
                texts = tokenizer.batch_decode(generated, skip_special_tokens=True)
                for i, text in zip(some.tolist(), texts, strict=True):
                    translations[i] = text
                if targets is not None:
                    loss = _cross_entropy(model, (sources[some].to(device), targets[some].to(device)))
                    count = int((targets[some] != pad).sum())
                    loss_sum, token_count = loss_sum + float(loss) * count, token_count + count
        return translations, loss_sum / token_count if token_count else float("nan")

    def _corpus(self) -> ParallelCorpus:
        data = self.data or PUBLIC_NAMES.get(self.corpus, "")
        if not self.data and (self.corpus, self.target) == ("multi30k", "fr"):
            data = ""  # the hub has these sentences only among gigabytes of images
        if not data:
            raise ValueError(
                f"Invalid data: none are named, and {self.name} has no public name to get them by. Give the files: "
                f"--data PATH (Multi30k's are in the repository multi30k/dataset)."
            )
        return load_corpus(data, self.source, self.target)

    def _pairs(self, split: str) -> tuple[Sequence[str], Sequence[str]]:
        """Return the sentences of "train", "held-out", "validation" or "test", as they are used."""
        corpus = self._corpus()
        if split in ("train", HELD_OUT):
            sources, targets = corpus.splits["train"]
            order = shuffled_by_source(sources)[: self.limit or None]
            cut = next_boundary(sources, order, len(order) - round(held_out_share(self) * len(order)))
            order = order[:cut] if split == "train" else order[cut:]
        else:
            if split not in corpus.splits:
                raise ValueError(
                    f"Invalid judge: there is no {split!r} in the data ({corpus.description}). Take another."
                )
            sources, targets = corpus.splits[split]
            order = shuffled_by_source(sources)
        if not order:
            raise ValueError(f"Invalid data: nothing is left for {split!r} ({corpus.description}). Give more pairs.")
        if split != "train":
            order = order[: self.evaluated or None]
        return [sources[i] for i in order], [targets[i] for i in order]

    def _tokenizer(self) -> Any:
        return pretrained.tokenizer(self.tokenizer or self.pretrained)

    def _tokenised(self, split: str) -> tuple[Tensor, Tensor]:
        """Return sources and targets of a split as numbers of the model's vocabulary."""
        sources, targets = _tokenised(self, split)
        return self._in_vocabulary(sources), self._in_vocabulary(targets)

    def _vocabulary(self) -> Tensor:
        """Return the pieces that have an embedding: pad, end, unknown, then the most frequent in train, ascending."""
        return _frequent_pieces(self)

    def _in_vocabulary(self, numbers: Tensor) -> Tensor:
        """Return the tokenizer's numbers as positions among the pieces that have an embedding; 2 is the unknown one."""
        if not self.pieces:
            return numbers
        vocabulary = self._vocabulary()
        positions = torch.full((int(max(vocabulary.max(), numbers.max())) + 1,), 2, dtype=torch.int32)
        positions[vocabulary] = torch.arange(len(vocabulary), dtype=torch.int32)
        return positions[numbers.long()]


def named(name: str, **settings: Any) -> Translation:
    """Return a task by its name, such as "ted-en-de".

    Examples:
        >>> named("newscomm-en-fr").target
        'fr'
    """
    corpus, source, target = name.split("-")
    return Translation(**{"corpus": corpus, "source": source, "target": target, **settings})


def _cross_entropy(model: torch.nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    pad = _pad_token(model)
    source, target = (part[:, : tokens.trimmed(part != pad)].long() for part in batch)
    labels = target.masked_fill(target == pad, IGNORED)
    loss: Tensor = model(input_ids=source, attention_mask=(source != pad).long(), labels=labels).loss
    return loss


def _pad_token(model: torch.nn.Module) -> int:
    return int(model.config.pad_token_id)  # type: ignore[union-attr, arg-type]


@lru_cache(maxsize=4)
def _tokenised(task: Translation, split: str) -> tuple[Tensor, Tensor]:
    """Return the tokenizer's numbers [pairs, length] of the sources, behind the prefix, and of the targets."""
    sources, targets = task._pairs(split)
    tokenizer = task._tokenizer()

    def tokenise() -> dict[str, Tensor]:
        return {
            "source": _token_numbers(tokenizer, [task.prefix + text for text in sources], task.length),
            "target": _token_numbers(tokenizer, targets, task.length),
        }

    fingerprint = tokens.fingerprint(tokenizer)
    numbers = tokens.cached(tokenise, "translation", fingerprint, task.length, task.prefix, sources, targets)
    return numbers["source"], numbers["target"]


def _token_numbers(tokenizer: Any, texts: Sequence[str], length: int) -> Tensor:
    rows = tokenizer(list(texts), truncation=True, max_length=length)["input_ids"]
    return tokens.padded(rows, length, tokenizer.pad_token_id).to(torch.int32)


@lru_cache(maxsize=4)
def _frequent_pieces(task: Translation) -> Tensor:
    tokenizer = task._tokenizer()
    special = [tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    counts = torch.cat([part.flatten().long() for part in _tokenised(task, "train")]).bincount()
    counts[[number for number in special if number < len(counts)]] = 0
    frequent = counts.argsort(descending=True, stable=True)[: max(0, task.pieces - len(special))]
    return torch.tensor([*special, *frequent[counts[frequent] > 0].sort().values.tolist()])
