"""Tokens of texts in blocks: what a language model trains on, and what it is evaluated on.

Blocks of a text are its tokens in order, `length` of them per block. The first part of every text trains, the rest is
for evaluation, so that nothing of the one is in the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tailopt.seeds import generator
from tailopt.tasks import pretrained, tokens
from tailopt.tasks.texts import load_texts

BYTES = 256  # the size of the vocabulary without a tokenizer


@dataclass(frozen=True)
class Blocks:
    """Token numbers [blocks, length] and how many of each row are tokens; the rest of a row is padding."""

    ids: Tensor
    counts: Tensor

    def __len__(self) -> int:
        return len(self.counts)

    def only(self, positions: Tensor) -> Blocks:
        """Return the blocks at these positions."""
        return Blocks(self.ids[positions], self.counts[positions])

    def real(self, first: int = 0) -> Tensor:
        """Return all tokens without padding; with first = 1 those that are predicted: all but the first of a block."""
        columns = torch.arange(self.ids.shape[1])
        return self.ids[(columns >= first) & (columns < self.counts[:, None])]

    @staticmethod
    def of(numbers: Tensor, length: int, whole: bool = False) -> Blocks:
        """Cut tokens into blocks. A rest of one token predicts nothing and is left out; with `whole` any rest is.

        Examples:
            >>> Blocks.of(torch.tensor([5, 6, 7, 8, 9]), 3)
            Blocks(ids=tensor([[5, 6, 7],
                [8, 9, 0]]), counts=tensor([3, 2]))
        """
        rest = len(numbers) % length
        used = len(numbers) - rest * (whole or rest == 1)
        ids = numbers.new_zeros(-(-used // length) * length)
        ids[:used] = numbers[:used]
        counts = torch.full((len(ids) // length,), length)
        if used % length:
            counts[-1] = used % length
        return Blocks(ids.view(-1, length), counts)

    @staticmethod
    def joined(several: Sequence[Blocks]) -> Blocks:
        """Concatenate blocks."""
        return Blocks(torch.cat([some.ids for some in several]), torch.cat([some.counts for some in several]))


@dataclass(frozen=True)
class BlockOptions:
    """Which blocks a task trains and is evaluated on; `Language` has the same settings and describes them.

    Attributes:
        tokenizer: a folder or public name; "" for bytes.
        hold_out: the share of the training blocks that is evaluated instead of the ends of the texts; 0 for none.
    """

    kind: str
    data: str
    tokenizer: str
    length: int
    test: float
    largest: int = 0
    characters: int = 0
    limit: int = 0
    evaluated: int = 0
    hold_out: float = 0.0
    compact: bool = False


@dataclass(frozen=True)
class BlockCorpus:
    """What a task trains and is evaluated on: training blocks by text, evaluated blocks, the size of the vocabulary."""

    names: tuple[str, ...]
    train: tuple[Blocks, ...]
    evaluated: Blocks
    vocabulary: int

    @property
    def unigram(self) -> float:
        """The perplexity of a model that knows how often a token occurs, and nothing before it."""
        train = torch.cat([part.real() for part in self.train])
        return unigram_perplexity(train, self.evaluated.real(1), self.vocabulary)


@lru_cache(maxsize=4)
def load_blocks(options: BlockOptions) -> BlockCorpus:
    """Load the texts of a task and cut them into blocks."""
    texts = _chosen_texts(options)
    numbers, vocabulary = tokenised(options.tokenizer, tuple(texts.values()))
    trains, tests = [], []
    for name, tokens_of_text in zip(texts, numbers, strict=True):
        train, test = _split(name, tokens_of_text, options)
        trains.append(train.only(_random_subset(len(train), options.limit)))
        tests.append(test)
    joined = Blocks.joined(tests)
    evaluated = joined.only(_random_subset(len(joined), options.evaluated))
    if options.compact:
        # before anything is held out: the vocabulary must be the same while settings are tuned and afterwards
        (*trains, evaluated), vocabulary = renumbered([*trains, evaluated])
    if options.hold_out:
        trains, held_out = _hold_out(trains, options.hold_out)
        evaluated = held_out.only(_random_subset(len(held_out), options.evaluated))
    return BlockCorpus(tuple(texts), tuple(trains), evaluated, vocabulary)


def _chosen_texts(options: BlockOptions) -> dict[str, str]:
    texts = dict(load_texts(options.kind, options.data))
    if options.largest:
        longest = sorted(texts, key=lambda name: -len(texts[name]))[: options.largest]
        texts = {name: text for name, text in texts.items() if name in longest}
    if options.characters:
        texts = {name: text[: options.characters] for name, text in texts.items()}
    return texts


def _split(name: str, numbers: Tensor, options: BlockOptions) -> tuple[Blocks, Blocks]:
    """Return the blocks of the first part of a text, which trains, and of its end, which tests."""
    cut = max(min(round((1 - options.test) * len(numbers)), len(numbers) - 2), 0)
    whole = options.kind == "pretraining"
    train, test = (Blocks.of(part, options.length, whole) for part in (numbers[:cut], numbers[cut:]))
    if not len(train) or not len(test):
        raise ValueError(
            f"Invalid data: {name!r} has {len(numbers)} tokens, too few to train and to test on. Leave it out, or "
            "put it together with another."
        )
    return train, test


def _hold_out(trains: Sequence[Blocks], share: float) -> tuple[list[Blocks], Blocks]:
    """Take the last blocks of every text away from training; return what is left, and those blocks."""
    left = [len(part) - int(share * len(part)) for part in trains]
    held_out = Blocks.joined([part.only(torch.arange(n, len(part))) for n, part in zip(left, trains, strict=True)])
    if not len(held_out):
        raise ValueError(f"Invalid hold_out: {share} of the blocks of any text is less than one. Raise it.")
    return [part.only(torch.arange(n)) for n, part in zip(left, trains, strict=True)], held_out


def unigram_perplexity(train: Tensor, predicted: Tensor, vocabulary: int) -> float:
    """Return the perplexity of tokens by their frequency in others, each counted once more than it occurs.

        exp(-mean of log p),    p(token) = (occurrences + 1) / (tokens + vocabulary)

    Examples:
        >>> round(unigram_perplexity(torch.tensor([0, 0, 1]), torch.tensor([0, 2]), vocabulary=3), 3)
        3.464
    """
    counts = torch.bincount(train.long(), minlength=vocabulary).double() + 1
    return float((counts / counts.sum()).log()[predicted.long()].mean().neg().exp())


def tokenised(name_or_path: str, texts: tuple[str, ...]) -> tuple[list[Tensor], int]:
    """Return the tokens of every text and the size of the vocabulary; tokens are bytes without a tokenizer."""
    if not name_or_path:
        return [torch.tensor(list(text.encode()), dtype=torch.int32) for text in texts], BYTES
    tokenizer = pretrained.tokenizer(name_or_path)

    def tokenise() -> dict[str, Tensor]:
        rows: list[list[int]] = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        ids = torch.tensor([number for row in rows for number in row], dtype=torch.int32)
        return {"ids": ids, "sizes": torch.tensor([len(row) for row in rows])}

    numbers = tokens.cached(tokenise, "texts", tokens.fingerprint(tokenizer), texts)
    return list(numbers["ids"].split(numbers["sizes"].tolist())), len(tokenizer)


def renumbered(several: Sequence[Blocks]) -> tuple[list[Blocks], int]:
    """Number the tokens that occur in any of the blocks 0, 1, ...; return the blocks, and how many tokens occur.

    Examples:
        >>> (blocks,), vocabulary = renumbered([Blocks.of(torch.tensor([50, 7, 50, 9]), 4)])
        >>> blocks.ids.tolist(), vocabulary
        ([[2, 0, 2, 1]], 3)
    """
    occurring = torch.unique(torch.cat([some.real() for some in several]))
    # padding becomes any number, as long as that is one of the vocabulary
    return [
        Blocks(torch.searchsorted(occurring, some.ids).clamp_(max=len(occurring) - 1).int(), some.counts)
        for some in several
    ], len(occurring)


def _random_subset(n: int, at_most: int) -> Tensor:
    """Return the positions of at most `at_most` of n blocks, drawn the same way for every seed; of all for 0."""
    if not at_most or n <= at_most:
        return torch.arange(n)
    return torch.randperm(n, generator=generator(0, "blocks"))[:at_most].sort().values
