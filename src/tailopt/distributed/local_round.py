"""This node's part of a round: the steps of the inner optimizer, and what an exclusion undoes.

The inner optimizer is the user's, or a `RuleOptimizer` whose hyperparameters all nodes have agreed on. Each local step
notes the hyperparameters it stepped with: they bound how far the node can have moved.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tailopt.distributed.run_length import run_length_decode, run_length_encode
from tailopt.optimizers.biclip import BiClip
from tailopt.optimizers.exact_state import load_exact_state
from tailopt.optimizers.l2clip import L2Clip
from tailopt.rounds.guard import Bound, bound
from tailopt.rounds.hyperparameters import RuleHyperparameters
from tailopt.rules.adagrad import ADAGRAD
from tailopt.rules.adam import ADAM, ADAMW
from tailopt.rules.biclip import BICLIP
from tailopt.rules.l2clip import BICLIP_L2
from tailopt.rules.rule import Hyperparameters, Rule, State

# The hyperparameters that decide how far a step can move.
BOUNDING = ("lr", "u", "d", "eps", "weight_decay", "betas", "momentum", "scope")
RULES: dict[type, Rule] = {
    BiClip: BICLIP,
    L2Clip: BICLIP_L2,
    torch.optim.Adam: ADAM,
    torch.optim.AdamW: ADAMW,
    torch.optim.Adagrad: ADAGRAD,
}


class LocalRound:
    """The local steps of one node in the current round.

    Args:
        optimizer: the inner optimizer.
        params: the parameters that are exchanged.
        shared_hparams: hyperparameters that all nodes have agreed on, or None where the optimizer is the user's.
        keeps_state: whether the inner state survives a round.
        can_be_excluded: whether the state must be remembered, since an exclusion undoes the round.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        params: Sequence[Tensor],
        shared_hparams: RuleHyperparameters | None,
        keeps_state: bool,
        can_be_excluded: bool,
    ) -> None:
        self.optimizer, self._params, self._shared_hparams = optimizer, params, shared_hparams
        self._keeps_state, self._can_be_excluded = keeps_state, can_be_excluded
        self._hparams_of_steps: list[Hyperparameters] = []
        self._began = time.perf_counter()
        self._state_before: Any = None
        self.loss = math.nan

    @property
    def steps(self) -> int:
        """Local steps taken in this round."""
        return len(self._hparams_of_steps)

    @property
    def seconds(self) -> float:
        """Seconds since the local steps began."""
        return time.perf_counter() - self._began

    def clear(self, initial_states: Sequence[State] | None) -> None:
        """Forget the steps of the last round; a state that is not kept begins empty, or with `initial_states`."""
        self._hparams_of_steps = []
        self._began = time.perf_counter()
        if self._keeps_state:
            return
        self.optimizer.state.clear()
        if initial_states is not None:
            for p, state in zip(self._params, initial_states, strict=True):
                self.optimizer.state[p] = state

    def begin(self) -> None:
        """Begin the local steps, and remember the state to which an excluded node goes back."""
        if self._keeps_state and self._can_be_excluded:
            self._state_before = copy.deepcopy(self.optimizer.state_dict()["state"])
        self.loss = math.nan
        self._began = time.perf_counter()

    def undo(self) -> None:
        """Take back what this round did to a state that is kept."""
        if self._keeps_state and self._state_before is not None:
            load_exact_state(self.optimizer, {**self.optimizer.state_dict(), "state": self._state_before})

    def step(self, t: int, steps_done: int, closure: Callable[[], Any] | None) -> Any:
        """Take one local step of round t, before which the node has taken `steps_done` in all."""
        if self._shared_hparams is not None:
            for group in self.optimizer.param_groups:
                group.update(self._shared_hparams.at(t, steps_done))
        hparams = self._current_hparams()
        loss = self.optimizer.step(closure) if closure is not None else self.optimizer.step()
        # only now: a step that raised is no step, and a caller that catches the error is still in the same round
        self._hparams_of_steps.append(hparams)
        return loss

    def bound(self, t: int, steps_before_round: int) -> Bound:
        """Return how far this node can have moved by its steps."""
        if not self.steps:
            return Bound(None)
        if self._shared_hparams is not None:
            return self._shared_hparams.bound(t, steps_before_round, self.steps)
        rule = RULES.get(type(self.optimizer))
        return Bound(None) if rule is None else bound(rule, self._hparams_of_steps)

    def _current_hparams(self) -> Hyperparameters:
        """Return what the inner optimizer steps with now; a list has one entry per parameter, where groups differ."""
        groups = self.optimizer.param_groups
        hparams: dict[str, Any] = {}
        for name in BOUNDING:
            values = [group[name] for group in groups if name in group]
            if len(values) < len(groups):
                continue
            if all(value is values[0] or value == values[0] for value in values[1:]):
                hparams[name] = values[0]
                continue
            by_param = {id(p): value for group, value in zip(groups, values, strict=True) for p in group["params"]}
            # an entry for every parameter that is exchanged, also for one that was frozen since
            hparams[name] = [by_param.get(id(p), values[0]) for p in self._params]
        hparams["bias_correction"] = True  # last: a checkpoint in the middle of a round keeps this order
        # copies: torch's schedulers change a tensor learning rate in place
        return {name: _copied(value) for name, value in hparams.items()}

    # what a checkpoint holds of it

    def saved_optimizer(self, in_the_middle: bool) -> dict[str, Any]:
        """Return the inner optimizer's state and the loss; a state that is not kept is saved only during a round."""
        inner = self.optimizer.state_dict()
        if not in_the_middle and not self._keeps_state:
            inner = {**inner, "state": {}}
        return {"optimizer": inner, "loss": self.loss}

    def saved_steps(self) -> dict[str, Any]:
        """Return the steps of a round that is under way."""
        return {"inner_before": self._state_before, "done": run_length_encode(self._hparams_of_steps)}

    def load_saved(self, saved: Mapping[str, Any], in_the_middle: bool) -> None:
        """Load what `saved_optimizer` and `saved_steps` returned."""
        load_exact_state(self.optimizer, saved["optimizer"])
        self.loss = saved["loss"]
        if in_the_middle:
            self._state_before = saved.get("inner_before")
            self._hparams_of_steps = run_length_decode(saved["done"])


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return [_copied(entry) for entry in value] if isinstance(value, list) else value
