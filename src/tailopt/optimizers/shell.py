"""What BiClip and L2Clip share: groups that are checked before anything moves, gathering, policies, statistics.

The shell holds no arithmetic. It gathers parameters and gradients, validates, and hands batches to `clipping.update`.
`self.state` is never read here: it is a defaultdict, and reading would create entries.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

from tailopt.clipping.counts import Counts, StatisticsRecorder
from tailopt.clipping.dtensor import is_dtensor, local_pair
from tailopt.clipping.kernels.kernel import Batch
from tailopt.clipping.norms import nonfinite
from tailopt.clipping.operators import Number, check_kind, check_shape, check_thresholds, threshold_order
from tailopt.clipping.reference import Step
from tailopt.clipping.step_cache import StepCache
from tailopt.native.calls import DTYPES
from tailopt.optimizers.threshold_warning import warn_caller

POLICIES = ("propagate", "skip", "raise")
STATISTICS = {False: None, "counts": "counts", True: "sampled", "complete": "complete"}
Group = dict[str, Any]


class Shell(Optimizer):
    """The common part of the clipping optimizers; not public."""

    # Keys that a checkpoint of an earlier release may lack, with what their absence means.
    optional: ClassVar[Group] = {
        "weight_decay": 0.0,
        "nonfinite": "propagate",
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
    }

    # What `statistics()` says where nothing was counted.
    not_counted: ClassVar[str] = ""

    def __init__(self, params: Any, defaults: Group, statistics: bool | str = False) -> None:
        if statistics not in STATISTICS:
            raise ValueError(f'Invalid statistics: {statistics!r}; need False, "counts", True or "complete".')
        self._statistics = STATISTICS[statistics]
        defaults = {key: _plain(value) for key, value in defaults.items()}
        self.check(defaults)  # before the base looks at params: a bad lr is reported first
        super().__init__(params, defaults)
        self._ready()

    def _ready(self) -> None:
        """What is not saved, made anew for a new, unpickled or copied object."""
        self._recorder = StatisticsRecorder(self._statistics or "counts")
        self._cache = StepCache()
        self._settings = operator.itemgetter(*(key for key in self.defaults if key != "params"))
        self._checked: dict[int, tuple[Any, ...]] = {}  # settings of groups, by id
        self._made: dict[int, list[tuple[list[int] | None, Step]]] = {}  # what was made of them
        self._violations: dict[torch.device, Tensor] = {}
        self._warned_of_decay = False
        if self.defaults["fused"]:
            # Only where the constructor was asked for fused=True: with the flag a scaler leaves the unscaling to us.
            self._step_supports_amp_scaling = True

    def check(self, group: Group, params: Sequence[Tensor] = (), at_step: bool = False) -> None:
        """Raise for a group that cannot be used; at a step, thresholds on a device are counted and never waited for."""
        lr, weight_decay = group["lr"], group["weight_decay"]
        if isinstance(lr, Tensor):
            if lr.numel() != 1:
                raise ValueError(f"Tensor lr must be 1-element, got shape {tuple(lr.shape)}")
        elif not _is_number(lr) or not 0.0 <= lr < float("inf"):
            raise ValueError(f"Invalid learning rate: {lr!r}; need 0 <= lr < inf.")
        if not _is_number(weight_decay) or not 0.0 <= weight_decay < float("inf"):
            raise ValueError(f"Invalid weight_decay value: {weight_decay!r}; need 0 <= weight_decay < inf.")
        if group["nonfinite"] not in POLICIES:
            raise ValueError(f"Invalid nonfinite policy: {group['nonfinite']!r}; need one of {', '.join(POLICIES)}.")
        if group["fused"] and group["foreach"]:
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
        if group["fused"] and group["differentiable"]:
            raise RuntimeError("`fused` does not support `differentiable`")
        check_kind("u", group["u"])
        for name, low in self.lower_thresholds(group):
            check_kind(name, low)
            self._check_order(name, low, group["u"], at_step)
        for name in ("u", "d"):
            if isinstance(group[name], Tensor) and group[name].numel() > 1:
                for p in params:
                    check_shape(name, group[name], p)

    def lower_thresholds(self, group: Group) -> list[tuple[str, Number]]:
        """What must not exceed u, by name."""
        return [("d", group["d"])]

    def _check_order(self, name: str, low: Number, u: Number, at_step: bool) -> None:
        tensors = [t for t in (low, u) if isinstance(t, Tensor)]
        if all(t.is_cpu for t in tensors):
            check_thresholds(u, low if name == "d" else 0.0, low if name != "d" else 0.0)
            return
        ordered = threshold_order(low, u)
        if at_step:
            count = self._violations.setdefault(
                ordered.device, torch.zeros((), dtype=torch.int64, device=ordered.device)
            )
            count += ~ordered
        elif not ordered.is_meta and not bool(ordered):
            raise ValueError(f"Invalid thresholds: need 0 <= {name} <= u everywhere, got {name}={low}, u={u}.")

    def violations(self) -> int:
        """How many checks of thresholds on a device found d > u, a step at a time. Waits for the device."""
        return sum(int(count) for count in self._violations.values())

    # ---- groups ----

    def add_param_group(self, param_group: Group) -> None:
        if isinstance(param_group, dict) and "params" in param_group:
            merged = {**self.defaults, **{k: v if k == "params" else _plain(v) for k, v in param_group.items()}}
            if not isinstance(merged["params"], Tensor | list | set):
                merged["params"] = list(merged["params"])  # a generator can be walked once only
            tensors = [merged["params"]] if isinstance(merged["params"], Tensor) else merged["params"]
            named = (p[1] if isinstance(p, tuple) else p for p in tensors)
            self.check(merged, [p for p in named if isinstance(p, Tensor)])  # the base refuses what is not
            param_group = merged
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Checked before the base replaces the live groups: a refused dict leaves the optimizer as it was.
        for group in state["param_groups"]:
            for key, value in self.optional.items():
                group.setdefault(key, value)
            missing = [key for key in ("lr", "u", "d") if key not in group]
            if missing:
                raise ValueError(f"Invalid state dict for {type(self).__name__}: a group lacks {', '.join(missing)}.")
            group.update({k: _plain(v) for k, v in group.items() if k != "params"})
            for key in ("u", "d"):
                if isinstance(group[key], Tensor) and group[key].ndim and group["params"]:
                    group[key] = group[key].to(group["params"][0].device)
            self.check(group, group["params"])
        super().__setstate__(state)
        if "_recorder" not in self.__dict__:  # copied or unpickled, not merely loaded
            self.__dict__.setdefault("_statistics", None)
            self._ready()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_statistics": self._statistics}

    # ---- a step ----

    def _init_group(self, group: Group, params: list[Tensor], grads: list[Tensor]) -> bool:
        everyone = group["params"]
        found = [g for p in everyone if (g := p.grad) is not None]
        params += everyone if len(found) == len(everyone) else [p for p in everyone if p.grad is not None]
        grads += found
        return False

    def _gather(self) -> list[tuple[Group, list[Tensor], list[Tensor]]]:
        """Parameters that have gradients, by group, after everything that could refuse them has been asked."""
        tracing = torch.compiler.is_compiling()
        if not tracing:
            for group in self.param_groups:
                if not self._is_checked(group):
                    self._made.pop(id(group), None)
                    self.check(group, group["params"], at_step=True)
                    self._warn_of_decay(group)
                    settings = self._settings(group)
                    changeable = any(isinstance(value, Tensor) for value in settings)
                    self._checked[id(group)] = () if changeable else settings
            self._accelerator_graph_capture_health_check()
        gathered = []
        for group in self.param_groups:
            params: list[Tensor] = []
            grads: list[Tensor] = []
            self._init_group(group, params, grads)
            if group["fused"]:
                _check_fused(params, grads, type(self).__name__.lower())
            if group["capturable"] and not tracing:
                _check_capturable(params)
            gathered.append((group, params, grads))
        return gathered

    def _warn_of_decay(self, group: Group) -> None:
        """Once: a decay that leaves nothing of the weights, or turns them round. A learning rate on a device waits."""
        lr, weight_decay = group["lr"], group["weight_decay"]
        if self._warned_of_decay or not weight_decay or (isinstance(lr, Tensor) and not lr.is_cpu):
            return
        product = float(lr.detach() if isinstance(lr, Tensor) else lr) * weight_decay
        if product >= 1:
            self._warned_of_decay = True
            warn_caller(
                f"lr*weight_decay = {product:.4g} is 1 or more: a step multiplies every weight by 1 - lr*weight_decay "
                f"= {1 - product:.4g}. The decay is decoupled, as in AdamW: lower weight_decay, so that the product is "
                "what AdamW's was."
            )

    def _is_checked(self, group: Group) -> bool:
        """Whether every setting is the very object that was checked before, and none a tensor, which may change."""
        now, before = self._settings(group), self._checked.get(id(group), ())
        return len(now) == len(before) and all(map(operator.is_, now, before))

    def _unscale(self, gathered: Iterable[tuple[Group, list[Tensor], list[Tensor]]]) -> bool:
        """GradScaler's fused protocol: unscale the gradients in place; False where this step is to be left out."""
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if isinstance(found, Tensor) and found.item():  # the scaler's sum over no gradients is the number 0
            return False
        if scale is not None:
            inverse = scale.double().reciprocal().float()  # as the scaler forms it: both protocols give the same bits
            for _, _, grads in gathered:
                for g in grads:
                    (g._values() if g.is_sparse else g).mul_(inverse.to(g.device))
        return True

    def _refuse_nonfinite(
        self, batches: list[tuple[Group, Batch]], scope: Callable[[int, int], int]
    ) -> tuple[list[tuple[Group, Batch]], list[tuple[Tensor, Tensor, Tensor]]]:
        """The policies "skip" and "raise". scope(batch, i): tensors with the same answer stand or fall together.

        On the CPU a skipped tensor leaves its batch. On a device nothing may wait for the verdict: the tensor steps,
        and what it was is returned as (parameter, copy, verdict), for `restore`.
        """
        policies = [group["nonfinite"] for group, _ in batches]
        if policies.count("propagate") == len(policies):
            return batches, []
        everywhere = [(b, i) for b, (_, batch) in enumerate(batches) for i in range(len(batch.params))]
        concerned = {scope(b, i) for b, i in everywhere if policies[b] != "propagate"}
        places = [(b, i) for b, i in everywhere if scope(b, i) in concerned]
        if not places:
            return batches, []
        owners = [batches[b][1].params[i] for b, i in places]
        found = nonfinite(
            [local_pair(p, batches[b][1].grads[i])[1] for p, (b, i) in zip(owners, places, strict=True)], owners
        )
        slots, names = self._slots(), self.names()
        raising = {scope(b, i) for b, i in places if policies[b] == "raise"}
        strict = [k for k, (b, i) in enumerate(places) if scope(b, i) in raising]
        if strict and int(found[strict].sum()):
            named = [
                f"{names[slots[id(owners[k])]]!r}: {int(found[k])} of {owners[k].numel()}"
                for k in strict
                if int(found[k])
            ]
            raise FloatingPointError(
                f"Non-finite gradient elements in {', '.join(named)}. No parameter was moved. "
                'Look at the batch, or use nonfinite="skip".'
            )
        verdicts: dict[int, Tensor] = {}
        for k, (b, i) in enumerate(places):
            key = scope(b, i)
            verdicts[key] = verdicts[key] | (found[k] > 0) if key in verdicts else found[k] > 0
        dropped: set[tuple[int, int]] = set()
        kept = []
        for k, (b, i) in enumerate(places):
            if policies[b] != "skip":
                continue
            verdict = verdicts[scope(b, i)]
            self._recorder.skip(slots[id(owners[k])], len(names), verdict)
            if not verdict.is_cpu:
                kept.append((owners[k], owners[k].clone(), verdict))
            elif bool(verdict):
                dropped.add((b, i))
        result = []
        for b, (group, batch) in enumerate(batches):
            stay = [i for i in range(len(batch.params)) if (b, i) not in dropped]
            slots_left = [batch.slots[i] for i in stay] if batch.slots else ()
            params, grads_left = [batch.params[i] for i in stay], [batch.grads[i] for i in stay]
            result.append((group, Batch(params, grads_left, batch.step, slots_left)))
        return result, kept

    # ---- statistics ----

    def _slots(self) -> dict[int, int]:
        return {id(p): i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}

    def names(self) -> list[str | int]:
        """Every parameter's name, or its position where the optimizer was given no names."""
        result: list[str | int] = []
        for group in self.param_groups:
            result += group.get("param_names") or range(len(result), len(result) + len(group["params"]))
        return result

    def statistics(self, by: str = "tensor") -> dict[str | int, Counts]:
        """What the steps since the last call have counted, by parameter ("tensor") or by "group"; then start anew.

        Keys are parameter names where the optimizer was built from `named_parameters()`, else positions. Without
        `statistics=` nothing is counted but the steps that `nonfinite="skip"` left out, and where no group has that
        policy either, this raises a RuntimeError.
        """
        if by not in ("tensor", "group"):
            raise ValueError(f'Invalid by: {by!r}; need "tensor" or "group".')
        if self._statistics is None and not any(group["nonfinite"] == "skip" for group in self.param_groups):
            raise RuntimeError(self.not_counted)
        names = self.names()
        counts = self._recorder.take(len(names))
        if by == "tensor":
            return dict(zip(names, counts, strict=True))
        result: dict[str | int, Counts] = {}
        start = 0
        for i, group in enumerate(self.param_groups):
            end = start + len(group["params"])
            result[i] = sum(counts[start:end], Counts())
            start = end
        return result


