"""Tune the settings of examples/demo.py: every algorithm gets as many Sobol points on the same two seeds.

    python examples/demo_tuning.py        # writes examples/demo_settings.json; takes some minutes

The demo uses other seeds.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

import tailopt
from tailopt.studies.search_spaces import SPACES
from tailopt.tasks.synthetic import Synthetic

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
TASK = Synthetic(noise="student-t", df=1.5)
BUDGET, SEEDS, ROUNDS = 128, (100, 101), 240
HERE = Path(__file__).parent


def main() -> None:
    torch.set_num_threads(1)
    found = {}
    for name in ALGORITHMS:
        space = SPACES["regression"].ranges(name)
        best = tailopt.sweep(TASK, name, space=space, budget=BUDGET, seeds=SEEDS, report_seeds=0, rounds=ROUNDS).best
        found[name] = {
            "settings": {key: float(f"{value:.4g}") for key, value in best.settings.items()},
            "point": best.number,
            "error on the tuning seeds": float(f"{best.value:.4g}"),
        }
        print(f"{name}: {best.value:.3f}")
    record = {
        "command": "python examples/demo_tuning.py",
        "task": "SynToken, Student-t, df 1.5",
        "rounds": ROUNDS,
        "budget": BUDGET,
        "tuning seeds": SEEDS,
        "algorithms": found,
    }
    (HERE / "demo_settings.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {HERE / 'demo_settings.json'}")


if __name__ == "__main__":
    main()
