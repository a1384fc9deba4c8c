"""ctypes loader for the C library. `loaded()` returns it or None; `why_missing()` explains why it is unavailable.

The library lies beside this file. It is loaded by path and never imported, so one build serves every Python and every
torch. `clip` and `flat` of what is loaded are the calls into clip.c and flat.c.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from dataclasses import dataclass
from pathlib import Path

from tailopt.native.calls import InstructionSets
from tailopt.native.clip import ClipCalls
from tailopt.native.flat import FlatCalls

VERSION = 3  # of library.c; a library of another version is refused


@dataclass(frozen=True)
class Library:
    """The loaded library. `instruction_sets`: those that this processor can run, best last."""

    path: Path
    instruction_sets: tuple[str, ...]
    openmp: bool
    clip: ClipCalls
    flat: FlatCalls


def loaded() -> Library | None:
    """The library, loaded once; None if it is unavailable."""
    return _load()[0]


def why_missing() -> str:
    """Why `loaded()` is None, and what to do; empty if it is not."""
    return _load()[1]


@functools.cache
def _load() -> tuple[Library | None, str]:
    remedy = "Install a C compiler and reinstall tailopt-torch."
    candidates = sorted(p for p in Path(__file__).parent.glob("_cpu.*") if p.suffix in (".so", ".pyd", ".dylib"))
    if not candidates:
        return None, f"it was not built: no compiler worked when tailopt-torch was installed. {remedy}"
    path = candidates[0]
    try:
        handle = ctypes.CDLL(str(path))  # after torch: binds to the OpenMP runtime torch has loaded
    except OSError as error:
        return None, f"{path.name} does not load on this {platform.machine()} machine ({error}). {remedy}"
    try:
        version = handle.tailopt_version()
    except AttributeError:
        return None, f"{path.name} is not tailopt's kernel. Reinstall tailopt-torch."
    if version != VERSION:
        return None, f"{path.name} has version {version}, this release needs {VERSION}. Reinstall tailopt-torch."
    handle.tailopt_prepare()
    handle.tailopt_variant.restype = ctypes.c_char_p
    names = (handle.tailopt_variant(i) for i in range(16))
    instruction_sets = InstructionSets(tuple(name.decode() for name in names if name is not None))
    calls = ClipCalls(handle, instruction_sets), FlatCalls(handle, instruction_sets)
    return Library(path, instruction_sets.names, bool(handle.tailopt_openmp()), *calls), ""
