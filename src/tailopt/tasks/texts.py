"""Texts by who wrote or speaks them: files, works, roles of plays; and their tokens in blocks.

    shakespeare   a source is a role of a play, by LEAF's rules, in the complete works of 1994 (Project Gutenberg's 100)
    philosopher   a source is one of eight works, each in a file that has its author in its name
    texts         a source is a text file of a folder

The first part of a source trains, the rest tests: nothing of the one is in the other. Trailing blanks of a line are no
text. With them "  An Apothecary.  ", in a list of persons, would look like the beginning of a speech, and be one role
more than LEAF has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tailopt.seeds import generator
from tailopt.tasks import files, hub, pretrained, tokens

WORKS = ("kant", "hazlitt", "austen", "plato", "tolstoy", "federalist", "dumas", "dostoevsky")
ENDINGS = (".txt", ".md", ".text")
BYTES = 256  # what there is without a tokenizer

# LEAF's rules: a speech begins two blanks in, with the role and a full stop, and goes on four blanks in. One play is
# set differently in this edition: without blanks, and with a remark in "<" that belongs to nobody.
BYLINE, POEMS, FLUSH = "by William Shakespeare", "THE SONNETS", "THE COMEDY OF ERRORS"
SPEECH, GOES_ON = re.compile(r"  ([a-zA-Z][a-zA-Z ]*)\. (.*)"), re.compile(r"    (.*)")
FLUSH_SPEECH, FLUSH_GOES_ON = re.compile(r"([a-zA-Z][a-zA-Z ]*)\. (.*)"), re.compile(r"(.*)")
WINDOW = 80  # characters of LEAF's samples, each with the next character as its label


def roles(text: str) -> dict[tuple[str, str], list[str]]:
    """The lines of every role of every play; roles of at most two lines are left out, and plays of a single role.

    Examples:
        >>> play = "A PLAY\\n\\nby William Shakespeare\\n\\n  KING. Who?\\n    I hear.\\n    Speak.\\n  Fool. No."
        >>> roles(play)
        {('A PLAY', 'KING'): ['Who?', 'I hear.', 'Speak.']}
    """
    lines = [line.rstrip() for line in text.splitlines()]
    plays: list[tuple[str, dict[str, list[str]]]] = []
    speaking: list[str] | None = None
    for i, line in enumerate(lines):
        if BYLINE in line:
            above = reversed(lines[max(0, i - 7) : max(0, i - 1)])
            plays.append((next((words.strip() for words in above if words), ""), {}))
            speaking = None
        elif plays:
            title, play = plays[-1]
            speaking = _heard(line, title == FLUSH, play, speaking)
    return {
        (title, role): said
        for title, play in plays
        if title and title != POEMS and len(play) > 1
        for role, said in play.items()
        if len(said) > 2
    }


def _heard(line: str, flush: bool, play: dict[str, list[str]], speaking: list[str] | None) -> list[str] | None:
    """Add a line to whom it belongs, and return whose speech may go on."""
    begins = (FLUSH_SPEECH if flush else SPEECH).match(line)
    if begins:
        role = begins[1].upper()  # Sir Toby is SIR TOBY
        if flush and role.startswith("ACT "):
            return None
        play.setdefault(role, []).append(begins[2])
        return play[role]
    goes_on = (FLUSH_GOES_ON if flush else GOES_ON).match(line)
    if speaking is None or not goes_on:
        return speaking
    if flush and goes_on[1].startswith("<"):
        return None
    speaking.append(goes_on[1])
    return speaking


def samples(lines: Iterable[str], window: int = WINDOW) -> int:
    """How many samples LEAF makes of a role: its characters less a window, lines joined and blanks run together.

    Examples:
        >>> samples(["four", "more   so"], window=10)
        3
    """
    return max(0, len(re.sub("  +", " ", "".join(f"{line} " for line in lines))) - window)


def unrolled(owners: Iterable[str], windows: Iterable[str], following: Iterable[str]) -> dict[str, str]:
    """Texts out of LEAF's samples, where those of an owner stand one after another, a character apart.

    Examples:
        >>> unrolled(["a", "a", "b"], ["abc", "bcd", "xyz"], ["d", "e", "!"])
        {'a': 'abcde', 'b': 'xyz!'}
    """
    found: dict[str, list[str]] = {}
    for owner, window, character in zip(owners, windows, following, strict=True):
        found.setdefault(owner, [window]).append(character)
    return {owner: "".join(parts) for owner, parts in found.items()}


@lru_cache(maxsize=2)
def sources(kind: str, data: str) -> Mapping[str, str]:
    """The texts of a task by the names of their sources; see the head of this file."""
    path = Path(data).expanduser()
    if not data:
        raise FileNotFoundError(f"Invalid data: none are named. {_WANTED[kind]}: --data PATH.")
    if not path.exists():
        if pretrained.looks_like_a_path(data) or path.suffix or kind == "philosopher":
            raise FileNotFoundError(f"Invalid data: there is no {data!r}. {_WANTED[kind]}: --data PATH.")
        return _from_hub(kind, data)
    texts = _files(path)
    if kind == "shakespeare":
        return _by_role(texts, path)
    if kind == "philosopher":
        return _by_work(texts, path)
    return texts


_WANTED = {
    "shakespeare": "Give the complete works in the edition of 1994 (Project Gutenberg's 100.txt, also zipped)",
    "philosopher": f"Give a folder of text files, one for each of {', '.join(WORKS)}",
    "texts": f"Give a folder of text files ({', '.join(ENDINGS)}, also .gz or .xz)",
    "pretraining": f"Give a folder of text files ({', '.join(ENDINGS)}, also .gz or .xz)",
}


def _files(path: Path) -> dict[str, str]:
    """The text files at a path by name, without their endings."""
    if path.is_file() and path.suffix != ".zip":
        names, folder = [files.without_compression(path.name)], files.Folder(path.parent, {path.name: path})
    else:
        folder = files.Folder.of(path)
        plain = map(files.without_compression, folder.names())
        names = [name for name in plain if name.lower().endswith(ENDINGS)]
    if not names:
        raise FileNotFoundError(f"Invalid data: {path} has no text files; need {', '.join(ENDINGS)}, also .gz or .xz.")
    try:
        return {name.rsplit(".", 1)[0]: folder.text(name) for name in names}
    except UnicodeDecodeError as error:
        raise ValueError(f"Invalid data: a file of {path} is not UTF-8 ({error}). Convert it.") from None


def _by_role(texts: Mapping[str, str], path: Path) -> dict[str, str]:
    chosen = [text for name, text in texts.items() if "shakespeare" in name.lower() or name == "100" or len(texts) == 1]
    found = {name: said for text in chosen for name, said in roles(text).items()}
    if not found:
        raise ValueError(f"Invalid data: no roles were found in {path}. {_WANTED['shakespeare']}.")
    return {f"{play}: {role}": "\n".join(said) + "\n" for (play, role), said in found.items()}


def _by_work(texts: Mapping[str, str], path: Path) -> dict[str, str]:
    found = {}
    for work in WORKS:
        fitting = [name for name in texts if work in name.lower()]
        if len(fitting) != 1:
            raise ValueError(
                f"Invalid data: {path} has {len(fitting)} text files with {work!r} in their names; need one of each "
                f"of {', '.join(WORKS)}. For other texts there is the task texts."
            )
        found[fitting[0]] = texts[fitting[0]]
    return found


def _from_hub(kind: str, data: str) -> dict[str, str]:
    """LEAF's samples for Shakespeare; else the column "text", as a single source."""
    rows = hub.dataset(data, split="train")
    if kind == "shakespeare":
        files.check_columns(rows.column_names, ("character_id", "x", "y"), data)
        return unrolled(rows["character_id"], rows["x"], rows["y"])
    files.check_columns(rows.column_names, ("text",), data)
    if kind == "texts":
        raise ValueError(f"Invalid data: {data!r} of the hub is one source, and texts needs several. {_WANTED[kind]}.")
    return {data: "\n".join(rows["text"])}


