"""The optional C kernel; everything else about the package is in pyproject.toml.

`src/tailopt/native/*.c` become `tailopt/native/_cpu.abi3.so`. It uses neither Python's nor torch's C API: it
is loaded by path with ctypes and never imported, so one build serves every Python. Where no compiler works, the build
goes on without it, and the wheel is then tagged `py3-none-any`: a platform in a wheel's name means that the kernel is
in it.
"""

import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

# Free-threaded Pythons refuse the stable ABI's tag; the library is the same, its file name is not.
STABLE_ABI = not sysconfig.get_config_var("Py_GIL_DISABLED")


class BuildKernel(build_ext):
    """Compiles the kernel, with OpenMP where the compiler has it."""

    def build_extension(self, ext):
        ext.extra_compile_args, openmp = self.flags()
        plain = list(ext.extra_compile_args)
        # Some Pythons (pyenv, conda) link with a search path into their own libraries, where another libgomp may lie.
        linker = getattr(self.compiler, "linker_so", None) or []
        self.compiler.linker_so = [word for word in linker if not word.startswith("-Wl,-rpath")]
        try:
            if not openmp:
                super().build_extension(ext)
                return
            try:
                ext.extra_compile_args = [*plain, *openmp]
                # The plain soname binds to the libgomp that torch has loaded already; a second copy would bring a
                # second pool of threads.
                ext.extra_link_args = [flag for flag in openmp if flag.startswith("-f")]
                super().build_extension(ext)
            except Exception as reason:
                self.announce(f"tailopt: no OpenMP ({reason}); trying one thread", level=3)
                ext.extra_compile_args, ext.extra_link_args = plain, []
                super().build_extension(ext)
        except Exception:
            # What an earlier build left would be taken for this one's.
            Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
            raise

    def flags(self):
        """Compile flags, and those for OpenMP."""
        if self.compiler.compiler_type == "msvc":
            return ["/O2", "/fp:precise"], ["/openmp"]
        # No contraction: every fma of the kernel is written out, and a tail must round as the body does.
        plain = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
        # On macOS a runtime of our own would stand beside torch's libomp.
        return plain, [] if sys.platform == "darwin" else ["-fopenmp"]

    def copy_extensions_to_source(self):
        """Editable installs: also take away a stale library when there is no new one."""
        for ext in self.extensions:
            built = Path(self.build_lib, self.get_ext_filename(ext.name))
            if not built.exists():
                Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
        super().copy_extensions_to_source()

    def get_export_symbols(self, ext):
        return ext.export_symbols  # no PyInit_: this is not a module

    def get_libraries(self, ext):
        return ext.libraries  # nor does it link Python


class TaggedByContent(bdist_wheel):
    """Builds first and names the wheel by what was built; setuptools decides before the compiler has run."""

    def run(self):
        self.reinitialize_command("build_ext").inplace = False
        if not self.skip_build:
            self.run_command("build")
        kernels = self.get_finalized_command("build_ext").get_outputs()
        if not all(Path(kernel).exists() for kernel in kernels):
            self.distribution.ext_modules = []
            self.root_is_pure, self.plat_name_supplied = True, False
        super().run()


setup(
    ext_modules=[
        Extension(
            "tailopt.native._cpu",
            [f"src/tailopt/native/{name}.c" for name in ("clip", "flat", "library")],
            depends=["setup.py", *(f"src/tailopt/native/{name}.h" for name in ("elements", "biclip_bf16"))],
            libraries=[] if sys.platform == "win32" else ["m"],  # fma, where the processor has none
            optional=True,
            py_limited_api=STABLE_ABI,
        )
    ],
    cmdclass={"build_ext": BuildKernel, "bdist_wheel": TaggedByContent},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if STABLE_ABI else {},
)
