"""Translation: what is trained and evaluated on, a loss without pads, greedy decoding."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tailopt
from tailopt.tasks.parallel_corpora import PUBLIC_NAMES
from tailopt.tasks.table import task
from tailopt.tasks.translation import NAMES, Translation
from tests.tasks.one_program import check_one_program
from tests.tasks.test_metrics import without_wordnet

sacrebleu = pytest.importorskip("sacrebleu")
nltk = pytest.importorskip("nltk")
transformers = pytest.importorskip("transformers")

DATA, MODELS = os.environ.get("TAILOPT_TEST_DATA", ""), os.environ.get("TAILOPT_TEST_MODELS", "")
with_data = pytest.mark.skipif(not DATA, reason="TAILOPT_TEST_DATA names no folder with data")
with_models = pytest.mark.skipif(not MODELS, reason="TAILOPT_TEST_MODELS names no folder with fetched models")


def files() -> Path:
    return Path(DATA) / "translation"


ENGLISH = (("two", "three", "four"), ("red", "old", "small"), ("houses", "dogs", "cars", "trees"), ("burn", "sleep"))
GERMAN = (("zwei", "drei", "vier"), ("rote", "alte", "kleine"), ("Häuser", "Hunde", "Autos", "Bäume"))
VERBS = ("brennen", "schlafen")


def sentences() -> list[tuple[str, str]]:
    english = [" ".join(words) + "." for words in itertools.product(*ENGLISH)]
    german = [" ".join(words) + "." for words in itertools.product(*GERMAN, VERBS)]
    return list(zip(english, german, strict=True))


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAILOPT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """72 sentences: 60 to train on, 12 to validate."""
    path = tmp_path_factory.mktemp("numerals")
    pairs = [sentences()[i] for i in torch.randperm(72, generator=torch.Generator().manual_seed(0)).tolist()]
    for stem, some in (("train", pairs[:60]), ("val", pairs[60:])):
        for i, language in enumerate(("en", "de")):
            text = "".join(pair[i] + "\n" for pair in some)
            (path / f"{stem}.{language}").write_text(text, encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer of whole words, with T5's special ones at T5's numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    known = ["<pad>", "</s>", "<unk>", "translate", "English", "to", "German", ":", "."]
    known += [word for row in (*ENGLISH, *GERMAN, VERBS) for word in row]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    path = tmp_path_factory.mktemp("words")
    whole = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    whole.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def tiny(folder: str, words: str) -> Translation:
    settings: dict[str, Any] = {"length": 16, "layers": 1, "width": 32, "meteor": "off"}
    return Translation("own", data=folder, pretrained="", tokenizer=words, **settings)


# ---- data ----


def test_held_out_pairs_are_not_trained_on(tiny: Translation) -> None:
    tuning = replace(tiny, judge="held-out", hold_out=0.2, limit=50)
    kept, held = tuning._pairs("train"), tuning._pairs("held-out")
    assert (len(kept[0]), len(held[0])) == (40, 10)
    assert not {*kept[0]} & {*held[0]}
    whole = replace(tiny, limit=50)._pairs("train")
    assert {*whole[0]} == {*kept[0], *held[0]}
    assert sum(len(part) for part in tuning.nodes(seed=0, n=3)) == 40


def test_the_baseline_is_a_unigram_model_of_the_targets(tiny: Translation) -> None:
    trained = [token for _, target in tiny.nodes(0, 1)[0] for token in target.tolist() if token]  # 0 pads
    targets = tiny._tokenised("validation")[1]
    counts, vocabulary = Counter(trained), len(tiny._tokenizer())
    losses = [-math.log((counts[t] + 1) / (len(trained) + vocabulary)) for t in targets.flatten().tolist() if t]
    assert tiny.baseline.metrics == {"loss": pytest.approx(statistics.fmean(losses))}


def test_what_the_nodes_get_depends_on_the_seed_alone(tiny: Translation) -> None:
    first, again, other = (tiny.nodes(seed, 3) for seed in (0, 0, 1))
    assert [len(part) for part in first] == [20, 20, 20]
    assert all(torch.equal(a.tensors[0], b.tensors[0]) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0].tensors[0], other[0].tensors[0])


@with_models
@with_data
def test_the_prefix_is_the_one_that_t5_knows() -> None:
    made = Translation(
        "multi30k", data=str(files() / "multi30k.zip"), pretrained="", tokenizer=f"{MODELS}/t5-tokenizer", limit=10
    )
    source, target = made._tokenised("train")
    assert source[:, :5].unique(dim=0).tolist() == [[13959, 1566, 12, 2968, 10]]  # translate English to German:
    assert all(row[row != 0][-1] == 1 for row in (*source, *target))  # </s> ends both


# ---- what goes wrong ----


def test_constructing_a_task_touches_nothing() -> None:
    for name in NAMES:
        for preset in ("paper", "small"):
            assert task(f"translation/{name}", preset, data="/nowhere/at/all").name == f"translation/{name}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": "xx"}, "Unknown language: 'xx'"),
        ({"target": "en"}, "Invalid target: got 'en'"),
        ({"judge": "train"}, "Invalid judge: got 'train'"),
        ({"meteor": "yes"}, "Invalid meteor: got 'yes'"),
        ({"hold_out": 1.5}, "Invalid hold_out: got 1.5"),
        ({"limit": -1}, "Invalid limit: got -1"),
        ({"width": 20}, "Invalid width: got 20"),
        ({"pieces": 100}, "Invalid pieces: got 100, but the embeddings of 'google-t5/t5-small' stay"),
    ],
)
def test_settings_out_of_range_are_refused_at_once(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        Translation(**settings)


def test_a_wrong_path_is_named() -> None:
    with pytest.raises(FileNotFoundError, match="there is no './no/such/folder'"):
        Translation(data="./no/such/folder").nodes(0, 3)


def test_another_pair_of_languages_is_named(folder: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"no two files NAME.en and NAME.fr; it has .*train.de"):
        Translation(target="fr", data=folder).nodes(0, 3)


def test_files_that_do_not_line_up_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.en").write_text("a\nb\n")
    (tmp_path / "train.de").write_text("a\n")
    with pytest.raises(ValueError, match="train.en of .* has 2 lines and train.de 1; need as many"):
        Translation(data=str(tmp_path)).nodes(0, 3)


def test_a_line_without_a_second_column_is_named(tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_text("a\tb\nc\n")
    with pytest.raises(ValueError, match="line 2 of .* has one column; need two, English and German"):
        Translation(data=str(tmp_path / "pairs.tsv")).nodes(0, 3)


OFFLINE = """
from tailopt.tasks.table import task
for name in ("ted-en-de", "newscomm-en-fr", "news-en-de", "tatoeba-en-fr", "multi30k-en-de"):
    try:
        task(f"translation/{name}").nodes(0, 3)
    except OSError as error:
        print(error)
