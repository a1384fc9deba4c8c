"""The failure study: its problem, its ways of failing, its predictions, and what a run leaves."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tailopt.algorithms import algorithm
from tailopt.rounds.participants import Sampling
from tailopt.studies import failures
from tailopt.studies.failure_cells import (
    CASES,
    FULL,
    QUICK,
    FailureCell,
    FailuresPlan,
    common_clock,
    recorded_rounds,
    run_cells,
    trained,
)
from tailopt.studies.failure_models import independent
from tailopt.studies.runner import read_record
from tailopt.studies.study import StudyOptions
from tailopt.theory import theory
from tests.studies.unjudged import assert_unjudged

OLDER = Path(__file__).parent / "older_records"
QUIET = StudyOptions(quick=True, progress=False)


def case(name, equal):
    (found,) = [c for c in CASES if (c.name, c.equal) == (name, equal)]
    return found


def measure(plan, case, rounds):
    """F(average) - F* of avg-l2clip after these rounds."""
    return trained(plan, FailureCell("avg-l2clip", case, 0), rounds)[1]


# --- The problem


@given(shares=st.lists(st.floats(0.01, 1), min_size=8, max_size=8))
def test_the_optimum_is_where_the_gradient_vanishes(shares):
    which, s = FULL.problem(), torch.tensor(shares).double()
    gradient = torch.einsum("n,nij,nj->i", s, which.hessians, which.optimum(s) - which.optima)
    assert gradient.abs().max() < 1e-12 * s.sum() * 100


def test_the_gap_is_that_of_the_objective():
    which, p = FULL.problem(), case("nobody fails", False).weights(FULL)
    x = torch.arange(FULL.dimension, dtype=torch.float64)

    def objective(x):
        e = x - which.optima
        return float((p * torch.einsum("ni,nij,nj->n", e, which.hessians, e)).sum() / 2)

    assert which.gap(x, p) == pytest.approx(objective(x) - objective(which.optimum(p)), rel=1e-10)
    assert which.gap(which.optimum(p), p) == 0


def test_the_settings_keep_the_theorems_conditions():
    ilr, _ = FULL.l2clip
    assert ilr > 1 / FULL.problem().convexity()
    assert FULL.df > FULL.alpha
    for c in CASES:
        assert torch.linalg.vector_norm(FULL.problem().optimum(c.weights(FULL))) < FULL.radius


def test_every_bias_can_be_told_from_none():
    """A case that is called biased, and whose prediction is tiny, would be judged by noise."""
    which = FULL.problem()
    for c in CASES:
        if c.limit is not None:
            p = c.weights(FULL)
            shares = c.limit(FULL, p)
            assert float(shares.sum()) == pytest.approx(1)
            assert which.bias(p, shares) > 0.1


@pytest.mark.parametrize(
    "c", [c for c in CASES if c.name != "failures in bursts"], ids=lambda c: f"{c.name}, {c.equal}"
)
def test_predicted_shares_are_those_that_are_drawn(c):
    """Over many rounds of the simulation's own sampling; with own clocks, each divided by how often a node is there."""
    weights = c.weights(FULL)
    told = c.participation(FULL, 0)
    count = told.get("participation") or told.get("participants") or FULL.nodes
    sampling = Sampling(tuple(weights.tolist()), count, told.get("sampling", "uniform"), 0)
    total, present, rounds = torch.zeros(FULL.nodes).double(), torch.zeros(FULL.nodes).double(), 4000
    for t in range(1, rounds + 1):
        for node, share in sampling.draw(t).shares.items():
            total[node] += share
            present[node] += 1
    found = total / present.clamp(min=1) if c.own_clock else total
    found /= found.sum()
    expected = weights if c.limit is None else c.limit(FULL, weights)
    assert (found - expected).abs().max() < 5 * 0.5 / rounds**0.5


# --- A simulation


def test_the_average_followed_is_that_of_the_simulation():
    plan = replace(QUICK, rounds=5)
    c = case("uniform failures", False)
    result, gaps = trained(plan, FailureCell("avg-l2clip", c, 3), [2, 5])
    (x,) = result.average.parameters()
    assert len(gaps) == 2
    assert gaps[-1] == pytest.approx(plan.problem().gap(x.detach(), c.weights(plan)), rel=1e-12)
    drawn = Sampling(tuple(plan.weights), independent(plan.nodes, plan.away), "uniform", 3)
    assert [row["participants"] for row in result.history] == [drawn.draw(t).drawn for t in range(1, 6)]


def test_the_common_clock_is_the_theorems_where_everybody_is_there():
    """With one local step a round and nobody missing, both clocks say the same."""
    plan = replace(QUICK, rounds=6, local_steps=1)
    nobody = case("nobody fails", True)
    common, own = (measure(plan, replace(nobody, own_clock=own), range(1, 7)) for own in (False, True))
    assert common == pytest.approx(own, rel=1e-12)


def test_the_common_clock_counts_the_steps_of_the_run():
    found, algo = theory("avg-l2clip", 1.5), algorithm("avg-l2clip", ilr=2.0, i_u=5.0)
    clock = common_clock(found, algo, local_steps=3)
    assert clock["ilr"](1) == 2.0
    assert clock["ilr"](3) == pytest.approx(2.0 * 2 / (7 + 1))
    assert clock["i_u"](3) == pytest.approx(5.0 * 7 ** (1 / 3))


