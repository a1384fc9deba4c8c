"""A run that was stopped and resumed has the bits of one that never was: whatever stopped it, and wherever.

What is compared are the files: the history, and the last checkpoint with weights, buffers, outer state, average, kept
inner states and counters. Run as a script, this file is a server that forks a process for every run it is asked for,
so that torch is imported once.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import tailopt
from tailopt.records import checkpoints
from tailopt.records.folder import Run

NODES, ROUNDS, STEPS = 4, 5, 3
ROOT = Path(__file__).parents[2]


class Net(torch.nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(
            torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1, bias=False)
        )


class Stop(Exception):
    pass


def squares(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]).squeeze(-1) - batch[1]).square().mean()


def batch(node: int, round: int, step: int, generator: torch.Generator) -> Any:
    x = torch.randn(5, 3, generator=generator)
    return x, x.sum(-1) + node + random.random() + float(torch.rand(()))


def parts() -> list[TensorDataset]:
    source = torch.Generator().manual_seed(0)
    sizes = (10, 7, 6, 11)  # with batches of 4, passes end with partial ones, and not where rounds do
    return [TensorDataset(torch.randn(n, 3, generator=source), torch.randn(n, generator=source)) for n in sizes]


def noisy(model: torch.nn.Module) -> dict[str, Any]:
    return {"weight": model[0].weight.square().sum(), "luck": random.random() + float(torch.rand(()))}


def settings(case: str) -> dict[str, Any]:
    """What is given to simulate beside the loss, by the name of a case."""
    schedules = tailopt.schedules
    everything: dict[str, dict[str, Any]] = {
        "avg-biclip": {
            "algorithm": tailopt.algorithm("avg-biclip", ilr=0.1, i_u=1.0, i_d=0.01),
            "weights": [1.0, 2.0, 0.5, 3.0],
            "average": True,
            "schedules": {"ilr": schedules.power(-0.5, per="step"), "i_u": schedules.power(0.1)},
        },
        "adam2": {
            "algorithm": tailopt.algorithm("adam2", ilr=0.01, olr=0.1, ieps=1e-8, oeps=1e-5),
            "data": parts(),
            "batch_size": 4,
            "weights": "samples",
            "evaluate": noisy,
            "evaluate_every": 2,
            "statistics": True,
        },
        "diloco": {
            "algorithm": tailopt.algorithm("diloco", ilr=0.01, olr=0.7, ieps=1e-8, momentum=0.9, weight_decay=0.1),
            "data": parts(),
            "batch_size": 4,
            "participants": 3,
            "sampling": "proportional",
            "weights": "samples",
            "schedules": {"ilr": schedules.cosine(40, per="step")},
            "checkpoint_every": 2,
        },
        "adam-biclip": {
            "algorithm": tailopt.algorithm("adam-biclip", ilr=0.1, olr=0.05, oeps=1e-5, i_u=1.0, i_d=0.01),
            "participation": 0.5,
            "weights": [1.0, 2.0, 0.5, 3.0],
            "proximal": 0.5,
            "projection": 2.0,
            "average": True,
            "checkpoint_every": 3,
        },
        "torch": {
            "algorithm": tailopt.Algorithm(
                outer=torch.optim.Adam,
                inner=torch.optim.SGD,
                outer_settings={"lr": 0.05},
                inner_settings={"lr": 0.05, "momentum": 0.5},
                inner_state="keep",
            ),
            "participation": choose,
        },
    }
    found = everything[case]
    if case == "torch":
        found["schedules"] = {"ilr": schedules.from_torch(halved)}
    if "data" not in found:
        found |= {"batches": batch, "nodes": NODES}
    return {"rounds": ROUNDS, "local_steps": STEPS, "seed": 3, "progress": False, **found}


CASES = ("avg-biclip", "adam2", "diloco", "adam-biclip", "torch")


def choose(round: int, generator: torch.Generator) -> list[int]:
    return torch.randperm(NODES, generator=generator)[:3].tolist()


def halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def simulate(case: str, run: Path, at_step: Callable[[], None] = lambda: None, **more: Any) -> tailopt.Result:
    """A case; `at_step` is called in every local step, between the forward pass and the backward pass."""

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        found = squares(model, batch)
        at_step()
        return found

    return tailopt.simulate(Net(), loss=loss, run=run, **settings(case) | more)


def digests(run: Path) -> dict[str, str]:
    """SHA-256 of all that a run leaves but times, words and what the machine was."""
    last = checkpoints.latest(run)
    assert last is not None
    files = {path.name: path.read_bytes() for path in (*last.iterdir(), run / "history.jsonl") if path.exists()}
    if "manifest.json" in files:  # the run's id is another one in every run, and `rounds` may be
        body = json.loads(files["manifest.json"])
        body["run"] = body["run"][2]
        files["manifest.json"] = json.dumps({**body, "sha256": None}).encode()
    return {"last": last.name} | {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())}


def bits(result: tailopt.Result) -> list[Any]:
    """What a result holds, in a form that is equal only if all bits are."""
    models = [result.model] + ([result.average] if result.average is not None else [])
    return [checkpoints.digest(dict(m.state_dict())) for m in models] + [json.dumps(result.history, sort_keys=True)]


def after(calls: int, what: Callable[[], Any]) -> Callable[[], None]:
    """A function that does something when it is called for the calls-th time, counted from 0."""
    count = itertools.count()

    def called() -> None:
        if next(count) == calls:
            what()

    return called


def stop() -> None:
    raise Stop


class Whole:
    """The runs that are never stopped, each made once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.known = folder, dict[str, tuple[dict[str, str], list[Any], int]]()

    def __call__(self, case: str) -> tuple[dict[str, str], list[Any], int]:
        """Digests of its files, bits of its result, and how many local steps it took."""
        if case not in self.known:
            steps: list[None] = []
            result = simulate(case, self.folder / case, lambda: steps.append(None))
            self.known[case] = digests(self.folder / case), bits(result), len(steps)
        return self.known[case]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("case", CASES)
