"""Question answering: SQuAD v1.1 with a causal language model.

    Context: ...
    Question: ...
    Answer: ...

The loss is the cross entropy of the answer's tokens and the end of the text after them, given everything before. An
answer is generated greedily, up to the end of its line; exact match and F1 follow the official rules (case,
punctuation, articles and spaces do not count; the best of several reference answers does), by torchmetrics.

Rows are padded on the left: answers then end in the same column, and only the last few columns need logits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from tailopt.evaluation import evaluating
from tailopt.seeds import generator
from tailopt.splits.partitions import iid
from tailopt.tasks import files, hub, pretrained, tokens
from tailopt.tasks.dataset_options import VALIDATION, check_dataset_options, check_minimum, held_out_share
from tailopt.tasks.metrics import answer_metrics
from tailopt.tasks.task import Defaults

BATCH = 64  # of an evaluation
TRAIN, DEV = "train-v1.1.json", "dev-v1.1.json"
COMPLETE = (87_599, 10_570)  # questions of the official files
SHARE = 0.1  # of the passages: the validation split of files that have none
# for the preset "small": a model and passages that two cores can train on in minutes
SMALL: Mapping[str, Any] = {
    "pretrained": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "length": 112,
    "answer_length": 16,
    "evaluated": 24,
    "defaults": Defaults(nodes=1, rounds=3, local_steps=3, batch_size=4, metric="f1", lower_is_better=False),
}


@dataclass(frozen=True)
class Row:
    """A question about a passage; the first answer is the one that is trained on."""

    context: str
    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Squad:
    """SQuAD v1.1: 87,599 questions to train on, and 10,570 to validate on.

    `data` is a public name, or the path of
    - a folder or zip with the official train-v1.1.json and dev-v1.1.json;
    - a file, folder or zip of JSON lines {"context": ..., "question": ..., "answer": ...}, a part of SQuAD or data of
      one's own: train.jsonl and validation.jsonl, or one file by another name; of that a fixed tenth of the passages,
      with all their questions, is the validation split.
    Questions that take more than `length` tokens, answer included, are left out; `data_description` says how many.

    Args:
        pretrained: a folder or public name of a causal language model and its tokenizer.
        data: as above.
        length: the most tokens of a question with passage and answer.
        answer_length: the most tokens of an answer, trained on or generated.
        limit: that many training questions, the same for all seeds; 0: all.
        evaluated: evaluate on at most that many questions; 0: all.
        judge: evaluate on "validation", or on "held-out", a share of train that the nodes then do not get.
        hold_out: that share, by passages.
    """

    pretrained: str = "Qwen/Qwen2.5-0.5B"
    data: str = "rajpurkar/squad"
    length: int = 512
    answer_length: int = 32
    limit: int = 0
    evaluated: int = 0
    judge: str = "validation"
    hold_out: float = 0.1
    defaults: Defaults = Defaults(
        nodes=1, rounds=20, local_steps=100, batch_size=32, metric="f1", lower_is_better=False
    )

    def __post_init__(self) -> None:
        check_dataset_options(self)
        check_minimum(self, length=16, answer_length=1)

    @property
    def name(self) -> str:
        """As in the table of tasks."""
        return "squad"

    @property
    def data_description(self) -> str:
        """Which questions there are, and how many of them fit."""
        fit = [len(self._encoded(which).rows) for which in ("train", "validation")]
        return (
            f"{load(self.data).source}; within {self.length} tokens (answers within {self.answer_length}): "
            f"{fit[0]:,} to train on, {fit[1]:,} to validate on"
        )

    def model(self, seed: int) -> torch.nn.Module:
        """The pretrained model."""
        found = pretrained.model("causal", self.pretrained, seed)
        pretrained.check_fits(_words(self.pretrained), found, self.pretrained)
        return found

    def nodes(self, seed: int, n: int) -> list[Dataset[tuple[Tensor, ...]]]:
        """The training questions, dealt out at random."""
        encoded = self._encoded("train")
        kept = self._chosen("train", self.limit)
        columns = (encoded.tokens, encoded.sizes, encoded.answers)
        return [TensorDataset(*(column[kept[part]] for column in columns)) for part in iid(len(kept), n, seed)]

    def loss(self, model: torch.nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """The mean cross entropy of the answers' tokens."""
        numbers, sizes, answers = batch
        numbers, mask = _trimmed(numbers.long(), sizes)
        last = int(answers.max())
        logits = model(
            input_ids=numbers, attention_mask=mask, position_ids=_positions(mask), logits_to_keep=last + 1
        ).logits[:, :-1]
        wanted = numbers[:, -last:]
        other = torch.arange(last, 0, -1, device=wanted.device) > answers[:, None]
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), wanted.masked_fill(other, -100).flatten(), ignore_index=-100
        )

    def evaluate(self, model: torch.nn.Module, seed: int) -> Mapping[str, float]:
        """Exact match and F1 of generated answers, in percent."""
        encoded, some = self._encoded(self.judge), self._chosen(self.judge, self.evaluated)
        some = some[encoded.sizes[some].argsort()]  # neighbours of one length need little padding
        device = next(model.parameters()).device
        texts: list[str] = []
        with evaluating(model):
            for part in some.split(BATCH):
                batch = tuple(c[part].to(device) for c in (encoded.tokens, encoded.sizes, encoded.answers))
                texts += self._generated(model, *batch)
        return answer_metrics(texts, [encoded.rows[i].answers for i in some.tolist()])

    def _generated(self, model: torch.nn.Module, numbers: Tensor, sizes: Tensor, answers: Tensor) -> list[str]:
        """The answers of a model to questions, as texts."""
        words = _words(self.pretrained)
        prompts = [row[-size : -answer or None] for row, size, answer in zip(numbers, sizes, answers, strict=True)]
        width = max(map(len, prompts))
        pad = _pad(words)
        start = torch.stack([torch.nn.functional.pad(row.long(), (width - len(row), 0), value=pad) for row in prompts])
        mask = torch.arange(width, 0, -1, device=start.device) <= (sizes - answers)[:, None]
        settings = pretrained.transformers().GenerationConfig(
            do_sample=False,
            max_new_tokens=self.answer_length,
            pad_token_id=pad,
            eos_token_id=[words.eos_token_id, *_line_end(words)],
        )
        made = model.generate(input_ids=start, attention_mask=mask.long(), generation_config=settings)  # type: ignore[operator]
        texts: list[str] = words.batch_decode(made[:, width:], skip_special_tokens=True)
        return [text.strip().split("\n")[0] for text in texts]

    def _encoded(self, which: str) -> Encoded:
        return encoded(self.data, self.pretrained, self.length, self.answer_length, which, held_out_share(self))

    def _chosen(self, which: str, most: int) -> Tensor:
        total = len(self._encoded(which).rows)
        return torch.randperm(total, generator=generator(0, "squad rows"))[: most or total]


