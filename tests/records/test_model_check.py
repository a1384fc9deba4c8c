"""A checkpoint of another model is refused by name, before anything is put into the model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tailopt.records.model_check import ModelLayout, check_same_model

WEIGHTS = {"a": (torch.float32, (2, 3)), "b": (torch.float32, ())}
BUFFERS = {"mean": (torch.float32, (3,)), "steps": (torch.int64, ())}
MODEL = ModelLayout(WEIGHTS, BUFFERS, average=False)


def test_the_same_model_is_accepted() -> None:
    check_same_model(MODEL, MODEL)
    check_same_model(MODEL, replace(MODEL, buffers=dict(reversed(BUFFERS.items()))))
    check_same_model(MODEL, replace(MODEL, weights={name: (None, shape) for name, (_, shape) in WEIGHTS.items()}))


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (replace(MODEL, weights={**WEIGHTS, "c": (torch.float32, (1,))}), "another model: c are in one of them only"),
        (replace(MODEL, weights={"a": WEIGHTS["a"]}), "another model: b are in one of them only"),
        (replace(MODEL, weights=dict(reversed(WEIGHTS.items()))), "another model: .* same names in another order"),
        (replace(MODEL, buffers={}), "another model: the buffers mean, steps are in one of them only"),
        (
            replace(MODEL, weights={**WEIGHTS, "a": (torch.float32, (3, 2))}),
            r"another model: a is float32 of shape \(3, 2\) there, float32 of shape \(2, 3\) here",
        ),
        (
            replace(MODEL, weights={**WEIGHTS, "a": (None, (3, 2))}),
            r"another model: a is of shape \(3, 2\) there, float32 of shape \(2, 3\) here",
        ),
        (
            replace(MODEL, buffers={**BUFFERS, "steps": (torch.float32, ())}),
            r"another model: steps is float32 of shape \(\) there, int64 of shape \(\) here",
        ),
        (
            replace(MODEL, average=True),
            "written with average=True, and the run has average=False. Resume with the same",
        ),
        (
            replace(MODEL, weights={**WEIGHTS, **{f"w{i}": (None, ()) for i in range(9)}}),
            "another model: w0, w1, w2, w3, w4 and 4 more are in one of them only",
        ),
    ],
)
def test_another_model_is_refused_by_what_differs(saved: ModelLayout, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_same_model(saved, MODEL)
