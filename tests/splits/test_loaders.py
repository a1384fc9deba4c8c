"""A node's stream: every sample once a pass, the same batches however they are asked for, and every kind of data."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from tailopt.seeds import generator
from tailopt.splits import NodeData, by_source, iid, node_data, sample_weights, subsets


class Squares(Dataset):
    """A map-style dataset without __getitems__; remembers what was read."""

    def __init__(self, n: int) -> None:
        self.n, self.read, self.offset = n, [], 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[int, float]:
        if i >= self.n:
            raise IndexError(i)
        self.read.append(i)
        return i, float(i * i) + self.offset


class Together(Squares):
    """One that reads a batch at once."""

    def __getitems__(self, numbers: list[int]) -> list[tuple[int, float]]:
        assert all(type(i) is int for i in numbers)
        return [(i, float(i * i)) for i in numbers]

    def __getitem__(self, i: int) -> tuple[int, float]:
        raise AssertionError("sample by sample")


class Noisy(Squares):
    """Random augmentation, from the global generators of torch and Python."""

    def __getitem__(self, i: int) -> Tensor:  # type: ignore[override]
        return torch.stack([torch.tensor(float(i)), torch.rand(()), torch.tensor(random.random())])


class Counting(IterableDataset):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


class Sized(Counting):
    def __len__(self) -> int:
        return self.n


def pairs(n: int) -> TensorDataset:
    return TensorDataset(torch.arange(n), torch.arange(n * 3.0).reshape(n, 3))


def same(a: Any, b: Any) -> bool:
    """Equal as nested batches, types included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.equal(b)
    if isinstance(a, dict):
        return list(a) == list(b) and same(list(a.values()), list(b.values()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def one_by_one(batch: list[Any]) -> Any:
    """default_collate under another name: the fast path does not recognise it."""
    return default_collate(batch)


def numbers(batches: Iterator[Any]) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


# --- The stream -----------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 3), st.integers(0, 3))
def test_every_sample_once_a_pass(samples, batch_size, node, seed):
    stream = NodeData(pairs(samples), node, seed, batch_size)
    per = stream.batches_per_pass
    assert per == -(-samples // batch_size)
    read = numbers(stream.batches(0, 3 * per))
    for p in range(3):
        own = read[p * per : (p + 1) * per]
        assert sorted(sum(own, [])) == list(range(samples))
        assert [len(batch) for batch in own[:-1]] == [batch_size] * (per - 1)
        assert sum(own, []) == torch.randperm(samples, generator=generator(seed, "order", node, p)).tolist()


@given(st.integers(1, 20), st.integers(1, 9), st.lists(st.integers(0, 7), max_size=8), st.booleans())
def test_the_cut_of_the_calls_does_not_matter(samples, batch_size, cuts, drop_last):
    drop_last = drop_last and batch_size <= samples
    whole = list(NodeData(pairs(samples), 2, 5, batch_size, drop_last).batches(0, sum(cuts)))
    stream, start, cut = NodeData(pairs(samples), 2, 5, batch_size, drop_last), 0, []
    for count in cuts:
        cut += stream.batches(start, count)
        start += count
    assert same(cut, whole)
    # Backwards, from a fresh object each time, as a resumed run asks.
    for b in reversed(range(len(whole))):
        fresh = NodeData(pairs(samples), 2, 5, batch_size, drop_last)
        assert same(next(fresh.batches(b, 1)), whole[b])
        assert stream.indices(b).equal(whole[b][0])


@given(st.integers(1, 20), st.integers(1, 20))
def test_drop_last_leaves_the_partial_batch_out(samples, batch_size):
    if batch_size > samples:
        with pytest.raises(ValueError, match=rf"node 7 has {samples} samples.*no batch of {batch_size}"):
            NodeData(pairs(samples), 7, 0, batch_size, drop_last=True)
        return
    stream = NodeData(pairs(samples), 7, 0, batch_size, drop_last=True)
    assert stream.batches_per_pass == samples // batch_size
    assert all(len(x) == batch_size for x, _ in stream.batches(0, 2 * stream.batches_per_pass))


def test_two_streams_may_be_open_at_once():
    stream = NodeData(pairs(10), 0, 0, 3)
    want = numbers(stream.batches(0, 9))
    a, b = stream.batches(0, 9), stream.batches(2, 7)
    assert [numbers([next(a)]) + numbers([next(b)]) for _ in range(7)] == [[want[i], want[i + 2]] for i in range(7)]


def test_nodes_seeds_and_passes_have_orders_of_their_own():
    def orders(node, seed):
        read = numbers(NodeData(pairs(50), node, seed, 50).batches(0, 3))
        return {tuple(order) for order in read}

    assert len(orders(0, 0) | orders(1, 0) | orders(0, 1)) == 9


def test_the_global_generator_is_left_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(NodeData(pairs(10), 0, 0, 3).batches(0, 9))
    list(NodeData(DataLoader(Squares(10), 3, shuffle=True), 0, 0, None).batches(0, 9))
    assert torch.get_rng_state().equal(before)


def test_batches_are_read_when_they_are_asked_for():
    data = Squares(12)
    stream = NodeData(data, 0, 0, 4).batches(0, 3)
    assert data.read == []
    next(stream)
    assert len(data.read) == 4
    next(stream)
    assert len(data.read) == 8


def test_augmentations_follow_the_callers_seed():
    stream = NodeData(Noisy(6), 0, 0, 2)

    def batch(seed, b):
        torch.manual_seed(seed)
        return next(stream.batches(b, 1))[:, :2]

    assert batch(1, 4).equal(batch(1, 4))
    assert not batch(1, 4).equal(batch(2, 4))


# --- Kinds of data --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        pairs(11),
        TensorDataset(torch.arange(11.0)),
        TensorDataset(torch.arange(44).reshape(4, 11).T, torch.zeros(11, 0), torch.arange(11) > 3),
        Subset(pairs(30), [29, 3, 3, 0, 17, 5, 6, 7, 8, 9, 10]),
        Subset(pairs(30), range(4, 15)),
        Subset(pairs(30), torch.arange(11)),
        Subset(Subset(pairs(30), list(range(29, 5, -1))), [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 23]),
        TensorDataset(torch.randn(11, 2, dtype=torch.complex64), torch.ones(11, dtype=torch.bfloat16)),
    ],
    ids=["pairs", "one", "strided", "subset", "range", "tensor", "nested", "types"],
)
@pytest.mark.parametrize("batch_size", [1, 4, 11])
def test_indexed_tensors_equal_collated_samples(data, batch_size):
    fast = NodeData(data, 3, 1, batch_size)
    slow = NodeData(DataLoader(data, batch_size, collate_fn=one_by_one), 3, 1, None)
    assert fast._reader.tensors is not None
    assert slow._reader.tensors is None
    assert same(list(fast.batches(0, 25)), list(slow.batches(0, 25)))


class Shifted(TensorDataset):
    def __getitem__(self, i):
        return tuple(t + 1 for t in super().__getitem__(i))


@pytest.mark.parametrize(
    "data",
    [
        Shifted(torch.arange(5)),  # a subclass may do anything
        Subset(pairs(5), [-1, 0, 1, 2, 3]),
        Subset(Shifted(torch.arange(5)), [0, 1, 2, 3, 4]),
        Subset(Squares(5), [0, 1, 2, 3, 4]),
        [(i, str(i)) for i in range(5)],
        [{"x": torch.tensor([i]), "y": i} for i in range(5)],
        torch.arange(10.0).reshape(5, 2),
        Squares(5),
        Together(5),
        StackDataset(x=torch.arange(5), y=torch.arange(5.0)),
    ],
    ids=lambda data: type(data).__name__,
)
def test_any_map_style_dataset_is_read_as_torch_reads_it(data):
    stream = NodeData(data, 0, 0, 2)
    assert stream._reader.tensors is None
    assert stream.samples == 5
    order = [stream.indices(b).tolist() for b in range(7)]
    assert same(list(stream.batches(0, 7)), list(DataLoader(data, batch_sampler=order)))


def test_the_users_own_tensors_are_not_handed_out():
    x = torch.arange(4.0)
    next(NodeData(TensorDataset(x), 0, 0, 4).batches(0, 1))[0].zero_()
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]