# ---- rows as numbers ----


@dataclass(frozen=True)
class Encoded:
    """Rows that fit: tokens int32 [rows, length], padded on the left; how many are real, and how many are answer."""

    rows: list[Row]
    tokens: Tensor
    sizes: Tensor
    answers: Tensor


@lru_cache(maxsize=6)
def encoded(data: str, source: str, length: int, answer_length: int, which: str, held_out: float) -> Encoded:
    """The rows of "train", "validation" or "held-out" that fit; of train less than all where a share is held out."""
    words = _words(source)
    if words.eos_token_id is None:
        raise ValueError(f"Invalid tokenizer: that of {source!r} has no token for the end of a text. Take another one.")
    if length > words.model_max_length:
        raise ValueError(
            f"Invalid length: got {length}; need at most {words.model_max_length}, which is what {source!r} can read."
        )
    rows = load(data).validation if which == VALIDATION else load(data).train
    if which != VALIDATION and held_out:
        kept, out = parted(rows, held_out)
        rows = kept if which == "train" else out

    def made() -> dict[str, Tensor]:
        prompts = words([prompt(row) for row in rows])["input_ids"]
        ends = words([f" {row.answers[0]}" for row in rows], add_special_tokens=False)["input_ids"]
        ends = [[*end, words.eos_token_id] for end in ends]
        fits = [len(p) + len(e) <= length and len(e) <= answer_length for p, e in zip(prompts, ends, strict=True)]
        both = [[*p, *e] for p, e, fit in zip(prompts, ends, fits, strict=True) if fit]
        return {
            "fits": torch.tensor(fits),
            "tokens": tokens.padded([row[::-1] for row in both], length, _pad(words)).flip(1).to(torch.int32),
            "sizes": torch.tensor([len(row) for row in both], dtype=torch.long),
            "answers": torch.tensor([len(e) for e, fit in zip(ends, fits, strict=True) if fit], dtype=torch.long),
        }

    texts = [[row.context for row in rows], [row.question for row in rows], [row.answers[0] for row in rows]]
    found = tokens.cached(made, "squad", tokens.fingerprint(words), prompt(EXAMPLE), length, answer_length, *texts)
    kept = [row for row, fit in zip(rows, found["fits"].tolist(), strict=True) if fit]
    if not kept:
        raise ValueError(
            f"Invalid length: no question of {which} in {data} fits into {length} tokens with an answer of at most "
            f"{answer_length}; need more. Raise length or answer_length."
        )
    return Encoded(kept, found["tokens"], found["sizes"], found["answers"])


