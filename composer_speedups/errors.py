"""Errors that are the user's to mend: one line each, naming the value and the remedy.

The command line prints them without a traceback and exits with code 2.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConflictError",
    "NothingFits",
    "OutOfMemory",
    "RecipeError",
    "SpeedUpUnavailable",
    "TaskError",
    "UserError",
    "first_line",
    "in_a_line",
    "is_out_of_memory",
]


class UserError(Exception):
    """Base of every error whose cause lies in what was asked for, or in what the machine lacks."""


class SpeedUpUnavailable(UserError, RuntimeError):
    """A speed-up needs something that this machine or this model does not have."""


class ConflictError(UserError, ValueError):
    """Two speed-ups contradict each other, or one is listed twice."""


class RecipeError(UserError, ValueError):
    """A recipe or an override cannot be read: unknown key, wrong type, impossible value."""


class CheckpointError(UserError, RuntimeError):
    """A checkpoint cannot be written, read, converted, or resumed from, or the output folder is taken."""


class TaskError(UserError, ValueError):
    """The data or the model that a recipe names cannot be had."""


class NothingFits(UserError):
    """No batch size was found that fits the memory, the time or the data allowed."""


class OutOfMemory(UserError, RuntimeError):
    """The batch does not fit; says which size failed and which to try."""


def first_line(error: BaseException) -> str:
    """The first line with words of what an error says; its kind, where it says nothing. Of what is no `UserError`, and
    has no remedy at its end, 200 letters.

    >>> first_line(ValueError("\\n too small\\nby far")), first_line(OSError())
    ('too small', 'OSError')
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip() if isinstance(error, UserError) else lines[0].rstrip()[:200]


def in_a_line(error: BaseException) -> str:
    """The same, behind its kind.

    >>> in_a_line(ValueError("too small")), in_a_line(OSError())
    ('ValueError: too small', 'OSError')
    """
    kind, line = type(error).__name__, first_line(error)
    return line if line == kind else f"{kind}: {line}"


# The words of the CPU's allocator, of C++, and of cuBLAS and cuDNN. Those ask for memory beside PyTorch's when a thread
# first needs them, for backward when activations take the most: without it they cannot even start.
_NO_MEMORY = ("out of memory", "allocate memory", "bad_alloc", "status_alloc_failed", "allocation_failed")
_NO_MEMORY += ("cublas_status_not_initialized", "cudnn_status_not_initialized")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory was not enough, in whatever words.

    >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"))
    True
    >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"))
    True
    >>> is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"))
    True
    >>> is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    False
    """
    if isinstance(error, (MemoryError, OutOfMemory)) or type(error).__name__ == "OutOfMemoryError":  # torch's
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _NO_MEMORY)
