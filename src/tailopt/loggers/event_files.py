"""`TensorBoard`: a run as event files of TensorBoard.

Numbers are written as double-precision scalars, one event per round, so that what TensorBoard shows and exports is
what the history has. The settings are a text, and so are the reasons of exclusions.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tailopt.loggers.protocol import RunStart
from tailopt.loggers.row_numbers import row_numbers, row_texts
from tailopt.optional import require
from tailopt.records.run_config import by_dotted_name

FOLDER = "tensorboard"
SENTENCE = "Event files need tensorboard"
FLUSH_S = 5  # the most that a kill costs
DOUBLE, TEXT = 2, 7  # the types of tensors in event files: DT_DOUBLE and DT_STRING


class TensorBoard:
    """Writes a run into event files; `tensorboard --logdir FOLDER` shows it.

    Args:
        folder: where to; by default the folder `tensorboard` of the run folder. Trials of a sweep have folders of their
            own in it. After a resume TensorBoard hides the rounds that run again.

    Examples:
        >>> import tempfile, torch, tailopt
        >>> from tailopt.loggers import TensorBoard
        >>> folder = tempfile.mkdtemp()
        >>> _ = tailopt.simulate(torch.nn.Linear(2, 1), tailopt.algorithm("avg-sgd", ilr=0.1), nodes=3, rounds=2,
        ...                      loss=lambda model, batch: model(batch).square().mean(), local_steps=1,
        ...                      batches=lambda *_: torch.ones(4, 2), progress=False, loggers=[TensorBoard(folder)])
        >>> [file.name[:19] for file in Path(folder).iterdir()]
        ['events.out.tfevents']
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._writer: Any = None
        self._known: set[str] = set()  # tags whose metadata the file has
        self._closed_at_exit: Any = None
        require("tensorboard", SENTENCE, extra="tensorboard", at_least="2.14")  # before anything begins

    def begin(self, run: RunStart) -> None:
        """Open an event file; only on node 0."""
        if run.node:
            return
        folder = self._folder or (run.folder and run.folder / FOLDER)
        if folder is None:
            raise ValueError("Invalid logger: TensorBoard() has no folder, and the run has none either. Give it one.")
        files = _module("summary.writer.event_file_writer")
        self._writer, self._known = files.EventFileWriter(str(folder / run.trial), flush_secs=FLUSH_S), set()
        # a process that ends without `end`, such as a node, still writes everything
        self._closed_at_exit = weakref.finalize(self, self._writer.close)
        # this hides what an earlier file has of the rounds from here on
        log = _module("compat.proto.event_pb2").SessionLog
        self._add(run.round + 1, session_log=log(status=log.START))
        settings = "\n".join(f"    {name} = {value!r}" for name, value in by_dotted_name(run.config).items())
        self._write(run.round, {}, {"settings": settings})

    def __call__(self, row: dict[str, Any]) -> None:
        """Write every number and text of a row."""
        if self._writer is not None:
            self._write(row["round"], row_numbers(row), row_texts(row))

    def end(self) -> None:
        """Close the event file."""
        if self._closed_at_exit is not None:
            self._closed_at_exit()
        self._writer = None

    def _write(self, step: int, numbers: Mapping[str, float], texts: Mapping[str, str]) -> None:
        tensor = _module("compat.proto.tensor_pb2").TensorProto
        values = [self._value(name, "scalars", tensor(dtype=DOUBLE, double_val=[x])) for name, x in numbers.items()]
        values += [self._value(name, "text", tensor(dtype=TEXT, string_val=[t.encode()])) for name, t in texts.items()]
        summary = _module("compat.proto.summary_pb2").Summary(value=values)
        self._add(step, summary=summary)

    def _add(self, step: int, **content: Any) -> None:
        event = _module("compat.proto.event_pb2").Event(step=step, wall_time=time.time(), **content)
        self._writer.add_event(event)

    def _value(self, tag: str, plugin: str, tensor: Any) -> Any:
        summary = _module("compat.proto.summary_pb2")
        value = summary.Summary.Value(tag=tag, tensor=tensor)
        if tag not in self._known:
            self._known.add(tag)
            value.metadata.plugin_data.plugin_name = plugin
            kind = summary.DATA_CLASS_SCALAR if plugin == "scalars" else summary.DATA_CLASS_TENSOR
            value.metadata.data_class = kind
        return value


def _module(name: str) -> Any:
    return require(f"tensorboard.{name}", SENTENCE, extra="tensorboard")
