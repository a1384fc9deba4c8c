"""Checkpoints by parameter name: where torch's helpers fail for stateless and mixed optimizers, ours must hold.

The tests named `test_torch_still_...` assert that torch's helpers fail; when one of these breaks, torch was mended.
Run as a script this file is one rank of the FSDP2 test at the end.
"""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import SGD, AdamW, Optimizer

import tailopt
from tailopt.optimizers.state_by_name import FORMAT, load_named_state_dict, named_state_dict

HEAD = ("format", "groups", "layout")


def stateless(params: Any, **settings: Any) -> Optimizer:
    return tailopt.BiClip(params, **{"u": 1e-1, "d": 1e-3, **settings})


STATELESS = [
    pytest.param(stateless, id="biclip"),
    pytest.param(lambda params, **settings: tailopt.L2Clip(params, **{"u": 1.0, **settings}), id="l2clip"),
    pytest.param(SGD, id="sgd"),
]


def two_layers(seed: int = 0) -> nn.Sequential:
    """Parameters 0.weight, 0.bias, 2.weight, 2.bias."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))


def train(model: nn.Module, *optimizers: Optimizer, steps: int = 1) -> None:
    for step in range(steps):
        x = torch.linspace(-1, 1 + step, 15).reshape(5, 3)
        model(x).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def lr_by_name(model: nn.Module, *optimizers: Optimizer) -> dict[str, Any]:
    names = {p: name for name, p in model.named_parameters()}
    return {names[p]: g["lr"] for o in optimizers for g in o.param_groups for p in g["params"]}


def assert_same_state(one: Any, other: Any) -> None:
    assert one["state"].keys() == other["state"].keys()
    for name, entry in one["state"].items():
        assert entry.keys() == other["state"][name].keys()
        for key, value in entry.items():
            torch.testing.assert_close(other["state"][name][key], value, rtol=0, atol=0)


def through_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# --- what it looks like -----------------------------------------------------------------------------------------------


def test_the_dict_is_plain_and_keyed_by_names() -> None:
    model = two_layers()
    optimizer = AdamW([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.5}], lr=0.25)
    train(model, optimizer)
    state = named_state_dict(model, optimizer)
    assert list(state) == ["format", "groups", "layout", "state"]
    assert state["format"] == FORMAT
    assert [(g["params"], g["lr"]) for g in state["groups"]] == [
        (["0.weight", "0.bias"], 0.25),
        (["2.weight", "2.bias"], 0.5),
    ]
    assert state["state"]["2.bias"].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert ("2.bias", "exp_avg", (1,), "float32") in state["layout"]
    entry = optimizer.state[model[2].bias]
    assert state["state"]["2.bias"]["exp_avg"] is entry["exp_avg"]
    assert state["state"]["2.bias"] is not entry  # dcp.load replaces plain values in it


@pytest.mark.parametrize("make", STATELESS)
def test_a_stateless_optimizer_round_trips_through_a_file(make: Any) -> None:
    model = two_layers()
    optimizer = make([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.5}], lr=0.25)
    train(model, optimizer)
    state = through_file(named_state_dict(model, optimizer))
    assert state["state"] == {}
    fresh = make([{"params": model[2].parameters()}, {"params": model[0].parameters()}], lr=1.0)
    load_named_state_dict(model, fresh, state)
    assert lr_by_name(model, fresh) == lr_by_name(model, optimizer)
    assert named_state_dict(model, fresh)["groups"] == tuple(reversed(state["groups"]))


def test_resuming_equals_not_having_stopped() -> None:
    def optimizers(model: nn.Module) -> tuple[Optimizer, Optimizer]:
        return AdamW(model[0].parameters(), lr=0.1), stateless(model[2].parameters(), lr=0.2)

    model = two_layers()
    adamw, biclip = optimizers(model)
    train(model, adamw, biclip, steps=2)
    saved = through_file({"model": model.state_dict(), "optim": named_state_dict(model, (adamw, biclip))})
    train(model, adamw, biclip, steps=2)

    resumed = two_layers(seed=1)
    resumed.load_state_dict(saved["model"])
    adamw, biclip = optimizers(resumed)
    load_named_state_dict(resumed, (biclip, adamw), saved["optim"])
    train(resumed, adamw, biclip, steps=2)
    for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


# --- the four failures of torch's helpers -----------------------------------------------------------------------------


def swapped(make: Any, model: nn.Module) -> tuple[Optimizer, Optimizer]:
    """One optimizer with lr 0.1 for layer 0 and 0.2 for layer 2, and a fresh one with its groups in another order."""
    saved = make([{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.2}], lr=1.0)
    train(model, saved)
    return saved, make([{"params": model[2].parameters()}, {"params": model[0].parameters()}], lr=1.0)


@pytest.mark.parametrize("make", STATELESS)
def test_groups_in_another_order_get_their_own_settings(make: Any) -> None:
    model = two_layers()
    saved, fresh = swapped(make, model)
    load_named_state_dict(model, fresh, named_state_dict(model, saved))
    assert lr_by_name(model, fresh) == {"0.weight": 0.1, "0.bias": 0.1, "2.weight": 0.2, "2.bias": 0.2}


@pytest.mark.parametrize("make", STATELESS)
def test_several_stateless_optimizers_in_any_order_or_joined(make: Any) -> None:
    model = two_layers()
    first, second = make(model[0].parameters(), lr=0.1), make(model[2].parameters(), lr=0.2)
    train(model, first, second)
    state = named_state_dict(model, [first, second])
    expected = {"0.weight": 0.1, "0.bias": 0.1, "2.weight": 0.2, "2.bias": 0.2}

    one, two = make(model[0].parameters(), lr=1.0), make(model[2].parameters(), lr=1.0)
    load_named_state_dict(model, (two, one), state)
    assert lr_by_name(model, one, two) == expected

    joined = make([{"params": model[2].parameters()}, {"params": model[0].parameters()}], lr=1.0)
    load_named_state_dict(model, joined, state)
    assert lr_by_name(model, joined) == expected


@pytest.mark.parametrize("make", STATELESS)
def test_mixed_optimizers_round_trip_in_any_order(make: Any) -> None:
    model = two_layers()
    adamw, other = AdamW(model[0].parameters(), lr=0.1), make(model[2].parameters(), lr=0.2)
    train(model, adamw, other)
    state = named_state_dict(model, (adamw, other))
    assert state["state"].keys() == {"0.weight", "0.bias"}
    new_adamw, new_other = AdamW(model[0].parameters()), make(model[2].parameters(), lr=1.0)
    load_named_state_dict(model, (new_other, new_adamw), state)
    assert_same_state(state, named_state_dict(model, (new_adamw, new_other)))
    assert not new_other.state
    assert lr_by_name(model, new_adamw, new_other)["2.bias"] == 0.2


def test_torch_still_fails_to_load_a_full_stateless_dict() -> None:
    model = two_layers()
    optimizer = SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    state = get_optimizer_state_dict(model, optimizer)
    with pytest.raises(AssertionError, match="Expected device to be set"):
        set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=True))


def test_torch_still_fails_for_two_stateless_optimizers() -> None:
    model = two_layers()
    both = SGD(model[0].parameters(), lr=0.1), SGD(model[2].parameters(), lr=0.2)
    train(model, *both)
    state = get_optimizer_state_dict(model, both)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        set_optimizer_state_dict(model, both, state)


def test_torch_still_fails_for_mixed_optimizers() -> None:
    model = two_layers()
    both = AdamW(model[0].parameters()), SGD(model[2].parameters(), lr=0.2)
    train(model, *both)
    state = get_optimizer_state_dict(model, both)
    with pytest.raises(RuntimeError, match=r"Missing optimizer state for parameter '2\.weight'"):
        set_optimizer_state_dict(model, both, state)


def test_torch_still_exchanges_settings_of_stateless_groups() -> None:
    model = two_layers()
    saved, fresh = swapped(SGD, model)
    set_optimizer_state_dict(model, fresh, get_optimizer_state_dict(model, saved))
    assert lr_by_name(model, fresh) == {"0.weight": 0.2, "0.bias": 0.2, "2.weight": 0.1, "2.bias": 0.1}  # wrong


# --- their neighbours: empty entries, older files, the fake step ------------------------------------------------------


def test_no_step_no_gradient_no_hook_no_state_entry() -> None:
    model = two_layers()
    lr = torch.tensor(0.1)
    optimizer = stateless(model.parameters(), lr=lr)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    before = copy.deepcopy(model.state_dict())
    state = named_state_dict(model, optimizer)
    assert optimizer.param_groups[0]["lr"] is lr
    load_named_state_dict(model, optimizer, state)
    named_state_dict(model, optimizer, like=state)
    assert calls == []
    assert all(p.grad is None for p in model.parameters())
    assert len(optimizer.state) == 0
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())


def test_torch_still_takes_a_fake_step() -> None:
    model = two_layers()
    optimizer = SGD(model.parameters(), lr=0.1)
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    get_optimizer_state_dict(model, optimizer)
    assert calls == [1]


def test_empty_state_entries_are_ignored() -> None:
    model = two_layers()
    optimizer = stateless(model.parameters(), lr=0.1)
    for p in model.parameters():
        assert optimizer.state[p] == {}  # reading made it
    state = named_state_dict(model, optimizer)
    assert state["state"] == {}
    state["state"] = {"0.weight": {}, "2.bias": {}}  # as a foreign tool might write them
    fresh = stateless(model.parameters(), lr=1.0)
    load_named_state_dict(model, fresh, state)
    assert len(fresh.state) == 0


def test_settings_that_an_older_file_lacks_keep_their_values() -> None:
    model = two_layers()
    state = named_state_dict(model, stateless(model.parameters(), lr=0.1))
    for group in state["groups"]:
        del group["dead_zone"], group["maximize"]
    fresh = stateless(model.parameters(), lr=1.0, dead_zone=1e-4, maximize=True)
    load_named_state_dict(model, fresh, state)
    (group,) = fresh.param_groups
    assert (group["lr"], group["dead_zone"], group["maximize"]) == (0.1, 1e-4, True)


def test_settings_of_a_scheduler_travel() -> None:
    model = two_layers()
    optimizer = stateless(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    fresh = stateless(model.parameters(), lr=1.0)
    load_named_state_dict(model, fresh, named_state_dict(model, optimizer))
    assert fresh.param_groups[0]["initial_lr"] == 0.1


def test_groups_without_parameters_keep_their_values() -> None:
    model = two_layers()
    optimizer = stateless([{"params": [], "lr": 0.3}, {"params": model.parameters()}], lr=0.1)
    state = named_state_dict(model, optimizer)
    assert len(state["groups"]) == 1
    fresh = stateless([{"params": model.parameters()}, {"params": []}, {"params": [], "lr": 0.5}], lr=1.0)
    load_named_state_dict(model, fresh, state)
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 1.0, 0.5]


def test_torch_still_fails_flattened_for_older_files_and_empty_groups() -> None:
    model, flat = two_layers(), StateDictOptions(flatten_optimizer_state_dict=True)
    optimizer = SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    state = get_optimizer_state_dict(model, optimizer, options=flat)
    older = {key: value for key, value in state.items() if not key.endswith("nesterov")}
    with pytest.raises(KeyError, match="nesterov"):
        set_optimizer_state_dict(model, optimizer, older, options=flat)
    set_optimizer_state_dict(model, optimizer, state, options=flat)
    assert len(optimizer.state) == 4  # an empty dict a parameter

    with_empty = SGD([{"params": model.parameters()}, {"params": []}], lr=0.1)
    train(model, with_empty)
    state = get_optimizer_state_dict(model, with_empty, options=flat)
    with pytest.raises(IndexError):
        set_optimizer_state_dict(model, with_empty, state, options=flat)


# --- names, tensors, ties ---------------------------------------------------------------------------------------------


class Wrapper(nn.Module):
    """What DDP does to names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