"""


def test_without_a_network_the_public_name_is_named() -> None:
    pytest.importorskip("datasets")
    clean = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", OFFLINE], env=clean, capture_output=True, text=True, timeout=300)
    said = ended.stdout.splitlines()
    assert len(said) == len(PUBLIC_NAMES), ended.stderr
    for name, line in zip(("ted", "newscomm", "news", "tatoeba", "multi30k"), said, strict=True):
        assert f"Cannot get the data set '{PUBLIC_NAMES[name]}' from the hub" in line
        assert "--data PATH" in line


def test_a_corpus_without_a_public_name_says_where_it_is() -> None:
    with pytest.raises(ValueError, match="translation/multi30k-en-fr has no public name"):
        task("translation/multi30k-en-fr").nodes(0, 3)


def test_more_nodes_than_pairs_are_refused(tiny: Translation) -> None:
    with pytest.raises(ValueError, match="got nodes=61 for 60 samples"):
        tiny.nodes(seed=0, n=61)


def test_a_test_split_that_is_not_there_is_refused(tiny: Translation) -> None:
    with pytest.raises(ValueError, match="there is no 'test' in the data"):
        replace(tiny, judge="test").nodes(0, 3)


def test_a_tokenizer_that_does_not_fit_is_refused(tiny: Translation, words: str, folder: str, tmp_path: Path) -> None:
    small = replace(tiny, pieces=10).model(0)
    small.save_pretrained(tmp_path / "t5")
    with pytest.raises(ValueError, match="Invalid tokenizer: it has 33 entries, and the model of .* only 10"):
        Translation("own", data=folder, pretrained=str(tmp_path / "t5"), tokenizer=words).model(0)


# ---- model, loss, decoding ----


def test_a_model_of_a_folder_is_loaded_as_it_is(tiny: Translation, words: str, folder: str, tmp_path: Path) -> None:
    made = tiny.model(seed=3)
    made.save_pretrained(tmp_path / "t5")
    loaded = Translation("own", data=folder, pretrained=str(tmp_path / "t5"), tokenizer=words).model(seed=0)
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), loaded.parameters(), strict=True))


def test_weights_from_scratch_are_a_function_of_the_seed(tiny: Translation) -> None:
    first, again, other = (torch.cat([p.flatten() for p in tiny.model(seed).parameters()]) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_the_loss_is_the_mean_over_the_targets_tokens_whatever_the_padding(tiny: Translation) -> None:
    model, data = tiny.model(0), tiny.nodes(0, 3)[0]
    source, target = (part[:4].long() for part in data.tensors)
    target[0, 4:] = 0  # of another length than its neighbours
    decoder_input = torch.cat([torch.zeros(4, 1, dtype=torch.long), target[:, :-1]], 1)
    outputs = model(input_ids=source, attention_mask=(source != 0).long(), decoder_input_ids=decoder_input).logits
    kept = target != 0
    expected = -outputs.log_softmax(-1).gather(-1, target[..., None])[..., 0][kept].mean()
    assert tiny.loss(model, (source, target)).item() == pytest.approx(expected.item(), rel=1e-5)
    wider = tuple(torch.nn.functional.pad(part, (0, 9)) for part in (source, target))
    assert torch.equal(tiny.loss(model, (source, target)), tiny.loss(model, wider))


def test_decoding_takes_the_likeliest_piece_every_time(tiny: Translation) -> None:
    model = tiny.model(0).eval()
    source = tiny._tokenised("validation")[0][:1]
    source = source[source != 0][None].long()
    said = [0]
    with torch.no_grad():
        while len(said) < 17 and said[-1] != 1:
            outputs = model(input_ids=source, decoder_input_ids=torch.tensor([said])).logits
            said.append(int(outputs[0, -1].argmax()))
    from tailopt.tasks import pretrained

    expected = pretrained.tokenizer(tiny.tokenizer).decode(said, skip_special_tokens=True)
    assert tiny.translated(model, [tiny._pairs("validation")[0][0]]) == [expected]


def test_pieces_that_are_not_kept_become_the_unknown_one(tiny: Translation) -> None:
    shrunk = replace(tiny, pieces=15)
    kept = shrunk._vocabulary()
    assert len(kept) == 15 and kept[:3].tolist() == [0, 1, 2]
    assert shrunk.model(0).config.vocab_size == 15
    full, less = tiny._tokenised("train")[0].long(), shrunk._tokenised("train")[0].long()
    assert torch.equal(torch.where(torch.isin(full, kept), full, 2), kept[less])
    assert (less == 2).any()


def test_evaluation_leaves_the_model_as_it_was(tiny: Translation) -> None:
    model = tiny.model(0)
    before = [p.clone() for p in model.parameters()]
    model.train()
    first, again = tiny.evaluate(model, 0), tiny.evaluate(model, 0)
    assert first == again and {*first} == {"bleu", "loss"}
    assert model.training and all(module.training for module in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_bi2clip_learns_to_translate_numerals(tiny: Translation) -> None:
    model = tiny.model(0)
    start = tiny.evaluate(model, 0)
    result = tailopt.simulate(
        model,
        tailopt.algorithm("bi2clip", ilr=1.0, i_u=5e-3, i_d=5e-3, olr=1.0, o_u=1.0, o_d=0.0),
        loss=tiny.loss,
        data=tiny.nodes(0, 3),
        rounds=8,
        local_epochs=3,
        batch_size=5,
        seed=0,
        progress=False,
    )
    end = tiny.evaluate(result.model, 0)
    assert end["loss"] < start["loss"] / 2
    assert end["bleu"] > 30 > start["bleu"]


def test_all_nodes_run_as_one_program(tiny: Translation) -> None:
    check_one_program(tiny)


@pytest.mark.slow
@with_data
@with_models
def test_bi2clip_halves_the_loss_on_multi30k() -> None:
    """Ten rounds of 60 local steps on 3 nodes: 8.43 to about 4.1, measured on 100 validation pairs."""
    data, words = str(files() / "multi30k.zip"), f"{MODELS}/t5-tokenizer"
    made = task("translation/multi30k-en-de", "small", data=data, tokenizer=words)
    model, seed = made.model(0), 0
    start = made.evaluate(model, seed)
    result = tailopt.simulate(
        model,
        tailopt.algorithm("bi2clip", ilr=1.0, i_u=5e-3, i_d=5e-3, olr=1.0, o_u=0.3, o_d=0.0),
        loss=made.loss,
        data=made.nodes(seed, 3),
        rounds=10,
        local_steps=60,
        batch_size=16,
        seed=seed,
        progress=False,
    )
    end = made.evaluate(result.model, seed)
    assert start["loss"] == pytest.approx(8.43, abs=0.1)  # ln 2500, and half a nat since the outputs vary
    assert end["loss"] < start["loss"] / 2
    assert end["bleu"] > start["bleu"]


# ---- metrics ----


def test_the_signature_names_the_tokenisation(tiny: Translation) -> None:
    assert "tok:13a" in tiny.signature and "nrefs:1" in tiny.signature
    assert tiny.signature.endswith(f"version:{sacrebleu.__version__}")


def test_meteor_that_is_needed_says_how_to_get_its_data_before_training(folder: str) -> None:
    asked = f"Translation(data={folder!r}, meteor='need').nodes(0, 3)"
    ended = without_wordnet(f"from tailopt.tasks.translation import Translation\n{asked}")
    assert "LookupError: METEOR needs the data of WordNet: python -m nltk.downloader wordnet" in ended.stderr
