from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tailopt.paper import paper_settings
from tailopt.studies import curves, glue, gradients
from tailopt.studies.comparison import QUICK_RUN, AlgorithmResult, Comparison, ComparisonPlan, SeedRun, TaskSpec
from tailopt.studies.comparison_runs import compare
from tailopt.studies.search_spaces import SPACES
from tailopt.studies.study import StudyOptions
from tailopt.studies.tables import methods_section
from tailopt.sweeps.problem import problems
from tailopt.sweeps.result import BudgetPoint
from tailopt.sweeps.space import Range
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
    assert "tuned by 2 Sobol points of its own, at the horizon that is reported" in text
    assert "tuned on a slice held out of train" in text and "- inner sgd: ilr 0.001 to 0.3" in text
    assert_unjudged(finished)
    found = json.loads((finished / "results.json").read_text(encoding="utf-8"))
    for cell in found["cells"]:
        assert [run["seed"] for run in cell["runs"]] == [0] and len(cell["trials"]) == 2
        assert 0 <= cell["runs"][0]["metrics"]["accuracy"] <= 100
    assert (finished / "glue.png").stat().st_size > 5000


def test_what_is_there_is_not_run_again_and_more_seeds_go_on(parts: dict[str, str], finished: Path) -> None:
    records = sorted((finished / "sweeps").glob("*/trials.jsonl"))
    first = [path.read_bytes() for path in records]
    glue.run(finished, options(seeds=2, **parts))
    for path, before in zip(records, first, strict=True):
        after = path.read_bytes()
        assert after.startswith(before) and len(after.splitlines()) == len(before.splitlines()) + 1
    found = json.loads((finished / "results.json").read_text(encoding="utf-8"))
    assert [[run["seed"] for run in cell["runs"]] for cell in found["cells"]] == [[0, 1]] * 2


def test_another_study_in_the_folder_is_refused(parts: dict[str, str], finished: Path) -> None:
    with pytest.raises(ValueError, match=r"holds a study with another settings: \"tune\" there, \"paper\" here.*--out"):
        glue.run(finished, options(settings="paper", **parts))


def test_settings_of_an_earlier_study_are_taken(parts: dict[str, str], finished: Path, tmp_path: Path) -> None:
    source = str(finished / "results.json")
    out = glue.run(tmp_path, options(settings=source, **parts))
    before, after = (json.loads((p / "results.json").read_text(encoding="utf-8")) for p in (finished, out))
    for old, new in zip(before["cells"], after["cells"], strict=True):
        assert new["settings"] == old["settings"] and new["trials"] == []
        for key, value in old["runs"][0]["metrics"].items():  # the same seed, the same run
            assert new["runs"][0]["metrics"][key] == pytest.approx(value, rel=1e-4)


def test_tuning_never_sees_the_validation_rows(parts: dict[str, str]) -> None:
    spec = TaskSpec("glue/mrpc", "small", {"pretrained": parts["model"], "data": parts["data"]})
    arguments = dict.fromkeys(("loss", "data", "batches", "evaluate", "test", "schedules", "device", "precision"))
    tuned, reported = problems(spec.build(), {**arguments, "nodes": 4})
    held, whole = (sum(map(len, problem.data(0))) for problem in (tuned, reported))
    assert (held, whole) == (72, 80)


def test_the_paper_s_settings_can_be_asked_for(parts: dict[str, str], tmp_path: Path) -> None:
    out = glue.run(tmp_path, options(settings="paper", algorithms="Bi^2Clip", **parts))
    (cell,) = json.loads((out / "results.json").read_text(encoding="utf-8"))["cells"]
    assert cell["algorithm"] == "bi2clip" and cell["settings"]["i_u"] == 1e-4


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"task": "MRCP"}, "Unknown task: 'mrcp'; did you mean 'MRPC'\\?"),
        ({"task": "MRPC", "seeds": 0}, "Invalid seeds: got 0"),
        ({"task": "MRPC", "settings": "nowhere.json"}, "Invalid settings: got 'nowhere.json'"),
        ({"task": "MRPC", "algorithms": "avg-sdg"}, "no such algorithm of the paper; did you mean .avg-sgd."),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    given: dict[str, object], said: str, parts: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        glue.run(tmp_path / "out", options(**parts, **given))
    assert not (tmp_path / "out").exists()


