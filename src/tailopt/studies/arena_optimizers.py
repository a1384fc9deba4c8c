"""The optimizers of the study `arena`: what each is, where it comes from, and the rates that it is first tried with.

Nothing is written here: torch's own, other people's packages (the extra `arena`), and this library's. All have the same
warm-up and cosine, and no weight decay. Betas are 0.9 and 0.95, as is usual for large batches; AdamW is there with
0.999 too, because small batches need a longer memory of the second moment (arXiv 2507.07101). Muon steps on hidden
matrices with the rate of the AdamW that has the rest, as "match_rms_adamw" allows.

    rates      10^(k/2) for five consecutive k, around `middle`
    state      bytes that an optimizer keeps beside the weights, counted in its tensors, whoever holds them
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tailopt.arguments import did_you_mean
from tailopt.optimizers.biclip import BiClip
from tailopt.optimizers.clipped import Clipped
from tailopt.optimizers.l2clip import L2Clip
from tailopt.optional import require
from tailopt.rules.muon import ADAMW_ON, on_adamw

BETAS, SLOW_BETAS = (0.9, 0.95), (0.9, 0.999)
MOMENTUM = 0.9
Build = Callable[[torch.nn.Module, float], Sequence[Optimizer]]


@dataclass(frozen=True)
class Contender:
    """One optimizer.

    Attributes:
        name: as tables call it.
        source: the package that it comes from.
        build: (model, learning rate) -> its optimizers; several where parameters are split among them.
        middle: the middle one of the first five rates is 10^(middle / 2).
        ours: whether it is this library's.
        decays: whether its rate follows the cosine after the warm-up; schedule-free ones keep theirs.
        module: what has to be importable; empty for torch's and ours.
        settings: what is set besides the rate, in words.
    """

    name: str
    source: str
    build: Build = field(repr=False)
    middle: int
    ours: bool = False
    decays: bool = True
    module: str = ""
    settings: str = ""

    @property
    def is_installed(self) -> bool:
        """Whether it can be run here."""
        return not self.module or importlib.util.find_spec(self.module) is not None

    def rate(self, k: float) -> float:
        """The k-th rate of the lattice.

        Examples:
            >>> CONTENDERS["adamw"].rate(-6), round(CONTENDERS["adamw"].rate(-5), 5)
            (0.001, 0.00316)
        """
        return float(f"{10 ** (k / 2):.6g}")


# --- Torch's ----------------------------------------------------------------------------------------------------------


def _adamw(model: torch.nn.Module, rate: float) -> Sequence[Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=rate, betas=BETAS, weight_decay=0.0)]


def _adamw_slow(model: torch.nn.Module, rate: float) -> Sequence[Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=rate, betas=SLOW_BETAS, weight_decay=0.0)]


def _sgd(model: torch.nn.Module, rate: float) -> Sequence[Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM)]


def _adafactor(model: torch.nn.Module, rate: float) -> Sequence[Optimizer]:
    return [torch.optim.Adafactor(model.parameters(), lr=rate, weight_decay=0.0)]


def muon_split(model: torch.nn.Module, rate: float) -> list[Optimizer]:
    """Muon on the hidden matrices of a model, AdamW on all else."""
    named = list(model.named_parameters())
    others = on_adamw(ADAMW_ON, [name for name, _ in named], [p.dim() for _, p in named])
    matrices = [p for (_, p), other in zip(named, others, strict=True) if not other]
    rest = [p for (_, p), other in zip(named, others, strict=True) if other]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=rate, betas=BETAS, weight_decay=0.0),
    ]


# --- Other packages' --------------------------------------------------------------------------------------------------


def _package(module: str, package: str) -> Any:
    return require(module, f"This optimizer needs {package}", extra="arena", package=package)


def _lion(model: torch.nn.Module, rate: float) -> Sequence[Optimizer]:
    cls = _package("pytorch_optimizer", "pytorch_optimizer").Lion
    return [cls(model.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.0)]


def _signum(model: torch.nn.Module, rate: float) -> Sequence[Optimizer]:
    cls = _package("pytorch_optimizer", "pytorch_optimizer").SignSGD
    return [cls(model.parameters(), lr=rate, momentum=MOMENTUM, weight_decay=0.0)]


def _schedule_free(model: torch.nn.Module, rate: float) -> Sequence[Optimizer]:
    cls = _package("schedulefree", "schedulefree").AdamWScheduleFree
    return [cls(model.parameters(), lr=rate, betas=BETAS, weight_decay=0.0)]


def _adam_mini(model: torch.nn.Module, rate: float) -> Sequence[Optimizer]:
    cls, config = _package("adam_mini", "adam-mini").Adam_mini, model.config
    return [
        cls(
            model.named_parameters(),
            lr=rate,
            betas=BETAS,
            weight_decay=0.0,
            dim=config.hidden_size,  # type: ignore[union-attr]
            n_heads=config.num_attention_heads,  # type: ignore[union-attr]
            verbose=False,
        )
    ]


def _apollo_mini(model: torch.nn.Module, rate: float) -> Sequence[Optimizer]:
    cls = _package("apollo_torch", "apollo-torch").APOLLOAdamW
    named = list(model.named_parameters())
    others = on_adamw(ADAMW_ON, [name for name, _ in named], [p.dim() for _, p in named])
    low_rank = {"rank": 1, "proj": "random", "scale_type": "tensor", "scale": 128, "update_proj_gap": 200}
    low_rank |= {"proj_type": "std", "params": [p for (_, p), other in zip(named, others, strict=True) if not other]}
    rest = {"params": [p for (_, p), other in zip(named, others, strict=True) if other]}
    return [cls([rest, low_rank], lr=rate, betas=BETAS, weight_decay=0.0)]


def _adamw_8bit(model: torch.nn.Module, rate: float) -> Sequence[Optimizer]:
    cls = _package("torchao.optim", "torchao").AdamW8bit
    return [cls(model.parameters(), lr=rate, betas=BETAS, weight_decay=0.0)]


# --- Ours -------------------------------------------------------------------------------------------------------------


def _biclip(**settings: Any) -> Build:
    return lambda model, rate: [BiClip(model.parameters(), lr=rate, **settings)]


def _l2clip(model: torch.nn.Module, rate: float) -> Sequence[Optimizer]:
    return [L2Clip(model.parameters(), lr=rate, u="auto", d="auto", scale="follow")]


def _clipped(build: Build) -> Build:
    return lambda model, rate: [Clipped(each, u="auto", d="auto") for each in build(model, rate)]


_AUTO: Mapping[str, Any] = {"u": "auto", "d": "auto", "scale": "follow"}
_BETAS_TEXT = "betas 0.9, 0.95"
CONTENDERS: Mapping[str, Contender] = {
    each.name: each
    for each in (
        Contender("adamw", "torch", _adamw, -5, settings=_BETAS_TEXT),
        Contender("adamw-0.999", "torch", _adamw_slow, -5, settings="betas 0.9, 0.999"),
        Contender("sgd-momentum", "torch", _sgd, -1, settings="momentum 0.9"),
        Contender("adafactor", "torch", _adafactor, -3),
        Contender("muon", "torch", muon_split, -5, settings="match_rms_adamw; AdamW on embeddings and norms"),
        Contender("lion", "pytorch_optimizer", _lion, -6, module="pytorch_optimizer", settings="betas 0.9, 0.99"),
        Contender("signum", "pytorch_optimizer", _signum, -6, module="pytorch_optimizer", settings="momentum 0.9"),
        Contender(
            "schedule-free", "schedulefree", _schedule_free, -5, decays=False, module="schedulefree",
            settings=f"{_BETAS_TEXT}; a constant rate after the warm-up",
        ),
        Contender("adam-mini", "adam-mini", _adam_mini, -5, module="adam_mini", settings=_BETAS_TEXT),
        Contender(
            "apollo-mini", "apollo-torch", _apollo_mini, -4, module="apollo_torch",
            settings="rank 1, scale 128, by tensor; AdamW on embeddings and norms",
        ),
        Contender("adamw-8bit", "torchao", _adamw_8bit, -5, module="torchao", settings=_BETAS_TEXT),
        Contender("biclip", "tailopt", _biclip(**_AUTO), -5, ours=True, settings='u, d "auto"'),
        Contender("sign", "tailopt", _biclip(u=1.0, d=1.0), -6, ours=True, settings="d = u"),
        Contender(
            "biclip-momentum", "tailopt", _biclip(**_AUTO, momentum=MOMENTUM), -6, ours=True,
            settings='u, d "auto"; momentum 0.9',
        ),
        Contender(
            "biclip-momentum-bf16", "tailopt",
            _biclip(**_AUTO, momentum=MOMENTUM, momentum_dtype=torch.bfloat16), -6, ours=True,
            settings='u, d "auto"; momentum 0.9 in bf16',
        ),
        Contender("clipped-adamw", "tailopt", _clipped(_adamw), -5, ours=True, settings='u "auto" around adamw'),
        Contender("clipped-muon", "tailopt", _clipped(muon_split), -5, ours=True, settings='u "auto" around muon'),
        Contender("l2clip", "tailopt", _l2clip, -1, ours=True, settings='u, d "auto"'),
    )
}  # fmt: skip


def contenders_named(text: str | None, usual: Iterable[str] = ()) -> tuple[str, ...]:
    """The contenders that a text names, with commas; for none, those of the usual ones that can be run here.

    Examples:
        >>> contenders_named("adamw, sign")
        ('adamw', 'sign')
    """
    if not text:
        return tuple(name for name in usual if CONTENDERS[name].is_installed)
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in CONTENDERS:
            raise ValueError(
                f"Unknown algorithm: {name!r}{did_you_mean(name, CONTENDERS)} There are: {', '.join(CONTENDERS)}."
            )
        if not CONTENDERS[name].is_installed:
            _package(CONTENDERS[name].module, CONTENDERS[name].source)  # raises, with the command that installs it
    return names


# --- What an optimizer keeps ------------------------------------------------------------------------------------------


def state_bytes(optimizers: Iterable[Optimizer]) -> int:
    """How many bytes of tensors optimizers hold, beside the parameters and their gradients.

    Examples:
        >>> w = torch.nn.Parameter(torch.zeros(100))
        >>> w.grad = torch.ones(100)
        >>> opt = torch.optim.SGD([w], lr=0.1, momentum=0.9)
        >>> opt.step()
        >>> state_bytes([opt])
        400
    """
    found: dict[tuple[int, int], int] = {}
    for optimizer in optimizers:
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        for tensor in _tensors([dict(optimizer.state), groups], own):
            found[tensor.device.index or 0, tensor.data_ptr() or id(tensor)] = tensor.untyped_storage().nbytes()
    return sum(found.values())


def _tensors(value: Any, own: set[int]) -> Iterable[Tensor]:
    """Every plain tensor inside a value: in mappings, sequences, objects, and tensors made of others."""
    if id(value) in own:
        return
    if isinstance(value, Tensor):
        inner = getattr(value, "__tensor_flatten__", None)
        if inner is None:
            yield value
        else:
            for name in inner()[0]:
                yield from _tensors(getattr(value, name), own)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part, own)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part, own)
    elif type(value).__module__.split(".")[0] == "apollo_torch":  # its random projections are objects of their own
        yield from _tensors(vars(value), own)