@pytest.mark.parametrize(
    "wrap",
    [
        Wrapper,
        lambda model: Wrapper(Wrapper(model)),
        lambda model: torch.compile(Wrapper(model), backend="eager"),
        lambda model: Wrapper(torch.compile(model, backend="eager")),
        checkpoint_wrapper,
        lambda model: nn.Sequential(checkpoint_wrapper(model[0]), model[1], Wrapper(model[2])),
    ],
)
def test_names_are_those_of_the_bare_model(wrap: Any) -> None:
    model = two_layers()
    state = named_state_dict(model, stateless(model.parameters(), lr=0.1))
    wrapped = wrap(model)
    optimizer = stateless(wrapped.parameters(), lr=1.0)
    load_named_state_dict(wrapped, optimizer, state)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert named_state_dict(wrapped, optimizer)["groups"] == state["groups"]


def test_a_submodule_called_module_keeps_its_name_beside_others() -> None:
    model = Wrapper(nn.Linear(2, 1))
    model.register_parameter("weight", nn.Parameter(torch.ones(1)))
    for wrapped in (model, Wrapper(model)):
        (group,) = named_state_dict(wrapped, stateless(wrapped.parameters(), lr=0.1))["groups"]
        assert group["params"] == ["weight", "module.weight", "module.bias"]


