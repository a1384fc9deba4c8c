"""A run folder: what was asked, on what machine, what came of it.

    run/  config.toml         the settings; its presence makes the folder a run
          environment.json    versions, processor, devices
          history.jsonl       one row a round: equal runs have equal files
          times.jsonl         the seconds of each round, apart for that reason
          log.txt             words, with the time of day
          checkpoints/        see `checkpoints.py`

One process writes; any number may read meanwhile. What a kill can interrupt is written so that it can be continued.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import sys
from collections.abc import Collection, Mapping
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tailopt.optional import missing
from tailopt.records import disk, history
from tailopt.records.shards import digest

CONFIG, ENVIRONMENT, HISTORY, TIMES, LOG = "config.toml", "environment.json", "history.jsonl", "times.jsonl", "log.txt"


class Run:
    """One run folder: made by `create`, found again by `open`.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "first"
        >>> run = Run.create(path, {"algorithm": "bi2clip", "rounds": 2}, environment())
        >>> run.append({"round": 1, "loss": 0.5}, {"inner": 0.01})
        >>> run.append({"round": 2, "loss": 0.25}, {"inner": 0.01})
        >>> run.rewind(1)
        >>> Run.open(path).history()
        [{'loss': 0.5, 'round': 1}]
    """

    path: Path
    config: dict[str, Any]
    environment: dict[str, Any]

    def __init__(self, path: Path, config: dict[str, Any], environment: dict[str, Any]) -> None:
        self.path, self.config, self.environment = path, config, environment
        self._last: int | None = None  # the round of the last row; None until this process first writes one

    @classmethod
    def create(cls, path: str | os.PathLike[str], config: Mapping[str, Any], environment: Mapping[str, Any]) -> Run:
        """Make the folder of a new run; one that holds anything already is refused.

        Args:
            path: the folder; it and its parents are made where they are missing.
            config: settings, as TOML can hold them: strings, numbers, booleans, lists (tuples become lists), dicts.
                TOML has no None: such a setting is left out.
            environment: plain values, such as those of `environment()`.
        """
        folder = Path(path)
        _refuse_if_used(folder)
        text = _toml(config)
        facts = json.dumps(history.encode(dict(environment), "environment"), indent=2, sort_keys=True, allow_nan=False)
        folder.mkdir(parents=True, exist_ok=True)
        disk.replace(folder / ENVIRONMENT, facts.encode() + b"\n")
        disk.replace(folder / CONFIG, text.encode())  # last: from here on it is a run
        return cls.open(folder)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Run:
        """The run in a folder. Nothing is written, so that a running one may be looked at."""
        folder = Path(path)
        if not is_run(folder):
            there = history.known(p.name for p in folder.iterdir()) if folder.is_dir() else "no such folder"
            raise FileNotFoundError(
                f"{folder} is not a run folder: it has no {CONFIG} ({there}). Pass the folder that was given as `run`."
            )
        text = (folder / CONFIG).read_text(encoding="utf-8")
        config = _needed("tomllib" if sys.version_info >= (3, 11) else "tomli").loads(text)
        facts = history.decode(json.loads((folder / ENVIRONMENT).read_text(encoding="utf-8")))
        return cls(folder, config, facts)

    def append(self, row: Mapping[str, Any], seconds: Mapping[str, Any]) -> None:
        """Add the row of one round to the history, and its times to theirs.

        The lines are with the system when this returns (a kill of the process loses nothing), and on the disk after
        `sync`.

        Args:
            row: plain values, with `round` greater than that of the row before; see `history.encode`.
            seconds: what took how long, under any names but `round`.
        """
        number = row.get("round")
        if type(number) is not int:
            raise ValueError(f"Invalid row: got round={number!r}; need an int. Say which round the row is about.")
        if "round" in seconds:
            raise ValueError(f"Invalid seconds: got the key 'round' ({seconds['round']!r}); the row has it. Rename it.")
        last = self.last()
        if number <= last:
            raise ValueError(
                f"Invalid row: got round={number}; need more than {last}, the last round in {self.path}. "
                f"Call rewind({number - 1}) first to run it again."
            )
        lines = history.line(row), history.line({**seconds, "round": number})  # both are sound before one is written
        self._last = None  # where the disk is full, what got there is mended and counted before the next row
        for name, data in zip((HISTORY, TIMES), lines, strict=True):
            history.write(self.path / name, data)
        self._last = number

    def last(self) -> int:
        """The round of the last row; -1 where there is none. For the process that writes: torn lines are cut off."""
        if self._last is None:
            for name in (HISTORY, TIMES):
                history.mend(self.path / name)
            self._last = max(history.rounds(self.path / HISTORY), default=-1)
        return self._last

    def history(self) -> list[dict[str, Any]]:
        """All rows, as they were appended; tuples were refused, so they are equal to what was given."""
        return history.read(self.path / HISTORY)

    def times(self) -> list[dict[str, Any]]:
        """The seconds of every round; a kill may have cost the last one."""
        return history.read(self.path / TIMES)

    def rewind(self, round: int) -> None:
        """Drop what came after `round`, to go on from an older checkpoint.

        Each file changes at once. A kill between the two leaves times of rounds that the history has not; the same
        call mends that.
        """
        for name in (HISTORY, TIMES):
            history.rewind(self.path / name, round)
        self._last = None

    def log(self, text: str) -> None:
        """Add a line of words, with the time of day (UTC)."""
        now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
        history.write(self.path / LOG, f"{now}  {text}\n".encode())

    def sync(self) -> None:
        """Wait until history and times are on the disk: before a checkpoint that follows them is written."""
        for name in (HISTORY, TIMES):
            if (self.path / name).is_file():
                disk.sync(self.path / name)
        disk.sync(self.path)


def is_run(path: str | os.PathLike[str]) -> bool:
    """Whether there is a run in a folder, to be opened."""
    return (Path(path) / CONFIG).is_file()


def opened(
    path: str | os.PathLike[str], config: Mapping[str, Any], resume: bool, free: Collection[str] = ("rounds",)
) -> Run:
    """A new run folder, or with `resume` the one that is there, if it is of the same run.

    free: settings that may be others in a resumed run.
    """
    if not (resume and is_run(path)):
        return Run.create(path, config, environment())
    found = Run.open(path)
    for key in sorted(config.keys() | found.config.keys()):
        then, now = found.config.get(key), as_stored(config.get(key))
        if key not in free and then != now and not (then is None and now in ({}, None)):
            raise ValueError(
                f"This run cannot be resumed with another {key}: it is {then!r} in {Path(path)}, and {now!r} here. "
                "Use the same, or another run folder."
            )
    return found


def storable(value: Any) -> Any:
    """A setting as a run folder can hold it: small tensors as lists, what is code by its name.

    Examples:
        >>> storable({"u": torch.tensor([0.5, 1.0]), "betas": (0.9, 0.99), "chooser": max})
        {'u': [0.5, 1.0], 'betas': [0.9, 0.99], 'chooser': 'function max'}
    """
    if isinstance(value, Tensor):
        if value.numel() <= 64:
            return value.tolist()
        return f"tensor of shape {tuple(value.shape)}, sha256 {digest({'value': value})[:16]}"
    if isinstance(value, Mapping):
        return {str(k): storable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [storable(v) for v in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if callable(value) and hasattr(value, "__qualname__"):
        return f"function {value.__qualname__}"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))  # an address is another one in the next process


def as_stored(value: Any) -> Any:
    """A setting as it comes back from a run folder: tuples as lists, and TOML has no None.

    Examples:
        >>> as_stored({"betas": (0.9, 0.99), "radius": None})
        {'betas': [0.9, 0.99]}
    """
    if isinstance(value, Mapping):
        return {k: as_stored(v) for k, v in value.items() if v is not None}
    return [as_stored(v) for v in value] if isinstance(value, list | tuple) else value


def environment() -> dict[str, Any]:
    """What a run depends on beside its settings: versions, processor, threads, devices.

    Examples:
        >>> sorted(environment())
        ['cuda', 'instruction_set', 'platform', 'processor', 'python', 'tailopt', 'threads', 'torch']
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        # The root imports the rooms, not they it; by now it is there.
        "tailopt": str(getattr(sys.modules.get("tailopt"), "__version__", "unknown")),
        "platform": platform.platform(),
        "processor": _processor(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "cuda": {"version": torch.version.cuda, "devices": [torch.cuda.get_device_name(i) for i in devices]}
        if devices
        else None,
    }


