"""Fault injection for tests.

Faults hook into public objects; production code contains no test flags.

    injection.py     faults of one node, in rounds of one's choice
    small_disk.py    a disk that can be full
    network.py       nodes whose cables can be pulled
    namespaces.py    the Linux namespaces of both
"""

from tailopt.faults.injection import (
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
from tailopt.faults.namespaces import Unavailable
from tailopt.faults.network import Network
from tailopt.faults.small_disk import Disk

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