def test_param_names_stay_those_of_the_live_optimizer() -> None:
    model = two_layers()
    named = stateless([(f"mine.{name}", p) for name, p in model.named_parameters()], lr=0.1)
    state = named_state_dict(model, named)
    assert "param_names" not in state["groups"][0]
    fresh = stateless([(f"other.{name}", p) for name, p in reversed(list(model.named_parameters()))], lr=1.0)
    load_named_state_dict(model, fresh, state)
    assert fresh.param_groups[0]["param_names"] == ["other.2.bias", "other.2.weight", "other.0.bias", "other.0.weight"]
    assert fresh.param_groups[0]["lr"] == 0.1
    unnamed = stateless(model.parameters(), lr=1.0)
    load_named_state_dict(model, unnamed, state)
    assert "param_names" not in unnamed.param_groups[0]


def test_tensor_settings_stay_tensors_and_shared_ones_stay_shared() -> None:
    model = two_layers()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    optimizer = stateless(groups, lr=torch.tensor(0.1), u=torch.tensor(0.5), d=torch.tensor(0.25))
    state = named_state_dict(model, optimizer)
    optimizer.param_groups[0]["lr"].fill_(7.0)  # as a scheduler does: what was saved stays
    fresh = stateless([{"params": layer.parameters()} for layer in (model[2], model[0])], lr=1.0)
    load_named_state_dict(model, fresh, through_file(state))
    for group in fresh.param_groups:
        assert {key: group[key].item() for key in ("lr", "u", "d")} == {"lr": pytest.approx(0.1), "u": 0.5, "d": 0.25}
    assert fresh.param_groups[0]["lr"] is fresh.param_groups[1]["lr"]
    assert fresh.param_groups[0]["lr"] is not state["groups"][0]["lr"]


