"""`tailopt doctor`: what this installation has, what it lacks, and the command that adds it."""

from __future__ import annotations

import argparse
import os
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tailopt.cli.overrides import Overrides
from tailopt.cli.tables import print_table
from tailopt.clipping.dispatch import which
from tailopt.clipping.reference import ClipByValue, StepHyperparameters
from tailopt.native import library
from tailopt.optional import DISTRIBUTION, install_command
from tailopt.records.environment import environment

EXAMPLE = """\
  tailopt doctor"""
# A line of a distribution's requirements, such as: rich>=13; extra == "runs"
REQUIREMENT = re.compile(r"^(?P<name>[\w.-]+)(?:\[(?P<extras>[\w,-]+)\])?(?P<version>[^;]*)(?:;(?P<marker>.*))?$")


def add(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "doctor",
        help="what this installation has, what it lacks, and the command that adds it",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="tailopt doctor",
        description="Show versions, kernels with the reason for their choice, threads, GPUs and optional packages.",
        epilog=f"example:\n{EXAMPLE}",
    )
    parser.set_defaults(command=command, options=None)


def command(arguments: argparse.Namespace, overrides: Overrides) -> int:
    """Print what there is."""
    print_table("versions", ["what", "which"], versions())
    print()
    print_table("kernels of BiClip and L2Clip", ["tensors", "kernel", "why"], kernels())
    if reason := library.why_missing():
        print(f"There is no C kernel: {reason}")
    print()
    print_table("processors", ["what", "how many"], processors())
    print()
    rows, missing = extras()
    print_table("optional packages", ["extra", "package", "needs", "has"], rows)
    for line in missing:
        print(line)
    print(f"\nwrote nothing; {'something optional is missing' if missing else 'nothing is missing'}")
    return 0


def versions() -> list[list[Any]]:
    """Versions, and where the library is."""
    facts = environment()
    rows = [[key, facts[key]] for key in ("tailopt", "torch", "python", "platform")]
    return [*rows, ["folder", str(Path(__file__).resolve().parents[1])]]


def kernels() -> list[list[Any]]:
    """Which kernel a step takes for usual tensors, and why."""
    rows = []
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    hparams = StepHyperparameters(ClipByValue(1.0, 0.0), lr=0.1)
    for device in devices:
        for dtype in (torch.float32, torch.bfloat16):
            p = torch.zeros(8, dtype=dtype, device=device)
            choice = which(p, torch.ones_like(p), hparams)
            rows.append([f"{str(dtype).removeprefix('torch.')} on {device}", choice.kernel.name, choice.why])
    return rows


def processors() -> list[list[Any]]:
    """Cores, threads and GPUs; of what is not used, why."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    chosen = os.environ.get("OMP_NUM_THREADS")
    why = f"OMP_NUM_THREADS={chosen}" if chosen else "torch's choice; OMP_NUM_THREADS changes it"
    rows: list[list[Any]] = [["cores", cores], ["threads of torch", f"{torch.get_num_threads()} ({why})"]]
    rows.append(["instruction set", environment()["instruction_set"]])
    loaded = library.loaded()
    if loaded is not None:
        rows.append(
            ["of the C kernel", f"{', '.join(loaded.instruction_sets)}; {'' if loaded.openmp else 'no '}OpenMP"]
        )
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return [*rows, ["GPUs", ", ".join(gpus)]]
    build = f"torch was built for CUDA {torch.version.cuda}, and sees no device"
    return [*rows, ["GPUs", f"none: {build if torch.version.cuda else 'torch was built without CUDA'}"]]


def extras() -> tuple[list[list[Any]], list[str]]:
    """The packages of every extra with the version that is here, and a line for each extra that lacks some."""
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return [], [
            f"{DISTRIBUTION} is not installed, only on Python's path: its extras are not known. "
            f"{install_command(DISTRIBUTION, 'runs')}"
        ]
    rows, lacking = [], dict[str, list[str]]()
    for line in lines:
        found = REQUIREMENT.match(line)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", (found and found["marker"]) or "")
        if found is None or extra is None or extra[1] in ("dev", "docs", "test") or found["name"] == DISTRIBUTION:
            continue
        if _only_for_older_python(found["marker"]):
            continue
        here = _version(found["name"])
        fits = here is not None and at_least(here, found["version"])
        rows.append([extra[1], found["name"], found["version"].strip(), here or "-"])
        if not fits:
            lacking.setdefault(extra[1], []).append(found["name"])
    missing = [
        f"The extra {extra} lacks {', '.join(names)}: {install_command(' '.join(names), extra)}"
        for extra, names in lacking.items()
    ]
    return rows, missing


def at_least(version: str, needed: str) -> bool:
    """Whether a version is at least the one that a requirement has after >=; other conditions are pip's business.

    Examples:
        >>> at_least("13.9.4", ">=13"), at_least("2.10", ">=2.9"), at_least("0.3", ">=0.4"), at_least("1.0", "")
        (True, True, False, True)
    """
    low = re.search(r">=\s*([\d.]+)", needed)
    return low is None or _numbers(version) >= _numbers(low[1])


def _numbers(version: str) -> list[int]:
    leading = re.match(r"[\d.]*", version)
    return [int(part) for part in (leading[0] if leading else "").split(".") if part]


def _only_for_older_python(marker: str) -> bool:
    below = re.search(r"python_version < ['\"](\d+)\.(\d+)['\"]", marker)
    return below is not None and sys.version_info >= (int(below[1]), int(below[2]))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
