"""Muon on hidden matrices, and AdamW on everything else: embeddings, head, norms and biases.

    matrices   B <- momentum B + (1 - momentum) g,    O = NewtonSchulz((1 - momentum) g + momentum B)
               x <- x (1 - lr * weight_decay) - lr * shape factor * O
    the rest   AdamW with lr_adamw, and the same weight_decay

The step on matrices is torch.optim.Muon's own: Nesterov momentum, and five steps of the quintic iteration of Keller
Jordan's Muon in bf16, whatever the type of the parameter. The shape factor of a matrix [A, B] is sqrt(max(1, A/B)) with
adjust_lr_fn "original", and 0.2 sqrt(max(A, B)) with "match_rms_adamw". Nothing is claimed about how far a step moves.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import torch

from tailopt.clipping.step_cache import StepCache
from tailopt.rules.adam import ADAMW
from tailopt.rules.rule import Hyperparameters, ParamStates, Rule, Tensors, as_list
from tailopt.rules.torch_optim import torch_rule

ADJUST_LR_FNS = ("original", "match_rms_adamw")
# The usual names of what is no hidden matrix; parameters that are no matrices are AdamW's whatever they are called.
ADAMW_ON = ("*emb*", "*wte*", "*wpe*", "*shared*", "*head.*", "*classifier*", "*norm*", "*ln_*", "*bias*")
_MATRICES = torch_rule(torch.optim.Muon)


def on_adamw(patterns: str | Sequence[str], names: Sequence[str], dims: Sequence[int]) -> list[bool]:
    """Return for each parameter whether AdamW steps on it: its name fits a pattern, or it is no matrix.

    Args:
        dims: how many dimensions each parameter has.

    Raises:
        ValueError: no name fits a pattern, or nothing is left to Muon.

    Examples:
        >>> on_adamw(("wte.*", "*.bias"), ["wte.weight", "0.weight", "0.bias", "gain"], [2, 2, 1, 1])
        [True, False, True, True]
    """
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    named = [any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns) for name in names]
    found = [fits or n != 2 for fits, n in zip(named, dims, strict=True)]
    if not any(named):
        raise ValueError(
            f"Invalid adamw_on: {patterns}; no parameter fits, of {', '.join(names)}. Name the embeddings, the head "
            "and whatever else AdamW should step on. Where all are hidden matrices, take the class torch.optim.Muon."
        )
    if all(found):
        raise ValueError(
            f"Invalid adamw_on: {patterns}; nothing is left to Muon, which steps on parameters of two dimensions: "
            f"all of {', '.join(names)} fit, or have another number. Narrow the patterns, or take the inner rule adamw."
        )
    return found


def _muon(
    params: Tensors, grads: Tensors, states: ParamStates, hparams: Hyperparameters, cache: StepCache | None = None
) -> None:
    others = as_list(hparams["adamw_on"], len(params))
    matrices = {name: hparams[name] for name in ("lr", "weight_decay", "momentum", "adjust_lr_fn")}
    rest = {name: hparams[name] for name in ("eps", "betas", "weight_decay")}
    rest |= {"lr": hparams["lr_adamw"], "bias_correction": True}
    for rule, chosen, is_other in ((_MATRICES, matrices, False), (ADAMW, rest, True)):
        own = [i for i, other in enumerate(others) if other is is_other]
        if own:
            rule.step([params[i] for i in own], [grads[i] for i in own], [states[i] for i in own], chosen)


MUON = Rule(
    "muon",
    ("lr", "lr_adamw"),
    _muon,
    lambda hparams: None,
    {
        "eps": 1e-8,
        "betas": (0.9, 0.999),
        "weight_decay": 0.1,
        "momentum": 0.95,
        "adjust_lr_fn": "original",
        "adamw_on": ADAMW_ON,
    },
    ("momentum_buffer", "exp_avg", "exp_avg_sq"),  # the first of a matrix, the others of the rest
    needs_whole_tensors=True,
    by_parameter={"adamw_on": on_adamw},
)
