"""What BiClip and L2Clip share: the step, groups that are checked before anything moves, policies, statistics.

There is no arithmetic here. A step gathers parameters and gradients, validates, and passes batches to
`clipping.dispatch`. `self.state` is a defaultdict: only an optimizer that keeps state reads it, since that creates it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import _use_grad_for_differentiable

from tailopt.clipping.counts import Counts, StatisticsRecorder
from tailopt.clipping.dispatch import first_choice
from tailopt.clipping.dtensor import local_pair
from tailopt.clipping.kernels.kernel import StepGroup
from tailopt.clipping.norms import nonfinite
from tailopt.clipping.operators import Number, check_kind, check_shape, check_thresholds, threshold_order
from tailopt.clipping.step_cache import StepCache
from tailopt.optimizers.auto_thresholds import Observation, is_auto
from tailopt.optimizers.groups import CheckedGroups, Gathered, GatheredGroup, Group, GroupAndStep, ScopeOf
from tailopt.optimizers.implementations import KnownToFuse, check_capturable, group_by_kernel
from tailopt.optimizers.nonfinite_policies import POLICIES, raise_for_nonfinite, shared_by_scope, skip_where
from tailopt.optimizers.rounding_steps import count_rounding
from tailopt.optimizers.threshold_warning import ThresholdCheck, warn_caller

STATISTICS = {False: None, "counts": "counts", True: "sampled", "complete": "complete"}


class Released(Protocol):
    """What takes the place of the body of `step` while gradients are released (`gradient_release`)."""

    def finish_step(self, closure: Callable[[], Any] | None) -> None:
        """Finish the step whose updates ran inside backward."""

    def check_no_step_is_pending(self, name: str) -> None:
        """Raise for a call by this name in the middle of such a step."""


class ClippingOptimizer(Optimizer):
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
        defaults = {key: _plain_value(value) for key, value in defaults.items()}
        self.check(defaults)  # before the base looks at params: a bad lr is reported first
        super().__init__(params, defaults)
        self._init_runtime()

    def _init_runtime(self) -> None:
        """Set up what is not saved; a new, an unpickled and a copied object start with it empty."""
        self._recorder = StatisticsRecorder(self._statistics or "counts")
        self._step_cache = StepCache()
        self._look_cache = StepCache()
        self._known_to_fuse = KnownToFuse()
        self._checked_groups = CheckedGroups(key for key in self.defaults if key != "params")
        self._violations: dict[torch.device, Tensor] = {}  # by device, counted where the thresholds are
        self._warned_of_decay = False
        self._threshold_check: ThresholdCheck | None = None
        self._released: Released | None = None  # set while updates run inside backward
        if self.defaults["fused"]:
            # Only if the constructor got fused=True: with this flag a GradScaler leaves the unscaling to us.
            self._step_supports_amp_scaling = True

    def check(self, group: Group, params: Sequence[Tensor] = (), at_step: bool = False) -> None:
        """Raise for a group that cannot be used. At a step, violations on a device are counted, and nothing waits."""
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
        """How many steps found d > u among thresholds on a device. Waits for the device."""
        return sum(int(count) for count in self._violations.values())

    # ---- groups ----

    def add_param_group(self, param_group: Group) -> None:
        """Add a group as torch does, after its settings and parameters have been validated."""
        if isinstance(param_group, dict) and "params" in param_group:
            merged = {**self.defaults, **{k: v if k == "params" else _plain_value(v) for k, v in param_group.items()}}
            if not isinstance(merged["params"], Tensor | list | set):
                merged["params"] = list(merged["params"])  # a generator can be read only once
            tensors = [merged["params"]] if isinstance(merged["params"], Tensor) else merged["params"]
            named = (p[1] if isinstance(p, tuple) else p for p in tensors)
            self.check(merged, [p for p in named if isinstance(p, Tensor)])  # the base class raises for anything else
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
            group.update({k: _plain_value(v) for k, v in group.items() if k != "params"})
            for key in ("u", "d"):
                if isinstance(group[key], Tensor) and group[key].ndim and group["params"]:
                    group[key] = group[key].to(group["params"][0].device)
            self.check(group, group["params"])
        super().__setstate__(state)
        if "_recorder" not in self.__dict__:  # copied or unpickled, not merely loaded
            self.__dict__.setdefault("_statistics", None)
            self._init_runtime()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_statistics": self._statistics}

    # ---- a step ----

    def _init_group(
        self,
        group: Group,
        params: list[Tensor],
        grads: list[Tensor],
        momenta: list[Tensor],
        step_counts: list[Tensor],
    ) -> bool:
        """Append the group's parameters that have gradients, the gradients, and their momenta, where it has momentum.

        The name and the returned flag (in torch: whether a gradient is of a special kind) are torch's, because
        torch.compile calls this method by name.
        """
        group_params = group["params"]
        group_grads = [g for p in group_params if (g := p.grad) is not None]
        complete = len(group_grads) == len(group_params)
        group_params = group_params if complete else [p for p in group_params if p.grad is not None]
        params += group_params
        grads += group_grads
        if group.get("momentum"):
            self._append_momenta(group, group_params, group_grads, momenta, step_counts)
        return False

    def _append_momenta(
        self,
        group: Group,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        momenta: list[Tensor],
        step_counts: list[Tensor],
    ) -> None:
        """Append the momenta of these parameters of a group, and how many steps each of them has taken."""

    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; returns what the closure returned."""
        if self._released is not None:
            self._released.finish_step(closure)
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gathered = self._gather()
        skips = self._unscale(gathered)
        if skips is True:
            return loss
        batches, scope_of = self._batches(gathered)
        self._look_at_thresholds(batches)
        batches = self._refuse_nonfinite(batches, scope_of)
        if isinstance(skips, Tensor):
            batches = [(group, skip_where(batch, skips)) for group, batch in batches]
        if self._statistics is not None:
            self._recorder.begin_pass(len(self.names()))
        self._run_batches(batches)
        self._after_step(gathered)
        return loss

    def _run_batches(self, batches: Sequence[GroupAndStep]) -> None:
        """Take the step of these batches, and count on the way where statistics were asked for."""
        recorder = self._recorder if self._statistics is not None else None
        for kind, same_kind in group_by_kernel(batches).items():
            self._run(kind, same_kind, recorder)

    @abstractmethod
    def _batches(self, gathered: Gathered) -> tuple[list[GroupAndStep], ScopeOf]:
        """Tensors that take the same step, with their group; and the scope in which a non-finite element counts."""

    @abstractmethod
    def _run(self, kind: str, batches: Sequence[StepGroup], recorder: StatisticsRecorder | None) -> None:
        """Take the step of batches that go through the same function of the optimizer's module."""

    def _look_at_thresholds(self, batches: Sequence[GroupAndStep]) -> None:
        """Warn of thresholds that do nothing, in the steps in which they are looked at."""
        if not torch.compiler.is_compiling() and self._threshold_check is not None and self._threshold_check.due():
            self._look_at_part(batches)
            self._threshold_check.report()

    def _look_at_part(self, batches: Sequence[GroupAndStep]) -> None:
        """Look at some batches of a step in which the thresholds are looked at."""

    def _after_step(self, gathered: Gathered) -> None:
        """Count a step that was taken, and show its gradients to the groups whose thresholds follow them."""
        count_rounding(self.param_groups)
        for group in self.param_groups:
            if is_auto(group["u"]):
                self._observe_step(gathered)
                break

    @torch.no_grad()  # thresholds are constants of a differentiable step
    @_disable_dynamo  # thresholds are plain numbers that change: a compiled step is traced again when they do
    def _observe_step(self, gathered: Gathered) -> None:
        observation = Observation()
        self._observe(gathered, observation)
        observation.settle()

    @abstractmethod
    def _observe(self, gathered: Gathered, observation: Observation) -> None:
        """Add what a step, or a part of it, has shown to the groups with u="auto"."""

    def _check_groups(self) -> None:
        """Raise for settings that cannot be used, before anything moves."""
        for group in self.param_groups:
            if group not in self._checked_groups:
                self.check(group, group["params"], at_step=True)
                self._warn_of_decay(group)
                self._checked_groups.add(group)
        self._accelerator_graph_capture_health_check()

    def _gather(self) -> Gathered:
        """Parameters that have gradients, by group, after every check that could refuse them."""
        if not torch.compiler.is_compiling():
            self._check_groups()
        gathered = []
        for group in self.param_groups:
            params: list[Tensor] = []
            grads: list[Tensor] = []
            momenta: list[Tensor] = []
            step_counts: list[Tensor] = []
            self._init_group(group, params, grads, momenta, step_counts)
            self._check_implementation(group, params, grads)
            gathered.append(GatheredGroup(group, params, grads, momenta, step_counts, []))
        return gathered

    def _check_implementation(self, group: Group, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Raise for tensors that the implementation which the group asks for does not take."""
        if group["fused"]:
            self._known_to_fuse.check(group, params, grads, type(self).__name__.lower())
        if group["capturable"] and not torch.compiler.is_compiling():
            check_capturable(params)

    def _warn_of_decay(self, group: Group) -> None:
        """Warn once of a decay that erases the weights or flips their signs; an lr on a device is not read."""
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

    def _unscale(self, gathered: Gathered) -> Tensor | bool:
        """GradScaler's fused protocol: unscale the gradients in place; whether this step is to be skipped.

        A bool on the device where only the device knows: then nothing is unscaled where the step is to be skipped.
        """
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        skips: Tensor | bool = False
        if isinstance(found_inf, Tensor):  # the scaler's sum over no gradients is the number 0
            skips = found_inf.reshape(()) != 0 if self._can_skip_on_device(found_inf.device) else bool(found_inf.item())
        if scale is not None and skips is not True:
            inverse = scale.double().reciprocal().float()  # as the scaler forms it: both protocols give the same bits
            inverse = torch.where(skips, 1.0, inverse) if isinstance(skips, Tensor) else inverse
            for gathered_group in gathered:
                for g in gathered_group.grads:
                    (g._values() if g.is_sparse else g).mul_(inverse.to(g.device))
        return skips

    def _can_skip_on_device(self, device: torch.device) -> bool:
        """Whether the host need not know if this step counts: it counts nothing itself."""
        return (
            self._statistics is None
            and all(group["fused"] and first_choice(device, "fused") == "triton" for group in self.param_groups)
            and not any(isinstance(group["u"], str) for group in self.param_groups)
            and all(group["capturable"] for group in self.param_groups if group.get("momentum"))
        )

    def _refuse_nonfinite(self, batches: list[GroupAndStep], scope_of: ScopeOf) -> list[GroupAndStep]:
        """The policies "skip" and "raise"; tensors of one scope are skipped together.

        On the CPU a skipped tensor leaves its batch. On a device nothing may wait for the verdict, which
        goes with the batch.
        """
        policies = [group["nonfinite"] for group, _ in batches]
        if policies.count("propagate") == len(policies):
            return batches
        all_places = [(b, i) for b, (_, batch) in enumerate(batches) for i in range(len(batch.params))]
        concerned = {scope_of(b, i) for b, i in all_places if policies[b] != "propagate"}
        places = [(b, i) for b, i in all_places if scope_of(b, i) in concerned]
        if not places:
            return batches
        owners = [batches[b][1].params[i] for b, i in places]
        local_grads = [local_pair(p, batches[b][1].grads[i])[1] for p, (b, i) in zip(owners, places, strict=True)]
        counts = nonfinite(local_grads, owners, self._look(local_grads))
        scopes = [scope_of(b, i) for b, i in places]
        raising = {scope for (b, _), scope in zip(places, scopes, strict=True) if policies[b] == "raise"}
        strict = [k for k, scope in enumerate(scopes) if scope in raising]
        raise_for_nonfinite(strict, owners, counts, self._names_by_id)
        bad = shared_by_scope(counts > 0, scopes)
        slots, n_slots = self._slots(), len(self.names())
        start, decided = 0, []
        in_batch = Counter(b for b, _ in places)  # all parameters of a batch, or none
        for b, (group, batch) in enumerate(batches):
            end = start + in_batch[b]
            if policies[b] == "skip" and start < end:
                verdicts = bad[start:end]
                self._recorder.skip([slots[id(p)] for p in owners[start:end]], n_slots, verdicts)
                if verdicts.is_cpu:
                    batch = batch.only([i for i, verdict in enumerate(verdicts.tolist()) if not verdict])
                else:
                    batch = batch._replace(skips=verdicts)
            decided.append((group, batch))
            start = end
        return decided

    def _look(self, grads: Sequence[Tensor]) -> StepCache | None:
        """What the Triton kernel keeps of gradients between steps, where it is to look at them."""
        if torch.compiler.is_compiling() or not grads:
            return None
        kernel = "fused" if all(group["fused"] for group in self.param_groups) else None
        return self._look_cache if first_choice(grads[0].device, kernel) == "triton" else None

    # ---- statistics ----

    def _slots(self) -> dict[int, int]:
        """The position of every parameter in the optimizer, by its id."""
        return {id(p): i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}

    def names(self) -> list[str | int]:
        """Every parameter's name, or its position if the optimizer was built without names."""
        result: list[str | int] = []
        for group in self.param_groups:
            result += group.get("param_names") or range(len(result), len(result) + len(group["params"]))
        return result

    def _names_by_id(self) -> dict[int, str | int]:
        names = self.names()
        return {key: names[slot] for key, slot in self._slots().items()}

    def statistics(self, by: str = "tensor") -> dict[str | int, Counts]:
        """What the steps since the last call have counted, by parameter ("tensor") or by "group"; then start again.

        Keys are parameter names where the optimizer was built from `named_parameters()`, else positions. Without
        `statistics=` only the steps that `nonfinite="skip"` skipped are counted, and if no group has that policy
        either, this raises a RuntimeError.
        """
        if by not in ("tensor", "group"):
            raise ValueError(f'Invalid by: {by!r}; need "tensor" or "group".')
        if self._statistics is None and not any(group["nonfinite"] == "skip" for group in self.param_groups):
            raise RuntimeError(self.not_counted)
        if self._released is not None:
            self._released.check_no_step_is_pending("statistics()")
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


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and hasattr(value, "__float__")


def _plain_value(value: Any) -> Any:
    """A group's value as something a checkpoint can hold: numbers of other libraries become floats."""
    if value is None or isinstance(value, bool | str | Tensor | int | float | list | tuple | dict):
        # a numpy.float64 is a float too, and torch.load(weights_only=True) refuses it
        return float(value) if isinstance(value, float) else value
    return float(value) if hasattr(value, "__float__") else value