# --- DataLoaders ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(pairs(10), 4),
        DataLoader(pairs(10), 4, shuffle=True),
        DataLoader(pairs(10), 4, sampler=RandomSampler(pairs(10))),
        DataLoader(pairs(10), 4, sampler=SequentialSampler(pairs(10))),
        DataLoader(pairs(10), 4, collate_fn=one_by_one),
    ],
    ids=["plain", "shuffle", "random", "sequential", "collate"],
)
@pytest.mark.parametrize("batch_size", [None, 4])
def test_a_loader_gives_its_dataset_and_batch_size(loader, batch_size):
    stream = NodeData(loader, 1, 2, batch_size)
    assert (stream.repeatable, stream.samples, stream.batches_per_pass, stream.batch_size) == (True, 10, 3, 4)
    assert same(list(stream.batches(0, 8)), list(NodeData(pairs(10), 1, 2, 4).batches(0, 8)))


def test_a_loader_gives_its_collate_function_and_drop_last():
    stream = NodeData(DataLoader(Squares(10), 4, collate_fn=len, drop_last=True), 0, 0, None)
    assert (stream.drop_last, stream.batches_per_pass) == (True, 2)
    assert list(stream.batches(0, 5)) == [4] * 5


def test_a_loader_without_batching_gives_items():
    """batch_size=None: an item of the dataset is a batch already."""
    stream = NodeData(DataLoader(Squares(5), batch_size=None), 0, 0, None)
    assert (stream.repeatable, stream.batches_per_pass) == (True, 5)
    order = [int(stream.indices(b)) for b in range(5)]
    assert sorted(order) == list(range(5))
    assert same(list(stream.batches(0, 5)), list(DataLoader(Squares(5), batch_size=None, sampler=order)))
    tensors = TensorDataset(torch.arange(5))  # its fields are stacked here, not its rows
    stacked = NodeData(DataLoader(tensors, batch_size=None, collate_fn=default_collate), 0, 0, None)
    want = DataLoader(tensors, batch_size=None, sampler=order, collate_fn=default_collate)
    assert same(list(stacked.batches(0, 5)), list(want))


