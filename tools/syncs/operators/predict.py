"""Predict the waits of the measured cases with a dry run: `python -m tools.syncs.operators.predict FILE [PART OF]`."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dcpbench.syncs.dry_run import dry_run
from tools.syncs.operators.cases import list_groups, make_cases

if TYPE_CHECKING:
    from dcpbench.syncs.dry_run import DryRun


def predict(group: str) -> dict[str, Any]:
    """Run the cases of a group in one dry run; return each call with the operators that would wait."""
    calls: list[dict[str, Any]] = []
    failed: list[str] = []
    case = None
    with dry_run() as run:
        made = make_cases(group, "cuda")
        while True:
            try:
                case = next(made, None)
                if case is None:
                    break
                result, waits, unmeasured = _watch(run, case.run)
                calls.append({"what": case.name, "waits": waits, "unmeasured": unmeasured})
                backward = case.make_backward(result)
                if backward:
                    _, waits, unmeasured = _watch(run, backward)
                    calls.append({"what": f"{case.name} backward", "waits": waits, "unmeasured": unmeasured})
            except Exception as error:  # noqa: BLE001 -- continue with other operators after an exception
                failed.append(f"{case.name if case else group}: {type(error).__name__}: {str(error)[:200]}")
        _leave_groups()
    return {"group": group, "calls": calls, "failed": failed}


def _leave_groups() -> None:
    """Destroy the process group of a case, because a later dry run would not know its backend."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _watch(run: DryRun, call: Any) -> tuple[Any, list[str], list[str]]:
    before, known = len(run.syncs), set(getattr(run, "unmeasured", ()))
    result = call()
    waits = [f"{s.rule} {s.op} {s.direction}" for s in run.syncs[before:] if not s.may_block]
    return result, waits, sorted(set(getattr(run, "unmeasured", ())) - known)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    output, *share = sys.argv[1:]
    part, of = map(int, share or ("0", "1"))
    Path(output).write_text("".join(json.dumps(predict(group)) + "\n" for group in list_groups()[part::of]))
