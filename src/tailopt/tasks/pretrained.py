"""Models and tokenizers of Transformers, by public name or from a folder, with errors that name a remedy.

A name that is not a folder is looked up at the hub. Weights that a checkpoint lacks, such as a classifier's head, are
drawn from the seed. No code is loaded with a model, and weights are read from safetensors files only.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tailopt.optional import require
from tailopt.seeds import derive_seed
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


def tokenizer(name_or_path: str) -> Any:
    """Load a tokenizer by public name or from a folder."""
    with _explained("tokenizer", name_or_path):
        return transformers().AutoTokenizer.from_pretrained(name_or_path, local_files_only=_local(name_or_path))


def model(kind: str, name_or_path: str, seed: int, **settings: Any) -> torch.nn.Module:
    """Load a model by public name or from a folder, in fp32; weights that it lacks are drawn from the seed.

    Args:
        kind: "classifier", "causal", "seq2seq" or "images".
        settings: of its configuration, such as num_labels.
    """
    loader = getattr(transformers(), KINDS[kind])
    with _explained("model", name_or_path), _seeded(seed):
        loaded: torch.nn.Module = loader.from_pretrained(
            name_or_path,
            dtype=torch.float32,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            local_files_only=_local(name_or_path),
            **settings,
        )
    return loaded


def fresh(kind: str, configuration: Any, seed: int) -> torch.nn.Module:
    """Build a model from scratch from a configuration of Transformers, with weights drawn from the seed."""
    with _seeded(seed):
        model: torch.nn.Module = getattr(transformers(), KINDS[kind]).from_config(configuration)
    return model


def check_fits(tokenizer: Any, model: torch.nn.Module, name_or_path: str) -> None:
    """Refuse a tokenizer that can produce numbers beyond the model's vocabulary."""
    embeddings = model.get_input_embeddings()  # type: ignore[operator]
    if len(tokenizer) > embeddings.num_embeddings:
        raise ValueError(
            f"Invalid tokenizer: it has {len(tokenizer)} entries, and the model of {name_or_path!r} only "
            f"{embeddings.num_embeddings} embeddings. Take the tokenizer that belongs to the model."
        )


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw weights as a function of the seed; torch's own generator is the same afterwards as before."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a new head is what the caller asked for
        torch.manual_seed(derive_seed(seed, "weights"))
        yield


@contextmanager
def _explained(what: str, name_or_path: str) -> Iterator[None]:
    """Turn errors of Transformers into one sentence with a remedy, and keep the package silent."""
    if not name_or_path:
        raise ValueError(f"Invalid {what}: none is named. Give a folder or a public name: --model NAME.")
    if looks_like_a_path(name_or_path) and not Path(name_or_path).is_dir():
        raise FileNotFoundError(
            f"Invalid {what}: there is no folder {name_or_path!r}. Give the path of one, or a public name."
        )
    restore_reports = _quiet()
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().split("\n")[0]
        where = "in the folder" if Path(name_or_path).is_dir() else "here or from the hub"
        raise OSError(
            f"Cannot load the {what} {name_or_path!r} {where}: {reason} Give a folder that has one: --model PATH."
        ) from None
    finally:
        restore_reports()


def _local(name_or_path: str) -> bool:
    """Whether only files on this machine are to be looked at."""
    return Path(name_or_path).is_dir() or not is_reachable()


def looks_like_a_path(name_or_path: str) -> bool:
    """Whether a text can only be a path: names at the hub are `name` or `owner/name`."""
    return name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1 or "\\" in name_or_path


def _quiet() -> Any:
    """Silence the package's own messages and progress bars; return a function that undoes it."""
    logging = transformers().utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    def undo() -> None:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()

    return undo
