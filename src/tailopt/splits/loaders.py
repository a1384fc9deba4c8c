"""The endless stream of batches of one node, as a function of (seed, node, number of the batch).

    pass p      torch.randperm(samples) from the generator of (seed, "order", node, p)
    batch b     with p, k = divmod(b, batches_per_pass): samples k*batch_size to (k+1)*batch_size - 1 in the order of
                pass p; the last batch of a pass is what is left

A node reads its shuffled samples from round to round, and shuffles them again when they are used up. Calls depend on
nothing but their arguments, so a resumed run and another engine read the same batches. Data with its own order (an
IterableDataset, a DataLoader with a sampler) is read in that order, and cannot be repeated.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from tailopt.arguments import whole_number
from tailopt.seeds import derive_seed, generator

Data = Dataset[Any] | DataLoader[Any] | Sequence[Any]


class NodeData:
    """The stream of batches of one node: numbered from 0, without end.

    From a DataLoader, the dataset, batch size, `collate_fn`, `drop_last`, `pin_memory` and the settings of its workers
    are used; the node shuffles by itself, whether the loader would have shuffled or not. A DataLoader with another
    sampler, or an IterableDataset, is read in its own order, begins again when it ends, and is not `repeatable`.

    Without workers, a batch is made when it is requested, so that random augmentations draw from torch's global
    generator as the caller seeded it. Workers are started for each call of `batches`, and seeded for each batch.

    Args:
        data: a map-style dataset (a list of samples too), an IterableDataset or a DataLoader.
        node: the node's number; the order depends on it.
        seed: of the run.
        batch_size: 1 or more; None with a DataLoader, which has its own.
        drop_last: leave out the partial batch that ends a pass.

    Attributes:
        own_order: None, or a description of what orders the data instead of (seed, node, pass).
        repeatable: whether any batch can be requested at any time: own_order is None.
        samples: how many samples the node has; None if that is unknown.

    Examples:
        >>> letters = NodeData("abcde", node=0, seed=0, batch_size=2)
        >>> list(letters.batches(0, 6))
        [['e', 'a'], ['d', 'c'], ['b'], ['c', 'd'], ['a', 'e'], ['b']]
        >>> list(letters.batches(3, 1)), letters.batches_per_pass
        ([['c', 'd']], 3)
    """

    def __init__(self, data: Data, node: int, seed: int, batch_size: int | None, drop_last: bool = False) -> None:
        self.node, self.seed = whole_number("node", node, low=0, convert=True), seed
        if batch_size is not None:
            batch_size = whole_number("batch_size", batch_size, low=1, convert=True)
        loader = data if isinstance(data, DataLoader) else self._as_loader(data, batch_size, drop_last)
        self.own_order = _own_order(loader)
        self.batch_size = self._agreed_size(loader, batch_size)
        self.drop_last = self._agreed_end(loader, drop_last)
        self.samples = _samples(loader)
        self._loader = loader  # iterated only if it has its own order
        self._current_pass: Iterator[Any] | None = None  # what is left of the pass through such a loader
        self._position = 0  # the number of its next batch
        self._reader = _BatchReader.of(loader, derive_seed(seed, "workers", node))
        self._cached_pass: tuple[int, Tensor, Tensor] | None = None  # a pass, its order, and that as rows of the reader
        if self.samples == 0:
            raise ValueError(f"Invalid data: node {node} has no data. Give it samples, or leave the node out.")
        if self.samples is None and self.repeatable:
            raise TypeError(f"Invalid data: node {node} has a {type(loader.dataset).__name__}; need one with __len__.")
        whole, partial_batch = divmod(self.samples or 0, self.batch_size or 1)
        # stored, not computed per batch: reading a small batch takes only microseconds
        self._per_pass = whole + (partial_batch > 0 and not self.drop_last)
        if self.repeatable and self._per_pass == 0:
            raise ValueError(
                f"Invalid batch_size: node {node} has {self.samples} samples, and drop_last leaves no batch of "
                f"{self.batch_size}; need batch_size <= {self.samples}. Lower it, or keep the partial batch."
            )

    @property
    def repeatable(self) -> bool:
        """Whether the batches are a function of (seed, node, number), so that a run can be resumed."""
        return self.own_order is None

    @property
    def batches_per_pass(self) -> int:
        """How many batches a pass through the data has; the partial batch counts."""
        if self.repeatable:
            return self._per_pass
        try:
            return len(self._loader)
        except TypeError as error:
            raise TypeError(
                f"Invalid data: node {self.node} has {self.own_order} without a length; a pass through it has no known "
                "number of batches. Count local steps instead of local epochs."
            ) from error

    def indices(self, number: int) -> Tensor:
        """Return the samples of one batch: indices of the dataset, in the order in which they are read."""
        if not self.repeatable:
            raise RuntimeError(f"Node {self.node} reads {self.own_order}: the samples of a batch are not known.")
        pass_number, span = self._span(whole_number("number", number, low=0, convert=True))
        return self._shuffled(pass_number)[0][span]

    def batches(self, start: int, count: int) -> Iterator[Any]:
        """Yield batches `start` to `start + count - 1`.

        Data with its own order can only go on: `start` must be the number of the next batch, else RuntimeError.
        """
        start = whole_number("start", start, low=0, convert=True)
        count = whole_number("count", count, low=0, convert=True)
        if not self.repeatable:
            if start != self._position:
                raise RuntimeError(
                    f"Node {self.node} reads {self.own_order}, which can only go on: batch {start} was asked for, the "
                    f"next one is {self._position}. Give a map-style dataset without a sampler to repeat batches."
                )
            return self._in_its_order(count)
        if self._reader.through_torch:
            return self._through_torch(start, count)
        return (self._reader.fetch(self._rows(number)) for number in range(start, start + count))

    def _as_loader(self, data: Any, batch_size: int | None, drop_last: bool) -> DataLoader[Any]:
        """Wrap a bare dataset in a DataLoader, so that there is only one type of data from here on."""
        map_style = hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, Mapping)
        if not map_style and not isinstance(data, IterableDataset):
            raise TypeError(
                f"Invalid data: node {self.node} has a {type(data).__name__}; need a dataset with __len__ and "
                "__getitem__, an IterableDataset or a DataLoader."
            )
        if batch_size is None:
            raise ValueError(
                f"Invalid batch_size: got None; need a whole number, 1 or more, for the dataset of node {self.node}."
            )
        return DataLoader(data, batch_size=batch_size, drop_last=drop_last)

    def _agreed_size(self, loader: DataLoader[Any], batch_size: int | None) -> int | None:
        own = loader.batch_size
        if own is None and loader.batch_sampler is not None:
            own = getattr(loader.batch_sampler, "batch_size", None)
        if batch_size is not None and own != batch_size:
            raise ValueError(
                f"Invalid batch_size: got {batch_size}, but the DataLoader of node {self.node} has batch_size={own}; "
                "need the same, or None for the DataLoader's own."
            )
        return own

    def _agreed_end(self, loader: DataLoader[Any], drop_last: bool) -> bool:
        if drop_last and not loader.drop_last and not self.repeatable:
            raise ValueError(
                f"Invalid drop_last: got True, but node {self.node} reads {self.own_order}, which keeps its partial "
                "batch; need False. Drop it in the DataLoader."
            )
        return drop_last or loader.drop_last

    def _span(self, number: int) -> tuple[int, slice]:
        """Return the number of a batch's pass, and the positions of its samples in the order of that pass."""
        pass_number, k = divmod(number, self._per_pass)
        size = self.batch_size or 1
        return pass_number, slice(k * size, (k + 1) * size)

    def _shuffled(self, pass_number: int) -> tuple[Tensor, Tensor]:
        """Return the order of a pass, as sample indices and as rows of the reader; the latest pass is cached."""
        if self._cached_pass is None or self._cached_pass[0] != pass_number:
            order_generator = generator(self.seed, "order", self.node, pass_number)
            order = torch.randperm(cast(int, self.samples), generator=order_generator)
            self._cached_pass = pass_number, order, self._reader.rows(order)
        return self._cached_pass[1:]

    def _rows(self, number: int) -> Tensor:
        pass_number, span = self._span(number)
        return self._shuffled(pass_number)[1][span]

    def _through_torch(self, start: int, count: int) -> Iterator[Any]:
        """Read by a torch DataLoader, for workers and pinned memory; it begins no batch after the last."""
        loader, workers = self._loader, cast("dict[str, Any]", {})
        if loader.num_workers:
            workers = {
                "num_workers": loader.num_workers,
                "worker_init_fn": partial(_start_worker, also=loader.worker_init_fn),
                "multiprocessing_context": loader.multiprocessing_context,
                "prefetch_factor": loader.prefetch_factor,
                "timeout": loader.timeout,
            }
        yield from DataLoader(
            self._reader,
            batch_size=None,
            sampler=[(number, self._rows(number).tolist()) for number in range(start, start + count)],
            collate_fn=_unchanged,
            pin_memory=self._reader.pinned,
            generator=generator(self.seed, "workers", self.node, start),  # by default, torch's global one would advance
            **workers,
        )

    def _in_its_order(self, count: int) -> Iterator[Any]:
        for _ in range(count):
            yield self._next()

    def _next(self) -> Any:
        for _ in range(2):  # what is left of this pass, then a new one
            if self._current_pass is None:
                self._current_pass = iter(self._loader)
            for batch in self._current_pass:
                self._position += 1
                return batch
            self._current_pass = None
        raise ValueError(f"Invalid data: node {self.node} has no data: {self.own_order} gave no batch.")


