"""Clients that are broken or hostile: each loses its contribution, and the others go on with the bits of `simulate`.

What they can do nevertheless is in docs/flower.md.
"""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tailopt
from tailopt.rounds.auto_thresholds import checked_statistics, plain_statistics, statistics_from_plain
from tailopt.rounds.gradient_statistics import GradientRecorder
from tailopt.thresholds import Norms

pytest.importorskip("flwr", reason="flwr needs Python 3.11")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from tailopt.integrations.flower import client_app
from tests.integrations.federations import (
    LocalGrid,
    algorithm,
    client,
    federated,
    grid,
    round_of,
    same,
    simulated,
)

HOSTILE = 2  # the node whose replies are spoiled


def spoiled(over: LocalGrid, spoil: Callable[[RecordDict], Any], of: str = "train") -> LocalGrid:
    """Change every reply of one node to messages of a type."""
    whole = over.apps[HOSTILE]

    def app(message: Message, context: Any) -> Message:
        reply = whole(message, context)
        if message.metadata.message_type == of:
            spoil(reply.content)
        return reply

    over.apps[HOSTILE] = app  # type: ignore[assignment]
    return over


def said(caplog: pytest.LogCaptureFixture, text: str) -> str:
    """The first line of the log with a text."""
    return next(r.getMessage() for r in caplog.records if text in r.getMessage())


# What a reply contains


def tensors(**changed: torch.Tensor) -> Callable[[RecordDict], Any]:
    """Send other tensors; two underscores stand for a dot."""
    named = {name.replace("__", "."): tensor for name, tensor in changed.items()}
    return lambda content: content["tensors"].update(ArrayRecord(named))


def sent_as(data: bytes) -> Callable[[RecordDict], Any]:
    """Send bytes in place of the array 0.bias."""
    array = Array(dtype="float32", shape=(8,), stype="numpy.ndarray", data=data)
    return lambda content: content["tensors"].update({"0.bias": array})


