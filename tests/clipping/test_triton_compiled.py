"""The Triton kernel as it is compiled for an H100 or H200, without one: what its instructions round, and how it reads.

The interpreter cannot show these: it fuses nothing by itself, and has neither words nor registers.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled under Triton's interpreter", allow_module_level=True)
triton = pytest.importorskip("triton", reason="Triton is not installed: `make interpreter` installs it")
tl = pytest.importorskip("triton.language")

HOPPER = ("cuda", 90, 32)
STEP = {
    "RESCALES": False,
    "MOMENTUM": False,
    "ALIGNED": True,
    "SKIPS": False,
    "BLANK": False,
    "ROUNDS": False,
    "COUNTS": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {"P": "float32", "G": "float32"},
    "fp64": {"P": "float64", "G": "float64", "COMPUTE": "float64", "BLOCK": 1024},
    "bf16": {"P": "bfloat16", "G": "bfloat16", "BLOCKS": 2},
    "fp16": {"P": "float16", "G": "float16", "BLOCKS": 2, "SKIPS": True},
    "fp32 with bf16 gradients": {"P": "float32", "G": "bfloat16", "BLOCK": 1024},
    "fp32, momentum": {"P": "float32", "G": "float32", "BLOCK": 1024, "MOMENTUM": True},
    "fp64, momentum": {"P": "float64", "G": "float64", "COMPUTE": "float64", "BLOCK": 1024, "MOMENTUM": True},
    "bf16, momentum in bf16": {"P": "bfloat16", "G": "bfloat16", "M": "bfloat16", "BLOCK": 1024, "MOMENTUM": True},
    "fp32, rescaled": {"P": "float32", "G": "float32", "RESCALES": True},
    "bf16, stochastic": {"P": "bfloat16", "G": "bfloat16", "BLOCKS": 2, "ROUNDS": True},
    "fp32, blank": {"P": "float32", "G": "float32", "BLANK": True},
    "bf16, unaligned": {"P": "bfloat16", "G": "bfloat16", "BLOCKS": 2, "ALIGNED": False},
}
MOST_REGISTERS = 64  # with 60 and more per thread, bf16 was slower on an H200
MOST_WITH_COUNTS = 96


def compiled(name: str, pointers: dict[str, str], constants: dict[str, Any]) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tailopt.clipping.kernels import triton_programs

    function = getattr(triton_programs, name)
    names = function.arg_names
    constants = {k: getattr(tl, v) if isinstance(v, str) else v for k, v in constants.items()}
    source = ASTSource(
        fn=function,
        signature={name: pointers.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in pointers if name != "skips"},
    )
    options = {"num_warps": 4, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget(*HOPPER), options=options)


def step(kind: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    constants = {"M": "float32", "COMPUTE": "float32", "BLOCK": 2048, "BLOCKS": 1, **STEP, **kind}
    if constants["COMPUTE"] == "float64":
        constants["M"] = "float64"
    rows = "*fp64" if constants["COMPUTE"] == "float64" else "*fp32"
    pointers = {
        "tensors": "*i64",
        "chunks": "*i32",
        "rows": rows,
        "skips": "*u8",
        "keys": "*i64",
        "counts": "*i64",
        "sums": "*fp64",
    }
    return compiled("step_programs", pointers, constants), constants


def instructions(kernel: Any) -> Counter[str]:
    return Counter(re.findall(r"^\s+(?:@!?%p\d+ )?([a-z][\w.:]+)", kernel.asm["ptx"], flags=re.MULTILINE))


@pytest.mark.parametrize("name", KINDS)
def test_rounds_each_operation_once_and_keeps_denormals(name: str) -> None:
    """A multiply-add is fused where `fma` is written, and nowhere else; each thread takes elements / 128 and 4 more."""
    kernel, constants = step(KINDS[name])
    found = instructions(kernel)
    wide = "f64" if constants["COMPUTE"] == "float64" else "f32"
    elements = constants["BLOCK"] * constants["BLOCKS"] // 128 + 4
    assert "ftz" not in kernel.asm["ptx"] and ".approx" not in kernel.asm["ptx"] and ".full" not in kernel.asm["ptx"]
    fused = constants["MOMENTUM"] + (not constants["BLANK"])  # the compiler knows that adding -0 changes nothing
    assert found[f"fma.rn.{wide}"] == elements * fused
    divisions = elements * (constants["MOMENTUM"] + constants["RESCALES"])
    assert found[f"div.rn.{wide}"] == divisions
    assert not [i for i in found if re.match(r"(mul|add|sub|fma)\.f", i)]  # without .rn, ptxas may fuse them
    for kind, narrow in (("bfloat16", "bf16"), ("float16", "f16")):
        stores = [i for i in found if re.match(rf"cvt\.rn\.{narrow}(x2)?\.f32", i)]
        assert bool(stores) == (kind in (constants["P"], constants["M"] if constants["MOMENTUM"] else ""))


@pytest.mark.parametrize("name", KINDS)
def test_reads_in_the_widest_words_where_addresses_allow(name: str) -> None:
    kernel, constants = step(KINDS[name])
    found = instructions(kernel)
    wide = sum(n for i, n in found.items() if i in ("ld.global.v4.b32", "ld.global.v2.b64"))
    sizes = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
    used = {"P": not constants["BLANK"], "G": True, "M": constants["MOMENTUM"]}
    tensors = [constants[name] for name, read in used.items() if read]
    words = sum(constants["BLOCK"] * constants["BLOCKS"] * sizes[t] // 16 // 128 for t in tensors)
    assert wide == (words if constants["ALIGNED"] else 0)


@pytest.mark.parametrize("name", [*KINDS, "fp32, counts", "bf16, counts"])
def test_needs_few_registers(name: str, tmp_path: Path) -> None:
    plain = name.removesuffix(", counts")
    kernel, _ = step({**KINDS[plain], "COUNTS": plain != name})
    file = tmp_path / "kernel.cubin"
    file.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, timeout=60, check=True)
    (registers,) = re.findall(r"step_programs.*?REG:(\d+) STACK:0", usage.stdout, flags=re.DOTALL)
    assert int(registers) <= (MOST_REGISTERS if plain == name else MOST_WITH_COUNTS)


def test_the_other_programs_compile_too() -> None:
    pointers = {"tensors": "*i64", "chunks": "*i32", "largest": "*fp32", "nonfinite": "*i64"}
    constants = {"G": "bfloat16", "COMPUTE": "float32", "ALIGNED": True, "BLOCK": 2048, "BLOCKS": 2}
    assert instructions(compiled("look_programs", pointers, constants))["ld.global.v4.b32"] == 4
    pointers = dict.fromkeys(("counts", "tensors", "slots", "integers"), "*i64") | {"sums": "*fp64", "reals": "*fp64"}
    assert "atom" not in compiled("sum_programs", pointers, {"COLUMNS": 7, "WIDTH": 256}).asm["ptx"]
    pointers = {"tensors": "*i64", "chunks": "*i32", "sums": "*fp64"}
    constants = {"G": "float32", "ALIGNED": True, "BLOCK": 2048, "BLOCKS": 1}
    assert instructions(compiled("square_programs", pointers, constants))["ld.global.v4.b32"] == 4
    for wide, name in (("float32", "*fp32"), ("float64", "*fp64")):
        pointers = {"sources": "*i64", "operands": name, "rows": name}
        found = instructions(compiled("scalar_programs", pointers, {"COMPUTE": wide}))
        assert not [i for i in found if i.startswith("fma")] and sum(found[f"div.rn.f{n}"] for n in (32, 64)) == 1