def restore(kept: Iterable[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Give parameters whose gradient was not finite their value back, without waiting for the verdict."""
    for p, before, verdict in kept:
        p.copy_(torch.where(verdict, before, p))


def by_way(batches: Iterable[tuple[Group, Batch]]) -> dict[str, list[Batch]]:
    """Batches that are not empty, by the function of the optimizer's module that they go through."""
    ways: dict[str, list[Batch]] = {}
    for group, batch in batches:
        if batch.params:
            ways.setdefault(_way(group, batch.params), []).append(batch)
    return ways


def _way(group: Group, params: Sequence[Tensor]) -> str:
    """One of "single", "foreach", "multi" and "fused"."""
    if group["differentiable"]:
        return "single"
    if group["fused"]:
        return "fused"
    if group["foreach"] is not None:
        return "foreach" if group["foreach"] else "single"
    if torch.compiler.is_compiling():
        devices = _get_foreach_kernels_supported_devices()
        return "foreach" if params and all(p.device.type in devices for p in params) else "single"
    return "multi"


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and hasattr(value, "__float__")


def _plain(value: Any) -> Any:
    """A group's value as something a checkpoint can hold: numbers of other libraries become floats."""
    if value is None or isinstance(value, bool | str | Tensor | int | float | list | tuple | dict):
        # a numpy.float64 is a float too, and torch.load(weights_only=True) refuses it
        return float(value) if isinstance(value, float) else value
    return float(value) if hasattr(value, "__float__") else value


def _check_fused(params: Sequence[Tensor], grads: Sequence[Tensor], name: str) -> None:
    for p in params:
        device = (p.to_local() if is_dtensor(p) else p).device.type
        if device != "cpu" or p.dtype not in DTYPES:
            raise RuntimeError(
                "`fused=True` requires all the params to be floating point Tensors of supported devices: ['cpu'] "
                f"but got {p.dtype} on {device}. Leave `fused` unset."
            )
    if any(g.is_sparse for g in grads):
        raise RuntimeError(f"`_fused_{name}` does not support sparse gradients")


def _check_capturable(params: Sequence[Tensor]) -> None:
    from torch.optim.optimizer import _get_capturable_supported_devices

    devices = _get_capturable_supported_devices()
    if not all(p.device.type in devices for p in params):
        found = sorted({p.device.type for p in params})
        raise AssertionError(f"If capturable=True, params must be on supported devices: {devices}, not on {found}.")
