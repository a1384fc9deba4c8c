"""How the flat buffer is cut, and headers that end a run. What nodes do with displacements is in the files beside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tailopt.distributed.exchange import Exchange
from tailopt.distributed.exchange_types import JudgingCriteria, Statement
from tailopt.distributed.gloo import GlooTransport
from tailopt.distributed.header import ExchangeAborted, Header
from tailopt.distributed.interfaces import blocking
from tailopt.distributed.layout import ALIGNMENT, Layout
from tailopt.rounds.block_norm import BLOCK
from tailopt.rounds.participants import Sampling

ROOT = Path(__file__).parents[2]
NODES, ODD, LATE = 3, 1, 2


@given(
    st.lists(st.integers(0, 3 * BLOCK) | st.sampled_from([0, 1, BLOCK - 1, BLOCK, BLOCK + 1]), min_size=1, max_size=8),
    st.integers(1, 6),
)
def test_every_element_belongs_to_one_node(sizes: list[int], nodes: int) -> None:
    layout = Layout(tuple(sizes), nodes)
    assert layout.cuts[0] == 0 and layout.cuts[-1] == layout.total and list(layout.cuts) == sorted(layout.cuts)
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)
    seen = torch.zeros(layout.total, dtype=torch.int64)
    for node in range(nodes):
        for segment in layout.segments(node):
            assert layout.cuts[node] <= segment.start < segment.stop <= layout.cuts[node + 1]
            offset = layout.offsets[segment.tensor]
            assert (segment.start - offset) % BLOCK == 0  # norms are summed over whole blocks
            seen[segment.start : segment.stop] += 1
        for gap in layout.padding(node):
            assert not bool(seen[gap].any())
            seen[gap] -= 1
    assert int((seen == 0).sum()) == 0  # every element is in a segment or is padding
    seen.clamp_(min=0)
    parts = layout.views(seen, [torch.Size([size]) for size in sizes])
    assert all(bool((part == 1).all()) for part in parts)
    assert int(seen.sum()) == sum(sizes)  # padding belongs to nobody


class Altered(GlooTransport):
    """Alone, with a header that comes back as another."""

    change: dict[str, Any] = {}

    async def gather(self, mine: torch.Tensor) -> torch.Tensor:
        return mine.unsqueeze(0)

    async def exchange_with_header(self, header: Header, outgoing: Any = (), incoming: Any = ()) -> list[Header]:
        return [header._replace(**self.change)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"contributes": 0}, "dropped"),  # a contribution that is lost is none that is wrong
        ({"round": -2}, r"Node 0 writes a checkpoint while node 0 ends round 1. Call checkpoint\(\) on every node"),
        ({"elements": 31}, "Round 1: node 0 came with 31 elements, and 32 were expected"),
        ({"share": 0.5}, "came with a share of 0.5, and 1 was expected"),
    ],
)
def test_headers_that_end_a_run(change: dict[str, Any], said: str | None) -> None:
    transport = Altered(None, 0, 1)  # type: ignore[arg-type]
    exchange, x = Exchange(transport, ["w"], [torch.Size([30])], [torch.float32]), torch.zeros(32)
    exchange.load([torch.zeros(30)], x)
    exchange.reset_sent_digest(x)
    exchange.measure_displacement([torch.ones(30)], x)
    who = Sampling((1.0,), 1, "uniform", 0).draw(1)
    transport.change = change
    if said is None or said == "dropped":
        report, _ = blocking(exchange.exchange_and_settle(1, who, x, {}, {}, Statement(1), JudgingCriteria()))
        assert [e.reason for e in report.settlement.excluded] == ([said] if said else [])
    else:
        with pytest.raises(ExchangeAborted, match=said):
            blocking(exchange.exchange_and_settle(1, who, x, {}, {}, Statement(1), JudgingCriteria()))


def main(rank: int, store: str, out: str) -> None:
    """A node; one of them has another model, one comes late."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NODES)
    transport = GlooTransport.of(timeout=10.0)
    shape = torch.Size([40 if rank == ODD else 30])
    exchange = Exchange(transport, ["w"], [shape], [torch.float32])
    exchange.measure_displacement([torch.ones(shape)], torch.zeros(exchange.layout.total))
    who = Sampling((1.0,) * NODES, NODES, "uniform", 0).draw(1)
    time.sleep(1.5 if rank == LATE else 0.0)
    try:
        blocking(
            exchange.exchange_and_settle(
                1, who, torch.zeros(exchange.layout.total), {}, {}, Statement(1), JudgingCriteria()
            )
        )
        said = "nothing"
    except ExchangeAborted as error:
        said = str(error)
    Path(out, str(rank)).write_text(json.dumps(said))


def test_another_number_of_elements_ends_the_run_on_all_nodes(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "tests.distributed.test_exchange"]
    nodes = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store"), str(tmp_path)], env=environment, cwd=ROOT)
        for rank in range(NODES)
    ]
    try:
        for node in nodes:
            node.wait(60)
    finally:
        for node in nodes:
            node.kill()
    said = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(NODES)]
    for rank in (0, LATE):
        assert said[rank].startswith(f"Round 1: node {ODD} came with 48 elements, and 32 were expected.")
    assert said[ODD].startswith("Round 1: node 0 came with 32 elements, and 48 were expected.")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
