"""A GPU that is not there: the CUDA paths of this package run on a machine without one.

    python -m benchmarks.null_gpu -- python -m benchmarks.gpu --parts limits training --minutes 5 --out /tmp/rehearsal
    python -m benchmarks.null_gpu --compute -- python -m pytest -m gpu tests/algorithms/test_unpadding.py

PyTorch's own CUDA build runs, with its dispatcher, allocator, streams, autocast and GradScaler, and Triton and Inductor
compile for the kind of GPU that is asked for; only libcudart, libcublas and libcuda are replaced (`runtime.c`,
`driver.c`). Without `--compute` kernels do nothing and no number means anything: what is seen is that a program gets to
its end, what it allocates, and how long the *host* needs for a step, which on a fast GPU decides.

With `--compute` numbers are right. Each operator of PyTorch's CUDA backend computes with its CPU kernel on the same
memory (`operators.py`), flash and memory-efficient attention in float64. Triton's kernels, this package's and those
that Inductor writes, are executed from their PTX (`launches.py`, `ptx/`), which also finds accesses outside of what is
allocated (to the byte with `PYTORCH_NO_CUDA_MEMORY_CACHING=1`) and warps that meet in shared memory without a barrier.
Replays of CUDA graphs compute again (`graphs.py`).

What cannot be seen: what kernels of PyTorch, cuBLAS, flash attention and bitsandbytes compute on a GPU, tensor cores,
races through global memory or between streams, the time of anything on the device. Timings and memory made here belong
into no results. Needs gcc, and PyTorch for CUDA 13, as on the modern stack; Linux on x86-64.
"""
