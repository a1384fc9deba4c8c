"""What a node keeps to itself comes back to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tailopt.optimizers.exact_state import load_exact_state


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_inner_state_comes_back_in_its_own_type(kind: Any) -> None:
    """torch's own load_state_dict rounds fp32 state of a bf16 parameter."""
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    a, b = (kind([p], lr=0.1) for _ in range(2))
    a.state[p] = {"wide": torch.tensor([1 + 2.0**-20]), "step": 3, "more": {"plain": [1]}}
    load_exact_state(b, a.state_dict())
    assert b.state[p]["wide"].dtype == torch.float32 and b.state[p]["wide"].item() == 1 + 2.0**-20
    assert b.state[p]["step"] == 3 and b.state[p]["more"] == {"plain": [1]}
