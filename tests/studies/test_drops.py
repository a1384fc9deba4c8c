"""The study of lost contributions: its text, its cells, and what a run leaves."""

import dataclasses
import json
import lzma
import math

import pytest
import torch

from tailopt.seeds import generator
from tailopt.studies import byte_corpus, drops
from tailopt.studies.byte_corpus import ByteCorpus
from tailopt.studies.drops import CASES, PRESETS, QUICK, DropsCell
from tailopt.studies.runner import read_record
from tailopt.studies.study import StudyOptions
from tests.studies.unjudged import assert_unjudged

CPU = torch.device("cpu")
TEXT = bytes(range(32, 122)) * 400
TINY = dataclasses.replace(QUICK, seeds=(0,), rounds=3)

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_nodes_and_held_out_text_are_apart():
    """Every stripe goes to one of them, and nothing gets lost."""
    text = b"".join(i.to_bytes(4, "big") for i in range(40_000))
    corpus = ByteCorpus.of(text, 4, 8, CPU)
    parts = [bytes(part.tolist()) for part in (*corpus.nodes, corpus.held_out)]
    assert sum(map(len, parts)) == len(text)
    stripe = len(text) // (byte_corpus.HELD_OUT * 4)
    assert parts[-1][:stripe] == text[19 * stripe : 20 * stripe]
    assert parts[1][:stripe] == text[stripe : 2 * stripe]
    assert corpus.nodes[0].numel() == pytest.approx(corpus.nodes[3].numel(), abs=stripe)


def test_the_unigram_perplexity_of_equally_frequent_bytes():
    assert ByteCorpus.of(bytes(range(10)) * 5000, 2, 8, CPU).unigram == pytest.approx(10, rel=1e-3)


def test_too_little_text_is_refused():
    with pytest.raises(ValueError, match="Invalid data: 100 bytes of text; need 1360 or more for 4 nodes"):
        ByteCorpus.of(b"x" * 100, 4, 16, CPU)


def test_text_files_plain_and_packed(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"two")
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(b"one"))
    (tmp_path / "c.md").write_bytes(b"not this")
    assert byte_corpus.text(tmp_path) == b"one\ntwo"
    assert byte_corpus.text(tmp_path / "b.txt") == b"two"
    with pytest.raises(FileNotFoundError, match=r"has no \*.txt or \*.txt.xz file"):
        byte_corpus.text(tmp_path / "nowhere")
    assert len(byte_corpus.text()) > 1_000_000


def test_windows_hold_the_next_byte_too():
    rows = byte_corpus.windows(torch.arange(200, dtype=torch.uint8), 50, 8, generator(0, "test"))
    assert rows.shape == (50, 9) and rows.dtype == torch.int64
    assert bool((rows.diff(dim=1) == 1).all()) and int(rows.max()) <= 199


@pytest.mark.parametrize("preset", PRESETS)
def test_the_model_is_a_small_gpt2(preset):
    plan = PRESETS[preset]
    net, again = drops.model(plan, 0), drops.model(plan, 0)
    assert all(map(torch.equal, net.state_dict().values(), again.state_dict().values()))
    assert (net.config.n_layer, net.config.n_embd, net.config.n_head) == (2, 256, 4)
    assert 1.5e6 < sum(p.numel() for p in net.parameters()) < 1.8e6
    assert drops.perplexity(net.eval(), torch.randint(256, (8, plan.context + 1))) == pytest.approx(256, rel=0.1)


def test_it_learns():
    """A text that a small model can learn: far below the unigram perplexity, which is 90."""
    settings = {"diloco": {**drops.SETTINGS["diloco"], "ilr": 2e-3, "weight_decay": 0.01}}  # fast, for so small a model
    plan = dataclasses.replace(QUICK, rounds=30, local_steps=4, batch=8, every=30, algorithms=settings)
    corpus = ByteCorpus.of(TEXT, plan.nodes, plan.context, CPU)
    (last,) = drops.measure(plan, corpus, DropsCell("diloco", "keep", 0)).perplexity
    assert corpus.unigram == pytest.approx(90, rel=1e-2) and last < 45


def run_plan(out, plan, text):
    return drops.run_plan(out, plan, ByteCorpus.of(text, plan.nodes, plan.context, CPU))


def test_what_a_run_leaves(tmp_path):
    out = run_plan(tmp_path / "out", TINY, TEXT)
    results = json.loads((out / "results.json").read_text())
    rows = {(row["algorithm"], row["case"]): row for row in results["rows"]}
    assert rows.keys() == {(name, case) for name in TINY.algorithms for case in CASES}
    for (name, case), row in rows.items():
        (base,) = rows[name, "everybody"]["last"]
        assert row["mean_above"] == pytest.approx(100 * (row["last"][0] / base - 1))
        assert (row["mean_above"] == 0) == (case == "everybody")
        assert math.isfinite(row["last"][0]) and row["rounds"] == [1, 2, 3]
    assert results["best"]["diloco"] == min(rows["diloco", case]["mean_above"] for case in ("sync", "keep"))
    assert results["spread"] == {"diloco": 0.0, "avg-biclip": 0.0}  # one seed
    assert results["within"]["diloco"] == (results["best"]["diloco"] <= 2.1)
    table = (out / "table.md").read_text()
    assert "| diloco | 50% lost, keep |" in table and "2.1 % above that DiLoCo's authors report" in table
    assert (out / "drops.png").read_bytes()[:4] == b"\x89PNG"


def test_a_quick_study_judges_nothing(tmp_path):
    (tmp_path / "some.txt").write_bytes(TEXT)
    options = StudyOptions(quick=True, seeds=1, data=str(tmp_path / "some.txt"), progress=False)
    assert_unjudged(drops.run(tmp_path / "out", options))


def test_finished_cells_are_not_run_again(tmp_path):
    run_plan(tmp_path, TINY, TEXT)
    before = list(read_record(tmp_path / "cells.jsonl"))
    assert len(before) == 6
    run_plan(tmp_path, dataclasses.replace(TINY, seeds=(0, 1)), TEXT)
    after = list(read_record(tmp_path / "cells.jsonl"))
    assert after[:6] == before and {json.loads(cell)["seed"] for cell in after[6:]} == {1} and len(after) == 12
    run_plan(tmp_path, TINY, TEXT + b"more")
    assert len(list(read_record(tmp_path / "cells.jsonl"))) == 18


def test_other_input_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Invalid preset: 'huge'; need one of 'full', 'small'"):
        drops.run(tmp_path, StudyOptions(preset="huge"))
