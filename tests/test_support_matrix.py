"""docs/support-matrix.md says what is really so: every cell is tried, and compared with the page.

`python tests/test_support_matrix.py --write` writes the page anew (with the package installed, or PYTHONPATH=src).
A trial passes only with the right numbers. One that raises gives "no" and a footnote: the words of our refusal, or
those given here where torch refuses (its own differ by release); any other error is an error of the test.
"""

from __future__ import annotations

import difflib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import tailopt
from tailopt import BiClip, L2Clip, biclip, biclip_l2, l2clip
from tailopt.clipping.dispatch import KERNELS
from tailopt.clipping.kernels.kernel import StepGroup
from tailopt.clipping.reference import ClipByValue, StepHyperparameters
from tailopt.native.library import loaded

PAGE = Path(__file__).parents[1] / "docs" / "support-matrix.md"
BEGIN, END = "<!-- matrix:begin -->\n", "<!-- matrix:end -->\n"

# Everything is a power of two or near one, so that the same numbers come out in eight bits and in sixty-four.
GRADIENT = {"biclip": [2.0, -0.25, 0.0, 0.75], "l2": [3.0, -4.0, 0.0, 0.0]}
CLIPPED = {"biclip": [1.0, -0.5, 0.0, 0.75], "l2": [1.5, -2.0, 0.0, 0.0]}
STEPPED = {"biclip": [0.5, 1.25, 1.0, 0.625], "l2": [0.25, 2.0, 1.0, 1.0]}  # from ones, with lr = 1/2
SLOPE = {"biclip": [0.0, 0.0, 0.0, 1.0], "l2": [0.56, 0.42, 0.5, 0.5]}  # of the sum of the results
NUMBERS: dict[str, dict[str, float]] = {"biclip": {"u": 1.0, "d": 0.5}, "l2": {"u": 2.5}}

OPERATORS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "`biclip`": ("biclip", lambda x, u=1.0: biclip(x, u, 0.5)),
    "`biclip_l2`": ("l2", lambda x, u=2.5: biclip_l2(x, u, 0.0)),
    "`l2clip`": ("l2", lambda x, u=2.5: l2clip(x, u)),
}
OPTIMIZERS: dict[str, tuple[str, Any]] = {"`BiClip`": ("biclip", BiClip), "`L2Clip`": ("l2", L2Clip)}


def close(got: Tensor, want: list[float]) -> None:
    got = got.full_tensor() if isinstance(got, DTensor) else got.to_dense() if got.is_sparse else got
    wide = got.detach().resolve_conj()
    wide = (wide.real if wide.is_complex() else wide).double().flatten()
    exact = got.dtype in (torch.float64, torch.complex128)
    torch.testing.assert_close(wide, torch.tensor(want, dtype=torch.float64), rtol=1e-12 if exact else 1e-6, atol=1e-12)


def sparse(values: list[float]) -> Tensor:
    return torch.tensor(values).to_sparse()


def sharded(x: Tensor) -> Tensor:
    return DTensor.from_local(x, init_device_mesh("cpu", (1,)), [Shard(0)])


# --- trials: of an operator (kind, clip), of an optimizer (kind, class) ---------------------------------------------


