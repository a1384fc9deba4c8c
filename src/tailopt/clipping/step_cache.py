"""The step cache: what one step finds out about its tensors and the next one can use.

A step over many small tensors costs mostly questions: is every tensor on the CPU, contiguous, of a type the C kernel
takes, and where is it? An optimizer or an engine that steps on the same parameters many times owns one `StepCache` and
passes it to every step. A cache is always safe to pass: a step looks again at what differs from the last one. It holds
numbers and addresses, never a tensor, so it keeps no memory alive.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from tailopt.clipping.freed_storage import check_not_freed
from tailopt.clipping.kernels.kernel import PLAIN_TYPES, StepGroup, table_row
from tailopt.clipping.launch_tables import LaunchTables
from tailopt.clipping.operators import compute_dtype
from tailopt.clipping.reference import StepHyperparameters
from tailopt.native.calls import DTYPES, CArray, dtype_codes, pointers, sizes
from tailopt.native.clip import StepTable, TensorTable

Fit = Callable[[list[Tensor], list[Tensor], list[Tensor]], bool]  # parameters, gradients, momenta


class StepCache:
    """Sizes, types and addresses of the last step of the C kernel, and its step table.

    Gradients are new tensors in every step, and asking each of them would cost more than the step. So torch compares
    all tensors at once with those of the last step: type, dtype, device, layout, shape, strides, lazy negation.

    Args:
        reused: whether another step will see this cache; if not, the comparison with the next step is not prepared.
    """

    def __init__(self, reused: bool = True) -> None:
        self._reused = reused
        self._matches: Callable[..., bool] | None = None  # compares tensors with those of the last step
        self._fit: Fit | None = None  # what those fitted
        self.launch_tables = LaunchTables()  # of a kernel on a GPU
        self.sizes, self._n_momenta = array("q"), 0
        self.tensor_table = TensorTable((), (), (), ())
        self._compute_dtypes: list[torch.dtype] = []  # by parameter
        self._of_parts: StepCache | None = None
        self._forget_addresses()
        self.distinct = True  # no parameter is in the list twice
        # of the last groups; empty if a tensor that may change is among them
        self._last_hparams: list[StepHyperparameters] = []
        self._lengths: list[int] = []  # parameters in each of the last groups
        self._row_sources: list[tuple[int, torch.dtype]] = []  # group and compute type of each row of the step table
        self._step_table, self._row_of_param = StepTable((), ()), array("i")

    def __reduce__(self) -> tuple[type[StepCache], tuple[bool]]:
        return StepCache, (self._reused,)  # addresses are of this process and these tensors: a copy starts empty

    @property
    def of_parts(self) -> StepCache:
        """What is kept of parts of these tensors, such as shards, where a kernel takes those."""
        if self._of_parts is None:
            self._of_parts = StepCache(self._reused)
        return self._of_parts

    def prepare(self, params: list[Tensor], grads: list[Tensor], momenta: list[Tensor], fit: Fit | None = None) -> bool:
        """Bring sizes, types and addresses up to date; False if the kernel cannot take these tensors.

        fit: tells whether the kernel takes them, by default whether the C kernel does.
        """
        fit = fit or go_together
        if fit is not self._fit:
            self._fit, self._matches = fit, None
        try:
            if not self._recognises(params, grads, momenta):
                self._matches = None  # nothing is known until everything is
                if not fit(params, grads, momenta):
                    return False
                self.learn(params, momenta)
                if self._reused:
                    self._matches = _comparison(params + grads + momenta)
            self.locate(params)
            return True
        except RuntimeError:  # a tensor without memory of its own, as inside a function transform
            return False

    def _recognises(self, params: list[Tensor], grads: list[Tensor], momenta: list[Tensor]) -> bool:
        """Whether these tensors have the types, sizes and strides of the last ones."""
        if self._matches is None or len(params) != len(self.sizes) or len(momenta) != self._n_momenta:
            return False
        return self._matches(*params, *grads, *momenta)

    def learn(self, params: list[Tensor], momenta: list[Tensor]) -> None:
        """Sizes and types of parameters that the C kernel can take."""
        dtypes = list(map(_DTYPE, params))
        self.sizes, self._n_momenta = sizes(params), len(momenta)
        codes = [DTYPES[t] for t in dtypes]
        self.tensor_table = TensorTable((), (), self.sizes, codes, (), dtype_codes(momenta))
        self._compute_dtypes = [compute_dtype(t) for t in dtypes]
        self._last_hparams, self._lengths = [], []
        self._forget_addresses()

    def _forget_addresses(self) -> None:
        # lists are compared faster than arrays
        self.param_addresses: list[int] = []
        self.grad_addresses: list[int] = []
        self.momentum_addresses: list[int] = []

    def locate(self, params: list[Tensor]) -> None:
        """Bring the addresses of the parameters up to date: they may change while everything else stays."""
        now = pointers(params)
        if now != self.param_addresses:
            check_not_freed(params)
            used = [address for address in now if address]  # empty tensors have none
            self.param_addresses, self.distinct = now, len(set(used)) == len(used)
            self.tensor_table.params = CArray("Q", now)

    def locate_gradients(self, grads: list[Tensor]) -> None:
        """Bring the addresses of the gradients up to date; raise if one of them has no memory."""
        now = pointers(grads)
        if now != self.grad_addresses:
            check_not_freed(grads, now)
            self.grad_addresses, self.tensor_table.grads = now, CArray("Q", now)

    def locate_momenta(self, momenta: list[Tensor]) -> None:
        """Bring the addresses of the momenta up to date; raise if one of them has no memory."""
        now = pointers(momenta)
        if now != self.momentum_addresses:
            check_not_freed(momenta, now)
            self.momentum_addresses, self.tensor_table.momenta = now, CArray("Q", now)

    def same_hparams_as_last_call(self, groups: Sequence[StepGroup]) -> bool:
        """Whether each group has the hyperparameters (the very object) and the number of parameters of the last call.

        False after a call with tensors among the hyperparameters, since these can change in place.
        """
        last = self._last_hparams
        if len(groups) != len(last):
            return False
        if len(last) == 1:  # as in most steps: a loop would take longer than the comparison
            group = groups[0]
            return group.hparams is last[0] and len(group.params) == self._lengths[0]
        for group, hparams, length in zip(groups, last, self._lengths, strict=True):
            if group.hparams is not hparams or len(group.params) != length:
                return False
        return True

    def step_table(self, groups: Sequence[StepGroup]) -> StepTable:
        """The hyperparameters as the C kernel takes them: one table, and which row of it every parameter gets."""
        if self.same_hparams_as_last_call(groups):
            return self._step_table
        lengths = [len(group.params) for group in groups]
        if lengths != self._lengths:
            self._assign_table_rows(lengths)
        numbers = array("d")
        for k, dtype in self._row_sources:
            numbers.extend(table_row(groups[k].hparams, dtype))
        self._step_table = StepTable(numbers, self._row_of_param)
        self.remember_hparams(groups)
        return self._step_table

    def remember_hparams(self, groups: Sequence[StepGroup]) -> None:
        """Keep what `same_hparams_as_last_call` compares with."""
        numbers = (
            t for group in groups for t in (group.hparams.lr, *group.hparams.clip, *(group.hparams.momentum or ()))
        )
        fixed = not any(isinstance(t, Tensor) for t in numbers)
        self._last_hparams = [group.hparams for group in groups] if fixed else []
        self._lengths = [len(group.params) for group in groups]

    def forget_hparams(self) -> None:
        """Let no later call be the same as the last."""
        self._last_hparams = []

    def _assign_table_rows(self, lengths: list[int]) -> None:
        """Allocate one row of the step table for every pair of a group and a compute type that occurs in it."""
        self._lengths, self._row_sources, self._row_of_param = lengths, [], array("i")
        for k, length in enumerate(lengths):
            start = len(self._row_of_param)
            types = self._compute_dtypes[start : start + length]
            row_of_type: dict[torch.dtype, int] = {}
            for dtype in set(types):
                row_of_type[dtype] = len(self._row_sources)
                self._row_sources.append((k, dtype))
            self._row_of_param.extend([row_of_type[t] for t in types])


def go_together(params: list[Tensor], grads: list[Tensor], momenta: list[Tensor]) -> bool:
    """Whether the C kernel can walk through parameters, gradients and momenta side by side."""
    dtypes = list(map(_DTYPE, params))
    return (
        set(dtypes) <= DTYPES.keys()
        and list(map(_DTYPE, grads)) == dtypes
        and _are_flat(params + grads + momenta)
        and sizes(params) == sizes(grads)
        and (not momenta or sizes(params) == sizes(momenta))
        # doubles go with doubles only
        and all((p == torch.float64) == (m.dtype == torch.float64) for p, m in zip(dtypes, momenta, strict=False))
        and {m.dtype for m in momenta} <= DTYPES.keys()
    )


def _are_flat(tensors: list[Tensor]) -> bool:
    """Whether these are plain tensors on the CPU whose elements lie one after another."""
    return (
        set(map(type, tensors)) <= PLAIN_TYPES
        and all(map(_ON_CPU, tensors))
        and set(map(_LAYOUT, tensors)) <= {torch.strided}
        and all(map(Tensor.is_contiguous, tensors))
        and not any(map(Tensor.is_neg, tensors))
    )


def _comparison(tensors: list[Tensor]) -> Callable[..., bool] | None:
    """A function that compares as many tensors with these, as the guards of torch.compile do; None without them."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    except (ImportError, TypeError):  # not a public part of torch: without it every step asks every tensor again
        return None
    return guards.check


_DTYPE, _ON_CPU, _LAYOUT = attrgetter("dtype"), attrgetter("is_cpu"), attrgetter("layout")
