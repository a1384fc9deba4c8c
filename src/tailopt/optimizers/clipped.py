"""Clipped: BiClip in front of any torch optimizer, which then steps on the clipped gradient.

    g' = sign(g) * min(max(|g|, d), u)        by coordinate
    p <- optimizer's step with g' in place of g

Nothing is kept twice: groups, state and defaults are the wrapped optimizer's own, and `u`, `d` and `dead_zone` are
three more settings in its groups. Gradients are exchanged for their clipped copies during the step and put back.
With u="auto" the groups also have "thresholds" and "calibration", as in `auto_thresholds`, but no step is rescaled.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import _use_grad_for_differentiable

from tailopt.clipping.dispatch import check_type, update
from tailopt.clipping.dtensor import summed
from tailopt.clipping.kernels.kernel import StepGroup
from tailopt.clipping.operators import Number, biclip, check_kind, check_shape, check_thresholds
from tailopt.clipping.reference import ClipByValue, StepHyperparameters
from tailopt.clipping.step_cache import StepCache
from tailopt.optimizers.auto_thresholds import (
    check_auto,
    check_not_capturing,
    chosen_thresholds,
    is_auto,
    is_calibrating,
    is_due,
    observe,
    visible_parts,
)
from tailopt.optimizers.groups import Group
from tailopt.thresholds import Scale, Thresholds

SETTINGS = ("u", "d", "dead_zone")
CHOSEN = ("thresholds", "calibration")  # beside them where u is "auto"
RULE = "gate"
SCALE: Scale = "follow"  # no step is divided by u, so that u may also grow with the gradients


class Clipped(Optimizer):
    """Clip every coordinate of the gradient to a magnitude between d and u, then let another optimizer step.

        g' = sign(g) * min(max(|g|, d), u);    p <- optimizer's step with g' in place of g

    The result has the bits of the wrapped optimizer on gradients replaced by `tailopt.biclip(g, u, d, dead_zone)`;
    d = 0, u = inf is the wrapped optimizer itself. Only the gradient is clipped: a weight decay of any kind is added
    by the wrapped optimizer afterwards. An infinity counts as u, NaN stays NaN.

    Afterwards `p.grad` is the same object with the same values as before. The clipped copies live during the step
    only, and take as much memory as the gradients; state is that of the wrapped optimizer.

    `param_groups`, `state` and `defaults` are the wrapped optimizer's own objects. The thresholds are settings of its
    groups, so they can be scheduled, are saved by `state_dict()`, and may differ by group: a group that has a "u" of
    its own keeps it. A checkpoint of the bare optimizer loads too, and leaves the thresholds as they are.

    With u="auto" this is a gate against spikes: u is the 97 % quantile of the magnitudes of each tensor, taken from the
    first 50 gradients, which are not clipped, and follows later ones slowly. No step is rescaled, and no bound on a
    step is claimed. See `thresholds`.

    Under a `GradScaler` the scaler unscales before anything is clipped, also where the wrapped optimizer was built
    with `fused=True` and would unscale by itself. A closure is called once, before the clipping.

    Args:
        optimizer: any optimizer whose step needs no closure: not LBFGS, which evaluates its closure, and so the
            gradient, many times a step. Nor one with settings called u, d or dead_zone, such as BiClip.
        u: upper threshold, d <= u <= inf: a number, or a tensor that broadcasts against the parameters of its group.
            "auto": chosen for every tensor from the first 50 gradients.
        d: lower threshold, 0 <= d <= u, likewise. "auto" is 0; with u="auto" it is "auto" or 0.
        dead_zone: magnitudes at or below it become 0, 0 <= dead_zone <= u, likewise.

    Examples:
        >>> w = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
        >>> opt = Clipped(torch.optim.SGD([w], lr=0.1), u=1.0, d=0.5)
        >>> (w * torch.tensor([100.0, 0.001])).sum().backward()
        >>> opt.step()
        >>> w.data, w.grad
        (tensor([0.9000, 0.9500]), tensor([1.0000e+02, 1.0000e-03]))

        A gate against spikes:

        >>> opt = Clipped(torch.optim.AdamW([w], lr=0.1), u="auto", d="auto")
        >>> w.grad = torch.tensor([1.0, -2.0])
        >>> for _ in range(50):
        ...     opt.step()
        >>> opt.thresholds[0].split(":")[0]
        "u = 2, d = 0 u, by the rule 'gate'"
    """

    optimizer: Optimizer

    def __init__(self, optimizer: Optimizer, u: Number | str, d: Number | str, dead_zone: Number = 0.0) -> None:
        _check_optimizer(optimizer)
        defaults = _checked({"u": u, "d": d, "dead_zone": dead_zone})
        settings = [_checked({**defaults, **group}, group["params"]) for group in optimizer.param_groups]
        # Nothing was touched until here: a refused optimizer stays as it was.
        optimizer.defaults.update(defaults)
        for group, its in zip(optimizer.param_groups, settings, strict=True):
            group.update(its)
        self.__setstate__({"optimizer": optimizer})

    # ---- what belongs to the wrapped optimizer ----

    @property
    def param_groups(self) -> list[Group]:
        """The wrapped optimizer's groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[Group]) -> None:
        """Set the wrapped optimizer's groups."""
        self.optimizer.param_groups = value

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The wrapped optimizer's state."""
        return self.optimizer.state

    @state.setter
    def state(self, value: defaultdict[Tensor, Any]) -> None:
        """Set the wrapped optimizer's state."""
        self.optimizer.state = value

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's defaults, with u, d and dead_zone."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        """Set the wrapped optimizer's defaults."""
        self.optimizer.defaults = value

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer does it."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group to the wrapped optimizer; thresholds that the group does not name are the constructor's."""
        self.optimizer.add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            group.update(_checked({**self.defaults, **group}, group["params"]))
        except ValueError:
            self.param_groups.pop()
            raise

    @property
    def thresholds(self) -> list[str]:
        """What "auto" has chosen, in a line per group; empty before the 51st step."""
        return chosen_thresholds(self.param_groups)

    def __repr__(self) -> str:
        return f"Clipped({self.optimizer!r})"

    # ---- a step ----

    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; returns what the closure returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params, grads = self._gather()
        try:
            for p, clipped in zip(params, self._clip(), strict=True):
                p.grad = clipped
            self.optimizer.step()
        finally:
            for p, g in zip(params, grads, strict=True):
                if p.grad is not None:  # None: a hook of the wrapped optimizer has already cleared it
                    p.grad = g
        if any(is_auto(group["u"]) for group in self.param_groups):
            self._observe(dict(zip(params, grads, strict=True)))
        return loss

    @torch.no_grad()
    @_disable_dynamo  # as in BiClip: thresholds are plain numbers that change
    def _observe(self, grads: Mapping[Tensor, Tensor]) -> None:
        """Show the gradients, as they came, to the groups whose thresholds follow them."""
        check_not_capturing()
        for group in self.param_groups:
            positions = [i for i, p in enumerate(group["params"]) if p in grads]
            if is_auto(group["u"]) and positions and is_due(group):
                params = [group["params"][i] for i in positions]
                observe(group, positions, visible_parts(params, [grads[p] for p in params]), RULE, SCALE)

    def _gather(self) -> tuple[list[Tensor], list[Tensor]]:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        return params, [p.grad for p in params if p.grad is not None]

    def _clip(self) -> list[Tensor]:
        """The clipped gradient of every parameter that has one, in order; every group is checked first."""
        for group in self.param_groups:
            # A group lacks thresholds if a checkpoint without them was loaded into the wrapped optimizer itself.
            group.update(_checked({**self.defaults, **group}, group["params"], at_step=True))
        for p in self._gather()[0]:
            check_type(p)
        clipped: list[Tensor] = []
        batches: list[StepGroup] = []
        for group in self.param_groups:
            steps = [StepHyperparameters(clip, lr=-1.0) for clip in _clips(group)]
            of_group = [StepGroup([], [], hparams, blank=True) for hparams in steps]
            for i, g in ((i, p.grad) for i, p in enumerate(group["params"]) if p.grad is not None):
                batch = of_group[i if len(of_group) > 1 else 0]
                if _takes_kernel(g):
                    g = summed(g)
                    batch.params.append(torch.empty_like(g))
                    batch.grads.append(g)
                    clipped.append(batch.params[-1])
                else:
                    clipped.append(biclip(g, *batch.hparams.clip))
            batches += [batch for batch in of_group if batch.params]
        # -0 - (-1) * clip(g), without a rounding and with the sign of a zero: the kernels of BiClip make one pass over
        # all gradients where `biclip` makes many.
        if batches:
            fused = all(group.get("fused") for group in self.param_groups)
            update(batches, "fused" if fused else None, self._step_cache)
        return clipped

    # ---- saving ----

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, whose groups hold u, d and dead_zone, and what "auto" has counted and chosen."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state_dict = self.optimizer.state_dict()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the wrapped optimizer; an error leaves it as it was."""
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        saved = state_dict["param_groups"]
        if len(saved) == len(self.param_groups):  # else the wrapped optimizer refuses it
            pairs = zip(self.param_groups, saved, strict=True)
            state_dict = {**state_dict, "param_groups": [{**new, **_loaded(group, new)} for group, new in pairs]}
        self.optimizer.load_state_dict(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "optimizer" in state:  # new, copied or unpickled
            super().__setstate__(state)
            self._step_cache = StepCache()
        else:
            self.optimizer.__setstate__(state)


def _check_optimizer(optimizer: Optimizer) -> None:
    """Raise for an optimizer that cannot be wrapped."""
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"Invalid optimizer: got {optimizer!r}; need an instance of torch.optim.Optimizer. "
            "Build it first: Clipped(torch.optim.Adam(model.parameters()), u=1.0, d=0.1)."
        )
    name = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"Invalid optimizer: got {name}, whose step needs a closure; need one that steps on the gradients in "
            "p.grad. What a closure computes inside its step would reach it unclipped."
        )
    taken = [setting for setting in SETTINGS if setting in optimizer.defaults]
    if taken:
        raise ValueError(
            f"Invalid optimizer: got {name}, which already has {', '.join(taken)} among its settings; need one without "
            "them. It clips by itself or is wrapped already: set the thresholds in its param_groups."
        )