def operate(convert: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    def trial(kind: str, clip: Callable[..., Tensor]) -> None:
        x = convert(torch.tensor(GRADIENT[kind]))
        got = clip(x)
        assert got.dtype == x.dtype and got.layout == x.layout and type(got) is type(x)
        close(got, CLIPPED[kind])

    return trial


def differentiate(kind: str, clip: Callable[..., Tensor]) -> None:
    x = torch.tensor(GRADIENT[kind], requires_grad=True)
    clip(x).sum().backward()
    close(x.grad, SLOPE[kind])


def compile_operator(kind: str, clip: Callable[..., Tensor], x: Tensor | None = None) -> None:
    torch._dynamo.reset()
    x = torch.tensor(GRADIENT[kind]) if x is None else x
    close(torch.compile(lambda x: clip(x), backend="eager", fullgraph=True)(x), CLIPPED[kind])


def map_operator(kind: str, clip: Callable[..., Tensor], x: Tensor | None = None) -> None:
    x = torch.tensor([GRADIENT[kind]] * 3) if x is None else x
    close(torch.vmap(lambda row: clip(row))(x)[1], CLIPPED[kind])


def rows_operator(kind: str, clip: Callable[..., Tensor]) -> None:
    x = torch.tensor([GRADIENT[kind]] * 2)
    got = clip(x, torch.tensor([[1.0], [0.5]]))
    close(got[0], CLIPPED[kind])
    close(got[1], [0.5, -0.5, 0.0, 0.5])


def optimize(
    convert: Callable[[Tensor], Tensor] = lambda x: x,
    of_gradient: Callable[[Tensor], Tensor] | None = None,
    **settings: Any,
) -> Callable[..., None]:
    def trial(kind: str, cls: Any) -> None:
        p = nn.Parameter(convert(torch.ones(4)))
        p.grad = (of_gradient or convert)(torch.tensor(GRADIENT[kind]))
        cls([p], **{"lr": 0.5, **NUMBERS[kind], **settings}).step()
        close(p, STEPPED[kind])

    return trial


def differentiate_step(kind: str, cls: Any) -> None:
    start = torch.ones(4, requires_grad=True)
    g = torch.tensor(GRADIENT[kind], requires_grad=True)
    p = start.clone()
    p.grad = g
    cls([p], lr=0.5, **NUMBERS[kind], differentiable=True).step()
    close(p, STEPPED[kind])
    p.sum().backward()
    close(start.grad, [1.0] * 4)
    close(g.grad, [-0.5 * s for s in SLOPE[kind]])


def compile_step(kind: str, cls: Any) -> None:
    torch._dynamo.reset()
    p = nn.Parameter(torch.ones(4))
    p.grad = torch.tensor(GRADIENT[kind])
    opt = cls([p], lr=torch.tensor(0.5), **NUMBERS[kind])
    torch.compile(lambda: opt.step(), backend="eager")()
    close(p, STEPPED[kind])


def rows_step(kind: str, cls: Any) -> None:
    p = nn.Parameter(torch.ones(2, 4))
    p.grad = torch.tensor([GRADIENT[kind]] * 2)
    cls([p], lr=0.5, **{**NUMBERS[kind], "u": torch.tensor([[1.0], [0.5]])}).step()
    close(p[0], STEPPED[kind])
    close(p[1], [0.75, 1.25, 1.0, 0.75])


def scale_step(fused: bool) -> Callable[..., None]:
    def trial(kind: str, cls: Any) -> None:
        p = nn.Parameter(torch.ones(4))
        opt = cls([p], lr=0.5, **NUMBERS[kind], fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        scaler.scale((p * torch.tensor(GRADIENT[kind])).sum()).backward()
        scaler.step(opt)
        scaler.update()
        close(p, STEPPED[kind])
        assert scaler.get_scale() == 64.0

    return trial


def release(**settings: Any) -> Callable[..., None]:
    def trial(kind: str, cls: Any) -> None:
        model = nn.Linear(4, 1, bias=False)
        nn.init.ones_(model.weight)
        opt = cls(model.parameters(), lr=0.5, **NUMBERS[kind], **settings)
        with tailopt.release_gradients(model, opt, bucket_bytes=0):
            model(torch.tensor(GRADIENT[kind])).sum().backward()
            close(model.weight, STEPPED[kind])
            opt.step()
        close(model.weight, STEPPED[kind])

    return trial


def release_by_tensor(kind: str, cls: Any) -> None:
    release(**({"scope": "tensor"} if cls is L2Clip else {}))(kind, cls)


# --- the first table: a feature, how an operator is tried, how an optimizer, what a refusal means -----------------

TYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8 (e4m3fn)": torch.float8_e4m3fn,
    "fp8 (e5m2)": torch.float8_e5m2,
    "complex64": torch.complex64,
}


def to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype)


Trial = Callable[..., None] | None
FEATURES: list[tuple[str, Trial, Trial, str]] = [
    *((name, operate(to(t)), optimize(to(t)), "") for name, t in TYPES.items()),
    ("sparse COO", operate(Tensor.to_sparse), optimize(of_gradient=Tensor.to_sparse), ""),
    ("DTensor", operate(sharded), optimize(sharded), ""),
    ("autograd; `differentiable=True`", differentiate, differentiate_step, ""),
    ("`torch.compile`", compile_operator, compile_step, ""),
    ("`vmap`", map_operator, None, ""),
    (
        "sparse COO under `torch.compile`",
        lambda kind, clip: compile_operator(kind, clip, sparse(GRADIENT[kind])),
        None,
        "torch cannot trace the values of a sparse tensor",
    ),
    (
        "sparse COO under `vmap`",
        lambda kind, clip: map_operator(kind, clip, torch.stack([sparse(GRADIENT[kind])] * 3)),
        None,
        "torch has no vmap over sparse tensors",
    ),
    ("thresholds by row", rows_operator, rows_step, ""),
    ("`foreach=True`", None, optimize(foreach=True), ""),
    ("`fused=True`", None, optimize(fused=True), ""),
    ("`fused=True`, sparse COO", None, optimize(of_gradient=Tensor.to_sparse, fused=True), ""),
    (
        "`capturable=True` on the CPU",
        None,
        optimize(capturable=True),
        "Refused at the step, as by torch's own optimizers: a graph is captured on a GPU",
    ),
    ("tensor `lr`", None, optimize(lr=torch.tensor(0.5)), ""),
    ("GradScaler, plain", None, scale_step(False), ""),
    ("GradScaler, fused", None, scale_step(True), ""),
    ("gradient release", None, release(), ""),
    ("gradient release, scope by tensor", None, release_by_tensor, ""),
]
GPU = "torch operations, not tested in CI"


