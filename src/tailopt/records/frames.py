"""A run folder as data frames of pandas: `load`.

history     a row per round: loss, metrics, how many took part
nodes       a row per round and participant: local steps, weight, why it did not count
tensors     a row per round and tensor: what the gradients looked like, where that was recorded
times       a row per round: seconds by phase
settings    a series: config.toml by dotted names
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailopt.optional import require
from tailopt.records.folder import Run
from tailopt.records.run_config import by_dotted_name

if TYPE_CHECKING:
    from pandas import DataFrame, Series

_NODE_COLUMNS = ("drawn", "steps", "weight", "excluded", "tensor", "value", "bound")


@dataclass(frozen=True)
class RunFrames:
    """A run as data frames of pandas; `load` returns it.

    Attributes:
        path: of the run folder.
        history: by `round`: `loss`, `metrics.NAME`, `participants` and `excluded` (how many), and where thresholds are
            "auto" `thresholds.inner.u` and the like, with a number behind them where every tensor has its own.
        nodes: by `round` and `node`: how often it was `drawn`, its local `steps`, its `weight` in the mean, and where
            it did not count the reason (`excluded`), the `tensor`, the `value` and the `bound`, else missing values.
        tensors: by `round` and `tensor`, from `simulate(statistics=True)`: `elements`, `zero`, `below` (raised to d),
            `above` (cut to u), `nonfinite`, `squares`, `largest`; with "histograms" also `octaves.-7` and the like, the
            coordinates from 2^-7 to 2^-6, and the last `u` and `d`. Empty where nothing was counted.
        times: by `round`, in seconds; `round_seconds` is the whole round. Rounds whose times were lost are missing.
        settings: config.toml, by dotted names such as `algorithm.ilr`; its name is that of the folder.
        environment: versions, processor, devices.
    """

    path: Path
    history: DataFrame = field(repr=False)
    nodes: DataFrame = field(repr=False)
    tensors: DataFrame = field(repr=False)
    times: DataFrame = field(repr=False)
    settings: Series[Any] = field(repr=False)
    environment: Mapping[str, Any] = field(repr=False)


def load(run: str | os.PathLike[str]) -> RunFrames:
    """Read a run folder into data frames of pandas. Nothing is written, so it is safe while the run goes on.

    Settings and history are checked as for a resume: a file that differs from what was written raises an error that
    names it.

    Args:
        run: the folder that was given to `simulate` or `NestedOptimizer` as `run`, or to the command line as `--out`.

    Raises:
        FileNotFoundError: the folder holds no run.
        RuntimeError: a file is damaged, or written by a newer version.

    Examples:
        >>> import tempfile, torch, tailopt
        >>> folder = tempfile.mkdtemp()
        >>> loss = lambda model, batch: (model(batch) - 1).square().mean()
        >>> _ = tailopt.simulate(torch.nn.Linear(2, 1), tailopt.algorithm("avg-sgd", ilr=0.1), loss=loss,
        ...                      batches=lambda *_: torch.ones(4, 2), nodes=3, rounds=2, local_steps=5, run=folder,
        ...                      progress=False)
        >>> run = tailopt.records.load(folder)
        >>> run.history["participants"].to_dict(), run.nodes["steps"].sum(), run.settings["algorithm.ilr"]
        ({1: 3, 2: 3}, np.int64(30), 0.1)
        >>> list(run.nodes.loc[2].index), float(run.nodes.loc[(2, 0), "weight"])
        ([0, 1, 2], 0.3333333333333333)
    """
    pandas = require("pandas", "Data frames need pandas", extra="frames", at_least="2")
    opened = Run.open(run)
    rows = opened.history()
    times = opened.times()
    settings = by_dotted_name(opened.config)

    def frame(records: Iterable[Mapping[str, Any]], index: Sequence[str], columns: Sequence[str] = ()) -> DataFrame:
        listed = list(records)
        names = None if listed else [*index, *columns]
        table: DataFrame = pandas.DataFrame(listed, columns=names).set_index(list(index))
        return table

    return RunFrames(
        opened.path,
        history=frame(map(_history_record, rows), ["round"], ["loss", "participants", "excluded"]),
        nodes=frame(_node_records(rows), ["round", "node"], _NODE_COLUMNS),
        tensors=frame(_tensor_records(rows), ["round", "tensor"]),
        times=frame(times, ["round"], ["round_seconds"]),
        settings=pandas.Series(settings, name=opened.path.name, dtype=object).rename_axis("setting"),
        environment=opened.environment,
    )


def _history_record(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the history frame has of a round."""
    counts = {"participants": len({*row["participants"]}), "excluded": len({e["node"] for e in row["excluded"]})}
    more = {key: row[key] for key in ("metrics", "thresholds") if key in row}
    flat = dict(_flat(more))
    return {"round": row["round"], "loss": row["loss"], **counts, **flat}


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested values with their dotted names; None and empty tables have none."""
    if isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in items:
            yield from _flat(part, f"{name}.{key}" if name else str(key))
    elif value is not None:
        yield name, value


def _node_records(rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield what the frame of nodes has; a node that was drawn twice has one row, with both its weights."""
    for row in rows:
        excluded = {entry["node"]: entry for entry in row["excluded"]}
        drawn, of_node = row["participants"], dict[int, dict[str, Any]]()
        all_steps = row.get("steps", [None] * len(drawn))  # rows of the first version lack it
        for node, steps, weight in zip(drawn, all_steps, row["weights"], strict=True):
            entry = excluded.get(node, {})
            record = of_node.setdefault(
                node, {"round": row["round"], "node": node, "drawn": 0, "steps": steps, "weight": 0.0}
            )
            record |= {"excluded": entry.get("reason"), **{key: entry.get(key) for key in ("tensor", "value", "bound")}}
            record["drawn"] += 1
            record["weight"] += weight
        yield from of_node.values()


def _tensor_records(rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        for name, counts in row["statistics"].items():
            yield {"round": row["round"], "tensor": name, **dict(_flat(counts))}
