"""Seeded runs of the node protocol with faults: no invariant is violated, and planted bugs are found.

`TAILOPT_SIMULATION_SEEDS` is how many new seeds are tried. `python -m tests.distributed.simulation.simulate` tries
many, and with a seed as its argument it replays one.
"""

from __future__ import annotations

import os
import random
import time

import pytest
import torch

from tests.distributed.simulation.mutations import MUTATIONS, Mutation
from tests.distributed.simulation.plan import draw
from tests.distributed.simulation.simulate import check, simulate, violations

NEW_SEEDS = int(os.environ.get("TAILOPT_SIMULATION_SEEDS", "250"))
# what the simulation found, each fixed since: the seed, and what was wrong
REGRESSIONS = {
    82: "a displacement damaged by a link named its sender alone",
    266: "the store went before the two nodes of a verdict had read it",
    267: "a connection that timed out named its two ends, though another link was late",
    503: "a node could not end while the store was stopped",
    660: "first weights damaged by a link named two honest nodes",
    1133: "a node that waited behind a broken connection named its own link",
    2781: "a node that found no progress was named by the others",
    5500: "a node that gave up the roll call was missed by the others",
    7236: "the same, after a pause of the store",
    20422: "the node that served the store left while another one still waited",
    21123: "the node that served the store was paused, and named one that had given it up",
    23029: "a pause of the store was counted as the absence of a node",
    48276: "a node without signs of life was said to show some, while the store did not answer",
    62870: "an old sign of a node was taken for a new one, and the store went while it waited",
    27141: "the store went while a node waited for two others",
    307118: "an overflow that a flipped bit of one node caused was blamed on the owner of the partition alone",
    438877862: "nodes that had given up the paused store were missed, and the node that serves it was not named",
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("part", range(5))
def test_no_invariant_is_violated_with_new_seeds(part: int) -> None:
    first = random.SystemRandom().randrange(10**6, 10**9)
    for seed in range(first, first + NEW_SEEDS // 5):
        assert check(seed) == [], f"replay with: python -m tests.distributed.simulation.simulate {seed}"


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_what_was_found_stays_fixed(seed: int) -> None:
    assert check(seed) == []


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_planted_bug_is_found(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(MUTATIONS[mutation]) == []
    mutation(monkeypatch)
    assert check(MUTATIONS[mutation])


def test_a_seed_replays() -> None:
    for seed in range(20, 40):
        first, second = (simulate(draw(seed), trace=True) for _ in range(2))
        assert first.trace == second.trace and first.records == second.records and first.struck == second.struck


def test_the_simulation_sees_every_fault_strike_and_every_kind_of_end() -> None:
    """Otherwise the invariants would hold because nothing happens."""
    struck, ends, sizes = set(), set(), set()
    until = time.monotonic() + 60
    for seed in range(600):
        outcome = simulate(draw(seed))
        assert not violations(outcome)
        struck |= {str(fault[0]) for fault in outcome.struck}
        ends |= {record.error or str(record.finished) for record in outcome.records}
        sizes.add(outcome.plan.nodes)
        done = len(struck) >= 16 and {"True", "NodeLost", "ExchangeAborted", "Disagreement", "ArithmeticError"} <= ends
        if (done and sizes == {2, 3, 4, 5, 6, 7}) or time.monotonic() > until:
            break
    node = {"crash", "stop", "pause", "cut", "raise", "slow", "nan", "flip", "disagree", "sleeps", "early"}
    assert struck >= node | {"corrupt", "delay", "drop", "duplicate", "reorder"}
    assert {"True", "NodeLost", "ExchangeAborted", "Disagreement", "ArithmeticError"} <= ends
    assert sizes == {2, 3, 4, 5, 6, 7}
