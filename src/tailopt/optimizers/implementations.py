"""The implementations that a param group can ask for: which one its tensors take, and what each of them refuses."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

from tailopt.clipping.dtensor import is_dtensor
from tailopt.clipping.kernels.kernel import StepGroup
from tailopt.clipping.kernels.triton_runtime import why_missing
from tailopt.native.calls import DTYPES
from tailopt.optimizers.groups import Group, GroupAndStep


def group_by_kernel(batches: Iterable[GroupAndStep]) -> dict[str, list[StepGroup]]:
    """Batches that are not empty, by the kind of kernel that their group asks for."""
    by_kind: dict[str, list[StepGroup]] = {}
    for group, batch in batches:
        if batch.params:
            by_kind.setdefault(_kernel_kind(group, batch.params), []).append(batch)
    return by_kind


def _kernel_kind(group: Group, params: Sequence[Tensor]) -> str:
    """One of "single", "foreach", "fused", and "multi" for the fastest that there is."""
    if group["differentiable"]:
        return "single"
    if group["fused"]:
        return "fused"
    if group["foreach"] is not None:
        return "foreach" if group["foreach"] else "single"
    if torch.compiler.is_compiling():  # the C kernel cannot be traced
        devices = _get_foreach_kernels_supported_devices()
        return "foreach" if params and all(p.device.type in devices for p in params) else "single"
    return "multi"


class KnownToFuse:
    """Checks of `fused=True`: parameters that were looked at in the last step of their group are not again."""

    def __init__(self) -> None:
        self._known: dict[int, Sequence[Tensor]] = {}  # by id of the group

    def check(self, group: Group, params: Sequence[Tensor], grads: Sequence[Tensor], name: str) -> None:
        """Raise for tensors that `fused=True` does not take, in the words of torch; name: of the optimizer."""
        known = self._known.get(id(group), ())
        if len(known) != len(params) or not all(map(operator.is_, known, params)):
            _check_fused(params)
            self._known[id(group)] = params
        if any(map(operator.attrgetter("is_sparse"), grads)):
            raise RuntimeError(f"`_fused_{name}` does not support sparse gradients")


def _check_fused(params: Sequence[Tensor]) -> None:
    for p in params:
        device = (p.to_local() if is_dtensor(p) else p).device
        missing = "" if device.type == "cpu" else why_missing(device)
        if missing or p.dtype not in DTYPES:
            raise RuntimeError(
                "`fused=True` requires all the params to be floating point Tensors of supported devices: "
                f"['cpu', 'cuda'] but got {p.dtype} on {device.type}{missing and ': '}{missing}. Leave `fused` unset."
            )


def check_capturable(params: Sequence[Tensor]) -> None:
    """Raise for parameters on a device that cannot capture a step."""
    from torch.optim.optimizer import _get_capturable_supported_devices

    devices = _get_capturable_supported_devices()
    if not all(p.device.type in devices for p in params):
        used = sorted({p.device.type for p in params})
        raise AssertionError(f"If capturable=True, params must be on supported devices: {devices}, not on {used}.")
