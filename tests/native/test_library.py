"""The C kernel as a guest in a process: forks, thread pools, memory, and what happens where it cannot be loaded.

Most tests are programs of their own, since what they ask about belongs to a whole process.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tailopt.distributed import flat_kernels
from tailopt.native import calls, clip, flat
from tailopt.native import library as native
from tailopt.rounds import block_norm

SOURCE = Path(native.__file__).parents[2]
COMPILER = shutil.which("cc") or shutil.which("gcc")
needs_kernel = pytest.mark.skipif(native.loaded() is None, reason="the C kernel was not built")
needs_proc = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc")


def run(program: str, source: Path = SOURCE, threads: int = 2, timeout: float = 60) -> str:
    """What a program prints, in a process of its own; a hang is a failure."""
    env = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", textwrap.dedent(program)]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


# --- fork -----------------------------------------------------------------------------------------------------------


@needs_kernel
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_after_a_parallel_step_can_step() -> None:
    """The child has the memory of the parent's thread pool, but not its threads: a region of its own would hang.

    Nothing else in the child may start a region: torch's own would hang there, whatever we do.
    """
    program = """
        import os, signal, torch
        from tailopt import BiClip, L2Clip
        from tailopt.native import calls

        assert torch.get_num_threads() == 2
        n = 1 << 20
        p = torch.nn.Parameter(torch.ones(n))
        p.grad = torch.full((n,), 8.0)
        many = [BiClip([p], lr=0.25, u=1.0, d=0.5, statistics=True), L2Clip([p], lr=1024.0, u=0.5)]

        def step(first, opts=many):
            for opt in opts:
                opt.step()
            middle = p[n // 2].item()
            return first == p[0].item() == middle == p[-1].item()

        assert step(0.25)  # in the parent, by two threads
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # a hanging child ends too
            ok = step(-0.5) and calls._forked
            grandchild = os.fork()
            if grandchild == 0:
                signal.alarm(10)
                os._exit(0 if step(-0.75, many[:1]) else 2)
            os._exit(0 if ok and os.waitpid(grandchild, 0)[1] == 0 else 1)
        status = os.waitpid(child, 0)[1]
        assert status == 0, status
        assert step(-0.5) and not calls._forked  # and the parent still has its threads
        print("stepped")
    """
    assert "stepped" in run(program)


# --- threads and memory ---------------------------------------------------------------------------------------------


@needs_kernel
@needs_proc
def test_there_is_one_openmp_runtime_and_one_pool() -> None:
    """The kernel binds to the runtime that torch brought; a second one would double the threads of every region."""
    program = """
        import os, re, torch
        from tailopt import BiClip
        from tailopt.native import library as native

        def threads():
            return len(os.listdir("/proc/self/task"))

        x = torch.ones(1 << 20)
        x.add_(1.0)
        p = torch.nn.Parameter(x)
        p.grad = torch.ones_like(x)
        before = threads()
        BiClip([p], statistics=True).step()
        after = threads()
        runtimes = set(re.findall(r"\\S*lib(?:gomp|omp|iomp)\\S*", open("/proc/self/maps").read()))
        print(native.loaded().openmp, len(runtimes), after - before, sorted(runtimes))
    """
    openmp, runtimes, more, *_ = run(program).split(maxsplit=3)
    if openmp == "False":
        pytest.skip("built without OpenMP")
    assert int(runtimes) == 1
    assert int(more) <= 0, "the pool of torch's own region was reused"


@needs_kernel
@needs_proc
def test_a_step_needs_no_memory() -> None:
    """25 million parameters, 100 MB: the peak of the process grows by less than 8 MB (arenas, stacks) over steps.

    The peak is the system's own count of pages resident at the same time. That it would see a temporary tensor is
    tested too: foreach=True makes one of the size of the largest parameter, 64 MB.
    """
    program = """
        import torch
        from tailopt import BiClip, L2Clip

        params = [torch.nn.Parameter(torch.ones(s)) for s in [(4000, 4000), (3000, 3000), (1,)]]
        for p in params:
            p.grad = torch.ones_like(p)
        small = torch.nn.Parameter(torch.ones(100_000))
        small.grad = torch.ones_like(small)
        for cls in (BiClip, L2Clip):
            cls([small]).step()  # what is loaded and made once

        def peak():
            with open("/proc/self/status") as status:
                return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

        for opt in (
            BiClip(params), BiClip(params, u=1.0, statistics=True),
            BiClip(params, u=1.0, nonfinite="skip", dead_zone="auto"), L2Clip(params, u=0.5),
            L2Clip(params, u=0.5, scope="tensor"), BiClip(params, u=1.0, foreach=True),
        ):
            before = peak()
            for _ in range(2):
                opt.step()
            print(peak() - before)
    """
    *ours, foreach = map(int, run(program).split())
    assert max(ours) < 8_000_000, ours
    assert foreach > 60_000_000, foreach


# --- what C leaves undefined ----------------------------------------------------------------------------------------

EVERYTHING = """
    import torch
    from tailopt import BiClip, L2Clip, count
    from tailopt.native.clip import NO_MOMENTUM, StepTable
    from tailopt.native.library import loaded
    from tailopt.distributed import flat_kernels
    from tailopt.distributed.layout import Segment
    from tailopt.rounds.guard import Bound, check_displacement

    kernel = loaded()
    assert kernel is not None and "trapping" in str(kernel.path)
    strange = torch.tensor([0.0, -0.0, 1.0, -3.0, 1e-40, 3e38, float("inf"), float("nan")]).repeat(129)[:-1]
    for kind in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        p = torch.nn.Parameter(torch.ones(1031, dtype=kind))
        p.grad = strange.to(kind)
        for u, d in ((1.0, 0.5), (float("inf"), 0.0)):
            BiClip([p], u=u, d=d, statistics=True, maximize=True, weight_decay=0.1).step()
        L2Clip([p], u=1.0).step()
        for instruction_set in kernel.instruction_sets:
            for operation in ("biclip", "rescale"):
                row = [-0.1, 0.9, 0.0, 1.0, 0.5, 0.0, 1.0, 2.0, 1.0, *NO_MOMENTUM]
                kernel.clip.run(operation, [p.detach()], [p.grad], StepTable(row, [0]), instruction_set=instruction_set)
        count([p.grad], 1.0, 0.5)
    segment = Segment(0, 0, 0, 1031, 0)
    x, delta = strange.clone(), torch.zeros(1031)
    flat_kernels.load([delta], x, [segment], [0, 1031])
    flat_kernels.displacement([delta], x, torch.zeros(1031), [segment], [0, 1031])
    flat_kernels.checksum_and_max(x)
    flat_kernels.mean([x, x], [0.5, 0.5], 1.0)
    flat_kernels._fused()
    check_displacement(0, [torch.ones(1031)], [strange], ["w"], Bound("coordinate", 0.0, 0.1, 1), {})
    check_displacement(0, [torch.ones(1031)], [strange], ["w"], Bound("norm", 0.0, 0.0, 1), {})
    print("defined")
"""


@needs_kernel
@pytest.mark.skipif(sys.platform == "win32", reason="asks for gcc or clang")
def test_the_kernel_does_nothing_that_c_leaves_undefined(tmp_path: Path) -> None:
    """Built so that shifts into a sign, overflows of signed numbers and the like are traps."""
    if COMPILER is None:
        pytest.skip("no C compiler")
    folder = tmp_path / "trapping"
    without_library(folder)
    here = folder / "tailopt" / "native"
    flags = [
        "-O1",
        "-fsanitize=undefined",
        "-fsanitize-undefined-trap-on-error",
        "-ffp-contract=off",
        "-shared",
        "-fPIC",
    ]
    command = [COMPILER, *flags, "-o", str(here / "_cpu.abi3.so"), *map(str, sorted(here.glob("*.c"))), "-lm"]
    if subprocess.run(command, timeout=300).returncode:
        pytest.skip("no sanitizer")
    assert "defined" in run(EVERYTHING, folder)


# --- a library that cannot be used ----------------------------------------------------------------------------------

STEP = """
    import warnings, torch
    warnings.simplefilter("always")
    from tailopt import BiClip, L2Clip, count
    from tailopt.native.library import loaded, why_missing

    assert loaded() is None
    print(why_missing())
    p = torch.nn.Parameter(torch.ones(70_000))
    p.grad = torch.full_like(p, 9.0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            BiClip([p], lr=0.25, u=1.0, d=0.5, statistics=True).step()
            L2Clip([p], lr=0.0).step()
    assert len(said) == 1, [str(w.message) for w in said]
    assert "without its C kernel" in str(said[0].message) and why_missing() in str(said[0].message)
    assert p.unique().item() == 0.5, p
    assert count([p.grad], 1.0, 0.5)[0].above == 70_000
"""


def without_library(to: Path) -> None:
    """A copy of the package without its library."""
    shutil.copytree(SOURCE / "tailopt", to / "tailopt", ignore=shutil.ignore_patterns("_cpu.*", "__pycache__"))


def test_without_the_library_it_steps_and_says_so_once(tmp_path: Path) -> None:
    without_library(tmp_path)
    said = run(STEP, tmp_path, threads=1)
    assert "was not built" in said and "Install a C compiler and reinstall" in said


@pytest.fixture
def loader(tmp_path: Path, monkeypatch) -> Any:
    """library.py once more, beside another library or none."""
    spec = importlib.util.spec_from_file_location("cpu_elsewhere", shutil.copy(native.__file__, tmp_path))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "cpu_elsewhere", module)
    monkeypatch.setattr(os, "register_at_fork", lambda **hooks: None)
    spec.loader.exec_module(module)
    return module


def build(folder: Path, code: str) -> None:
    if COMPILER is None:
        pytest.skip("no C compiler")
    (folder / "fake.c").write_text(code, encoding="utf-8")
    command = [COMPILER, "-shared", "-fPIC", "-o", str(folder / "_cpu.abi3.so"), str(folder / "fake.c")]
    subprocess.run(command, check=True, timeout=60)


@pytest.mark.parametrize("content", [b"", b"not a library", b"\x7fELF and no more"], ids=["empty", "text", "cut"])
def test_a_corrupt_library_is_named(loader, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "_cpu.abi3.so").write_bytes(content)
    assert loader.loaded() is None
    said = loader.why_missing()
    assert "_cpu.abi3.so does not load on this" in said and "reinstall tailopt-torch" in said


def test_a_library_of_another_version_is_refused(loader, tmp_path: Path) -> None:
    build(tmp_path, "int tailopt_version(void) { return 99; }")
    assert loader.loaded() is None
    assert f"has version 99, this release needs {native.VERSION}. Reinstall" in loader.why_missing()


def test_a_foreign_library_is_refused(loader, tmp_path: Path) -> None:
    """It loads, but the functions are not there."""
    build(tmp_path, "int something_else(void) { return 1; }")
    assert loader.loaded() is None
    assert "_cpu.abi3.so" in loader.why_missing() and "einstall tailopt-torch" in loader.why_missing()


def test_no_library_at_all(loader) -> None:
    assert loader.loaded() is None
    assert "was not built" in loader.why_missing()


@needs_kernel
def test_the_numbers_match_those_of_the_source() -> None:
    names = ("library.c", "clip.c", "flat.c", "elements.h")
    folder = SOURCE / "tailopt" / "native"
    loader, clip_c, flat_c, elements = ((folder / name).read_text(encoding="utf-8") for name in names)
    assert f"#define VERSION {native.VERSION}\n" in loader
    assert f"BINS = {clip.BINS} }}" in clip_c
    assert f"BLOCK = {block_norm.BLOCK} }}" in flat_c and flat.BLOCK == block_norm.BLOCK
    assert f"PLACES = {flat_kernels.PLACES} }}" in flat_c
    assert "enum { F32, F64, BF16, F16 }" in elements and list(calls.DTYPES.values()) == [0, 1, 2, 3]
    library = native.loaded()
    assert library is not None and library.instruction_sets[0] == "portable" and native.why_missing() == ""
