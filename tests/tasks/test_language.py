from __future__ import annotations

import lzma
import math
import os
from pathlib import Path

import pytest
import torch

import tailopt
from tailopt.cli import configuration
from tailopt.tasks import blocks, texts
from tailopt.tasks.blocks import Blocks
from tailopt.tasks.language import Language, negative_log_likelihood
from tailopt.tasks.table import PRESETS, task
from tests.tasks.one_program import check_one_program

pytest.importorskip("transformers")

DATA, MODELS = os.environ.get("TAILOPT_TEST_DATA"), os.environ.get("TAILOPT_TEST_MODELS")
needs_data = pytest.mark.skipif(not DATA, reason="needs the data folder: TAILOPT_TEST_DATA")
needs_models = pytest.mark.skipif(not MODELS, reason="needs the fetched tokenizers: TAILOPT_TEST_MODELS")
TINY = {"tokenizer": "", "length": 16, "layers": 1, "width": 8, "heads": 2, "dropout": 0.0}


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of our own."""
    monkeypatch.setenv("TAILOPT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two texts, one of them compressed, and a file that is none."""
    made = tmp_path / "own"
    made.mkdir()
    (made / "first.txt").write_text("to be or not to be, that is the question. " * 20, encoding="utf-8")
    (made / "second.md.xz").write_bytes(lzma.compress(b"once more unto the breach, dear friends. " * 10))
    (made / "picture.png").write_bytes(b"\x89PNG")
    return made


# --- The task ---------------------------------------------------------------------------------------------------------


def test_a_node_is_a_file_and_its_end_tests(folder: Path):
    found = Language("texts", data=str(folder), **TINY)
    assert found.corpus.names == ("first", "second")
    first, second = found.nodes(seed=0, n=2)
    text = b"to be or not to be, that is the question. " * 20
    cut = round(0.8 * len(text))
    trained = bytes(Blocks(*first.tensors).real().tolist())  # type: ignore[attr-defined]
    assert trained == text[:cut]
    assert bytes(found.corpus.evaluated.real().tolist()).startswith(text[cut:])
    assert len(found.nodes(seed=0, n=0)) == 2 and len(second) > 0


def test_the_baseline_is_a_unigram_model(folder: Path):
    found = Language("texts", data=str(folder), **TINY)
    assert found.baseline.metrics == {"perplexity": found.unigram, "loss": pytest.approx(math.log(found.unigram))}


def test_held_out_blocks_are_the_last_of_train_and_the_nodes_do_not_get_them(folder: Path):
    plain = Language("texts", data=str(folder), **TINY)
    tuning = Language("texts", data=str(folder), judge="held-out", hold_out=0.25, **TINY)
    for whole, less in zip(plain.corpus.train, tuning.corpus.train, strict=True):
        assert len(less) == len(whole) - int(0.25 * len(whole))
        assert torch.equal(whole.ids[: len(less)], less.ids)
    held = torch.cat([w.ids[len(k) :] for w, k in zip(plain.corpus.train, tuning.corpus.train, strict=True)])
    assert torch.equal(tuning.corpus.evaluated.ids, held)


def test_limits_draw_the_same_blocks_for_every_seed(folder: Path):
    found = Language("texts", data=str(folder), limit=3, evaluated=2, **TINY)
    assert [len(node) for node in found.nodes(0, 2)] == [3, 3] and len(found.corpus.evaluated) == 2
    one, other = (found.nodes(seed, 2)[0].tensors[0] for seed in (0, 1))  # type: ignore[attr-defined]
    assert torch.equal(one, other)
    longest = Language("texts", data=str(folder), largest=1, characters=100, **TINY)
    assert longest.corpus.names == ("first",) and int(longest.corpus.train[0].counts.sum()) == 80


def test_pretraining_deals_whole_blocks(folder: Path):
    found = Language("pretraining", data=str(folder), **TINY)
    parts = found.nodes(seed=0, n=3)
    dealt = torch.cat([part.tensors[0] for part in parts])  # type: ignore[attr-defined]
    every = Blocks.joined(found.corpus.train)
    assert sorted(dealt.tolist()) == sorted(every.ids.tolist())
    assert bool((every.counts == 16).all()) and max(map(len, parts)) - min(map(len, parts)) <= 1


