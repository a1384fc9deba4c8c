from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tailopt.paper import paper_settings
from tailopt.studies import comparison_runs, curves, glue, gradients
from tailopt.studies.comparison import (
    QUICK_RUN,
    AlgorithmResult,
    Comparison,
    ComparisonPlan,
    SeedRun,
    TaskSpec,
)
from tailopt.studies.study import StudyOptions
from tailopt.studies.tables import methods_section
from tests.studies.encoders import tiny_encoder, tiny_mnli, tiny_mrpc
from tests.studies.unjudged import assert_unjudged

pytest.importorskip("transformers", reason="the studies' extra is not installed")
pytest.importorskip("sklearn", reason="the studies' extra is not installed")


def options(**more: Any) -> StudyOptions:
    """A quick study of MRPC."""
    return StudyOptions(**{"quick": True, "progress": False, "task": "MRPC", "preset": "small", **more})


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAILOPT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        "model": tiny_encoder(tmp_path_factory.mktemp("encoder")),
        "data": tiny_mrpc(tmp_path_factory.mktemp("mrpc")),
    }


@pytest.fixture(scope="module")
def finished(parts: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("glue")
    return glue.run(out, options(**parts))


def test_the_study_writes_table_results_and_figure(finished: Path) -> None:
    text = (finished / "table.md").read_text(encoding="utf-8")
    assert "| avg-sgd | " in text and "67.3" in text  # the paper's number beside ours
    assert "never on what is reported" in text and "a trial had 1 rounds, as a reported run has" in text
    assert_unjudged(finished)
    found = json.loads((finished / "results.json").read_text(encoding="utf-8"))
    for cell in found["cells"]:
        assert [run["seed"] for run in cell["runs"]] == [0] and len(cell["trials"]) == 1
        assert 0 <= cell["runs"][0]["metrics"]["accuracy"] <= 100
    assert (finished / "glue.png").stat().st_size > 5000


def test_what_is_there_is_not_run_again_and_more_seeds_go_on(parts: dict[str, str], finished: Path) -> None:
    first = (finished / "cells.jsonl").read_bytes()
    glue.run(finished, options(seeds=2, **parts))
    second = (finished / "cells.jsonl").read_bytes()
    assert second.startswith(first) and len(second.splitlines()) == 2 * len(first.splitlines())


def test_a_folder_of_an_older_version_is_read(parts: dict[str, str], finished: Path, tmp_path: Path) -> None:
    """There every reported run was a file of its own."""
    (tmp_path / "cells").mkdir()
    shutil.copy(finished / "plan.json", tmp_path)
    shutil.copytree(finished / "trials", tmp_path / "trials")
    for line in (finished / "cells.jsonl").read_text(encoding="utf-8").splitlines():
        cell, run = json.loads(line)["cell"], json.loads(line)["result"]
        run["losses"] = [123.0]  # what is recorded is believed
        (tmp_path / "cells" / f"mrpc-{cell['algorithm']}-{cell['seed']}.json").write_text(json.dumps(run) + "\n")
    glue.run(tmp_path, options(**parts))
    assert not (tmp_path / "cells.jsonl").exists() and not (tmp_path / "runs").exists()
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert [run["losses"] for cell in results["cells"] for run in cell["runs"]] == [[123.0]] * 2


def test_another_study_in_the_folder_is_refused(parts: dict[str, str], finished: Path) -> None:
    with pytest.raises(ValueError, match=r"holds a study with another budget: 1 there, 2 here.*--out"):
        glue.run(finished, options(budget=2, **parts))


def test_settings_of_an_earlier_study_are_taken(parts: dict[str, str], finished: Path, tmp_path: Path) -> None:
    source = str(finished / "results.json")
    out = glue.run(tmp_path, options(settings=source, **parts))
    before, after = (json.loads((p / "results.json").read_text(encoding="utf-8")) for p in (finished, out))
    for old, new in zip(before["cells"], after["cells"], strict=True):
        assert new["settings"] == old["settings"] and new["trials"] == []
        assert new["runs"][0]["metrics"] == old["runs"][0]["metrics"]  # the same seed, the same run


def test_tuning_never_sees_the_validation_rows(parts: dict[str, str]) -> None:
    spec = TaskSpec("glue/mrpc", "small", {"pretrained": parts["model"], "data": parts["data"]})
    held, whole = (sum(map(len, spec.build(split).nodes(0, 4))) for split in ("held-out", "validation"))
    assert (held, whole) == (72, 80)


def test_the_paper_s_settings_can_be_asked_for(parts: dict[str, str], tmp_path: Path) -> None:
    out = glue.run(tmp_path, options(settings="paper", algorithms="Bi^2Clip", **parts))
    (cell,) = json.loads((out / "results.json").read_text(encoding="utf-8"))["cells"]
    assert cell["algorithm"] == "bi2clip" and cell["settings"]["i_u"] == 1e-4


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"task": "MRCP"}, "Unknown task: 'mrcp'"),
        ({"task": "MRPC", "seeds": 0}, "Invalid seeds: got 0"),
        ({"task": "MRPC", "settings": "nowhere.json"}, "Invalid settings: got 'nowhere.json'"),
        ({"task": "MRPC", "algorithms": "avg-sdg"}, "no such algorithm of the paper. Did you mean .avg-sgd."),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    given: dict[str, object], said: str, parts: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        glue.run(tmp_path / "out", options(**parts, **given))
    assert not (tmp_path / "out").exists()


