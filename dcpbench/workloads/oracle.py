"""What `transformers` says of a checkpoint: logits and greedy tokens in fp32, whole sequences at once, no cache."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dcpbench.engine.checkpoint import SCALE
from dcpbench.errors import MissingPackageError, how_to_install
from dcpbench.kernels.block_scaled import Scaled, dequantise_weight, quantise_weight
from dcpbench.points.shapes import INDEX_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedConfig


QUANTISED = tuple(
    f".{name}.weight"
    for name in ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj")
)
"""What the engine quantises of a checkpoint that is not."""


@dataclasses.dataclass(frozen=True)
class Truth:
    """The oracle's view of one prompt and its continuation."""

    tokens: list[int]
    logits: torch.Tensor
    """[positions, vocab] of the prompt and all new tokens, fp32 on the CPU."""


@functools.cache
@torch.no_grad()
def greedy(folder: str, prompts: tuple[tuple[int, ...], ...], new_tokens: int, *, fp8: bool = False) -> list[Truth]:
    """Truth for each prompt, the same for all points of a job, so it is computed once.

    On weights as they are: of a checkpoint in fp8, or one that is to be computed with in `fp8`, on what these stand for.
    The whole model must fit in host memory, and what is fp8 once more on the disk. Raises MissingPackageError.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as e:
        raise MissingPackageError(
            f"comparing logits needs transformers ({e}); {how_to_install('test')}, or leave --checkpoint out."
        ) from e
    with _whole_numbers(Path(folder), fp8) as plain:
        # Plain experts: the grouped product takes only rows that are multiples of 16 bytes.
        model = AutoModelForCausalLM.from_pretrained(
            plain,
            config=_config(folder),
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
        ).eval()
    return [_greedy(model, prompt, new_tokens) for prompt in prompts]


@contextlib.contextmanager
def _whole_numbers(folder: Path, fp8: bool) -> Iterator[str]:
    """The checkpoint, or a copy in which what is fp8, or would be, is what that stands for."""
    files = sorted(folder.glob("*.safetensors"))
    if not fp8 and not any(name.endswith(SCALE) for file in files for name in _names(file)):
        yield str(folder)
        return
    with tempfile.TemporaryDirectory() as made:
        for file in files:
            save_file(_stand_for(load_file(file), fp8), Path(made) / file.name, {"format": "pt"})
        for name in ("config.json", INDEX_FILE):
            if (folder / name).is_file():
                told = json.loads((folder / name).read_text(encoding="utf-8"))
                told.pop("quantization_config", None)
                if "weight_map" in told:
                    told["weight_map"] = {k: v for k, v in told["weight_map"].items() if not k.endswith(SCALE)}
                (Path(made) / name).write_text(json.dumps(told), encoding="utf-8")
        yield made


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())


def _stand_for(tensors: dict[str, torch.Tensor], fp8: bool) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in tensors.items():
        if name.endswith(SCALE):
            continue
        if name + SCALE in tensors:
            found[name] = dequantise_weight(Scaled(tensor, tensors[name + SCALE].float()))
        elif fp8 and name.endswith(QUANTISED):
            found[name] = dequantise_weight(quantise_weight(tensor))
        else:
            found[name] = tensor
    return found


def _config(folder: str) -> PreTrainedConfig:
    """The checkpoint's config.json for a class of transformers itself: Kimi-K2 has none of its own, and is V3.

    Null is left to the class, which has no null for most fields; no shared experts are experts of width 0.
    """
    from transformers import DeepseekV2Config, DeepseekV3Config

    given = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    kind = DeepseekV2Config if given["model_type"] == "deepseek_v2" else DeepseekV3Config
    absent = {"n_shared_experts": 0, "q_lora_rank": None, "num_key_value_heads": given["num_attention_heads"]}
    left_out = ("model_type", "quantization_config")
    fields = {name: value for name, value in given.items() if value is not None and name not in left_out}
    return kind.from_dict({name: value for name, value in absent.items() if name not in fields} | fields)


def _greedy(model: torch.nn.Module, prompt: tuple[int, ...], new_tokens: int) -> Truth:
    text = list(prompt)
    for _ in range(new_tokens):
        logits = model(torch.tensor([text]), use_cache=False).logits[0]
        text.append(int(logits[-1].argmax()))
    return Truth(tokens=text[len(prompt) :], logits=model(torch.tensor([text]), use_cache=False).logits[0].float())