def _processor() -> str:
    """The processor's name as it is sold; `platform` knows it on some systems only."""
    facts = Path("/proc/cpuinfo")
    if facts.is_file():
        for text in facts.read_text(encoding="utf-8", errors="replace").splitlines():
            if text.startswith("model name"):
                return text.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _refuse_if_used(folder: Path) -> None:
    """Nothing is ever written over a run; what a kill left of `create` itself is nothing."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; need a folder. Pass another path.")
    there = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
    if there := {name for name in there if name != ENVIRONMENT and not name.startswith((".environment", ".config"))}:
        raise FileExistsError(
            f"{folder} is not empty: it holds {history.known(there)}. Pass resume=True to go on with the run in it, or "
            "another folder for a new run."
        )


def _toml(config: Mapping[str, Any]) -> str:
    """Settings as TOML."""
    return str(_needed("tomli_w").dumps(_settings(dict(config), "config")))


def _settings(value: Any, path: str) -> Any:
    """Settings as TOML can hold them; what it cannot is named."""
    if type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value)
    if type(value) in (list, tuple):
        return [_settings(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict):
        if strange := [key for key in value if type(key) is not str]:
            raise TypeError(f"{path} has the key {strange[0]!r}, {history.kind(strange[0])}; keys are strings.")
        return {key: _settings(item, history.child(path, key)) for key, item in value.items() if item is not None}
    raise TypeError(
        f"{path} is {history.kind(value)}; only bool, int, float, str, lists and dicts can be written to {CONFIG}. "
        "Write its name, or leave it out."
    )


def _needed(package: str) -> ModuleType:
    """A package that only records need."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise missing(f"Run folders need {package}", package.replace("_", "-"), "runs") from error
