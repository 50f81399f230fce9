"""Check the folder of a Hugging Face checkpoint before it is read. No torch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from dcpbench.errors import ModelError
from dcpbench.models import QUANT_FILE, get_text_fields
from dcpbench.models.config_fields import format_value
from dcpbench.models.quantization_config import FP8_BLOCKS, get_quantisation

if TYPE_CHECKING:
    from pathlib import Path

INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"


def check_checkpoint(folder: Path, option: str) -> None:
    """Raise ModelError, naming the option, unless `folder` has the required files of a checkpoint."""
    if not folder.is_dir():
        raise ModelError(f"{option} {folder}: no such folder; give the folder of a Hugging Face checkpoint.")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{option} {folder} has no config.json; give the folder of a Hugging Face checkpoint.")
    if not any((folder / name).is_file() for name in (INDEX_FILE, WEIGHTS_FILE)):
        raise ModelError(
            f"{option} {folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; give the folder of a Hugging Face "
            "checkpoint in safetensors."
        )
    if (folder / QUANT_FILE).is_file():
        raise ModelError(
            f"{option} {folder} has a {QUANT_FILE}, and weights that modelopt quantised are not read; give a checkpoint in bf16 or fp8."
        )
    _check_quantisation(folder / "config.json")


def _check_quantisation(path: Path) -> None:
    """Raise ModelError, naming the field, if config.json declares a storage of weights that cannot be read."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        found = get_quantisation(get_text_fields(config)) if isinstance(config, dict) else {}
    except (OSError, KeyError, ValueError, RecursionError):
        return  # load_shape reports the error
    differ = next((name for name, value in found.items() if value != FP8_BLOCKS[name]), None)
    if differ is not None:
        raise ModelError(
            f"{path}: in 'quantization_config' {differ!r} is {format_value(found[differ])}, and quantised weights are read in fp8 "
            f"with {format_value(FP8_BLOCKS[differ])} alone, as DeepSeek-V3 is published; give such a checkpoint, or one in bf16."
        )