def node_data(
    data: Sequence[Data], seed: int, batch_size: int | None = None, drop_last: bool = False
) -> list[NodeData]:
    """Return the streams of all nodes: one `NodeData` per dataset or DataLoader, checked.

    Examples:
        >>> [node.samples for node in node_data([[1.0, 2.0, 3.0], [4.0]], seed=0, batch_size=2)]
        [3, 1]
    """
    if isinstance(data, (Dataset, DataLoader, Mapping, str, Tensor)) or not isinstance(data, Iterable):
        raise TypeError(
            f"Invalid data: got one {type(data).__name__}; need a sequence of datasets or DataLoaders, one per node. "
            "tailopt.splits splits a dataset: subsets(dataset, iid(len(dataset), nodes))."
        )
    nodes = [NodeData(its_data, node, seed, batch_size, drop_last) for node, its_data in enumerate(data)]
    if not nodes:
        raise ValueError("Invalid data: got no datasets; need one per node.")
    return nodes


def sample_weights(nodes: Sequence[Data | NodeData | Tensor] | Mapping[Any, Tensor]) -> list[float]:
    """Return how many samples each node has, as weights of the mean: w_i = n_i.

    Args:
        nodes: datasets, DataLoaders, `NodeData`, or the parts of a partition.

    Examples:
        >>> sample_weights([torch.tensor([0, 2, 4]), torch.tensor([1])])
        [3.0, 1.0]
    """
    data_of_nodes = nodes.values() if isinstance(nodes, Mapping) else nodes
    return [float(_count(node, data)) for node, data in enumerate(data_of_nodes)]