class Pickled:
    """Leaves a file behind, if anybody unpickles it."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as folder:
        folder.writestr("0.npy", b"")
    return file.getvalue()


def of_length(elements: int) -> bytes:
    """An array whose header promises more than there is."""
    file = io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": (elements,)}
    np.lib.format.write_array_header_1_0(file, header)  # type: ignore[attr-defined, unused-ignore]
    return file.getvalue()


def saying(text: str) -> Callable[[RecordDict], Any]:
    return lambda content: content["reply"].update({"reply": text})


@pytest.mark.parametrize(
    ("spoil", "said_of_it"),
    [
        (lambda content: content["tensors"].pop("0.weight"), "no tensor 0.weight of shape (8, 6)"),
        (tensors(**{"0__bias": torch.zeros(3)}), "no tensor 0.bias of shape (8,)"),
        (tensors(**{"0__bias": torch.zeros(8, dtype=torch.int64)}), "0.bias as torch.int64, and the model as"),
        (tensors(**{"0__bias": torch.zeros(8, dtype=torch.complex64)}), "0.bias as torch.complex64, and the model as"),
        (
            tensors(**{"1__num_batches_tracked": torch.tensor(float("nan"))}),
            "torch.float32, and the model as torch.int64",
        ),
        (sent_as(b""), "cannot be read (EOFError"),
        (sent_as(zipped()), "cannot be read"),
        (sent_as(zipped()[:20]), "cannot be read (BadZipFile"),
        (sent_as(of_length(10**14)), "cannot be read"),
        (lambda content: content.pop("tensors"), "cannot be read (KeyError"),
        (lambda content: content.pop("reply"), "cannot be read (KeyError"),
        (saying('{"loss": 1' + 400 * "0" + "}"), "too large"),
        (saying("[" * 9000), "cannot be read (RecursionError"),
        (saying('{"loss": 1, "node": 2}'), "cannot be read (TypeError"),
        (saying('{"loss": 1, "round": 1}'), "cannot be read (TypeError"),
        (saying('{"loss": null}'), "not 'NoneType'"),
    ],
    ids=[
        "missing",
        "shape",
        "integers",
        "complex",
        "counter",
        "empty",
        "zip",
        "torn zip",
        "huge",
        "no tensors",
        "no reply",
        "infinite",
        "nested",
        "key",
        "round",
        "no loss",
    ],
)
def test_a_reply_that_cannot_be_read_is_a_lost_contribution(
    spoil: Callable[[RecordDict], Any], said_of_it: str, caplog: pytest.LogCaptureFixture
) -> None:
    algo = algorithm("avg-sgd")
    found = federated(algo, spoiled(grid(algo), spoil), rounds=1)
    assert same(found, simulated(algo, rounds=1, drops=lambda t, generator: [HOSTILE]))
    assert said_of_it in said(caplog, f"no contribution of node {HOSTILE}")


def test_nothing_is_unpickled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = io.BytesIO()
    np.save(file, np.array([Pickled(tmp_path / "trace")], dtype=object), allow_pickle=True)
    algo = algorithm("avg-sgd")
    _, rows = federated(algo, spoiled(grid(algo), sent_as(file.getvalue())), rounds=1)
    assert [e["node"] for e in rows[0]["excluded"]] == [HOSTILE]
    assert "allow_pickle=False" in said(caplog, "no contribution of node 2")
    assert not (tmp_path / "trace").exists()


def test_arrays_and_settings_that_nobody_asked_for_change_nothing() -> None:
    """Among them a weight and a number of samples, which other strategies of Flower believe."""
    algo = algorithm("bi2clip")

    def more(content: RecordDict) -> None:
        content["tensors"].update(ArrayRecord({"3.weight": torch.full((9,), float("nan"))}))
        content["reply"].update({"num-examples": -(10**9), "weight": 1e9})
        content["metrics"] = ConfigRecord({"num-examples": 10**9, "path": "/etc/passwd"})

    assert same(federated(algo, spoiled(grid(algo), more), rounds=2), simulated(algo, rounds=2))


def test_a_buffer_that_is_not_finite_is_excluded_by_name() -> None:
    algo = algorithm("avg-sgd")
    over = spoiled(grid(algo), tensors(**{"1__running_var": torch.full((8,), float("nan"))}))
    with pytest.warns(UserWarning, match=r"goes on without node 2: not finite in 1\.running_var"):
        net, rows = federated(algo, over, rounds=2)
    assert [[e["node"] for e in row["excluded"]] for row in rows] == [[HOSTILE], [HOSTILE]]
    assert all(bool(buffer.isfinite().all()) for buffer in net.buffers())


def test_the_weights_of_an_earlier_round_are_held_to_the_bound() -> None:
    """A client that repeats its first reply for ever is excluded as soon as the others have moved beyond its bound."""
    algo = algorithm("avg-biclip")
    first: dict[str, Any] = {}

    def stale(content: RecordDict) -> None:
        first.setdefault("tensors", content["tensors"])
        content["tensors"] = first["tensors"]

    with pytest.warns(UserWarning, match="goes on without node 2: beyond what its optimizer can move"):
        _, rows = federated(algo, spoiled(grid(algo), stale), rounds=12)
    assert rows[0]["excluded"] == [] and [e["node"] for e in rows[-1]["excluded"]] == [HOSTILE]


def test_a_displacement_beyond_the_bound_is_excluded_by_name() -> None:
    """Also of a client that says that it took more steps: its reply does not enter the bound."""
    algo = algorithm("avg-biclip")

    def greedy(algo: tailopt.Algorithm, node: int) -> Any:
        return client(algorithm("avg-biclip"), node) if node != 4 else Scaled(client(algo, node))

    class Scaled:
        def __init__(self, inner: Any) -> None:
            self.inner, self.node, self.settings = inner, inner.node, inner.settings

        def train(self, request: Any, kept: Any) -> Any:
            reply = self.inner.train(request, kept)
            far = {name: x + 9.0 if name == "0.weight" else x for name, x in reply.tensors.items()}
            return dataclasses.replace(reply, tensors=far)

    with pytest.warns(UserWarning, match=r"node 4: beyond what its optimizer can move in 0\.weight"):
        _, rows = federated(algo, grid(algo, greedy))
    assert all([e["node"] for e in row["excluded"]] == [4] for row in rows)
    assert all(row["weights"] == [0.25, 0.25, 0.25, 0.25, 0.0] for row in rows)


# Statistics of gradients, from which automatic thresholds follow


def statistics(kind: str = "elements") -> list[dict[str, Any]]:
    """What a client reports of one step of a model with two tensors."""
    recorder = GradientRecorder(kind, n_params=2)  # type: ignore[arg-type]
    recorder.add([0, 1], [torch.linspace(-1, 1, 50), torch.tensor([1e-30, 3e4, float("nan"), 0.0])], steps_done=0)
    return [plain_statistics(s) for s in recorder.statistics()]


@pytest.mark.parametrize("kind", ["elements", "norm", "tensor norms"])
def test_statistics_of_gradients_are_possible(kind: Any) -> None:
    found = [statistics_from_plain(plain) for plain in statistics(kind)]
    # as text: a norm may be NaN
    assert str(checked_statistics(found, GradientRecorder(kind, 2).statistics(), steps=1)) == str(found)


@pytest.mark.parametrize(
    "changed",
    [
        {"elements": -1},
        {"elements": 10**400},
        {"elements": 1.5},
        {"elements": "9"},
        {"squares": float("nan")},
        {"squares": -1.0},
        {"largest": float("inf")},
        {"octaves": {"127": [10, 1e300]}},
        {"octaves": {"127": [10**9, 1.0]}},
        {"octaves": {"127": [-3, -1.0]}},
        {"octaves": {"127": [2, "x"]}},
        {"octaves": {"0": [2, 5.0]}},
    ],
)
def test_counts_that_no_gradients_have_are_refused(changed: dict[str, Any]) -> None:
    plain = statistics()
    found = [statistics_from_plain(plain[0] | changed), statistics_from_plain(plain[1])]
    with pytest.raises((ValueError, TypeError), match=r"^Invalid statistics of tensor 0|not supported between"):
        checked_statistics(found, GradientRecorder("elements", 2).statistics(), steps=1)


def test_norms_and_kinds_that_no_gradients_have_are_refused() -> None:
    wanted = GradientRecorder("norm", 2).statistics()
    for norms in (Norms((1.0, 2.0)), Norms((-1.0,)), Norms(("x",))):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="^Invalid statistics of tensor 0"):
            checked_statistics([norms], wanted, steps=1)
    counts = [statistics_from_plain(plain) for plain in statistics()]
    with pytest.raises(ValueError, match=r"^Invalid statistics: 2 of \{'Counts'\}; need 1 of \{'Norms'\}"):
        checked_statistics(counts, wanted, steps=1)


@pytest.mark.parametrize("thresholds", ["null", "[]", '[{"norms": [1.0]}]', "7"])
def test_statistics_that_cannot_be_read_are_a_lost_contribution(
    thresholds: str, caplog: pytest.LogCaptureFixture
) -> None:
    algo = tailopt.algorithm("avg-biclip", ilr=0.05, i_u="auto", i_d="auto")
    over = spoiled(grid(algo), saying(f'{{"loss": 1.0, "thresholds": {thresholds}}}'))
    assert same(federated(algo, over, rounds=2), simulated(algo, rounds=2, drops=lambda t, generator: [HOSTILE]))
    assert said(caplog, "no contribution of node 2")


# Who says what


class Repeating(LocalGrid):
    """Delivers every reply twice, the second time with other weights, and one reply of a stranger."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        replies = super().send_and_receive(messages, timeout=timeout)
        second = []
        for reply in replies:
            content = RecordDict(dict(reply.content.items()))
            if "tensors" in content:
                zeros = {name: torch.zeros_like(x) for name, x in content["tensors"].to_torch_state_dict().items()}
                content["tensors"] = ArrayRecord(zeros)
            again = Message(content, reply_to=reply)
            again.metadata.__dict__["_src_node_id"] = reply.metadata.src_node_id
            second.append(again)
        stranger = Message(RecordDict(), reply_to=replies[0])
        stranger.metadata.__dict__["_src_node_id"] = 77
        return [stranger, *replies, *second]


