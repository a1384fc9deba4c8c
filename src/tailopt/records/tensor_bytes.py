"""Tensors as bytes: the form in which they are written and compared.

    dense_cpu_tensors   detached, contiguous tensors on the CPU; anything without plain bytes is rejected
    tensor_bytes        the memory of such a tensor, not copied
    tensor_sha256       the digest of one tensor's bytes
    digest              one digest for a dict of tensors: names, types, shapes and bytes

Digests depend on neither device nor strides.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor

from tailopt.records.history import child_path, type_name


def digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, types, shapes and bytes, sorted by name; equal exactly when the tensors are equal bit for bit.

    Examples:
        >>> a, b = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])
        >>> digest({"w": a}) == digest({"w": a.clone()}), digest({"w": a}) == digest({"w": b})
        (True, False)
    """
    total = hashlib.sha256()
    for name, tensor in sorted(dense_cpu_tensors(tensors, "tensors").items()):
        total.update(json.dumps([name, dtype_name(tensor.dtype), list(tensor.shape)]).encode())
        total.update(tensor_bytes(tensor))
    return total.hexdigest()


def tensor_sha256(tensor: Tensor) -> str:
    """sha256 of a tensor's bytes in row-major order, whatever its device and strides; type and shape do not count.

    Examples:
        >>> x = torch.arange(6.0).reshape(2, 3)
        >>> tensor_sha256(x.t()) == tensor_sha256(torch.tensor([0.0, 3.0, 1.0, 4.0, 2.0, 5.0]))
        True
    """
    dense = _dense_cpu(tensor, "tensor")  # a name keeps the copy alive while its memory is read
    return hashlib.sha256(tensor_bytes(dense)).hexdigest()


def dense_cpu_tensors(tensors: Mapping[str, Tensor], path: str) -> dict[str, Tensor]:
    """Return the tensors as they are written: on the CPU, contiguous, detached.

    Args:
        tensors: by name.
        path: what messages call the mapping.

    Raises:
        TypeError: a value is not a tensor, or is one without plain bytes (sharded, sparse, quantized, meta).
        ValueError: a name cannot be stored in a safetensors file.
    """
    for name in tensors:
        if type(name) is not str or name == "__metadata__":
            raise ValueError(
                f"Invalid name in {path}: got {name!r}; need a string other than '__metadata__'. Rename it."
            )
    return {name: _dense_cpu(tensor, child_path(path, name)) for name, tensor in tensors.items()}


def _dense_cpu(tensor: Tensor, path: str) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{path} is {type_name(tensor)}; need a tensor. Put plain values into meta.")
    tensor = tensor.detach()
    if type(tensor) is not Tensor:
        raise TypeError(f"{path} is {type_name(tensor)}; need a plain tensor. Save its local or its full tensor.")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        form = "quantized" if tensor.is_quantized else "meta" if tensor.is_meta else str(tensor.layout)
        raise TypeError(f"{path} is a {form} tensor; need a dense one with memory. Save the tensors it is made of.")
    return tensor.cpu().resolve_conj().resolve_neg().contiguous()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return a view of a contiguous CPU tensor's memory, not a copy; it is valid only while the tensor lives."""
    length = tensor.numel() * tensor.element_size()
    if length == 0:
        return memoryview(bytearray())
    if not (address := tensor.data_ptr()):
        raise TypeError(f"A {type(tensor).__name__} of shape {tuple(tensor.shape)} has no memory of its own to read.")
    # ctypes instead of Tensor.numpy(): numpy is optional, and has no bfloat16.
    return memoryview((ctypes.c_ubyte * length).from_address(address))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as files hold it.

    Examples:
        >>> dtype_name(torch.bfloat16), dtype_from_name("bfloat16")
        ('bfloat16', torch.bfloat16)
    """
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """Return the dtype that `dtype_name` named."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a tensor dtype")
    return dtype
