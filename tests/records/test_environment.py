"""The environment that a run records is the one it runs in."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import torch

import tailopt
from tailopt.records.environment import environment
from tailopt.records.folder import Run


def test_the_environment_is_this_one(tmp_path: Path) -> None:
    facts = environment()
    assert facts["python"] == platform.python_version()
    assert facts["torch"] == torch.__version__ and facts["tailopt"] == tailopt.__version__
    assert facts["threads"] == torch.get_num_threads() and facts["processor"] and facts["instruction_set"]
    assert (facts["cuda"] is not None) == torch.cuda.is_available()
    run = Run.create(tmp_path / "run", {}, facts)
    assert run.environment == facts == json.loads((run.path / "environment.json").read_text())
