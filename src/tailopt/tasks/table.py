"""The tasks by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tailopt.tasks.gradient_noise import GradientNoise
from tailopt.tasks.synthetic import Synthetic
from tailopt.tasks.task import Task

# name -> the task in its preset "paper"
TASKS: Mapping[str, Callable[..., Task]] = {
    "syntoken": lambda **settings: Synthetic(features="syntoken", **settings),
    "gaussian": lambda **settings: Synthetic(features="gaussian", **settings),
    "gradient-noise": GradientNoise,
}
# name -> preset -> what differs
PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "syntoken": {"paper": {}, "small": {"samples": 1000, "dimension": 20}},
    "gaussian": {"paper": {}, "small": {"samples": 1000, "dimension": 20}},
    "gradient-noise": {"paper": {}, "small": {"dimension": 5}},
}


def task(name: str, preset: str = "paper", **settings: Any) -> Task:
    """A task by name, in a preset, with settings of its own over that.

    Examples:
        >>> task("syntoken", preset="small", noise="cauchy").samples
        1000
    """
    if name not in TASKS:
        raise ValueError(f"Unknown task: {name!r}; need one of {', '.join(TASKS)}.")
    if preset not in PRESETS[name]:
        raise ValueError(f"Unknown preset: {preset!r}; {name} has {', '.join(PRESETS[name])}.")
    try:
        return TASKS[name](**{**PRESETS[name][preset], **settings})
    except TypeError as error:
        raise ValueError(f"Invalid settings for {name}: {error}.") from None
