"""A loop of the user's own that resumes: what it forgot to restore is warned about, and nothing else is."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tailopt
from tailopt.distributed.resume_checks import FirstInputs
from tests.distributed import forked

pytest.importorskip("resource", reason="processes are forked")

HERE = "tests.distributed.test_resume_checks"
STEPS = 3


def loop(
    rank: int,
    run: str,
    rounds: int,
    restores_rate: bool = True,
    restores_data: bool = True,
    built: str = "before",
    decay: float = 0.7,
    same_data: bool = False,
    participants: int | None = None,
) -> list[str]:
    """A loop with a scheduler and a position in its data, which it may forget to restore."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    inner = tailopt.BiClip(net.parameters(), lr=0.1, u=1.0, d=0.01)
    place: dict[str, Any] = {"position": 0, "scheduler": {}}

    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: decay**step)

    scheduler = schedule(inner) if built == "before" else None

    def extra() -> dict[str, Any]:
        return {**place, "scheduler": scheduler.state_dict() if scheduler is not None else {}}

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        partial = {} if participants is None else {"participants": participants, "rounds": rounds}
        opt = tailopt.NestedOptimizer(
            inner, local_steps=STEPS, model=net, timeout=10.0, run=run, resume=True, extra=extra, **partial
        )
        scheduler = scheduler or schedule(opt)
        if opt.resumed is not None:
            if restores_data:  # the checkpoint was written inside the step that ended the round
                place["position"] = opt.resumed.extra["position"] + 1
            if restores_rate:
                scheduler.load_state_dict(opt.resumed.extra["scheduler"])
                scheduler.step()
        while opt.node.round < rounds:
            seed = 0 if same_data else place["position"]
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * seed + rank))
            opt.zero_grad()
            (net(x).squeeze(-1) - x.sum(1)).square().mean().backward()
            opt.step()
            scheduler.step()
            place["position"] += 1
    return [str(w.message) for w in caught if "Detected call" not in str(w.message)]


def resumed(server: forked.Server, folder: Path, **settings: Any) -> list[str]:
    """What a loop that ended after three rounds warns about when it resumes; the same on both nodes."""
    built = {key: settings[key] for key in ("built", "decay", "same_data") if key in settings}
    begun = server.run(f"{HERE}:loop", 2, run=str(folder / "run"), rounds=3, **built)
    assert [(end.status, end.value) for end in begun] == [(0, [])] * 2, [(end.value, end.said) for end in begun]
    ends = server.run(f"{HERE}:loop", 2, run=str(folder / "run"), rounds=5, **settings)
    assert [end.status for end in ends] == [0, 0], [end.said for end in ends]
    assert ends[0].value == ends[1].value
    return list(ends[0].value)


@pytest.mark.parametrize("built", ["before", "after"])
def test_a_scheduler_that_was_not_restored_is_warned_about(server: forked.Server, tmp_path: Path, built: str) -> None:
    (said,) = resumed(server, tmp_path, restores_rate=False, built=built)
    assert "The learning rate of group 0 is 0." in said and "Was the scheduler restored?" in said


@pytest.mark.parametrize("decay", [0.5, 1.1], ids=["halves", "grows"])
def test_a_loop_that_restores_everything_is_not_warned_about(
    server: forked.Server, tmp_path: Path, decay: float
) -> None:
    assert resumed(server, tmp_path, decay=decay) == []


def test_data_that_start_again_are_warned_about(server: forked.Server, tmp_path: Path) -> None:
    (said,) = resumed(server, tmp_path, restores_data=False)
    assert said.startswith("The data start again: the first inputs after the resume (round 4) are those of the first")


def test_data_that_are_always_the_same_are_not(server: forked.Server, tmp_path: Path) -> None:
    assert resumed(server, tmp_path, restores_data=False, same_data=True) == []


def test_a_node_that_sits_out_the_first_round_after_the_resume_is_warned_in_its_own(
    server: forked.Server, tmp_path: Path
) -> None:
    """It has seen no batch then. Node 0 takes part in rounds 1, 2, 4 and 8, node 1 in the others."""
    settings = {"run": str(tmp_path / "run"), "participants": 1}
    begun = server.run(f"{HERE}:loop", 2, rounds=6, **settings)
    assert [(end.status, end.value) for end in begun] == [(0, [])] * 2, [end.said for end in begun]
    ends = server.run(f"{HERE}:loop", 2, rounds=9, restores_data=False, **settings)
    assert [end.status for end in ends] == [0, 0], [end.said for end in ends]
    for end, t in zip(ends, (8, 7), strict=True):
        (said,) = end.value
        assert said.startswith(f"The data start again: the first inputs after the resume (round {t}) are those of")


# ---- what is looked at ----


def watched(first: list[int], resumed: bool) -> tuple[nn.Module, FirstInputs]:
    net = nn.Linear(3, 2)
    return net, FirstInputs(net, first, resumed)


def test_the_hook_looks_once_a_round_and_goes_after_two() -> None:
    net, inputs = watched([], False)
    for t in (1, 2):
        inputs.begin()
        with torch.no_grad():
            net(torch.zeros(4, 3))  # an evaluation does not count
        net(torch.full((4, 3), float(t)))
        net(torch.zeros(4, 3))  # gradients may be accumulated over several
        inputs.end(t)
    assert len(set(inputs.first)) == 2 and not net._forward_pre_hooks


def test_rounds_of_other_nodes_are_passed_over() -> None:
    """Nothing is seen in them, and the first batch after the resume is still to come."""
    net, inputs = watched([], False)
    for t in (1, 2):
        inputs.begin()
        net(torch.full((4, 3), float(t)))
        inputs.end(t)
    again, inputs = watched(inputs.first, True)
    inputs.end(3)
    inputs.begin()
    again(torch.full((4, 3), 1.0))
    with pytest.warns(UserWarning, match=r"the first inputs after the resume \(round 4\) are those of the first"):
        inputs.end(4)
    assert not again._forward_pre_hooks


def test_a_round_whose_inputs_cannot_be_read_is_the_first_after_the_resume() -> None:
    """A later batch may be that of the first round by right, where the data repeat."""
    net, inputs = watched([1, 2], True)
    inputs.begin()
    inputs.end(3)
    assert not net._forward_pre_hooks


def test_equal_inputs_have_equal_digests_and_order_counts() -> None:
    digests = []
    for x in (torch.arange(6.0), torch.arange(6.0), torch.arange(6.0).flip(0)):
        net, inputs = watched([], False)
        inputs.begin()
        net(x.view(2, 3))
        inputs.end(1)
        digests.append(inputs.first[0])
    assert digests[0] == digests[1] != digests[2]


def test_a_compiled_model_runs_with_the_hook() -> None:
    net, inputs = watched([], False)
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    inputs.begin()
    compiled(torch.ones(4, 3)).sum().backward()
    inputs.end(1)
    assert inputs.first == []  # nothing is read while it is traced


def test_inputs_that_have_no_bytes_are_passed_over() -> None:
    class Sparse(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to_dense()

    net = Sparse()
    inputs = FirstInputs(net)
    inputs.begin()
    net(torch.eye(3).to_sparse())
    inputs.end(1)
    assert inputs.first == []