@dataclass(frozen=True)
class Blocks:
    """Token numbers [blocks, length] and how many of each row are tokens; the rest of a row is padding."""

    ids: Tensor
    counts: Tensor

    def __len__(self) -> int:
        return len(self.counts)

    def only(self, which: Tensor) -> Blocks:
        """Some of them."""
        return Blocks(self.ids[which], self.counts[which])

    def real(self, first: int = 0) -> Tensor:
        """All tokens; with first = 1 those that are predicted, which is all but the first of a block."""
        columns = torch.arange(self.ids.shape[1])
        return self.ids[(columns >= first) & (columns < self.counts[:, None])]

    @staticmethod
    def of(numbers: Tensor, length: int, whole: bool = False) -> Blocks:
        """Tokens cut into blocks; a rest of one token predicts nothing and is left out, with `whole` any rest is.

        Examples:
            >>> Blocks.of(torch.tensor([5, 6, 7, 8, 9]), 3)
            Blocks(ids=tensor([[5, 6, 7],
                [8, 9, 0]]), counts=tensor([3, 2]))
        """
        rest = len(numbers) % length
        kept = len(numbers) - rest * (whole or rest == 1)
        ids = numbers.new_zeros(-(-kept // length) * length)
        ids[:kept] = numbers[:kept]
        counts = torch.full((len(ids) // length,), length)
        if kept % length:
            counts[-1] = kept % length
        return Blocks(ids.view(-1, length), counts)

    @staticmethod
    def joined(several: Sequence[Blocks]) -> Blocks:
        """One after another."""
        return Blocks(torch.cat([some.ids for some in several]), torch.cat([some.counts for some in several]))


@dataclass(frozen=True)
class Corpus:
    """What a task trains and is judged on: blocks by source, and how many different tokens there can be."""

    names: tuple[str, ...]
    train: tuple[Blocks, ...]
    judged: Blocks
    vocabulary: int

    @property
    def unigram(self) -> float:
        """The perplexity of a model that knows how often a token occurs, and nothing before it."""
        return unigram_perplexity(torch.cat([part.real() for part in self.train]), self.judged.real(1), self.vocabulary)


def unigram_perplexity(train: Tensor, judged: Tensor, vocabulary: int) -> float:
    """Of tokens by their frequency in others, each counted once more than it occurs.

        exp(-mean of log p),    p(token) = (occurrences + 1) / (tokens + vocabulary)

    Examples:
        >>> round(unigram_perplexity(torch.tensor([0, 0, 1]), torch.tensor([0, 2]), vocabulary=3), 3)
        3.464
    """
    often = torch.bincount(train.long(), minlength=vocabulary).double() + 1
    return float((often / often.sum()).log()[judged.long()].mean().neg().exp())


@lru_cache(maxsize=4)
def corpus(
    kind: str,
    data: str,
    words: str,
    length: int,
    test: float,
    largest: int = 0,
    characters: int = 0,
    limit: int = 0,
    evaluated: int = 0,
    hold_out: float = 0.0,
    compact: bool = False,
) -> Corpus:
    """The blocks of a task, cut, held out and renumbered as `Language` says."""
    texts = dict(sources(kind, data))
    if largest:
        longest = sorted(texts, key=lambda name: -len(texts[name]))[:largest]
        texts = {name: text for name, text in texts.items() if name in longest}
    if characters:
        texts = {name: text[:characters] for name, text in texts.items()}
    numbers, vocabulary = numbered(words, tuple(texts.values()))
    trains, tests = [], []
    for name, own in zip(texts, numbers, strict=True):
        cut = min(round((1 - test) * len(own)), len(own) - 2)
        parts = [
            Blocks.of(part, length, whole=kind == "pretraining") for part in (own[: max(cut, 0)], own[max(cut, 0) :])
        ]
        if not all(map(len, parts)):
            raise ValueError(
                f"Invalid data: {name!r} has {len(own)} tokens, too few to train and to test on. Leave it out, or "
                "put it together with another."
            )
        trains.append(parts[0].only(_some(len(parts[0]), limit)))
        tests.append(parts[1])
    joined = Blocks.joined(tests)
    judged = joined.only(_some(len(joined), evaluated))
    if compact:
        (*trains, judged), vocabulary = renumbered([*trains, judged])
    if hold_out:
        kept = [len(part) - int(hold_out * len(part)) for part in trains]
        held = Blocks.joined([part.only(torch.arange(n, len(part))) for n, part in zip(kept, trains, strict=True)])
        if not len(held):
            raise ValueError(f"Invalid hold_out: {hold_out} of the blocks of any source is less than one. Raise it.")
        judged = held.only(_some(len(held), evaluated))
        trains = [part.only(torch.arange(n)) for n, part in zip(kept, trains, strict=True)]
    return Corpus(tuple(texts), tuple(trains), judged, vocabulary)


def numbered(words: str, texts: tuple[str, ...]) -> tuple[list[Tensor], int]:
    """The tokens of texts and the size of the vocabulary, by a tokenizer's name or folder; by bytes without one."""
    if not words:
        return [torch.tensor(list(text.encode()), dtype=torch.int32) for text in texts], BYTES
    made = pretrained.tokenizer(words)

    def tokenised() -> dict[str, Tensor]:
        found: list[list[int]] = made(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        ids = torch.tensor([number for row in found for number in row], dtype=torch.int32)
        return {"ids": ids, "sizes": torch.tensor([len(row) for row in found])}

    kept = tokens.cached(tokenised, "texts", tokens.fingerprint(made), texts)
    return list(kept["ids"].split(kept["sizes"].tolist())), len(made)


def renumbered(several: Sequence[Blocks]) -> tuple[list[Blocks], int]:
    """Blocks whose tokens have the numbers 0, 1, ... of those that occur in any, and how many those are.

    Examples:
        >>> (found,), vocabulary = renumbered([Blocks.of(torch.tensor([50, 7, 50, 9]), 4)])
        >>> found.ids.tolist(), vocabulary
        ([[2, 0, 2, 1]], 3)
    """
    occurring = torch.unique(torch.cat([some.real() for some in several]))
    # padding is some number or other; it must only be one that there is
    return [
        Blocks(torch.searchsorted(occurring, some.ids).clamp_(max=len(occurring) - 1).int(), some.counts)
        for some in several
    ], len(occurring)


def _some(n: int, most: int) -> Tensor:
    """The places of at most `most` of n blocks, drawn the same way for every seed; all for 0."""
    if not most or n <= most:
        return torch.arange(n)
    return torch.randperm(n, generator=generator(0, "blocks"))[:most].sort().values


def counted(several: Sequence[Any]) -> str:
    """How many blocks there are.

    Examples:
        >>> counted([Blocks.of(torch.arange(10), 4)])
        '3 blocks'
    """
    return f"{sum(map(len, several)):,} blocks"
