"""The section [run] has the arguments of `simulate`."""

from __future__ import annotations

import dataclasses
import inspect

import tailopt
from tailopt.cli.run_settings import RunSettings, is_switch


def test_settings_are_the_arguments_of_simulate() -> None:
    """One name from the command line to the library, with the same default."""
    parameters = inspect.signature(tailopt.simulate).parameters
    made_here = {"model", "algorithm", "loss", "data", "batches", "schedules", "evaluate"}
    other = {"run", "resume", "loggers", "progress", "inplace", "describe"}
    own = {field.name: field.default for field in dataclasses.fields(RunSettings)}
    assert own.keys() == parameters.keys() - made_here - other
    for name, default in own.items():
        if name not in ("rounds", "weights"):  # of the task; equal, which is None there
            assert parameters[name].default == default, name


def test_switches() -> None:
    assert [field.name for field in dataclasses.fields(RunSettings) if is_switch(field.name)] == [
        "average",
        "guard",
        "statistics",
    ]
    assert not is_switch("nothing")
