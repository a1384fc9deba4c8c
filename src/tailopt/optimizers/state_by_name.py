"""Optimizer checkpoints keyed by parameter names, for optimizers with and without state, in any order.

`torch.distributed.checkpoint.state_dict` finds its way by the names in the state, and an optimizer like BiClip has no
state: a full dict does not load, two optimizers or a mix of AdamW and BiClip raise, and groups in another order
silently exchange their learning rates. It also allocates a gradient for every parameter and takes a step to look at
the state. Here the groups carry the names, a group is recognised by its set of names, and nothing is stepped:

    {"format": 1,
     "groups": ({"params": ["0.weight", "0.bias"], "lr": 0.1, ...}, ...),       the settings of each group
     "layout": (("2.weight", "exp_avg", (4, 3), "float32"), ...),               what the state is made of
     "state":  {"2.weight": {"exp_avg": tensor, ...}, ...}}                     nothing for stateless optimizers

Not here: weights (`model.state_dict()`), schedulers, FSDP1 (its flat shards have a format of their own,
`FullyShardedDataParallel.optim_state_dict`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tailopt.clipping.dtensor import is_dtensor

FORMAT = 1

_Layout = tuple[tuple[str, str, tuple[int, ...] | None, str | None], ...]
_Copies = dict[tuple[int, torch.device], Tensor]

# Attributes under which wrappers keep the model: torch.compile, DDP, activation checkpointing, FSDP1.
_WRAPPED = frozenset({"_orig_mod", "module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


class NamedState(TypedDict):
    """What `named_state_dict` returns: plain values and tensors.

    `groups` and `layout` are tuples because torch.distributed.checkpoint stores a tuple whole. A list of dicts it
    takes apart by position, and would fill the first group of a template with the first group of the file.
    """

    format: int
    groups: tuple[dict[str, Any], ...]
    layout: _Layout
    state: dict[str, dict[str, Any]]


def named_state_dict(
    model: nn.Module, optimizers: Optimizer | Iterable[Optimizer], *, like: Mapping[str, Any] | None = None
) -> NamedState:
    """The settings and the state of one or several optimizers over `model`, by parameter name.

    Names are those of the bare model, whatever wraps it (torch.compile, DDP, activation checkpointing). Groups without
    parameters have no name and are left out. State tensors are the optimizer's own, not copies, as in torch.

    The dict goes through `torch.save`, an object broadcast or `torch.distributed.checkpoint` (DTensors of FSDP2 stay
    sharded). `dcp.load` fills a template in place, and the template must have room for the state in the file:

    - stateless optimizers, or such that have stepped: `named_state_dict(model, optimizers)` is the template (and
      dcp.load writes into their state at once);
    - otherwise (a fresh AdamW): load `head = dict.fromkeys(("format", "groups", "layout"))` first, then
      `named_state_dict(model, optimizers, like=head)` is a template with zeros wherever the file has state.

    Examples:
        >>> import tailopt
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(1, 1, bias=False))
        >>> groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.2}]
        >>> state = tailopt.named_state_dict(model, tailopt.BiClip(groups, lr=0.1, u=1.0, d=0.5))
        >>> [(group["params"], group["lr"]) for group in state["groups"]]
        [(['0.weight', '0.bias'], 0.1), (['1.weight'], 0.2)]
    """
    several = _as_tuple(optimizers)
    parameters = dict(_named_parameters(model))
    names = _names_by_group(parameters, several)
    if like is not None:
        head = _renamed(like, parameters)
        _check_groups(head, names)
        head["state"] = _zeros(head["layout"], parameters)
        return head
    groups: list[dict[str, Any]] = []
    state: dict[str, dict[str, Any]] = {}
    copies: _Copies = {}
    for optimizer, names_of_groups in zip(several, names, strict=True):
        packed = optimizer.state_dict()
        for group, its_names in zip(packed["param_groups"], names_of_groups, strict=True):
            if its_names:
                # On the CPU: a device of one machine or rank means nothing on another.
                values = {key: _moved(value, torch.device("cpu"), copies) for key, value in _settings(group).items()}
                groups.append({"params": list(dict.fromkeys(its_names)), **values})
        state |= _state_by_name(packed["state"], list(chain.from_iterable(names_of_groups)))
    return {"format": FORMAT, "groups": tuple(groups), "layout": _layout(state), "state": state}


def load_named_state_dict(
    model: nn.Module, optimizers: Optimizer | Iterable[Optimizer], state: Mapping[str, Any]
) -> None:
    """Load what `named_state_dict` returned into optimizers over `model`, groups matched by their parameter names.

    The order of groups, of optimizers and of parameters within a group does not matter; the sets of names must be
    those that were saved. Settings that an older file lacks, and groups without parameters, keep the values they have.
    Tensor settings go to the device of the setting they replace, or of the parameters. Where a parameter is a DTensor,
    a full state tensor is cut to its shards. Tensors of the state are taken over, not copied, as in torch.

    Everything is checked first, and an error leaves all the optimizers as they were.

    Examples:
        >>> import tailopt
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(1, 1, bias=False))
        >>> adamw = torch.optim.AdamW(model[0].parameters(), lr=0.1)
        >>> biclip = tailopt.BiClip(model[1].parameters(), lr=0.2, u=1.0, d=0.5)
        >>> state = tailopt.named_state_dict(model, [adamw, biclip])
        >>> biclip.param_groups[0]["lr"] = adamw.param_groups[0]["lr"] = 1.0
        >>> tailopt.load_named_state_dict(model, [biclip, adamw], state)
        >>> biclip.param_groups[0]["lr"], adamw.param_groups[0]["lr"]
        (0.2, 0.1)
    """
    several = _as_tuple(optimizers)
    parameters = dict(_named_parameters(model))
    names = _names_by_group(parameters, several)
    saved = _renamed(state, parameters)
    _check_groups(saved, names)
    _check_state(saved)
    settings = {frozenset(group["params"]): _settings(group) for group in saved["groups"]}
    orders = {frozenset(group["params"]): group["params"] for group in saved["groups"]}
    entries = {
        name: {key: _cut(value, parameters[name]) for key, value in entry.items()}
        for name, entry in saved["state"].items()
    }
    copies: _Copies = {}
    packed = [
        _packed(optimizer, its_names, settings, orders, entries, copies)
        for optimizer, its_names in zip(several, names, strict=True)
    ]
    before = [{"state": optimizer.state, "param_groups": optimizer.param_groups} for optimizer in several]
    try:
        for optimizer, state_dict in zip(several, packed, strict=True):
            optimizer.load_state_dict(state_dict)
    except Exception:
        # An optimizer may refuse a value after its neighbour has loaded. Loading replaces these two, never fills them.
        for optimizer, old in zip(several, before, strict=True):
            optimizer.__setstate__(old)
        raise


def _as_tuple(optimizers: Optimizer | Iterable[Optimizer]) -> tuple[Optimizer, ...]:
    """One or several optimizers as a tuple."""
    return tuple(_bare(o) for o in ((optimizers,) if isinstance(optimizers, Optimizer) else optimizers))


def _bare(optimizer: Optimizer) -> Optimizer:
    """The optimizer in a wrapper of Accelerate or Lightning; what is loaded into Lightning's stays in the wrapper."""
    inner = getattr(optimizer, "optimizer", None)
    if not isinstance(inner, Optimizer):
        return optimizer
    # An optimizer with groups or state beside the inner one's, such as a lookahead, is more than a wrapper.
    only_wraps = inner.param_groups is optimizer.param_groups and inner.state is optimizer.state
    return _bare(inner) if only_wraps else optimizer


