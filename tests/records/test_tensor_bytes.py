"""Digests of tensors: by their bytes, whatever the device, the strides and the dtype."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor

from tailopt.records.tensor_bytes import digest, dtype_from_name, dtype_name, tensor_bytes, tensor_sha256


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.ones(3, dtype=torch.bfloat16)[::2],
        torch.nn.Parameter(torch.randn(4)),
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor(7),
        torch.empty(0, 3),
    ],
)
def test_the_digest_is_that_of_the_bytes_in_row_major_order(tensor: Tensor) -> None:
    plain = tensor.detach().resolve_conj().contiguous()
    data = b"" if not plain.numel() else plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert bytes(tensor_bytes(plain)) == data
    assert tensor_sha256(tensor) == hashlib.sha256(data).hexdigest()


def test_a_tensor_without_bytes_is_refused() -> None:
    with pytest.raises(TypeError, match="tensor is a meta tensor; need a dense one"):
        tensor_sha256(torch.empty(3, device="meta"))
    with pytest.raises(TypeError, match=r"A Tensor of shape \(3,\) has no memory"):
        tensor_bytes(torch.empty(3, device="meta"))


def test_names_of_dtypes() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        assert dtype_from_name(dtype_name(dtype)) == dtype
    with pytest.raises(ValueError, match="'nn' is not a tensor dtype"):
        dtype_from_name("nn")


def test_digests_tell_everything_apart() -> None:
    w = torch.tensor([1.0, 0.0])
    different = [
        {"w": w},
        {"v": w},
        {"w": -w},
        {"w": w.view(1, 2)},
        {"w": w.view(torch.int32)},
        {"w": w[:1], "x": w[1:]},
        {"w": w, "x": torch.zeros(0)},
        {},
    ]
    assert len({digest(one) for one in different}) == len(different)
    assert digest({"a": w, "b": -w}) == digest({"b": -w, "a": w})
