"""How gradients are distributed on MNLI in the first rounds, before and after what an optimizer does to them; claim 12.

    row 1  avg-sgd   minibatch gradients            row 3  bi2clip  the same after the nodes' BiClip
    row 2  bi2clip   minibatch gradients            row 4  adam2    the nodes' Adam steps, over the learning rate

A fixed sample of coordinates is followed through every local step of every node. Noise is what is left of a coordinate
when its mean over the round is taken away; skewness and excess kurtosis are over all of it (a normal law has 0 and 0).
The paper's figure shows lengths, not signed coordinates, so these numbers cannot judge its claim.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tailopt.algorithms import algorithm
from tailopt.clipping.operators import biclip
from tailopt.engines.simulate import simulate
from tailopt.figures.style import pyplot
from tailopt.optional import missing
from tailopt.paper import paper_settings
from tailopt.progress import Progress
from tailopt.records import disk
from tailopt.seeds import generator
from tailopt.studies.comparison import TaskSpec, slug
from tailopt.studies.glue import labels
from tailopt.studies.protocol import Claim, claim_lines, decide
from tailopt.studies.study import StudyOptions, resolve_device

SUMMARY = "gradients on MNLI before and after clipping, by round; minutes in the preset small"
OPTIONS = ("task", "preset", "model", "data", "device")

# the paper's best settings on MNLI; their learning rates are those of its figure
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    name: paper_settings(name, "mnli") for name in ("avg-sgd", "bi2clip", "adam2")
}
ROWS = {
    "avg-sgd gradients": "#0072B2",
    "bi2clip gradients": "#0072B2",
    "bi2clip after BiClip": "#D55E00",
    "adam2 steps / ilr": "#D55E00",
}


@dataclass(frozen=True)
class Plan:
    """How much is followed: `coordinates` of the model through rounds * nodes * local_steps steps."""

    column: TaskSpec
    rounds: int = 5
    nodes: int = 10
    local_steps: int = 8
    coordinates: int = 20_000
    batch_size: int | None = None  # None: the task's
    seed: int = 0


def run(out: Path, options: StudyOptions) -> Path:
    """Follow the gradients of three algorithms, and write table.md, results.json and gradients.png into `out`."""
    (label,) = labels(options.task or "MNLI")[:1]
    preset = options.preset or "paper"
    over = {key: value for key, value in (("pretrained", options.model), ("data", options.data)) if value}
    column = TaskSpec(f"glue/{slug(label).replace('-', '')}", preset, over)
    plan = Plan(column, local_steps=3) if options.small else Plan(column)
    if options.quick:
        plan = Plan(column, rounds=2, nodes=2, local_steps=2, coordinates=500, batch_size=2)
    out.mkdir(parents=True, exist_ok=True)
    followed: dict[str, Followed] = {}
    with Progress(options.progress) as bar:
        each = plan.rounds * plan.nodes * plan.local_steps

        def tick(name: str, steps: int) -> None:
            bar.update(len(followed) * each + steps, len(SETTINGS) * each, name)

        for name in SETTINGS:
            followed[name] = follow(plan, name, resolve_device(options.device), functools.partial(tick, name))
    rows = seen(plan, followed)
    found = summarise(plan, rows)
    claims = None if options.quick else [judge(found)]
    found["claim"] = asdict(claims[0]) if claims else None
    disk.replace(out / "results.json", (json.dumps(found, indent=1) + "\n").encode())
    disk.replace(out / "table.md", report(found, label, claims).encode())
    draw(rows, label, out / "gradients.png")
    return out


@dataclass(frozen=True)
class Followed:
    """Sampled coordinates by local step, in order of rounds, nodes and steps: [steps, coordinates] each."""

    gradients: Tensor
    weights: Tensor  # when the gradient was taken


def follow(plan: Plan, name: str, device: str, tick: Callable[[int], None]) -> Followed:
    """The sampled coordinates of one simulation."""
    problem = plan.column.build("validation")
    model = problem.model(plan.seed).to(device)
    kept = sample(model, plan.coordinates)
    gradients: dict[str, list[Tensor]] = {key: [] for key in kept}
    weights: dict[str, list[Tensor]] = {key: [] for key in kept}
    steps = 0

    def hook(key: str) -> Callable[[Tensor], None]:
        def look(p: Tensor) -> None:
            where = kept[key].to(p.device)
            assert p.grad is not None
            gradients[key].append(p.grad.reshape(-1)[where].float().cpu())
            weights[key].append(p.detach().reshape(-1)[where].float().cpu())

        return look

    def loss(model: torch.nn.Module, batch: Any) -> Tensor:
        nonlocal steps
        steps += 1
        tick(steps)
        return problem.loss(model, batch)

    for key, p in model.named_parameters():
        if key in kept:
            p.register_post_accumulate_grad_hook(hook(key))
    simulate(
        model,
        algorithm(name, **SETTINGS[name]),
        loss=loss,
        data=problem.nodes(plan.seed, plan.nodes),
        rounds=plan.rounds,
        local_steps=plan.local_steps,
        batch_size=plan.batch_size or problem.defaults.batch_size,
        seed=plan.seed,
        progress=False,
        inplace=True,
    )
    used = [key for key in kept if len(gradients[key]) == steps]  # a parameter that the loss never reaches has none
    return Followed(*(torch.cat([torch.stack(rows[key]) for key in used], 1) for rows in (gradients, weights)))


def sample(model: torch.nn.Module, coordinates: int) -> dict[str, Tensor]:
    """Which elements of which trainable parameter are followed: a fixed choice, in proportion to the sizes.

    Examples:
        >>> {key: len(where) for key, where in sample(torch.nn.Linear(9, 10), 10).items()}
        {'weight': 9, 'bias': 1}
    """
    sizes = {key: p.numel() for key, p in model.named_parameters() if p.requires_grad}
    share = min(1.0, coordinates / sum(sizes.values()))
    source = generator(0, "followed coordinates")
    return {key: torch.randint(n, (max(1, round(n * share)),), generator=source) for key, n in sizes.items()}


def seen(plan: Plan, followed: Mapping[str, Followed]) -> dict[str, list[Tensor]]:
    """Row of the figure -> round -> values [steps, coordinates]."""
    clipped = SETTINGS["bi2clip"]
    each = plan.nodes * plan.local_steps

    def by_round(values: Tensor, per: int = each) -> list[Tensor]:
        return [values[t * per : (t + 1) * per] for t in range(plan.rounds)]

    gradients = followed["bi2clip"].gradients
    # a step is the way between two gradients of one node in one round
    weights = followed["adam2"].weights.unflatten(0, (plan.rounds * plan.nodes, plan.local_steps))
    moved = weights.diff(dim=1).flatten(0, 1) / SETTINGS["adam2"]["ilr"]
    tables = (
        by_round(followed["avg-sgd"].gradients),
        by_round(gradients),
        by_round(biclip(gradients, clipped["i_u"], clipped["i_d"])),
        by_round(moved, plan.nodes * (plan.local_steps - 1)),
    )
    return dict(zip(ROWS, tables, strict=True))


def noise(values: Tensor) -> Tensor:
    """What is left of every coordinate when its mean over the steps is taken away.

    Examples:
        >>> noise(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
        tensor([[-1.,  0.],
                [ 1.,  0.]], dtype=torch.float64)
    """
    exact = values.double()
    return exact - exact.mean(0)


def shape(values: Tensor) -> tuple[float, float]:
    """Skewness and excess kurtosis."""
    try:
        from scipy import stats
    except ImportError:
        raise missing("This study needs scipy", "scipy", "studies") from None
    flat = values.flatten().numpy()
    return float(stats.skew(flat)), float(stats.kurtosis(flat))


def summarise(plan: Plan, rows: Mapping[str, Sequence[Tensor]]) -> dict[str, Any]:
    """Skewness and excess kurtosis of the noise, by row and round, and the magnitudes."""
    found: dict[str, Any] = {"plan": asdict(plan), "settings": SETTINGS, "rows": {}}
    for row, by_round in rows.items():
        cells = []
        for values in by_round:
            skewness, kurtosis = shape(noise(values))
            size = values.abs()[values != 0].double()
            middle, top = (float(size.quantile(q)) if 0 < len(size) < 2**24 else math.nan for q in (0.5, 0.999))
            cells.append({"skewness": skewness, "kurtosis": kurtosis, "median": middle, "99.9 %": top})
        found["rows"][row] = cells
    return found


def judge(found: Mapping[str, Any]) -> Claim:
    """Claim 12: shown and never decided, because these statistics are not those of the paper's figure.

    Its fourth row has lengths of Adam's steps, which cannot be negative and so are skewed by nature; here are signed
    coordinates less their mean. And excess kurtosis sees tails, not a bell: noise that piles up at the threshold u has
    short tails too.
    """

    def middle(row: str, what: str) -> float:
        values = sorted(abs(cell[what]) for cell in found["rows"][row])
        return float(values[len(values) // 2])

    before, after = (middle(row, "kurtosis") for row in ("bi2clip gradients", "bi2clip after BiClip"))
    clipped, adam = (middle(row, "skewness") for row in ("bi2clip after BiClip", "adam2 steps / ilr"))
    return decide(
        12,
        "BiClip turns the gradient noise into a bell-shaped distribution; Adam's is skewed.",
        None,
        f"median over rounds: excess kurtosis {before:.3g} before BiClip, {after:.3g} after; skewness {clipped:.3g} "
        f"after BiClip, {adam:.3g} of Adam's steps. These are signed coordinates less their mean, the paper's figure "
        "has lengths; and kurtosis tells short tails, not a bell",
    )


def report(found: Mapping[str, Any], label: str, claims: Sequence[Claim] | None) -> str:
    """The study as a page."""
    plan = found["plan"]
    lines = [f"# Gradients on {label}", "", "Noise by round: skewness / excess kurtosis.", ""]
    lines += ["| | " + " | ".join(f"round {t + 1}" for t in range(plan["rounds"])) + " |"]
    lines += ["| --- |" + " ---: |" * plan["rounds"]]
    for row, cells in found["rows"].items():
        lines.append(f"| {row} | " + " | ".join(f"{c['skewness']:.2f} / {c['kurtosis']:.3g}" for c in cells) + " |")
    lines += ["", "Magnitude of a coordinate: median / 99.9 % quantile.", ""]
    lines += ["| | " + " | ".join(f"round {t + 1}" for t in range(plan["rounds"])) + " |"]
    lines += ["| --- |" + " ---: |" * plan["rounds"]]
    for row, cells in found["rows"].items():
        lines.append(f"| {row} | " + " | ".join(f"{c['median']:.2g} / {c['99.9 %']:.2g}" for c in cells) + " |")
    lines += [
        "",
        f"- {plan['nodes']} nodes, {plan['local_steps']} local steps a round, {plan['coordinates']} coordinates "
        f"followed, seed {plan['seed']}; model {plan['column']['settings'].get('pretrained', 'of the preset')!r}, "
        f"preset {plan['column']['preset']}.",
        "- Settings: "
        + "; ".join(f"{name} " + ", ".join(f"{k} {v:g}" for k, v in s.items()) for name, s in SETTINGS.items())
        + ". The paper's best on MNLI, of roberta-base.",
        "- A coordinate whose gradient is exactly 0 (an embedding of a word that does not occur) is left out of the "
        "magnitudes and of the figure.",
        "",
        *claim_lines(claims),
    ]
    return "\n".join(lines) + "\n"


def draw(rows: Mapping[str, Sequence[Tensor]], label: str, path: Path) -> None:
    """Histograms of magnitudes, a row what is looked at, a column a round."""
    plt = pyplot()
    rounds = len(next(iter(rows.values())))
    figure, axes = plt.subplots(
        len(rows), rounds, figsize=(2.5 * rounds, 2.0 * len(rows) + 0.5), sharex="row", squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for line, (row, by_round) in zip(axes, rows.items(), strict=True):
        sizes = [values.abs()[values != 0].log10() for values in by_round]
        low = min(float(size.min()) if len(size) else 0.0 for size in sizes)
        high = max(float(size.max()) if len(size) else 1.0 for size in sizes)
        for t, (axis, size) in enumerate(zip(line, sizes, strict=True)):
            axis.hist(size.numpy(), bins=60, range=(max(low, high - 9), high + 1e-3), color=ROWS[row], log=True)
            axis.tick_params(labelsize=7)
            if row == next(iter(rows)):
                axis.set_title(f"round {t + 1}", fontsize=9)
        line[0].set_ylabel(row.replace(" ", "\n", 1), fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("log10 of the magnitude", fontsize=8)
    figure.suptitle(f"{label}: coordinates by magnitude; blue: gradients, red: what is applied", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)
