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
from tailopt.tasks.task import Baseline, Defaults

SCORES = (0.0, 5.0)  # the range of STS-B
BATCH = 64  # of evaluation


@dataclass(frozen=True)
class Format:
    """One of the nine tasks: the format of its files, its metrics, and the number of rows of the complete files.

    Attributes:
        folder: the task's name in GLUE's spelling.
        texts, label: columns of the files.
        classes: values in the label's column, in the order of the classes' numbers; none for a regression.
        metrics: what `evaluate` returns; runs are compared by the first one.
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
FORMATS: Mapping[str, Format] = {
    "cola": Format(
        *("CoLA", ("sentence",), "label", BINARY, ("matthews",), 8551, 1043),
        header=("source", "label", "mark", "sentence"),
    ),
    "sst2": Format("SST-2", ("sentence",), "label", BINARY, ("accuracy",), 67349, 872),
    "mrpc": Format("MRPC", ("#1 String", "#2 String"), "Quality", BINARY, ("accuracy", "f1"), 3668, 408, hub=PAIR),
    "stsb": Format("STS-B", PAIR, "score", (), ("spearman", "pearson"), 5749, 1500),
    "qqp": Format(
        *("QQP", ("question1", "question2"), "is_duplicate", BINARY, ("accuracy", "f1"), 363846, 40430),
        cut_short=True,
    ),
    "mnli": Format(
        *("MNLI", PAIR, "gold_label", ("entailment", "neutral", "contradiction"), ("accuracy",), 392702, 9815),
        hub=("premise", "hypothesis"),
    ),
    "qnli": Format("QNLI", ("question", "sentence"), "label", ENTAILMENT, ("accuracy",), 104743, 5463),
    "rte": Format("RTE", PAIR, "label", ENTAILMENT, ("accuracy",), 2490, 277),
    "wnli": Format("WNLI", PAIR, "label", BINARY, ("accuracy",), 635, 71),
}
# the preset "small": an encoder of 23M parameters and shorter texts, minutes on two cores
SMALL: Mapping[str, Any] = {
    "pretrained": "sentence-transformers/all-MiniLM-L6-v2",
    "length": 64,
    "evaluated": 1000,
    "dropout": False,  # so few steps do not overfit
    # small batches: ten nodes average their noise away, and more steps fit into the same minutes
    "defaults": Defaults(nodes=10, rounds=10, local_steps=16, batch_size=8, lower_is_better=False),
}


@dataclass(frozen=True)
class Glue:
    """A task of GLUE: 10 nodes, IID, 10 rounds of one local epoch, batches of 32, 128 tokens, RoBERTa-base.

    Files are expected as GLUE distributes them: `train.tsv` and `dev.tsv` (for MNLI `dev_matched.tsv`, and perhaps
    `dev_mismatched.tsv`), split at tabs; quotation marks are ordinary characters, and the first line names the columns,
    except in CoLA. Columns that are not needed may be missing. Where there is no training file, QNLI splits its dev
    set, four fifths to train on, and QQP trains on `dev.tsv` and validates on `test.tsv`. Where nearly no sentence of
    MNLI's training file ends with a full stop, the full stops of the dev rows are removed.

    Args:
        which: "cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte" or "wnli".
        pretrained: a folder or public name of the encoder and its tokenizer.
        data: a folder or zip file of one task, a folder of such (MRPC.zip, mrpc/), or a data set of the hub.
        length: tokens of a sample at most.
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
        """Refuse settings that fit no data; runs are compared by the first metric unless another one is named."""
        if self.which not in FORMATS:
            raise ValueError(f"Unknown task of GLUE: {self.which!r}; need one of {', '.join(FORMATS)}.")
        check_dataset_options(self)
        check_minimum(self, length=8)
        if self.defaults.metric not in (*self.metrics, "accuracy_mismatched"):
            defaults = replace(self.defaults, metric=self.metrics[0], lower_is_better=False)
            object.__setattr__(self, "defaults", defaults)

    @property
    def name(self) -> str:
        """The name in the table of tasks."""
        return f"glue/{self.which}"

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics of `evaluate`; MNLI has accuracy_mismatched too where there are such rows."""
        return FORMATS[self.which].metrics

    @property
    def data_description(self) -> str:
        """The files or splits of the data, with their numbers of rows, and what each is used for."""
        return load_rows(self.which, self.data).description

    def model(self, seed: int) -> torch.nn.Module:
        """The encoder with a head drawn from the seed: a number for each class, or one for the score."""
        classes = len(FORMATS[self.which].classes) or 1
        model = pretrained.model("classifier", self.pretrained, seed, num_labels=classes)
        pretrained.check_fits(pretrained.tokenizer(self.pretrained), model, self.pretrained)
        _check_length(self.length, getattr(model.config, "max_position_embeddings", self.length), self.pretrained)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout) and not self.dropout:
                module.p = 0.0
        return model

    def nodes(self, seed: int, n: int) -> list[Dataset[tuple[Tensor, ...]]]:
        """The training samples, dealt out at random."""
        train = self._tokenised("train")
        return [TensorDataset(*(column[part] for column in train)) for part in iid(len(train[-1]), n, seed)]

    def loss(self, model: torch.nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Cross-entropy; the mean squared error of the score."""
        *inputs, labels = batch
        outputs = logits(model, inputs)
        if not FORMATS[self.which].classes:
            return functional.mse_loss(outputs.squeeze(-1), labels)
        return functional.cross_entropy(outputs, labels)

    def evaluate(self, model: torch.nn.Module, seed: int) -> Mapping[str, float]:
        """The metrics, in percent, on the validation rows or on the rows held out."""
        classes = FORMATS[self.which].classes
        values: dict[str, float] = {}
        for split in self._evaluated_splits():
            *inputs, labels = self._tokenised(split)
            outputs = predict(model, inputs)
            predictions = outputs.argmax(-1) if classes else outputs.squeeze(-1)
            ending = "_mismatched" if split == "mismatched" else ""
            values |= {metric + ending: metrics.label_metric(metric, labels, predictions) for metric in self.metrics}
        return values

    @property
    def baseline(self) -> Baseline | None:
        """The metrics of the most frequent class of the training rows; None for a regression, which has none."""
        classes = len(FORMATS[self.which].classes)
        if not classes:
            return None
        majority = int(torch.bincount(self._tokenised("train")[-1], minlength=classes).argmax())
        labels = self._tokenised(self._evaluated_splits()[0])[-1]
        predictions = torch.full_like(labels, majority)
        found = {metric: metrics.label_metric(metric, labels, predictions) for metric in self.metrics}
        return Baseline("majority class", found)

    def _evaluated_splits(self) -> list[str]:
        if self.judge == HELD_OUT:
            return [HELD_OUT]
        return [split for split in load_rows(self.which, self.data).splits if split != "train"]

    def _tokenised(self, split: str) -> tuple[Tensor, ...]:
        at_most = self.limit if split == "train" else self.evaluated
        return tokenised(self.which, self.data, self.pretrained, self.length, split, at_most, held_out_share(self))