def test_batch_sizes_must_agree():
    with pytest.raises(ValueError, match=r"got 8, but the DataLoader of node 3 has batch_size=4"):
        NodeData(DataLoader(pairs(10), 4), 3, 0, 8)
    with pytest.raises(ValueError, match=r"got 8, but the DataLoader of node 3 has batch_size=None"):
        NodeData(DataLoader(pairs(10), batch_size=None), 3, 0, 8)
    own = BatchSampler(range(10), 4, False)
    assert NodeData(DataLoader(pairs(10), batch_sampler=own), 3, 0, 4).batch_size == 4
    with pytest.raises(ValueError, match=r"got 8, .* has batch_size=4"):
        NodeData(DataLoader(pairs(10), batch_sampler=own), 3, 0, 8)


class Short(DataLoader):
    def __iter__(self):
        return islice(super().__iter__(), 2)


@pytest.mark.parametrize(
    ("loader", "words", "samples", "per_pass"),
    [
        (DataLoader(pairs(10), 4, sampler=SubsetRandomSampler([1, 2, 3])), "own sampler .SubsetRandomSampler", 3, 1),
        (DataLoader(pairs(10), 4, sampler=RandomSampler(pairs(10), num_samples=6)), "own sampler .RandomSampler", 6, 2),
        (DataLoader(pairs(10), 4, sampler=RandomSampler(pairs(10), True)), "own sampler .RandomSampler", 10, 3),
        (DataLoader(pairs(10), 4, sampler=WeightedRandomSampler([1.0] * 10, 8)), "own sampler .Weighted", 8, 2),
        (DataLoader(pairs(10), 4, sampler=SequentialSampler(pairs(5))), "own sampler .SequentialSampler", 5, 2),
        (DataLoader(pairs(10), batch_sampler=[[1, 2], [3], [4]]), "own batch_sampler .list", None, 3),
        (DataLoader(pairs(10), batch_sampler=BatchSampler(range(7), 2, False)), "own batch_sampler .Batch", 7, 4),
        (DataLoader(Sized(10), 4), "an IterableDataset .Sized", 10, 3),
        (Short(pairs(10), 4), "a Short with an __iter__ of its own", 10, 3),
    ],
)
def test_data_with_an_order_of_their_own(loader, words, samples, per_pass):
    stream = NodeData(loader, 0, 0, None)
    assert not stream.repeatable
    assert stream.samples == samples
    assert stream.batches_per_pass == per_pass
    with pytest.raises(RuntimeError, match="samples of a batch are not known"):
        stream.indices(0)
    with pytest.raises(RuntimeError, match=rf"Node 0 reads .*{words}.*batch 1 was asked for, the next one is 0"):
        stream.batches(1, 1)
    assert len(list(stream.batches(0, 5))) == 5