EXAMPLE = Row("c", "q", ("a",))


def prompt(row: Row) -> str:
    """What the model reads before the answer.

    Examples:
        >>> print(prompt(Row("Paris is in France.", "Where is Paris?", ("France",))))
        Context: Paris is in France.
        Question: Where is Paris?
        Answer:
    """
    return f"Context: {row.context.strip()}\nQuestion: {row.question.strip()}\nAnswer:"


def _trimmed(numbers: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """A batch without columns that only pad, and the mask of what is real."""
    mask = torch.arange(numbers.shape[1], 0, -1, device=numbers.device) <= sizes[:, None]
    used = tokens.trimmed(mask.flip(1))
    return numbers[:, -used:], mask[:, -used:].long()


def _positions(mask: Tensor) -> Tensor:
    """The position of each token in its text; padding has 0."""
    return (mask.cumsum(1) - 1).clamp(min=0)


@lru_cache(maxsize=2)
def _words(source: str) -> Any:
    return pretrained.tokenizer(source)


def _pad(words: Any) -> int:
    return int(words.pad_token_id if words.pad_token_id is not None else words.eos_token_id)


def _line_end(words: Any) -> list[int]:
    numbers: list[int] = words("\n", add_special_tokens=False)["input_ids"]
    return numbers if len(numbers) == 1 else []


# ---- where rows come from ----


@dataclass(frozen=True)
class Rows:
    """All questions, and a text that says where they are from."""

    source: str
    train: list[Row]
    validation: list[Row]


@lru_cache(maxsize=2)
def load(data: str) -> Rows:
    """All questions of a path or a public name."""
    path = Path(data).expanduser()
    if data and path.exists():
        train, validation, how = _of_path(path)
    elif not data or pretrained.looks_like_a_path(data) or path.suffix in (".zip", ".json", ".jsonl"):
        raise FileNotFoundError(
            f"Invalid data: there is no {data!r}. Give the path of {TRAIN} and {DEV}, or of JSON lines: --data PATH."
        )
    else:
        train, validation = ([*_checked(_of_hub(data, split), f"{data}, {split}")] for split in ("train", "validation"))
        how = ""
    complete = " (complete)" if (len(train), len(validation)) == COMPLETE else ""
    source = f"{path.name or data}: {len(train):,} + {len(validation):,} questions{complete}{how}"
    return Rows(source, train, validation)


def _of_path(path: Path) -> tuple[list[Row], list[Row], str]:
    if path.is_file() and path.suffix in (".jsonl", ".gz", ".xz"):
        return _split([*_checked(_lines(files.read(path), path.name), path.name)])
    folder = files.Folder.of(path)
    if folder.has(TRAIN) and folder.has(DEV):
        train, dev = ([*_checked(_official(folder.text(name), name), name)] for name in (TRAIN, DEV))
        return train, dev, ""
    if folder.has("train.jsonl") and folder.has("validation.jsonl"):
        both = ("train.jsonl", "validation.jsonl")
        train, dev = ([*_checked(_lines(folder.text(name), name), name)] for name in both)
        return train, dev, ""
    alone = [name for name in folder.names() if ".jsonl" in name]
    if len(alone) != 1:
        raise FileNotFoundError(
            f"Invalid data: {path} has {', '.join(folder.names()[:8]) or 'nothing'}; need {TRAIN} and {DEV}, "
            "train.jsonl and validation.jsonl, or one file of JSON lines."
        )
    return _split([*_checked(_lines(folder.text(files.without_compression(alone[0])), alone[0]), alone[0])])


def _split(rows: list[Row]) -> tuple[list[Row], list[Row], str]:
    train, validation = parted(rows, SHARE)
    return train, validation, f" of one file, parted by passage: {SHARE:.0%} of the passages are the validation split"


def parted(rows: Sequence[Row], share: float) -> tuple[list[Row], list[Row]]:
    """Rows in two: a fixed share of the passages, with all their questions, goes to the second.

    Examples:
        >>> rows = [Row(f"passage {i // 2}", f"question {i}", ("answer",)) for i in range(20)]
        >>> [len(part) for part in parted(rows, 0.3)]
        [14, 6]
    """
    passages = list(dict.fromkeys(row.context for row in rows))
    shuffled = torch.randperm(len(passages), generator=generator(0, "squad passages")).tolist()
    out = {passages[i] for i in shuffled[: max(1, round(share * len(passages)))]}
    if len(out) == len(passages):
        raise ValueError(f"Invalid data: there are {len(passages)} passages; need 2 or more, to hold some of them out.")
    return [row for row in rows if row.context not in out], [row for row in rows if row.context in out]


def _lines(text: str, name: str) -> Iterator[Row]:
    for number, line in enumerate(files.lines(text), 1):
        if line.strip():
            try:
                found = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"Invalid data: line {number} of {name} is no JSON: {error}.") from None
            files.check_columns(found, ("context", "question", "answer"), f"line {number} of {name}")
            yield Row(found["context"], found["question"], (found["answer"],))


