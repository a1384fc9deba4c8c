"""Faults to order, for tests of what survives them: through what is public, with no flag in the code they strike."""

from tailopt.faults.disk import Disk
from tailopt.faults.kit import (
    BitFlip,
    Crash,
    Crashed,
    DiskFull,
    Drop,
    Duplicate,
    Fault,
    Infinite,
    Kill,
    NotANumber,
    Partition,
    Slow,
    Stale,
    Stop,
    inject,
)
from tailopt.faults.network import Network
from tailopt.faults.spaces import Unavailable

__all__ = [
    "BitFlip",
    "Crash",
    "Crashed",
    "Disk",
    "DiskFull",
    "Drop",
    "Duplicate",
    "Fault",
    "Infinite",
    "Kill",
    "Network",
    "NotANumber",
    "Partition",
    "Slow",
    "Stale",
    "Stop",
    "Unavailable",
    "inject",
]