class Uniform(torch.nn.Module):
    """Says that every token is as likely as any other."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.zeros(vocabulary))

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> object:
        logits = self.scale.expand(*input_ids.shape, -1)
        return type("Output", (), {"logits": logits})


def test_perplexity_of_a_uniform_model_is_the_vocabulary_and_padding_only_lowers_the_other(folder: Path):
    found = Language("texts", data=str(folder), **TINY)
    metrics = found.evaluate(Uniform(256), seed=0)
    assert metrics["perplexity"] == pytest.approx(256, rel=1e-5) and metrics["loss"] == pytest.approx(math.log(256))
    evaluated = found.corpus.evaluated
    share = float((evaluated.counts - 1).sum()) / (len(evaluated) * 15)
    assert share < 1
    assert metrics["perplexity_with_padding"] == pytest.approx(256**share, rel=1e-5)


def test_padding_changes_no_loss():
    model = Language("texts", data="", **TINY)
    made = model_of(model)
    ids = torch.randint(0, 256, (3, 16))
    counts = torch.tensor([16, 9, 2])
    found = negative_log_likelihood(made, ids, counts, "sum")
    alone = sum(
        negative_log_likelihood(made, ids[i : i + 1, :n], torch.tensor([n]), "sum") for i, n in enumerate(counts)
    )
    torch.testing.assert_close(found, torch.as_tensor(alone))
    noise = torch.where(torch.arange(16) < counts[:, None], ids, torch.randint(0, 256, (3, 16)))
    assert torch.equal(negative_log_likelihood(made, noise, counts, "sum"), found)


def test_all_nodes_run_as_one_program(folder: Path):
    check_one_program(Language("texts", data=str(folder), **TINY), nodes=0)


def model_of(found: Language) -> torch.nn.Module:
    """A model of a task without data of its own."""
    from tailopt.tasks import pretrained

    config = pretrained.transformers().GPT2Config(
        vocab_size=256, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return pretrained.fresh("causal", config, 0).eval()


def test_evaluation_leaves_the_model_as_it_was(folder: Path):
    found = Language("texts", data=str(folder), **{**TINY, "dropout": 0.5})
    model = found.model(0).train()
    assert found.evaluate(model, 0) == found.evaluate(model, 0)
    assert all(module.training for module in model.modules())


def test_models_are_functions_of_the_seed(folder: Path):
    found = Language("texts", data=str(folder), **TINY)
    one, again, other = (found.model(seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[key], again[key]) for key in one)
    assert any(not torch.equal(one[key], other[key]) for key in one)


def test_training_by_avg_biclip_beats_a_unigram_model_of_bytes(folder: Path):
    found = Language("texts", data=str(folder), **{**TINY, "width": 16})
    result = tailopt.simulate(
        found.model(0),
        tailopt.algorithm("avg-biclip", ilr=10.0, i_u=1e-3, i_d=1e-4),
        loss=found.loss,
        data=found.nodes(0, 0),
        rounds=8,
        local_steps=10,
        batch_size=8,
        weights="samples",
        evaluate=lambda model: found.evaluate(model, 0),
        evaluate_every=8,
        progress=False,
    )
    assert result.history[-1]["metrics"]["perplexity"] < 0.9 * found.unigram


@needs_data
def test_philosopher_has_eight_nodes_one_a_work():
    found = task("philosopher", "small", data=f"{DATA}/text", tokenizer="", characters=5000)
    assert len(found.nodes(seed=0, n=8)) == 8
    assert all(any(work in name for work in texts.WORKS) for name in found.corpus.names)  # type: ignore[attr-defined]
    assert found.corpus.names[0].startswith("kant") and "8 works" in found.data_description  # type: ignore[attr-defined]


@needs_data
@needs_models
def test_shakespeare_in_the_small_preset_with_gpt2s_tokenizer():
    data, words = f"{DATA}/text/shakespeare-leaf.txt.xz", f"{MODELS}/gpt2-tokenizer"
    found = task("shakespeare", "small", data=data, tokenizer=words, largest=3, characters=2000)
    parts = found.nodes(seed=0, n=3)
    assert len(parts) == 3 and found.defaults.participants == 1
    assert "HAMLET" in " ".join(found.corpus.names)  # type: ignore[attr-defined]
    loss = found.loss(found.model(0), tuple(parts[0][:2]))
    assert abs(float(loss.detach()) - math.log(found.corpus.vocabulary)) < 0.5  # type: ignore[attr-defined]


@needs_models
def test_a_second_look_at_the_same_texts_comes_from_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch):
    settings = {**TINY, "tokenizer": f"{MODELS}/gpt2-tokenizer"}
    first = Language("texts", data=str(folder), **settings).corpus
    blocks.load_blocks.cache_clear()
    monkeypatch.setattr(blocks.torch, "tensor", None)  # what tokenising would need
    second = Language("texts", data=str(folder), **settings).corpus
    assert torch.equal(first.evaluated.ids, second.evaluated.ids) and second.vocabulary == 50257


@needs_models
def test_a_pretrained_model_comes_with_its_own_tokenizer(folder: Path, tmp_path: Path):
    where = tmp_path / "small-gpt2"
    _saved_gpt2(where, vocabulary=50257)
    found = Language("texts", data=str(folder), pretrained=str(where), length=8)
    assert math.isfinite(found.evaluate(found.model(0), 0)["loss"])
    with pytest.raises(ValueError, match=r"Invalid length: got 64; .* reads at most 32"):
        Language("texts", data=str(folder), pretrained=str(where), length=64).model(0)


@needs_models
def test_a_tokenizer_that_does_not_fit_the_model_is_refused(folder: Path, tmp_path: Path):
    where = tmp_path / "too-few"
    _saved_gpt2(where, vocabulary=1000)
    with pytest.raises(ValueError, match=r"Invalid tokenizer: it has 50257 entries, .* only 1000 embeddings"):
        Language("texts", data=str(folder), pretrained=str(where), length=8).model(0)


def _saved_gpt2(where: Path, vocabulary: int) -> None:
    from tailopt.tasks import pretrained

    config = pretrained.transformers().GPT2Config(vocab_size=vocabulary, n_positions=32, n_embd=8, n_layer=1, n_head=2)
    pretrained.fresh("causal", config, 0).save_pretrained(where)  # type: ignore[operator]
    pretrained.tokenizer(f"{MODELS}/gpt2-tokenizer").save_pretrained(where)


# --- What can go wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "novels"}, "Invalid kind: got 'novels'; need one of shakespeare, philosopher, texts, pretraining"),
        ({"judge": "train"}, "Invalid judge: got 'train'"),
        ({"length": 1}, "Invalid length: got 1; need a whole number, 2 or more"),
        ({"test": 1.0}, "Invalid test: got 1.0; need 0 < test < 1"),
        ({"width": 10, "heads": 4}, "Invalid heads: got 4 for a width of 10"),
        ({"compact": True, "pretrained": "distilgpt2"}, "Invalid compact: the model 'distilgpt2' has a vocabulary"),
    ],
)
def test_settings_out_of_range_are_refused_at_once(settings: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        Language(**settings)  # type: ignore[arg-type]


def test_bad_data_get_a_sentence_before_any_training(folder: Path, tmp_path: Path):
    def nodes(kind: str = "texts", **settings: object) -> None:
        Language(kind, **{**TINY, **settings}).nodes(0, 0)  # type: ignore[arg-type]

    with pytest.raises(FileNotFoundError, match=r"Invalid data: none are named. Give a folder of text files"):
        nodes(data="")
    with pytest.raises(FileNotFoundError, match=r"Invalid data: there is no '.*nowhere'. Give a folder"):
        nodes(data=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"has 0 text files with 'kant' in their names; need one of each"):
        nodes("philosopher", data=str(folder))
    with pytest.raises(ValueError, match=r"no roles were found in .*first.txt. Give the complete works"):
        nodes("shakespeare", data=str(folder / "first.txt"))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(FileNotFoundError, match=r"has no text files; need .txt"):
        nodes(data=str(empty))
    (empty / "none.txt").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match=r"Invalid data: 'none' has 0 tokens, too few to train and to test on"):
        nodes(data=str(empty))
    (empty / "none.txt").write_bytes("Köln".encode("latin-1"))
    texts.load_texts.cache_clear()
    with pytest.raises(ValueError, match=r"a file of .* is not UTF-8"):
        nodes(data=str(empty))
    with pytest.raises(ValueError, match=r"Invalid nodes: got 5, and there are 2 texts"):
        Language("texts", data=str(folder), **TINY).nodes(0, 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Invalid hold_out: 0.001 of the blocks of any text is less than one"):
        nodes(data=str(folder), judge="held-out", hold_out=0.001)


def test_without_a_network_public_names_get_a_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch):
    datasets, hub = pytest.importorskip("datasets"), pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)  # what HF_HUB_OFFLINE=1 sets when they are imported
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match=r"Cannot load the (model|tokenizer) 'distilgpt2' here or from the hub"):
        Language("texts", data=str(folder), pretrained="distilgpt2").nodes(0, 0)
    with pytest.raises(OSError, match=r"Cannot get the data set 'flwrlabs/shakespeare' from the hub: .* --data PATH"):
        task("shakespeare").nodes(0, 1144)


def test_one_node_of_shakespeare_takes_part_unless_somebody_says_otherwise():
    tables = {"task": {"name": "shakespeare"}, "algorithm": {"name": "avg-sgd", "ilr": 0.1}, "run": {}, "schedules": {}}
    found = configuration.resolve(tables).run
    assert (found.nodes, found.participants, found.weights, found.local_epochs) == (1144, 1, "samples", 1)
    assert configuration.resolve({**tables, "run": {"participation": 0.5}}).run.participants is None
    assert configuration.resolve({**tables, "run": {"participants": 3}}).run.participants == 3
    assert {"paper", "small"} == {*PRESETS["philosopher"]}


# --- Learning, measured -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_data
@needs_models
def test_philosopher_under_avg_biclip_falls_below_a_unigram_model():
    found = task("philosopher", "small", data=f"{DATA}/text", tokenizer=f"{MODELS}/gpt2-tokenizer")
    assert isinstance(found, Language)
    usual = found.defaults
    result = tailopt.simulate(
        found.model(0),
        tailopt.algorithm("avg-biclip", ilr=2.0, i_u=1e-3, i_d=1e-4),
        loss=found.loss,
        data=found.nodes(0, 8),
        rounds=usual.rounds,
        local_steps=usual.local_steps,
        batch_size=usual.batch_size,
        weights=usual.weights,
        evaluate=lambda model: found.evaluate(model, 0),
        evaluate_every=usual.rounds,
        progress=False,
    )
    # seed 0: 881 after six rounds, 772 after ten; the unigram model has 992
    assert result.history[-1]["metrics"]["perplexity"] < 0.95 * found.unigram