def test_the_runs_compared_have_everything_in_them(case: str, whole: Whole) -> None:
    files, _, steps = whole(case)
    assert files["last"] == f"round-{ROUNDS:06d}"
    found = checkpoints.load(whole.folder / case / "checkpoints" / files["last"])
    state = checkpoints.unpack(found.tensors, found.meta["global"])
    assert len(state["weights"]) == 5 and len(state["buffers"]) == 3
    assert (state["average"] is not None) == (case in ("avg-biclip", "adam-biclip"))
    assert all(state["outer"].values()) == (case != "avg-biclip")
    assert bool(found.nodes) == (case in ("diloco", "torch"))
    everyone = ROUNDS * STEPS * NODES
    assert steps == everyone if case in ("avg-biclip", "adam2") else STEPS * ROUNDS <= steps < everyone
    assert sum(found.meta["taken"]) == steps


@pytest.mark.parametrize("case", CASES)
def test_stopped_by_an_exception_at_ten_places(case: str, whole: Whole, tmp_path: Path) -> None:
    files, result, steps = whole(case)
    places = random.Random(case).sample(range(steps), 10)
    assert any(place % STEPS for place in places)  # in the middle of a node's round too
    for place in places:
        folder = tmp_path / str(place)
        with pytest.raises(Stop):
            simulate(case, folder, after(place, stop))
        assert bits(simulate(case, folder, resume=True)) == result, place
        assert digests(folder) == files, place


@pytest.mark.parametrize("case", ["avg-biclip", "diloco"])
def test_stopped_again_and_again(case: str, whole: Whole, tmp_path: Path) -> None:
    files, result, _ = whole(case)
    stops = 0
    for calls in (0, 7, 12, 1, 8, 11, 9, 14, 13):
        with pytest.raises(Stop):
            simulate(case, tmp_path / "run", after(calls, stop), resume=stops > 0)
        stops += 1
        if len(Run.open(tmp_path / "run").history()) == ROUNDS - 1:
            break
    assert stops > 2
    assert bits(simulate(case, tmp_path / "run", resume=True)) == result
    assert digests(tmp_path / "run") == files


# Ctrl-C comes between any two lines: also in the middle of a save, of the outer step, of a line of the history.


def in_rooms(code: CodeType) -> bool:
    rooms = tuple(str(ROOT / "src" / "tailopt" / room) for room in ("engines", "rounds", "records"))
    return code.co_filename.startswith(rooms)


def interrupted(place: int, run: Callable[[], Any], counts: Callable[[CodeType], bool] = in_rooms) -> int:
    """Raise KeyboardInterrupt at the place-th line that is run in the loop, the round or the records."""
    count = itertools.count()

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and next(count) == place:
            sys.settrace(None)
            raise KeyboardInterrupt
        return line

    def call(frame: FrameType, event: str, _: Any) -> Any:
        return line if counts(frame.f_code) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        run()
    finally:
        sys.settrace(before)
    return next(count)


