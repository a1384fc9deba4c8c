"""Gradient release on a CUDA device: the bits of ordinary steps, streams, and the memory that it saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tailopt import BiClip, L2Clip, release_gradients
from tests.optimizers.released import batches, decoder, loss_of, same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUMBERS = {"lr": 0.03, "u": 0.02, "d": 0.005}
SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "numbers": (BiClip, NUMBERS),
    "momentum, statistics": (BiClip, {**NUMBERS, "momentum": 0.9, "statistics": True}),
    "nothing set": (BiClip, {}),
    "norms": (L2Clip, {"lr": 0.03, "u": 0.05, "d": 0.01, "scope": "tensor"}),
    "fused, momentum, counts": (BiClip, {**NUMBERS, "fused": True, "momentum": 0.9, "statistics": "counts"}),
    "fused, stochastic rounding": (BiClip, {**NUMBERS, "fused": True, "stochastic_rounding": 7}),
    "fused, norms": (L2Clip, {"lr": 0.03, "u": 0.05, "d": 0.01, "scope": "tensor", "fused": True}),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("side_stream", [False, True])
def test_the_bits_of_a_loop_without_release(name: str, dtype: torch.dtype, side_stream: bool) -> None:
    """Backward runs on the stream of forward, and the rest of the step on the stream of the loop."""
    cls, settings = SETTINGS[name]
    results = []
    torch.use_deterministic_algorithms(True, warn_only=True)  # the gradient of an embedding is a sum by atomics
    try:
        for release in (False, True):
            model = decoder(dtype).cuda()
            optimizer = cls(model.named_parameters(), **settings)
            handle = release_gradients(model, optimizer, bucket_bytes=3_000) if release else None
            stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
            for x, y in batches(54):
                optimizer.zero_grad()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    loss = loss_of(model, (x.cuda(), y.cuda()))
                torch.cuda.current_stream().wait_stream(stream)
                loss.backward()
                optimizer.step()
            torch.cuda.synchronize()
            results.append(([p.detach().cpu() for p in model.parameters()], optimizer.state_dict()["state"]))
            if handle:
                handle.remove()
    finally:
        torch.use_deterministic_algorithms(False)
    same_bits(results[0], results[1])


@pytest.mark.parametrize("fused", [None, True])
def test_a_scaler_is_refused_by_the_step(fused: bool | None) -> None:
    """Also where its verdict would stay on the device: the parameters have moved by then."""
    model = decoder().cuda()
    optimizer = BiClip(model.parameters(), **NUMBERS, fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    x, y = batches(1)[0]
    with release_gradients(model, optimizer):
        scaler.scale(loss_of(model, (x.cuda(), y.cuda()))).backward()
        with pytest.raises(RuntimeError, match="A GradScaler decides after backward"):
            scaler.step(optimizer)
        optimizer.step()


def peak(release: bool, bucket_bytes: int = 1 << 20) -> float:
    """The peak of backward and step over what forward has left, in gradients of the whole model."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(16)]).cuda()
    optimizer = BiClip(model.parameters(), **NUMBERS)
    handle = release_gradients(model, optimizer, bucket_bytes=bucket_bytes) if release else None
    most = 0.0
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 1024, device="cuda")).square().mean()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss.backward()
        optimizer.step()
        most = float(torch.cuda.max_memory_allocated() - before)
    if handle:
        handle.remove()
    return most / sum(p.numel() * p.element_size() for p in model.parameters())


def test_memory_is_a_bucket_and_two_gradients() -> None:
    """Of 16 layers: without release 16 gradients; with it the one in a bucket of one layer, and the next."""
    assert peak(release=False) >= 1
    assert peak(release=True) <= 4 / 16
