"""Translation by T5: pairs of sentences by public name or from files, BLEU and METEOR of what is decoded greedily.

    input   "translate English to German: " + source          loss   mean cross-entropy of the target's tokens, no pads
    bleu    sacrebleu's corpus BLEU (13a); `signature` says how exactly
    meteor  NLTK's, times 100, mean over the sentences; without WordNet it is another measure: meteor_exact_stem

Files may be parts of the public sets; `found` says which there were and what each serves for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from tailopt.evaluation import evaluating
from tailopt.seeds import generator
from tailopt.splits.partitions import iid
from tailopt.tasks import files, hub, metrics, pretrained, tokens
from tailopt.tasks.dataset_options import (
    EVAL_SPLITS,
    HELD_OUT,
    check_choice,
    check_dataset_options,
    check_minimum,
    held_out_share,
)
from tailopt.tasks.task import Defaults

SPLITS = (*EVAL_SPLITS, "test")
METEORS = ("auto", "need", "off")
BATCH = 64  # of evaluation
LANGUAGES = {"en": "English", "de": "German", "fr": "French", "ro": "Romanian"}  # those that T5 was trained to name
IGNORED = -100  # what T5's loss leaves out

# corpus -> its public name
CORPORA: Mapping[str, str] = {
    "ted": "IWSLT/iwslt2017",
    "newscomm": "Helsinki-NLP/news_commentary",
    "multi30k": "bentrevett/multi30k",
    "news": "wmt/wmt14",
    "tatoeba": "sentence-transformers/parallel-sentences-tatoeba",
}


@dataclass(frozen=True)
class Public:
    """How a data set of the hub is laid out.

    Attributes:
        configuration: its name for a pair of languages; "" for none.
        splits: ours -> its own.
        columns: of the two texts, where they are neither `translation` nor named by language.
        options: of `datasets.load_dataset`.
    """

    configuration: str = ""
    splits: Mapping[str, str] = field(default_factory=lambda: {"train": "train", "validation": "validation"})
    columns: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


EVERY = {"train": "train", "validation": "validation", "test": "test"}
PUBLIC: Mapping[str, Public] = {
    # stored as a program, which is no longer run; the hub keeps its output on a branch
    "IWSLT/iwslt2017": Public("iwslt2017-{source}-{target}", EVERY, options={"revision": "refs/convert/parquet"}),
    "Helsinki-NLP/news_commentary": Public("{first}-{second}", {"train": "train"}),
    "bentrevett/multi30k": Public("", EVERY),
    # newstest2013 to train on, newstest2014 to validate: the training split has forty million pairs
    "wmt/wmt14": Public(
        "",
        {"train": "validation", "validation": "test"},
        options={"data_files": {name: "{target}-{source}/" + name + "-*.parquet" for name in ("validation", "test")}},
    ),
    "sentence-transformers/parallel-sentences-tatoeba": Public(
        "{source}-{target}", {"train": "train", "validation": "dev"}, ("english", "non_english")
    ),
}


@dataclass(frozen=True)
class Translation:
    """Translation: 3 nodes, IID, 3 rounds of one local epoch, batches of 32, 128 tokens, T5-small.

    Files are `NAME.en` and `NAME.de`, line by line, in a folder or zip file (or in a folder `en-de` of it), NAME being
    train, val (valid, validation, dev) and test...; or one file with a pair a line, source tab target. All may be
    compressed (.gz, .xz). Stand-ins: without a file to train on, the largest set but validation serves; without one to
    validate, the next; from a single file a twentieth is taken out to validate, 2,000 sentences at most, never a
    sentence that stands among those to train on.

    Args:
        corpus: "ted", "newscomm", "multi30k", "news" or "tatoeba", or any name for data of one's own.
        source, target: languages, such as "en" and "de".
        pretrained: a folder or public name of a T5; "" for one from scratch, of `layers` and `width`.
        tokenizer: a folder or public name, where it is not that of the model; needed from scratch.
        data: a folder, zip file, file or data set of the hub; "" for the corpus's own public name.
        length: tokens that are kept of a sentence, and decoded at most.
        pieces: from scratch: how many of the tokenizer's pieces have an embedding, those most frequent in the training
            pairs; the others become the unknown one. 0 for all.
        limit: training pairs, drawn the same way for every seed; 0 for all.
        evaluated: pairs that are evaluated at most; 0 for all.
        judge: what `evaluate` measures on: "validation", "held-out" (a share of the training pairs that the nodes then
            do not get) or "test".
        hold_out: that share, 0 < hold_out < 1.
        meteor: "auto": what can be had; "need": NLTK's METEOR with WordNet, or an error before training; "off".

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
        """Refuse what no data could mend."""
        for language in (self.source, self.target):
            if language not in LANGUAGES:
                raise ValueError(f"Unknown language: {language!r}; T5 knows {', '.join(LANGUAGES)}.")
        if self.source == self.target:
            raise ValueError(f"Invalid target: got {self.target!r}, which is the source too. Take another.")
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
        """As in the table of tasks."""
        return f"translation/{self.corpus}-{self.source}-{self.target}"

    @property
    def prefix(self) -> str:
        """What T5 reads before the sentence."""
        return f"translate {LANGUAGES[self.source]} to {LANGUAGES[self.target]}: "

    @property
    def found(self) -> str:
        """Which files or splits there are, with their pairs, and what each serves for."""
        return self._corpus().found

    @property
    def signature(self) -> str:
        """How sacrebleu says that its BLEU was computed."""
        return metrics.bleu_signature()

    def model(self, seed: int) -> torch.nn.Module:
        """T5 as it was pretrained, or a small one from scratch without dropout."""
        words = pretrained.tokenizer(self.tokenizer or self.pretrained)
        if self.pretrained:
            made = pretrained.model("seq2seq", self.pretrained, seed)
            pretrained.check_fits(words, made, self.pretrained)
            return made
        heads = 4
        configuration = pretrained.transformers().T5Config(
            vocab_size=len(self._kept()) if self.pieces else len(words),
            d_model=self.width,
            d_kv=self.width // heads,
            d_ff=4 * self.width,
            num_layers=self.layers,
            num_heads=heads,
            dropout_rate=0.0,
            pad_token_id=0 if self.pieces else words.pad_token_id,
            eos_token_id=1 if self.pieces else words.eos_token_id,
            decoder_start_token_id=0 if self.pieces else words.pad_token_id,
        )
        return pretrained.fresh("seq2seq", configuration, seed)

    def nodes(self, seed: int, n: int) -> list[Dataset[tuple[Tensor, ...]]]:
        """The training pairs, dealt out at random: numbers of the source's pieces and of the target's, padded."""
        if self.meteor == "need":
            metrics.wordnet()
        if self.judge != HELD_OUT:
            self._pairs(self.judge)  # what is missing there is said before anything is trained
        train = self._tokenised("train")
        return [TensorDataset(train[0][part], train[1][part]) for part in iid(len(train[0]), n, seed)]

    def loss(self, model: torch.nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """The mean cross-entropy of the target's tokens, the end among them."""
        return _loss(model, batch)

    def evaluate(self, model: torch.nn.Module, seed: int) -> Mapping[str, float]:
        """bleu, a METEOR and the loss, on the pairs that `judge` names."""
        inputs = self._tokenised(self.judge)
        _, references = self._pairs(self.judge)
        decoded, loss = self._decoded(model, inputs)
        found = {"bleu": metrics.bleu(decoded, references)}
        if self.meteor != "off":
            name, value = metrics.meteor(decoded, references, wordnet_needed=self.meteor == "need")
            found[name] = value
        return {**found, "loss": loss}

    def translated(self, model: torch.nn.Module, texts: Sequence[str]) -> list[str]:
        """Sentences of one's own, translated greedily."""
        words = pretrained.tokenizer(self.tokenizer or self.pretrained)
        numbers = _numbers(words, [self.prefix + text for text in texts], self.length)
        return self._decoded(model, (self._shrunk(numbers), None))[0]

    def _decoded(self, model: torch.nn.Module, inputs: tuple[Tensor, Tensor | None]) -> tuple[list[str], float]:
        """What the model makes of each source, in order, and the mean loss of a target's token."""
        sources, targets = inputs
        words = pretrained.tokenizer(self.tokenizer or self.pretrained)
        device, pad = next(model.parameters()).device, _pad(model)
        order = (sources != pad).sum(1).argsort(stable=True)  # neighbours of one length need little padding
        texts, losses, counts = [""] * len(sources), 0.0, 0
        with evaluating(model):
            for some in order.split(BATCH):
                rows = sources[some, : tokens.trimmed(sources[some] != pad)].long().to(device)
                made = model.generate(  # type: ignore[operator]
                    input_ids=rows,
                    attention_mask=(rows != pad).long(),
                    max_new_tokens=self.length,
                    num_beams=1,
                    do_sample=False,
                ).cpu()
                if self.pieces:
                    made = self._kept()[made]
                said = words.batch_decode(made, skip_special_tokens=True)
                for i, text in zip(some.tolist(), said, strict=True):
                    texts[i] = text
                if targets is not None:
                    loss = _loss(model, (sources[some].to(device), targets[some].to(device)))
                    count = int((targets[some] != pad).sum())
                    losses, counts = losses + float(loss) * count, counts + count
        return texts, losses / counts if counts else float("nan")

    def _corpus(self) -> Corpus:
        data = self.data or CORPORA.get(self.corpus, "")
        if not self.data and (self.corpus, self.target) == ("multi30k", "fr"):
            data = ""  # at the hub only among gigabytes of its images
        if not data:
            raise ValueError(
                f"Invalid data: none are named, and {self.name} has no public name to get them by. Give the files: "
                f"--data PATH (Multi30k's are in the repository multi30k/dataset)."
            )
        return corpus(data, self.source, self.target)

    def _pairs(self, name: str) -> tuple[Sequence[str], Sequence[str]]:
        """The texts of "train", "held-out", "validation" or "test", as they are used."""
        sets = self._corpus().sets
        if name in ("train", HELD_OUT):
            sources, targets = sets["train"]
            order = shuffled(sources)[: self.limit or None]
            cut = between(sources, order, len(order) - round(held_out_share(self) * len(order)))
            order = order[:cut] if name == "train" else order[cut:]
        else:
            if name not in sets:
                raise ValueError(f"Invalid judge: there is no {name!r} in the data ({self.found}). Take another.")
            sources, targets = sets[name]
            order = shuffled(sources)
        if not order:
            raise ValueError(f"Invalid data: nothing is left for {name!r} ({self.found}). Give more pairs.")
        if name != "train":
            order = order[: self.evaluated or None]
        return [sources[i] for i in order], [targets[i] for i in order]

    def _tokenised(self, name: str) -> tuple[Tensor, Tensor]:
        source, target = _tokenised(self, name)
        return self._shrunk(source), self._shrunk(target)

    def _kept(self) -> Tensor:
        """The kept numbers of the tokenizer: pad, end, unknown, then the most frequent in train, ascending."""
        return _kept(self)

    def _shrunk(self, numbers: Tensor) -> Tensor:
        """Numbers of the tokenizer as positions among the kept ones."""
        if not self.pieces:
            return numbers
        kept = self._kept()
        positions = torch.full((int(max(kept.max(), numbers.max())) + 1,), 2, dtype=torch.int32)
        positions[kept] = torch.arange(len(kept), dtype=torch.int32)
        return positions[numbers.long()]


def _loss(model: torch.nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    pad = _pad(model)
    source, target = (part[:, : tokens.trimmed(part != pad)].long() for part in batch)
    labels = target.masked_fill(target == pad, IGNORED)
    loss: Tensor = model(input_ids=source, attention_mask=(source != pad).long(), labels=labels).loss
    return loss


def _pad(model: torch.nn.Module) -> int:
    return int(model.config.pad_token_id)  # type: ignore[union-attr, arg-type]


# ---- tokens ----


@lru_cache(maxsize=4)
def _tokenised(task: Translation, name: str) -> tuple[Tensor, Tensor]:
    """Numbers of the tokenizer [pairs, length], sources behind the prefix and targets."""
    sources, targets = task._pairs(name)
    words = pretrained.tokenizer(task.tokenizer or task.pretrained)

    def made() -> dict[str, Tensor]:
        return {
            "source": _numbers(words, [task.prefix + text for text in sources], task.length),
            "target": _numbers(words, targets, task.length),
        }

    found = tokens.cached(made, "translation", tokens.fingerprint(words), task.length, task.prefix, sources, targets)
    return found["source"], found["target"]


def _numbers(words: Any, texts: Sequence[str], length: int) -> Tensor:
    found = words(list(texts), truncation=True, max_length=length)["input_ids"]
    return tokens.padded(found, length, words.pad_token_id).to(torch.int32)


@lru_cache(maxsize=4)
def _kept(task: Translation) -> Tensor:
    words = pretrained.tokenizer(task.tokenizer or task.pretrained)
    first = [words.pad_token_id, words.eos_token_id, words.unk_token_id]
    counts = torch.cat([part.flatten().long() for part in _tokenised(task, "train")]).bincount()
    counts[[number for number in first if number < len(counts)]] = 0
    frequent = counts.argsort(descending=True, stable=True)[: max(0, task.pieces - len(first))]
    return torch.tensor([*first, *frequent[counts[frequent] > 0].sort().values.tolist()])


# ---- pairs ----

Pairs = tuple[list[str], list[str]]


@dataclass(frozen=True)
class Corpus:
    """Pairs by what they serve for ("train", "validation", perhaps "test"), and a sentence about them."""

    sets: Mapping[str, Pairs]
    found: str


def shuffled(sources: Sequence[str]) -> list[int]:
    """A fixed order in which equal sources stand together, so that a cut between them leaves none on both sides.

    Examples:
        >>> shuffled(["a", "b", "a", "c"])
        [3, 1, 0, 2]
    """
    positions: dict[str, list[int]] = {}
    for i, text in enumerate(sources):
        positions.setdefault(text, []).append(i)
    groups = list(positions.values())
    order = torch.randperm(len(groups), generator=generator(0, "pairs")).tolist()
    return [i for group in order for i in groups[group]]


def between(sources: Sequence[str], order: Sequence[int], cut: int) -> int:
    """The first place from `cut` on where the source changes."""
    while 0 < cut < len(order) and sources[order[cut]] == sources[order[cut - 1]]:
        cut += 1
    return cut


@lru_cache(maxsize=4)
def corpus(data: str, source: str, target: str) -> Corpus:
    """All pairs, from files or from the hub."""
    path = Path(data).expanduser()
    if path.exists():
        return _from_file(path, source, target) if _is_table(path) else _from_files(path, source, target)
    if pretrained.looks_like_a_path(data) or path.suffix in (".zip", ".tsv", ".txt", ".xz", ".gz"):
        raise FileNotFoundError(
            f"Invalid data: there is no {data!r}. Give a folder or zip file of .{source} and .{target} files, "
            "a file with a pair a line, or a data set of the hub: --data PATH."
        )
    return _from_hub(data, source, target)


def _is_table(path: Path) -> bool:
    return path.is_file() and path.suffix != ".zip"


def _from_files(path: Path, source: str, target: str) -> Corpus:
    """Files that line up, in a folder or zip file."""
    folder = files.Folder.of(path, within=f"{source}-{target}")
    names = {*map(files.without_compression, folder.names())}
    stems = sorted(name.removesuffix(f".{source}") for name in names if name.endswith(f".{source}"))
    both = [stem for stem in stems if f"{stem}.{target}" in names]
    if not both:
        raise FileNotFoundError(
            f"Invalid data: {path} has no two files NAME.{source} and NAME.{target}; it has "
            f"{', '.join(folder.names()) or 'nothing'}. Give one that has."
        )
    return _sorted_out({stem: _aligned(folder, stem, source, target) for stem in both}, path.name)


def _aligned(folder: files.Folder, stem: str, source: str, target: str) -> Pairs:
    sources, targets = (files.lines(folder.text(f"{stem}.{language}")) for language in (source, target))
    if len(sources) != len(targets):
        raise ValueError(
            f"Invalid data: {stem}.{source} of {folder.path} has {len(sources):,} lines and {stem}.{target} "
            f"{len(targets):,}; need as many, the n-th being each other's translation."
        )
    return _complete(sources, targets)


def _from_file(path: Path, source: str, target: str) -> Corpus:
    """One file, a pair a line: source tab target, further columns are left out."""
    rows = [line.split("\t") for line in files.lines(files.read(path).removeprefix("\ufeff"))]
    for number, row in enumerate(rows, 1):
        if len(row) < 2:
            raise ValueError(
                f"Invalid data: line {number} of {path} has one column; need two, {LANGUAGES[source]} and "
                f"{LANGUAGES[target]}, with a tab between."
            )
    return _sorted_out({path.name: _complete([row[0] for row in rows], [row[1] for row in rows])}, path.name)


def _from_hub(data: str, source: str, target: str) -> Corpus:
    public = PUBLIC.get(data, Public())
    first, second = sorted((source, target))
    names = {"source": source, "target": target, "first": first, "second": second}
    configuration = [public.configuration.format(**names)] if public.configuration else []
    options = dict(public.options)
    if "data_files" in options:
        options["data_files"] = {split: where.format(**names) for split, where in options["data_files"].items()}
    sets = {}
    for name, split in public.splits.items():
        loaded = hub.dataset(data, *configuration, split=split, **options)
        sets[name] = _columns(loaded, public.columns or (source, target), source, target, f"{data} ({split})")
    return _sorted_out(sets, f"the data set {data}", public.splits)


def _columns(loaded: Any, columns: tuple[str, ...], source: str, target: str, where: str) -> Pairs:
    """The two texts of all rows: in a column `translation` by language, or in two columns."""
    if "translation" in loaded.column_names:
        rows = list(loaded["translation"])
        files.columns(rows[0] if rows else (), (source, target), f"the translation column of {where}")
        return _complete([row[source] for row in rows], [row[target] for row in rows])
    files.columns(loaded.column_names, columns, where)
    return _complete(list(loaded[columns[0]]), list(loaded[columns[1]]))


def _complete(sources: Sequence[str], targets: Sequence[str]) -> Pairs:
    """The pairs of which both sides say something."""
    kept = [(s, t) for s, t in zip(sources, targets, strict=True) if s and t and s.strip() and t.strip()]
    return [s for s, _ in kept], [t for _, t in kept]


ROLES = {"train": "train", "val": "validation", "valid": "validation", "validation": "validation", "dev": "validation"}


def _sorted_out(sets: Mapping[str, Pairs], where: str, names: Mapping[str, str] | None = None) -> Corpus:
    """Which set serves for what; `names` are their own where `sets` has ours already."""
    rest = {name: pairs for name, pairs in sets.items() if pairs[0]}
    if not rest:
        raise ValueError(f"Invalid data: {where} has no pairs. Give data that have.")
    counts = {name: len(pairs[0]) for name, pairs in rest.items()}
    by_size = sorted(rest, key=lambda name: -counts[name])  # stable: of equal ones the first
    chosen: dict[str, str] = {}
    for name in rest:
        if (role := ROLES.get(name)) is not None and role not in chosen:
            chosen[role] = name
    for role in ("train", "validation"):
        free = [name for name in by_size if name not in chosen.values()]
        if role not in chosen and free:
            chosen[role] = free[0]
    for name in rest:
        if name.startswith("test") and name not in chosen.values():
            chosen["test"] = name
            break
    own = names or {}
    used = {role: rest[name] for role, name in chosen.items()}
    said = [
        f"{own.get(name, name)} {counts[name]:,} pairs"
        + (f" as {role}" if own.get(name, name) not in (role, *_aliases(role)) else "")
        for role, name in chosen.items()
    ]
    if "validation" not in used:
        used["train"], used["validation"] = _parted(used["train"])
        kept, taken = (len(used[role][0]) for role in ("train", "validation"))
        said = [f"{kept + taken:,} pairs, of which {kept:,} as train and {taken:,} as validation"]
    return Corpus(used, f"{where}: {', '.join(said)}")


def _aliases(role: str) -> list[str]:
    return [name for name, means in ROLES.items() if means == role]


def _parted(pairs: Pairs) -> tuple[Pairs, Pairs]:
    """A twentieth taken out, 2,000 pairs at most."""
    sources, targets = pairs
    order = shuffled(sources)
    cut = between(sources, order, len(order) - max(1, min(2000, len(order) // 20)))
    parts = [([sources[i] for i in part], [targets[i] for i in part]) for part in (order[:cut], order[cut:])]
    return parts[0], parts[1]


# what the preset "small" has: T5 from scratch with its own tokenizer, the loss decides since BLEU is near 0
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
NAMES = (
    *("ted-en-de", "ted-en-fr", "newscomm-en-fr", "multi30k-en-de", "multi30k-en-fr"),
    *("news-en-de", "news-en-fr", "tatoeba-en-de", "tatoeba-en-fr"),
)


def named(name: str, **settings: Any) -> Translation:
    """A task by its name, such as "ted-en-de".

    Examples:
        >>> named("newscomm-en-fr").target
        'fr'
    """
    found, source, target = name.split("-")
    return Translation(**{"corpus": found, "source": source, "target": target, **settings})