def _count(node: int, data: Any) -> int:
    if isinstance(data, (NodeData, DataLoader)):
        samples = data.samples if isinstance(data, NodeData) else _samples(data)
    else:
        samples = _length(data)
    if samples is None:
        raise TypeError(
            f"Invalid data: node {node} has a {type(data).__name__} without a length. Give the weights as numbers."
        )
    return samples


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def _samples(loader: DataLoader[Any]) -> int | None:
    """Return how many samples the sampler of a loader has; it may read only a part of a dataset that nodes share."""
    if isinstance(loader.dataset, IterableDataset):
        return _length(loader.dataset)
    if loader.batch_size is None and loader.batch_sampler is not None:
        return _length(getattr(loader.batch_sampler, "sampler", None))
    return _length(loader.sampler)


def _own_order(loader: DataLoader[Any]) -> str | None:
    """Describe what orders the batches of a loader; None if that is left to us."""
    if isinstance(loader.dataset, IterableDataset):
        return f"an IterableDataset ({type(loader.dataset).__name__})"
    if type(loader).__iter__ is not DataLoader.__iter__:
        return f"a {type(loader).__name__} with an __iter__ of its own"
    sampler, batches = loader.sampler, loader.batch_sampler
    if batches is not None and (loader.batch_size is None or type(batches) is not BatchSampler):
        return f"a DataLoader with its own batch_sampler ({type(batches).__name__})"
    # shuffle=True and shuffle=False give these samplers. Drawing with replacement, or only some of the samples, is a
    # choice of the user, which is kept.
    usual = type(sampler) in (RandomSampler, SequentialSampler) and not getattr(sampler, "replacement", False)
    if not usual or _length(sampler) != _length(loader.dataset):
        return f"a DataLoader with its own sampler ({type(sampler).__name__})"
    return None


