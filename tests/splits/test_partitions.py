"""Partitions: every sample exactly once, the sizes and mixtures that were asked for, a function of the seed alone."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tailopt.splits import by_source, dirichlet, iid, power_law, subsets

NAN, INF = math.nan, math.inf


@st.composite
def sizes(draw, most=300):
    samples = draw(st.integers(1, most))
    return samples, draw(st.integers(1, samples))


def once_each(parts: list[Tensor], samples: int) -> bool:
    return torch.cat(parts).sort().values.equal(torch.arange(samples))


def mixtures(parts: list[Tensor], labels: Tensor) -> Tensor:
    """[nodes, classes]: the share of each class in each node."""
    counts = torch.stack([labels[part].bincount(minlength=int(labels.max()) + 1) for part in parts]).double()
    return counts / counts.sum(1, keepdim=True)


def check_form(parts: list[Tensor], samples: int, nodes: int) -> None:
    assert len(parts) == nodes
    assert all(part.dtype == torch.int64 and part.ndim == 1 and len(part) > 0 for part in parts)
    assert all(part.equal(part.sort().values) for part in parts)
    assert once_each(parts, samples)


# --- What every partition promises ----------------------------------------------------------------------------------


@given(sizes(), st.integers(0, 5))
def test_iid_deals_everything_evenly(size, seed):
    parts = iid(*size, seed=seed)
    check_form(parts, *size)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(sizes(), st.floats(0, 50), st.integers(0, 5))
def test_power_law_sizes_are_exact(size, exponent, seed):
    parts = power_law(*size, exponent=exponent, seed=seed)
    check_form(parts, *size)
    lengths = [len(part) for part in parts]
    assert all(a >= b for a, b in pairwise(lengths))
    quotas = [
        size[0] * (i + 1) ** -exponent / math.fsum(j**-exponent for j in range(1, size[1] + 1)) for i in range(size[1])
    ]
    if min(math.floor(q) for q in quotas) >= 1:  # nobody had to be given a first sample
        assert all(abs(n - q) < 1 + 1e-9 for n, q in zip(lengths, quotas, strict=True))


@given(st.data(), st.floats(1e-300, 1e300), st.integers(0, 5))
def test_dirichlet_keeps_its_minimum_for_every_alpha(data, alpha, seed):
    labels = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=200))
    at_least = data.draw(st.integers(1, len(labels)))
    nodes = data.draw(st.integers(1, len(labels) // at_least))
    parts = dirichlet(labels, nodes, alpha, seed, at_least)
    check_form(parts, len(labels), nodes)
    assert min(map(len, parts)) >= at_least


@given(st.lists(st.sampled_from(["a", "b", (1, 2), 3, None]), min_size=1, max_size=60))
def test_by_source_keeps_names_and_order(sources):
    parts = by_source(sources)
    check_form(list(parts.values()), len(sources), len(set(sources)))
    assert list(parts) == list(dict.fromkeys(sources))
    assert all(sources[i] == name for name, part in parts.items() for i in part.tolist())


@pytest.mark.parametrize(
    "split",
    [
        lambda seed: iid(100, 7, seed=seed),
        lambda seed: power_law(100, 7, seed=seed),
        lambda seed: dirichlet([i % 5 for i in range(100)], 7, alpha=0.5, seed=seed),
    ],
    ids=["iid", "power_law", "dirichlet"],
)
def test_a_function_of_the_seed_alone(split):
    def same(a, b):
        return len(a) == len(b) and all(x.equal(y) for x, y in zip(a, b, strict=True))

    torch.manual_seed(1)
    first, state = split(3), torch.get_rng_state()
    torch.manual_seed(2)
    assert same(first, split(3))
    assert not same(first, split(4))
    torch.manual_seed(1)
    assert torch.get_rng_state().equal(state), "torch's global generator was moved on"


# --- What each of them is like --------------------------------------------------------------------------------------


def test_iid_nodes_have_the_same_mixture():
    labels = torch.arange(10_000) // 1000  # sorted by class, so that only shuffling mixes
    assert (mixtures(iid(10_000, 10), labels) - 0.1).abs().max() < 0.05


def test_power_law_is_zipf():
    assert [len(p) for p in power_law(25, 4)] == [12, 6, 4, 3]
    assert [len(p) for p in power_law(12, 4, exponent=0.0)] == [3, 3, 3, 3]
    assert [len(p) for p in power_law(10, 4, exponent=1000.0)] == [7, 1, 1, 1]


def test_smaller_alpha_is_more_skewed():
    labels = torch.arange(5000) % 10

    def largest_share(alpha, seed):
        """The share of a class that one node holds, on average over the classes."""
        counts = torch.stack([labels[part].bincount(minlength=10) for part in dirichlet(labels, 10, alpha, seed)])
        return float((counts.amax(0) / 500).mean())

    shares = [sum(largest_share(a, seed) for seed in range(5)) / 5 for a in (0.01, 0.1, 1.0, 10.0, 1000.0)]
    assert all(a > b + 0.02 for a, b in pairwise(shares)), shares
    assert shares[0] > 0.9
    assert shares[-1] < 0.11


def test_tiny_alpha_gives_each_class_to_one_node():
    labels = torch.arange(400) % 4
    for alpha in (1e-4, 1e-30, 1e-307, 5e-324):
        for seed in range(10):
            parts = dirichlet(labels, 3, alpha, seed, at_least=1)
            # A node without a class was given one sample by the largest; apart from that classes are whole.
            counts = torch.stack([labels[part].bincount(minlength=4) for part in parts])
            assert (counts.amax(0) >= 97).all(), counts


def test_shares_have_the_moments_of_a_dirichlet_distribution():
    """Mean 1/N, variance (1/N)(1 - 1/N)/(N alpha + 1), estimated from 400 classes of 1000 samples."""
    nodes, alpha = 4, 0.5
    labels = torch.arange(400).repeat_interleave(1000)
    parts = dirichlet(labels, nodes, alpha)
    shares = torch.stack([labels[part].bincount(minlength=400) for part in parts]).double() / 1000
    variance = 0.25 * 0.75 / (nodes * alpha + 1)
    # Four standard errors of a mean over 400 draws; the draws lie in [0, 1], so the square's spread is below 0.25.
    assert (shares.mean(1) - 0.25).abs().max() < 4 * math.sqrt(variance / 400)
    assert abs(float(shares.var(1).mean()) - variance) < 4 * 0.25 / math.sqrt(400)


def test_labels_of_any_kind():
    numbers = [i * i % 5 for i in range(60)]
    want = dirichlet(numbers, 4, 0.5)
    for labels in (
        torch.tensor(numbers),
        np.array(numbers),
        [torch.tensor(n) for n in numbers],  # as `[y for _, y in dataset]` gives them; tensors hash by identity
        [f"class {n}" for n in numbers],
        [n == n and float(n) for n in numbers],
    ):
        got = dirichlet(labels, 4, 0.5)
        assert all(a.equal(b) for a, b in zip(got, want, strict=True)), type(labels)
    assert list(by_source(torch.tensor([4, 2, 4]))) == [4, 2]


# --- Subsets --------------------------------------------------------------------------------------------------------


def test_subsets_of_parts_and_of_sources():
    words = ["a", "b", "c", "d"]
    split: Any = subsets  # mypy does not see that a Subset can be iterated over
    assert [[*own] for own in split(words, iid(4, 2))] == [[words[i] for i in part.tolist()] for part in iid(4, 2)]
    assert [[*own] for own in split(words, by_source("xyxx"))] == [["a", "c", "d"], ["b"]]
    assert [[*own] for own in split(words, [[3, 0], np.array([0])])] == [["d", "a"], ["a"]]
    assert all(type(i) is int for own in subsets(words, iid(4, 2)) for i in own.indices)


@pytest.mark.parametrize("wrong", [4, -1])
def test_subsets_refuse_samples_that_are_not_there(wrong):
    with pytest.raises(ValueError, match=rf"node 1 has sample {wrong}; need numbers from 0 to 3"):
        subsets("abcd", [torch.tensor([0]), torch.tensor([1, wrong])])


# --- Bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: iid(3, 4), r"nodes=4 for 3 samples; .* 1 <= nodes <= 3"),
        (lambda: iid(0, 1), "Invalid samples: got 0"),
        (lambda: iid(3, 0), "Invalid nodes: got 0"),
        (lambda: iid(3, -1), "Invalid nodes: got -1"),
        (lambda: iid(3.5, 1), "Invalid samples: got 3.5"),
        (lambda: iid(3, True), "Invalid nodes: got True"),
        (lambda: power_law(3, 4), "nodes=4 for 3 samples"),
        (lambda: power_law(9, 4, exponent=NAN), "Invalid exponent: got nan"),
        (lambda: power_law(9, 4, exponent=-1.0), "Invalid exponent: got -1.0"),
        (lambda: power_law(9, 4, exponent=INF), "Invalid exponent: got inf"),
        (lambda: dirichlet([0, 1], 2, alpha=0.0), "Invalid alpha: got 0.0; need 0 < alpha < inf"),
        (lambda: dirichlet([0, 1], 2, alpha=-1.0), "Invalid alpha: got -1.0"),
        (lambda: dirichlet([0, 1], 2, alpha=NAN), "Invalid alpha: got nan"),
        (lambda: dirichlet([0, 1], 2, alpha=INF), "Invalid alpha: got inf; .* use iid"),
        (lambda: dirichlet([0, 1], 3, alpha=1.0), "nodes=3 for 2 samples"),
        (
            lambda: dirichlet([0] * 9, 5, 1.0, at_least=2),
            "nodes=5 for 9 samples; need at least 2 samples per node.* <= 4",
        ),
        (lambda: dirichlet([0] * 9, 5, 1.0, at_least=0), "Invalid at_least: got 0"),
        (lambda: dirichlet([], 1, 1.0), "Invalid samples: got 0"),
        (lambda: dirichlet([0.0, NAN], 1, 1.0), "Invalid labels: sample 1 has nan"),
        (lambda: dirichlet([[0], [1]], 1, 1.0), "Invalid labels: sample 0 has a list; need hashable"),
        (lambda: dirichlet(torch.eye(3), 1, 1.0), "Invalid labels: got 2 dimensions; need 1"),
        (lambda: by_source([]), "Invalid sources: got none"),
        (lambda: by_source([1.0, NAN]), "Invalid sources: sample 1 has nan"),
        (lambda: by_source(torch.zeros(2, 2)), "Invalid sources: got 2 dimensions"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
