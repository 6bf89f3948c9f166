"""Build the null GPU's libraries for this PyTorch, once, and run a command with them. See `__init__.py`."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import NoReturn

_HERE = Path(__file__).parent
_SOURCES = ("runtime.c", "driver.c")
# Annotations for nvcc that the headers expect; the wheel of the runtime leaves this one header out.
_HOST_DEFINES = (
    "__host__ __device__ __global__ __device_builtin__ CUDARTAPI CUDARTAPI_CDECL CUDART_CB __cudart_builtin__ "
    "__device_builtin_texture_type__ __device_builtin_surface_type__"
)
_DRIVER = (
    "cuCtxSetCurrent cuCtxSetLimit cuCtxPushCurrent cuCtxPopCurrent cuFuncSetAttribute cuFuncSetCacheConfig "
    "cuLaunchCooperativeKernel cuModuleUnload cuTensorMapEncodeTiled "
    "cuPointerGetAttributes cuMemGetAddressRange_v2 cuLinkCreate_v2 cuLinkAddData_v2 cuLinkComplete "
    "nvmlDeviceGetGpuFabricInfoV nvmlDeviceGetNvLinkRemoteDeviceType nvmlDeviceGetNvLinkRemotePciInfo_v2 "
    "nvmlSystemGetCudaDriverVersion_v2"
)


def main(arguments: list[str] | None = None) -> NoReturn:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.null_gpu",
        description="Run a command on a GPU that is not there: CUDA paths run on the CPU.",
        epilog="Example: python -m benchmarks.null_gpu --compute -- python -m pytest -m gpu tests/kernels",
    )
    parser.add_argument("--compute", action="store_true", help="operators and kernels compute, on the CPU")
    parser.add_argument("--capability", default="9.0", help="of which kind the GPU is (default: 9.0, an H100)")
    parser.add_argument("--memory", type=int, default=80, help="its GiB (default: 80)")
    parser.add_argument("command", nargs="+", help="after --")
    options = parser.parse_args(arguments)
    if not re.fullmatch(r"\d{1,2}\.\d", options.capability):
        parser.error(f"--capability is a number as 8.6, not {options.capability!r}")
    if options.memory < 1:
        parser.error(f"--memory is 1 GiB at least, not {options.memory}")
    try:
        folder = build()
    except (RuntimeError, OSError) as error:
        parser.error(str(error))
    environment = os.environ | {
        "LD_PRELOAD": str(folder / "libnull.so"),
        "LD_LIBRARY_PATH": _joined(folder, "LD_LIBRARY_PATH"),
        "PYTHONPATH": os.pathsep.join([str(_HERE / "site"), _joined(_HERE.parents[1], "PYTHONPATH")]),
        "TRITON_LIBCUDA_PATH": str(folder),
        "PYTORCH_JIT": "0",  # TorchScript would have kernels of its own made by NVRTC, as DeBERTa's scripted functions
        "NULL_GPU": "compute" if options.compute else "idle",
        "NULL_GPU_CAPABILITY": options.capability.replace(".", ""),
        "NULL_GPU_MEMORY": str(options.memory),
    }
    if options.compute:  # kernels end as PTX, which no other process may find in its cache
        environment |= dict.fromkeys(("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"), str(folder / "cache"))
    try:
        os.execvpe(options.command[0], options.command, environment)
    except OSError as error:
        parser.error(f"cannot run {options.command[0]!r}: {error.strerror}")


def build() -> Path:
    """The folder with libnull.so, libcuda.so.1 and libnvidia-ml.so.1; made if it is not there.

    Raises:
        RuntimeError: PyTorch here is not for CUDA 13, or gcc failed.
    """
    torch = Path(importlib.util.find_spec("torch").origin).parent
    include = torch.parent / "nvidia/cu13/include"
    if not (include / "cuda_runtime_api.h").exists():
        raise RuntimeError("the null GPU needs PyTorch for CUDA 13: use the modern stack (make setup-modern)")
    key = sha256(b"".join((_HERE / name).read_bytes() for name in (*_SOURCES, "__main__.py")) + bytes(torch))
    folder = Path(tempfile.gettempdir()) / f"composer_speedups_null_gpu-{os.getuid()}-{key.hexdigest()[:16]}"
    if folder.exists():
        return folder
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "made"
        (made / "crt").mkdir(parents=True)
        defines = "".join(f"#define {name}\n" for name in _HOST_DEFINES.split())
        aligned = "".join(f"#define {n}(n) __attribute__((aligned(n)))\n" for n in ("__builtin_align__", "__align__"))
        (made / "crt/host_defines.h").write_text(f"#pragma once\n{defines}{aligned}#define __location__(a)\n")
        called = _symbols(torch.glob("lib/*.so"), "--undefined-only")
        runtime = {name for name in called if re.match(r"(__)?cuda|cublas", name)}
        _library(made, "libnull.so", "runtime.c", runtime, f"-I{include}", f"-I{made}", "-lpthread")
        driver = {name for name in called if re.match(r"cu[A-Z]", name)} | set(_DRIVER.split())
        _library(made, "libcuda.so.1", "driver.c", driver, f"-L{made}", "-lnull", f"-Wl,-rpath,{folder}")
        (made / "libnvidia-ml.so.1").symlink_to("libcuda.so.1")
        (made / "libcuda.so").symlink_to("libcuda.so.1")
        try:
            made.rename(folder)
        except OSError:  # somebody else was quicker
            if not folder.exists():
                raise
    return folder


def _library(folder: Path, name: str, source: str, wanted: set[str], *flags: str) -> None:
    """Compile `source`, with a function that returns 0 for each of `wanted` that it does not have."""
    command = ["gcc", "-O1", "-fPIC", "-shared", "-w", str(_HERE / source)]
    tail = ["-o", str(folder / name), f"-Wl,-soname,{name}", *flags]
    _run([*command, *tail])
    rest = folder / f"{name}.c"
    missing = sorted(wanted - _symbols([folder / name], "--defined-only"))
    rest.write_text("".join(f"int {function}() {{ return 0; }}\n" for function in missing))
    _run([*command, str(rest), *tail])


def _symbols(libraries: Iterable[Path], which: str) -> set[str]:
    lines = _run(["nm", "-D", which, *map(str, libraries)]).splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines if line.strip() and not line.endswith(":")}


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise RuntimeError(f"the null GPU needs {command[0]}: install gcc and binutils") from None
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr.strip().splitlines()[0]}")
    return done.stdout


def _joined(first: Path, variable: str) -> str:
    return os.pathsep.join(filter(None, [str(first), os.environ.get(variable)]))


if __name__ == "__main__":
    main()