class Notes:
    """Footnotes, numbered as they come; the same words share a number."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def mark(self, words: str) -> str:
        words = " ".join(words.split()).rstrip(".") + "."
        if words not in self.words:
            self.words.append(words)
        return f"no ({self.words.index(words) + 1})"

    def lines(self) -> list[str]:
        return [f"{i}. {words}" for i, words in enumerate(self.words, 1)]


def ours(error: BaseException) -> bool:
    """Whether the refusal was raised by our own code, and not by what it called."""
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    raised = (innermost.line or "").startswith("raise ")
    return raised and Path(innermost.filename).is_relative_to(Path(tailopt.__file__).parent)


def cell(trial: Trial, thing: tuple[str, Any], notes: Notes, refusal: str) -> str:
    if trial is None:
        return "–"
    try:
        trial(*thing)
    except Exception as error:
        if not refusal and not ours(error):  # wrong numbers, too
            raise
        return notes.mark(refusal or str(error))
    assert not refusal, "it works now: take the words of its refusal out"
    return "yes"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def what_works() -> list[str]:
    notes, things = Notes(), {**OPERATORS, **OPTIMIZERS}
    rows = []
    for name, on_operator, on_optimizer, why in FEATURES:
        cells = [
            cell(on_operator if thing in OPERATORS else on_optimizer, things[thing], notes, why) for thing in things
        ]
        rows.append([name, *cells])
    rows.append(["GPU", *[GPU] * len(things)])
    return [*table(["", *things], rows), "", *notes.lines()]


# --- the second table: kernels --------------------------------------------------------------------------------------


def which_kernels() -> list[str]:
    plain = StepHyperparameters(ClipByValue(1.0, 0.5), lr=0.5)
    cases: dict[str, tuple[torch.dtype, bool, StepHyperparameters]] = {
        **{name: (t, False, plain) for name, t in TYPES.items() if t != torch.complex64},
        "sparse COO": (torch.float32, True, plain),
        "dead zone": (torch.float32, False, StepHyperparameters(ClipByValue(1.0, 0.5, 0.25), lr=0.5)),
        "thresholds by row": (torch.float32, False, StepHyperparameters(ClipByValue(torch.ones(4), 0.5), lr=0.5)),
        "tensor `lr`": (torch.float32, False, StepHyperparameters(ClipByValue(1.0, 0.5), lr=torch.tensor(0.5))),
    }
    notes, rows = Notes(), []
    for kernel in KERNELS.values():
        if kernel.name == "triton":  # runs on CUDA devices alone
            continue
        cells = []
        for name, (dtype, is_sparse, hparams) in cases.items():
            p, g = torch.ones(4, dtype=dtype), torch.tensor(GRADIENT["biclip"]).to(dtype)
            g = g.to_sparse() if is_sparse else g
            refused = kernel.refuses(p, g, hparams)
            if not refused:
                kernel.run([StepGroup([p], [g], hparams)])
                close(p, [0.5, 1.0, 1.0, 0.625] if name == "dead zone" else STEPPED["biclip"])
            cells.append(notes.mark(refused) if refused else "yes")
        rows.append([f"`{kernel.name}`", *cells])
    return [*table(["kernel", *cases], rows), "", *notes.lines()]


def matrix() -> str:
    """What stands between the two marks of the page."""
    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        lines = ["## Operators and optimizers", "", *what_works(), ""]
        lines += ["## Kernels of a step", "", *which_kernels()]
    finally:
        if alone:
            dist.destroy_process_group()
        torch._dynamo.reset()
    return "\n" + "\n".join(lines) + "\n\n"


def split(page: str) -> tuple[str, str, str]:
    before, rest = page.split(BEGIN)
    inside, after = rest.split(END)
    return before + BEGIN, inside, END + after


@pytest.mark.skipif(loaded() is None, reason="the page describes an installation with the C kernel")
def test_the_page_is_what_was_tried() -> None:
    _, written, _ = split(PAGE.read_text(encoding="utf-8"))
    tried = matrix()
    changes = "\n".join(
        difflib.unified_diff(written.splitlines(), tried.splitlines(), "page", "tried", lineterm="", n=0)
    )
    assert written == tried, f"python tests/test_support_matrix.py --write\n{changes}"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    before, _, after = split(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(before + matrix() + after, encoding="utf-8")