def test_an_iterable_dataset_begins_again_and_only_goes_on():
    stream = NodeData(Counting(5), 0, 0, 2)
    assert not stream.repeatable
    assert stream.samples is None
    read = [batch.tolist() for batch in stream.batches(0, 4)]
    assert read == [[0, 1], [2, 3], [4], [0, 1]]
    half = stream.batches(4, 3)
    assert next(half).tolist() == [2, 3]
    half.close()  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="batch 7 was asked for, the next one is 5"):
        stream.batches(7, 1)
    assert [batch.tolist() for batch in stream.batches(5, 1)] == [[4]]
    with pytest.raises(TypeError, match="node 0 has an IterableDataset .* local steps instead of local epochs"):
        _ = stream.batches_per_pass
    assert [b.tolist() for b in NodeData(Counting(5), 0, 0, 2, drop_last=True).batches(0, 3)] == [
        [0, 1],
        [2, 3],
        [0, 1],
    ]


def test_a_loader_as_it_is_gives_what_it_would_give():
    def loader():
        random = torch.Generator().manual_seed(3)
        return DataLoader(pairs(10), 4, sampler=WeightedRandomSampler([1.0] * 10, 9, generator=random))

    theirs = loader()
    want = [batch for _ in range(3) for batch in theirs]
    assert same(list(NodeData(loader(), 0, 0, None).batches(0, 9)), want)


# --- Workers --------------------------------------------------------------------------------------------------------


def shift(worker: int) -> None:
    get_worker_info().dataset.offset = 1000


def test_workers_read_the_same_batches():
    stream = NodeData(DataLoader(pairs(9), 2, num_workers=2), 1, 4, None)
    want = list(NodeData(pairs(9), 1, 4, 2).batches(0, 12))
    assert same([*stream.batches(0, 7), *stream.batches(7, 5)], want)
    subset = Subset(pairs(30), list(range(5, 14)))
    stream = NodeData(DataLoader(subset, 2, num_workers=1), 1, 4, None)
    assert same(list(stream.batches(3, 4)), list(NodeData(subset, 1, 4, 2).batches(3, 4)))


def test_augmentations_in_workers_depend_on_the_batch_alone():
    def read(workers, cuts, seed=0):
        stream, start, read = NodeData(DataLoader(Noisy(9), 2, num_workers=workers), 1, seed, None), 0, []
        for count in cuts:
            read += stream.batches(start, count)
            start += count
        return read

    torch.manual_seed(0)
    before = torch.get_rng_state()
    want = read(1, [7])
    assert torch.get_rng_state().equal(before)
    torch.manual_seed(1)
    assert same(read(2, [3, 4]), want)
    assert not same(read(1, [7], seed=1), want)
    assert len({float(row[1]) for batch in want for row in batch}) == sum(map(len, want)), "the same noise twice"


def test_worker_init_fn_finds_the_users_dataset():
    stream = NodeData(DataLoader(Squares(4), 4, num_workers=1, worker_init_fn=shift), 0, 0, None)
    numbers, values = next(stream.batches(0, 1))
    assert values.equal(numbers.double() ** 2 + 1000)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pins memory for a GPU")
@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 1])
def test_pinned_memory(workers):
    stream = NodeData(DataLoader(pairs(9), 2, pin_memory=True, num_workers=workers), 0, 0, None)
    want = list(NodeData(pairs(9), 0, 0, 2).batches(0, 6))
    got = list(stream.batches(0, 6))
    assert all(x.is_pinned() for batch in got for x in batch)
    assert same(got, want)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="data on a GPU")
@pytest.mark.gpu
def test_data_on_a_gpu_stay_there():
    data = TensorDataset(*(tensor.cuda() for tensor in pairs(9).tensors))
    got = list(NodeData(Subset(data, list(range(7))), 0, 0, 2).batches(0, 6))
    assert all(x.is_cuda for batch in got for x in batch)
    assert numbers(iter(got)) == numbers(NodeData(Subset(pairs(9), list(range(7))), 0, 0, 2).batches(0, 6))


def test_pinning_without_an_accelerator_says_nothing():
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    stream = NodeData(DataLoader(pairs(9), 2, pin_memory=True), 0, 0, None)  # a warning would be an error here
    assert same(list(stream.batches(0, 6)), list(NodeData(pairs(9), 0, 0, 2).batches(0, 6)))


