"""Tune the settings of examples/demo.py: every algorithm gets the same number of random settings on two seeds.

    python examples/demo_tuning.py        # writes examples/demo_settings.json; takes some minutes

The demo uses other seeds.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

from tailopt.progress import Progress
from tailopt.studies.convex_cells import HEAVY, ConvexPlan, tune
from tailopt.sweeps.search import best
from tailopt.sweeps.space import settings_at
from tailopt.sweeps.stacked import Batches

ALGORITHMS = (
    "avg-sgd",
    "adam-sgd",
    "avg-l2clip",
    "avg-adam",
    "avg-biclip",
    "adam-biclip",
    "rmsprop-biclip",
    "bi2clip",
)
PLAN = ConvexPlan(algorithms=ALGORITHMS, horizons=(240,))
HERE = Path(__file__).parent


def main() -> None:
    torch.set_num_threads(1)
    rounds = PLAN.horizons[0]
    steps = rounds * PLAN.local_steps
    data = Batches.of(PLAN.task("syntoken", HEAVY), PLAN.tuning, PLAN.nodes, steps, PLAN.batch_size)
    found = {}
    with Progress(True) as bar:
        for number, name in enumerate(ALGORITHMS, 1):
            trial = best(tune(PLAN, name, data), f"error@{rounds}")
            error = math.exp(trial.values[f"error@{rounds}"])
            found[name] = {
                "settings": {key: float(f"{value:.4g}") for key, value in settings_at(trial.point).items()},
                "trial": trial.number,
                "error on the tuning seeds": float(f"{error:.4g}"),
            }
            bar.update(number, len(ALGORITHMS), f"{name}: {error:.3f}")
    record = {
        "command": "python examples/demo_tuning.py",
        "task": f"SynToken, {HEAVY}",
        "rounds": rounds,
        "budget": PLAN.budget,
        "tuning seeds": list(PLAN.tuning),
        "algorithms": found,
    }
    (HERE / "demo_settings.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {HERE / 'demo_settings.json'}")


if __name__ == "__main__":
    main()
