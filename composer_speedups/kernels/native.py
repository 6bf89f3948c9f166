"""Small C kernels for the CPU, built by the machine's own compiler when first used, and kept.

No build system and no headers of PyTorch: a file of plain C, with `native.h`, takes pointers and sizes, and `ctypes`
calls it, which releases the GIL. That compiles in about a second, where an extension against PyTorch takes half a
minute. OpenMP's symbols are left open at link time: they resolve to the runtime that PyTorch has loaded already, so
that both share one pool of threads. Where there is no compiler, `load` returns None, and the caller has its
PyTorch meaning of the kernel to fall back on. `COMPOSER_SPEEDUPS_NATIVE=0` asks for that, too.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch  # its OpenMP runtime must be in the process before a kernel is loaded
from torch.utils._python_dispatch import _disable_current_modes

from composer_speedups.cache_root import cache_root
from composer_speedups.errors import UserError
from composer_speedups.files import whole

__all__ = ["checked", "load", "without_modes"]

log = logging.getLogger("composer_speedups")

# No contraction to fused multiply-add, but where a kernel asks for it: most agree bit for bit with their meaning in
# PyTorch. And nobody reads floating-point exceptions: to keep them, GCC makes a choice between two values a branch
# where vectors have no masks (AVX2), and takes the whole loop element by element. No result has other bits for it, but
# by the order of sums that `omp simd` leaves to the compiler.
_FLAGS = ("-O3", "-march=native", "-std=c11", "-ffp-contract=off", "-fno-trapping-math", "-fPIC")
# GCC and clang use vectors of 256 bits even where there is AVX-512, if they are not asked for more: with 512, GELU was
# 1.3 times as fast on a Xeon (benchmarks/results/2026-11-24_cpu_amx_limits and ..._before).
_WIDE = ("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()
_TRIES = (("-fopenmp", *_WIDE), ("-fopenmp",), ())  # in this order; without OpenMP a kernel runs on one thread
_PATIENCE = 120  # seconds for a compiler on a busy machine


@cache
def load(name: str) -> ctypes.CDLL | None:
    """The library made of `<name>.c` beside this file; None, with the reason in the log, where there is none.

    Its attribute `name` is this one, and `threaded` says whether it was built with OpenMP: clang's, for one, asks for a
    runtime of its own, which PyTorch has not loaded.

    >>> load("no_such_kernel") is None
    True
    """
    source = Path(__file__).with_name(f"{name}.c")
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", ""), "cc", "gcc", "clang"))), None)
    if os.environ.get("COMPOSER_SPEEDUPS_NATIVE") == "0" or not source.is_file() or compiler is None:
        log.info("kernel %s: no C compiler found, or not wanted: PyTorch operations serve instead", name)
        return None
    for flags in _TRIES:
        try:
            library = ctypes.CDLL(str(_built(source, compiler, flags)))
            library.name, library.threaded = name, "-fopenmp" in flags
            return library
        except (OSError, subprocess.SubprocessError) as error:
            log.info("kernel %s: %s %s failed: %s", name, compiler, " ".join(flags), error)
    return None


def checked(name: str) -> Callable[[Callable[[ctypes.CDLL], bool]], Callable[[], ctypes.CDLL | None]]:
    """Decorate what declares a library's functions and says whether they agree with their meaning in PyTorch.

    What it becomes gives the library made of `<name>.c`, or None where it can't be built or does not agree; this is
    found out once.
    """

    def decorate(agrees: Callable[[ctypes.CDLL], bool]) -> Callable[[], ctypes.CDLL | None]:
        @cache
        def native() -> ctypes.CDLL | None:
            library = load(name)
            if library is None:
                return None
            with without_modes():
                if agrees(library):
                    return library
            log.info("kernel %s does not agree with PyTorch, whose operations serve instead", name)
            return None

        return native

    return decorate


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Tensors with numbers: a library may first be asked for in a dry run, where they have none, and no addresses."""
    with _disable_current_modes(), torch.no_grad():
        yield


def _built(source: Path, compiler: str, flags: tuple[str, ...]) -> Path:
    """The compiled file, from the cache if that compiler built the same source for the same CPU before."""
    flags = (*_FLAGS, *flags)
    headers = (header.read_text() for header in sorted(source.parent.glob("*.h")))
    key = "\0".join((source.read_text(), *headers, compiler, _version(compiler), *flags, platform.machine(), _cpu()))
    name, folder = f"{source.stem}-{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}", _folder()
    for file in folder.glob(f"{name}-*.so"):
        if file.stem == f"{name}-{file.stat().st_size}":  # one that was cut off since would end the process
            return file
    with tempfile.TemporaryDirectory(dir=folder) as work:
        compiled, linked = Path(work) / "kernel.o", Path(work) / "kernel.so"
        for command in (
            [compiler, *flags, "-c", str(source), "-o", str(compiled)],
            [compiler, "-shared", str(compiled), "-o", str(linked)],
        ):
            subprocess.run(command, check=True, capture_output=True, timeout=_PATIENCE)
        file = folder / f"{name}-{linked.stat().st_size}.so"
        with whole(file) as copy:
            shutil.copyfile(linked, copy)
    return file


@cache
def _version(compiler: str) -> str:
    """What it says of itself: an upgrade may have mended what the one before compiled wrongly."""
    try:
        said = subprocess.run(
            [compiler, "--version"], capture_output=True, timeout=_PATIENCE, env=os.environ | {"LC_ALL": "C"}
        )
        return said.stdout.decode(errors="replace")
    except (OSError, subprocess.SubprocessError):
        return ""


def _folder() -> Path:
    """A folder that only this user can write to, as code is loaded from it."""
    try:
        folder = cache_root() / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
        if about.st_uid == os.getuid() and not about.st_mode & 0o022 and os.access(folder, os.W_OK):
            return folder
    except (OSError, UserError):  # UserError: nobody knows the user's home
        pass
    return _temporary_folder()


@cache
def _temporary_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="composer_speedups_kernels_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _cpu() -> str:
    """What `-march=native` depends on: a home folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    kept = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kept)}))
