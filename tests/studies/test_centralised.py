from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tailopt.studies import centralised
from tailopt.studies.comparison import AlgorithmResult, Comparison, ComparisonPlan, SeedRun, TaskSpec
from tailopt.studies.study import StudyOptions
from tailopt.tasks import table
from tailopt.tasks.task import Defaults
from tests.studies.unjudged import assert_unjudged

transformers = pytest.importorskip("transformers", reason="the studies' extra is not installed")
for name in ("torchmetrics", "matplotlib", "safetensors"):
    pytest.importorskip(name, reason="the studies' extra is not installed")

ROW = 2 + 3 * 32 * 32  # of CIFAR-100's binary version


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made-up data of both tasks in one folder."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "squad").mkdir()
    rows = [{"context": f"Town {i} has {i} bridges.", "question": "How many?", "answer": f"{i}"} for i in range(12)]
    for name, part in (("train", rows[:8]), ("validation", rows[8:])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / "squad" / f"{name}.jsonl").write_text(text, encoding="utf-8")
    (folder / "cifar100").mkdir()
    for name, n in (("train", 20), ("test", 10)):
        content = torch.randint(0, 100, (n, ROW), generator=torch.Generator().manual_seed(n), dtype=torch.uint8)
        (folder / "cifar100" / f"{name}.bin").write_bytes(bytes(content.flatten().tolist()))
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer of bytes and a language model of one layer, as a folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("llama")
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words.train_from_iterator([], trainers.BpeTrainer(special_tokens=["<end>"], initial_alphabet=alphabet))
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", model_max_length=512)
    wrapped.save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    configuration = transformers.LlamaConfig(vocab_size=260, bos_token_id=None, eos_token_id=0, **sizes)
    transformers.AutoModelForCausalLM.from_config(configuration).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Presets of the smallest models."""
    monkeypatch.setenv("TAILOPT_CACHE", str(tmp_path / "cache"))
    usual = {"nodes": 1, "rounds": 2, "local_steps": 2, "batch_size": 4, "lower_is_better": False}
    small = {"width": 8, "layers": 1, "heads": 2, "patch": 16, "evaluated": 10}
    changed = {
        **table.PRESETS,
        "squad": {"small": {"length": 96, "answer_length": 4, "defaults": Defaults(**usual, metric="f1")}},
        "cifar100": {"small": {"pretrained": "", **small, "defaults": Defaults(**usual, metric="accuracy")}},
    }
    monkeypatch.setattr(table, "PRESETS", changed)


def run(out: Path, data: Path, llama: str, **settings: Any) -> dict[str, Any]:
    usual = {"preset": "small", "budget": 1, "seeds": 2, "device": "cpu", "progress": False}
    centralised.run(out, StudyOptions(model=llama, data=str(data), **{**usual, **settings}))
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    return found


def curves_in(part: dict[str, Any], name: str, algorithm: str) -> list[list[float]]:
    """What a figure shows of one part of results.json: the start, then the first metric of every evaluation."""
    metric = centralised.TASKS[name][1][0]
    (cell,) = [cell for cell in part["cells"] if cell["algorithm"] == algorithm]
    return [[part["start"][metric], *(row[metric] for row in run["curve"])] for run in cell["runs"]]


@pytest.mark.usefixtures("tiny")
def test_the_study_runs_both_tasks_and_goes_on_with_what_is_there(tmp_path: Path, data: Path, llama: str) -> None:
    found = run(tmp_path, data, llama)
    assert list(found["parts"]) == ["squad", "cifar100"]
    for name, part in found["parts"].items():
        assert [cell["algorithm"] for cell in part["cells"]] == ["avg-biclip", "avg-sgd", "avg-adam"]
        for algorithm in centralised.ALGORITHMS:
            curves = curves_in(part, name, algorithm)
            assert len(curves) == 2 and all(len(curve) == 3 and curve[0] == curves[0][0] for curve in curves)
        assert part["plan"]["fixed"] == {"avg-adam": {"inner_state": "keep"}}
    assert found["parts"]["squad"]["plan"]["space"] == "fine-tuning"
    assert found["parts"]["cifar100"]["plan"]["space"] == "scratch"
    page = (tmp_path / "table.md").read_text()
    for text in (
        "## SQuAD",
        "## CIFAR-100",
        "one every 2 steps, batch 4",
        "kept throughout",
        "Claim 11",
        "8 + 4",
    ):
        assert text in page, text
    assert (tmp_path / "centralised.png").stat().st_size > 10_000
    before = {path: path.read_bytes() for path in tmp_path.rglob("trials.jsonl")}
    assert len(before) == 6 and all(len(lines.splitlines()) == 3 for lines in before.values())
    assert run(tmp_path, data, llama) == found
    assert {path: path.read_bytes() for path in tmp_path.rglob("trials.jsonl")} == before


@pytest.mark.usefixtures("tiny")
def test_nested(tmp_path: Path, data: Path) -> None:
    found = run(tmp_path, data / "cifar100", "", task="cifar100", nodes=4, seeds=1, algorithms="avg-biclip,avg-adam")
    (part,) = found["parts"].values()
    assert part["plan"]["run"] == {"nodes": 4} and part["plan"]["fixed"] == {}
    page = (tmp_path / "table.md").read_text()
    assert "4 node(s)" in page and "new in every round" in page and "nested" in page
    assert "Claim 11: cannot tell" in page  # of one seed


@pytest.mark.usefixtures("tiny")
def test_a_quick_study_judges_nothing(tmp_path: Path, data: Path) -> None:
    run(tmp_path, data / "cifar100", "", task="cifar100", quick=True)
    assert_unjudged(tmp_path)


def part(biclip: list[list[float]], adam: list[list[float]]) -> centralised.TaskResults:
    def cell(name: str, curves: list[list[float]]) -> AlgorithmResult:
        runs = [SeedRun(i, {"accuracy": c[-1]}, [{"accuracy": v} for v in c], []) for i, c in enumerate(curves)]
        return AlgorithmResult("CIFAR-100", name, {}, tuple(runs))

    seeds = tuple(range(max(len(biclip), len(adam))))
    plan = ComparisonPlan({"CIFAR-100": TaskSpec("cifar100")}, ("avg-biclip", "avg-adam"), seeds=seeds)
    results = Comparison(plan, {}, (cell("avg-biclip", biclip), cell("avg-adam", adam)))
    return centralised.TaskResults("cifar100", results, {"accuracy": 1.0})


@pytest.mark.parametrize(
    ("biclip", "adam", "verdict"),
    [
        ([[10, 20 + 0.1 * s] for s in range(5)], [[9, 19 + 0.1 * s] for s in range(5)], "holds"),
        ([[10, 19.7 + 0.1 * s] for s in range(5)], [[10, 20 + 0.1 * s] for s in range(5)], "holds"),  # within a point
        ([[10, 15 + 0.1 * s] for s in range(5)], [[10, 20 + 0.1 * s] for s in range(5)], "does not hold"),  # ends lower
        ([[1, 2, 20]] * 5, [[1, 18, 20]] * 5, "does not hold"),  # as high, and slower
        ([[10, 19 + 0.5 * s] for s in range(5)], [[10, 22 - 0.5 * s] for s in range(5)], "cannot tell"),
        ([[10, 20]], [[9, 19]], "cannot tell"),  # one seed
        ([], [[9, 19], [8, 18]], "does not hold"),  # BiClip broke down
    ],
)
def test_the_claim_is_judged_by_end_and_by_speed(
    biclip: list[list[float]], adam: list[list[float]], verdict: str
) -> None:
    assert centralised.evaluate_claim([part(biclip, adam)]).verdict == verdict


def test_options_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Unknown task: 'glue'. Need one or both of squad, cifar100"):
        centralised.run(tmp_path, StudyOptions(task="glue"))
    with pytest.raises(ValueError, match="Invalid nodes: got 0"):
        centralised.run(tmp_path, StudyOptions(nodes=0))
    with pytest.raises(FileNotFoundError, match="holds no squad. With two tasks, give a folder that holds both"):
        centralised.run(tmp_path, StudyOptions(data=str(tmp_path)))
