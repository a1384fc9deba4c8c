"""The node protocol gets time, store, messages and exit passed in; threads start in one file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import tailopt.distributed
from tailopt.distributed.interfaces import blocking
from tailopt.distributed.threads import SystemClock, ThreadCall, ThreadEvent, TorchStore

FOLDER = Path(tailopt.distributed.__file__).parent
PROTOCOL = (
    "agreement",
    "buffers",
    "exchange",
    "failure_detector",
    "header",
    "heartbeat",
    "judging",
    "node_bounds",
    "membership",
    "roll_call",
    "transport",
    "verdicts",
    "weight_sync",
)


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("name", PROTOCOL)
def test_the_protocol_asks_for_nothing_by_itself(name: str) -> None:
    used = imports(FOLDER / f"{name}.py")
    assert not used & {"threading", "queue", "time", "asyncio", "socket", "signal", "torch.distributed"}, used
    assert "os._exit" not in (FOLDER / f"{name}.py").read_text()


def test_threads_start_in_one_file() -> None:
    starting = [path.name for path in FOLDER.glob("*.py") if "threading.Thread(" in path.read_text()]
    assert starting == ["threads.py"]


def test_a_coroutine_that_suspends_outside_of_the_simulation_is_a_bug() -> None:
    class Suspends:
        def __await__(self):  # type: ignore[no-untyped-def]
            yield

    async def waits() -> None:
        await Suspends()

    with pytest.raises(RuntimeError, match="suspended outside of the simulation"):
        blocking(waits())


def test_what_blocks_never_suspends() -> None:
    from torch.distributed import HashStore

    async def uses() -> list[object]:
        store = TorchStore(HashStore()).under("a")
        await store.set("key", "1")
        known = await store.compare_set("key", "2"), await store.compare_set("other", "3")
        event, clock, call = ThreadEvent(), SystemClock(), ThreadCall(lambda _: None)
        await clock.sleep(0.0)
        waits = await event.wait(0.0), await call.wait(0.0)
        event.set()
        counts = await store.add("count", 2), await store.add("count", 3)
        return [
            *known,
            *waits,
            await event.wait(0.0),
            *counts,
            await store.get_many(["key", "other"]),
            await store.check("none"),
        ]

    assert blocking(uses()) == ["1", "3", False, False, True, 2, 5, ["1", "3"], False]