def _official(text: str, name: str) -> Iterator[Row]:
    for article in _entry(json.loads(text), "data", name):
        for paragraph in _entry(article, "paragraphs", name):
            context = _entry(paragraph, "context", name)
            for question in _entry(paragraph, "qas", name):
                answers = tuple(_entry(answer, "text", name) for answer in _entry(question, "answers", name))
                yield Row(context, _entry(question, "question", name), answers)


def _entry(found: Any, key: str, name: str) -> Any:
    files.check_columns(found, (key,), name)
    return found[key]


def _of_hub(data: str, split: str) -> Iterator[Row]:
    loaded = hub.dataset(data, split=split)
    files.check_columns(loaded.column_names, ("context", "question", "answers"), f"{data}, {split}")
    for context, question, answers in zip(loaded["context"], loaded["question"], loaded["answers"], strict=True):
        yield Row(context, question, tuple(answers["text"]))


def _checked(rows: Iterable[Row], where: str) -> Iterator[Row]:
    """Refuse a question without an answer, and an answer that is not in its passage."""
    empty = True
    for number, row in enumerate(rows, 1):
        empty = False
        wrong = [answer for answer in row.answers if not answer.strip() or answer not in row.context]
        if wrong or not row.answers:
            what = f"the answer {wrong[0]!r}, which is not in its context" if wrong else "no answer"
            raise ValueError(
                f"Invalid data: row {number} of {where} ({row.question!r}) has {what}; need answers that stand in "
                "their context, as in SQuAD v1.1. Mend or remove that row."
            )
        yield row
    if empty:
        raise ValueError(f"Invalid data: {where} has no questions. Give a file that has.")
