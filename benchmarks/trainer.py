"""BiClip as somebody would try it first: the Hugging Face Trainer on GLUE, one argument changed.

    python benchmarks/trainer.py --data GLUE --models granite-30m minilm-l6 --cells cells.jsonl [--processes 8]

Every cell is `Trainer` with its defaults (linear decay, gradients clipped to norm 1) for 300 steps of batch 16, with
AdamW or with `BiClip(params, lr)` at the same learning rates. The score is the task's first metric on the validation
rows after the last step. Each finished cell is a line of `cells.jsonl`; the same command goes on where it was stopped,
and prints the table from the lines.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tailopt
from tailopt.tasks.glue import Glue

RATES = (2e-5, 5e-5, 1e-4, 3e-4)
BICLIP: dict[str, dict[str, Any]] = {
    "BiClip(params, lr)": {},
    "BiClip(params)": {},
    "BiClip(params, lr, momentum=0.9)": {"momentum": 0.9},
}
NOTHING_SET = "BiClip(params)"
LENGTH = 128


class Cell(NamedTuple):
    """One training run."""

    model: str
    task: str
    optimizer: str
    lr: float | None  # None: the optimizer's own
    seed: int
    steps: int
    batch: int


def train(cell: Cell, data: str, folder: str) -> dict[str, float]:
    """Train one cell; returns the metrics after the last step."""
    from transformers import Trainer, TrainingArguments

    torch.set_num_threads(1)
    task = Glue(cell.task, pretrained=folder, data=data, length=LENGTH)
    model, rows = task.model(cell.seed), task.nodes(cell.seed, 1)[0]
    losses: list[Tensor] = []

    class Recording(Trainer):
        def compute_loss(self, *args: Any, **more: Any) -> Any:
            loss = super().compute_loss(*args, **more)
            losses.append(loss.detach())
            return loss

    with tempfile.TemporaryDirectory() as here:
        arguments = TrainingArguments(
            output_dir=here,
            max_steps=cell.steps,
            per_device_train_batch_size=cell.batch,
            learning_rate=cell.lr or TrainingArguments.learning_rate,
            seed=cell.seed,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        of_biclip = None
        if cell.optimizer in BICLIP:
            of_biclip = tailopt.BiClip, {"lr": cell.lr, **BICLIP[cell.optimizer]}
        trainer = Recording(
            model, arguments, data_collator=collate, train_dataset=rows, optimizer_cls_and_kwargs=of_biclip
        )
        began = time.perf_counter()
        trainer.train()
    last = torch.stack(losses[-50:]).float().mean().item()
    seconds = time.perf_counter() - began
    return {**task.evaluate(model, cell.seed), "train_loss": last, "seconds": round(seconds, 2)}


def collate(rows: Sequence[tuple[Tensor, ...]]) -> dict[str, Tensor]:
    """Stack rows of tokens, mask, perhaps segments, and labels, without padding that no row needs."""
    *inputs, labels = (torch.stack(column) for column in zip(*rows, strict=True))
    used = int(inputs[1].sum(1).max())
    names = ("input_ids", "attention_mask", "token_type_ids")
    batch = {name: part[:, :used].long() for name, part in zip(names, inputs, strict=False)}
    return {**batch, "labels": labels}


def run(cells: Iterable[Cell], arguments: argparse.Namespace, record: Path) -> None:
    """Train the cells that are not recorded, in several processes."""
    done = set(recorded(record))
    todo = [cell for cell in cells if cell not in done]
    folders = {Path(folder).name: folder for folder in arguments.models}
    began, spawn = time.monotonic(), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, mp_context=spawn) as pool, record.open("a") as lines:
        futures: dict[Future[dict[str, float]], Cell] = {
            pool.submit(train, cell, arguments.data, folders[cell.model]): cell for cell in todo
        }
        for k, future in enumerate(as_completed(futures)):
            cell, result = futures[future], future.result()
            print(json.dumps([*cell, result]), file=lines, flush=True)
            print(f"{k + 1}/{len(todo)} {time.monotonic() - began:.0f} s", *cell, result, flush=True)


def recorded(record: Path) -> dict[Cell, dict[str, float]]:
    """What the lines of a file say; a line that a kill has cut is left out."""
    found: dict[Cell, dict[str, float]] = {}
    for line in record.read_text().splitlines() if record.exists() else ():
        try:
            *cell, result = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[Cell(*cell)] = result
    return found


def table(found: dict[Cell, dict[str, float]], metric: str) -> str:
    """Means over the seeds with standard errors: a row per model, task and optimizer, a column per learning rate."""
    rates = sorted({cell.lr for cell in found}, key=lambda lr: lr or 0.0)
    heads = [f"{lr:g}" if lr else "no lr" for lr in rates]
    lines = ["| model | task | optimizer | " + " | ".join(heads) + " | seeds |"]
    lines.append("| --- " * (len(rates) + 4) + "|")
    for key in dict.fromkeys((c.model, c.task, c.optimizer) for c in sorted(found, key=lambda c: c[:3])):
        row, seeds = [], 0
        for lr in rates:
            of_seeds = [r[metric] for c, r in found.items() if c[:4] == (*key, lr)]
            seeds = max(seeds, len(of_seeds))
            row.append(spread(of_seeds) if of_seeds else "")
        lines.append("| " + " | ".join([*key, *row, str(seeds)]) + " |")
    return "\n".join(lines)


def summary(found: dict[Cell, dict[str, float]], metric: str) -> str:
    """Each optimizer at its best learning rate, and its difference from AdamW at AdamW's best, over the same seeds."""
    lines = ["| model | task | AdamW, best | optimizer | best | lr | difference | within one standard error |"]
    lines.append("| --- " * 8 + "|")
    for model, task in dict.fromkeys((c.model, c.task) for c in sorted(found, key=lambda c: c[:3])):
        scores: dict[str, dict[float | None, dict[int, float]]] = {}
        for c, result in found.items():
            if (c.model, c.task) == (model, task):
                scores.setdefault(c.optimizer, {}).setdefault(c.lr, {})[c.seed] = result[metric]
        best = {
            name: max(rates.items(), key=lambda r: statistics.mean(r[1].values())) for name, rates in scores.items()
        }
        adamw = best["AdamW"][1]
        for name in filter(best.get, BICLIP):
            lr, of_seeds = best[name]
            differences = [score - adamw[seed] for seed, score in of_seeds.items() if seed in adamw]
            mean, error = statistics.mean(differences), standard_error(differences)
            verdict = "yes" if mean >= -error else "no"
            row = [
                model,
                task,
                spread(list(adamw.values())),
                name,
                spread(list(of_seeds.values())),
                f"{lr:g}" if lr else "",
            ]
            lines.append("| " + " | ".join([*row, f"{mean:+.2f} ± {error:.2f}", verdict]) + " |")
    return "\n".join(lines)