def test_tensor_settings_go_to_the_device_of_the_parameters_or_of_their_predecessor() -> None:
    model = nn.Linear(3, 1)
    state = named_state_dict(model, SGD(model.parameters(), lr=torch.tensor(0.1)))
    meta = model.to("meta")
    follows = SGD(meta.parameters(), lr=1.0)
    load_named_state_dict(meta, follows, state)
    assert follows.param_groups[0]["lr"].device.type == "meta"
    stays = SGD(meta.parameters(), lr=torch.tensor(1.0))
    load_named_state_dict(meta, stays, state)
    assert stays.param_groups[0]["lr"].device.type == "cpu"


def test_tensor_betas_round_trip() -> None:
    model = two_layers()
    betas = torch.tensor(0.5), torch.tensor(0.75)
    optimizer = AdamW(model.parameters(), lr=torch.tensor(0.1), betas=betas, foreach=False)
    fresh = AdamW(model.parameters(), lr=torch.tensor(1.0), foreach=False)
    load_named_state_dict(model, fresh, through_file(named_state_dict(model, optimizer)))
    assert [beta.item() for beta in fresh.param_groups[0]["betas"]] == [0.5, 0.75]


class Tied(nn.Module):
    def __init__(self, decoder_first: bool = False) -> None:
        super().__init__()
        first, second = ("decoder", "encoder") if decoder_first else ("encoder", "decoder")
        setattr(self, first, nn.Linear(3, 3, bias=False))
        setattr(self, second, nn.Linear(3, 3, bias=False))
        self.decoder.weight = self.encoder.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x))


def test_tied_parameters_have_one_entry_under_any_of_their_names() -> None:
    model = Tied()
    optimizer = AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    state = named_state_dict(model, optimizer)
    assert [group["params"] for group in state["groups"]] == [["encoder.weight"]]
    other = Tied(decoder_first=True)
    fresh = AdamW(other.parameters())
    load_named_state_dict(other, fresh, state)
    assert named_state_dict(other, fresh)["state"].keys() == {"decoder.weight"}
    assert torch.equal(fresh.state[other.encoder.weight]["exp_avg"], optimizer.state[model.encoder.weight]["exp_avg"])