def test_points_that_diverge_are_the_worst_and_a_study_of_them_alone_has_no_figures(
    parts: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = SPACES["fine-tuning"]
    wild = {"ilr": Range(1e37, 1e38)}
    monkeypatch.setitem(SPACES, "fine-tuning", replace(space, inner={**space.inner, "sgd": wild}))  # type: ignore[arg-type]
    spec = TaskSpec("glue/mrpc", "small", {"pretrained": parts["model"], "data": parts["data"]})
    run = {**QUICK_RUN, "rounds": 3}
    plan = ComparisonPlan({"MRPC": spec}, ("avg-sgd",), budget=2, tuning_seeds=(100,), seeds=(0,), run=run)
    (cell,) = compare(plan, tmp_path, progress=False).cells
    assert [run.metrics for run in cell.runs] == [None] and cell.at_edge == ()


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
            runs = tuple(SeedRun(seed, found, [found], []) for seed, found in enumerate(metrics))
            cells.append(AlgorithmResult(task, name, {}, runs))
    columns = {task: TaskSpec(f"glue/{task.lower()}") for task in tasks}
    seeds = tuple(range(len(next(iter(averages.values())))))
    return Comparison(ComparisonPlan(columns, tuple(averages), seeds=seeds), {}, tuple(cells))


SPREAD = (0.4, 0.0, -0.4, 0.2, -0.2)
OTHERS = {
    name: [level + s for s in SPREAD] for name, level in (("diloco", 80.0), ("rmsprop-biclip", 78.0), ("adam2", 79.0))
}


@pytest.mark.parametrize(
    ("bi2clip", "tasks", "verdict"),
    [
        ([82.0 + s for s in SPREAD], glue.labels(""), "holds"),
        ([76.0 + s for s in SPREAD], glue.labels(""), "does not hold"),
        ([80.2 - s for s in SPREAD], glue.labels(""), "cannot tell"),  # first, but by less than the seeds differ
        ([82.0 + s for s in SPREAD], ["MRPC"], "cannot tell"),  # the claim is about the average of eight tasks
        ([82.0, 82.4, 81.6], glue.labels(""), "cannot tell"),  # three seeds
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
    averages = {**OTHERS, "avg-sgd": [70.0, 70.4, float("nan"), 70.0, 70.1], "bi2clip": [82.0 + s for s in SPREAD]}
    for names in (averages, dict(reversed(averages.items()))):
        claims = {claim.number: claim for claim in glue.evaluate_claims(scored(names, glue.labels("")))}
        assert claims[8].verdict == "holds" and "avg-sgd nan" in claims[8].figures
        assert claims[7].verdict == "cannot tell"  # nothing with SGD inside has an average


def test_one_claim_has_one_test_in_all_studies() -> None:
    """The curves of one task and the table of all: claim 7 by the best of either kind."""
    averages = {"avg-sgd": [70.0 + s for s in SPREAD], "avg-adam": [60.0 + s for s in SPREAD], **OTHERS}
    results = scored(averages, ["QNLI"])
    (on_one_task,) = curves.evaluate_claims(results, "QNLI")
    of_table = {claim.number: claim for claim in glue.evaluate_claims(results)}[7]
    assert on_one_task.verdict == of_table.verdict == "holds" and on_one_task.text == of_table.text


def test_a_page_says_where_it_looked_and_what_fewer_points_would_have_found() -> None:
    plan = ComparisonPlan({"MRPC": TaskSpec("glue/mrpc")}, ("avg-sgd",))
    curve = tuple(BudgetPoint(n, value, value, value, value) for n, value in ((5, 71.0), (20, 73.0), (64, 74.5)))
    cell = AlgorithmResult(
        "MRPC", "avg-sgd", {"ilr": 0.5}, (), [], curve, {"ilr": (1e-3, 3.0)}, ("avg-sgd: ilr at the upper end",)
    )
    page = "\n".join(methods_section(Comparison(plan, {}, (cell,)), []))
    assert "tuned by 64 Sobol points of its own, at the horizon that is reported" in page
    assert "the mean over the tuning seeds 100, 101" in page and "seeds 0, 1, 2, 3, 4" in page
    assert "MRPC, avg-sgd: ilr at the upper end" in page
    assert "- MRPC: avg-sgd ilr 0.001 to 3" in page  # the range that was widened
    assert (
        "| algorithm | MRPC, n = 5 | MRPC, n = 20 | MRPC, n = 64 |" in page and "| avg-sgd | 71 | 73 | 74.5 |" in page
    )
