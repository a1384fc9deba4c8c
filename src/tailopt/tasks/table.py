"""The tasks by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tailopt.arguments import did_you_mean
from tailopt.tasks import own
from tailopt.tasks.cifar100 import SMALL as CIFAR100_SMALL
from tailopt.tasks.cifar100 import Cifar100
from tailopt.tasks.glue import FORMATS as GLUE
from tailopt.tasks.glue import SMALL as GLUE_SMALL
from tailopt.tasks.glue import Glue
from tailopt.tasks.gradient_noise import GradientNoise
from tailopt.tasks.language import NAMES as LANGUAGE
from tailopt.tasks.language import PRESETS as LANGUAGE_PRESETS
from tailopt.tasks.language import Language
from tailopt.tasks.squad import SMALL as SQUAD_SMALL
from tailopt.tasks.squad import Squad
from tailopt.tasks.synthetic import Synthetic
from tailopt.tasks.task import Task
from tailopt.tasks.translation import NAMES as TRANSLATION
from tailopt.tasks.translation import SMALL as TRANSLATION_SMALL
from tailopt.tasks.translation import named as translation

# name -> the task in its preset "paper"
TASKS: Mapping[str, Callable[..., Task]] = {
    "syntoken": lambda **settings: Synthetic(features="syntoken", **settings),
    "gaussian": lambda **settings: Synthetic(features="gaussian", **settings),
    "gradient-noise": GradientNoise,
    "squad": Squad,
    "cifar100": Cifar100,
    **{f"glue/{which}": partial(Glue, which) for which in GLUE},
    **{f"translation/{name}": partial(translation, name) for name in TRANSLATION},
    **{kind: partial(Language, kind, **usual) for kind, usual in LANGUAGE.items()},
}
# name -> preset -> settings that differ from the preset "paper"
PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "syntoken": {"paper": {}, "small": {"samples": 1000, "dimension": 20}},
    "gaussian": {"paper": {}, "small": {"samples": 1000, "dimension": 20}},
    "gradient-noise": {"paper": {}, "small": {"dimension": 5}},
    "squad": {"paper": {}, "small": SQUAD_SMALL},
    "cifar100": {"paper": {}, "small": CIFAR100_SMALL},
    **{f"glue/{which}": {"paper": {}, "small": GLUE_SMALL} for which in GLUE},
    **{f"translation/{name}": {"paper": {}, "small": TRANSLATION_SMALL} for name in TRANSLATION},
    **LANGUAGE_PRESETS,
}


def task(name: str, preset: str | None = None, **settings: Any) -> Task:
    """Return a task by name, in a preset; settings override those of the preset.

    Args:
        name: in the table, or of a task of your own: "my_task.py:MyTask", "module:MyTask", or an installed one
            (`tailopt.tasks.own`).
        preset: by default the first one, which is "paper" for the tasks of the table.

    Examples:
        >>> task("syntoken", preset="small", noise="cauchy").samples
        1000
    """
    known = presets_of(name)
    preset = next(iter(known)) if preset is None else preset
    if preset not in known:
        raise ValueError(f"Unknown preset: {preset!r}{did_you_mean(preset, known)} {name} has {', '.join(known)}.")
    try:
        if name in TASKS:
            return TASKS[name](**{**known[preset], **settings})
        return own.find(name).build(preset, **settings)
    except TypeError as error:
        if name not in TASKS:
            raise
        raise ValueError(f"Invalid settings for {name}: {error}.") from None


def is_own(name: str) -> bool:
    """Whether a name leads to a task that is not in the table; nothing is loaded."""
    return name not in TASKS and own.leads_to_a_class(name)


def presets_of(name: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the presets of a task, the first one first; raises for a name that leads to no task."""
    if name in TASKS:
        return PRESETS[name]
    if is_own(name):
        return own.find(name).presets
    known = [*TASKS, *own.installed()]
    raise ValueError(
        f"Invalid task: {f'unknown task {name!r}' if name else 'no task is named'}{did_you_mean(name, known)} Give one "
        f"of {', '.join(known)}: --task {known[0]}; or a class of your own: --task my_task.py:MyTask."
    )
