"""What result files and their names say of the server and of lengths, by the words that are common for it.

Metadata of a benchmark (`--metadata gpu=H200`), information of a server, and names of files and folders
(`dsr1_1k1k_tp8_conc64.json`) have no fixed names: here are those that are read, one list for all tools.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from dcpbench.points.names import UNKNOWN
from dcpbench.show.text import one_line, shortened

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

HARDWARE = ("hardware", "hw", "gpu", "gpu_name", "gpu_type", "gpu_model", "device_name", "accelerator")
PRECISION = {
    "weights_dtype": ("precision", "quantization", "quant", "weight_dtype", "weights_dtype"),
    "kv_dtype": ("kv_cache_dtype", "kv_dtype", "kv_precision"),
    "dtype": ("dtype",),
}
"""Of a server's weights, of its KV cache, and of what it computes with: where only that is said, weights may be smaller."""
DEGREES = {
    "tp": ("tensor_parallel_size", "tensor_parallel", "tp_size", "tp"),
    "dp": ("data_parallel_size", "data_parallel", "dp_size", "dp"),
    "dcp": ("decode_context_parallel_size", "dcp_size", "dcp"),
}
EXPERTS = ("expert_parallel_size", "expert_parallel", "ep_size", "ep")
"""Names of the expert parallel degree, as a number."""
SPREAD = ("enable_expert_parallel", "enable_ep_moe")
"""Whether they are dealt out to all."""
LENGTHS = (
    ("random_input_len", "input_len", "isl", "input_tokens"),
    ("random_output_len", "output_len", "osl", "output_tokens"),
)
"""Of prompts, and of answers."""
SERVER = frozenset(
    (
        *(*HARDWARE, *EXPERTS, *SPREAD),
        *(name for names in (*PRECISION.values(), *DEGREES.values(), *LENGTHS) for name in names),
    )
)
LONGEST = 100
"""Characters of a piece of hardware, a precision, a label."""
DTYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "torch.bfloat16": "bf16",
    "fp8_e4m3": "fp8",
}
NOTHING = ("", "auto", "none", "null", "unknown", "false")
VENDORS = {"NVIDIA": re.compile(r"(?:gb|gh|h|b|a|l)\d{1,3}s?"), "AMD": re.compile(r"mi\d{3}[a-z]?")}
K = 1024
LAST_FOLDERS = 2
"""Of a file's path, that are read for what its name does not say."""
_START, _END = r"(?:^|[^A-Za-z0-9])", r"(?=$|[^A-Za-z0-9])"
_DEGREE = {name: re.compile(rf"{_START}{name}[=_-]?(\d{{1,4}}){_END}", re.IGNORECASE) for name in (*DEGREES, "ep")}
_ASKED = [
    re.compile(rf"{_START}(?:{words})[=_-]?(\d{{1,7}})(k?){_END}", re.IGNORECASE)
    for words in ("isl|input[_-]?len", "osl|output[_-]?len")
]
_BOTH = re.compile(rf"{_START}(?:in)?(\d{{1,7}})(k?)[_x-]?(?:out)?(\d{{1,7}})(k?){_END}", re.IGNORECASE)
"""`1k1k`, `8k-1k`, `in1024_out128`; with neither `k` nor words two numbers say nothing."""


@dataclasses.dataclass(frozen=True)
class Name:
    """What the name of a file, or of the folders around it, says."""

    degrees: Mapping[str, int]
    """By our names, and `ep`, in the words of whoever named the file."""
    lengths: tuple[int | None, int | None]


def of_name(file: str) -> Name:
    """What a path says; the name of the file before that of its folder."""
    parts = PurePath(file).with_suffix("").parts[-1 - LAST_FOLDERS :][::-1]
    degrees = {name: int(found) for name, form in _DEGREE.items() if (found := _first(form, parts))}
    both = next((m for part in parts for m in _BOTH.finditer(part) if (m[2] and m[4]) or "out" in m[0].lower()), None)
    if both:
        return Name(degrees, (_tokens(both[1], both[2]), _tokens(both[3], both[4])))
    prompts, answers = (
        next((_tokens(m[1], m[2]) for part in parts if (m := form.search(part))), None) for form in _ASKED
    )
    return Name(degrees, (prompts, answers))


def _tokens(digits: str, k: str) -> int | None:
    return int(digits) * (K if k else 1) or None


def _first(form: re.Pattern[str], parts: Iterable[str]) -> str:
    return next((match[1] for part in parts if (match := form.search(part)) and int(match[1])), "")


def brief(text: str) -> str:
    """On one line, and no longer than a label may be."""
    return shortened(one_line(text), LONGEST)


def hardware(fields: Mapping[str, Any]) -> str | None:
    """`NVIDIA H200`, whichever name it has; None where nothing says it."""
    found = _text(fields, HARDWARE)
    return found and device(found)


def device(name: str) -> str:
    """`h200` as `NVIDIA H200`, `mi355x` as `AMD MI355X`; a name that is whole stays as it is."""
    vendor = next((vendor for vendor, form in VENDORS.items() if form.fullmatch(name.lower())), "")
    return f"{vendor} {name.upper()}" if vendor else name


def precision(fields: Mapping[str, Any]) -> dict[str, str]:
    """By our names `fp8`, `bf16`; `unknown` where nothing says it."""
    found = {ours: (_text(fields, theirs) or UNKNOWN).lower() for ours, theirs in PRECISION.items()}
    return {ours: DTYPES.get(text, text) for ours, text in found.items()}


def _text(fields: Mapping[str, Any], names: Iterable[str]) -> str | None:
    for name in names:
        value = fields.get(name)
        if isinstance(value, str) and value.strip().lower() not in NOTHING:
            return brief(value)
    return None
