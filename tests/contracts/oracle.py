"""Every nested algorithm once more, in float64 numpy, written from the formulas and from nothing in the library.

A round: each participant starts from x, takes ``local_steps`` inner steps and hands in the displacement
Δ_i = x_i - x; the guard decides which count; their weighted mean Δ goes through the outer step; then projection and
the iterate average. ``run`` returns all of it. It is slow, keeps everything, and its errors are plain exceptions.
The order of roundings is not the library's: compare in float64, with a tolerance.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
Tensors: TypeAlias = dict[str, Array]
Settings: TypeAlias = Mapping[str, Any]  # the paper's names; a threshold may be {tensor name: number or array}
State: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """What stands beside the settings. ``dead_zone`` and ``scope`` hold for both rules where both have them."""

    inner_betas: tuple[float, float] = (0.9, 0.999)
    outer_betas: tuple[float, float] = (0.9, 0.99)
    bias_correction: bool = False
    dead_zone: float = 0.0
    scope: str = "global"


@dataclass
class Trace:
    """What a run did: x_0 … x_T, and for each round its mean displacement, who counted and with what weight.

    ``counted`` and ``excluded`` are ascending and name a node once, also one drawn twice; ``used_weights`` stands
    beside ``counted`` and sums to 1.
    """

    weights: list[Tensors]
    average: Tensors | None = None
    deltas: list[Tensors] = field(default_factory=list)
    counted: list[list[int]] = field(default_factory=list)
    used_weights: list[list[float]] = field(default_factory=list)
    excluded: list[list[int]] = field(default_factory=list)


class NothingCounted(RuntimeError):
    """No displacement of a round counted; ``trace`` is the run up to the round before."""

    def __init__(self, round: int, trace: Trace) -> None:
        super().__init__(f"no displacement of round {round} counted")
        self.trace = trace


# --- Operators ------------------------------------------------------------------------------------------------------


def biclip(x: Any, u: Any, d: Any, dead_zone: float = 0.0) -> Array:
    """sign(x)·clamp(|x|, d, u) for each coordinate; of these rows the first that fits holds.

    Examples:
        >>> biclip([-3.0, -1.0, -0.1, 0.0, 0.1], u=2.0, d=0.5).tolist()
        [-2.0, -1.0, -0.5, 0.0, 0.5]
    """
    x = np.asarray(x, dtype=np.float64)
    size = np.abs(x)
    rows = [np.isnan(x), size <= dead_zone, size <= d, size < u]
    values = [x, np.zeros_like(x), np.copysign(d, x), x]
    return np.asarray(np.select(rows, values, default=np.copysign(u, x)))


def norm(arrays: Iterable[Array]) -> float:
    """‖·‖₂ over all of them together, safe from overflow and underflow of the squares."""
    arrays = list(arrays)
    top = max((float(np.max(np.abs(a), initial=0.0)) for a in arrays), default=0.0)
    if any(np.isnan(a).any() for a in arrays):
        return math.nan
    if top == 0.0 or math.isinf(top):
        return top
    return top * math.sqrt(math.fsum(float(np.sum((a / top) ** 2)) for a in arrays))


def scopes(names: Iterable[str], scope: str) -> list[tuple[str, ...]]:
    """The sets of tensors that share a norm: all in one (``global``), or each alone (``tensor``)."""
    if scope not in ("global", "tensor"):
        raise ValueError(f"Invalid scope: got {scope!r}; need 'global' or 'tensor'.")
    return [tuple(names)] if scope == "global" else [(name,) for name in names]


def biclip_l2(x: Tensors, u: float, d: float, scope: str = "global") -> Tensors:
    """x scaled so that its norm over the scope is at least d and at most u; 0 stays 0, non-finite becomes NaN.

    Examples:
        >>> biclip_l2({"w": np.array([3.0, 4.0])}, u=1.0, d=0.0)["w"].tolist()
        [0.6, 0.8]
    """
    result: Tensors = {}
    for names in scopes(x, scope):
        top = max((float(np.max(np.abs(x[k]), initial=0.0)) for k in names), default=0.0)
        finite = all(np.isfinite(x[k]).all() for k in names)
        for k in names:
            if not finite:
                result[k] = np.full_like(x[k], np.nan)
            elif top == 0.0:
                result[k] = np.zeros_like(x[k])
            else:
                shape = norm(x[j] / top for j in names)  # between 1 and √size: n = top·shape may overflow, x/n not
                n = top * shape if top * shape < math.inf else np.finfo(np.float64).max
                target = d if n <= d else u if n >= u else None
                result[k] = x[k].copy() if target is None else x[k] / top / shape * target
    return result


# --- Inner steps: (x, gradient, state, settings, options) -> x -------------------------------------------------------

Step: TypeAlias = Callable[[Tensors, Tensors, State, Settings, Options], Tensors]
Clip: TypeAlias = Callable[[Tensors, Settings, Options], Tensors]


def of(value: Any, name: str) -> Any:
    """A threshold for one tensor."""
    return value[name] if isinstance(value, Mapping) else value


def biclip_gradient(g: Tensors, s: Settings, o: Options) -> Tensors:
    return {k: biclip(g[k], of(s["i_u"], k), of(s["i_d"], k), o.dead_zone) for k in g}


def descent(clip: Clip) -> Step:
    """x·(1 - ilr·weight_decay) - ilr·clip(g)."""

    def step(x: Tensors, g: Tensors, state: State, s: Settings, o: Options) -> Tensors:
        keep = 1.0 - s["ilr"] * s.get("weight_decay", 0.0)
        move = clip(g, s, o)
        return {k: x[k] * keep - s["ilr"] * move[k] for k in x}

    return step


def adagrad(x: Tensors, g: Tensors, state: State, s: Settings, o: Options) -> Tensors:
    """As torch's: the accumulator starts at 0, weight decay is added to the gradient."""
    g = {k: g[k] + s.get("weight_decay", 0.0) * x[k] for k in x}
    state["v"] = {k: g[k] ** 2 + state["v"][k] if "v" in state else g[k] ** 2 for k in x}
    return {k: x[k] - s["ilr"] * g[k] / (np.sqrt(state["v"][k]) + s["ieps"]) for k in x}


