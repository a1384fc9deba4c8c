"""Claims of the paper that more than one study judges, or that compare whole algorithms: one text and one test each.

All take scores by algorithm and seed, higher is better (`protocol`). Where errors or perplexities are compared, a score
is minus their logarithm, and a margin is that of a ratio.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from tailopt.algorithms import rule_names
from tailopt.studies.protocol import Scores, all_hold, difference, exceeds, places

TEXTS = {
    1: "Without noise avg-sgd does well; with heavier tails it deteriorates, clipping and adaptivity help.",
    2: "BiClip as inner optimizer beats Adam, L2Clip and SGD under heavy-tailed noise.",
    3: "Coordinate-wise BiClip is always above L2 clipping.",
    4: "On Gaussian features avg-adam, avg-sgd and rmsprop-biclip lead without noise; with noise rmsprop- and "
    "adam-biclip lead, and avg-sgd is among the worst.",
    5: "On SynToken avg-sgd is fastest without noise and avg-adam ends better; with noise adam- and rmsprop-biclip are "
    "best.",
    6: "Under noise an adaptive outer optimizer over SGD is poor: the inner one decides.",
    7: "SGD inside stays behind; the best averages need adaptivity or BiClip inside.",
    8: "bi2clip has the best average, above diloco, rmsprop-biclip and adam2.",
    9: "bi2clip is above adam2, avg-l2clip and avg-sgd; differences are small.",
    10: "Where nodes differ, avg-biclip is best, and adaptivity at both levels is worse.",
    11: "On one node BiClip reaches Adam's accuracy and speed, without state.",
}
# coordinate-wise and L2 clipping with the same outer optimizer
CLIPPING_PAIRS = (
    ("avg-biclip", "avg-l2clip"),
    ("avg-biclip", "avg-biclip-l2"),
    ("adam-biclip", "adam-l2clip"),
    ("adam-biclip", "adam-biclip-l2"),
    ("bi2clip", "bi2clip-l2"),
)
ADAPTIVE_OR_BICLIP = ("adam", "adamw", "adagrad", "biclip")


def beats_all(scores: Scores, name: str, others: Iterable[str], by: float = 0.0) -> bool | None:
    """Whether an algorithm is above each of the others by more than a margin; None if one of them was not run."""
    rivals = list(others)
    if not {name, *rivals} <= scores.keys():
        return None
    return all_hold(exceeds(scores[name], scores[rival], by, len(rivals)) for rival in rivals)


def coordinates_beat_norms(panels: Sequence[Scores]) -> bool | None:
    """Claim 3: in every panel, BiClip is above L2 clipping with the same outer optimizer, as far as both were run."""
    compared = [
        (panel[ours], panel[theirs])
        for panel in panels
        for ours, theirs in CLIPPING_PAIRS
        if {ours, theirs} <= panel.keys()
    ]
    return all_hold(exceeds(ours, theirs, comparisons=len(compared)) for ours, theirs in compared)


def best_needs_more_than_sgd(scores: Scores) -> bool | None:
    """Claim 7: the best algorithm with adaptivity or BiClip inside is above the best one with SGD inside."""
    with_sgd = best_of(scores, [name for name in scores if rule_names(name)[1] == "sgd"])
    other = best_of(scores, [name for name in scores if rule_names(name)[1] in ADAPTIVE_OR_BICLIP])
    return None if with_sgd is None or other is None else exceeds(scores[other], scores[with_sgd])


def best_of(scores: Scores, names: Iterable[str]) -> str | None:
    """The algorithm with the highest mean, of those that did not break down with any seed; None if there is none."""
    whole = [name for name in names if all(map(math.isfinite, scores[name]))]
    return max(whole, key=lambda name: statistics.fmean(scores[name]), default=None)


def leads(scores: Scores, name: str, first: int) -> bool | None:
    """Whether an algorithm is among the `first`: surely, surely not, or None."""
    found = places(scores, name)
    if found is None:
        return None
    best, worst = found
    return True if worst <= first else False if best > first else None


def trails(scores: Scores, name: str, last: int) -> bool | None:
    """Whether an algorithm is among the `last`: surely, surely not, or None."""
    before = leads(scores, name, len(scores) - last)
    return None if before is None else not before


def margins_text(scores: Scores, pairs: Iterable[tuple[str, str]], ratio: bool = False) -> str:
    """The differences of some pairs with their intervals, as a report has them; as ratios of errors if `ratio`.

    Examples:
        >>> seeds = [0.0, 0.1, 0.2, 0.1, 0.0]
        >>> margins_text({"a": [s + 1 for s in seeds], "b": seeds}, [("a", "b")])
        'a less b: +1 (+1 to +1)'
    """
    found = []
    for ours, theirs in pairs:
        gap = difference(scores[ours], scores[theirs]) if {ours, theirs} <= scores.keys() else None
        if gap is None:
            continue
        if ratio:
            middle, low, high = (math.exp(-number) for number in (gap.mean, gap.high, gap.low))
            found.append(f"error of {ours} over that of {theirs}: {middle:.3g} ({low:.3g} to {high:.3g})")
        else:
            found.append(f"{ours} less {theirs}: {gap.text()}")
    return ", ".join(found)