def spread(values: Sequence[float]) -> str:
    """The mean with its standard error."""
    return f"{statistics.mean(values):.2f} ± {standard_error(values):.2f}"


def standard_error(values: Sequence[float]) -> float:
    """Of the mean; NaN for one value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="GLUE", help="the folder with MRPC.zip, RTE.zip and SST-2.zip")
    parser.add_argument(
        "--models", nargs="+", default=["granite-30m", "minilm-l6"], help="folders of encoders with their tokenizers"
    )
    parser.add_argument("--cells", type=Path, default=Path("trainer.jsonl"), help="where cells are recorded")
    parser.add_argument("--tasks", nargs="+", default=["mrpc", "rte", "sst2"])
    parser.add_argument("--optimizers", nargs="+", default=["AdamW", *BICLIP], choices=["AdamW", *BICLIP])
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="train nothing; print the tables of what is recorded")
    arguments = parser.parse_args()
    names = [Path(folder).name for folder in arguments.models]
    ways = itertools.product(arguments.optimizers, arguments.seeds, names, arguments.tasks)
    cells = [
        Cell(name, task, optimizer, lr, seed, arguments.steps, arguments.batch)
        for optimizer, seed, name, task in ways
        for lr in ([None] if optimizer == NOTHING_SET else arguments.rates)
    ]
    if not arguments.table:
        run(cells, arguments, arguments.cells)
    print(summary(recorded(arguments.cells), "accuracy"))
    for metric in ("accuracy", "train_loss"):
        print(f"\n{metric}\n\n" + table(recorded(arguments.cells), metric))


if __name__ == "__main__":
    main()