def adam(decoupled: bool, clip: Clip | None = None) -> Step:
    """As torch's Adam (decay added to the gradient) and AdamW (decay decoupled, 0.01 unless told)."""

    def step(x: Tensors, g: Tensors, state: State, s: Settings, o: Options) -> Tensors:
        beta1, beta2 = o.inner_betas
        decay = weight_decay_of("adamw" if decoupled else "adam", s)
        g = g if clip is None else clip(g, s, o)
        if decoupled:
            x = {k: x[k] * (1.0 - s["ilr"] * decay) for k in x}
        else:
            g = {k: g[k] + decay * x[k] for k in x}
        zeros = {k: np.zeros_like(x[k]) for k in x}
        state["n"] = n = state.get("n", 0) + 1
        state["m"] = m = {k: beta1 * state.get("m", zeros)[k] + (1 - beta1) * g[k] for k in x}
        state["v"] = v = {k: beta2 * state.get("v", zeros)[k] + (1 - beta2) * g[k] ** 2 for k in x}
        part1, part2 = 1 - beta1**n, 1.0 if state.get("raw") else 1 - beta2**n
        return {k: x[k] - s["ilr"] * (m[k] / part1) / (np.sqrt(v[k] / part2) + s["ieps"]) for k in x}

    return step


INNERS: dict[str, Step] = {
    "sgd": descent(lambda g, s, o: g),
    "l2clip": descent(lambda g, s, o: biclip_l2(g, s["i_u"], 0.0, o.scope)),
    "biclip": descent(biclip_gradient),
    "biclip-l2": descent(lambda g, s, o: biclip_l2(g, s["i_u"], s["i_d"], o.scope)),
    "adagrad": adagrad,
    "adam": adam(decoupled=False),
    "adamw": adam(decoupled=True),
    "sign": descent(lambda g, s, o: {k: np.sign(g[k]) for k in g}),
    "biclip+adam": adam(decoupled=False, clip=biclip_gradient),
    "biclip+adamw": adam(decoupled=True, clip=biclip_gradient),
}


def first_state(outer: str, inner: str, send: bool | str, outer_state: State, round: int) -> State:
    """Inner state made anew; for adam-adam with the outer second moment in it, if it is sent."""
    if (outer, inner) != ("adam", "adam") or not send:
        return {}
    sent = {"v": dict(outer_state["v"])} if "v" in outer_state else {}
    return {**sent, "n": 0, "raw": True} if send == "raw" else {**sent, "n": round - 1}


# --- Outer steps: (x, mean displacement, state, settings, options) -> x ----------------------------------------------


def add(x: Tensors, delta: Tensors, state: State, s: Settings, o: Options) -> Tensors:
    return {k: x[k] + delta[k] for k in x}