# --- All nodes, weights ---------------------------------------------------------------------------------------------


def test_all_nodes_of_a_split_read_everything():
    data = pairs(23)
    nodes = node_data(subsets(data, iid(23, 4)), seed=3, batch_size=4)
    assert [node.node for node in nodes] == [0, 1, 2, 3]
    read = [i for node in nodes for batch in numbers(node.batches(0, node.batches_per_pass)) for i in batch]
    assert sorted(read) == list(range(23))


def test_weights_by_samples():
    parts = by_source("aabaacb")
    assert sample_weights(parts) == sample_weights(list(parts.values())) == [4.0, 2.0, 1.0]
    datasets = subsets(pairs(7), parts)
    assert sample_weights(datasets) == [4.0, 2.0, 1.0]
    assert sample_weights(node_data(datasets, 0, 2)) == [4.0, 2.0, 1.0]
    loaders = [
        DataLoader(pairs(7), 2, drop_last=True),
        DataLoader(pairs(7), 2, sampler=SubsetRandomSampler([0, 1])),
        DataLoader(Sized(5), 2),
    ]
    assert sample_weights(loaders) == [7.0, 2.0, 5.0]
    assert all(type(weight) is float for weight in sample_weights(loaders))
    for unknown in (Counting(3), DataLoader(Counting(3)), NodeData(Counting(3), 0, 0, 1)):
        with pytest.raises(TypeError, match=rf"node 1 has a {type(unknown).__name__} without a length"):
            sample_weights([pairs(3), unknown])


# --- Bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "empty",
    [
        [],
        TensorDataset(torch.zeros(0, 3)),
        Subset(pairs(3), []),
        DataLoader(pairs(3), 2, sampler=SubsetRandomSampler([])),
        DataLoader([], 2),
        Sized(0),
    ],
    ids=["list", "tensors", "subset", "sampler", "loader", "iterable"],
)
def test_a_node_without_data_is_named(empty):
    with pytest.raises(ValueError, match="node 1 has no data"):
        node_data([pairs(3), empty], seed=0, batch_size=2)


def test_an_iterable_that_turns_out_empty_is_named():
    with pytest.raises(ValueError, match=r"node 4 has no data: an IterableDataset \(Counting\) gave no batch"):
        next(NodeData(Counting(0), 4, 0, 2).batches(0, 1))


class Unsized(Dataset):
    def __getitem__(self, i):
        return i


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: NodeData(pairs(3), 2, 0, None),
            ValueError,
            "got None; need a whole number, 1 or more, for the dataset of node 2",
        ),
        (lambda: NodeData(pairs(3), 2, 0, 0), ValueError, "Invalid batch_size: got 0"),
        (lambda: NodeData(pairs(3), 2, 0, 2.0), ValueError, "Invalid batch_size: got 2.0"),
        (lambda: NodeData(pairs(3), -1, 0, 2), ValueError, "Invalid node: got -1"),
        (lambda: NodeData(iter([1]), 2, 0, 2), TypeError, "node 2 has a list_iterator; need a dataset with"),
        (lambda: NodeData({"train": [1]}, 2, 0, 2), TypeError, "node 2 has a dict; need a dataset with"),
        (lambda: NodeData(Unsized(), 2, 0, 2), TypeError, "node 2 has a Unsized; need a dataset with"),
        (lambda: NodeData(DataLoader(Unsized()), 2, 0, None), TypeError, "node 2 has a Unsized; need one with __len__"),
        (
            lambda: NodeData(DataLoader(Counting(3)), 2, 0, None, True),
            ValueError,
            "Invalid drop_last: got True.*node 2",
        ),
        (lambda: NodeData(pairs(3), 2, 0, 2).batches(-1, 1), ValueError, "Invalid start: got -1"),
        (lambda: NodeData(pairs(3), 2, 0, 2).batches(0, -1), ValueError, "Invalid count: got -1"),
        (lambda: NodeData(pairs(3), 2, 0, 2).indices(-1), ValueError, "Invalid number: got -1"),
        (lambda: node_data(pairs(3), 0, 2), TypeError, "got one TensorDataset; need a sequence.*subsets"),
        (lambda: node_data({"a": pairs(3)}, 0, 2), TypeError, "got one dict"),
        (lambda: node_data(3, 0, 2), TypeError, "got one int"),
        (lambda: node_data([], 0, 2), ValueError, "got no datasets"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
