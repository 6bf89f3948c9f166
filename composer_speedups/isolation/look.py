"""The question that a fresh process answers before anything is measured: what machine, what data, what can run."""

from __future__ import annotations

from typing import Any

from composer_speedups.errors import UserError
from composer_speedups.isolation.isolate import Isolation
from composer_speedups.isolation.ranks import check_ranks

__all__ = ["look"]


def look(isolation: Isolation, payload: dict[str, Any], entry: str, timeout: float) -> dict[str, Any]:
    """What `entry` answers to `payload`: a dict with, among others, `error` and `environment`.

    Raises:
        UserError: the answer's `error`, or that there was no answer, with what the process said; or the machine has no
            room for as many ranks as `payload` names.
    """
    outcome = isolation.run(payload, timeout=timeout, entry=entry)
    if outcome.value is None:
        said = f"\n{outcome.log.strip()}" if outcome.log.strip() else ""
        raise UserError(f"cannot look at this machine: {outcome.reason}. `composer-speedups doctor` tells more{said}")
    if outcome.value["error"]:
        raise UserError(outcome.value["error"])
    check_ranks(payload["ranks"], outcome.value["environment"])
    return outcome.value
