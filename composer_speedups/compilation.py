"""What `torch.compile` needs, where it keeps its code, and what it did: for `torch_compile` and for reports."""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import sys
import sysconfig
from concurrent.futures import TimeoutError as WorkersLate
from functools import cache
from pathlib import Path
from typing import Any

import torch

from composer_speedups import inductor_cpp
from composer_speedups.compat import CompileCounters, compile_counters, keep_module_integers_static
from composer_speedups.errors import SpeedUpUnavailable
from composer_speedups.installed import is_installed

__all__ = [
    "TRITON_INTERPRETED",
    "check_backend",
    "compile_statistics",
    "compiler",
    "missing_for_triton",
    "missing_for_triton_on",
    "missing_kernel",
    "missing_tools",
    "prepare_inductor",
    "settle_compile_workers",
    "use_cache",
    "why_no_cuda",
]

# Whether Triton's interpreter stands in for the GPU, as in the tests. Triton, too, looks when it is imported; and a
# constant is all that a forward pass may ask for: Dynamo breaks the graph at more.
TRITON_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def compile_statistics(since: CompileCounters | None = None) -> dict[str, int | float]:
    """What this process compiled after `since` (a result of `compat.compile_counters`), or since its start.

    `graphs`, `graph_breaks`, `recompiles` (of one piece of Python code, after its first), `compile_seconds`,
    `cache_hits` and `cache_misses` (Inductor's, forward and backward graphs), `frames_over_limit` (pieces of
    code that reached dynamo's limit of recompiles).

    >>> sorted(compile_statistics())[:3]
    ['cache_hits', 'cache_misses', 'compile_seconds']
    """
    now, since = compile_counters(), since or CompileCounters()
    if now.graphs < since.graphs:  # somebody has cleared the counters: they count from zero again
        since = CompileCounters(frames=since.frames)
    attempts = [count - since.frames.get(frame, 0) for frame, count in now.frames.items()]
    limit = torch._dynamo.config.recompile_limit if now.frames else 0
    return {
        "graphs": now.graphs - since.graphs,
        "graph_breaks": max(0, now.graph_breaks - since.graph_breaks),
        "recompiles": sum(max(0, count - 1) for count in attempts),
        "compile_seconds": round(max(0.0, now.seconds - since.seconds), 3),
        "cache_hits": max(0, now.cache_hits - since.cache_hits),
        "cache_misses": max(0, now.cache_misses - since.cache_misses),
        "frames_over_limit": sum(count > limit for count in attempts),
    }


def check_backend(backend: str, mode: str | None) -> None:
    """Raise `ValueError` if there is no such backend, or it does not know the mode."""
    if backend not in ("inductor", "eager", "aot_eager"):  # importing dynamo takes seconds
        import torch._dynamo

        known = torch._dynamo.list_backends(None)
        if backend not in known:
            raise ValueError(f"backend={backend!r} is unknown. There are: {', '.join(known)}")
    if mode not in (None, "default"):
        if backend != "inductor":
            raise ValueError(f"mode={mode!r} is for backend='inductor' only, not {backend!r}. Leave it out")
        import torch._inductor

        modes = list(torch._inductor.list_mode_options())
        if mode not in modes:
            raise ValueError(f"mode={mode!r} is unknown. Use one of: {', '.join(modes)}")


