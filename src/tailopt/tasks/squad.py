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
VALIDATION_SHARE = 0.1  # of the passages, for files without a validation split
# for the preset "small": a model and passages that two cores can train on in minutes
SMALL: Mapping[str, Any] = {
    "pretrained": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "length": 112,
    "answer_length": 16,
    "evaluated": 24,
    "defaults": Defaults(nodes=1, rounds=3, local_steps=3, batch_size=4, metric="f1", lower_is_better=False),
}


@dataclass(frozen=True)
class Question:
    """A question about a passage; the model is trained on the first answer."""

    context: str
    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Squad:
    """SQuAD v1.1: 87,599 questions to train on, and 10,570 to validate on.

    `data` is a public name, or the path of
    - a folder or zip with the official train-v1.1.json and dev-v1.1.json;
    - a file, folder or zip of JSON lines {"context": ..., "question": ..., "answer": ...}, a part of SQuAD or other
      data: train.jsonl and validation.jsonl, or one file by another name; of that a fixed tenth of the passages, with
      all their questions, is the validation split.
    Questions that take more than `length` tokens, answer included, are left out; `data_description` counts the others.

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
        """The name in the table of tasks."""
        return "squad"

    @property
    def data_description(self) -> str:
        """The questions of the data, and how many of them fit."""
        train, validation = (len(self._encoded(split).questions) for split in ("train", VALIDATION))
        return (
            f"{load(self.data).description}; within {self.length} tokens (answers within {self.answer_length}): "
            f"{train:,} to train on, {validation:,} to validate on"
        )

    def model(self, seed: int) -> torch.nn.Module:
        """The pretrained model."""
        model = pretrained.model("causal", self.pretrained, seed)
        pretrained.check_fits(_tokenizer(self.pretrained), model, self.pretrained)
        return model

    def nodes(self, seed: int, n: int) -> list[Dataset[tuple[Tensor, ...]]]:
        """The training questions, dealt out at random."""
        encoded = self._encoded("train")
        chosen = self._chosen("train", self.limit)
        columns = (encoded.tokens, encoded.sizes, encoded.answers)
        return [TensorDataset(*(column[chosen[part]] for column in columns)) for part in iid(len(chosen), n, seed)]

    def loss(self, model: torch.nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """The mean cross entropy of the answers' tokens."""
        numbers, sizes, answers = batch
        numbers, mask = _trimmed(numbers.long(), sizes)
        longest = tokens.longest(answers, min(self.answer_length, numbers.shape[1] - 1))
        logits = model(
            input_ids=numbers, attention_mask=mask, position_ids=_positions(mask), logits_to_keep=longest + 1
        ).logits[:, :-1]
        targets = numbers[:, -longest:]
        before_answer = torch.arange(longest, 0, -1, device=targets.device) > answers[:, None]
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.masked_fill(before_answer, -100).flatten(), ignore_index=-100
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
        return answer_metrics(texts, [encoded.questions[i].answers for i in some.tolist()])

    def _generated(self, model: torch.nn.Module, numbers: Tensor, sizes: Tensor, answers: Tensor) -> list[str]:
        """Generate the answers to questions, as texts."""
        tokenizer = _tokenizer(self.pretrained)
        prompts = [row[-size : -answer or None] for row, size, answer in zip(numbers, sizes, answers, strict=True)]
        width = max(map(len, prompts))
        pad = _pad_token(tokenizer)
        start = torch.stack([torch.nn.functional.pad(row.long(), (width - len(row), 0), value=pad) for row in prompts])
        mask = torch.arange(width, 0, -1, device=start.device) <= (sizes - answers)[:, None]
        settings = pretrained.transformers().GenerationConfig(
            do_sample=False,
            max_new_tokens=self.answer_length,
            pad_token_id=pad,
            eos_token_id=[tokenizer.eos_token_id, *_line_end(tokenizer)],
        )
        generated = model.generate(  # type: ignore[operator]
            input_ids=start, attention_mask=mask.long(), generation_config=settings
        )
        texts: list[str] = tokenizer.batch_decode(generated[:, width:], skip_special_tokens=True)
        return [text.strip().split("\n")[0] for text in texts]

    def _encoded(self, split: str) -> Encoded:
        return encode(self.data, self.pretrained, self.length, self.answer_length, split, held_out_share(self))

    def _chosen(self, split: str, at_most: int) -> Tensor:
        """Return the positions of some questions, the same for all seeds; of all for 0."""
        total = len(self._encoded(split).questions)
        return torch.randperm(total, generator=generator(0, "squad rows"))[: at_most or total]


# ---- questions as numbers ----


@dataclass(frozen=True)
class Encoded:
    """Questions that fit: tokens int32 [questions, length], padded on the left; how many of them are not padding, and
    how many are the answer.
    """

    questions: list[Question]
    tokens: Tensor
    sizes: Tensor
    answers: Tensor