def momentum(nesterov: bool) -> Step:
    """v = momentum·v + Δ; x + olr·v, or with nesterov x + olr·(Δ + momentum·v)."""

    def step(x: Tensors, delta: Tensors, state: State, s: Settings, o: Options) -> Tensors:
        mu = s["momentum"] if nesterov else s.get("momentum", 0.0)
        state["v"] = v = {k: delta[k] + (mu * state["v"][k] if "v" in state else 0.0) for k in x}
        return {k: x[k] + s["olr"] * (delta[k] + mu * v[k] if nesterov else v[k]) for k in x}

    return step


def clipped(x: Tensors, delta: Tensors, state: State, s: Settings, o: Options) -> Tensors:
    return {k: x[k] + s["olr"] * biclip(delta[k], of(s["o_u"], k), of(s["o_d"], k), o.dead_zone) for k in x}


def clipped_l2(x: Tensors, delta: Tensors, state: State, s: Settings, o: Options) -> Tensors:
    move = biclip_l2(delta, s["o_u"], s["o_d"], o.scope)
    return {k: x[k] + s["olr"] * move[k] for k in x}


def adaptive(kind: str) -> Step:
    """x + olr·(Δ or its mean)/(√v + oeps), where v sums (adagrad), averages or follows (yogi) the squares; 0/0 is 0."""

    def step(x: Tensors, delta: Tensors, state: State, s: Settings, o: Options) -> Tensors:
        beta1, beta2 = o.outer_betas
        zeros = {k: np.zeros_like(x[k]) for k in x}
        state["n"] = n = state.get("n", 0) + 1
        old, new = (1.0, 1.0) if kind == "adagrad" else (beta2, 1 - beta2)
        state["v"] = v = {k: old * state.get("v", zeros)[k] + new * delta[k] ** 2 for k in x}
        top = delta
        if kind == "yogi":
            past = state.get("last", zeros)
            state["last"] = v = {k: past[k] - new * delta[k] ** 2 * np.sign(past[k] - delta[k] ** 2) for k in x}
        if kind in ("adam", "yogi"):
            state["m"] = top = {k: beta1 * state.get("m", zeros)[k] + (1 - beta1) * delta[k] for k in x}
            if o.bias_correction:
                top, v = {k: top[k] / (1 - beta1**n) for k in x}, {k: v[k] / (1 - beta2**n) for k in x}
        below = {k: np.sqrt(v[k]) + s["oeps"] for k in x}
        return {k: x[k] + s["olr"] * np.where((top[k] == 0) & (below[k] == 0), 0.0, top[k] / below[k]) for k in x}

    return step


OUTERS: dict[str, Step] = {
    "avg": add,
    "sgd": momentum(nesterov=False),
    "nesterov": momentum(nesterov=True),
    "biclip": clipped,
    "biclip-l2": clipped_l2,
    "adagrad": adaptive("adagrad"),
    "rmsprop": adaptive("rmsprop"),
    "adam": adaptive("adam"),
    "yogi": adaptive("yogi"),
}

# name: (outer, inner, settings); diloco keeps its inner state.
ALGORITHMS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "avg-sgd": ("avg", "sgd", ("ilr",)),
    "avg-sign": ("avg", "sign", ("ilr",)),
    "avg-l2clip": ("avg", "l2clip", ("ilr", "i_u")),
    "avg-biclip-l2": ("avg", "biclip-l2", ("ilr", "i_u", "i_d")),
    "avg-biclip": ("avg", "biclip", ("ilr", "i_u", "i_d")),
    "avg-adagrad": ("avg", "adagrad", ("ilr", "ieps")),
    "avg-adam": ("avg", "adam", ("ilr", "ieps")),
    "adagrad-sgd": ("adagrad", "sgd", ("ilr", "olr", "oeps")),
    "rmsprop-sgd": ("rmsprop", "sgd", ("ilr", "olr", "oeps")),
    "adam-sgd": ("adam", "sgd", ("ilr", "olr", "oeps")),
    "adam-l2clip": ("adam", "l2clip", ("ilr", "olr", "oeps", "i_u")),
    "adagrad-biclip": ("adagrad", "biclip", ("ilr", "olr", "oeps", "i_u", "i_d")),
    "rmsprop-biclip": ("rmsprop", "biclip", ("ilr", "olr", "oeps", "i_u", "i_d")),
    "adam-biclip": ("adam", "biclip", ("ilr", "olr", "oeps", "i_u", "i_d")),
    "adam-biclip-l2": ("adam", "biclip-l2", ("ilr", "olr", "oeps", "i_u", "i_d")),
    "adam2": ("adam", "adam", ("ilr", "olr", "ieps", "oeps")),
    "bi2clip": ("biclip", "biclip", ("ilr", "olr", "i_u", "i_d", "o_u", "o_d")),
    "bi2clip-l2": ("biclip-l2", "biclip-l2", ("ilr", "olr", "i_u", "i_d", "o_u", "o_d")),
    "diloco": ("nesterov", "adamw", ("ilr", "olr", "ieps", "momentum", "weight_decay")),
}


