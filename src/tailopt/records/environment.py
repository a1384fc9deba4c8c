"""The environment of a run: versions, processor, threads, devices. Recorded for the reader; nothing depends on it."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def environment() -> dict[str, Any]:
    """Return what a run depends on beside its settings: versions, processor, threads, devices.

    Examples:
        >>> sorted(environment())
        ['cuda', 'instruction_set', 'platform', 'processor', 'python', 'tailopt', 'threads', 'torch']
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        # No room may import the package's root, but it is loaded by the time a run begins.
        "tailopt": str(getattr(sys.modules.get("tailopt"), "__version__", "unknown")),
        "platform": platform.platform(),
        "processor": processor(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "cuda": {"version": torch.version.cuda, "devices": [torch.cuda.get_device_name(i) for i in devices]}
        if devices
        else None,
    }


def commit() -> str:
    """Return the commit of the checkout that this code belongs to, "+changes" behind it where files differ from it.

    Empty for an installed copy. It is a fact for reports, so an error of git counts as none.

    Examples:
        >>> len(commit()) in (0, 7, 15)
        True
    """
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return ""
    try:
        head, changes = (
            subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True)
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return head.stdout[:7] + ("+changes" if changes.stdout.strip() else "")


def processor() -> str:
    """Return the processor's product name; `platform` knows it on some systems only."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for text in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if text.startswith("model name"):
                return text.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