def _checked(settings: Mapping[str, Any], params: Sequence[Tensor] = (), at_step: bool = False) -> dict[str, Any]:
    """u, d and dead_zone as a checkpoint can hold them, with what "auto" has chosen, or a ValueError.

    At a step nothing waits for a device: thresholds there are checked by an assertion on the device.
    """
    values = {name: _number(name, settings[name]) for name in SETTINGS}
    chosen = {name: settings.get(name) for name in CHOSEN}
    lower = 0.0 if is_auto(values["d"]) else values["d"]
    plain = check_auto({**settings, **values, **chosen, "d": lower, "params": params, "scale": SCALE})
    check_thresholds(*(t.cpu() if isinstance(t := plain[name], Tensor) and not at_step else t for name in SETTINGS))
    for name, value in values.items():
        if isinstance(value, Tensor) and value.numel() > 1:
            for p in params:
                check_shape(name, value, p)
    return {**values, **chosen} if is_auto(values["u"]) else values


def _number(name: str, value: Any) -> Number | str:
    """A tensor as it is, a number of any library as a float: torch.load(weights_only=True) refuses numpy's."""
    if is_auto(value) and name != "dead_zone":
        return str(value)
    check_kind(name, value)
    return value if isinstance(value, Tensor) else float(value)


def _clips(group: Group) -> list[ClipByValue]:
    """How the parameters of a group are clipped: one entry for each, or one for all; during calibration not at all."""
    zone = _scalar(group["dead_zone"])
    if is_calibrating(group):
        return [ClipByValue(math.inf, 0.0, zone)]
    if is_auto(group["u"]):
        chosen = Thresholds.from_state(group["thresholds"])
        return [ClipByValue(u, d, zone) for u, d in zip(chosen.u, chosen.d, strict=True)]
    return [ClipByValue(_scalar(group["u"]), 0.0 if is_auto(group["d"]) else _scalar(group["d"]), zone)]


def _scalar(value: Number) -> Number:
    """One element is one threshold, whatever its number of dimensions."""
    return value.reshape(()) if isinstance(value, Tensor) and value.numel() == 1 else value


def _takes_kernel(g: Tensor) -> bool:
    """Whether the kernels of BiClip take a gradient: those that are sparse, differentiated or traced need `biclip`."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return g.layout == torch.strided and (g.is_floating_point() or g.is_complex())


def _loaded(group: Group, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The thresholds of a saved group, the live one's where it has none, on the device of the live ones."""
    chosen = {name: (saved if "u" in saved else group).get(name) for name in CHOSEN}

    def moved(name: str) -> Any:
        live, value = group[name], saved.get(name, group[name])
        anchor = live if isinstance(live, Tensor) else next(iter(group["params"]), None)
        return value.to(anchor.device) if isinstance(value, Tensor) and anchor is not None else value

    return _checked({**chosen, **{name: moved(name) for name in SETTINGS}}, group["params"])
