"""A model in evaluation mode for a while: every module has its own mode again afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tailopt.evaluation import evaluating


def modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def partly_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Dropout(), nn.Linear(3, 1)))
    model[1].eval()
    model[2].eval()
    model[2][0].train()  # type: ignore[index]
    return model


@pytest.mark.parametrize("training", [True, False])
def test_every_module_has_its_own_mode_again(training: bool) -> None:
    model = partly_frozen()
    model.training = training
    before = modes(model)
    with evaluating(model):
        assert not any(modes(model).values()) and not torch.is_grad_enabled()
    assert modes(model) == before and torch.is_grad_enabled()


def test_an_exception_restores_the_modes_too() -> None:
    model = partly_frozen()
    before = modes(model)
    with pytest.raises(RuntimeError, match="out of memory"), evaluating(model):
        raise RuntimeError("out of memory")
    assert modes(model) == before and torch.is_grad_enabled()


def test_a_block_that_changes_modes_changes_nothing_afterwards() -> None:
    model = partly_frozen()
    before = modes(model)
    with evaluating(model):
        model.train()
    assert modes(model) == before


def test_a_module_with_two_parents_keeps_its_own_mode() -> None:
    shared = nn.Dropout().eval()
    model = nn.ModuleList([nn.Sequential(shared), nn.Sequential(shared)])
    with evaluating(model):
        pass
    assert not shared.training and all(parent.training for parent in model)


def test_a_module_that_acts_on_its_mode_is_told() -> None:
    class Merged(nn.Linear):
        """Adapters are added into the weights for evaluation, as LoRA layers do it."""

        merged = False

        def train(self, mode: bool = True) -> Merged:
            self.merged = not mode
            return super().train(mode)

    model = nn.Sequential(Merged(2, 2), Merged(2, 2).eval())
    with evaluating(model):
        assert all(layer.merged for layer in model)
    assert [layer.merged for layer in model] == [False, True]
