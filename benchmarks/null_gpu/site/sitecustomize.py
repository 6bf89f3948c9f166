"""Found by every Python process of the null GPU: prepares PyTorch and Triton as soon as they have been imported."""

import importlib.abc
import importlib.util
import os
import sys


class _After(importlib.abc.MetaPathFinder):
    """Does `prepare` with the module called `name`, once that has been imported."""

    def __init__(self, name, prepare):
        self.name, self.prepare = name, prepare

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None:  # not installed, which Python says better
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            self.prepare(module)

        spec.loader.exec_module = exec_module
        return spec


def _torch(torch):
    if os.environ["NULL_GPU"] == "compute":
        from benchmarks.null_gpu import graphs, launches, operators

        graphs.install()
        operators.install()
        launches.install()
    else:
        torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN is not replaced: the next kernel in order is taken


def _triton(compiler):
    from benchmarks.null_gpu.ptx.load import keep_ptx

    keep_ptx(compiler.CUDABackend)


if "NULL_GPU" in os.environ:
    sys.meta_path.insert(0, _After("torch", _torch))
    if os.environ["NULL_GPU"] == "compute":
        sys.meta_path.insert(0, _After("triton.backends.nvidia.compiler", _triton))
