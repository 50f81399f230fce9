"""ModelShape: the sizes of an MLA + MoE model, published ones or read from a Hugging Face config.json. No torch."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from dcpbench.errors import ModelError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN rope scaling (Peng et al. 2023), as `rope_scaling` in a DeepSeek config gives it."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None


LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128
"""R, P and the widths of a head's keys and values in all published models."""
KV_WIDTH = LATENT + ROPE
"""Numbers in one of their KV rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes and routing rule of one model. Letters as in docs/methodology.md (D hidden, R latent, P rope, V value)."""

    name: str
    hidden: int
    layers: int
    heads: int
    q_lora: int | None
    """Rank of the low-rank q projection, or None where q is projected directly."""
    experts: int
    top_k: int
    shared_experts: int
    moe_inter: int
    dense_inter: int
    first_dense: int
    """The first layers with a dense MLP instead of experts."""
    vocab: int
    routing: str
    """`sigmoid` (V3, K2: scores plus correction bias) or `softmax` (V2)."""
    groups: int
    """Expert groups of group-limited routing; 1 = ungrouped."""
    top_groups: int
    normalise: bool
    """Whether the chosen experts' weights are made to sum to 1 before `routed_scale`."""
    routed_scale: float
    latent: int = LATENT
    rope: int = ROPE
    nope: int = NOPE
    value: int = VALUE
    rms_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_interleaved: bool = True
    yarn: Yarn | None = None
    max_position: int = 163840

    @property
    def kv_width(self) -> int:
        """Numbers in one KV row: latent ‖ rope key."""
        return self.latent + self.rope

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes that one token takes in one full KV cache, all layers."""
        return self.layers * self.kv_width * itemsize


_V3_YARN = Yarn(factor=40, original_max_position=4096, mscale=1.0, mscale_all_dim=1.0)
_V2_YARN = Yarn(factor=40, original_max_position=4096, mscale=0.707, mscale_all_dim=0.707)

_PUBLISHED = (
    ModelShape(
        name="deepseek-v2-lite", hidden=2048, layers=27, heads=16, q_lora=None, experts=64, top_k=6,
        shared_experts=2, moe_inter=1408, dense_inter=10944, first_dense=1, vocab=102400, routing="softmax",
        groups=1, top_groups=1, normalise=False, routed_scale=1.0, yarn=_V2_YARN,
    ),
    ModelShape(
        name="deepseek-v2", hidden=5120, layers=60, heads=128, q_lora=1536, experts=160, top_k=6,
        shared_experts=2, moe_inter=1536, dense_inter=12288, first_dense=1, vocab=102400, routing="softmax",
        groups=8, top_groups=3, normalise=False, routed_scale=16.0, yarn=_V2_YARN,
    ),
    ModelShape(
        name="deepseek-v3", hidden=7168, layers=61, heads=128, q_lora=1536, experts=256, top_k=8,
        shared_experts=1, moe_inter=2048, dense_inter=18432, first_dense=3, vocab=129280, routing="sigmoid",
        groups=8, top_groups=4, normalise=True, routed_scale=2.5, yarn=_V3_YARN,
    ),
    ModelShape(
        name="kimi-k2", hidden=7168, layers=61, heads=64, q_lora=1536, experts=384, top_k=8,
        shared_experts=1, moe_inter=2048, dense_inter=18432, first_dense=1, vocab=163840, routing="sigmoid",
        groups=1, top_groups=1, normalise=True, routed_scale=2.827, rope_theta=50000.0,
        yarn=Yarn(factor=64, original_max_position=4096, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0),
        max_position=262144,
    ),
    ModelShape(
        name="tiny", hidden=64, layers=3, heads=8, q_lora=32, experts=8, top_k=2, shared_experts=1, moe_inter=32,
        dense_inter=128, first_dense=1, vocab=512, routing="sigmoid", groups=2, top_groups=1, normalise=True,
        routed_scale=2.5, latent=32, rope=16, nope=16, value=16, max_position=65536,
    ),
)  # fmt: skip

SHAPES = {shape.name: shape for shape in _PUBLISHED}
ALIASES = {"deepseek-r1": "deepseek-v3"}
"""R1 has V3's sizes."""


INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"


def check_checkpoint(folder: Path, option: str) -> None:
    """Raise ModelError, naming the option that was typed, unless `folder` has what a checkpoint must have."""
    if not folder.is_dir():
        raise ModelError(f"{option} {folder}: no such folder; give the folder of a Hugging Face checkpoint.")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{option} {folder} has no config.json; give the folder of a Hugging Face checkpoint.")
    if not any((folder / name).is_file() for name in (INDEX_FILE, WEIGHTS_FILE)):
        raise ModelError(
            f"{option} {folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; give the folder of a Hugging Face "
            "checkpoint in safetensors."
        )


def load_shape(model: str) -> ModelShape:
    """A published name, or the path of a Hugging Face config.json or of the folder that holds one."""
    name = ALIASES.get(model.lower(), model.lower())
    if name in SHAPES:
        return dataclasses.replace(SHAPES[name], name=model.lower())
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ModelError(
            f"--model {model}: neither a known model nor a folder with a config.json; "
            f"known models: {', '.join([*SHAPES, *ALIASES])}."
        )
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise ModelError(f"{path} is not readable as JSON: {e}.") from e
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds {type(config).__name__}, not a model configuration.")
    return from_config(config, path)


