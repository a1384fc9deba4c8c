"""Local steps of stacked nodes through captured programs.

Forward pass, backward pass and the inner rule's step become one program. Where the rule keeps a state, or torch cannot
trace its step, losses and gradients are the program and the rule steps after it. What no program can run is left to
plain vmap. Nothing of this is silent: `CapturedSteps.route` says what ran how, and why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tailopt.clipping.operators import compute_dtype
from tailopt.engines.captured_program import CapturedProgram, CaptureRefused
from tailopt.engines.model_state import as_real
from tailopt.engines.routes import COMPILED, VMAP, Route
from tailopt.engines.stacked_batches import signature
from tailopt.engines.stacked_model import StackedGradients, StackedModel
from tailopt.engines.stacked_rules import InnerSteps, StackedSteps
from tailopt.rounds.hyperparameters import SCHEDULABLE
from tailopt.rules.rule import Hyperparameters

INPUTS = (*SCHEDULABLE, "dead_zone")  # hyperparameters that are inputs of a program, whatever their values are
MOST_PROGRAMS = 4  # each is compiled for tens of seconds, and its graph keeps memory


class Compiled(NamedTuple):
    """A program, and which parameters its gradients belong to."""

    program: CapturedProgram
    moving: list[int]  # the parameters that have a gradient; filled while the program is traced


class CapturedPrograms:
    """Programs by what they compute and for which shapes; batches of configurations use the same ones in turn."""

    def __init__(self) -> None:
        self.compiled: dict[tuple[Hashable, ...], Compiled] = {}  # the key begins with "step", "gradients" or "mean"
        self.refused: dict[str, str] = {}  # one of these -> why
        self.skipped: dict[str, int] = {}  # why a step ran by plain vmap -> how many did

    def are_enough(self, kind: str) -> bool:
        """Return whether no further program of a kind is compiled; a step and its gradients are one kind."""
        return sum((of == "mean") == (kind == "mean") for of, *_ in self.compiled) >= MOST_PROGRAMS

    def run(self, key: tuple[Hashable, ...], fixed: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor] | None:
        """Run a program; None, and the reason is kept, where torch refuses it."""
        try:
            return self.compiled[key].program(fixed, others)
        except CaptureRefused as error:
            del self.compiled[key]
            why = self.refused[str(key[0])] = f"torch cannot compile or capture the {key[0]}: {error}"
            if key[0] == "gradients":
                warnings.warn(f"All nodes run by plain vmap, without a compiled program: {why}", stacklevel=2)
            return None

    def release(self) -> None:
        """Free the memory of all graphs; what is compiled stays."""
        for entry in self.compiled.values():
            entry.program.release()


_shared: ContextVar[dict[str, CapturedPrograms] | None] = ContextVar("programs by inner rule", default=None)


@contextmanager
def sharing_programs(programs: dict[str, CapturedPrograms]) -> Iterator[None]:
    """Let all batches of configurations inside use the same programs: compiling one takes up to a minute.

    Args:
        programs: by inner rule, empty at first. All runs that use them must have the same model, loss and precision.
    """
    token = _shared.set(programs)
    try:
        yield
    finally:
        _shared.reset(token)


def programs_for(inner_rule: str) -> CapturedPrograms:
    """Return the programs that batches with an inner rule share, or new ones."""
    shared = _shared.get()
    return CapturedPrograms() if shared is None else shared.setdefault(inner_rule, CapturedPrograms())


class CapturedSteps:
    """Takes steps of all nodes, in place.

    Args:
        program: losses and gradients of all nodes.
        inner: the inner steps.
        programs: those of an earlier object with the same model and rule.
        changes_gradients: whether something is added to the gradients before the inner rule steps.
    """

    def __init__(
        self,
        program: StackedModel,
        inner: InnerSteps,
        programs: CapturedPrograms | None = None,
        changes_gradients: bool = False,
    ) -> None:
        self._program, self._inner, self._changes_gradients = program, inner, changes_gradients
        self.programs = programs if programs is not None else CapturedPrograms()
        self._numbers: tuple[Hyperparameters, _Numbers] | None = None
        self._constants: dict[str, Tensor] | None = None

    @property
    def route(self) -> Route:
        """How steps ran, and why not otherwise."""
        programs = self.programs
        if "gradients" in programs.refused or not programs.compiled:
            return Route(VMAP, programs.refused.get("gradients", "no step has run yet"))
        parts = []
        if self._changes_gradients:
            parts.append("inner steps run after the graph of the gradients, to which a proximal term is added")
        elif "step" in programs.refused:
            parts.append(f"inner steps run after the graph of the gradients: {programs.refused['step']}")
        if "mean" in programs.refused:
            parts.append(f"the mean is taken operation by operation: {programs.refused['mean']}")
        parts += [f"{count} steps ran by plain vmap: {why}" for why, count in programs.skipped.items()]
        return Route(COMPILED, "; ".join(parts) or "forward, backward and inner steps are one compiled program")

    def skip(self, why: str) -> None:
        """Count a step that runs by plain vmap, and say so when the first one does."""
        if why not in self.programs.skipped:
            warnings.warn(f"Some local steps run by plain vmap, without a compiled program: {why}.", stacklevel=2)
        self.programs.skipped[why] = self.programs.skipped.get(why, 0) + 1

    def step(
        self, weights: Sequence[Tensor], buffers: Mapping[str, Tensor], batch: Any, hparams: Hyperparameters
    ) -> StackedGradients | None:
        """Take a whole step; returns losses and new buffers, or None where the inner rule must step by itself."""
        inner, refused = self._inner, self.programs.refused
        if self._changes_gradients or "step" in refused or "gradients" in refused:
            return None
        if not isinstance(inner, StackedSteps) or inner.keeps_state(hparams):
            name = inner.rule.name  # type: ignore[attr-defined]
            how = "keeps a state" if isinstance(inner, StackedSteps) else "steps node after node"
            refused["step"] = f"{name} {how}"
            return None
        numbers = self._numbers_of(hparams, weights[0].device)

        def function(given: _Inputs, moving: list[int]) -> list[Tensor]:
            found = self._program.losses_and_gradients(
                given.weights, given.buffers, given.leaves, batch, given.constants
            )
            with torch.no_grad(), _compiling():
                hparams = numbers.filled(given.numbers, given.weights)
                inner.step_without_state(given.weights, found.gradients, hparams)
            return [found.losses, *found.buffers.values()]

        found = self._run("step", function, weights, buffers, batch, numbers)
        if found is None:
            return None
        losses, *rest = found[0]
        return StackedGradients(losses.clone(), [], self._new_buffers(rest))

    def gradients(
        self, weights: Sequence[Tensor], buffers: Mapping[str, Tensor], batch: Any
    ) -> StackedGradients | None:
        """Return losses, gradients and new buffers, or None where plain vmap must compute them.

        The gradients lie in memory of the graph: they are gone when the next step begins.
        """
        if "gradients" in self.programs.refused:
            return None

        def function(given: _Inputs, moving: list[int]) -> list[Tensor]:
            found = self._program.losses_and_gradients(
                given.weights, given.buffers, given.leaves, batch, given.constants
            )
            moving[:] = [i for i, g in enumerate(found.gradients) if g is not None]
            reached = [g for g in found.gradients if g is not None]
            return [found.losses, *found.buffers.values(), *reached]

        found = self._run("gradients", function, weights, buffers, batch, _Numbers({}, [], ()))
        if found is None:
            return None
        (losses, *rest), moving = found
        changing = len(self._program.changing)
        gradients: list[Tensor | None] = [None] * len(weights)
        for i, g in zip(moving, rest[changing:], strict=True):
            gradients[i] = g
        return StackedGradients(losses.clone(), gradients, self._new_buffers(rest[:changing]))

    def _new_buffers(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return copies: the graph overwrites its own."""
        return {name: b.clone() for name, b in zip(self._program.changing, values, strict=True)}

    def _run(
        self,
        kind: str,
        function: Callable[[_Inputs, list[int]], list[Tensor]],
        weights: Sequence[Tensor],
        buffers: Mapping[str, Tensor],
        batch: Any,
        numbers: _Numbers,
    ) -> tuple[list[Tensor], list[int]] | None:
        """Run a program, compiled in its first call; None where it is refused or there are too many shapes."""
        if self._constants is None:  # found by walking through all modules, which takes a while
            self._constants = self._program.constants()
        constants = self._constants
        leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        changing = [buffers[name] for name in self._program.changing]
        shapes = tuple((t.shape, t.dtype) for t in (*weights, *changing))
        key = kind, shapes, signature(batch), numbers.key
        entry = self.programs.compiled.get(key)
        if entry is None:
            if self.programs.are_enough(kind):
                if kind == "gradients":  # which is tried last
                    self.skip(f"programs are compiled for {MOST_PROGRAMS} shapes at most")
                return None
            names = list(constants)
            counts = len(weights), len(names), len(changing), len(leaves)
            moving: list[int] = []

            def flat(tensors: list[Tensor]) -> list[Tensor]:
                return function(_Inputs.of(tensors, counts, names), moving)

            entry = self.programs.compiled[key] = Compiled(CapturedProgram(flat), moving)
        fixed, others = [*weights, *constants.values()], [*changing, *leaves, *numbers.tensors]
        outputs = self.programs.run(key, fixed, others)
        return None if outputs is None else (outputs, entry.moving)

    def _numbers_of(self, hparams: Hyperparameters, device: torch.device) -> _Numbers:
        if self._numbers is None or self._numbers[0] is not hparams:
            self._numbers = hparams, _Numbers.of(hparams, device)
        return self._numbers[1]


