"""A tiny encoder and a tiny MRPC for the studies: real files of Transformers and of GLUE, seconds to train."""

from __future__ import annotations

from pathlib import Path

WORDS = (
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "ran",
    "on",
    "mat",
    "quickly",
    "slowly",
    "good",
    "bad",
    "film",
    "is",
    "was",
    ".",
)
LENGTH = 128


def tiny_encoder(folder: Path) -> str:
    """A BERT of two layers, 16 wide, with a tokenizer of a few words."""
    import tokenizers
    import transformers

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=LENGTH, **names).save_pretrained(
        folder
    )
    configuration = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        pad_token_id=0,
    )
    transformers.BertModel(configuration).save_pretrained(folder)
    return str(folder)


def tiny_mrpc(folder: Path) -> str:
    """Pairs that are paraphrases where their last words are the same."""
    for name, count in (("train", 80), ("dev", 24)):
        lines = ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
        for i in range(count):
            first, second = WORDS[i % len(WORDS)], WORDS[(i + (i % 3 == 0)) % len(WORDS)]
            lines.append(f"{int(first == second)}\t{i}\t{i}\tthe cat sat {first}\tthe dog ran {second}")
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(folder)


def tiny_mnli(folder: Path) -> str:
    """Three classes, told by a word of the second sentence."""
    words = {"entailment": "good", "neutral": "film", "contradiction": "bad"}
    for name, count in (("train", 60), ("dev_matched", 12)):
        lines = ["index\tsentence1\tsentence2\tgold_label"]
        for i in range(count):
            label, word = list(words.items())[i % 3]
            lines.append(f"{i}\tthe cat sat on a mat.\tthe dog was {word}.\t{label}")
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(folder)