def from_config(config: dict[str, Any], path: Path) -> ModelShape:
    """A Hugging Face `deepseek_v2` / `deepseek_v3` / `kimi_k2` configuration as a ModelShape.

    Raises ModelError naming the missing field where the model is not MLA with routed experts.
    """
    if "kv_lora_rank" not in config:
        raise ModelError(
            f"{path} is not an MLA model (model_type {config.get('model_type', 'missing')!r}, no 'kv_lora_rank'); "
            f"give a DeepSeek-V2/V3/R1 or Kimi-K2 configuration, or one of: {', '.join(SHAPES)}."
        )
    try:
        _check_supported(config)
        routing = _routing(config)
        grouped = routing == "sigmoid" or config.get("topk_method") == "group_limited_greedy"
        rope = _rope(config)
        layers = _positive(config, "num_hidden_layers")
        shape = ModelShape(
            name=path.parent.name if path.name == "config.json" else path.stem,
            hidden=_positive(config, "hidden_size"),
            layers=layers,
            heads=_positive(config, "num_attention_heads"),
            q_lora=None if config["q_lora_rank"] is None else _positive(config, "q_lora_rank"),
            experts=_positive(config, "n_routed_experts"),
            top_k=_positive(config, "num_experts_per_tok"),
            shared_experts=_positive(config, "n_shared_experts"),
            moe_inter=_positive(config, "moe_intermediate_size"),
            dense_inter=_positive(config, "intermediate_size"),
            first_dense=min(int(config.get("first_k_dense_replace", 0)), layers),
            vocab=_positive(config, "vocab_size"),
            routing=routing,
            groups=int(config.get("n_group") or 1) if grouped else 1,
            top_groups=int(config.get("topk_group") or 1) if grouped else 1,
            normalise=bool(config.get("norm_topk_prob", routing == "sigmoid")) and routing == "sigmoid",
            routed_scale=float(config.get("routed_scaling_factor", 1.0)),
            latent=_positive(config, "kv_lora_rank"),
            rope=_positive(config, "qk_rope_head_dim"),
            nope=_positive(config, "qk_nope_head_dim"),
            value=_positive(config, "v_head_dim"),
            rms_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0),
            rope_interleaved=bool(config.get("rope_interleave", True)),
            yarn=_yarn(rope),
            max_position=_positive(config, "max_position_embeddings"),
        )
        _check_routing(shape)
        _check_rope(shape)
    except KeyError as e:
        raise ModelError(f"{path} lacks the field {e}; an MLA model with routed experts needs it.") from e
    except (TypeError, ValueError) as e:
        raise ModelError(f"{path}: {e}.") from e
    return shape


def _routing(config: dict[str, Any]) -> str:
    default = "softmax" if config.get("model_type") == "deepseek_v2" else "sigmoid"
    routing = config.get("scoring_func", default)
    if routing not in ("sigmoid", "softmax"):
        raise ValueError(f"'scoring_func' is {routing!r}; only 'sigmoid' and 'softmax' are supported")
    return str(routing)


def _check_supported(config: dict[str, Any]) -> None:
    """Raise ValueError for settings that would change what is computed and that the engine does not have."""
    has = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "moe_layer_freq": 1}
    for field, value in has.items():
        if config.get(field, value) != value:
            raise ValueError(f"{field!r} is {config[field]!r}; only {value!r} is supported")
    if config.get("norm_topk_prob") and _routing(config) == "softmax":
        raise ValueError("'norm_topk_prob' is true; with softmax routing only false is supported")


def _check_routing(shape: ModelShape) -> None:
    """Raise ValueError unless a token can be routed to `top_k` experts within the groups it may choose."""
    if shape.first_dense < 0:
        raise ValueError(f"'first_k_dense_replace' is {shape.first_dense}, which is negative")
    if shape.groups < 1 or shape.experts % shape.groups:
        raise ValueError(f"'n_group' is {shape.groups}, which does not divide {shape.experts} experts")
    if not 1 <= shape.top_groups <= shape.groups:
        raise ValueError(f"'topk_group' is {shape.top_groups} of {shape.groups} groups")
    reachable = shape.experts // shape.groups * shape.top_groups
    if shape.top_k > reachable:
        raise ValueError(f"'num_experts_per_tok' is {shape.top_k}, but a token can reach {reachable} experts")


def _check_rope(shape: ModelShape) -> None:
    """Raise ValueError for rope settings that no table can be made of."""
    if shape.rope % 2:
        raise ValueError(f"'qk_rope_head_dim' is {shape.rope}, which is odd; rope rotates pairs")
    if shape.yarn and not 0 < shape.yarn.factor < math.inf:
        raise ValueError(f"the yarn 'factor' is {shape.yarn.factor:g}, which is not a positive number")
    if shape.yarn and shape.yarn.original_max_position < 1:
        raise ValueError(
            f"the yarn 'original_max_position_embeddings' is {shape.yarn.original_max_position}, which is not positive"
        )


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"the rope settings are {rope!r}, not an object")  # noqa: TRY004 - input, not a bug
    return rope


def _positive(config: dict[str, Any], field: str) -> int:
    value = config[field]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"'{field}' is {value!r}, which is not a positive integer")
    return value


def _yarn(rope: dict[str, Any]) -> Yarn | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise ValueError(f"rope scaling {kind!r} is not supported, only 'yarn'")
    return Yarn(
        factor=float(rope["factor"]),
        original_max_position=int(rope["original_max_position_embeddings"]),
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        mscale=float(rope.get("mscale") or 0),
        mscale_all_dim=float(rope.get("mscale_all_dim") or 0),
        attention_factor=rope.get("attention_factor"),
    )
