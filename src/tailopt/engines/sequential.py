"""Nodes one after another on one model: the memory of one node, however many there are.

A node starts from the synchronised weights, takes its local steps, and what it moved becomes the displacement, in the
very memory of the model. Kept inner states wait in host memory.

Before every local step torch's global generator is seeded by (seed, round, node, step), and Python's and numpy's before
every node's round, so that dropout and augmentations do not depend on what ran before.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tailopt.algorithms import Algorithm
from tailopt.clipping.counts import Counts, Watch, is_flat, tally
from tailopt.clipping.operators import arithmetic
from tailopt.engines.batches import LossFunction, Source, batch_digest, to_device
from tailopt.rounds.guard import Bound
from tailopt.rounds.participants import Participants
from tailopt.rounds.round import Contribution, Own, Report, Synchronised
from tailopt.rounds.settings import Settings
from tailopt.rules.adam import fresh
from tailopt.rules.rule import Numbers, State, of
from tailopt.seeds import derive, mixed

PRECISIONS = {None: None, "fp32": None, "bf16": torch.bfloat16}


class Sequential:
    """Local steps on one model, node after node.

    Attributes:
        taken: local steps that every node has taken since the run began.
        kept: the inner state of every node that keeps one, on the CPU.
        own: the weights and buffers of every node that goes on from its own, on the CPU.
        probe: the first batch of the last finished round, as (node, round, taken, digest): the same question must get
            the same answer when a run is resumed.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        algorithm: Algorithm,
        loss: LossFunction,
        source: Source,
        settings: Settings,
        seed: int,
        device: torch.device,
        precision: str | None = None,
        statistics: bool = False,
        probing: bool = False,
    ) -> None:
        self.model, self.device = model, device
        self._algorithm, self._loss, self._source, self._settings = algorithm, loss, source, settings
        self._seed, self._precision, self._statistics = seed, PRECISIONS[precision], statistics
        if not model.training:  # otherwise the modes are the user's: a frozen BatchNorm stays frozen
            model.train()
        self._modes = [(module, module.training) for module in model.modules()]
        self._params = trainable(model)[1]
        self._flat = flattened(self._params)
        self._own = [real(p.detach()) for p in self._params]
        self._buffers = Buffers(model)
        self.taken = [0] * source.nodes
        self.kept: dict[int, list[State]] = {}
        self.own: dict[int, Own] = {}
        self.probe: dict[str, Any] = {}
        self._probing = probing  # only a run that is kept can be resumed
        self._asked: dict[str, Any] = {}  # the probe of the round that is under way

    @staticmethod
    def synchronised(model: torch.nn.Module, average: bool) -> Synchronised:
        """The state before the first round: the weights as they are, in the arithmetic's type."""
        names, params = trainable(model)
        flat = flattened(params)
        if flat is None:
            weights = [real(p.detach()).to(arithmetic(p.dtype), copy=True) for p in params]
        else:
            flat = flat.clone()
            weights = [flat.as_strided(p.shape, p.stride(), p.storage_offset()) for p in params]
        kept = [torch.zeros_like(w) for w in weights] if average else None
        buffers = {name: buffer.clone() for name, buffer in Buffers(model).now().items()}
        return Synchronised(names, weights, buffers, [{} for _ in weights], kept, flat=flat)

    def contributions(
        self, state: Synchronised, who: Participants, going_on: Collection[int] = ()
    ) -> Iterator[Contribution]:
        """What every participant does in the next round, in ascending order.

        going_on: those that will go on from where they end, so that it is kept. A contribution lies in the model's own
        memory: it is gone when the next one is asked for.
        """
        t = state.round + 1
        for node in who.shares:
            yield self._local_round(state, node, t, node in going_on)

    def _local_round(self, state: Synchronised, node: int, t: int, going_on: bool = False) -> Contribution:
        params, own = self._params, self._own
        starts = self._load(state.weights, state.flat)
        self._buffers.load(state.buffers)
        if node in self.own:  # what it moves is still measured from the synchronised weights
            torch._foreach_copy_(own, self.own[node].weights)
            self._buffers.load(self.own[node].buffers)
        taken, steps = self.taken[node], self._source.steps(node)
        states = self._inner_states(state, node, own)
        # who did not start where the others did may have come from anywhere
        limit = self._settings.limit(t, taken, steps) if node not in self.own else Bound(None)
        watch = Watch("counts") if self._statistics else None
        losses = []
        base = derive(self._seed, "model", t, node)
        seed_plainly(base)
        batches = self._source.batches(node, t, taken, steps)
        for step in range(steps):
            seed_torch(mixed(base, step), self.device)
            try:
                batch = next(batches)
                if self._probing and (not self._asked or self._asked["round"] != t):
                    self._asked = {"node": node, "round": t, "taken": taken, "digest": batch_digest(batch)}
                losses.append(self._backward(to_device(batch, self.device), params))
            except Exception as error:
                raise _said_where(error, node, t, step) from error.__cause__
            self._inner_step(params, own, states, self._settings.inner(t, taken + step), watch)
        for p in params:
            p.grad = None
        ended = self._ended() if going_on else None
        flat: Tensor | None = None
        delta: Sequence[Tensor] = own
        if self._flat is not None and state.flat is not None:
            flat = self._flat.sub_(state.flat)
        else:
            delta = displacements(own, starts)
        return Contribution(
            node,
            starts,
            delta,
            self._buffers.now(),
            _mean(losses),
            limit,
            steps,
            [moved(s, "cpu") for s in states] if self._algorithm.inner_state == "keep" else None,
            watch.take(len(params)) if watch is not None else None,
            flat,
            ended,
        )

    def _ended(self) -> Own:
        """The model as it is now, copied."""
        buffers = {name: b.to("cpu", copy=True) for name, b in self._buffers.now().items()}
        return Own([w.to("cpu", copy=True) for w in self._own], buffers)

    def _load(self, weights: Sequence[Tensor], flat: Tensor | None = None) -> Sequence[Tensor]:
        """Put weights into the model; returns the start in the parameters' own types, copied only where they differ."""
        if self._flat is not None and flat is not None:
            self._flat.copy_(flat)
            return weights
        torch._foreach_copy_(self._own, list(weights))
        return [w if w.dtype == p.dtype else p.clone() for p, w in zip(self._own, weights, strict=True)]

    def _inner_states(self, state: Synchronised, node: int, own: Sequence[Tensor]) -> list[State]:
        if self._algorithm.inner_state == "keep" and node in self.kept:
            return [moved(s, self.device) for s in self.kept[node]]
        if self._algorithm.send_preconditioner and state.round:
            step = 0 if self._algorithm.send_preconditioner == "raw" else state.round
            moments = [outer.get("exp_avg_sq", torch.zeros_like(p)) for p, outer in zip(own, state.outer, strict=True)]
            return [fresh(p, v, step) for p, v in zip(own, moments, strict=True)]
        return [{} for _ in own]

    def _backward(self, batch: Any, params: Sequence[torch.nn.Parameter]) -> Tensor:
        for p in params:
            p.grad = None
        with torch.enable_grad(), self._autocast():
            loss = self._loss(self.model, batch)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{type(loss).__name__}"
            raise ValueError(f"Invalid loss: {got}; need a scalar tensor, such as the mean over the batch.")
        if not loss.requires_grad:
            raise ValueError("Invalid loss: it depends on no trainable parameter. Was it detached, or is all frozen?")
        loss.backward()
        return loss.detach()

    def _inner_step(
        self,
        params: Sequence[torch.nn.Parameter],
        own: Sequence[Tensor],
        states: Sequence[State],
        numbers: Numbers,
        watch: Watch | None,
    ) -> None:
        moving = [i for i, p in enumerate(params) if p.grad is not None]
        grads = [real(g) for p in params if (g := p.grad) is not None]
        if watch is not None:
            for i, g in zip(moving, grads, strict=True):
                u, d, zone = of(numbers.get("u", float("inf")), i), of(numbers.get("d", 0.0), i), 0.0
                tally(g.coalesce() if g.is_sparse else g, i, (u, d, zone), watch.tallies(g.device, len(params)))
        if len(moving) < len(params):  # a parameter that the loss did not reach is left as it is, state and all
            numbers = {k: [v[i] for i in moving] if isinstance(v, list) else v for k, v in numbers.items()}
            own, states = [own[i] for i in moving], [states[i] for i in moving]
        if own:
            self._settings.inner_rule.step(own, grads, states, numbers)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._precision is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._precision)

    def commit(self, report: Report) -> None:
        """Take over what the nodes of a finished round keep; an excluded node keeps what it had."""
        self.probe = self._asked  # not before: the data of a round that failed may be mended
        for node, steps in report.steps.items():
            self.taken[node] += steps
            self.own.pop(node, None)
        self.own.update(report.own)
        for node, states in report.inner.items():
            self.kept[node] = states

    def evaluate(self, state: Synchronised, function: Callable[[torch.nn.Module], Mapping[str, Any]]) -> dict[str, Any]:
        """What the user's function says of the synchronised model, in evaluation mode."""
        self.show(state.weights, state.buffers)
        self.model.eval()
        seed_plainly(derive(self._seed, "evaluate", state.round))
        seed_torch(derive(self._seed, "evaluate", state.round), self.device)
        with torch.no_grad():
            found = function(self.model)
        if not isinstance(found, Mapping):
            raise TypeError(
                f"Invalid evaluate: it returned {type(found).__name__}; need a mapping from names to numbers, such as "
                '{"accuracy": 0.9}.'
            )
        for module, training in self._modes:
            module.training = training
        return {str(key): value.item() if isinstance(value, Tensor) else value for key, value in dict(found).items()}

    def show(self, weights: Sequence[Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Put weights and buffers into the model."""
        with torch.no_grad():
            self._load(weights)
            self._buffers.load(buffers)

    def check_repeatable(self) -> None:
        """Ask for the first batch of the last round again, and refuse to go on where it is another one."""
        if not self.probe:
            return
        node, t, taken = (self.probe[key] for key in ("node", "round", "taken"))
        base = derive(self._seed, "model", t, node)
        seed_plainly(base)
        seed_torch(mixed(base, 0), self.device)
        if batch_digest(next(iter(self._source.batches(node, t, taken, 1)))) != self.probe["digest"]:
            raise ValueError(
                f"This run cannot be resumed: the batch of node {node}, round {t}, step 0 is another one than it was. "
                "Draw all randomness from the generator that the batch function is given, and leave the data as they "
                "were."
            )

    def summary(self, report: Report, names: Sequence[str]) -> dict[str, Any]:
        """The counts of a round's gradients by tensor, over all nodes that counted."""
        total = [sum(parts, Counts()) for parts in zip(*report.statistics, strict=True)]
        fields = ("elements", "zero", "below", "above", "nonfinite", "squares", "largest")
        return {name: {f: getattr(c, f) for f in fields} for name, c in zip(names, total, strict=True)}


def trainable(model: torch.nn.Module) -> tuple[list[str], list[torch.nn.Parameter]]:
    """Names and parameters that are trained; a tied one counts once."""
    pairs = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [name for name, _ in pairs], [p for _, p in pairs]


def real(x: Tensor) -> Tensor:
    """A complex tensor as pairs of reals."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def flattened(params: Sequence[torch.nn.Parameter]) -> Tensor | None:
    """One tensor that holds all parameters, which become views of it; None where they are not all of one wide type.

    What a round does with a whole model is then one operation, not one a tensor: small models notice.
    """
    kinds = {(p.dtype, p.device) for p in params}
    plain = all(type(p) is torch.nn.Parameter and is_flat(p) for p in params)
    if len(kinds) != 1 or not plain or params[0].dtype not in (torch.float32, torch.float64):
        return None
    if (shared := _one_storage(params)) is not None:
        return shared
    flat = torch.empty(sum(p.numel() for p in params), dtype=params[0].dtype, device=params[0].device)
    offset = 0
    for p in params:
        view = flat.as_strided(p.shape, p.stride(), offset)
        view.copy_(p.detach())
        p.data = view
        offset += p.numel()
    return flat


def _one_storage(params: Sequence[torch.nn.Parameter]) -> Tensor | None:
    """The tensor behind parameters that lie one after another in it already."""
    offset = 0
    for p in params:
        if p.storage_offset() != offset or p.untyped_storage().data_ptr() != params[0].untyped_storage().data_ptr():
            return None
        offset += p.numel()
    if params[0].untyped_storage().nbytes() != offset * params[0].element_size():
        return None
    return params[0].detach().as_strided((offset,), (1,), 0)


class Buffers:
    """A model's buffers by name; found once by where they stand, since modules may replace the tensors themselves."""

    def __init__(self, model: torch.nn.Module) -> None:
        modules = dict(model.named_modules())
        names = [name for name, _ in model.named_buffers()]
        self._places = [(name, modules[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in names]

    def now(self) -> dict[str, Tensor]:
        """The tensors themselves."""
        return {name: getattr(module, key).detach() for name, module, key in self._places}

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Put values into them."""
        for name, module, key in self._places:
            getattr(module, key).copy_(values[name])


def displacements(own: Sequence[Tensor], starts: Sequence[Tensor]) -> list[Tensor]:
    """What parameters moved, in the arithmetic's type; in their own memory where that is their type."""
    if all(p.dtype == arithmetic(p.dtype) for p in own):
        torch._foreach_sub_(list(own), list(starts))
        return list(own)
    types = [arithmetic(p.dtype) for p in own]
    return [p.to(t) - s.to(t) for p, s, t in zip(own, starts, types, strict=True)]


def seed_torch(value: int, device: torch.device) -> None:
    """Seed torch's global generator of the CPU, and of the device."""
    torch.default_generator.manual_seed(value)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(value)


def seed_plainly(value: int) -> None:
    """Seed Python's generator, and numpy's where somebody uses it."""
    random.seed(value)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(value % 2**32)


def moved(state: State, device: torch.device | str) -> State:
    """A copy of a parameter's state on a device; counters stay on the CPU, where torch's optimizers want them."""

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().to(device if value.dim() else "cpu", copy=True)

    return {key: copied(value) for key, value in state.items()}


def _mean(losses: Sequence[Tensor]) -> float:
    """In float64, one after another; a device is waited for once."""
    values = torch.stack(list(losses)).tolist() if losses[0].device.type != "cpu" else [x.item() for x in losses]
    return sum(values) / len(values)


def _said_where(error: Exception, node: int, t: int, step: int) -> Exception:
    """An error of the user's own functions, saying where it happened."""
    where = f"in node {node}, round {t}, local step {step}"
    if isinstance(error, StopIteration):
        return RuntimeError(f"The data ended {where}.")
    if isinstance(error, ValueError) and str(error).startswith("Invalid loss"):
        return ValueError(f"{error} This was {where}.")
    if hasattr(error, "add_note"):
        error.add_note(f"This was {where}.")
    return error
