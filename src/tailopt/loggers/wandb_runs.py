"""`WandB`: a run as a run of Weights & Biases, by default offline.

Offline, everything is written below a folder, and nothing is sent; `wandb sync FOLDER` sends it later.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tailopt.loggers.protocol import RunStart
from tailopt.loggers.row_numbers import row_numbers, row_texts
from tailopt.optional import require


class WandB:
    """Writes a run for Weights & Biases.

    Args:
        project: its name there.
        folder: below which `wandb` makes its folder; by default the run folder, else the current folder.
        mode: "offline" writes files and sends nothing; "online" needs an account.
        options: further arguments of `wandb.init`, such as tags.

    After a resume the further rounds are a new run of Weights & Biases in the same folder. The trials of a sweep are
    runs of one group.

    Examples:
        >>> from tailopt.loggers import RunStart, WandB
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> logger = WandB("my-project", folder=folder, tags=["first"])
        >>> logger.begin(RunStart(name="first", config={"rounds": 1}))  # as `simulate` does with loggers=[logger]
        >>> logger({"round": 1, "loss": 0.5})
        >>> logger.end()
        >>> len(list(folder.glob("wandb/offline-run-*")))
        1
    """

    def __init__(
        self,
        project: str = "tailopt",
        *,
        folder: str | os.PathLike[str] | None = None,
        mode: str = "offline",
        **options: Any,
    ) -> None:
        self._wandb = require("wandb", "Runs of Weights & Biases need wandb", extra="wandb", at_least="0.20")
        self._project, self._folder, self._mode, self._options = project, folder, mode, options
        self._run: Any = None

    def begin(self, run: RunStart) -> None:
        """Begin a run there; only on node 0."""
        if run.node:
            return
        folder = Path(self._folder or run.folder or ".")
        folder.mkdir(parents=True, exist_ok=True)
        names = {"group": run.name, "name": run.trial} if run.trial else {"name": run.name}
        self._run = self._wandb.init(
            project=self._project,
            dir=str(folder),
            mode=self._mode,
            config={**run.config},
            # without these, wandb takes over the standard output, and prints tables there at the end
            settings=self._wandb.Settings(console="off", silent=True),
            reinit="create_new",  # a run of the user's own, in the same process, stays theirs
            **{**names, **self._options},
        )

    def __call__(self, row: dict[str, Any]) -> None:
        """Log every number and text of a row, with its round as the step."""
        if self._run is not None:
            self._run.log({**row_numbers(row), **row_texts(row)}, step=row["round"])

    def end(self) -> None:
        """Finish the run there."""
        if self._run is not None:
            self._run.finish()
            self._run = None
