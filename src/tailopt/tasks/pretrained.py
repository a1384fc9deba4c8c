"""Models and tokenizers of Transformers, by public name or from a folder, and sentences for what can go wrong.

A name without a folder of that name here is asked for at the hub. Whatever is not in the weights that were found (a
classifier's head) is drawn from the seed. Nothing that is loaded may bring code, and weights come as safetensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tailopt.optional import require
from tailopt.seeds import derive
from tailopt.tasks.hub import is_reachable

# what a model is for -> the class of Transformers that loads it
KINDS = {
    "classifier": "AutoModelForSequenceClassification",
    "causal": "AutoModelForCausalLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "images": "AutoModelForImageClassification",
}


def transformers() -> Any:
    """Import the package transformers."""
    return require("transformers", "This task needs transformers", extra="studies")


def tokenizer(source: str) -> Any:
    """The tokenizer of a public name or a folder."""
    with _explained("tokenizer", source):
        return transformers().AutoTokenizer.from_pretrained(source, local_files_only=_local(source))


def model(kind: str, source: str, seed: int, **settings: Any) -> torch.nn.Module:
    """A model of a public name or a folder, in fp32; what its weights lack is drawn from the seed.

    Args:
        kind: "classifier", "causal", "seq2seq" or "images".
        settings: of its configuration, such as num_labels.
    """
    loader = getattr(transformers(), KINDS[kind])
    with _explained("model", source), _seeded(seed):
        loaded: torch.nn.Module = loader.from_pretrained(
            source,
            dtype=torch.float32,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            local_files_only=_local(source),
            **settings,
        )
    return loaded


def fresh(kind: str, configuration: Any, seed: int) -> torch.nn.Module:
    """A model from scratch: a configuration of Transformers, and weights drawn from the seed."""
    with _seeded(seed):
        made: torch.nn.Module = getattr(transformers(), KINDS[kind]).from_config(configuration)
    return made


def check_fits(words: Any, found: torch.nn.Module, source: str) -> None:
    """Refuse a tokenizer that can give numbers beyond the model's vocabulary."""
    embeddings = found.get_input_embeddings()  # type: ignore[operator]
    if len(words) > embeddings.num_embeddings:
        raise ValueError(
            f"Invalid tokenizer: it has {len(words)} entries, and the model of {source!r} only "
            f"{embeddings.num_embeddings} embeddings. Take the tokenizer that belongs to the model."
        )


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The weights that are drawn meanwhile are a function of the seed, and the caller's generator stays as it was."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a head that is new is no surprise here
        torch.manual_seed(derive(seed, "weights"))
        yield


@contextmanager
def _explained(what: str, source: str) -> Iterator[None]:
    if not source:
        raise ValueError(f"Invalid {what}: none is named. Give a folder or a public name: --model NAME.")
    if looks_like_a_path(source) and not Path(source).is_dir():
        raise FileNotFoundError(
            f"Invalid {what}: there is no folder {source!r}. Give the path of one, or a public name."
        )
    silent = _quiet()
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().split("\n")[0]
        where = "in the folder" if Path(source).is_dir() else "here or from the hub"
        raise OSError(
            f"Cannot load the {what} {source!r} {where}: {reason} Give a folder that has one: --model PATH."
        ) from None
    finally:
        silent()


def _local(source: str) -> bool:
    """Whether only files that are here already can be had."""
    return Path(source).is_dir() or not is_reachable()


def looks_like_a_path(source: str) -> bool:
    """Whether a text can only be a path: the hub's names are `name` or `owner/name`."""
    return source.startswith((".", "/", "~")) or source.count("/") > 1 or "\\" in source


def _quiet() -> Any:
    """Silence the package's own reports and bars; returns what undoes it."""
    logging = transformers().utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    def undo() -> None:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()

    return undo