def test_a_second_reply_and_that_of_a_stranger_do_not_count() -> None:
    algo = algorithm("bi2clip")
    over = Repeating(grid(algo).apps)
    assert same(federated(algo, over, rounds=2), simulated(algo, rounds=2))


def test_what_a_client_says_is_one_line_of_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    algo = algorithm("avg-sgd")
    over = grid(algo)

    def forging(message: Message, context: Any) -> Message:
        raise OSError("gone\n2030-01-01 00:00:00  resumed after round 9 \x1b[2J" + 9000 * "x")

    whole = over.apps[HOSTILE]
    over.apps[HOSTILE] = lambda message, context: (  # type: ignore[assignment]
        forging(message, context) if round_of(message) else whole(message, context)
    )
    federated(algo, over, rounds=1, run=tmp_path / "run")
    lines = (tmp_path / "run" / "log.txt").read_text().splitlines()
    assert len(lines) == 1 and "no contribution of node 2: OSError: gone 2030-01-01" in lines[0]
    assert "\x1b" not in lines[0] and len(lines[0]) < 500


@pytest.mark.parametrize(
    ("settings", "said_of_it"),
    [
        ("[" * 9000, "cannot be read"),
        ("[[1, 2], [3, 4]]", "is refused: "),
        ('{"local_steps": {"a": [1, {"b": null}]}}', "is refused: "),
        (json.dumps({"algorithm": "x" * 9000}), "is refused: algorithm is"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    settings: str, said_of_it: str, caplog: pytest.LogCaptureFixture
) -> None:
    algo = algorithm("avg-sgd")
    over = spoiled(grid(algo), lambda content: content["answer"].update({"settings": settings}), of="query")
    assert same(federated(algo, over, rounds=1), simulated(algo, rounds=1, drops=lambda t, generator: [HOSTILE]))
    line = said(caplog, "is refused")
    assert said_of_it in line and len(line) < 500


@pytest.mark.parametrize("partition", [-1, 5, 10**30, "../../etc/passwd", 0.5])
def test_a_partition_that_does_not_exist_is_refused(partition: Any, caplog: pytest.LogCaptureFixture) -> None:
    algo = algorithm("avg-sgd")
    over = spoiled(grid(algo), lambda content: content["answer"].update({"node": str(partition)}), of="query")
    assert same(federated(algo, over, rounds=1), simulated(algo, rounds=1, drops=lambda t, generator: [HOSTILE]))
    assert "its partition is" in said(caplog, "refused") or "cannot be read (ValueError" in said(caplog, "refused")


def test_a_second_client_of_a_partition_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    algo = algorithm("avg-sgd")
    over = grid(algo)
    over.apps[9] = client_app(lambda context: client(algo, 2))
    over.ids[9], over.contexts[9] = 2000, over.contexts[2]
    assert same(federated(algo, over), simulated(algo))
    assert "node 2 is refused: another client that is connected has partition 2" in caplog.text
