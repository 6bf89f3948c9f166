"""Found by every Python process of the null GPU: prepares PyTorch as soon as it has been imported."""

import importlib.abc
import importlib.util
import os
import sys


class _AfterTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            if os.environ["NULL_GPU"] == "compute":
                from benchmarks.null_gpu.operators import install

                install()
            else:
                module.backends.cuda.enable_cudnn_sdp(False)  # cuDNN is not replaced: the next kernel in order is taken

        spec.loader.exec_module = exec_module
        return spec


if "NULL_GPU" in os.environ:
    sys.meta_path.insert(0, _AfterTorch())