class _Inputs(NamedTuple):
    """The inputs of a program, by what they are."""

    weights: list[Tensor]
    constants: dict[str, Tensor]
    buffers: list[Tensor]
    leaves: list[Tensor]
    numbers: list[Tensor]

    def losses_and_gradients(self, program: StackedModel, batch: Any) -> StackedGradients:
        return program.losses_and_gradients(self.weights, self.buffers, self.leaves, batch, self.constants)

    @classmethod
    def of(cls, tensors: Sequence[Tensor], counts: Sequence[int], names: Sequence[str]) -> _Inputs:
        parts, first = [], 0
        for count in counts:
            parts.append(list(tensors[first : first + count]))
            first += count
        weights, constants, buffers, leaves = parts
        return cls(weights, dict(zip(names, constants, strict=True)), buffers, leaves, list(tensors[first:]))


class _Numbers(NamedTuple):
    """Hyperparameters: those that may change between steps as tensors, the others as they are.

    A compiled program has the numbers in it that it was traced with, so that lr, u and d, which schedules change, and
    whatever differs between configurations are inputs. Another value of any other number is another program.
    """

    plain: dict[str, Any]
    tensors: list[Tensor]
    key: Hashable

    @classmethod
    def of(cls, hparams: Hyperparameters, device: torch.device) -> _Numbers:
        tensors: list[Tensor] = []

        def placed(name: str, value: Any) -> Any:
            if isinstance(value, list):
                return [placed(name, one) for one in value]
            if isinstance(value, Tensor):
                tensors.append(value.to(device))
            elif name in INPUTS and isinstance(value, int | float):
                # filled on the device: a copy to it would wait for all that runs there
                tensors.append(torch.full((), float(value), dtype=torch.float64, device=device))
            else:
                return value
            return _Place(len(tensors) - 1)

        plain = {name: placed(name, value) for name, value in hparams.items()}
        shapes = tuple((t.shape, t.dtype) for t in tensors)
        return cls(plain, tensors, (repr(sorted(plain.items())), shapes))

    def filled(self, tensors: Sequence[Tensor], weights: Sequence[Tensor]) -> dict[str, Any]:
        """Return the hyperparameters with tensors in their places: for each parameter, of a shape that broadcasts.

        Rules then step tensor by tensor, as with settings that differ between configurations. When numbers were 0-dim
        and BiClip stepped over lists, a run with a schedule was off by 9e-5 on a GPU (torch 2.11). Since then it is
        exact, but more than this had changed, and such a step alone was exact too: the cause is not known.
        """

        def value(of: Any, w: Tensor) -> Any:
            if not isinstance(of, _Place):
                return of
            found = tensors[of.number]
            return found.to(compute_dtype(w.dtype)).reshape((1,) * as_real(w).dim()) if not found.dim() else found

        hparams = {}
        for name, of in self.plain.items():
            if isinstance(of, list):
                hparams[name] = [value(one, w) for one, w in zip(of, weights, strict=True)]
            else:
                hparams[name] = [value(of, w) for w in weights] if isinstance(of, _Place) else of
        return hparams


class _Place(NamedTuple):
    number: int


@contextmanager
def _compiling() -> Iterator[None]:
    """Tell rules that they are traced: they then read no values, and split no tensors into pieces."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before