@pytest.mark.parametrize("case", ["avg-biclip", "diloco"])
def test_interrupted_between_any_two_lines(case: str, whole: Whole, tmp_path: Path) -> None:
    files, result, _ = whole(case)
    lines = interrupted(-1, lambda: simulate(case, tmp_path / "counted"))
    assert lines > 1000
    for place in random.Random(case).sample(range(lines), 12):
        folder = tmp_path / str(place)
        with pytest.raises(KeyboardInterrupt):
            interrupted(place, lambda folder=folder: simulate(case, folder))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The run has 5 rounds already")
            assert bits(simulate(case, folder, resume=True)) == result, place
        assert digests(folder) == files, place


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("case", ["adam-biclip", "diloco"])
def test_a_model_changed_in_place_is_left_at_the_end_of_a_round(case: str, engine: str) -> None:
    """Also where an outer step is interrupted, when some weights, buffers and states have moved and others have not."""

    def finishes(code: CodeType) -> bool:
        return code.co_filename.endswith("rounds/round.py") and code.co_name in (
            "finish_round",
            "outer_step",
            "project",
        )

    def run(model: torch.nn.Module, ends: list[str]) -> None:
        def evaluate(model: torch.nn.Module) -> dict[str, float]:
            ends.append(checkpoints.digest(dict(model.state_dict())))
            return {}

        given = settings(case) | {"rounds": 2, "evaluate": evaluate, "engine": engine, "inplace": True}
        tailopt.simulate(model, loss=squares, **given)

    lines = interrupted(-1, partial(run, Net(), []), finishes)
    assert lines > 20
    for place in range(lines):
        model = Net()
        ends = [checkpoints.digest(dict(model.state_dict()))]
        with pytest.raises(KeyboardInterrupt):
            interrupted(place, partial(run, model, ends), finishes)
        assert checkpoints.digest(dict(model.state_dict())) == ends[-1], place


# Real processes