def logits(model: torch.nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    """Return the outputs for a batch of token numbers, mask and, where the tokenizer has them, segments."""
    used = tokens.trimmed(inputs[1])
    names = ("input_ids", "attention_mask", "token_type_ids")
    arguments = {name: part[:, :used].long() for name, part in zip(names, inputs, strict=False)}
    outputs: Tensor = model(**arguments).logits
    return outputs


def predict(model: torch.nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    """Return the outputs for many samples, in their order, without dropout; on the CPU."""
    device = next(model.parameters()).device
    order = inputs[1].sum(1).argsort()  # neighbours of one length need little padding
    with evaluating(model):
        outputs = [logits(model, [part[some].to(device) for part in inputs]).cpu() for some in order.split(BATCH)]
    return torch.cat(outputs).float()[order.argsort()]


@dataclass(frozen=True)
class Table:
    """Texts by column, and one label per row: the number of its class, or the score."""

    texts: tuple[list[str], ...]
    labels: list[float]
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.labels)

    def only(self, order: Sequence[int]) -> Table:
        """Return the rows at these positions, in this order."""
        return Table(tuple([column[i] for i in order] for column in self.texts), [self.labels[i] for i in order])

    def without_stops(self) -> Table:
        """Return the rows without full stops at the ends of their texts."""
        return Table(tuple([text.rstrip(" .") for text in column] for column in self.texts), self.labels)


@dataclass(frozen=True)
class Rows:
    """The rows of a task, as "train", "validation" and "mismatched", and a sentence about them."""

    splits: Mapping[str, Table]
    description: str


def fixed_shuffle(samples: int) -> list[int]:
    """Return a random order that is the same for all seeds: they hold out, leave out and evaluate the same rows."""
    shuffled: list[int] = torch.randperm(samples, generator=generator(0, "glue rows")).tolist()
    return shuffled


@lru_cache(maxsize=8)
def tokenised(
    which: str, data: str, name_or_path: str, length: int, split: str, at_most: int, hold_out: float
) -> tuple[Tensor, ...]:
    """Return token numbers [rows, tokens of the longest], mask, perhaps segments, and labels [rows].

    Args:
        name_or_path: of the tokenizer.
        split: "train", "held-out", "validation" or "mismatched".
        at_most: how many rows; 0 for all.
        hold_out: the share of the training rows that is not among "train".
    """
    splits = load_rows(which, data).splits
    table = splits["train" if split == HELD_OUT else split]
    chosen = fixed_shuffle(len(table))
    cut = len(table) - max(1, round(hold_out * len(table))) if hold_out else len(table)
    if split in ("train", HELD_OUT):
        chosen = chosen[:cut] if split == "train" else chosen[cut:]
    table = table.only(chosen[: at_most or len(chosen)])
    tokenizer = pretrained.tokenizer(name_or_path)
    _check_length(length, tokenizer.model_max_length, name_or_path)

    def tokenise() -> dict[str, Tensor]:
        encoded = tokenizer(*table.texts, truncation=True, max_length=length)
        pads = {"input_ids": tokenizer.pad_token_id, "attention_mask": 0, "token_type_ids": 0}
        return {
            key: tokens.padded(encoded[key], length, pad).to(torch.int32) for key, pad in pads.items() if key in encoded
        }

    numbers = tokens.cached(tokenise, "glue", tokens.fingerprint(tokenizer), length, *table.texts)
    labels = torch.tensor(table.labels, dtype=torch.long if FORMATS[which].classes else torch.float32)
    used = tokens.trimmed(numbers["attention_mask"])  # where batches are not trimmed, all columns cost time
    inputs = [numbers[key][:, :used] for key in ("input_ids", "attention_mask", "token_type_ids") if key in numbers]
    return (*inputs, labels)


def _check_length(length: int, longest: Any, name_or_path: str) -> None:
    if length > longest:
        raise ValueError(
            f"Invalid length: got {length}; need at most {longest}, which {name_or_path!r} can read. Lower it."
        )


@lru_cache(maxsize=4)
def load_rows(which: str, data: str) -> Rows:
    """Load all rows of a task from files, or from a data set of the hub."""
    path = Path(data).expanduser()
    if path.exists():
        return _from_files(which, path)
    if not data or pretrained.looks_like_a_path(data) or path.suffix in (".zip", ".tsv"):
        raise FileNotFoundError(
            f"Invalid data: there is no {data!r}. Give the folder or zip file of {FORMATS[which].folder}, "
            "a folder of such, or a data set of the hub: --data PATH."
        )
    return _from_hub(which, data)


def _from_hub(which: str, data: str) -> Rows:
    form, ending = FORMATS[which], "_matched" if which == "mnli" else ""
    names = {"train": "train", "validation": f"validation{ending}"}  # split -> its name at the hub
    if which == "mnli":
        names["mismatched"] = "validation_mismatched"
    splits = {}
    for split, name in names.items():
        where = f"{data} ({which}, {name})"
        loaded = hub.dataset(data, which, split=name)
        columns = form.hub or form.texts
        files.check_columns(loaded.column_names, (*columns, "label"), where)
        labels = [_label(form, label, f"{where}, row {i}") for i, label in enumerate(loaded["label"])]
        splits[split] = Table(tuple(list(loaded[column]) for column in columns), labels)
    counts = ", ".join(f"{name} {len(splits[split]):,} rows" for split, name in names.items())
    return Rows(splits, f"{form.folder} from the data set {data}: {counts}; {_completeness(form, splits)}.")


def _from_files(which: str, path: Path) -> Rows:
    form, folder = FORMATS[which], _folder(path, FORMATS[which].folder)
    names = {files.without_compression(name).lower(): files.without_compression(name) for name in folder.names()}
    file_of_split = _files_of_splits(which, {*names})
    splits = {split: _table(form, folder, names.get(file, file)) for split, file in file_of_split.items()}
    remarks = [f"{file} {len(splits[split]):,} rows" for split, file in file_of_split.items()]
    if left_out := sum(table.left_out for table in splits.values()):
        remarks.append(f"{left_out:,} rows that are cut short were left out")
    if file_of_split.get("train") == "dev.tsv":
        remarks.append("without a train.tsv dev.tsv is for training and test.tsv for validation")
    if "train" not in splits:
        whole = splits["validation"]
        shuffled, cut = fixed_shuffle(len(whole)), len(whole) * 4 // 5
        splits = {"train": whole.only(shuffled[:cut]), "validation": whole.only(shuffled[cut:])}
        remarks.append(f"without a train.tsv {cut:,} of these are for training and {len(whole) - cut:,} for validation")
    if which == "mnli" and _has_no_stops(splits["train"]):
        splits |= {split: table.without_stops() for split, table in splits.items() if split != "train"}
        remarks.append("full stops at the ends of dev rows were removed, since the training rows have none")
    return Rows(splits, f"{form.folder} from {folder.path}: {', '.join(remarks)}; {_completeness(form, splits)}.")


def _files_of_splits(which: str, names: set[str]) -> dict[str, str]:
    """Return split -> the name of its file; a file that is missing raises when it is read."""
    if which == "mnli":
        mismatched = {"mismatched": "dev_mismatched.tsv"} if "dev_mismatched.tsv" in names else {}
        return {"train": "train.tsv", "validation": "dev_matched.tsv", **mismatched}
    if "train.tsv" not in names and which == "qqp" and {"dev.tsv", "test.tsv"} <= names:
        return {"train": "dev.tsv", "validation": "test.tsv"}
    if "train.tsv" not in names and which == "qnli" and "dev.tsv" in names:
        return {"validation": "dev.tsv"}
    return {"train": "train.tsv", "validation": "dev.tsv"}


def _has_no_stops(table: Table) -> bool:
    """Whether nearly no sentence ends with a full stop; in the files that GLUE distributes four in five do."""
    return sum(text.endswith(".") for column in table.texts for text in column) < 0.01 * len(table)


def _completeness(form: Format, splits: Mapping[str, Table]) -> str:
    if (len(splits["train"]), len(splits["validation"])) == (form.train, form.validation):
        return "complete"
    return f"GLUE has {form.train:,} and {form.validation:,}"


def _folder(path: Path, name: str) -> files.Folder:
    """Return the files of a task: at the path itself, or in a folder or zip file there that has the task's name."""
    if path.is_dir():
        for inside in sorted(path.iterdir()):
            if _comparable(inside.name.removesuffix(".zip")) == _comparable(name):
                return files.Folder.of(inside)
    folder = files.Folder.of(path)
    if not any(".tsv" in entry.lower() for entry in folder.names()):
        raise FileNotFoundError(
            f"Invalid data: {path} has neither {name}.zip, {name}/ nor tab-separated files of it (train.tsv, dev.tsv). "
            "Give a folder or a zip file that has."
        )
    return folder


def _comparable(name: str) -> str:
    """Return the name of a task without its case and hyphens."""
    return name.lower().replace("-", "").replace("_", "")


def _table(form: Format, folder: files.Folder, name: str) -> Table:
    """Read the rows of a tab-separated file."""
    where = f"{name} of {folder.path}"
    split = [line.split("\t") for line in files.lines(folder.text(name).removeprefix("\ufeff"))]
    header = list(form.header) or (split.pop(0) if split else [])
    files.check_columns(header, (*form.texts, form.label), where)
    if not split:
        raise ValueError(f"Invalid data: {where} has no rows. Give a file that has.")
    texts: tuple[list[str], ...] = tuple([] for _ in form.texts)
    labels = []
    for number, cells in enumerate(split, start=1 if form.header else 2):
        if len(cells) < len(header) and form.cut_short:
            continue
        if len(cells) != len(header):
            raise ValueError(
                f"Invalid data: line {number} of {where} has {len(cells)} cells; need {len(header)}. Correct that line."
            )
        row = dict(zip(header, cells, strict=True))
        labels.append(_label(form, row[form.label], f"line {number} of {where}"))
        for column, key in zip(texts, form.texts, strict=True):
            column.append(row[key])
    return Table(texts, labels, len(split) - len(labels))


def _label(form: Format, value: Any, where: str) -> float:
    """Return the number of a class, or a score; files have words, the hub has numbers."""
    if form.classes:
        if isinstance(value, str) and value in form.classes:
            return form.classes.index(value)
        if isinstance(value, int) and 0 <= value < len(form.classes):
            return value
        need = f"one of {', '.join(form.classes)}"
    else:
        try:
            score = float(value)
        except ValueError:
            score = float("nan")
        if SCORES[0] <= score <= SCORES[1]:
            return score
        need = f"a number from {SCORES[0]:g} to {SCORES[1]:g}"
    raise ValueError(f"Invalid label: {where} has {value!r}; need {need}. Correct that row, or check the column.")