def use_cache(cache_dir: str) -> None:
    """Let this process, from now on, keep Inductor's code in `cache_dir` and find there what others left."""
    try:
        folder = Path(cache_dir).expanduser().absolute()
    except RuntimeError as error:  # ~name, and nobody has that name
        raise SpeedUpUnavailable(f"cache_dir={cache_dir!r} is in a home that nobody has. Name another") from error
    if len(str(folder).split()) > 1 and not torch.cuda.is_available():
        raise SpeedUpUnavailable(
            f"cache_dir={cache_dir!r}: Inductor's calls of the C++ compiler break at the space in {str(folder)!r}. "
            "Name another folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpeedUpUnavailable(f"cache_dir={cache_dir!r} cannot be made: {error.strerror}. Name another") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SpeedUpUnavailable(f"cache_dir={cache_dir!r} cannot be written to. Name another folder")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    # Both are on by default; a user who names a folder wants them on in any case.
    inductor.fx_graph_cache = True
    functorch.enable_autograd_cache = True


def prepare_inductor(block: bool = False, dynamic: bool = False) -> dict[str, Any]:
    """What Inductor needs once in a process, after its cache folder is chosen and before it compiles anything.

    Returns arguments for `torch.compile`, if there are any for graphs of one `block` of a model.
    """
    if dynamic:
        keep_module_integers_static()
    if not torch.accelerator.is_available():
        # Compile workers are Triton's. On few cores they would import PyTorch beside the compiler, for nothing.
        os.environ.setdefault("TORCH_WARM_POOL", "0")
    _end_workers_well()
    if torch.cuda.is_available():
        _start_workers()
    elif block:
        options = inductor_cpp.one_file_per_graph()
        return {"options": options} if options else {}
    else:
        inductor_cpp.prepare()
    return {}


def _start_workers() -> None:
    """Start Inductor's compile workers, which Triton's kernels are for: they import PyTorch while Dynamo traces.

    By itself Inductor does so when it is imported, or in newer versions when it is first called: but not where the
    command line has asked it not to, nor in a run that is a fork of a process that has imported it.
    """
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.warm_pool()
    if hasattr(AsyncCompile, "wakeup"):  # newer versions would start the workers' process, and these with the first job
        AsyncCompile.wakeup()


@cache
def _end_workers_well() -> None:
    """Let this process end without the minutes that Inductor may wait for its compile workers; once is enough.

    From Python 3.12 on no thread starts in a process that is ending. Inductor's process of compile workers starts one
    with its first job, so that one which is told to end before (a short training, or all code found in the cache) never
    does, and this process waits 300 s for it: https://github.com/pytorch/pytorch/issues/162199.
    """
    if sys.version_info < (3, 12):
        return
    importlib.import_module("torch._inductor.async_compile")  # registers its own: the last one to register runs first
    atexit.register(settle_compile_workers)


def settle_compile_workers() -> None:
    """Let Inductor's compile workers, if it has started any, do a job, after which they can be told to end."""
    if "torch._inductor.async_compile" not in sys.modules:
        return
    from torch._inductor import async_compile
    from torch._inductor.compile_worker.subproc_pool import SubprocPool

    for pool in getattr(async_compile, "_pool_set", ()):
        if not (isinstance(pool, SubprocPool) and pool.running):
            continue
        with pool.futures_lock:  # it starts its timer of idle workers, a thread, with the first answer; see above
            idle_timer, pool.timer = getattr(pool, "timer", None), None
        if idle_timer is not None:
            idle_timer.quit()
        try:
            pool.submit(os.getpid).result(60)
        except WorkersLate:
            pool.process.kill()
        except Exception:  # they have ended by themselves: nothing will be waited for
            continue


def compiler(device: torch.device) -> str | None:
    """Path of the compiler that Inductor uses for `device` (on CUDA for Triton's launchers); None if there is none."""
    return next((path for name in _compilers(device) if (path := shutil.which(name))), None)


def _compilers(device: torch.device) -> list[str]:
    if device.type == "cuda":
        return [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang", "cc"]
    return [os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")]


def why_no_cuda(device: torch.device | None, instead: str) -> str | None:
    """Why CUDA kernels cannot run on `device` (None: on this machine), ending with `instead`; None if they can."""
    if torch.cuda.is_available() if device is None else device.type == "cuda":
        return None
    where = "this machine has none" if not torch.cuda.is_available() else f"the run is on {device}"
    return f"it needs a CUDA device, and {where}; {instead}"


def missing_for_triton_on(device: torch.device | None, instead: str) -> str | None:
    """What Triton's kernels lack on `device`; its interpreter needs no GPU. `instead` is the remedy."""
    return (None if TRITON_INTERPRETED else why_no_cuda(device, instead)) or missing_for_triton()


def missing_for_triton() -> str | None:
    """What Triton's kernels lack on this machine; None if nothing. That there is no GPU is for callers to say."""
    if not is_installed("triton"):
        return "it needs the package triton, which is not installed; `pip install triton`"
    return missing_tools(torch.device("cuda")) if torch.cuda.is_available() else None


def missing_kernel(device: torch.device) -> str | None:
    """Why a kernel with a CUDA side in Triton and a CPU side cannot run on `device`; None if it can.

    >>> missing_kernel(torch.device("cpu")) is None
    True
    """
    if device.type not in ("cuda", "cpu", "meta"):
        return f"its kernels are for CUDA and for CPUs, and the run is on {device}; remove it"
    return missing_for_triton() if device.type == "cuda" else None


def missing_tools(device: torch.device) -> str | None:
    """What Inductor lacks to generate code for `device`."""
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            return "there is no CUDA GPU. Use the CPU"
        if not is_installed("triton"):
            return "it needs the package triton on CUDA, which is not installed. Run `pip install triton`"
        if torch.cuda.get_device_capability(device) < (7, 0):
            return "Triton needs compute capability 7.0 (Volta) or newer. Leave it out on this GPU"
    who = "Triton" if device.type == "cuda" else "Inductor"
    if compiler(device) is None:
        return (
            f"{who} needs a compiler, and {' or '.join(_compilers(device))} is not on the PATH. "
            "Run `apt-get install g++` or the like, or leave it out"
        )
    if not headers.exists():
        return f"{who} needs Python's headers, and {headers} is not there. Run `apt-get install python3-dev`"
    return None
