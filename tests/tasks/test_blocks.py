"""Tokens in blocks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tailopt.tasks import blocks
from tailopt.tasks.blocks import Blocks


@given(n=st.integers(0, 40), length=st.integers(2, 9), whole=st.booleans())
def test_blocks_keep_every_token_but_a_rest_that_predicts_nothing(n: int, length: int, whole: bool):
    numbers = torch.arange(100, 100 + n)
    found = Blocks.of(numbers, length, whole)
    rest = n % length
    kept = n - rest if whole or rest == 1 else n
    assert found.real().tolist() == numbers[:kept].tolist()
    assert len(found.real(1)) == kept - len(found)
    assert all(2 <= count <= length for count in found.counts.tolist())


def test_a_unigram_model_of_uniform_tokens_has_the_vocabulary_as_its_perplexity():
    assert blocks.unigram_perplexity(torch.arange(7), torch.arange(7), 7) == pytest.approx(7)
    # tokens 0, 0, 1 of four: (2+1)/7 and (1+1)/7
    expected = math.exp(-(math.log(3 / 7) + math.log(2 / 7)) / 2)
    assert blocks.unigram_perplexity(torch.tensor([0, 0, 1]), torch.tensor([0, 1]), 4) == pytest.approx(expected)


def test_renumbering_keeps_what_is_equal():
    first, second = Blocks.of(torch.tensor([900, 3, 900, 17, 17]), 3), Blocks.of(torch.tensor([3, 17]), 3)
    (a, b), vocabulary = blocks.renumbered([first, second])
    assert vocabulary == 3 and a.real().tolist() == [2, 0, 2, 1, 1] and b.real().tolist() == [0, 1]
    assert int(a.ids.max()) < vocabulary