class Server:
    """Starts runs in processes of their own."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def start(self, case: str, run: Path, place: int | None = None, how: int = signal.SIGKILL) -> int:
        """Start or go on with a run, which sends itself a signal in its place-th local step; its process number."""
        return int(self._ask({"case": case, "run": str(run), "place": place, "how": int(how)}))

    def end(self) -> int:
        """Wait for the run; what os.waitstatus_to_exitcode says."""
        return int(self._answer())

    def _ask(self, question: dict[str, Any]) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    started = Server()
    yield started
    started.process.communicate(timeout=20)  # closes its input, whereupon it ends
    assert started.process.returncode == 0


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
@pytest.mark.parametrize("case", ["avg-biclip", "adam2", "diloco", "adam-biclip"])
def test_stopped_by_a_signal(
    case: str, how: signal.Signals, code: int, server: Server, whole: Whole, tmp_path: Path
) -> None:
    files, _, steps = whole(case)
    for place in random.Random(f"{case} {how}").sample(range(steps), 5):
        folder = tmp_path / str(place)
        server.start(case, folder, place, how)
        assert server.end() == code
        assert digests(folder) != files
        if how == signal.SIGINT:  # what was finished is kept, also between two checkpoints
            rows = Run.open(folder).history()
            last = checkpoints.latest(folder)
            assert last is not None and last.name == f"round-{len(rows):06d}"
        server.start(case, folder)
        assert server.end() == 0
        assert digests(folder) == files, place


def test_killed_at_any_time(server: Server, whole: Whole, tmp_path: Path) -> None:
    # by the clock, so that kills come in the middle of writing too
    case = "diloco"
    began = time.monotonic()
    server.start(case, tmp_path / "timed")
    assert server.end() == 0
    duration, codes = time.monotonic() - began, []
    for tenth in range(10):
        folder = tmp_path / str(tenth)
        number = server.start(case, folder)
        time.sleep(duration * tenth / 10)
        with contextlib.suppress(ProcessLookupError):  # it was quicker
            os.kill(number, signal.SIGKILL)
        codes.append(server.end())
        server.start(case, folder)
        assert server.end() == 0
        assert digests(folder) == whole(case)[0], tenth
    assert {-signal.SIGKILL} <= set(codes) <= {0, -signal.SIGKILL}


# What may change between two parts of a run, and what may not


def test_more_rounds_on_resume(whole: Whole, tmp_path: Path) -> None:
    files, result, _ = whole("avg-biclip")
    simulate("avg-biclip", tmp_path, rounds=2)
    assert len(Run.open(tmp_path).history()) == 2
    assert bits(simulate("avg-biclip", tmp_path, rounds=ROUNDS, resume=True)) == result
    assert digests(tmp_path) == files


def test_other_checkpoints_kept_do_not_matter(whole: Whole, tmp_path: Path) -> None:
    files, result, _ = whole("diloco")
    with pytest.raises(Stop):
        simulate("diloco", tmp_path, after(20, stop), checkpoint_every=1, keep=1)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1
    assert bits(simulate("diloco", tmp_path, resume=True, checkpoint_every=4)) == result
    assert digests(tmp_path) == files


def test_a_finished_run_is_left_as_it_is(whole: Whole, tmp_path: Path) -> None:
    _, result, _ = whole("avg-biclip")
    simulate("avg-biclip", tmp_path)
    before = digests(tmp_path)
    with pytest.warns(UserWarning, match="has 5 rounds already"):
        assert bits(simulate("avg-biclip", tmp_path, resume=True)) == result
    assert digests(tmp_path) == before


def test_resume_begins_where_there_is_nothing_yet(whole: Whole, tmp_path: Path) -> None:
    assert bits(simulate("avg-biclip", tmp_path / "new", resume=True)) == whole("avg-biclip")[1]
    assert digests(tmp_path / "new") == whole("avg-biclip")[0]


def test_a_run_is_not_begun_over_another(tmp_path: Path) -> None:
    simulate("avg-biclip", tmp_path, rounds=1)
    before = digests(tmp_path)
    with pytest.raises(FileExistsError, match="resume=True"):
        simulate("avg-biclip", tmp_path, rounds=1)
    assert digests(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "now", "said"),
    [
        ("seed", 4, "another seed: it is 3 in .* and 4 here"),
        ("local_steps", 2, "another local_steps: it is 3 in .* and 2 here"),
        ("weights", None, r"another weights: it is \[1.0, 2.0, 0.5, 3.0\] in .* and \[1.0, 1.0, 1.0, 1.0\] here"),
        ("participation", 0.5, "another participation: it is 1.0 in .* and 0.5 here"),
        ("participants", 2, "another participants: it is None in .* and 2 here"),
        ("proximal", 0.5, "another proximal: it is None in .* and 0.5 here"),
        ("projection", 1.5, "another projection: it is None in .* and 1.5 here"),
        ("average", False, "another average: it is True in .* and False here"),
        ("guard", False, "another guard: it is True in .* and False here"),
        ("schedules", {"ilr": tailopt.schedules.power(-1)}, r"another schedules: it is .*exponent=-0.5.*exponent=-1.0"),
        (
            "algorithm",
            tailopt.algorithm("avg-biclip", ilr=0.2, i_u=1.0, i_d=0.01),
            r"another ilr: it is 0.1 in .*, and 0.2 here",
        ),
    ],
)
def test_another_setting_is_refused(name: str, now: Any, said: str, tmp_path: Path) -> None:
    simulate("avg-biclip", tmp_path, rounds=1)
    before = digests(tmp_path)
    with pytest.raises(ValueError, match=f"cannot be resumed with {said}"):
        simulate("avg-biclip", tmp_path, **{"resume": True, name: now})
    assert digests(tmp_path) == before


def test_settings_that_are_equal_but_not_the_same_are_taken(whole: Whole, tmp_path: Path) -> None:
    # tuples, infinities, None, patterns, tensors, and a scheduler that is made anew: what a script does that runs again
    for resume in (False, True):
        algorithm = tailopt.algorithm(
            "bi2clip",
            ilr=0.1,
            olr=1.0,
            i_u={"0.*": torch.full((1,), 0.5), "*": float("inf")},
            i_d=0.0,
            o_u=float("inf"),
            o_d=0.0,
        )
        schedules = {"olr": tailopt.schedules.from_torch(lambda o: torch.optim.lr_scheduler.ConstantLR(o))}
        simulate("avg-biclip", tmp_path, algorithm=algorithm, schedules=schedules, rounds=1 + resume, resume=resume)
    assert len(Run.open(tmp_path).history()) == 2


def test_another_model_is_refused(tmp_path: Path) -> None:
    simulate("avg-biclip", tmp_path, rounds=1)
    wider = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))
    with pytest.raises(ValueError, match="another model"):
        tailopt.simulate(wider, loss=squares, run=tmp_path, resume=True, **settings("avg-biclip"))


def test_a_model_with_other_buffers_is_refused(tmp_path: Path) -> None:
    simulate("avg-biclip", tmp_path, rounds=1)
    model = Net()
    model[1] = torch.nn.LayerNorm(4)  # the same parameters
    with pytest.raises(ValueError, match="another model"):
        tailopt.simulate(model, loss=squares, run=tmp_path, resume=True, **settings("avg-biclip"))


def test_batches_that_are_not_repeatable_are_refused(tmp_path: Path) -> None:
    own = torch.Generator().manual_seed(0)

    def batches(node: int, round: int, step: int, generator: torch.Generator) -> Any:
        x = torch.randn(5, 3, generator=own)
        return x, x.sum(-1)

    simulate("avg-biclip", tmp_path, batches=batches, rounds=2)
    before = digests(tmp_path)
    with pytest.raises(ValueError, match=r"batch of node 0, round 2, step 0 differs from what it was\. Draw all"):
        simulate("avg-biclip", tmp_path, batches=batches, resume=True)
    assert digests(tmp_path) == before


def test_batches_of_arrays_that_are_not_repeatable_are_refused(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    own = numpy.random.default_rng(0)

    def batches(node: int, round: int, step: int, generator: torch.Generator) -> Any:
        return own.standard_normal((5, 3)).astype("float32")

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        found: torch.Tensor = model(torch.from_numpy(batch)).square().mean()
        return found

    run = {**settings("avg-biclip"), "batches": batches, "run": tmp_path}
    tailopt.simulate(Net(), loss=loss, **{**run, "rounds": 2})
    with pytest.raises(ValueError, match="batch of node 0, round 2, step 0 differs from what it was"):
        tailopt.simulate(Net(), loss=loss, resume=True, **run)


def test_other_data_are_refused(tmp_path: Path) -> None:
    simulate("adam2", tmp_path, rounds=2)
    others = [TensorDataset(d.tensors[0] + 1e-6, d.tensors[1]) for d in parts()]
    with pytest.raises(ValueError, match="differs from what it was"):
        simulate("adam2", tmp_path, data=others, resume=True)


def test_a_damaged_checkpoint_is_passed_over(whole: Whole, tmp_path: Path) -> None:
    files, result, _ = whole("avg-biclip")
    simulate("avg-biclip", tmp_path, rounds=4)
    last = checkpoints.latest(tmp_path)
    assert last is not None and last.name == "round-000004"
    file = last / "global-00000-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.warns(UserWarning, match=r"round-000004 is passed over"):
        assert bits(simulate("avg-biclip", tmp_path, resume=True)) == result
    assert digests(tmp_path) == files
    assert [row["round"] for row in Run.open(tmp_path).history()] == [1, 2, 3, 4, 5]


def test_nothing_sound_is_an_error(tmp_path: Path) -> None:
    simulate("avg-biclip", tmp_path, rounds=1)
    for path in (tmp_path / "checkpoints").iterdir():
        (path / "manifest.json").unlink()
    with pytest.warns(UserWarning, match="passed over"), pytest.raises(checkpoints.DamagedCheckpoint):
        simulate("avg-biclip", tmp_path, resume=True)


def test_the_log_says_what_happened(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        simulate("avg-biclip", tmp_path, after(STEPS * NODES + 1, stop))
    simulate("avg-biclip", tmp_path, resume=True)
    words = (tmp_path / "log.txt").read_text()
    assert "stopped after round 1: Stop" in words and "resumed after round 1" in words


def serve() -> None:
    """Answer questions on the input: the number of the process that was started, then how it ended."""
    settings("torch")  # imports what torch leaves for its first optimizer; nothing is differentiated before a fork
    for text in sys.stdin:
        question = json.loads(text)
        process = os.fork()
        if process == 0:
            code = 1
            try:
                place, how = question["place"], question["how"]
                at_step = after(-1 if place is None else place, partial(os.kill, os.getpid(), how))
                signal.signal(signal.SIGINT, signal.default_int_handler)
                sys.stderr = open(os.devnull, "w")  # noqa: SIM115
                simulate(question["case"], Path(question["run"]), at_step, resume=True)
                code = 0
            except KeyboardInterrupt:
                code = 130
            finally:
                os._exit(code)
        print(process, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
