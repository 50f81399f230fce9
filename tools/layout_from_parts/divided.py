"""Write model folders with divided heads and widths, so that a rank of few GPUs computes the same as a rank of more GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcpbench.errors import UsageError
from tools.model_folder import DEEPSEEK_V3, FP8_BLOCK, write_folder

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SOURCES: dict[str, dict[str, Any]] = {"deepseek-v3": DEEPSEEK_V3}  # config.json by the name of a published model
HEADS, EXPERT_WIDTH, DENSE_WIDTH, VOCAB = (
    "num_attention_heads",
    "moe_intermediate_size",
    "intermediate_size",
    "vocab_size",
)
DIVIDED_FIELDS = (HEADS, "num_key_value_heads", EXPERT_WIDTH, DENSE_WIDTH, VOCAB)
"""Fields that vLLM divides by its tensor parallel degree. The shared expert is as wide as `n_shared_experts` routed ones, and the
vocabulary divides the embedding and the LM head. Each rank has all other sizes whole: the low-rank projections before the heads, the
router, the number of experts, and the KV cache."""
MAX_DIVIDE = 64  # largest divisor that an error suggests


def divide_config(source: str, divide: int, tp: int, layers: int) -> dict[str, Any]:
    """Return config.json of the first layers of a model, with widths that are divided by `divide`.

    Raise UsageError if a rank of `tp` GPUs would not get whole heads, whole tokens of the vocabulary, or whole blocks of fp8 weights.
    """
    config = SOURCES[source]
    if layers > config["num_hidden_layers"]:
        raise UsageError(f"--layers {layers}: {source} has {config['num_hidden_layers']} layers; name at most as many.")
    if wrong := _find_invalid_width(config, divide * tp):
        possible = [
            n for n in range(1, MAX_DIVIDE + 1) if n * tp <= MAX_DIVIDE and not _find_invalid_width(config, n * tp)
        ]
        raise UsageError(
            f"--divide {divide} --tp {tp}: {wrong}; with --tp {tp} use --divide {', '.join(map(str, possible))}."
        )
    dense = min(config["first_k_dense_replace"], layers)
    return (
        config
        | {name: config[name] // divide for name in DIVIDED_FIELDS}
        | {"num_hidden_layers": layers, "first_k_dense_replace": dense}
    )


def _find_invalid_width(config: Mapping[str, Any], ranks: int) -> str:
    """Return a size of one of `ranks` ranks that vLLM cannot compute with fp8 weights; empty if there is none."""
    for name in DIVIDED_FIELDS:
        if config[name] % ranks:
            return f"{name} is {config[name]:,}, which {ranks} ranks do not divide"
    heads = config[HEADS] // ranks
    rows = {
        f"experts of {EXPERT_WIDTH}": config[EXPERT_WIDTH] // ranks,
        f"a dense layer of {DENSE_WIDTH}": config[DENSE_WIDTH] // ranks,
        "queries": heads * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]),
        "keys and values": heads * (config["qk_nope_head_dim"] + config["v_head_dim"]),
        "outputs of attention": heads * config["v_head_dim"],
    }
    return next(
        (
            f"{what} would be {width:,} wide on one of {ranks} ranks, which is no multiple of the fp8 block of {FP8_BLOCK}"
            for what, width in rows.items()
            if width % FP8_BLOCK
        ),
        "",
    )


def write_divided_folder(folder: Path, source: str, *, divide: int, tp: int, layers: int) -> str:
    """Write the model folder; return a sentence on the sizes of a rank."""
    config = divide_config(source, divide, tp, layers)
    write_folder(folder, config, fp8=True)
    heads, experts, dense = (config[name] // tp for name in (HEADS, EXPERT_WIDTH, DENSE_WIDTH))
    return (
        f"A rank of tp{tp} over {folder} computes what a rank of tp{divide * tp} over {source} does: {heads} heads, experts {experts:,} "
        f"wide, dense layers {dense:,} wide, {config[VOCAB] // tp:,} tokens of the LM head; {layers} of "
        f"{SOURCES[source]['num_hidden_layers']} layers."
    )