def test_without_noise_a_missing_camp_leaves_its_bias_and_chance_does_not():
    plan = FailuresPlan(rounds=48, local_steps=1, noise=0.0)
    biased, preserved = case("always the same missing", True), case("uniform failures", True)
    p = biased.weights(plan)
    bias = plan.problem().bias(p, biased.limit(plan, p))
    (stuck,) = measure(plan, biased, [48])
    (free,) = measure(plan, preserved, [48])
    assert stuck == pytest.approx(bias, rel=0.1)
    assert free < bias / 10


# --- What is said of it


@pytest.mark.parametrize(
    ("last", "slopes", "bias", "expected"),
    [
        ([1.0, 1.0, 1.0], [-0.4, -0.5, -0.1], 0.0, True),
        ([1.0, 1.0, 1.0], [-0.1, -0.2, -0.4], 0.0, None),
        ([1.0, 1.0, 1.0], [-0.1, -0.2, -0.3], 0.0, False),
        ([0.6, 1.0, 1.9], [-9.0, -0.3, 0.1], 1.0, True),
        ([0.6, 1.0, 1.9], [-9.0, -0.4, 0.1], 1.0, None),  # passing by
        ([0.4, 1.0, 1.9], [0.0, 0.0, 0.0], 1.0, None),
        ([0.6, 1.0, 2.1], [0.0, 0.0, 0.0], 1.0, None),
        ([0.1, 0.2, 0.4], [0.0, 0.0, 0.0], 1.0, False),
    ],
)
def test_cases_are_judged_by_seeds(last, slopes, bias, expected):
    assert failures.as_claimed(last, slopes, bias, promised=1 / 3) is expected


@pytest.mark.parametrize(
    ("holds", "verdict"), [((True, True), "holds"), ((True, None), "cannot tell"), ((None, False), "does not hold")]
)
def test_the_claim_is_judged_by_the_algorithm_of_the_theorem(holds, verdict):
    def row(name, bias, last, holds=None):
        gaps = {"low": [last], "median": [last], "high": [last], "slopes": [-0.5], "last": [last]}
        return failures.FailureRow(algorithm=name, case="x", weights="equal", bias=bias, holds=holds, **gaps)

    rows = [row("avg-l2clip", 0.0, 0.1, holds[0]), row("avg-l2clip", 2.0, 3.0, holds[1])]
    found = failures.evaluate_claim(
        [*rows, row("avg-biclip", 0.0, 0.1), row("avg-biclip", 0.0, 0.4), row("avg-biclip", 1.0, 9.0)]
    )
    assert (found.number, found.verdict) == (14, verdict)
    judged, beside = found.figures.split("; avg-biclip beside it")
    assert "1.50 to 1.50 of the predicted bias" in judged
    assert "at most 4.0 times" in beside and "9.00 to 9.00" in beside


# --- A run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A quick study."""
    out = tmp_path_factory.mktemp("failures") / "new"
    assert failures.run(out, QUIET) == out
    return out


def test_a_run_leaves_table_results_and_figure(finished):
    results = json.loads((finished / "results.json").read_text())
    table = (finished / "table.md").read_text(encoding="utf-8")
    assert len(results["rows"]) == 15
    assert len(read_record(finished / "cells.jsonl")) == 15 * len(QUICK.seeds)
    for row in results["rows"]:
        assert len(row["median"]) == len(results["rounds"]) == len(recorded_rounds(QUICK.rounds))
        assert all(low <= mid <= high for low, mid, high in zip(row["low"], row["median"], row["high"], strict=True))
        assert f"| {row['algorithm']} | {row['weights']} | {row['case']} |" in table
    assert_unjudged(finished)
    assert (finished / "failures.png").read_bytes().startswith(b"\x89PNG")


def test_a_study_that_is_not_quick_judges(finished):
    results = failures.summarise(QUICK, run_cells(QUICK, finished, progress=False))
    table = failures.report(results)
    assert f"Claim 14: {results.claim.verdict}." in table
    judged = {row["algorithm"] for row in results.as_json()["rows"] if "holds" in row}
    assert judged == {"avg-l2clip"}
    assert table.splitlines()[0].endswith("| judged |") and table.splitlines()[1].endswith("| --- |")


def test_finished_cells_are_kept_and_torn_ones_run_again(finished, tmp_path):
    lines = (finished / "cells.jsonl").read_bytes().splitlines(keepends=True)
    kept = json.loads(lines[0])
    kept["result"][-1] = 123.0  # what is recorded is believed
    other = json.loads(lines[1])
    other["cell"]["plan"] = "another"
    start = [json.dumps(kept).encode() + b"\n", *lines[1:-1], json.dumps(other).encode() + b"\n"]
    (tmp_path / "cells.jsonl").write_bytes(b"".join(start) + lines[-1][:40])
    failures.run(tmp_path, QUIET)
    assert (tmp_path / "cells.jsonl").read_bytes() == b"".join([*start, lines[-1]])
    before, after = (json.loads((f / "results.json").read_text())["rows"] for f in (finished, tmp_path))
    assert after[0]["last"][0] == 123.0
    assert after[1:] == before[1:]


def test_a_record_of_an_older_version_is_read(finished, tmp_path):
    """A quick study of the version before cells had one format: nothing runs again, and the table is the same."""
    shutil.copy(OLDER / "failures.jsonl", tmp_path / "cells.jsonl")
    failures.run(tmp_path, QUIET)
    assert (tmp_path / "cells.jsonl").read_bytes() == (OLDER / "failures.jsonl").read_bytes()
    assert (tmp_path / "table.md").read_text() == (finished / "table.md").read_text()


def test_the_plan_names_its_results():
    assert FailuresPlan().key() == replace(FailuresPlan(), seeds=(7,)).key()
    assert FailuresPlan().key() != replace(FailuresPlan(), noise=0.4).key()
