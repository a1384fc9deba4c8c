"""This node's part of a round: the steps of the inner optimizer, and what an exclusion undoes.

The inner optimizer is the user's, or a `RuleOptimizer` whose hyperparameters all nodes have agreed on. Each local step
notes the hyperparameters it stepped with: they bound how far the node can have moved.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from tailopt.clipping.dtensor import is_dtensor
from tailopt.distributed.exchange_types import Statement
from tailopt.distributed.inner_bound import bounding_hparams, inner_bound
from tailopt.distributed.mesh import local_tensor
from tailopt.distributed.proximal_step import ProximalStep
from tailopt.distributed.rule_optimizer import RuleOptimizer, gradient_norms
from tailopt.distributed.run_length import run_length_decode, run_length_encode
from tailopt.engines.model_state import as_real
from tailopt.optimizers.exact_state import load_exact_state
from tailopt.optimizers.gradient_release import is_released
from tailopt.rounds.clipping_counts import ClippingCounter
from tailopt.rounds.gradient_statistics import GradientRecorder, clipped_by_step
from tailopt.rounds.guard import Bound
from tailopt.rounds.hyperparameters import RuleHyperparameters
from tailopt.rules.rule import Hyperparameters, ParamState


class LocalRound:
    """The local steps of one node in the current round.

    Args:
        optimizer: the inner optimizer.
        params: the parameters that are exchanged.
        agreed_hparams: hyperparameters that all nodes have agreed on, or None where the optimizer is the user's.
        keeps_state: whether the inner state survives a round.
        can_be_excluded: whether the state must be remembered, since an exclusion undoes the round.
        proximal_step: takes the steps on gradients with the proximal term, or None where there is no such term.
        statistics: whether a `RuleOptimizer` counts what its steps clip; "histograms": also by magnitude.

    Attributes:
        loss: of the round, as the user reports it.
        threshold_recorder: statistics of the gradients clipped in this round. The next "auto" thresholds are computed
            from them. None if no threshold of the inner rule is "auto".
        clipping_counter: of what was clipped in this round, for the history; None where it has no statistics.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        params: Sequence[Tensor],
        agreed_hparams: RuleHyperparameters | None,
        keeps_state: bool,
        can_be_excluded: bool,
        proximal_step: ProximalStep | None = None,
        statistics: bool | str = False,
    ) -> None:
        self.optimizer, self._params, self._agreed_hparams = optimizer, params, agreed_hparams
        self._proximal_step = proximal_step
        self._check_proximal_term()
        self._keeps_state, self._can_be_excluded = keeps_state, can_be_excluded
        self._hparams_of_steps: list[Hyperparameters] = []
        self._began = time.perf_counter()
        self._state_before: Any = None
        self.loss = math.nan
        self._statistics = statistics
        self.threshold_recorder = self._new_recorder()
        self.clipping_counter = self._new_counter()

    def _new_counter(self) -> ClippingCounter | None:
        if not self._statistics or not isinstance(self.optimizer, RuleOptimizer):
            return None
        self.optimizer.clipping_counter = ClippingCounter(self._statistics, len(self._params))
        return self.optimizer.clipping_counter

    def _new_recorder(self) -> GradientRecorder | None:
        thresholds = None if self._agreed_hparams is None else self._agreed_hparams.auto_thresholds
        return None if thresholds is None else thresholds.recorder(len(self._params))

    @property
    def steps(self) -> int:
        """Local steps taken in this round."""
        return len(self._hparams_of_steps)

    @property
    def seconds(self) -> float:
        """Seconds since the local steps began."""
        return time.perf_counter() - self._began

    def clear(self, initial_states: Sequence[ParamState] | None) -> None:
        """Forget the steps of the last round: the first half of a new round, also where this node takes no part in it.

        Where the inner state is not kept, it becomes `initial_states`, or empty if there are none.
        """
        self._hparams_of_steps = []
        self.threshold_recorder = self._new_recorder()
        self.clipping_counter = self._new_counter()
        self._began = time.perf_counter()
        if self._proximal_step is not None:
            self._proximal_step.begin_round()
        if self._keeps_state:
            return
        self.optimizer.state.clear()
        if initial_states is not None:
            for p, state in zip(self._params, initial_states, strict=True):
                self.optimizer.state[p] = state

    def begin(self) -> None:
        """Begin the local steps: the second half of a new round, after `clear`, only where this node takes part in it.

        Remembers the state to which an excluded node goes back.
        """
        if self._keeps_state and self._can_be_excluded:
            self._state_before = copy.deepcopy(self.optimizer.state_dict()["state"])
        self.loss = math.nan
        self._began = time.perf_counter()

    def undo(self) -> None:
        """Take back what this round did to a state that is kept."""
        if self._keeps_state and self._state_before is not None:
            load_exact_state(self.optimizer, {**self.optimizer.state_dict(), "state": self._state_before})

    def step(self, t: int, total_steps: int, closure: Callable[[], Any] | None) -> Any:
        """Take one local step of round t, before which the node has taken `total_steps` over the whole run."""
        if self._proximal_step is None:
            return self._step(t, total_steps, closure)
        self._check_proximal_term()
        return self._proximal_step(partial(self._step, t, total_steps), closure)

    def _check_proximal_term(self) -> None:
        if self._proximal_step is not None and is_released(self.optimizer):
            raise ValueError(
                f"Invalid proximal: {self._proximal_step.mu}; the gradients of the inner optimizer are released, so "
                "parameters move inside backward before the term can be added. Call remove() of the handle, or "
                "set proximal=0."
            )

    def _step(self, t: int, total_steps: int, closure: Callable[[], Any] | None) -> Any:
        if self._agreed_hparams is not None:
            for group in self.optimizer.param_groups:
                group.update(self._agreed_hparams.at(t, total_steps))
        # With agreed hyperparameters `bound` does not read these, but their number is the number of steps, and a
        # checkpoint in the middle of a round has them.
        hparams = bounding_hparams(self.optimizer, self._params)
        loss = self.optimizer.step(closure) if closure is not None else self.optimizer.step()
        # only now: a step that raised is no step, and a caller that catches the error is still in the same round
        self._hparams_of_steps.append(hparams)
        if self.threshold_recorder is not None:
            self._record_clipped(self.threshold_recorder, total_steps)
        return loss

    def _record_clipped(self, recorder: GradientRecorder, total_steps: int) -> None:
        """Record what a step clipped; the next "auto" thresholds are computed from it."""
        assert self._agreed_hparams is not None
        assert self._agreed_hparams.auto_thresholds is not None
        moving = [i for i, p in enumerate(self._params) if p.grad is not None]
        params = [self._params[i] for i in moving]
        grads = [as_real(local_tensor(p.grad)) for p in params if p.grad is not None]
        if recorder.kind != "elements" and any(map(is_dtensor, params)):
            norms = gradient_norms(params, grads, recorder.kind == "tensor norms")
            recorder.add_norms(moving, norms if isinstance(norms, list) else [norms])
            return
        states = [self.optimizer.state[p] for p in params]
        recorder.add(moving, clipped_by_step(grads, states, self._agreed_hparams.auto_thresholds.momentum), total_steps)

    def bound(self, t: int, steps_before_round: int) -> Bound:
        """Return how far this node can have moved by its steps."""
        if not self.steps:
            return Bound(None)
        if self._agreed_hparams is not None:
            return self._agreed_hparams.bound(t, steps_before_round, self.steps)
        return inner_bound(self.optimizer, self._params, self._hparams_of_steps)

    def statement(
        self, bound: Bound, *, trainable_set_digest: int, auto_thresholds_digest: int, may_be_last: bool
    ) -> Statement:
        """Return what this node states about its steps; the arguments are those of `Statement`."""
        return Statement(
            steps=self.steps,
            bound=bound,
            loss=self.loss,
            seconds=self.seconds,
            trainable_set_digest=trainable_set_digest,
            may_be_last=may_be_last,
            auto_thresholds_digest=auto_thresholds_digest,
            threshold_recorder=self.threshold_recorder,
            clipping_counter=self.clipping_counter,
        )

    # what a checkpoint holds of it

    def saved_optimizer(self, in_the_middle: bool) -> dict[str, Any]:
        """Return the inner optimizer's state and the loss; a state that is not kept is saved only during a round."""
        inner = self.optimizer.state_dict()
        if not in_the_middle and not self._keeps_state:
            inner = {**inner, "state": {}}
        return {"optimizer": inner, "loss": self.loss}

    def saved_steps(self) -> dict[str, Any]:
        """Return the steps of a round that is under way."""
        recorded = {} if self.threshold_recorder is None else {"gradients": self.threshold_recorder.packed()}
        if self.clipping_counter is not None:
            recorded["statistics"] = self.clipping_counter.packed()
        return {"inner_before": self._state_before, "done": run_length_encode(self._hparams_of_steps), **recorded}

    def load_saved(self, saved: Mapping[str, Any], in_the_middle: bool) -> None:
        """Load what `saved_optimizer` and `saved_steps` returned."""
        load_exact_state(self.optimizer, saved["optimizer"])
        self.loss = saved["loss"]
        if in_the_middle:
            self._state_before = saved.get("inner_before")
            self._hparams_of_steps = run_length_decode(saved["done"])
            if self.threshold_recorder is not None:
                self.threshold_recorder.load(saved["gradients"])
            if self.clipping_counter is not None:
                self.clipping_counter.load(saved["statistics"])
