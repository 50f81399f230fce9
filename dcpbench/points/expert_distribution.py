"""Parse distributions of the experts that tokens take: even, a Zipf law, or counts of a file. No torch.

A file is JSON: {"logical_count": counts}, as SGLang's --init-expert-location takes it, or the counts alone, by layer and expert or by
step, layer and expert. Layers are those with experts, or all of a model.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

from dcpbench.errors import UsageError

OWN = ""  # routing of a point in which the router decides: nearly even with synthetic weights
EVEN, ZIPF = "even", "zipf:"
MAX_EXPONENT = 4.0
HASH_MARK, HASH_DIGITS = "#", 8
TORCH_FILE = ".pt"


def parse_routing(text: str) -> str:
    """Return a value of --routing as points store it: OWN for `even`, `zipf:S`, or the file with its hash; raise UsageError for others."""
    typed = text.strip()
    if typed in (EVEN, OWN):
        return OWN
    if typed.startswith(ZIPF):
        return f"{ZIPF}{parse_exponent(typed):g}"
    path = typed.partition(HASH_MARK)[0]
    return f"{path}{HASH_MARK}{_compute_hash(read_counts(typed))}"


def parse_exponent(text: str) -> float:
    """Return S of `zipf:S`; raise UsageError if it is no valid exponent."""
    try:
        exponent = float(text.removeprefix(ZIPF))
    except ValueError:
        exponent = math.nan
    if not 0 < exponent <= MAX_EXPONENT:
        raise UsageError(
            f"--routing {text}: S is an exponent above 0 and up to {MAX_EXPONENT:g}; write for example zipf:1, or even."
        )
    return exponent


def read_counts(routing: str) -> bytes:
    """Return the content of a file of counts, given with or without its hash; raise UsageError if it has another hash, or cannot be read."""
    path, _, digits = routing.partition(HASH_MARK)
    if path.endswith(TORCH_FILE):
        raise UsageError(
            f"--routing {path}: files of torch are not read. Convert that of SGLang's expert distribution recorder: "
            f"python -c \"import json, torch; print(json.dumps({{'logical_count': torch.load('{path}')['logical_count'].sum(0).tolist()}}))\" "
            "> counts.json"
        )
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError) as e:
        why = e.strerror if isinstance(e, OSError) else "no file name"
        raise UsageError(
            f"--routing {path}: {why}; write even, zipf:S such as zipf:1, or a JSON file with counts of experts."
        ) from e
    if digits not in ("", _compute_hash(content)):
        raise UsageError(
            f"--routing {routing}: the file has changed since; name it without a hash to take it as it is."
        )
    return content


def _compute_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:HASH_DIGITS]