@lru_cache(maxsize=6)
def encode(data: str, name_or_path: str, length: int, answer_length: int, split: str, hold_out: float) -> Encoded:
    """Tokenise the questions of "train", "validation" or "held-out" that fit.

    Args:
        name_or_path: of the tokenizer.
        hold_out: the share of the passages whose questions are in "held-out" and not in "train".
    """
    tokenizer = _tokenizer(name_or_path)
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"Invalid tokenizer: that of {name_or_path!r} has no token for the end of a text. Take another one."
        )
    if length > tokenizer.model_max_length:
        raise ValueError(
            f"Invalid length: got {length}; need at most {tokenizer.model_max_length}, which is what "
            f"{name_or_path!r} can read."
        )
    questions = load(data).validation if split == VALIDATION else load(data).train
    if split != VALIDATION and hold_out:
        train, held_out = split_by_passage(questions, hold_out)
        questions = train if split == "train" else held_out

    def tokenise() -> dict[str, Tensor]:
        prompts = tokenizer([prompt(question) for question in questions])["input_ids"]
        first_answers = [f" {question.answers[0]}" for question in questions]
        rows = tokenizer(first_answers, add_special_tokens=False)["input_ids"]
        answers = [[*row, tokenizer.eos_token_id] for row in rows]
        pairs = list(zip(prompts, answers, strict=True))
        fits = [len(p) + len(a) <= length and len(a) <= answer_length for p, a in pairs]
        pairs = [pair for pair, fit in zip(pairs, fits, strict=True) if fit]
        reversed_rows = [[*p, *a][::-1] for p, a in pairs]  # padded on the right and turned again: padded on the left
        return {
            "fits": torch.tensor(fits),
            "tokens": tokens.padded(reversed_rows, length, _pad_token(tokenizer)).flip(1).to(torch.int32),
            "sizes": torch.tensor([len(row) for row in reversed_rows], dtype=torch.long),
            "answers": torch.tensor([len(a) for _, a in pairs], dtype=torch.long),
        }

    texts = [[q.context for q in questions], [q.question for q in questions], [q.answers[0] for q in questions]]
    fingerprint = tokens.fingerprint(tokenizer)
    numbers = tokens.cached(tokenise, "squad", fingerprint, prompt(EXAMPLE), length, answer_length, *texts)
    fitting = [question for question, fit in zip(questions, numbers["fits"].tolist(), strict=True) if fit]
    if not fitting:
        raise ValueError(
            f"Invalid length: no question of {split} in {data} fits into {length} tokens with an answer of at most "
            f"{answer_length}; need more. Raise length or answer_length."
        )
    return Encoded(fitting, numbers["tokens"], numbers["sizes"], numbers["answers"])


EXAMPLE = Question("c", "q", ("a",))  # its prompt is a part of the cache's key: another prompt has other tokens


def prompt(question: Question) -> str:
    """Return what the model reads before the answer.

    Examples:
        >>> print(prompt(Question("Paris is in France.", "Where is Paris?", ("France",))))
        Context: Paris is in France.
        Question: Where is Paris?
        Answer:
    """
    return f"Context: {question.context.strip()}\nQuestion: {question.question.strip()}\nAnswer:"


