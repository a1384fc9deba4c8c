"""Statistics for thresholds that are "auto": exact sums, however a displacement is cut and wherever a round stopped."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tailopt.rounds.auto_thresholds import AutoThresholds, AutoThresholdsByLevel, checked_state
from tailopt.rounds.block_norm import BLOCK, sum_of_squares
from tailopt.rounds.gradient_statistics import (
    GradientRecorder,
    Kind,
    clipped_by_step,
    counters_of_parts,
    counts_of_displacement,
    over_ranks,
    statistics_of_displacement,
    unpacked,
)

KINDS: tuple[Kind, ...] = ("elements", "norm", "tensor norms")
SIZES = (7, 70_000)  # the second is sampled in gradients


def gradients(seed: int) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=source) for n in SIZES]


@given(st.lists(st.integers(0, 2 * BLOCK), max_size=3), st.sampled_from([torch.float32, torch.float64]))
def test_a_displacement_has_the_same_counts_however_it_is_cut(cuts: list[int], dtype: torch.dtype) -> None:
    x = torch.randn(2 * BLOCK + 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[3] = 0
    whole = statistics_of_displacement([x[:3], x], "elements")
    places = [0, *sorted(cuts), x.numel()]
    parts = [counters_of_parts([x[a:b]], [1], 2) for a, b in zip(places, places[1:], strict=False)]
    packed = torch.stack([counters_of_parts([x[:3]], [0], 2), *parts])
    assert counts_of_displacement(packed, [sum_of_squares(x[:3]), sum_of_squares(x)]) == whole
    assert whole[1].elements == x.numel() and sum(whole[1].octaves) == x.numel()


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_that_was_stopped_has_the_same_statistics(kind: Kind) -> None:
    whole = GradientRecorder(kind, 2)
    parts = [GradientRecorder(kind, 2), GradientRecorder(kind, 2)]
    for step in range(6):
        if step == 3:
            parts[1].load(parts[0].packed())
        for recorder in (whole, parts[step // 3]):
            moving = [0, 1] if step % 2 else [1]
            recorder.add(moving, [gradients(step)[i] for i in moving], 10 + step)
    assert parts[1].statistics() == whole.statistics()
    if kind != "elements":  # real nodes send as many rows, and the others stand for no step
        assert whole.packed(9).shape[0] == 9
        assert unpacked(whole.packed(9), kind) == whole.statistics()
    assert unpacked(GradientRecorder(kind, 2).packed(4), kind)[0].elements == 0


def test_ranks_of_a_node_add_up_what_they_share() -> None:
    small, large = gradients(0)
    whole = GradientRecorder("elements", 2)
    whole.add([0, 1], [small, large[:60_000]], 0)
    ranks = [GradientRecorder("elements", 2) for _ in range(2)]
    for recorder, part in zip(ranks, large[:60_000].chunk(2), strict=True):
        recorder.add([0, 1], [small, part], 0)
    packed = torch.stack([recorder.packed() for recorder in ranks])
    first, second = unpacked(over_ranks(packed, "elements", [1]), "elements")
    expected = whole.statistics()
    assert first == expected[0]
    assert (second.elements, second.octaves, second.largest) == (60_000, expected[1].octaves, expected[1].largest)  # type: ignore[union-attr]
    assert second.squares == pytest.approx(expected[1].squares, rel=1e-12)  # type: ignore[union-attr]


def test_with_momentum_the_mean_is_what_a_step_clips() -> None:
    states = [{"momentum_buffer": torch.tensor([0.19]), "step": 2}]
    torch.testing.assert_close(clipped_by_step([torch.tensor([9.0])], states, 0.9), [torch.tensor([1.0])])
    assert clipped_by_step([torch.tensor([9.0])], states, 0.0) == [torch.tensor([9.0])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rounds", [1, 4])
def test_a_state_comes_back_through_json(kind: Kind, rounds: int) -> None:
    def new() -> AutoThresholdsByLevel:
        return AutoThresholdsByLevel(inner=AutoThresholds("inner", kind, momentum=0.5))

    def observe(thresholds: AutoThresholdsByLevel, t: int) -> None:
        assert thresholds.inner is not None
        recorder = thresholds.inner.recorder(2)
        for step in range(20):
            recorder.add([0, 1], [g[:99] * (t + 1) for g in gradients(step)], step)
        thresholds.inner.update_from([recorder.statistics()], gradients=20, steps=20)

    first, second = new(), new()
    for t in range(rounds):
        observe(first, t)
    second.load_state(checked_state(json.loads(json.dumps(first.state()))))
    assert first.inner is not None and first.inner.is_calibrating == (rounds == 1)
    for t in range(rounds, rounds + 3):
        assert second.state_bytes() == first.state_bytes() and second.history_entry() == first.history_entry()
        observe(first, t)
        observe(second, t)
    assert second.history_entry() == first.history_entry() != new().history_entry()
    with pytest.raises(ValueError, match=r"it has automatic thresholds of \['inner'\], and the algorithm of \[\]"):
        AutoThresholdsByLevel().load_state(first.state())
