"""Loggers by the names that the command line takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tailopt.arguments import check_choice
from tailopt.loggers.event_files import TensorBoard
from tailopt.loggers.protocol import Logger
from tailopt.loggers.wandb_runs import WandB

LOGGERS: Mapping[str, Callable[[], Logger]] = {"tensorboard": TensorBoard, "wandb": WandB}


def named_loggers(names: str) -> list[Logger]:
    """Return new loggers by names separated by commas; they write into the run folder.

    Examples:
        >>> named_loggers("")
        []
        >>> named_loggers("tensorbord")
        Traceback (most recent call last):
        ValueError: Invalid log: 'tensorbord'; need one of 'tensorboard', 'wandb'.
    """
    chosen = list(dict.fromkeys(filter(None, (name.strip() for name in names.split(",")))))
    for name in chosen:
        check_choice("log", name, tuple(LOGGERS))
    return [LOGGERS[name]() for name in chosen]
