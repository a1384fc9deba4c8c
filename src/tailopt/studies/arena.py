"""Optimizers on a decoder from scratch: by learning rate, batch size and memory, with as many trials for each.

    tuned      five rates each, on seed 100 and held-out text; where the best rate of any optimizer is at an end, the
               ranges of all become one rate longer, each on the side where its best rate lies
    reported   the best rate on other seeds and other text
    checked    AdamW and Muon with twice as many rates: whether their best becomes better

The data, their order, the warm-up and the cosine are the same for all, and so are the tokens of a batch size. Cells
are measured by as many processes as are started with the same command (`shared_cells`), which may be stopped.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tailopt.arguments import check_choice
from tailopt.progress import Progress
from tailopt.records import disk
from tailopt.records.history import decode
from tailopt.studies.arena_optimizers import CONTENDERS, contenders_named
from tailopt.studies.arena_page import draw, report
from tailopt.studies.arena_results import ArenaResults, ArenaRow, Check
from tailopt.studies.arena_training import SIZES, ArenaRun, Setup, seconds_of_a_step, train
from tailopt.studies.runner import RECORD, Grid, as_json, digest, write_results
from tailopt.studies.shared_cells import OutOfTime, TimeLimit, read_shared, run_shared
from tailopt.studies.study import StudyOptions, resolve_device
from tailopt.tasks.corpus import SOURCES, Corpus, load_corpus

SUMMARY = "optimizers on a decoder from scratch, by batch size and memory; half an hour in the preset small"
OPTIONS = ("preset", "data", "tokenizer", "algorithms", "seeds", "device", "precision", "minutes")
RATES = 5
TUNING_SEED = 100
CHECKED = ("adamw", "adamw-0.999", "muon")
FILES = "files.tsv"


@dataclass(frozen=True)
class ArenaPlan:
    """What a study runs.

    Attributes:
        size: a key of `SIZES`.
        amounts: tokens of a step, and of the whole training.
        length: tokens of a block.
        evaluated: blocks that are evaluated.
        at_most: bytes of text that are read, 0 for all.
        contenders: names.
        widenings: how often ranges may become longer.
        absent: contenders of the preset whose package is not installed.
        checked: whether AdamW and Muon are tried with twice as many rates.
    """

    size: str
    amounts: tuple[tuple[int, int], ...]
    length: int = 256
    evaluated: int = 512
    at_most: int = 0
    data: str = SOURCES
    tokenizer: str = ""
    contenders: tuple[str, ...] = tuple(CONTENDERS)
    absent: tuple[str, ...] = ()
    widenings: int = 2
    seeds: tuple[int, ...] = (0, 1, 2)
    checked: bool = True
    device: str = "cpu"
    precision: str = "fp32"

    def setup(self, corpus: Corpus, tokens: int, part: str) -> Setup:
        """What all runs with so many tokens per step share."""
        total = dict(self.amounts)[tokens]
        return Setup.of(
            corpus,
            SIZES[self.size],
            self.length,
            part,
            self.evaluated,
            batch=tokens // self.length,
            steps=total // tokens,
            device=self.device,
            precision=self.precision,
        )

    def check(self) -> None:
        """Raise for a plan that cannot be run."""
        for tokens, total in self.amounts:
            if tokens % self.length or total % tokens:
                raise ValueError(
                    f"Invalid amounts: {tokens} tokens per step of {total}; need a multiple of the length "
                    f"{self.length}, and a whole number of steps."
                )

    def key(self, corpus: Corpus, tokens: int) -> str:
        """A digest of what a run depends on: not of how many runs there are, nor of other batch sizes."""
        names = ("size", "length", "evaluated", "precision")
        facts = {name: getattr(self, name) for name in names}
        text = {"corpus": corpus.digest, "tokens": {part: len(row) for part, row in corpus.parts.items()}}
        return digest({**facts, **text, "amount": [tokens, dict(self.amounts)[tokens]]})


_LARGE = ((1024, 2**22), (8192, 2**24), (65536, 2**26))
# two that cost as much as all others on a CPU, or whose point is memory that nobody counts there
_FEWER = tuple(name for name in CONTENDERS if name not in ("clipped-muon", "biclip-momentum-bf16", "adamw-8bit"))
PRESETS: Mapping[str, ArenaPlan] = {
    "small": ArenaPlan(
        "1M", ((256, 51_200),), length=64, evaluated=128, at_most=4_000_000, contenders=_FEWER, widenings=1,
        seeds=(0, 1, 2, 3, 4), checked=False,
    ),
    "10M": ArenaPlan("10M", _LARGE),
    "30M": ArenaPlan("30M", _LARGE),
    "124M": ArenaPlan("124M", _LARGE),
}  # fmt: skip


@dataclass(frozen=True)
class ArenaCell:
    """One run. tokens: of a step; k: of the rate; seed: `TUNING_SEED` where a rate is tried."""

    contender: str
    tokens: int
    k: float
    seed: int


def run(out: Path, options: StudyOptions) -> Path:
    """Run what is not in `out` yet, and write table.md, results.json, files.tsv and two figures there.

    The presets are "small", a model of 1M parameters on two cores, and "10M", "30M" and "124M" for a GPU. `data` names
    folders, with commas; by default the Python sources of the installed packages.
    """
    preset = options.preset or "small"
    check_choice("preset", preset, tuple(PRESETS))
    plan, device = PRESETS[preset], resolve_device(options.device)
    plan = replace(
        plan,
        data=options.data or plan.data,
        tokenizer=options.tokenizer or "",
        contenders=contenders_named(options.algorithms, plan.contenders),
        absent=() if options.algorithms else tuple(n for n in plan.contenders if not CONTENDERS[n].is_installed),
        seeds=tuple(range(options.seeds)) if options.seeds else plan.seeds,
        device=device,
        precision=options.precision or ("bf16" if device.startswith("cuda") else "fp32"),
    )
    if options.quick:
        tokens = plan.amounts[0][0]
        plan = replace(plan, amounts=((tokens, 4 * tokens),), widenings=0, seeds=(0,), checked=False, evaluated=8)
    return run_plan(
        out, plan, minutes=options.minutes, progress=options.progress, verdicts=not options.quick,
        command=options.command,
    )  # fmt: skip


def run_plan(
    out: Path,
    plan: ArenaPlan,
    *,
    minutes: float | None = None,
    progress: bool = True,
    verdicts: bool = True,
    command: str = "",
) -> Path:
    """Run a plan, or as much of it as there is time for; without `verdicts` nothing is compared."""
    plan.check()
    limit = TimeLimit(minutes)
    corpus = load_corpus(plan.data, plan.tokenizer, plan.at_most)
    out.mkdir(parents=True, exist_ok=True)
    rows = [f"{file.sha256}\t{file.size}\t{file.path}\n" for file in corpus.files]
    disk.replace(out / FILES, "".join(rows).encode())
    left = ""
    with Progress(progress) as bar:
        arena = Arena(plan, corpus, out / RECORD, limit, bar)
        try:
            arena.measure_costs()
            bar.say(arena.cost_text())
            arena.run()
        except OutOfTime as error:
            left = f"{error} {arena.cost_text()}"
            print(left, file=sys.stderr)
    results = arena.results(left)
    write_results(out, results.as_json(), report(results, verdicts), command)
    draw(results, out)
    return out


# --- The runs ---------------------------------------------------------------------------------------------------------


class Arena:
    """All runs of a plan, recorded as they end."""

    def __init__(self, plan: ArenaPlan, corpus: Corpus, record: Path, limit: TimeLimit, bar: Progress) -> None:
        self.plan, self.corpus, self.record = plan, corpus, record
        self._limit, self._bar = limit, bar
        self._seconds: dict[tuple[str, int], float] = {}  # of a run, by contender and tokens of a step

    def measure_costs(self) -> None:
        """Time a few steps of every contender and batch size; the record has them too."""
        grid = Grid[tuple[str, int], float](
            cells=[(name, tokens) for tokens, _ in self.plan.amounts for name in self.plan.contenders],
            key=lambda pair: {"seconds of a step": list(pair), "plan": self._key(pair[1])},
            measure=lambda pair, tick: seconds_of_a_step(self._setup(pair[1], "held-out"), CONTENDERS[pair[0]]),
            label=lambda pair: f"{pair[0]}, {pair[1]} tokens per step, timing",
        )
        steps = {tokens: total // tokens for tokens, total in self.plan.amounts}
        found = run_shared(grid, self.record, self._bar, self._limit, lambda pair: 5.0)
        self._seconds = {pair: seconds * steps[pair[1]] for pair, seconds in found.items()}

    def cost_text(self) -> str:
        """The plan with what it costs: cells that are missing at least, and their time."""
        planned = [cell for tokens, _ in self.plan.amounts for cell in self._least_cells(tokens)]
        recorded = set(self.recorded())
        # which rate the other seeds have is not known before the search has ended
        reported = {(cell.contender, cell.tokens, cell.seed) for cell in recorded if cell.seed != TUNING_SEED}
        missing = [
            cell
            for cell in planned
            if cell not in recorded and (cell.contender, cell.tokens, cell.seed) not in reported
        ]
        minutes = sum(self._seconds.get((cell.contender, cell.tokens), 0.0) for cell in missing) / 60
        each = [f"{tokens} tokens: {self._text_of_costs(tokens)}" for tokens, _ in self.plan.amounts]
        return (
            f"{len(planned)} runs without those of longer ranges; {len(missing)} are left, about {minutes:.1f} minutes "
            f"of one process on {self.plan.device}. Seconds of a run, {'; '.join(each)}."
        )

    def _text_of_costs(self, tokens: int) -> str:
        found = [(name, self._seconds.get((name, tokens))) for name in self.plan.contenders]
        return ", ".join(f"{name} {seconds:.3g}" for name, seconds in found if seconds is not None) or "not known yet"

    def _least_cells(self, tokens: int) -> Iterator[ArenaCell]:
        for name in self.plan.contenders:
            yield from (ArenaCell(name, tokens, k, TUNING_SEED) for k in first_rates(name))
            yield from (ArenaCell(name, tokens, CONTENDERS[name].middle, seed) for seed in self.plan.seeds)

    def run(self) -> None:
        """Tune, report and check every batch size."""
        for tokens, _ in self.plan.amounts:
            ranges = {name: first_rates(name) for name in self.plan.contenders}
            found = self._tuned(tokens, ranges)
            for _ in range(self.plan.widenings):
                if not any(at_end(losses) for losses in found.values()):
                    break
                ranges = {name: longer(found[name]) for name in ranges}
                found = self._tuned(tokens, ranges)
            best = {name: best_rate(losses) for name, losses in found.items()}
            self._measure([ArenaCell(name, tokens, k, seed) for seed in self.plan.seeds for name, k in best.items()])
            if self.plan.checked:
                self._tuned(tokens, {name: doubled(found[name]) for name in CHECKED if name in found})

    def _tuned(self, tokens: int, ranges: Mapping[str, Sequence[float]]) -> dict[str, dict[float, float]]:
        """The loss by rate of every contender."""
        cells = [ArenaCell(name, tokens, k, TUNING_SEED) for name, ks in ranges.items() for k in ks]
        found = self._measure(cells)
        return {
            name: {k: found[ArenaCell(name, tokens, k, TUNING_SEED)].loss for k in ks} for name, ks in ranges.items()
        }

    def _measure(self, cells: Sequence[ArenaCell]) -> dict[ArenaCell, ArenaRun]:
        grid = Grid[ArenaCell, ArenaRun](
            cells=cells,
            key=self._cell_key,
            measure=self._train,
            decode=lambda found: ArenaRun(**{**found, "losses": tuple(found["losses"])}),
            label=lambda cell: (
                f"{cell.contender}, {cell.tokens} tokens per step, rate 10^({cell.k}/2), seed {cell.seed}"
            ),
        )
        # a run takes what its steps take, and the evaluations on the way
        return run_shared(
            grid, self.record, self._bar, self._limit,
            lambda cell: 1.1 * self._seconds.get((cell.contender, cell.tokens), 0.0) + 2.0,
        )  # fmt: skip

    def _train(self, cell: ArenaCell, tick: Callable[[int], None]) -> ArenaRun:
        contender = CONTENDERS[cell.contender]
        setup = self._setup(cell.tokens, "held-out" if cell.seed == TUNING_SEED else "validation")
        return train(setup, contender, contender.rate(cell.k), cell.seed, lambda n: None)

    def _setup(self, tokens: int, part: str) -> Setup:
        return self.plan.setup(self.corpus, tokens, part)

    def _key(self, tokens: int) -> str:
        return self.plan.key(self.corpus, tokens)

    def _cell_key(self, cell: ArenaCell) -> dict[str, Any]:
        settings = CONTENDERS[cell.contender].settings
        return {"arena": asdict(cell), "settings": settings, "plan": self._key(cell.tokens)}

    # --- what is known ---

    def recorded(self) -> dict[ArenaCell, ArenaRun]:
        """Every recorded run of the plan, those of earlier plans with the same cells too."""
        found = {}
        for text, result in read_shared(self.record).items():
            row = decode(json.loads(text))
            if "arena" in row:
                cell = ArenaCell(**row["arena"])
                if cell.tokens in dict(self.plan.amounts) and self._cell_key(cell) == row:
                    found[cell] = ArenaRun(**{**result, "losses": tuple(result["losses"])})
        return found

    def results(self, left: str) -> ArenaResults:
        """What the record holds; left: what is missing, in a sentence, where something is."""
        runs, rows, checks = self.recorded(), [], []
        for tokens, _ in self.plan.amounts:
            for name in self.plan.contenders:
                tuned = {
                    c.k: r for c, r in runs.items() if (c.contender, c.tokens, c.seed) == (name, tokens, TUNING_SEED)
                }
                if len(tuned) < RATES:
                    continue
                by_k = {k: tuned[k].loss for k in sorted(tuned)}
                reported = {
                    c.k: {
                        seed: runs[ArenaCell(name, tokens, c.k, seed)]
                        for seed in self.plan.seeds
                        if ArenaCell(name, tokens, c.k, seed) in runs
                    }
                    for c in runs
                    if (c.contender, c.tokens) == (name, tokens) and c.seed in self.plan.seeds
                }
                # the lattice of whole numbers is the search; rates between them belong to the check
                searched = {k: loss for k, loss in by_k.items() if k == int(k)}
                best = max(reported, key=lambda k: len(reported[k])) if reported else best_rate(searched)
                rows.append(ArenaRow.of(CONTENDERS[name], tokens, searched, best, reported.get(best, {}), tuned[best]))
                if self.plan.checked and name in CHECKED and any(k != int(k) for k in by_k):
                    checks.append(Check(name, tokens, by_k[best], min(by_k.values())))
        return ArenaResults(as_json(self.plan), self.corpus.description, tuple(rows), tuple(checks), left)


# --- Rates ------------------------------------------------------------------------------------------------------------


def first_rates(name: str) -> list[float]:
    """The exponents that an optimizer is first tried with."""
    middle = CONTENDERS[name].middle
    return [middle + i - RATES // 2 for i in range(RATES)]


def best_rate(losses: Mapping[float, float]) -> float:
    """The exponent with the least loss; the smallest where none is finite."""
    return min(losses, key=lambda k: (losses[k], k))


def at_end(losses: Mapping[float, float]) -> bool:
    """Whether the best rate is the smallest or the largest that was tried.

    Examples:
        >>> at_end({-6: 2.0, -5: 1.0}), at_end({-7: 3.0, -6: 2.0, -5: 2.5})
        (True, False)
    """
    return best_rate(losses) in (min(losses), max(losses))


def longer(losses: Mapping[float, float]) -> list[float]:
    """The rates and one more, on the side where the best one lies: by the better neighbour where it is in the middle.

    Examples:
        >>> longer({-6: 2.0, -5: 1.0}), longer({-7: 2.2, -6: 2.0, -5: 2.5})
        ([-6, -5, -4], [-8, -7, -6, -5])
    """
    best, low, high = best_rate(losses), min(losses), max(losses)
    upwards = best - low > high - best
    if best - low == high - best:
        upwards = losses.get(best + 1, math.inf) < losses.get(best - 1, math.inf)
    return [*sorted(losses), high + 1] if upwards else [low - 1, *sorted(losses)]


def doubled(losses: Mapping[float, float]) -> list[float]:
    """Twice as many rates: two more on either side, and those half way between the best one and its neighbours.

    Examples:
        >>> doubled({-7: 2.2, -6: 2.0, -5: 2.5})
        [-9, -8, -7, -6.5, -6, -5.5, -5, -4, -3]
    """
    best, low, high = best_rate(losses), min(losses), max(losses)
    return sorted({*losses, low - 2, low - 1, high + 1, high + 2, best - 0.5, best + 0.5})