def test_parameters_that_became_tied_or_untied_are_refused() -> None:
    tied, untied = Tied(), Tied()
    untied.decoder = nn.Linear(3, 3, bias=False)
    one, two = stateless(tied.parameters(), lr=0.1), stateless(untied.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"more than one entry for \{'encoder.weight'\}\. Tie"):
        load_named_state_dict(tied, one, named_state_dict(untied, two))
    with pytest.raises(ValueError, match=r"no entry for \{'decoder.weight'\}"):
        load_named_state_dict(untied, two, named_state_dict(tied, one))


def test_a_parameter_listed_twice_in_a_group_is_saved_once() -> None:
    model = nn.Linear(3, 1, bias=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        optimizer = AdamW([model.weight, model.weight], lr=0.1)
        fresh = AdamW([model.weight, model.weight])
    train(model, optimizer)
    state = named_state_dict(model, optimizer)
    assert state["groups"][0]["params"] == ["weight"]
    load_named_state_dict(model, fresh, state)
    assert fresh.param_groups[0]["lr"] == 0.1


class Lookahead(Optimizer):
    """Has an inner optimizer and, unlike a mere wrapper, groups and state of its own."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__([p for group in optimizer.param_groups for p in group["params"]], {"alpha": 0.5})
        self.optimizer = optimizer


def test_an_optimizer_around_another_is_saved_for_itself() -> None:
    model = two_layers()
    outer = Lookahead(stateless(model.parameters(), lr=0.1))
    (group,) = named_state_dict(model, outer)["groups"]
    assert group.keys() == {"params", "alpha"}


# --- refusals, before anything moved ----------------------------------------------------------------------------------


@pytest.fixture
def saved() -> Any:
    model = two_layers()
    optimizer = AdamW([{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.2}])
    train(model, optimizer)
    return named_state_dict(model, optimizer)


def refused(saved: Any, groups: list[list[str]], match: str) -> None:
    """Loading `saved` into AdamW with these groups raises, and leaves it as it was."""
    model = two_layers()
    parameters = dict(model.named_parameters())
    optimizer = AdamW([{"params": [parameters[name] for name in group]} for group in groups], lr=1.0)
    with pytest.raises(ValueError, match=match):
        load_named_state_dict(model, optimizer, saved)
    assert set(lr_by_name(model, optimizer).values()) == {1.0}
    assert len(optimizer.state) == 0


def test_a_split_group_is_refused(saved: Any) -> None:
    refused(
        saved,
        [["0.weight"], ["0.bias"], ["2.weight", "2.bias"]],
        r"split or merged: \{'0.weight'\} is one group here, the checkpoint has \{'0.bias', '0.weight'\}\. Group",
    )


def test_merged_groups_are_refused(saved: Any) -> None:
    refused(
        saved,
        [["0.weight", "0.bias", "2.weight", "2.bias"]],
        r"is one group here, the checkpoint has \{'0.bias', '0.weight'\} and \{'2.bias', '2.weight'\}\. Group them",
    )


def test_regrouped_parameters_are_refused(saved: Any) -> None:
    refused(saved, [["0.weight", "2.weight"], ["0.bias", "2.bias"]], "split or merged")


def test_a_parameter_that_the_checkpoint_lacks_is_refused(saved: Any) -> None:
    saved["groups"] = saved["groups"][:1]
    saved["state"] = {name: saved["state"][name] for name in ("0.weight", "0.bias")}
    refused(
        saved,
        [["0.weight", "0.bias"], ["2.weight", "2.bias"]],
        r"no entry for \{'2.bias', '2.weight'\}; it was saved for \{'0.bias', '0.weight'\}\..* add_param_group",
    )


def test_a_parameter_that_no_optimizer_holds_is_refused(saved: Any) -> None:
    refused(
        saved,
        [["0.weight", "0.bias"]],
        r"entries for \{'2.bias', '2.weight'\}, which no optimizer here holds; .*Pass all the optimizers",
    )


def test_state_without_a_group_is_refused(saved: Any) -> None:
    saved["state"]["nowhere"] = {"step": 1}
    refused(saved, [["0.weight", "0.bias"], ["2.weight", "2.bias"]], r"entries for \{'nowhere'\}")


def test_a_newer_format_is_refused_with_both_numbers(saved: Any) -> None:
    saved["format"] = FORMAT + 1
    groups = [["0.weight", "0.bias"], ["2.weight", "2.bias"]]
    refused(saved, groups, f"format {FORMAT + 1}, this tailopt reads formats up to {FORMAT}. Upgrade")


def test_a_dict_of_torch_is_refused_with_the_remedy() -> None:
    model = two_layers()
    optimizer = stateless(model.parameters(), lr=0.1)
    with pytest.raises(
        ValueError, match=r"Not a named_state_dict: no \{'format', 'groups', 'layout'\}.*load_state_dict"
    ):
        load_named_state_dict(model, optimizer, optimizer.state_dict())


def test_lost_state_is_refused(saved: Any) -> None:
    del saved["state"]["2.bias"]["exp_avg"]
    groups = [["0.weight", "0.bias"], ["2.weight", "2.bias"]]
    refused(saved, groups, r"state that is not here: \{'2.bias.exp_avg'\}\..*like=head")


def test_long_lists_of_names_are_cut() -> None:
    model = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(9))
    state = named_state_dict(model, stateless(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"\{'1', '2', '3', '4', '5', '6'\} and 2 more, which no optimizer"):
        load_named_state_dict(model, stateless([model[0]], lr=0.1), state)


def test_a_parameter_outside_the_model_is_refused() -> None:
    model, stranger = two_layers(), nn.Parameter(torch.zeros(2, 5))
    optimizer = stateless([{"params": model.parameters()}, {"params": [stranger]}], lr=0.1)
    with pytest.raises(
        ValueError, match=r"Parameter 0 of group 1 of optimizer 0 .* shape \(2, 5\), is not in the model"
    ):
        named_state_dict(model, optimizer)


def test_a_parameter_of_two_optimizers_is_refused() -> None:
    model = two_layers()
    both = stateless(model.parameters(), lr=0.1), AdamW(model[2].parameters())
    with pytest.raises(ValueError, match=r"'2.weight' is in optimizers 0 and 1, .* separate dicts"):
        named_state_dict(model, both)


def test_state_of_no_parameter_is_refused() -> None:
    model = two_layers()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.state["rounds"] = {"count": 3}  # type: ignore[index]
    with pytest.raises(ValueError, match=r"belong to no parameter: \{'rounds'\}.*own state_dict"):
        named_state_dict(model, optimizer)


def test_when_one_optimizer_refuses_none_has_moved() -> None:
    model = two_layers()
    adamw, biclip = AdamW(model[0].parameters(), lr=0.1), stateless(model[2].parameters(), lr=0.2)
    train(model, adamw, biclip)
    state = named_state_dict(model, (adamw, biclip))
    state["groups"][1]["u"], state["groups"][1]["d"] = 0.1, 0.3
    adamw, biclip = AdamW(model[0].parameters(), lr=1.0), stateless(model[2].parameters(), lr=1.0)
    live = adamw.param_groups[0]
    with pytest.raises(ValueError, match="Invalid thresholds"):
        load_named_state_dict(model, (adamw, biclip), state)
    assert adamw.param_groups[0] is live
    assert live["lr"] == biclip.param_groups[0]["lr"] == 1.0
    assert len(adamw.state) == 0


# --- any grouping, any order ------------------------------------------------------------------------------------------

NAMES = tuple(f"{layer}.{kind}" for layer in range(3) for kind in ("weight", "bias"))


@st.composite
def arrangements(draw: st.DrawFn) -> tuple[list[list[list[str]]], list[list[list[str]]]]:
    """One partition of the parameters into groups, dealt out to optimizers twice, in independent orders."""
    cell = [draw(st.integers(0, len(NAMES) - 1)) for _ in NAMES]
    cells = [[n for n, c in zip(NAMES, cell, strict=True) if c == i] for i in sorted(set(cell))]

    def dealt() -> list[list[list[str]]]:
        hands: dict[int, list[list[str]]] = {}
        for group in draw(st.permutations(cells)):
            hands.setdefault(draw(st.integers(0, 2)), []).append(draw(st.permutations(group)))
        return list(hands.values())

    return dealt(), dealt()


@settings(max_examples=60, deadline=None)
@given(arrangements(), st.booleans())
def test_any_grouping_in_any_order_round_trips(
    arrangement: tuple[list[list[list[str]]], list[list[list[str]]]], momentum: bool
) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    parameters = dict(model.named_parameters())
    rate = {name: 0.1 + i for i, name in enumerate(NAMES)}

    def optimizers(hands: list[list[list[str]]], fresh: bool) -> list[Optimizer]:
        return [
            SGD(
                [{"params": [parameters[n] for n in g], "lr": 9.0 if fresh else rate[min(g)]} for g in groups],
                momentum=0.9 if momentum else 0.0,
            )
            for groups in hands
        ]

    saved, fresh = (optimizers(hands, fresh) for hands, fresh in zip(arrangement, (False, True), strict=True))
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    for optimizer in saved:
        optimizer.step()
    state = named_state_dict(model, saved)
    load_named_state_dict(model, fresh, through_file(state))
    assert lr_by_name(model, *fresh) == lr_by_name(model, *saved)
    again = named_state_dict(model, fresh)
    assert_same_state(state, again)
    assert bool(again["state"]) is momentum
    assert {frozenset(g["params"]) for g in again["groups"]} == {frozenset(g["params"]) for g in state["groups"]}


# --- torch.distributed.checkpoint, on disk ----------------------------------------------------------------------------


def load_from(folder: Path, model: nn.Module, optimizers: Any) -> Any:
    """The way for any optimizer, fresh or not: the head first, then a template with room for what is in the file."""
    head = {"optim": dict.fromkeys(HEAD)}
    dcp.load(head, checkpoint_id=folder)
    state = {"optim": named_state_dict(model, optimizers, like=head["optim"])}
    dcp.load(state, checkpoint_id=folder)
    load_named_state_dict(model, optimizers, state["optim"])


pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed is (disabled, )?unavailable.*:UserWarning")


@pytest.mark.parametrize("make", STATELESS)
def test_dcp_stateless_with_a_plain_template(make: Any, tmp_path: Path) -> None:
    model = two_layers()
    saved, fresh = swapped(make, model)
    dcp.save({"optim": named_state_dict(model, saved)}, checkpoint_id=tmp_path)
    template = {"optim": named_state_dict(model, fresh)}
    dcp.load(template, checkpoint_id=tmp_path)
    load_named_state_dict(model, fresh, template["optim"])
    assert lr_by_name(model, fresh) == lr_by_name(model, saved)


def mixed(model: nn.Module, first: float, second: float) -> tuple[Optimizer, Optimizer]:
    return AdamW(model[0].parameters(), lr=first), stateless(model[2].parameters(), lr=torch.tensor(second))


def test_dcp_mixed_into_optimizers_that_have_stepped(tmp_path: Path) -> None:
    model = two_layers()
    saved, live = mixed(model, 0.1, 0.5), mixed(model, 1.0, 1.0)
    train(model, *saved, steps=2)
    state = named_state_dict(model, saved)
    dcp.save({"optim": state}, checkpoint_id=tmp_path)
    train(model, *live)
    template = {"optim": named_state_dict(model, reversed(live))}
    dcp.load(template, checkpoint_id=tmp_path)
    load_named_state_dict(model, live, template["optim"])
    assert_same_state(state, named_state_dict(model, live))
    assert lr_by_name(model, *live) == lr_by_name(model, *saved)


@pytest.mark.parametrize("stepped", [False, True])
def test_dcp_mixed_into_any_optimizers(tmp_path: Path, stepped: bool) -> None:
    model = two_layers()
    saved, fresh = mixed(model, 0.1, 0.5), mixed(model, 1.0, 1.0)
    train(model, *saved, steps=2)
    state = named_state_dict(model, saved)
    dcp.save({"optim": state}, checkpoint_id=tmp_path)
    if stepped:
        train(model, *fresh)
    load_from(tmp_path, model, fresh)
    assert_same_state(state, named_state_dict(model, fresh))
    assert lr_by_name(model, *fresh) == lr_by_name(model, *saved)
    train(model, *fresh)


def test_dcp_from_fresh_optimizers_into_stepped_ones(tmp_path: Path) -> None:
    model = two_layers()
    dcp.save({"optim": named_state_dict(model, mixed(model, 0.1, 0.5))}, checkpoint_id=tmp_path)
    live = mixed(model, 1.0, 1.0)
    train(model, *live)
    load_from(tmp_path, model, live)
    assert len(live[0].state) == 0
    assert live[0].param_groups[0]["lr"] == 0.1


def test_dcp_without_room_for_the_state_is_noticed(tmp_path: Path) -> None:
    model = two_layers()
    saved, fresh = mixed(model, 0.1, 0.5), mixed(model, 1.0, 1.0)
    train(model, *saved)
    dcp.save({"optim": named_state_dict(model, saved)}, checkpoint_id=tmp_path)
    template = {"optim": named_state_dict(model, fresh)}
    dcp.load(template, checkpoint_id=tmp_path)
    with pytest.raises(ValueError, match=r"'0.bias.exp_avg'.*had no room for it.*like=head"):
        load_named_state_dict(model, fresh, template["optim"])


def test_dcp_with_settings_and_groups_that_the_file_lacks(tmp_path: Path) -> None:
    model = two_layers()
    state = named_state_dict(model, stateless(model.parameters(), lr=0.1))
    del state["groups"][0]["dead_zone"]
    dcp.save(state, checkpoint_id=tmp_path)
    fresh = stateless([{"params": [], "lr": 0.3}, {"params": model.parameters()}], lr=1.0, dead_zone=1e-4)
    template = named_state_dict(model, fresh)
    dcp.load(template, checkpoint_id=tmp_path)
    load_named_state_dict(model, fresh, template)
    assert [(group["lr"], group["dead_zone"]) for group in fresh.param_groups] == [(0.3, 1e-4), (0.1, 1e-4)]


def test_a_template_refuses_a_file_of_other_groups() -> None:
    model = two_layers()
    head = named_state_dict(model, stateless(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="split or merged"):
        named_state_dict(model, mixed(model, 0.1, 0.5), like=head)


def test_state_that_is_no_tensor_gets_room_too(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer, fresh = SGD(model.parameters(), lr=0.1), SGD(model.parameters(), lr=1.0)
    optimizer.state[model.weight] = {"count": 3, "scale": 0.5}
    dcp.save({"optim": named_state_dict(model, optimizer)}, checkpoint_id=tmp_path)
    load_from(tmp_path, model, fresh)
    assert fresh.state[model.weight] == {"count": 3, "scale": 0.5}


# --- FSDP2 on two processes -------------------------------------------------------------------------------------------


def test_fsdp2_on_two_processes(tmp_path: Path) -> None:
    source = Path(tailopt.__file__).parents[1]
    paths = os.pathsep.join([str(source), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(tmp_path)],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)


def one_rank(folder: Path) -> None:
    """Train sharded, save, load into fresh optimizers in another order, and compare with not having stopped."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    mesh = init_device_mesh("cpu", (size,))

    def sharded(seed: int) -> nn.Sequential:
        model = two_layers(seed)  # 2.bias has one element: rank 1 holds none of it
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        return model

    model = sharded(0)
    saved = mixed(model, 0.1, 0.5)
    train(model, *saved, steps=2)
    state = named_state_dict(model, saved)
    for tensor in (state["state"]["0.weight"], named_state_dict(model, saved, like=state)["state"]["0.weight"]):
        assert isinstance(tensor["exp_avg"], DTensor)
    dcp.save({"model": model.state_dict(), "optim": state}, checkpoint_id=folder / "checkpoint")
    full = copy.deepcopy({**state, "state": {}})
    for name, entry in state["state"].items():
        full["state"][name] = {k: (v.full_tensor() if isinstance(v, DTensor) else v.clone()) for k, v in entry.items()}
    train(model, *saved, steps=2)

    def same_from_here(resumed: nn.Module, optimizers: tuple[Optimizer, ...]) -> None:
        train(resumed, *optimizers, steps=2)
        for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(p.to_local(), q.to_local())  # type: ignore[attr-defined]

    for way in ("sharded files", "full dict of rank 0"):
        resumed = sharded(1)
        weights = {"model": resumed.state_dict()}
        dcp.load(weights, checkpoint_id=folder / "checkpoint")
        resumed.load_state_dict(weights["model"])
        fresh = mixed(resumed, 1.0, 1.0)
        if way == "sharded files":
            load_from(folder / "checkpoint", resumed, fresh[::-1])
        else:
            box = [full if rank == 0 else None]
            torch.distributed.broadcast_object_list(box, src=0)
            load_named_state_dict(resumed, fresh[::-1], box[0])
        assert len(fresh[1].state) == 0
        assert isinstance(fresh[0].state[resumed[0].weight]["exp_avg"], DTensor)
        same_from_here(resumed, fresh)

    wrapped = DistributedDataParallel(two_layers())
    names = [name for name, _ in two_layers().named_parameters()]
    assert named_state_dict(wrapped, stateless(wrapped.parameters(), lr=0.1))["groups"][0]["params"] == names
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    one_rank(Path(sys.argv[1]))
