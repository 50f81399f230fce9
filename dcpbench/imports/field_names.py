"""Map the names with which result files, files and folders describe a server and the lengths of requests.

Metadata of a benchmark (`--metadata gpu=H200`), the information of a server, and names such as
`dsr1_1k1k_tp8_conc64.json` follow no standard. The names that are read are listed here once for all tools.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from dcpbench.points.names import UNKNOWN
from dcpbench.records.record import CPU
from dcpbench.show.text import fit_line, summarize_long_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

HARDWARE = ("hardware", "hw", "gpu", "gpu_name", "gpu_type", "gpu_model", "device_name", "accelerator")
PRECISION = {
    "weights_dtype": ("precision", "quantization", "quant", "weight_dtype", "weights_dtype"),
    "kv_dtype": ("kv_cache_dtype", "kv_dtype", "kv_precision"),
    "dtype": ("dtype",),  # compute dtype; weights may be smaller
}
DEGREES = {
    "tp": ("tensor_parallel_size", "tensor_parallel", "tp_size", "tp"),
    "dp": ("data_parallel_size", "data_parallel", "dp_size", "dp"),
    "dcp": ("decode_context_parallel_size", "dcp_size", "dcp"),
    "pp": ("pipeline_parallel_size", "pipeline_parallel", "pp_size", "pp"),
    "pcp": ("prefill_context_parallel_size", "pcp_size", "pcp"),
}
EXPERTS = ("expert_parallel_size", "expert_parallel", "ep_size", "ep")  # number of expert-parallel ranks
SPREAD = ("enable_expert_parallel", "enable_ep_moe")  # switches for expert parallelism over all ranks
LENGTHS = (
    ("random_input_len", "input_len", "isl", "input_tokens"),
    ("random_output_len", "output_len", "osl", "output_tokens"),
)  # of prompts, and of answers
SERVER = frozenset(
    (
        *(*HARDWARE, *EXPERTS, *SPREAD),
        *(name for names in (*PRECISION.values(), *DEGREES.values(), *LENGTHS) for name in names),
    )
)
LAYOUT = frozenset((*(name for names in DEGREES.values() for name in names), *EXPERTS, *SPREAD))
MAX_LABEL = 100  # characters of a device, a precision, a label
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
MAX_FOLDERS = 2  # folders of a file's path that are read for what its name does not have
_START, _END = r"(?:^|[^A-Za-z0-9])", r"(?=$|[^A-Za-z0-9])"
_DEGREE = {name: re.compile(rf"{_START}{name}[=_-]?(\d{{1,4}}){_END}", re.IGNORECASE) for name in (*DEGREES, "ep")}
_ALL_EXPERTS = re.compile(  # `dep8`, `tep8`: experts over 8 GPUs, attention DP or TP (InferenceX, RECIPES.md)
    rf"{_START}(dep|tep)(\d{{1,4}}){_END}", re.IGNORECASE
)
_ATTENTION_DP = re.compile(  # `dpatrue`: attention DP over the tp GPUs (InferenceX, benchmark-tmpl.yml)
    rf"{_START}dpa[=_-]?(true|false){_END}", re.IGNORECASE
)
_INSTANCES = re.compile(  # `1p2d`, `disagg-true`: prefill and decode instances on GPUs of their own
    rf"{_START}(?:\d{{1,3}}p\d{{1,3}}d|disagg(?:regated)?(?![=_-]?false)){_END}", re.IGNORECASE
)
_ASKED = [
    re.compile(rf"{_START}(?:{words})[=_-]?(\d{{1,7}})(k?){_END}", re.IGNORECASE)
    for words in ("isl|input[_-]?len", "osl|output[_-]?len")
]
_BOTH = re.compile(  # `1k1k`, `8k-1k`, `in1024_out128`; two numbers without `k` and words are not lengths
    rf"{_START}(?:in)?(\d{{1,7}})(k?)[_x-]?(?:out)?(\d{{1,7}})(k?){_END}", re.IGNORECASE
)


@dataclasses.dataclass(frozen=True)
class Name:
    """Hold the contents of the name of a file, or of the folders around it."""

    degrees: Mapping[str, int]  # degrees by our names, and `ep`; tp counts the GPUs of one dp replica, as in vLLM
    lengths: tuple[int | None, int | None]
    several_instances: bool = False  # true for names such as `1p2d`, in which degrees are those of one instance


def parse_name(file: str) -> Name:
    """Return what a path contains. The name of the file goes before the name of its folder."""
    parts = PurePath(file).with_suffix("").parts[-1 - MAX_FOLDERS :][::-1]
    several = any(_INSTANCES.search(part) for part in parts)
    return Name(_parse_degrees(parts), _parse_lengths(parts), several)


def _parse_degrees(parts: Sequence[str]) -> dict[str, int]:
    degrees = {name: int(found) for name, form in _DEGREE.items() if (found := _find_number(form, parts))}
    experts = next((match for part in parts if (match := _ALL_EXPERTS.search(part)) and int(match[2])), None)
    if experts and "tp" not in degrees:
        ranks, spread = int(experts[2]), experts[1].lower() == "dep"
        degrees |= {"tp": 1, "dp": ranks} if spread else {"tp": ranks}
        degrees.setdefault("ep", ranks)
    attention = next((match[1].lower() for part in parts if (match := _ATTENTION_DP.search(part))), "")
    if attention == "true" and "dp" not in degrees and "tp" in degrees:
        replica = degrees.get("dcp", 1)
        degrees |= {"tp": replica, "dp": max(degrees["tp"] // replica, 1)}
    return degrees


def _parse_lengths(parts: Sequence[str]) -> tuple[int | None, int | None]:
    both = next((m for part in parts for m in _BOTH.finditer(part) if (m[2] and m[4]) or "out" in m[0].lower()), None)
    if both:
        return _count_tokens(both[1], both[2]), _count_tokens(both[3], both[4])
    prompts, answers = (
        next((_count_tokens(m[1], m[2]) for part in parts if (m := form.search(part))), None) for form in _ASKED
    )
    return prompts, answers


def _count_tokens(digits: str, k: str) -> int | None:
    return int(digits) * (K if k else 1) or None


def _find_number(form: re.Pattern[str], parts: Iterable[str]) -> str:
    return next((match[1] for part in parts if (match := form.search(part)) and int(match[1])), "")


def shorten_label(text: str) -> str:
    """Return a text on one line, no longer than a label may be."""
    return summarize_long_text(fit_line(text), MAX_LABEL)


def is_true(value: object) -> bool:
    """Return whether a field's value means yes, also as text."""
    return str(value).lower() in ("true", "1")


def read_hardware(fields: Mapping[str, Any]) -> str | None:
    """Return the device, such as `NVIDIA H200`, whichever field has it; None if no field has it."""
    found = _read_text(fields, HARDWARE)
    return found and format_device(found)


def format_device(name: str) -> str:
    """Return `NVIDIA H200` for `h200`, `AMD MI355X` for `mi355x` and `CPU` for `cpu`; other names stay as they are."""
    if name.upper() == CPU:
        return CPU
    vendor = next((vendor for vendor, form in VENDORS.items() if form.fullmatch(name.lower())), "")
    return f"{vendor} {name.upper()}" if vendor else name


def read_precision(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return precisions such as `fp8` and `bf16` by the names of a point's fields; `unknown` if no field has one."""
    found = {ours: (_read_text(fields, theirs) or UNKNOWN).lower() for ours, theirs in PRECISION.items()}
    return {ours: DTYPES.get(text, text) for ours, text in found.items()}


def _read_text(fields: Mapping[str, Any], names: Iterable[str]) -> str | None:
    for name in names:
        value = fields.get(name)
        if isinstance(value, str) and value.strip().lower() not in NOTHING:
            return shorten_label(value)
    return None
