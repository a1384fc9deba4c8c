"""The folders of a run's checkpoints: their names, their order, how they appear and disappear.

    checkpoints/round-000012/            the state after 12 rounds
    checkpoints/round-000012-step-0003/  12 rounds and 3 local steps of the next; sorts after round-000012
    checkpoints/round-000012.old/        was being replaced when a kill came; counts as long as it exists
    checkpoints/.round-000012.4f7a…/     is being written, or was when a kill came; never read

A checkpoint is written in a hidden folder, which gets its name when all of it is on the disk.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from tailopt.arguments import whole_number
from tailopt.records import disk

FOLDER = "checkpoints"

_NAME = re.compile(r"round-(\d{6,})(?:-step-(\d{4,}))?(\.old)?")


def folder_name(round: int, step: int | None) -> str:
    """Return the name of the checkpoint after `round` rounds and `step` local steps of the next.

    Examples:
        >>> folder_name(12, None), folder_name(12, 3)
        ('round-000012', 'round-000012-step-0003')
    """
    whole_number("round", round, low=0, hint="Pass the number of completed rounds.")
    if step is None:
        return f"round-{round:06d}"
    whole_number("step", step, low=1, hint="Leave it out at the end of a round.")
    return f"round-{round:06d}-step-{step:04d}"


def is_checkpoint_name(name: str) -> bool:
    """Whether `folder_name` can have made a name, possibly with ".old" after it."""
    return _NAME.fullmatch(name) is not None


def round_and_step(path: Path) -> tuple[int, int]:
    """Return (completed rounds, local steps of the next round), read from the name of a checkpoint."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def list_checkpoints(run_folder: str | os.PathLike[str]) -> list[Path]:
    """Return the checkpoints of a run, sound or damaged, oldest first."""
    return in_order(Path(run_folder) / FOLDER)


def latest(run_folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest checkpoint of a run, sound or damaged; None if there is none."""
    return next(reversed(list_checkpoints(run_folder)), None)


def describe_last_checkpoint(run_folder: str | os.PathLike[str], last: Path | None) -> str:
    """Return a sentence for the user about where a run can go on from.

    last: the newest checkpoint that is known to be good; None if there is none.

    Examples:
        >>> describe_last_checkpoint("run", Path("run/checkpoints/round-000012-step-0003"))
        'The last good checkpoint is that after round 12 and 3 local steps: run/checkpoints/round-000012-step-0003.'
    """
    if last is None:
        return f"There is no checkpoint in {os.fspath(run_folder)} yet."
    round, step = round_and_step(last)
    after = f"round {round}" + (f" and {step} local steps" if step else "")
    return f"The last good checkpoint is that after {after}: {last}."


def in_order(parent: Path) -> list[Path]:
    """Return the checkpoints in a folder, oldest first; one that was being replaced before its replacement."""
    folders = []
    for path in parent.iterdir() if parent.is_dir() else ():
        if (match := _NAME.fullmatch(path.name)) and path.is_dir():
            round, step, old = match.groups()
            folders.append(((int(round), int(step or 0), old is None), path))
    return [path for _, path in sorted(folders)]


def prune(run_folder: str | os.PathLike[str], keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and what killed writes left behind.

    The newest checkpoint at the end of a round is kept too, however many mid-round checkpoints came after it: a
    different number of nodes can resume only from the end of a round.
    """
    whole_number("keep", keep, low=1, hint="Keep at least the newest.")
    paths = list_checkpoints(run_folder)
    for path in paths:
        if path.suffix == ".old" and path.with_suffix("") in paths:
            disk.remove_folder(path)  # it was replaced; the kill came before its removal
    paths = list_checkpoints(run_folder)
    at_round_end = [path for path in paths if round_and_step(path)[1] == 0]
    for path in paths[:-keep]:
        if path not in at_round_end[-1:]:
            disk.remove_folder(path)
    for leftover in (Path(run_folder) / FOLDER).glob(".round-*"):
        shutil.rmtree(leftover)


def rewind(run_folder: str | os.PathLike[str], round: int, step: int = 0) -> None:
    """Remove later checkpoints: damaged ones that were skipped must not be taken for newer ones after the next write.

    round, step: of the checkpoint from which the run goes on.
    """
    for path in list_checkpoints(run_folder):
        if round_and_step(path) > (round, step):
            disk.remove_folder(path)


def begin_folder(run_folder: str | os.PathLike[str], name: str) -> Path:
    """Create and return a hidden folder in which the checkpoint `name` is to be written."""
    parent = Path(run_folder) / FOLDER
    if not parent.is_dir():
        parent.mkdir(parents=True)
        disk.sync(parent.parent)
    hidden = disk.hidden_path(parent / name)
    hidden.mkdir()
    return hidden


def commit_folder(hidden: Path, path: Path) -> None:
    """Give a finished folder its name.

    A checkpoint of that name is moved to "….old" first, which readers still accept: no kill leaves the run without it.
    """
    old = path.with_name(path.name + ".old")
    if path.exists():
        if old.exists():
            disk.remove_folder(old)
        os.replace(path, old)
    os.replace(hidden, path)
    disk.sync(path.parent)
    if old.exists():
        disk.remove_folder(old)
