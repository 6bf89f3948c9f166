"""Inductor's first compilation on CPUs, sooner: no probes of what is known, headers parsed once, one file per graph.

With an empty cache Inductor asks for each vector instruction set, by compiling a test that includes PyTorch's headers
and loading it in a new Python process that imports PyTorch: seconds each, and half of them again in each later
process. PyTorch itself has found out which instructions the CPU has; whether the compiler takes their flags is
asked here with an empty file. What probes by itself (AMX, and in newer versions AVX512-BF16 and VNNI) only compiles its
few lines here, which include nothing, and starts no process to load them.

Then each kernel is a C++ file of its own that begins with the same header, and most of its compilation is reading
that header. GCC takes `name.h.gch` beside `name.h` if the flags agree, and ignores it if they do not; it is
made in the background while the model is being prepared. From 2.8 on PyTorch precompiles by itself.

What the header leaves open GCC works out anew for each kernel, half of what is left. Inductor can also write all
kernels of a graph, and the code that calls them, into one file (`cpp_wrapper`). That has headers of its own, and reads
them all in turn: here both sets are one precompiled header. That is less work, but of one core, where files of kernels
are spread over the cores. So it is for few cores, and for graphs of a block: those of a whole model are too long.
`TORCHINDUCTOR_CPP_WRAPPER=0` turns it off: for a block with operators of its own, of which C++ code can call fewer (on
2.7 none that returns nothing).

The kernels that run are the same. What it saves is in benchmarks/results/2026-11-22_cpu_compiling_3 and, with AMX,
2026-11-24_cpu_amx_compiling, both before graphs had one file, and with it in 2026-11-25_cpu_compiling_5.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import platform
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from composer_speedups.compat import INDUCTOR_PRECOMPILES

__all__ = ["one_file_per_graph", "prepare"]

log = logging.getLogger("composer_speedups")

_CAPABILITIES = {"AVX512": 512, "AVX2": 256}  # PyTorch's names: bits
_FEW_CORES = 3  # with more, a file for each kernel is compiled sooner than one for the graph
_INCLUDES = ("get_device_include_path_jit", "get_device_include_path")  # what says which header a graph begins with
_OLD = 600  # seconds: no header takes as long
_at_work: dict[Path, threading.Thread] = {}  # by header


def prepare() -> threading.Thread | None:
    """Spare Inductor the probes, and precompile its header; return the thread that does so, None if none is needed.

    Call it after the cache folder is chosen, and before anything is compiled. Without a compiler, on other CPUs or
    systems, and where the user has said something about it, nothing is done.
    """
    if not _hastens():
        return None
    try:
        _trust_the_instructions()
        return None if INDUCTOR_PRECOMPILES else _precompile_for_kernels()
    except Exception as error:  # Inductor's own way remains, and its own message where that fails too
        log.info("Inductor's first compilation is not hastened: %s", error)
        return None


def one_file_per_graph() -> dict[str, Any]:
    """As `prepare`, for graphs of one block; return the options of `torch.compile` that make one file of each.

    Without any where that is no gain, or where `TORCHINDUCTOR_CPP_WRAPPER` or Inductor's configuration has decided.
    """
    try:
        from torch._inductor import config
        from torch._inductor.cpp_builder import is_gcc

        decided = config.cpp_wrapper or "TORCHINDUCTOR_CPP_WRAPPER" in os.environ
        if decided or config.compile_threads > _FEW_CORES or not _hastens() or not is_gcc():
            prepare()
            return {}
        _trust_the_instructions()
        # Where Inductor precompiles, it would do so with the half of ours, and wait for that.
        of_graphs = {"cpp_cache_precompile_headers": False} if INDUCTOR_PRECOMPILES else {}
        with config.patch(of_graphs):  # decides about the command, too
            _precompile_for_graphs()
    except Exception as error:
        log.info("Inductor's first compilation is not hastened: %s", error)
        return {}
    return {"cpp_wrapper": True, **of_graphs}


def _hastens() -> bool:
    return sys.platform.startswith("linux") and platform.machine() == "x86_64"


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


def _precompile_for_kernels() -> threading.Thread | None:
    words = _compile_words(include_pytorch=False)  # as `CppPythonBindingsCodeCache` compiles
    return _precompile(_own_prefix(words), words)


def _own_prefix(words: list[str]) -> Path:
    """Let kernels begin with a copy of Inductor's header, for this environment alone; return its path."""
    from torch._inductor import codecache

    own = getattr(codecache.cpp_prefix_path, "own", codecache.cpp_prefix_path)
    text = Path(codecache.__file__).with_name("codegen").joinpath("cpp_prefix.h").read_text()
    header = _write_header(text, words)

    def cpp_prefix_path() -> str:  # the cache folder may be another, or gone, when a kernel is compiled
        return str(header) if header.exists() else own()

    cpp_prefix_path.own = own
    codecache.cpp_prefix_path = cpp_prefix_path
    return header