def test_a_diverged_trial_is_the_worst(parts: dict[str, str]) -> None:
    spec = TaskSpec("glue/mrpc", "small", {"pretrained": parts["model"], "data": parts["data"]})
    plan = ComparisonPlan({"MRPC": spec}, ("avg-sgd",), run={**QUICK_RUN, "rounds": 3})
    score = comparison_runs._score(plan, "MRPC", "avg-sgd")
    assert score({"ilr": 1e38}) == float("inf")
    assert score({"ilr": 1e-3}) <= 0


def test_curves(parts: dict[str, str], tmp_path: Path) -> None:
    out = curves.run(tmp_path, options(**parts))
    assert "The paper's curves are on QNLI" in (out / "table.md").read_text(encoding="utf-8")
    assert_unjudged(out)
    assert (out / "curves.png").stat().st_size > 5000


def test_gradients(parts: dict[str, str], tmp_path: Path) -> None:
    data = tiny_mnli(tmp_path)
    out = gradients.run(tmp_path / "out", options(task="MNLI", model=parts["model"], data=data))
    found = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert list(found["rows"]) == list(gradients.ROWS)
    for cell in found["rows"]["bi2clip after BiClip"]:
        assert cell["99.9 %"] <= 1e-4 * (1 + 1e-6)  # the upper threshold
    assert_unjudged(out)
    assert (out / "gradients.png").stat().st_size > 5000
    shapes = {
        row: [gradients.NoiseShape(c["skewness"], c["kurtosis"], c["median"], c["99.9 %"]) for c in cells]
        for row, cells in found["rows"].items()
    }
    plan = gradients.GradientsPlan(TaskSpec("glue/mnli"))
    claim = gradients.evaluate_claim(gradients.GradientsResults(plan, shapes))
    assert claim.verdict == "cannot tell" and "the paper's figure has lengths" in claim.figures


def test_the_gradients_study_takes_the_paper_s_settings_on_mnli() -> None:
    for name, settings in gradients.SETTINGS.items():
        assert settings == paper_settings(name, "mnli")
    assert gradients.SETTINGS["adam2"]["oeps"] == 1e-7


def scored(averages: dict[str, list[float]], tasks: list[str]) -> Comparison:
    """The results of a study where every number of an algorithm is this, seed by seed."""
    cells = []
    for name, by_seed in averages.items():
        for task in tasks:
            metrics = [dict.fromkeys(glue.METRICS[task], score) for score in by_seed]
            runs = tuple(SeedRun(seed, found, [found], [], 0.0) for seed, found in enumerate(metrics))
            cells.append(AlgorithmResult(task, name, {}, [], runs))
    columns = {task: TaskSpec(f"glue/{task.lower()}") for task in tasks}
    seeds = tuple(range(len(next(iter(averages.values())))))
    return Comparison(ComparisonPlan(columns, tuple(averages), seeds=seeds), {}, tuple(cells))


OTHERS = {"diloco": [80.0, 80.4, 79.6], "rmsprop-biclip": [78.0, 78.4, 77.6], "adam2": [79.0, 79.4, 78.6]}


@pytest.mark.parametrize(
    ("bi2clip", "tasks", "verdict"),
    [
        ([82.0, 82.4, 81.6], glue.labels(""), "holds"),
        ([76.0, 76.4, 75.6], glue.labels(""), "does not hold"),
        ([80.5, 80.9, 80.1], glue.labels(""), "cannot tell"),  # first, but by less than the seeds differ
        ([82.0, 82.4, 81.6], ["MRPC"], "cannot tell"),  # the claim is about the average of eight tasks
        ([77.7, 76.2, 79.1], ["MRPC"], "cannot tell"),
        ([82.0], glue.labels(""), "cannot tell"),
    ],
)
def test_claim_8_needs_all_tasks_and_a_gap_beyond_the_seeds(
    bi2clip: list[float], tasks: list[str], verdict: str
) -> None:
    averages = {name: scores[: len(bi2clip)] for name, scores in OTHERS.items()} | {"bi2clip": bi2clip}
    claims = {claim.number: claim for claim in glue.evaluate_claims(scored(averages, tasks))}
    assert claims[8].verdict == verdict
    if tasks == ["MRPC"]:
        assert "the average of eight tasks, and 7 of them were not run" in claims[8].figures


def test_an_algorithm_that_broke_down_ranks_last_and_is_not_the_best() -> None:
    averages = {**OTHERS, "avg-sgd": [70.0, 70.4, float("nan")], "bi2clip": [82.0, 82.4, 81.6]}
    for names in (averages, dict(reversed(averages.items()))):
        claims = {claim.number: claim for claim in glue.evaluate_claims(scored(names, glue.labels("")))}
        assert claims[8].verdict == "holds" and claims[8].figures.endswith("avg-sgd nan")
        assert claims[7].verdict == "cannot tell"  # nothing with SGD inside has an average


def test_a_page_says_how_long_trials_were_and_where_they_did_not_look() -> None:
    plan = ComparisonPlan({"MRPC": TaskSpec("glue/mrpc")}, ("avg-sgd",), budget=8, seeds=(0,), tuning={"rounds": 3})
    page = "\n".join(methods_section(Comparison(plan, {}, ()), []))
    assert "MRPC: a trial had 3 of the 10 rounds of a reported run" in page
    assert "tried only in the upper half of its range, at 0.50 to 0.88 of the way" in page
    more = "\n".join(methods_section(Comparison(replace(plan, budget=9), {}, ()), []))
    assert "upper half" not in more