# --- The guard ------------------------------------------------------------------------------------------------------


@dataclass
class Bounds:
    """How far an honest node can get in a round, slack included: by coordinate, or in norm; empty where unbounded."""

    coordinate: Tensors = field(default_factory=dict)
    norm: dict[tuple[str, ...], float] = field(default_factory=dict)

    def hold(self, delta: Tensors) -> bool:
        """Whether a displacement is finite and within them."""
        return (
            all(bool(np.isfinite(delta[k]).all()) for k in delta)
            and all(bool((np.abs(delta[k]) <= bound).all()) for k, bound in self.coordinate.items())
            and all(norm(delta[k] for k in names) <= bound for names, bound in self.norm.items())
        )


def weight_decay_of(inner: str, s: Settings) -> float:
    return float(s.get("weight_decay", 0.01 if inner.endswith("adamw") else 0.0))


def adam_factor(betas: tuple[float, float], raw: bool = False) -> float:
    """How many ilr one step of Adam can move a coordinate, by Cauchy-Schwarz; inf where there is no such number.

    Examples:
        >>> round(adam_factor((0.9, 0.999)), 2)
        7.27
    """
    beta1, beta2 = betas
    if beta1**2 >= beta2:
        return math.inf
    slope = (1 - beta1) / math.sqrt(1 - beta1**2 / beta2)
    return (max(1.0, slope) if raw else slope) / math.sqrt(1 - beta2)


def reach(step: Any, decay: float, size: Any, local_steps: int) -> Any:
    """b after ``local_steps`` of b ← (1-ilr·λ)·b + step + ilr·λ·|x|, with decay = ilr·λ and size = |x|."""
    b: Any = 0.0
    for _ in range(local_steps):
        b = abs(1.0 - decay) * b + step + decay * size
    return b


def bounds(inner: str, s: Settings, x: Tensors, local_steps: int, options: Options, raw: bool = False) -> Bounds:
    """The bounds of a round that starts from x, with 0.1 % and ``local_steps`` + 2 ulps of slack."""
    family = inner.removeprefix("biclip+")
    # Coupled decay is part of the gradient that adagrad and adam normalise: it moves nothing further.
    decay = 0.0 if family in ("adagrad", "adam") else s["ilr"] * weight_decay_of(family, s)
    if family == "sgd":
        return Bounds()
    if family in ("l2clip", "biclip-l2"):
        result: dict[tuple[str, ...], float] = {}
        for names in scopes(x, options.scope):
            b = reach(s["ilr"] * s["i_u"], decay, norm(x[k] for k in names), local_steps)
            if math.isfinite(b):
                ulps = norm(np.spacing(np.maximum(np.abs(x[k]), b)) for k in names)
                result[names] = 1.001 * b + (local_steps + 2) * ulps
        return Bounds(norm=result)
    limit: Tensors = {}
    for k in x:
        if family == "biclip":
            most = of(s["i_u"], k)
        else:
            most = {"sign": 1.0, "adagrad": 1.0}.get(family, adam_factor(options.inner_betas, raw))
        b = np.broadcast_to(reach(s["ilr"] * most, decay, np.abs(x[k]), local_steps), x[k].shape)
        full = 1.001 * b + (local_steps + 2) * np.spacing(np.maximum(np.abs(x[k]), b))
        limit[k] = np.where(np.isfinite(b), full, np.inf)
    return Bounds(coordinate=limit)


# --- The run --------------------------------------------------------------------------------------------------------

Gradient: TypeAlias = Callable[[int, int, int, Tensors], Tensors]  # (node, round from 1, step from 0, x)


