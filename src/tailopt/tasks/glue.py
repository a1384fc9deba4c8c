"""GLUE: nine tasks of sentences and pairs of sentences, for any encoder of Transformers with a fresh head.

    cola  matthews            mrpc, qqp  accuracy, f1 (of the positive class)      mnli  accuracy, accuracy_mismatched
    stsb  spearman, pearson   sst2, qnli, rte, wnli  accuracy                      all in percent

Data are the tab-separated files as GLUE distributes them, by path, or a data set of the hub by name. Parts of them are
enough; `data_description` lists what is there. Classes have the numbers that the hub gives them; STS-B is a regression
on 0 to 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from tailopt.evaluation import evaluating
from tailopt.seeds import generator
from tailopt.splits.partitions import iid
from tailopt.tasks import files, hub, metrics, pretrained, tokens
from tailopt.tasks.dataset_options import HELD_OUT, check_dataset_options, check_minimum, held_out_share
from tailopt.tasks.task import Defaults

SCORES = (0.0, 5.0)  # of STS-B
BATCH = 64  # of evaluation


@dataclass(frozen=True)
class Part:
    """One of the nine: how its files look, what decides, and how many rows the complete ones have.

    Attributes:
        folder: as GLUE writes its name.
        texts, label: columns of the files.
        classes: what stands in the label's column, in the order of the classes' numbers; none for a regression.
        metrics: what `evaluate` gives, the first one decides.
        hub: columns of the texts at the hub, where they differ.
        header: the columns of files that have no line for them.
        cut_short: whether GLUE's own files have rows without their last cells.
    """

    folder: str
    texts: tuple[str, ...]
    label: str
    classes: tuple[str, ...]
    metrics: tuple[str, ...]
    train: int
    validation: int
    hub: tuple[str, ...] = ()
    header: tuple[str, ...] = ()
    cut_short: bool = False


PAIR = ("sentence1", "sentence2")
BINARY = ("0", "1")
ENTAILMENT = ("entailment", "not_entailment")
PARTS: Mapping[str, Part] = {
    "cola": Part(
        *("CoLA", ("sentence",), "label", BINARY, ("matthews",), 8551, 1043),
        header=("source", "label", "mark", "sentence"),
    ),
    "sst2": Part("SST-2", ("sentence",), "label", BINARY, ("accuracy",), 67349, 872),
    "mrpc": Part("MRPC", ("#1 String", "#2 String"), "Quality", BINARY, ("accuracy", "f1"), 3668, 408, hub=PAIR),
    "stsb": Part("STS-B", PAIR, "score", (), ("spearman", "pearson"), 5749, 1500),
    "qqp": Part(
        *("QQP", ("question1", "question2"), "is_duplicate", BINARY, ("accuracy", "f1"), 363846, 40430),
        cut_short=True,
    ),
    "mnli": Part(
        *("MNLI", PAIR, "gold_label", ("entailment", "neutral", "contradiction"), ("accuracy",), 392702, 9815),
        hub=("premise", "hypothesis"),
    ),
    "qnli": Part("QNLI", ("question", "sentence"), "label", ENTAILMENT, ("accuracy",), 104743, 5463),
    "rte": Part("RTE", PAIR, "label", ENTAILMENT, ("accuracy",), 2490, 277),
    "wnli": Part("WNLI", PAIR, "label", BINARY, ("accuracy",), 635, 71),
}
# the preset "small": an encoder of 30M parameters and shorter texts, minutes on two cores
SMALL: Mapping[str, Any] = {
    "pretrained": "ibm-granite/granite-embedding-30m-english",
    "length": 64,
    "evaluated": 1000,
    "dropout": False,  # so few steps do not overfit
    # small batches: ten nodes average their noise away, and more steps fit into the same minutes
    "defaults": Defaults(nodes=10, rounds=10, local_steps=16, batch_size=8, lower_is_better=False),
}


@dataclass(frozen=True)
class Glue:
    """A task of GLUE: 10 nodes, IID, 10 rounds of one local epoch, batches of 32, 128 tokens, RoBERTa-base.

    Files are expected as GLUE hands them out: `train.tsv` and `dev.tsv` (of MNLI `dev_matched.tsv`, and
    `dev_mismatched.tsv` where it is there), split at tabs, quotation marks being letters like others, the columns named
    in the first line; CoLA has no such line. Columns that are not needed may be missing. Stand-ins: without a training
    file QNLI parts its dev set, four fifths to train on, and QQP trains on `dev.tsv` and validates on `test.tsv`. Where
    nearly no sentence of MNLI's training file ends with a full stop, the dev rows lose theirs.

    Args:
        which: "cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte" or "wnli".
        pretrained: a folder or public name of the encoder and its tokenizer.
        data: a folder or zip file of one task, a folder of such (MRPC.zip, mrpc/), or a data set of the hub.
        length: tokens that are kept of a sample.
        limit: training samples, drawn the same way for every seed; 0 for all.
        evaluated: samples that are evaluated at most; 0 for all.
        judge: what `evaluate` measures on: "validation", or "held-out", a share of the training samples that the nodes
            then do not get.
        hold_out: that share, 0 < hold_out < 1.
        dropout: as the encoder's configuration has it; or none.

    Examples:
        >>> task = Glue("stsb", length=64)
        >>> task.name, task.metrics, task.defaults.metric
        ('glue/stsb', ('spearman', 'pearson'), 'spearman')
    """

    which: str = "mrpc"
    pretrained: str = "roberta-base"
    data: str = "nyu-mll/glue"
    length: int = 128
    limit: int = 0
    evaluated: int = 0
    judge: str = "validation"
    hold_out: float = 0.1
    dropout: bool = True
    defaults: Defaults = Defaults(nodes=10, rounds=10, local_epochs=1, batch_size=32, lower_is_better=False)

    def __post_init__(self) -> None:
        """Refuse what no data could mend; the metric that decides is the task's unless another of its own is named."""
        if self.which not in PARTS:
            raise ValueError(f"Unknown task of GLUE: {self.which!r}; need one of {', '.join(PARTS)}.")
        check_dataset_options(self)
        check_minimum(self, length=8)
        if self.defaults.metric not in (*self.metrics, "accuracy_mismatched"):
            usual = replace(self.defaults, metric=self.metrics[0], lower_is_better=False)
            object.__setattr__(self, "defaults", usual)

    @property
    def name(self) -> str:
        """As in the table of tasks."""
        return f"glue/{self.which}"

    @property
    def metrics(self) -> tuple[str, ...]:
        """What `evaluate` gives; MNLI also accuracy_mismatched where there are such rows."""
        return PARTS[self.which].metrics

    @property
    def data_description(self) -> str:
        """Which files or splits there are, with their rows, and what of them is used how."""
        return rows(self.which, self.data).found

    def model(self, seed: int) -> torch.nn.Module:
        """The encoder with a head drawn from the seed: a number for each class, or one for the score."""
        classes = len(PARTS[self.which].classes) or 1
        made = pretrained.model("classifier", self.pretrained, seed, num_labels=classes)
        pretrained.check_fits(pretrained.tokenizer(self.pretrained), made, self.pretrained)
        _check_length(self.length, getattr(made.config, "max_position_embeddings", self.length), self.pretrained)
        for module in made.modules():
            if isinstance(module, torch.nn.Dropout) and not self.dropout:
                module.p = 0.0
        return made

    def nodes(self, seed: int, n: int) -> list[Dataset[tuple[Tensor, ...]]]:
        """The training samples, dealt out at random."""
        train = self._tokenised("train")
        return [TensorDataset(*(column[part] for column in train)) for part in iid(len(train[-1]), n, seed)]

    def loss(self, model: torch.nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Cross-entropy; the mean squared error of the score."""
        *inputs, labels = batch
        outputs = logits(model, inputs)
        if not PARTS[self.which].classes:
            return functional.mse_loss(outputs.squeeze(-1), labels)
        return functional.cross_entropy(outputs, labels)

    def evaluate(self, model: torch.nn.Module, seed: int) -> Mapping[str, float]:
        """The metrics, in percent, on the validation rows or those held out."""
        classes = PARTS[self.which].classes
        found: dict[str, float] = {}
        for name in self._judged():
            *inputs, labels = self._tokenised(name)
            outputs = predicted(model, inputs)
            guesses = outputs.argmax(-1) if classes else outputs.squeeze(-1)
            ending = "_mismatched" if name == "mismatched" else ""
            found |= {metric + ending: metrics.label_metric(metric, labels, guesses) for metric in self.metrics}
        return found

    def _judged(self) -> list[str]:
        if self.judge == HELD_OUT:
            return [HELD_OUT]
        return [name for name in rows(self.which, self.data).parts if name != "train"]

    def _tokenised(self, name: str) -> tuple[Tensor, ...]:
        most = self.limit if name == "train" else self.evaluated
        return tokenised(self.which, self.data, self.pretrained, self.length, name, most, held_out_share(self))


def logits(model: torch.nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    """What a model says about a batch of token numbers, mask and, where the tokenizer has them, segments."""
    used = tokens.trimmed(inputs[1])
    words = ("input_ids", "attention_mask", "token_type_ids")
    named = {word: part[:, :used].long() for word, part in zip(words, inputs, strict=False)}
    outputs: Tensor = model(**named).logits
    return outputs


def predicted(model: torch.nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    """What a model says about many samples, in their order, without dropout; on the CPU."""
    device = next(model.parameters()).device
    order = inputs[1].sum(1).argsort()  # neighbours of one length need little padding
    with evaluating(model):
        found = [logits(model, [part[some].to(device) for part in inputs]).cpu() for some in order.split(BATCH)]
    return torch.cat(found).float()[order.argsort()]


@dataclass(frozen=True)
class Table:
    """Texts by column, and a label a row: the number of its class, or the score."""

    texts: tuple[list[str], ...]
    labels: list[float]
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.labels)

    def only(self, order: Sequence[int]) -> Table:
        """Some rows, in that order."""
        return Table(tuple([column[i] for i in order] for column in self.texts), [self.labels[i] for i in order])

    def without_stops(self) -> Table:
        """The rows without full stops at their ends."""
        return Table(tuple([text.rstrip(" .") for text in column] for column in self.texts), self.labels)


@dataclass(frozen=True)
class Found:
    """The rows of a task, as "train", "validation" and "mismatched", and a sentence about them."""

    parts: Mapping[str, Table]
    found: str


def order(samples: int) -> list[int]:
    """A fixed shuffle, so that all seeds hold out, leave out and evaluate the same rows."""
    shuffled: list[int] = torch.randperm(samples, generator=generator(0, "glue rows")).tolist()
    return shuffled


@lru_cache(maxsize=8)
def tokenised(
    which: str, data: str, source: str, length: int, name: str, most: int, hold_out: float
) -> tuple[Tensor, ...]:
    """Token numbers [rows, length], mask, perhaps segments, and labels [rows].

    Args:
        name: "train", "held-out", "validation" or "mismatched".
        most: rows; 0 for all.
        hold_out: the share of the training rows that is not among "train".
    """
    parts = rows(which, data).parts
    table = parts["train" if name == "held-out" else name]
    chosen = order(len(table))
    kept = len(table) - max(1, round(hold_out * len(table))) if hold_out else len(table)
    if name in ("train", "held-out"):
        chosen = chosen[:kept] if name == "train" else chosen[kept:]
    table = table.only(chosen[: most or len(chosen)])
    words = pretrained.tokenizer(source)
    _check_length(length, words.model_max_length, source)

    def made() -> dict[str, Tensor]:
        found = words(*table.texts, truncation=True, max_length=length)
        return {
            key: tokens.padded(found[key], length, words.pad_token_id if key == "input_ids" else 0).to(torch.int32)
            for key in ("input_ids", "attention_mask", "token_type_ids")
            if key in found
        }

    numbers = tokens.cached(made, "glue", tokens.fingerprint(words), length, *table.texts)
    labels = torch.tensor(table.labels, dtype=torch.long if PARTS[which].classes else torch.float32)
    inputs = [numbers[key] for key in ("input_ids", "attention_mask", "token_type_ids") if key in numbers]
    return (*inputs, labels)


def _check_length(length: int, most: Any, source: str) -> None:
    if length > most:
        raise ValueError(f"Invalid length: got {length}; need at most {most}, which {source!r} can read. Lower it.")


@lru_cache(maxsize=4)
def rows(which: str, data: str) -> Found:
    """All rows of a task, from files or from the hub."""
    path = Path(data).expanduser()
    if path.exists():
        return _from_files(which, path)
    if not data or pretrained.looks_like_a_path(data) or path.suffix in (".zip", ".tsv"):
        raise FileNotFoundError(
            f"Invalid data: there is no {data!r}. Give the folder or zip file of {PARTS[which].folder}, "
            "a folder of such, or a data set of the hub: --data PATH."
        )
    return _from_hub(which, data)


def _from_hub(which: str, data: str) -> Found:
    part, ending = PARTS[which], "_matched" if which == "mnli" else ""
    splits = {"train": "train", "validation": f"validation{ending}"}
    if which == "mnli":
        splits["mismatched"] = "validation_mismatched"
    parts = {}
    for name, split in splits.items():
        where = f"{data} ({which}, {split})"
        loaded = hub.dataset(data, which, split=split)
        columns = part.hub or part.texts
        files.check_columns(loaded.column_names, (*columns, "label"), where)
        labels = [_label(part, label, f"{where}, row {i}") for i, label in enumerate(loaded["label"])]
        parts[name] = Table(tuple(list(loaded[column]) for column in columns), labels)
    counts = ", ".join(f"{split} {len(parts[name]):,} rows" for name, split in splits.items())
    return Found(parts, f"{part.folder} from the data set {data}: {counts}; {_completeness(part, parts)}.")


def _from_files(which: str, path: Path) -> Found:
    part, folder = PARTS[which], _folder(path, PARTS[which].folder)
    names = {files.without_compression(name).lower(): files.without_compression(name) for name in folder.names()}
    used = _roles(which, {*names})
    parts = {role: _table(part, folder, names.get(file, file)) for role, file in used.items()}
    said = [f"{file} {len(parts[role]):,} rows" for role, file in used.items()]
    if short := sum(table.left_out for table in parts.values()):
        said.append(f"{short:,} rows that are cut short were left out")
    if used.get("train") == "dev.tsv":
        said.append("without a train.tsv dev.tsv is for training and test.tsv for validation")
    if "train" not in parts:
        whole = parts["validation"]
        shuffled, cut = order(len(whole)), len(whole) * 4 // 5
        parts = {"train": whole.only(shuffled[:cut]), "validation": whole.only(shuffled[cut:])}
        said.append(f"without a train.tsv {cut:,} of these are for training and {len(whole) - cut:,} for validation")
    if which == "mnli" and _has_no_stops(parts["train"]):
        parts |= {role: table.without_stops() for role, table in parts.items() if role != "train"}
        said.append("full stops at the ends of dev rows were removed, since the training rows have none")
    return Found(parts, f"{part.folder} from {folder.path}: {', '.join(said)}; {_completeness(part, parts)}.")


def _roles(which: str, there: set[str]) -> dict[str, str]:
    """Which file is for what; one that is missing is named when it is read."""
    if which == "mnli":
        mismatched = {"mismatched": "dev_mismatched.tsv"} if "dev_mismatched.tsv" in there else {}
        return {"train": "train.tsv", "validation": "dev_matched.tsv", **mismatched}
    if "train.tsv" not in there and which == "qqp" and {"dev.tsv", "test.tsv"} <= there:
        return {"train": "dev.tsv", "validation": "test.tsv"}
    if "train.tsv" not in there and which == "qnli" and "dev.tsv" in there:
        return {"validation": "dev.tsv"}
    return {"train": "train.tsv", "validation": "dev.tsv"}


def _has_no_stops(table: Table) -> bool:
    """Whether nearly none of the sentences ends with a full stop; of those that GLUE hands out four in five do."""
    return sum(text.endswith(".") for column in table.texts for text in column) < 0.01 * len(table)


def _completeness(part: Part, parts: Mapping[str, Table]) -> str:
    if (len(parts["train"]), len(parts["validation"])) == (part.train, part.validation):
        return "complete"
    return f"GLUE has {part.train:,} and {part.validation:,}"


def _folder(path: Path, name: str) -> files.Folder:
    """The files of a task: those at the path, or those in what the path holds under the task's name."""
    if path.is_dir():
        for inside in sorted(path.iterdir()):
            if _plain(inside.name.removesuffix(".zip")) == _plain(name):
                return files.Folder.of(inside)
    found = files.Folder.of(path)
    if not any(".tsv" in entry.lower() for entry in found.names()):
        raise FileNotFoundError(
            f"Invalid data: {path} has neither {name}.zip, {name}/ nor tab-separated files of it (train.tsv, dev.tsv). "
            "Give a folder or a zip file that has."
        )
    return found


def _plain(name: str) -> str:
    """A task's name without its case and hyphens."""
    return name.lower().replace("-", "").replace("_", "")


def _table(part: Part, folder: files.Folder, name: str) -> Table:
    """The rows of a tab-separated file."""
    where = f"{name} of {folder.path}"
    split = [line.split("\t") for line in files.lines(folder.text(name).removeprefix("\ufeff"))]
    header = list(part.header) or (split.pop(0) if split else [])
    files.check_columns(header, (*part.texts, part.label), where)
    if not split:
        raise ValueError(f"Invalid data: {where} has no rows. Give a file that has.")
    texts: tuple[list[str], ...] = tuple([] for _ in part.texts)
    labels = []
    for number, cells in enumerate(split, start=1 if part.header else 2):
        if len(cells) < len(header) and part.cut_short:
            continue
        if len(cells) != len(header):
            raise ValueError(
                f"Invalid data: line {number} of {where} has {len(cells)} cells; need {len(header)}. Mend that line."
            )
        row = dict(zip(header, cells, strict=True))
        labels.append(_label(part, row[part.label], f"line {number} of {where}"))
        for column, key in zip(texts, part.texts, strict=True):
            column.append(row[key])
    return Table(texts, labels, len(split) - len(labels))


def _label(part: Part, given: Any, where: str) -> float:
    """The number of a class, or a score; files have words, the hub numbers."""
    if part.classes:
        if isinstance(given, str) and given in part.classes:
            return part.classes.index(given)
        if isinstance(given, int) and 0 <= given < len(part.classes):
            return given
        need = f"one of {', '.join(part.classes)}"
    else:
        try:
            found = float(given)
        except ValueError:
            found = float("nan")
        if SCORES[0] <= found <= SCORES[1]:
            return found
        need = f"a number from {SCORES[0]:g} to {SCORES[1]:g}"
    raise ValueError(f"Invalid label: {where} has {given!r}; need {need}. Mend that row, or check the column.")
