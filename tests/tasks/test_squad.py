from __future__ import annotations

import json
import lzma
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tailopt.algorithms import algorithm
from tailopt.engines.simulate import simulate
from tailopt.tasks import squad
from tailopt.tasks.squad import Question, Squad, load, split_by_passage
from tailopt.tasks.table import task
from tests.tasks.one_program import check_one_program

transformers = pytest.importorskip("transformers", reason="the studies' extra is not installed")
pytest.importorskip("torchmetrics", reason="the studies' extra is not installed")

SHARED, MODELS = os.environ.get("TAILOPT_TEST_DATA"), os.environ.get("TAILOPT_TEST_MODELS")
real = pytest.mark.skipif(not SHARED, reason="TAILOPT_TEST_DATA names no folder of data")
fetched = pytest.mark.skipif(not MODELS, reason="TAILOPT_TEST_MODELS names no folder of models")

CITIES = ["Paris", "Rome", "Oslo", "Cairo", "Lima", "Quito", "Delhi", "Hanoi", "Seoul", "Tunis"]
ROWS = [
    {
        "context": f"{city} has {number} bridges, and a mayor.",
        "question": f"How many bridges has {city}?",
        "answer": f"{number} bridges",
    }
    for number, city in enumerate(CITIES, 3)
]


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TAILOPT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer of bytes and a Llama of two layers, as a folder."""
    return str(built(tmp_path_factory.mktemp("model")))


def built(folder: Path, entries: int = 300) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words.train_from_iterator([], trainers.BpeTrainer(special_tokens=["<end>"], initial_alphabet=alphabet))
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", model_max_length=512)
    wrapped.save_pretrained(folder)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    configuration = transformers.LlamaConfig(
        vocab_size=entries, max_position_embeddings=512, bos_token_id=None, eos_token_id=0, pad_token_id=None, **sizes
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(configuration).save_pretrained(folder)
    return folder


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def data(tmp_path: Path) -> str:
    return str(lines(tmp_path / "own.jsonl", ROWS))


def tiny(model: str, data: str, **settings: Any) -> Squad:
    return Squad(**{"pretrained": model, "data": data, "length": 128, "answer_length": 14, **settings})


# ---- data ----


def official(rows: list[dict[str, Any]]) -> str:
    paragraphs = [
        {
            "context": row["context"],
            "qas": [
                {
                    "id": str(i),
                    "question": row["question"],
                    "answers": [{"text": text, "answer_start": 0} for text in (row["answer"], row["context"][:5])],
                }
            ],
        }
        for i, row in enumerate(rows)
    ]
    return json.dumps({"version": "1.1", "data": [{"title": "towns", "paragraphs": paragraphs}]})


def test_the_official_files_keep_every_reference_answer(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "squad.zip", "w") as archive:
        archive.writestr("inside/train-v1.1.json", official(ROWS[:7]))
        archive.writestr("inside/dev-v1.1.json", official(ROWS[7:]))
    found = load(str(tmp_path / "squad.zip"))
    assert len(found.train) == 7 and found.description == "squad.zip: 7 + 3 questions"
    assert found.validation[0] == Question(
        "Hanoi has 10 bridges, and a mayor.", "How many bridges has Hanoi?", ("10 bridges", "Hanoi")
    )


def test_json_lines_alone_are_split_by_passage_and_in_two_files_are_not(tmp_path: Path, data: str) -> None:
    found = load(data)
    assert (len(found.train), len(found.validation)) == (9, 1)
    assert "split by passage: 10% of the passages are the validation split" in found.description
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "own.jsonl.xz").write_bytes(lzma.compress(Path(data).read_bytes()))
    assert load(str(tmp_path / "packed")).validation == found.validation
    (tmp_path / "two").mkdir()
    lines(tmp_path / "two" / "train.jsonl", ROWS[:4])
    lines(tmp_path / "two" / "validation.jsonl", ROWS[4:])
    assert [len(part) for part in (load(str(tmp_path / "two")).train, load(str(tmp_path / "two")).validation)] == [4, 6]


def test_a_passage_is_never_on_both_sides() -> None:
    rows = [Question(f"passage {i % 13}", f"question {i}", ("passage",)) for i in range(100)]
    train, out = split_by_passage(rows, 0.25)
    assert len({row.context for row in out}) == 3 and not {r.context for r in out} & {r.context for r in train}
    assert sorted(r.question for r in train + out) == sorted(r.question for r in rows)


@real
def test_the_sample_has_its_counts_and_every_answer_stands_in_its_context() -> None:
    found = load(f"{SHARED}/squad/squad-v1.1-sample.zip")
    rows = found.train + found.validation
    assert len(rows) == 4_330 and len({row.context for row in rows}) == 3_902
    assert all(row.answers[0] in row.context for row in rows)
    assert len({row.context for row in found.validation}) == 390
    assert not {row.context for row in found.train} & {row.context for row in found.validation}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": "9 towers"}, r"row 2 of own.jsonl \('How many bridges has Rome\?'\) has the answer '9 towers', wh"),
        ({"answer": " "}, "row 2 of own.jsonl .* has the answer ' '"),
        ({"answer": None}, "line 2 of own.jsonl has no column 'answer'; it has context, question"),
    ],
)
def test_rows_that_no_model_could_answer_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    row = {key: value for key, value in {**ROWS[1], **change}.items() if value is not None}
    lines(tmp_path / "own.jsonl", [ROWS[0], row, ROWS[2]])
    with pytest.raises(ValueError, match=message):
        load(str(tmp_path / "own.jsonl"))


def test_a_data_set_as_the_hub_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="the studies' extra is not installed")
    rows = [{**row, "answers": {"text": [row["answer"]] * 2, "answer_start": [0, 0]}} for row in ROWS]
    made = datasets.Dataset.from_list(rows)
    monkeypatch.setattr(squad.hub, "dataset", lambda name, split: made)  # the download alone is left out
    found = load("someone/squad")
    assert len(found.train) == len(found.validation) == 10 and found.train[2].answers == ("5 bridges", "5 bridges")
    monkeypatch.setattr(squad.hub, "dataset", lambda name, split: made.remove_columns("answers"))
    with pytest.raises(ValueError, match="someone/else, train has no column 'answers'"):
        load("someone/else")


def test_official_files_without_answers_or_keys_are_refused(tmp_path: Path) -> None:
    (tmp_path / "dev-v1.1.json").write_text(official(ROWS[:1]))
    without = json.loads(official(ROWS[:2]))
    without["data"][0]["paragraphs"][1]["qas"][0]["answers"] = []
    (tmp_path / "train-v1.1.json").write_text(json.dumps(without))
    with pytest.raises(ValueError, match="row 2 of train-v1.1.json .* has no answer"):
        load(str(tmp_path))
    del without["data"][0]["paragraphs"][1]["context"]
    (tmp_path / "train-v1.1.json").write_text(json.dumps(without))
    with pytest.raises(ValueError, match="train-v1.1.json has no column 'context'"):
        load(str(tmp_path))


def test_a_wrong_path_other_files_and_an_absent_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (str(tmp_path / "nothing"), "squad.zip", ""):
        with pytest.raises(FileNotFoundError, match="there is no .*--data PATH"):
            load(wrong)
    (tmp_path / "readme.txt").write_text("")
    with pytest.raises(FileNotFoundError, match="has readme.txt; need train-v1.1.json and dev-v1.1.json"):
        load(str(tmp_path))
    (tmp_path / "one.jsonl").write_text("{\n")
    with pytest.raises(ValueError, match="line 1 of one.jsonl is no JSON"):
        load(str(tmp_path / "one.jsonl"))
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(ValueError, match="none.jsonl has no questions"):
        load(str(tmp_path / "none.jsonl"))
    lines(tmp_path / "single.jsonl", ROWS[:1])
    with pytest.raises(ValueError, match="there are 1 passages; need 2 or more"):
        load(str(tmp_path / "single.jsonl"))
    datasets = pytest.importorskip("datasets", reason="the studies' extra is not installed")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="Cannot get the data set 'rajpurkar/squad' from the hub.*--data PATH"):
        load("rajpurkar/squad")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"judge": "test"}, "Invalid judge: got 'test'"),
        ({"hold_out": 0.0}, "Invalid hold_out: got 0.0"),
        ({"length": 3}, "Invalid length: got 3; need a whole number, 16 or more"),
        ({"limit": -1}, "Invalid limit: got -1"),
    ],
)
def test_settings_are_judged_before_anything_is_read(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Squad(data="/nowhere", **settings)


def test_lengths_that_nothing_fits_into(model: str, data: str) -> None:
    with pytest.raises(ValueError, match="no question of train in .* fits into 40 tokens"):
        tiny(model, data, length=40).nodes(0, 1)
    with pytest.raises(ValueError, match="Invalid length: got 1000; need at most 512"):
        tiny(model, data, length=1000).nodes(0, 1)


def test_a_tokenizer_that_does_not_fit_the_model(tmp_path: Path, data: str) -> None:
    built(tmp_path / "small", entries=200)
    with pytest.raises(ValueError, match="Invalid tokenizer: it has 257 entries, and the model of .* only 200"):
        tiny(str(tmp_path / "small"), data).model(0)


def test_more_nodes_than_questions(model: str, data: str) -> None:
    with pytest.raises(ValueError, match="Invalid nodes: got nodes=10 for 9 samples"):
        tiny(model, data).nodes(0, 10)


# ---- rows as numbers, loss, answers ----


def texts(made: Squad, node: Any) -> list[str]:
    words = transformers.AutoTokenizer.from_pretrained(made.pretrained)
    numbers, sizes, _ = node.tensors
    return [words.decode(row[-size:].tolist()) for row, size in zip(numbers, sizes, strict=True)]


def test_a_row_is_passage_question_and_answer(model: str, data: str) -> None:
    made = tiny(model, data)
    found = texts(made, made.nodes(0, 1)[0])
    assert len(found) == 9
    assert (
        "Context: Oslo has 5 bridges, and a mayor.\nQuestion: How many bridges has Oslo?\nAnswer: 5 bridges<end>"
        in found
    )
    assert (
        made.data_description
        == f"{load(data).description}; within 128 tokens (answers within 14): 9 to train on, 1 to validate on"
    )


def test_what_is_held_out_no_node_gets(model: str, data: str) -> None:
    made = tiny(model, data, judge="held-out", hold_out=0.3)
    kept = sum((texts(made, node) for node in made.nodes(0, 2)), [])
    held = [row.question for row in made._encoded("held-out").questions]
    assert len(kept) == 6 and len(held) == 3
    assert not any(question in text for question in held for text in kept)
    limited = [set(texts(made, tiny(model, data, limit=4).nodes(seed, 1)[0])) for seed in (0, 1)]
    assert limited[0] == limited[1] and len(limited[0]) == 4


def test_the_loss_is_the_mean_over_answer_tokens_padding_or_not(model: str, data: str) -> None:
    """Against each row alone, without padding, with all logits."""
    made = tiny(model, data)
    llama, batch = made.model(0), made.nodes(0, 1)[0].tensors
    total, count = 0.0, 0
    for row, size, answer in zip(*batch, strict=True):
        own = row[-size:].long()[None]
        logits = llama(input_ids=own).logits.log_softmax(-1)[0, :-1]
        picked = logits.gather(1, own[0, 1:, None])[-answer:]
        total, count = total - picked.sum().item(), count + int(answer)
    assert len(set(batch[1].tolist())) > 1 and len(set(batch[2].tolist())) > 1  # there is padding
    assert made.loss(llama, batch).item() == pytest.approx(total / count, rel=1e-5)
    made.loss(llama, batch).backward()
    assert all(p.grad.isfinite().all() for p in llama.parameters() if p.grad is not None)


def test_a_model_that_learns_its_questions_answers_them(model: str, data: str, tmp_path: Path) -> None:
    """The questions to validate on are those trained on: every answer must come out letter by letter."""
    (tmp_path / "same").mkdir()
    for name in ("train", "validation"):
        lines(tmp_path / "same" / f"{name}.jsonl", ROWS[:4])
    made = tiny(model, str(tmp_path / "same"))
    before = made.evaluate(made.model(0), 0)
    before_loss = made.loss(made.model(0), made.nodes(0, 1)[0].tensors).item()
    adam = algorithm("avg-adam", ilr=5e-3, ieps=1e-8, inner_state="keep")
    result = simulate(
        made.model(0), adam, loss=made.loss, data=made.nodes(0, 1), batch_size=4, rounds=1, local_steps=60,
        evaluate=lambda m: made.evaluate(m, 0), progress=False,
    )  # fmt: skip
    after = result.history[-1]["metrics"]
    assert before["exact_match"] == 0 and after["exact_match"] == 100 and after["f1"] == 100
    assert result.history[-1]["loss"] < before_loss / 2


def test_a_frozen_module_keeps_its_mode_through_evaluation(model: str, data: str) -> None:
    made = tiny(model, data, evaluated=1)
    llama = made.model(0).train()
    llama.norm = torch.nn.BatchNorm1d(3).eval()
    made.evaluate(llama, 0)
    assert llama.training and not llama.norm.training


def test_evaluation_takes_some_questions_and_puts_the_mode_back(model: str, data: str) -> None:
    made = tiny(model, data, judge="held-out", hold_out=0.5, evaluated=2)
    llama = made.model(0)
    llama.train()
    found = made.evaluate(llama, 0)
    assert llama.training and set(found) == {"exact_match", "f1"}
    assert len(made._chosen("held-out", made.evaluated)) == 2
    assert found == made.evaluate(llama, 1)


@real
@fetched
def test_the_real_tokenizer_reads_the_sample() -> None:
    made = Squad(
        pretrained=f"{MODELS}/smollm2-135m",
        data=f"{SHARED}/squad/squad-v1.1-sample.zip",
        length=128,
        answer_length=16,
    )
    node = made.nodes(0, 1)[0]
    rows = made._encoded("train").questions
    words = transformers.AutoTokenizer.from_pretrained(made.pretrained)
    encoded = made._encoded("train")
    for i in range(0, len(rows), 50):
        whole = words.decode(encoded.tokens[i, -encoded.sizes[i] :].tolist(), skip_special_tokens=True)
        assert whole == f"{squad.prompt(rows[i])} {rows[i].answers[0]}"
    assert 400 < len(node) < 618 and node.tensors[0].shape[1] == 128


def test_the_presets() -> None:
    small, paper = task("squad", preset="small"), task("squad")
    assert isinstance(small, Squad) and small.defaults.nodes == 1 and small.length < 256
    assert isinstance(paper, Squad) and paper.pretrained == "Qwen/Qwen2.5-0.5B" and paper.limit == 0


def test_all_nodes_run_as_one_program(model: str, data: str) -> None:
    check_one_program(tiny(model, data))
