"""The environment of a run: versions, processor, threads, devices. Recorded for the reader; nothing depends on it."""

from __future__ import annotations

import platform
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
        "processor": _processor(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "cuda": {"version": torch.version.cuda, "devices": [torch.cuda.get_device_name(i) for i in devices]}
        if devices
        else None,
    }


def _processor() -> str:
    """Return the processor's product name; `platform` knows it on some systems only."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for text in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if text.startswith("model name"):
                return text.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
