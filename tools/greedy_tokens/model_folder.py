"""Write a small model folder without weights: few of DeepSeek-V3's layers, with few experts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dcpbench.errors import UsageError
from tools.model_folder import DEEPSEEK_V3, write_folder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SIZES: dict[str, Any] = DEEPSEEK_V3 | {
    "num_hidden_layers": 2, "first_k_dense_replace": 1, "vocab_size": 1024,
    "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
}  # fmt: skip
"""The widths are the published ones, so that engines run their kernels for DeepSeek-V3. With few experts, scores are far apart, so that
rounding seldom changes the chosen experts; only the last layer has experts, so that such a change affects no later layer. With few layers and
tokens, the two likeliest tokens differ by more than rounding.
"""


def write_model_folder(folder: Path, changes: Sequence[str], *, fp8: bool) -> None:
    """Write config.json and the tokenizer; `changes` are FIELD=VALUE of config.json. Raise UsageError for others."""
    write_folder(folder, SIZES | dict(map(parse_change, changes)), fp8=fp8)


def parse_change(word: str) -> tuple[str, Any]:
    """Parse FIELD=VALUE with a value in JSON. Raise UsageError for a field that config.json lacks."""
    name, _, text = word.partition("=")
    try:
        value = json.loads(text)
    except ValueError as e:
        raise UsageError(
            f"--set {word}: not FIELD=VALUE with a value in JSON; for example --set num_hidden_layers=4."
        ) from e
    if name not in SIZES:
        raise UsageError(f"--set {word}: config.json has no field {name!r}; its fields are {', '.join(SIZES)}.")
    return name, value
