"""`transformers` on a checkpoint or on given weights, in fp32: whole sequences at once, without a cache."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dcpbench.errors import MissingPackageError, format_install_hint
from dcpbench.models import find_family, get_text_fields, load_shape
from dcpbench.models.checkpoint_folder import INDEX_FILE
from dcpbench.models.tensor_names import DEEPSEEK_NAMES, SCALE, TensorNames
from dcpbench.workloads.rounding import dequantize_blocks, round_weight
from dcpbench.workloads.teacher_forcing import IMPLEMENTATION, QUANTISED, TeacherForcing, run_attached_attention

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedConfig

    from dcpbench.workloads.rounding import Roundings

MIN_TRANSFORMERS = "5.13"  # first transformers version with routers of V2 and V3 that return the selected experts


@functools.lru_cache(maxsize=1)
def load_teacher(folder: str, roundings: Roundings) -> TeacherForcing:
    """Return the model of a checkpoint with the roundings of an engine.

    The whole model must fit in host memory, and once more on the disk if its weights are fp8. Raises
    MissingPackageError.
    """
    return TeacherForcing(_load_model(folder, fp8=roundings.fp8_weights, attention=IMPLEMENTATION), roundings)


@functools.lru_cache(maxsize=1)
def load_plain(folder: str) -> Any:  # noqa: ANN401 - transformers' classes differ by version
    """Return the model of a checkpoint without any roundings. Memory and errors as in `load_teacher`."""
    return _load_model(folder, fp8=False, attention="eager")


@torch.no_grad()
def compute_logits(folder: str, tokens: list[int]) -> torch.Tensor:
    """Return the logits [P, vocab] of a text, without any roundings."""
    return load_plain(folder)(torch.tensor([tokens]), use_cache=False).logits[0]


def load_with_weights(folder: str, weights: dict[str, torch.Tensor]) -> Any:  # noqa: ANN401
    """Return the model of a folder's config.json with fp32 weights under their published names. Errors as in `load_teacher`."""
    check_transformers()
    return _load_pretrained(folder, None, "eager", state_dict=weights)


def _load_model(folder: str, *, fp8: bool, attention: str) -> Any:  # noqa: ANN401
    check_transformers()
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(IMPLEMENTATION, run_attached_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, eager_mask)
    with _convert_to_fp32(Path(folder), fp8) as plain:
        return _load_pretrained(folder, plain, attention)


def _load_pretrained(folder: str, files: str | None, attention: str, **more: Any) -> Any:  # noqa: ANN401
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = _load_config(folder)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    # The grouped experts take only rows that are multiples of 16 bytes.
    return kind.from_pretrained(
        files,
        config=config,
        dtype=torch.float32,
        attn_implementation=attention,
        experts_implementation="eager",
        key_mapping=_map_names(load_shape(folder).tensors),
        **more,
    ).eval()


def check_transformers() -> None:
    """Raise MissingPackageError without transformers, or with a version that is too old."""
    try:
        from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter  # noqa: F401 - its version
    except ImportError as e:
        raise MissingPackageError(
            f"comparing with transformers needs version {MIN_TRANSFORMERS} or newer ({e}); {format_install_hint('test')}, or leave "
            "--checkpoint out."
        ) from e


@contextlib.contextmanager
def _convert_to_fp32(folder: Path, fp8: bool) -> Iterator[str]:
    """Give the checkpoint, or a copy in which weights that are or become fp8 are the numbers that fp8 represents."""
    files = sorted(folder.glob("*.safetensors"))
    if not fp8 and not any(name.endswith(SCALE) for file in files for name in _list_tensor_names(file)):
        yield str(folder)
        return
    with tempfile.TemporaryDirectory() as made:
        for file in files:
            save_file(_dequantize_tensors(load_file(file), fp8), Path(made) / file.name, {"format": "pt"})
        for name in ("config.json", INDEX_FILE):
            if (folder / name).is_file():
                fields = json.loads((folder / name).read_text(encoding="utf-8"))
                fields.pop("quantization_config", None)
                if "weight_map" in fields:
                    fields["weight_map"] = {k: v for k, v in fields["weight_map"].items() if not k.endswith(SCALE)}
                (Path(made) / name).write_text(json.dumps(fields), encoding="utf-8")
        yield made


def _list_tensor_names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())


def _dequantize_tensors(tensors: dict[str, torch.Tensor], fp8: bool) -> dict[str, torch.Tensor]:
    """Return fp8 weights, and with `fp8` those that the engine rounds to fp8, as fp32 numbers; others as they are."""
    quantised = tuple(f".{name}.weight" for name in QUANTISED)
    found = {}
    for name, tensor in tensors.items():
        if name.endswith(SCALE):
            continue
        if name + SCALE in tensors:
            found[name] = dequantize_blocks(tensor, tensors[name + SCALE])
        elif fp8 and name.endswith(quantised):
            found[name] = round_weight(tensor)
        else:
            found[name] = tensor
    return found


def _map_names(names: TensorNames) -> dict[str, str] | None:
    """Return patterns of a checkpoint's names with the names that transformers' models have; None if they are the same."""
    pairs = zip(dataclasses.astuple(names), dataclasses.astuple(DEEPSEEK_NAMES), strict=True)
    begins = [(own.partition("{}")[0], theirs.partition("{}")[0]) for own, theirs in pairs if own != theirs]
    return {re.escape(own): theirs for own, theirs in begins} or None


def _load_config(folder: str) -> PreTrainedConfig:
    """Return the checkpoint's config.json for its family's class of transformers.

    Null values are left to the default of the class, which accepts null for few fields; no shared experts become
    experts of width 0.
    """
    import transformers

    given = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    family = find_family(given)
    assert family is not None  # its shape has been loaded
    given = get_text_fields(given)
    absent: dict[str, Any] = {"num_key_value_heads": given["num_attention_heads"]}
    if "kv_lora_rank" in given:
        absent |= {"n_shared_experts": 0, "q_lora_rank": None}
    left_out = ("model_type", "quantization_config")
    fields = {name: value for name, value in given.items() if value is not None and name not in left_out}
    return getattr(transformers, family.transformers_config).from_dict(
        {name: value for name, value in absent.items() if name not in fields} | fields
    )