def run(
    outer: str,
    inner: str,
    settings: Settings,
    start: Mapping[str, Any],
    gradient: Gradient,
    nodes: int,
    rounds: int,
    local_steps: int,
    weights: Sequence[float] | None = None,
    participants: Callable[[int], Sequence[int]] | None = None,
    inner_state: str = "reset",
    send_preconditioner: bool | str = True,
    bias_correction: bool = False,
    inner_betas: tuple[float, float] = (0.9, 0.999),
    outer_betas: tuple[float, float] = (0.9, 0.99),
    dead_zone: float = 0.0,
    scope: str = "global",
    projection: float | None = None,
    average: bool = False,
    schedules: Mapping[str, Callable[[int], Any]] | None = None,
    guard: bool = True,
    proximal: float = 0.0,
) -> Trace:
    """T rounds from ``start``; a scheduled setting has the value that its function gives for the round."""
    if (outer, inner, inner_state) == ("adam", "adam", "keep") and send_preconditioner:
        raise ValueError("Invalid inner_state: a node cannot keep its second moment and be sent one.")
    o = Options(inner_betas, outer_betas, bias_correction, dead_zone, scope)
    x: Tensors = {k: np.array(v, dtype=np.float64) for k, v in start.items()}
    trace = Trace([x])
    outer_state: State = {}
    kept: dict[int, State] = {}
    with np.errstate(all="ignore"):
        for t in range(1, rounds + 1):
            s = {**settings, **{k: f(t) for k, f in (schedules or {}).items()}}
            share = shares(range(nodes) if participants is None else participants(t), weights, nodes)
            accepted: dict[int, Tensors] = {}
            for i in share:
                anew = first_state(outer, inner, send_preconditioner, outer_state, t)
                state = copy.deepcopy(kept.get(i, anew)) if inner_state == "keep" else anew
                limit = bounds(inner, s, x, local_steps, o, raw=bool(anew.get("raw")))
                y = x
                for step in range(local_steps):
                    g = gradient(i, t, step, copy.deepcopy(y))
                    g = {k: g[k] + proximal * (y[k] - x[k]) for k in x}
                    y = INNERS[inner](y, g, state, s, o)
                delta_i = {k: y[k] - x[k] for k in x}
                if not guard or limit.hold(delta_i):
                    accepted[i], kept[i] = delta_i, state  # the state of an excluded node is as it was
            counting = sum(share[i] for i in accepted)
            if counting <= 0.0:
                raise NothingCounted(t, trace)
            used = {i: share[i] / counting for i in accepted}
            delta = {k: np.asarray(sum(used[i] * accepted[i][k] for i in used)) for k in x}
            x = project(OUTERS[outer](x, delta, outer_state, s, o), projection)
            trace.weights.append(x)
            trace.deltas.append(delta)
            trace.counted.append(list(used))
            trace.used_weights.append(list(used.values()))
            trace.excluded.append([i for i in share if i not in accepted])
    trace.average = iterate_average(trace.weights) if average else None
    return trace


def run_algorithm(
    name: str, settings: Settings, start: Mapping[str, Any], gradient: Gradient, *args: Any, **options: Any
) -> Trace:
    """``run`` for a name of ``ALGORITHMS``, with its defaults and the settings of its row, all required."""
    outer, inner, needed = ALGORITHMS[name]
    if missing := [k for k in needed if k not in settings]:
        raise ValueError(f"Invalid settings: {name} needs {', '.join(missing)}.")
    options.setdefault("inner_state", "keep" if name == "diloco" else "reset")
    return run(outer, inner, settings, start, gradient, *args, **options)


def shares(drawn: Iterable[int], weights: Sequence[float] | None, nodes: int) -> dict[int, float]:
    """Each participant's part of the whole, in node order; one drawn twice has twice its weight."""
    w = np.ones(nodes) if weights is None else np.asarray(weights, dtype=np.float64)
    if w.shape != (nodes,) or not np.isfinite(w).all() or (w < 0).any():
        raise ValueError(f"Invalid weights: got {weights}; need {nodes} finite numbers >= 0.")
    times = Counter(drawn)
    total = sum(w[i] * times[i] for i in times)
    if total <= 0.0:
        raise ValueError(f"Invalid weights: those of the participants {sorted(times)} add up to 0.")
    return {i: float(w[i] * times[i] / total) for i in sorted(times)}


def project(x: Tensors, radius: float | None) -> Tensors:
    """x·min(1, radius/‖x‖₂), one norm over everything."""
    n = norm(x.values())
    return x if radius is None or n <= radius else {k: x[k] * (radius / n) for k in x}


def iterate_average(weights: Sequence[Tensors]) -> Tensors:
    """Σ r·x_r / Σ r over r = 1 … R; x_0 is not in it."""
    total = sum(range(len(weights)))
    return {k: np.asarray(sum(r * x[k] for r, x in enumerate(weights)) / total) for k in weights[0]}
