"""The C kernel on tensors whose leading dimensions have numbers of their own: stacked configurations, rows of a matrix.

A tensor threshold of shape [..., 1, 1] is one number for each row of a parameter, where a row is what its last
dimensions hold. Every row is a tensor to the C kernel: one pass, where torch's operations need a dozen (729 x 10 rows
of 100 elements in fp32, one thread: 0.3 ms instead of 10).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from tailopt.clipping.kernels.kernel import PLAIN_TYPES, StepGroup, on_device
from tailopt.clipping.operators import Number, compute_dtype
from tailopt.clipping.reference import ClipByValue, StepHyperparameters
from tailopt.native import library
from tailopt.native.calls import DTYPES
from tailopt.native.clip import NO_MOMENTUM, StepTable, TensorTable

SHORTEST = 16  # elements of a row; shorter ones are faster by torch's operations
KNOWN_FIELDS = {"clip", "lr", "weight_decay", "maximize"}


def refuses(p: Tensor, g: Tensor, hparams: StepHyperparameters) -> str:
    """Why the C kernel cannot take these tensors row by row; empty if it can."""
    if library.loaded() is None:
        return library.why_missing()
    if any(name not in KNOWN_FIELDS and value for name, value in zip(hparams._fields, hparams, strict=True)):
        return "it takes thresholds, lr and weight decay alone"
    if g.layout != torch.strided:
        return "the gradient is sparse"
    if type(p) not in PLAIN_TYPES or type(g) not in PLAIN_TYPES:
        return f"it takes plain tensors, not {type(p).__name__} with {type(g).__name__}"
    if p.dtype not in DTYPES or g.dtype != p.dtype or not (p.is_cpu and g.is_cpu):
        return f"it takes fp32, fp64, bf16 and fp16 on the CPU, not {p.dtype} with {g.dtype} on {p.device}"
    numbers = (hparams.lr, *hparams.clip)
    if torch.compiler.is_compiling() or any(isinstance(t, Tensor) and t.requires_grad for t in (g, *numbers)):
        return "the step is traced or differentiated"
    if not (p.is_contiguous() and g.is_contiguous()) or p.is_neg() or g.is_neg():
        return "parameter or gradient is not contiguous"
    if any(isinstance(t, Tensor) and (t.dim() > p.dim() or not t.is_cpu) for t in numbers):
        return "a threshold has more dimensions than the parameter, or is not on the CPU"
    if (lead := _leading(p, hparams)) and p.numel() < SHORTEST * math.prod(lead):
        return f"rows are shorter than {SHORTEST} elements"
    return ""


def run(groups: Sequence[StepGroup]) -> None:
    """Step on one tensor after another, each in one pass."""
    for group in groups:
        for p, g in zip(group.params, group.grads, strict=True):
            _run(p, g, group.hparams)


def _run(p: Tensor, g: Tensor, hparams: StepHyperparameters) -> None:
    kernel = library.loaded()
    assert kernel is not None
    if not p.numel():
        return
    dtype, lead = compute_dtype(p.dtype), _leading(p, hparams)
    hparams = on_device(hparams, p.device, dtype)
    rows, length = math.prod(lead), p.numel() // math.prod(lead)
    decay: Number = hparams.decay(dtype) if hparams.weight_decay else 1.0
    by_value = isinstance(hparams.clip, ClipByValue)
    clip_numbers = (*hparams.clip, 1.0, 1.0, 1.0) if by_value else (math.inf, 0.0, 0.0, *hparams.clip)
    numbers = (-hparams.lr, decay, float(hparams.maximize), *clip_numbers, *NO_MOMENTUM)  # the order of `Row` in clip.c
    varying = _varying(numbers, p.dim())[: len(lead)]
    table = torch.empty(*varying, len(numbers), dtype=torch.float64)
    for k, value in enumerate(numbers):
        aligned = value.reshape(_aligned(value, p.dim())[: len(lead)]) if isinstance(value, Tensor) else value
        table[..., k] = aligned
    row_of_tensor = torch.arange(math.prod(varying), dtype=torch.int32).reshape(varying).expand(lead)
    offsets = torch.arange(rows) * (length * p.element_size())
    torch.autograd.graph.increment_version([p])  # the kernel writes past autograd
    kernel.clip.run_at(
        "biclip" if by_value else "rescale",
        TensorTable(
            _filled("Q", offsets + p.data_ptr()),
            _filled("Q", offsets + g.data_ptr()),
            array("q", [length]) * rows,
            array("i", [DTYPES[p.dtype]]) * rows,
        ),
        StepTable(_filled("d", table), _filled("i", row_of_tensor)),
    )


def _leading(p: Tensor, hparams: StepHyperparameters) -> tuple[int, ...]:
    """The dimensions of a parameter up to the last one along which a hyperparameter varies."""
    varying = _varying((hparams.lr, *hparams.clip), p.dim())
    return tuple(p.shape[: max((i + 1 for i, size in enumerate(varying) if size > 1), default=0)])


def _varying(numbers: Sequence[Number], dims: int) -> tuple[int, ...]:
    """The shape over which numbers vary, aligned with a parameter; `torch.broadcast_shapes` takes ten times as long."""
    shapes = [_aligned(t, dims) for t in numbers if isinstance(t, Tensor) and t.dim()]
    return tuple(map(max, *shapes)) if len(shapes) > 1 else shapes[0] if shapes else (1,) * dims


def _aligned(value: Tensor, dims: int) -> tuple[int, ...]:
    return (1,) * (dims - value.dim()) + tuple(value.shape)


def _filled(kind: str, values: Tensor) -> array[int]:
    """An array with the elements of a tensor of the same size of element, without a list between them."""
    result = array(kind, bytes(values.numel() * array(kind).itemsize))
    if values.numel():
        dtype = torch.int64 if kind == "Q" else values.dtype
        torch.frombuffer(result, dtype=dtype).copy_(values.reshape(-1))
    return result