@dataclass(frozen=True)
class _BatchReader(Dataset[Any]):
    """Reads samples and makes batches. As the dataset of a torch DataLoader, item (number, rows) is a batch.

    `tensors` is set if default_collate would only stack their rows: then they are indexed once, instead of sample by
    sample (two tensors, a batch of 32 x 100, one core: 13 us instead of 170).
    """

    dataset: Any
    collate: Callable[[Any], Any]
    one_by_one: bool  # batch_size=None: an item of the dataset is a batch
    through_torch: bool
    pinned: bool
    seed: int
    tensors: tuple[Tensor, ...] | None
    row_of_sample: Tensor | None  # the row of `tensors` that a sample is; None: all rows, in order

    @classmethod
    def of(cls, loader: DataLoader[Any], seed: int) -> _BatchReader:
        one_by_one = loader.batch_sampler is None
        stacked = loader.collate_fn is default_collate and not one_by_one
        tensors, row_of_sample = _stackable_tensors(loader.dataset) if stacked else (None, None)
        pinned = loader.pin_memory and torch.accelerator.is_available()
        through_torch = pinned or loader.num_workers > 0
        return cls(loader.dataset, loader.collate_fn, one_by_one, through_torch, pinned, seed, tensors, row_of_sample)

    def rows(self, order: Tensor) -> Tensor:
        """Return sample indices as `fetch` takes them: rows of the tensors, on their device."""
        if self.tensors is None:
            return order
        return (order if self.row_of_sample is None else self.row_of_sample[order]).to(self.tensors[0].device)

    def fetch(self, rows: Tensor) -> Any:
        """Return the batch of these rows."""
        if self.tensors is not None:
            return [tensor.index_select(0, rows) for tensor in self.tensors]
        indices = rows.tolist()
        if self.one_by_one:
            return self.collate(self.dataset[indices[0]])
        if getattr(self.dataset, "__getitems__", None):
            return self.collate(self.dataset.__getitems__(indices))
        return self.collate([self.dataset[i] for i in indices])

    def __getitem__(self, item: tuple[int, list[int]]) -> Any:
        number, rows = item
        if get_worker_info() is not None:
            _seed_worker(derive_seed(self.seed, "batch", number))
        return self.fetch(torch.tensor(rows, device=None if self.tensors is None else self.tensors[0].device))


def _stackable_tensors(dataset: Any) -> tuple[tuple[Tensor, ...] | None, Tensor | None]:
    """Return the tensors behind a TensorDataset, or a Subset of one, and which of their rows it has (None: all)."""
    if type(dataset) is Subset and len(dataset) > 0:
        tensors, row_of_sample = _stackable_tensors(dataset.dataset)
        if tensors is not None:
            indices, rows = torch.as_tensor(dataset.indices), len(cast(Any, dataset.dataset))
            # Only the dataset itself knows what other indices mean (-1, a mask).
            plain = indices.dtype == torch.int64 and indices.ndim == 1
            if plain and int(indices.min()) >= 0 and int(indices.max()) < rows:
                return tensors, indices if row_of_sample is None else row_of_sample[indices]
    elif type(dataset) is TensorDataset:
        tensors = dataset.tensors
        if all(type(t) is Tensor and t.layout == torch.strided and t.device == tensors[0].device for t in tensors):
            return tensors, None
    return None, None


def _start_worker(worker: int, also: Callable[[int], None] | None) -> None:
    """Call the user's worker_init_fn; get_worker_info() in it must show the user's dataset, not our reader."""
    info = cast(Any, get_worker_info())
    object.__setattr__(info, "dataset", info.dataset.dataset)  # frozen
    if also is not None:
        also(worker)


def _seed_worker(seed: int) -> None:
    """Seed the generators that augmentations draw from, so that neither the worker nor earlier batches matter."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _unchanged(batch: Any) -> Any:
    return batch
