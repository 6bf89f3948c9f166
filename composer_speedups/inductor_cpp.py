"""Inductor's first compilation on CPUs, sooner: no probes of what is known, and the headers parsed once.

With an empty cache Inductor asks for each vector instruction set, by compiling a test that includes PyTorch's headers
and loading it in a new Python process that imports PyTorch: seconds each, and half of them again in each later
process. PyTorch itself has found out which instructions the CPU has; whether the compiler takes their flags is
asked here with an empty file. What probes by itself (AMX, and in newer versions AVX512-BF16 and VNNI) only compiles its
few lines here, which include nothing, and starts no process to load them.

Then each kernel is a C++ file of its own that begins with the same header, and most of its compilation is reading
that header. GCC takes `name.h.gch` beside `name.h` if the flags agree, and ignores it if they do not; it is
made in the background while the model is being prepared. From 2.8 on PyTorch precompiles by itself.

The code that runs is the same. What it saves is in benchmarks/results/2026-11-22_cpu_compiling_3 and, with AMX,
2026-11-24_cpu_amx_compiling.
"""

from __future__ import annotations

import atexit
import logging
import os
import platform
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from composer_speedups.compat import INDUCTOR_PRECOMPILES

__all__ = ["prepare"]

log = logging.getLogger("composer_speedups")

_CAPABILITIES = {"AVX512": 512, "AVX2": 256}  # PyTorch's names: bits


def prepare() -> threading.Thread | None:
    """Spare Inductor the probes, and precompile its header; return the thread that does so, None if none is needed.

    Call it after the cache folder is chosen, and before anything is compiled. Without a compiler, on other CPUs or
    systems, and where the user has said something about it, nothing is done.
    """
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return None
    try:
        _trust_the_instructions()
        return None if INDUCTOR_PRECOMPILES else _precompile()
    except Exception as error:  # Inductor's own way remains, and its own message where that fails too
        log.info("Inductor's first compilation is not hastened: %s", error)
        return None


def _trust_the_instructions() -> None:
    """Set Inductor's `cpp.vec_isa_ok` if PyTorch uses the widest instructions found and the compiler knows them all."""
    from torch._inductor import config, cpu_vec_isa

    if config.cpp.vec_isa_ok is not None:  # also what the environment's TORCHINDUCTOR_VEC_ISA_OK says
        return
    flags = cpu_vec_isa.x86_isa_checker()
    found = [isa for isa in cpu_vec_isa.supported_vec_isa_list if all(flag in flags for flag in str(isa).split())]
    widest = max((isa.bit_width() for isa in found), default=None)
    if widest is None or _CAPABILITIES.get(torch.backends.cpu.get_cpu_capability()) != widest:
        return
    if not all(_compiles(isa, "") for isa in found):
        return
    config.cpp.vec_isa_ok = True
    with patch.object(cpu_vec_isa.VecISA, "check_build", _compiles):
        for isa in found:
            bool(isa)  # Inductor keeps the answer


def _compiles(isa: Any, code: str) -> bool:
    """`VecISA.check_build` without a process that loads what was built: PyTorch has asked the CPU before."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    command = [get_cpp_compiler(), *isa.build_arch_flags().split(), "-x", "c++", "-c", "-", "-o", "/dev/null"]
    return subprocess.run(command, input=code.encode(), capture_output=True).returncode == 0


def _precompile() -> threading.Thread | None:
    from torch._inductor.codecache import cpp_prefix_path
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions, is_gcc
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    header = Path(cpp_prefix_path())
    done = header.with_name(f"{header.name}.gch")
    if done.exists() or not is_gcc():
        return None
    # As `CppPythonBindingsCodeCache` compiles kernels.
    options = CppTorchDeviceOptions(include_pytorch=False, shared=True, device_type="cpu", vec_isa=pick_vec_isa())
    compiler, *words = shlex.split(CppBuilder("header", str(header), options).get_command_line())
    words = words[: words.index("-o")]
    words = [word for word in words if word != "-shared" and not word.startswith(("-l", "-L"))]
    thread = threading.Thread(
        target=_write, args=([compiler, "-x", "c++-header", *words], done), daemon=True, name="precompiled-header"
    )
    thread.start()
    return thread


def _write(command: list[str], to: Path) -> None:
    """Run `command` with an output beside `to`, and give it that name when it is whole."""
    part = to.with_name(f"{to.name}.{os.getpid()}")
    try:
        process = subprocess.Popen([*command, "-o", str(part)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except OSError as error:
        log.info("Inductor's header was not precompiled: %s", error)
        return

    def stop() -> None:  # a process that ends sooner leaves nothing behind
        process.kill()
        process.wait()
        part.unlink(missing_ok=True)

    atexit.register(stop)
    try:
        if process.wait() == 0:
            os.replace(part, to)
        else:
            log.info("Inductor's header was not precompiled: the compiler ended with %s", process.returncode)
    except OSError as error:  # the cache folder may be gone already
        log.info("Inductor's header was not precompiled: %s", error)
    finally:
        atexit.unregister(stop)
        part.unlink(missing_ok=True)
