"""The C kernel as a guest in a process: forks, thread pools, memory, and what happens where it cannot be loaded.

Each test is a program of its own, since what it asks about belongs to a whole process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tailopt.clipping import cpu

SOURCE = Path(cpu.__file__).parents[2]
COMPILER = shutil.which("cc") or shutil.which("gcc")
needs_kernel = pytest.mark.skipif(cpu.library() is None, reason="the C kernel was not built")
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
    """The child has the memory of the parent's thread pool, but not its threads: a region of its own would hang."""
    program = """
        import os, sys, threading, torch
        from tailopt import BiClip, L2Clip
        from tailopt.clipping import cpu

        assert torch.get_num_threads() == 2
        n = 1 << 20
        p = torch.nn.Parameter(torch.ones(n))
        p.grad = torch.full((n,), 8.0)
        many = [BiClip([p], lr=0.25, u=1.0, d=0.5, statistics=True), L2Clip([p], lr=1024.0, u=0.5)]
        for opt in many:
            opt.step()                      # in the parent, by two threads
        assert p.unique().item() == 0.25, p

        child = os.fork()
        if child == 0:
            try:
                for opt in many:
                    opt.step()              # a large tensor in the child
                ok = p.unique().item() == -0.5 and cpu._forked
                grandchild = os.fork()
                if grandchild == 0:
                    many[0].step()
                    os._exit(0 if p.unique().item() == -0.75 else 2)
                ok = ok and os.waitpid(grandchild, 0)[1] == 0
                os._exit(0 if ok else 1)
            except BaseException as error:
                print(error, file=sys.stderr, flush=True)
                os._exit(3)
        status = os.waitpid(child, 0)[1]
        assert status == 0, status
        many[0].step()                      # and the parent still has its threads
        assert p.unique().item() == 0.0 and not cpu._forked
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
        from tailopt.clipping import cpu

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
        print(cpu.library().openmp, len(runtimes), after - before, sorted(runtimes))
    """
    openmp, runtimes, more, *_ = run(program).split(maxsplit=3)
    if openmp == "False":
        pytest.skip("built without OpenMP")
    assert int(runtimes) == 1
    assert int(more) <= 0, "the pool of torch's own region was reused"


@needs_kernel
@needs_proc
@pytest.mark.parametrize("how", ["BiClip", "BiClip with statistics", "L2Clip"])
def test_a_step_needs_no_memory(how: str) -> None:
    """25 million parameters, 100 MB: the peak of the process grows by less than 2 MB over several steps.

    One temporary tensor of the size of the largest parameter would be 64 MB. The peak is the kernel's own count of
    pages that were ever resident together, set back before the steps.
    """
    program = f"""
        import torch
        from tailopt import BiClip, L2Clip

        sizes = [(4000, 4000), (3000, 3000), (1,)]
        params = [torch.nn.Parameter(torch.ones(s)) for s in sizes]
        for p in params:
            p.grad = torch.ones_like(p)
        how = {how!r}
        opt = L2Clip(params, u=0.5) if how == "L2Clip" else BiClip(params, statistics="statistics" in how)
        small = torch.nn.Parameter(torch.ones(100_000))
        small.grad = torch.ones_like(small)
        for cls in (BiClip, L2Clip):
            cls([small]).step()  # what is loaded and made once

        def peak():
            line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
            return int(line.split()[1]) * 1024

        try:
            open("/proc/self/clear_refs", "w").write("5")  # the peak is now what is resident
        except OSError:
            pass  # then it may hide a growth below the peak of making the tensors, which was none
        before = peak()
        for _ in range(3):
            opt.step()
        print(peak() - before)
    """
    assert int(run(program)) < 2_000_000


# --- a library that cannot be used ----------------------------------------------------------------------------------

STEP = """
    import warnings, torch
    warnings.simplefilter("always")
    from tailopt import BiClip, L2Clip, count
    from tailopt.clipping.cpu import library, why_missing

    assert library() is None
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


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package without its library."""
    ignored = shutil.ignore_patterns("_cpu.*", "__pycache__")
    shutil.copytree(SOURCE / "tailopt", tmp_path / "tailopt", ignore=ignored)
    return tmp_path


def place(package: Path) -> Path:
    return package / "tailopt" / "clipping" / "_cpu.abi3.so"


def build(package: Path, code: str) -> None:
    if COMPILER is None:
        pytest.skip("no C compiler")
    (package / "fake.c").write_text(code, encoding="utf-8")
    command = [COMPILER, "-shared", "-fPIC", "-o", str(place(package)), str(package / "fake.c")]
    subprocess.run(command, check=True, timeout=60)


def test_without_the_library_it_steps_and_says_so_once(package: Path) -> None:
    said = run(STEP, package, threads=1)
    assert "was not built" in said and "Install a C compiler and reinstall" in said


@pytest.mark.parametrize("content", [b"", b"not a library", b"\x7fELF and no more"], ids=["empty", "text", "cut"])
def test_a_corrupt_library_is_named(package: Path, content: bytes) -> None:
    place(package).write_bytes(content)
    said = run(STEP, package, threads=1)
    assert "_cpu.abi3.so does not load on this" in said and "reinstall" in said


def test_a_library_of_another_version_is_refused(package: Path) -> None:
    build(package, "int tailopt_version(void) { return 99; }")
    said = run(STEP, package, threads=1)
    assert f"has version 99, this release needs {cpu.VERSION}" in said and "Reinstall" in said


def test_a_foreign_library_is_refused(package: Path) -> None:
    """It loads, but the functions are not there."""
    build(package, "int something_else(void) { return 1; }")
    said = run(STEP, package, threads=1)
    assert "_cpu.abi3.so" in said and "einstall" in said


@needs_kernel
def test_the_numbers_match_those_of_the_source() -> None:
    source = (SOURCE / "tailopt" / "clipping" / "cpu.c").read_text(encoding="utf-8")
    assert f"#define VERSION {cpu.VERSION}\n" in source
    assert f"BINS = {cpu.BINS} }}" in source
    library = cpu.library()
    assert library is not None and library.variants[0] == "portable" and cpu.why_missing() == ""