def _precompile_for_graphs() -> threading.Thread | None:
    """Let graphs begin with a header that has all of theirs and of their kernels, and precompile it."""
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
    from torch._inductor.virtualized import V

    if INDUCTOR_PRECOMPILES:
        kernels = "<torch/csrc/inductor/cpp_prefix.h>"
    else:  # the same file as for graphs of a whole model, whose kernels begin with it, too
        kernels = f'"{_own_prefix(_compile_words(include_pytorch=False))}"'
    words = _compile_words(include_pytorch=True)  # as `CppWrapperCodeCache` compiles
    header = _write_header(f"#include <torch/csrc/inductor/cpp_wrapper/cpu.h>\n#include {kernels}\n", words)

    thread = _precompile(header, words)
    which = next(name for name in _INCLUDES if hasattr(CppWrapperCpu, name))
    own_include = getattr(CppWrapperCpu, which)
    own_include = getattr(own_include, "own", own_include)
    own_generate = getattr(CppWrapperCpu.generate, "own", CppWrapperCpu.generate)

    def include(device: str) -> str:
        own = own_include(device)
        if device != "cpu" or V.graph.aot_mode:
            return own
        # Graphs from a cache are compiled elsewhere and later, where that header may not be.
        return f'#if __has_include("{header}")\n#include "{header}"\n#else\n{own}\n#endif'

    def generate(wrapper: CppWrapperCpu, is_inference: bool) -> Any:
        # The last before the compiler. Most of the header is done by now: the rest of it takes less time than to read
        # all of it beside the process that precompiles it.
        if thread is not None:
            thread.join()
        return own_generate(wrapper, is_inference)

    include.own, generate.own = own_include, own_generate
    setattr(CppWrapperCpu, which, staticmethod(include))
    CppWrapperCpu.generate = generate
    return thread


def _compile_words(include_pytorch: bool) -> list[str]:
    """The command that compiles a file on CPUs, without the file's name and without linking."""
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    options = CppTorchDeviceOptions(
        include_pytorch=include_pytorch, shared=True, device_type="cpu", vec_isa=pick_vec_isa()
    )
    compiler, source, *words = shlex.split(CppBuilder("header", "header.h", options).get_command_line())
    assert source == "header.h", source
    words = words[: words.index("-o")]
    return [compiler, *(word for word in words if word != "-shared" and not word.startswith(("-l", "-L")))]


def _write_header(text: str, words: list[str]) -> Path:
    """Write `text` to a file in Inductor's cache, for this environment alone.

    GCC asks of a precompiled header whether the flags agree and the macros, but not whether it was made from the same
    files: another version of PyTorch or Python, of which the cache may be the same, would be taken without a word.
    """
    from torch._inductor import codecache
    from torch._inductor.cpp_builder import get_compiler_version_info

    installed = Path(torch.version.__file__).stat().st_mtime_ns
    environment = (words, get_compiler_version_info(words[0]), torch.version.git_version, installed, sys.version)
    return Path(codecache.write(text, "h", extra=repr(environment))[1])


def _precompile(header: Path, words: list[str]) -> threading.Thread | None:
    from torch._inductor.cpp_builder import is_gcc

    done = header.with_name(f"{header.name}.gch")
    if header in _at_work and _at_work[header].is_alive():  # for another model of this process
        return _at_work[header]
    if done.exists() or not is_gcc():
        return None
    compiler, *flags = words
    command = [compiler, "-x", "c++-header", str(header), *flags]
    thread = threading.Thread(target=_write, args=(command, done), daemon=True, name="precompiled-header")
    thread.start()
    _at_work[header] = thread
    return thread


def _write(command: list[str], to: Path) -> None:
    """Run `command` with an output beside `to`, and give it that name when it is whole."""
    for left in to.parent.glob(f"{to.name}.*"):  # by processes that were killed
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _OLD:
                left.unlink()
    part = to.with_name(f"{to.name}.{uuid.uuid4().hex}")
    try:
        process = subprocess.Popen(
            [*command, "-o", str(part)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # g++ starts the compiler proper, which must end with it
        )
    except OSError as error:
        log.info("Inductor's header was not precompiled: %s", error)
        return
    owner = os.getpid()

    def stop() -> None:  # a process that ends sooner leaves nothing behind
        if os.getpid() != owner:  # a fork of it has no say in this
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
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