def _trimmed(numbers: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Return a batch without columns that are all padding, and the mask of what is not padding."""
    mask = torch.arange(numbers.shape[1], 0, -1, device=numbers.device) <= sizes[:, None]
    used = tokens.trimmed(mask.flip(1))
    return numbers[:, -used:], mask[:, -used:].long()


def _positions(mask: Tensor) -> Tensor:
    """Return the position of each token in its text; padding has 0."""
    return (mask.cumsum(1) - 1).clamp(min=0)


@lru_cache(maxsize=2)
def _tokenizer(name_or_path: str) -> Any:
    return pretrained.tokenizer(name_or_path)


def _pad_token(tokenizer: Any) -> int:
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id)


def _line_end(tokenizer: Any) -> list[int]:
    numbers: list[int] = tokenizer("\n", add_special_tokens=False)["input_ids"]
    return numbers if len(numbers) == 1 else []


# ---- where questions come from ----


@dataclass(frozen=True)
class Questions:
    """All questions, and a sentence about where they are from."""

    description: str
    train: list[Question]
    validation: list[Question]


@lru_cache(maxsize=2)
def load(data: str) -> Questions:
    """Load all questions from a path, or from a data set of the hub."""
    path = Path(data).expanduser()
    if data and path.exists():
        train, validation, remark = _from_path(path)
    elif not data or pretrained.looks_like_a_path(data) or path.suffix in (".zip", ".json", ".jsonl"):
        raise FileNotFoundError(
            f"Invalid data: there is no {data!r}. Give the path of {TRAIN} and {DEV}, or of JSON lines: --data PATH."
        )
    else:
        train, validation = (_checked(_from_hub(data, split), f"{data}, {split}") for split in ("train", "validation"))
        remark = ""
    complete = " (complete)" if (len(train), len(validation)) == COMPLETE else ""
    description = f"{path.name or data}: {len(train):,} + {len(validation):,} questions{complete}{remark}"
    return Questions(description, train, validation)


def _from_path(path: Path) -> tuple[list[Question], list[Question], str]:
    """Return the questions to train and to validate on, and a remark for their description."""
    if path.is_file() and path.suffix in (".jsonl", ".gz", ".xz"):
        return _from_one_file(files.read(path), path.name)
    folder = files.Folder.of(path)
    if folder.has(TRAIN) and folder.has(DEV):
        train, dev = (_checked(_of_official_json(folder.text(name), name), name) for name in (TRAIN, DEV))
        return train, dev, ""
    if folder.has("train.jsonl") and folder.has("validation.jsonl"):
        names = ("train.jsonl", "validation.jsonl")
        train, dev = (_checked(_of_json_lines(folder.text(name), name), name) for name in names)
        return train, dev, ""
    candidates = [name for name in folder.names() if ".jsonl" in name]
    if len(candidates) != 1:
        raise FileNotFoundError(
            f"Invalid data: {path} has {', '.join(folder.names()[:8]) or 'nothing'}; need {TRAIN} and {DEV}, "
            "train.jsonl and validation.jsonl, or one file of JSON lines."
        )
    return _from_one_file(folder.text(files.without_compression(candidates[0])), candidates[0])


def _from_one_file(text: str, name: str) -> tuple[list[Question], list[Question], str]:
    train, validation = split_by_passage(_checked(_of_json_lines(text, name), name), VALIDATION_SHARE)
    share = f"{VALIDATION_SHARE:.0%} of the passages are the validation split"
    return train, validation, f" of one file, split by passage: {share}"


def split_by_passage(questions: Sequence[Question], share: float) -> tuple[list[Question], list[Question]]:
    """Split questions in two: a fixed share of the passages, with all their questions, goes to the second part.

    Examples:
        >>> questions = [Question(f"passage {i // 2}", f"question {i}", ("answer",)) for i in range(20)]
        >>> [len(part) for part in split_by_passage(questions, 0.3)]
        [14, 6]
    """
    passages = list(dict.fromkeys(question.context for question in questions))
    shuffled = torch.randperm(len(passages), generator=generator(0, "squad passages")).tolist()
    second = {passages[i] for i in shuffled[: max(1, round(share * len(passages)))]}
    if len(second) == len(passages):
        raise ValueError(f"Invalid data: there are {len(passages)} passages; need 2 or more, to hold some of them out.")
    return [q for q in questions if q.context not in second], [q for q in questions if q.context in second]


def _of_json_lines(text: str, name: str) -> Iterator[Question]:
    for number, line in enumerate(files.lines(text), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"Invalid data: line {number} of {name} is no JSON: {error}.") from None
            files.check_columns(row, ("context", "question", "answer"), f"line {number} of {name}")
            yield Question(row["context"], row["question"], (row["answer"],))


def _of_official_json(text: str, name: str) -> Iterator[Question]:
    for article in _entry(json.loads(text), "data", name):
        for paragraph in _entry(article, "paragraphs", name):
            context = _entry(paragraph, "context", name)
            for question in _entry(paragraph, "qas", name):
                answers = tuple(_entry(answer, "text", name) for answer in _entry(question, "answers", name))
                yield Question(context, _entry(question, "question", name), answers)


def _entry(value: Any, key: str, name: str) -> Any:
    files.check_columns(value, (key,), name)
    return value[key]


def _from_hub(data: str, split: str) -> Iterator[Question]:
    rows = hub.dataset(data, split=split)
    files.check_columns(rows.column_names, ("context", "question", "answers"), f"{data}, {split}")
    for context, question, answers in zip(rows["context"], rows["question"], rows["answers"], strict=True):
        yield Question(context, question, tuple(answers["text"]))


def _checked(questions: Iterable[Question], where: str) -> list[Question]:
    """Refuse a question without an answer, and an answer that is not in its passage."""
    checked = []
    for number, question in enumerate(questions, 1):
        wrong = [answer for answer in question.answers if not answer.strip() or answer not in question.context]
        if wrong or not question.answers:
            what = f"the answer {wrong[0]!r}, which is not in its context" if wrong else "no answer"
            raise ValueError(
                f"Invalid data: row {number} of {where} ({question.question!r}) has {what}; need answers that are in "
                "their context, as in SQuAD v1.1. Correct or remove that row."
            )
        checked.append(question)
    if not checked:
        raise ValueError(f"Invalid data: {where} has no questions. Give a file that has.")
    return checked