def _named_parameters(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every name of every parameter, tied ones under each of theirs, as if nothing wrapped the model.

    A wrapper has one child and no parameters of its own, so leaving its name out cannot make two names equal; a
    submodule that is merely called `module` beside others keeps it.
    """
    parameters = [(name, p) for name, p in module._parameters.items() if p is not None]
    children = [(name, child) for name, child in module._modules.items() if child is not None]
    for name, p in parameters:
        yield prefix + name, p
    for name, child in children:
        wrapped = name in _WRAPPED and len(children) == 1 and not parameters
        yield from _named_parameters(child, prefix if wrapped else f"{prefix}{name}.")


def _first_names(parameters: Mapping[str, Tensor]) -> dict[Tensor, str]:
    """One name per parameter: the first, if it is tied."""
    names: dict[Tensor, str] = {}
    for name, p in parameters.items():
        names.setdefault(p, name)
    return names


def _names_by_group(parameters: Mapping[str, Tensor], optimizers: Sequence[Optimizer]) -> list[list[list[str]]]:
    """The parameter names of each group of each optimizer, in the optimizer's order."""
    names = _first_names(parameters)
    seen: dict[str, int] = {}
    for i, optimizer in enumerate(optimizers):
        for j, group in enumerate(optimizer.param_groups):
            for k, p in enumerate(group["params"]):
                if p not in names:
                    raise ValueError(
                        f"Parameter {k} of group {j} of optimizer {i} ({type(optimizer).__name__}), of shape "
                        f"{tuple(p.shape)}, is not in the model, which has {_some(names.values())}. Pass the model "
                        "that owns it, and make optimizers after fully_shard or anything else that replaces parameters."
                    )
                if seen.setdefault(names[p], i) != i:
                    raise ValueError(
                        f"Parameter {names[p]!r} is in optimizers {seen[names[p]]} and {i}, and can have one entry. "
                        "Save these optimizers in separate dicts."
                    )
    return [[[names[p] for p in group["params"]] for group in optimizer.param_groups] for optimizer in optimizers]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters. `param_names` is left to the live group: the names here are the model's."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _moved(value: Any, device: torch.device, copies: _Copies) -> Any:
    """A setting with its tensors copied to `device`; one tensor that several groups share stays one."""
    if isinstance(value, Tensor):
        if (id(value), device) not in copies:
            copies[id(value), device] = value.detach().to(device, copy=True)
        return copies[id(value), device]
    if type(value) in (tuple, list):  # tensor betas
        return type(value)(_moved(v, device, copies) for v in value)
    if type(value) is dict:  # what u="auto" has counted
        return {key: _moved(v, device, copies) for key, v in value.items()}
    return value


def _state_by_name(packed: Mapping[Any, dict[str, Any]], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """State entries that are not empty; reading `optimizer.state[p]` is enough to create an empty one."""
    if foreign_keys := [key for key in packed if not isinstance(key, int)]:
        raise ValueError(
            f"The optimizer's state has keys that belong to no parameter: {_some(map(str, foreign_keys))}. State is "
            "saved by parameter name; save this optimizer's own state_dict() instead."
        )
    return {names[index]: dict(entry) for index, entry in packed.items() if entry}


def _layout(state: Mapping[str, Mapping[str, Any]]) -> _Layout:
    """Name, key, shape and type of every state value; no shape and no type for what is not a tensor."""
    return tuple(
        (name, key, tuple(value.shape), str(value.dtype).removeprefix("torch."))
        if isinstance(value, Tensor)
        else (name, key, None, None)
        for name, entry in state.items()
        for key, value in entry.items()
    )


def _zeros(layout: _Layout, parameters: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Zeros for every tensor of a layout, sharded like the parameter if they have its shape."""
    state: dict[str, dict[str, Any]] = {}
    for name, key, shape, dtype in layout:
        p = parameters[name]
        value: Tensor | None = None
        if shape is not None and dtype is not None:
            kind: torch.dtype = getattr(torch, dtype)
            if p.ndim > 0 and tuple(p.shape) == tuple(shape):
                value = torch.zeros_like(p, dtype=kind, requires_grad=False)
            else:  # such as a step count, which torch keeps on the CPU; loading moves what belongs elsewhere
                value = torch.zeros(shape, dtype=kind)
        state.setdefault(name, {})[key] = value
    return state


def _renamed(state: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> NamedState:
    """A checkpoint that this version can read, in the model's names: tied parameters may be saved by another one."""
    if missing := [key for key in ("format", "groups", "layout") if state.get(key) is None]:
        raise ValueError(
            f"Not a named_state_dict: no {_some(missing)} among its keys {_some(map(str, state))}. A dict of torch's "
            "own optimizer.state_dict() is loaded with optimizer.load_state_dict()."
        )
    if state["format"] > FORMAT:
        raise ValueError(
            f"The checkpoint has format {state['format']}, this tailopt reads formats up to {FORMAT}. "
            "Upgrade tailopt-torch."
        )
    first = _first_names(parameters)
    ours = {name: first[p] for name, p in parameters.items()}
    return {
        "format": state["format"],
        "groups": tuple({**group, "params": [ours.get(n, n) for n in group["params"]]} for group in state["groups"]),
        "layout": tuple((ours.get(name, name), key, shape, dtype) for name, key, shape, dtype in state["layout"]),
        "state": {ours.get(name, name): entry for name, entry in (state.get("state") or {}).items() if entry},
    }


def _check_groups(saved: NamedState, names: Sequence[Sequence[Sequence[str]]]) -> None:
    """Raise for a checkpoint whose parameters, or whose partition of them, are not the optimizers'."""
    groups = [group["params"] for group in saved["groups"]]
    saved_names = Counter(chain.from_iterable(groups))
    live = [set(group) for groups_of_one in names for group in groups_of_one if group]
    live_names = set().union(*live)
    if absent := live_names - saved_names.keys():
        raise ValueError(
            f"The checkpoint has no entry for {_some(absent)}; it was saved for {_some(saved_names)}. Give the "
            "optimizers the parameters that were saved, and add new ones with add_param_group after loading."
        )
    if unknown := (saved_names.keys() | saved["state"].keys() | {name for name, *_ in saved["layout"]}) - live_names:
        raise ValueError(
            f"The checkpoint has entries for {_some(unknown)}, which no optimizer here holds; they hold "
            f"{_some(live_names)}. Pass all the optimizers that were saved together, over the same parameters."
        )
    if repeated := [name for name, times in saved_names.items() if times > 1]:
        raise ValueError(
            f"The checkpoint has more than one entry for {_some(repeated)}. Tie the parameters as they were tied "
            "when it was saved."
        )
    for group in live:
        parts = [set(other) for other in groups if group & set(other)]
        if parts != [group]:
            raise ValueError(
                f"Parameter groups were split or merged: {_some(group)} is one group here, the checkpoint has "
                f"{' and '.join(_some(part) for part in parts)}. Group them as saved, load, and regroup afterwards."
            )


def _check_state(saved: NamedState) -> None:
    """Raise for a checkpoint that lost state on its way: dcp.load reads only what its template has room for."""
    lost = [f"{name}.{key}" for name, key, *_ in saved["layout"] if key not in saved["state"].get(name, {})]
    if lost:
        raise ValueError(
            f"The checkpoint was saved with state that is not here: {_some(lost)}. If it came from dcp.load, the "
            "template had no room for it: make one with named_state_dict(model, optimizers, like=head), where head "
            "has the checkpoint's format, groups and layout."
        )


def _cut(value: Any, p: Tensor) -> Any:
    """A full state tensor cut to the shards of its parameter; every rank has it whole, so nothing is sent."""
    if not is_dtensor(p) or not isinstance(value, Tensor) or is_dtensor(value) or value.shape != p.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(p.device), p.device_mesh, p.placements, src_data_rank=None)


def _packed(
    optimizer: Optimizer,
    names: Sequence[Sequence[str]],
    settings: Mapping[frozenset[str], Mapping[str, Any]],
    orders: Mapping[frozenset[str], Sequence[str]],
    entries: Mapping[str, dict[str, Any]],
    copies: _Copies,
) -> dict[str, Any]:
    """The dict that `optimizer.load_state_dict` takes: settings by group, state by the parameter's number."""
    groups: list[dict[str, Any]] = []
    numbers: dict[str, int] = {}
    for group, its_names in zip(optimizer.param_groups, names, strict=True):
        live = _settings(group)
        loaded = {
            key: _moved(value, _device(live.get(key), group["params"]), copies)
            for key, value in settings.get(frozenset(its_names), {}).items()
        }
        if loaded.get("thresholds") is not None or loaded.get("calibration") is not None:
            _check_order(its_names, orders.get(frozenset(its_names), its_names))
        ids = [numbers.setdefault(name, len(numbers)) for name in its_names]
        groups.append({**live, **loaded, "params": ids})
    state = {number: entries[name] for name, number in numbers.items() if name in entries}
    return {"state": state, "param_groups": groups}


def _check_order(names: Sequence[str], saved: Sequence[str]) -> None:
    """Raise where thresholds with an entry for each parameter would go to other parameters."""
    if list(names) != list(saved):
        raise ValueError(
            f"The checkpoint has thresholds for {_some(saved)} in another order than the optimizer's group. Build the "
            "optimizer with the parameters in the order in which they were saved."
        )


def _device(live: Any, params: Sequence[Tensor]) -> torch.device:
    """Where a loaded tensor setting belongs: where its predecessor is, or with the parameters."""
    tensors = [t for t in (live if isinstance(live, (tuple, list)) else (live,)) if isinstance(t, Tensor)]
    return next((t.device for t in (*tensors, *params)), torch.device("cpu"))


def _some(names: Iterable[str], limit: int = 6) -> str:
    """Names for a message: sorted, the first few, and how many more."""
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return "{" + ", ".join(map(repr, ordered[:limit])) + "}" + more
