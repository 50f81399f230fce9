"""Find in the log of a server why it ended, and what to do about known causes. No I/O."""

from __future__ import annotations

import enum
import re

import msgspec

from dcpbench.points.redaction import redact_part
from dcpbench.show.text import fit_line

TAIL = 1 << 17  # bytes at the end of a log in which a reason is searched
MAX_REASON = 400  # characters
COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
RAISED = re.compile(r"^(?:.*?\s)?([A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt)): (.+)$")
POINTS_ELSEWHERE = re.compile(
    r"root cause above|initialization failed|see (the )?(stack )?trace|encountered an issue", re.IGNORECASE
)
VALIDATION = re.compile(r"\d+ validation errors? for \w+$")
NCCL_DETAIL = "Last error:"  # line of an NCCL error, before the one that names the failed call


class Cause(enum.StrEnum):
    """Causes for which there is advice."""

    MEMORY = "GPU memory"
    PORT = "port"
    UNKNOWN = "unknown"


PATTERNS = {
    Cause.MEMORY: re.compile(
        r"out of memory|OutOfMemory|cudaErrorMemoryAllocation|to CUDA (?:c|m)alloc|No available memory for the cache blocks|"
        r"Free memory on device .* is less than|Not enough memory",
        re.IGNORECASE,
    ),
    Cause.PORT: re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE),
}
ADVICE = {
    Cause.MEMORY: "The GPU memory does not suffice: end other processes on these GPUs (nvidia-smi lists them), or lower the server's share "
    "of it (vLLM: --gpu-memory-utilization, SGLang: --mem-fraction-static).",
    Cause.PORT: "Another process took a port that this server had chosen: run the command again, and do not start other servers on this "
    "machine at the same time.",
}


class ExitReason(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why a server ended."""

    message: str  # the server's own
    cause: Cause

    @property
    def advice(self) -> str:
        """Return what to do next; empty for an unknown cause."""
        return ADVICE.get(self.cause, "")


def find_reason(log: bytes) -> str:
    """Return why a server ended: the last error in its log that names a cause, else its last line."""
    text = COLOUR.sub("", redact_part(log[-TAIL:].decode("utf-8", "replace")))
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    raised = [(m, i) for i, line in enumerate(lines) if (m := RAISED.match(line))]
    causes = [(m, i) for m, i in raised if not POINTS_ELSEWHERE.search(m[0])]
    if found := (causes or raised):
        error, place = found[-1]
        reason = f"{error[1]}: {error[2]}"
        if detail := _find_detail(reason, lines[place + 1 : place + 3]):
            reason = f"{reason.rstrip('.')}: {detail}"
        return fit_line(reason)[:MAX_REASON]
    return fit_line(lines[-1])[:MAX_REASON] if lines else "no output"


def find_exit_reason(log: bytes) -> ExitReason:
    """Return why a server ended, with its cause."""
    message = find_reason(log)
    cause = next((cause for cause, pattern in PATTERNS.items() if pattern.search(message)), Cause.UNKNOWN)
    return ExitReason(message=message, cause=cause)


def _find_detail(reason: str, following: list[str]) -> str:
    """Return the part of an error message that follows in the next lines: of pydantic, and of NCCL."""
    if VALIDATION.search(reason) and following:
        return following[0].strip().partition(" [type=")[0]
    if len(following) > 1 and following[0].strip().endswith(NCCL_DETAIL):
        return following[1].strip()
    return ""
