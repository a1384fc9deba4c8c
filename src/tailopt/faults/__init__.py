"""Faults to order, for tests of what survives them: through what is public, with no flag in the code they strike."""

from tailopt.faults.kit import BitFlip, Duplicate, Fault, Infinite, Kill, NotANumber, Slow, Stale, Stop, inject

__all__ = ["BitFlip", "Duplicate", "Fault", "Infinite", "Kill", "NotANumber", "Slow", "Stale", "Stop", "inject"]
