"""Define ModelShape: the sizes of an MLA + MoE model, published ones or read from a Hugging Face
config.json. No torch.
"""

from __future__ import annotations

import dataclasses
import json
import reprlib
from pathlib import Path
from typing import Any

from dcpbench.errors import ModelError
from dcpbench.points.names import FP8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yarn:
    """Hold the parameters of YaRN rope scaling (Peng et al. 2023), as `rope_scaling` in a DeepSeek config gives it."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True
    """True if the ramp between kept and stretched dimensions begins and ends at integer dimensions."""


LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128
"""R, P and the widths of a head's keys and values in all published models."""
KV_WIDTH = LATENT + ROPE
"""Numbers in one of their KV rows."""
BF16 = "bf16"
"""Precision of published models that are not quantised."""
SCALE_BLOCK = 128
"""Numbers along each side of a block of fp8 weights that has a scale, and in a group of a row that has one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Hold the sizes and the routing rule of one model. Letters as in docs/methodology.md (D hidden, R latent, P rope, V value)."""

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
    """True if the weights of the chosen experts are normalised to a sum of 1 before `routed_scale`."""
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
    tied: bool = False
    """True if the LM head is the embedding."""
    published: str = BF16
    """Precision of the published checkpoint's linear layers: `bf16`, or `fp8` in blocks of 128 × 128 with scales."""

    @property
    def kv_width(self) -> int:
        """Numbers in one KV row: latent ‖ rope key."""
        return self.latent + self.rope

    def compute_kv_bytes_per_token(self, itemsize: int) -> int:
        """Return the bytes that one token takes in one full KV cache, all layers."""
        return self.layers * self.kv_width * itemsize


_V2 = ModelShape(
    name="deepseek-v2",
    hidden=5120,
    layers=60,
    heads=128,
    q_lora=1536,
    experts=160,
    top_k=6,
    shared_experts=2,
    moe_inter=1536,
    dense_inter=12288,
    first_dense=1,
    vocab=102400,
    routing="softmax",
    groups=8,
    top_groups=3,
    normalise=False,
    routed_scale=16.0,
    yarn=Yarn(factor=40, original_max_position=4096, mscale=0.707, mscale_all_dim=0.707),
)
_V2_LITE = dataclasses.replace(
    _V2,
    name="deepseek-v2-lite",
    hidden=2048,
    layers=27,
    heads=16,
    q_lora=None,
    experts=64,
    moe_inter=1408,
    dense_inter=10944,
    groups=1,
    top_groups=1,
    routed_scale=1.0,
)
_V3 = ModelShape(
    name="deepseek-v3",
    hidden=7168,
    layers=61,
    heads=128,
    q_lora=1536,
    experts=256,
    top_k=8,
    shared_experts=1,
    moe_inter=2048,
    dense_inter=18432,
    first_dense=3,
    vocab=129280,
    routing="sigmoid",
    groups=8,
    top_groups=4,
    normalise=True,
    routed_scale=2.5,
    yarn=Yarn(factor=40, original_max_position=4096, mscale=1.0, mscale_all_dim=1.0),
    published=FP8,
)
_K2 = dataclasses.replace(
    _V3,
    name="kimi-k2",
    heads=64,
    experts=384,
    first_dense=1,
    vocab=163840,
    groups=1,
    top_groups=1,
    routed_scale=2.827,
    rope_theta=50000.0,
    yarn=Yarn(factor=64, original_max_position=4096, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0),
    max_position=262144,
)
_TINY = ModelShape(
    name="tiny",
    hidden=64,
    layers=3,
    heads=8,
    q_lora=32,
    experts=8,
    top_k=2,
    shared_experts=1,
    moe_inter=32,
    dense_inter=128,
    first_dense=1,
    vocab=512,
    routing="sigmoid",
    groups=2,
    top_groups=1,
    normalise=True,
    routed_scale=2.5,
    latent=32,
    rope=16,
    nope=16,
    value=16,
    max_position=65536,
    published=BF16,
)

SHAPES = {shape.name: shape for shape in (_V2_LITE, _V2, _V3, _K2, _TINY)}
ALIASES = {"deepseek-r1": "deepseek-v3"}
"""R1 has V3's sizes."""


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
    _check_quantisation(folder / "config.json")


_OF_V2 = {"scoring_func": "softmax", "topk_method": "greedy", "first_k_dense_replace": 0, "routed_scaling_factor": 1.0}
_OF_V3 = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
FAMILIES: dict[str, dict[str, Any]] = {"deepseek_v2": _OF_V2, "deepseek_v3": _OF_V3, "kimi_k2": _OF_V3}
"""Fields that a config.json may leave out, by `model_type`, as transformers 5 takes them. Kimi-K2 is V3 in other sizes."""
TOPK_METHODS: dict[str, tuple[str | None, ...]] = {
    "softmax": ("greedy", "group_limited_greedy"),
    "sigmoid": ("noaux_tc", None),
}
"""Values of `topk_method` by scoring function of the router."""

_FIXED: dict[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu", "swish"),
    "moe_layer_freq": (1,),
    "partial_rotary_factor": (1, 1.0),
    "use_mla": (True,),
}
"""Fields that change the computation, each with the only values that the engine supports; null counts as absent."""


def _split_words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_READ = _split_words(
    """
    model_type architectures hidden_size num_hidden_layers num_attention_heads num_key_value_heads q_lora_rank
    kv_lora_rank qk_rope_head_dim qk_nope_head_dim qk_head_dim v_head_dim head_dim n_routed_experts num_experts
    num_local_experts num_experts_per_tok n_shared_experts moe_intermediate_size intermediate_size
    first_k_dense_replace vocab_size scoring_func topk_method n_group topk_group norm_topk_prob
    routed_scaling_factor rms_norm_eps rope_theta rope_scaling rope_parameters rope_interleave
    max_position_embeddings tie_word_embeddings layer_types mlp_layer_types
    """
) | frozenset(_FIXED)
_OF_TRAINING = _split_words(
    """
    attention_dropout aux_loss_alpha gradient_checkpointing initializer_range num_mtp_layers
    num_nextn_predict_layers output_router_logits router_aux_loss_coef seq_aux
    """
)
"""Fields about training, and about additional layers that predict further tokens."""
_OF_STORAGE = _split_words(
    """
    auto_map compression_config dtype ep_size pretraining_tp quantization_config torch_dtype
    transformers_version use_cache attn_implementation experts_implementation
    """
)
"""Fields about how weights are stored, and how some engine runs them."""
_OF_SAMPLERS = _split_words(
    """
    bad_words_ids begin_suppress_tokens bos_token_id decoder_start_token_id diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty
    forced_bos_token_id forced_eos_token_id length_penalty max_length min_length model_max_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores pad_token_id prefix
    remove_invalid_values repetition_penalty return_dict_in_generate sep_token_id suppress_tokens temperature
    tokenizer_class top_k top_p typical_p unk_token_id
    """
)
"""Fields for a tokenizer or a sampler."""
_OF_TRANSFORMERS = _split_words(
    """
    chunk_size_feed_forward cross_attention_hidden_size finetuning_task id2label is_decoder label2id num_labels
    output_attentions output_hidden_states problem_type pruned_heads return_dict task_specific_params
    tf_legacy_loss torchscript use_bfloat16 unsloth_fixed unsloth_version
    """
)
"""Fields that transformers writes for every model."""
_HARMLESS = _OF_TRAINING | _OF_STORAGE | _OF_SAMPLERS | _OF_TRANSFORMERS
"""Fields that have no effect here, whatever their value, like those that begin with `_`."""
_ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "KimiK2ForCausalLM")
_ROPE = _split_words(
    """
    type rope_type rope_theta factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim
    attention_factor truncate partial_rotary_factor
    """
)
_UNSET: tuple[object, ...] = (None, False, 0, "", [], {})

MAX_INT = (1 << 31) - 1
"""Maximum of integers: some kernels count sizes of tensors in 32 bits."""
MAX_LAYERS = 10_000
MAX_VOCAB = 1 << 24
"""Maximum size of a vocabulary: the greedy choice over ranks carries token ids in fp32, which has
no odd numbers above.
"""
FP32_RANGE = (1e-38, 1e38)
"""Sizes of numbers that fp32 holds with all its digits."""


def load_shape(model: str) -> ModelShape:
    """Load a published shape by name, or from a Hugging Face config.json or its folder."""
    name = ALIASES.get(model.lower(), model.lower())
    if name in SHAPES:
        return dataclasses.replace(SHAPES[name], name=model.lower())
    path = Path(model)
    try:
        if path.is_dir():
            path = path / "config.json"
        known = path.is_file()
    except OSError:  # a name that no file can have
        known = False
    if not known:
        raise ModelError(
            f"--model {model}: neither a known model nor a folder with a config.json; "
            f"known models: {', '.join([*SHAPES, *ALIASES])}."
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ModelError(f"{path} is not readable as JSON: {e}.") from e
    except RecursionError as e:
        raise ModelError(f"{path} is nested too deeply for a model configuration.") from e
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds {type(config).__name__}, not a model configuration.")
    return from_config(config, path)


def from_config(config: dict[str, Any], path: Path) -> ModelShape:
    """Convert a Hugging Face `deepseek_v2` / `deepseek_v3` / `kimi_k2` configuration to a ModelShape.

    Raise ModelError, naming the field, if the model is not MLA with routed experts, if a field is missing or is no
    usable number, or if a field requests a computation that the engine does not have.
    """
    if "kv_lora_rank" not in config:
        raise ModelError(
            f"{path} is not an MLA model (model_type {_format_value(config.get('model_type', 'missing'))}, no 'kv_lora_rank'); "
            f"give a DeepSeek-V2/V3/R1 or Kimi-K2 configuration, or one of: {', '.join(SHAPES)}."
        )
    try:
        config = _apply_defaults(config)
        _check_fields(config)
        shape = _parse_shape(config, path)
        _check_sizes(config, shape)
        _check_routing(shape)
        _check_rope(shape)
    except KeyError as e:
        raise ModelError(f"{path} lacks the field {e}; an MLA model with routed experts needs it.") from e
    except ValueError as e:
        raise ModelError(f"{path}: {e}.") from e
    return shape


def _parse_shape(config: dict[str, Any], path: Path) -> ModelShape:
    sigmoid = config["scoring_func"] == "sigmoid"
    grouped = sigmoid or config["topk_method"] == "group_limited_greedy"
    rope = _parse_rope(config)
    layers = _parse_int(config, "num_hidden_layers", maximum=MAX_LAYERS)
    position = _parse_int(config, "max_position_embeddings")
    return ModelShape(
        name=path.parent.name if path.name == "config.json" else path.stem,
        hidden=_parse_int(config, "hidden_size"),
        layers=layers,
        heads=_parse_int(config, "num_attention_heads"),
        q_lora=None if config["q_lora_rank"] is None else _parse_int(config, "q_lora_rank"),
        experts=_parse_int(config, "n_routed_experts"),
        top_k=_parse_int(config, "num_experts_per_tok"),
        shared_experts=0 if config["n_shared_experts"] is None else _parse_int(config, "n_shared_experts", minimum=0),
        moe_inter=_parse_int(config, "moe_intermediate_size"),
        dense_inter=_parse_int(config, "intermediate_size"),
        first_dense=min(_parse_int(config, "first_k_dense_replace", minimum=0), layers),
        vocab=_parse_int(config, "vocab_size", maximum=MAX_VOCAB),
        routing=config["scoring_func"],
        groups=_parse_int(config, "n_group") if grouped else 1,
        top_groups=_parse_int(config, "topk_group") if grouped else 1,
        # transformers does not normalise V2's softmax weights, regardless of the field
        normalise=sigmoid and _parse_bool(config, "norm_topk_prob", default=True),
        routed_scale=_parse_number(config, "routed_scaling_factor"),
        latent=_parse_int(config, "kv_lora_rank"),
        rope=_parse_int(config, "qk_rope_head_dim"),
        nope=_parse_int(config, "qk_nope_head_dim"),
        value=_parse_int(config, "v_head_dim"),
        rms_eps=_parse_number(config, "rms_norm_eps", 1e-6, minimum=0),
        rope_theta=_parse_number(rope if "rope_theta" in rope else config, "rope_theta", 10000.0),
        rope_interleaved=not sigmoid or _parse_bool(config, "rope_interleave", default=True),
        yarn=_parse_yarn(rope, position),
        max_position=position,
        tied=_parse_bool(config, "tie_word_embeddings", default=False),
        published=_parse_published_precision(config),
    )


_FP8_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [SCALE_BLOCK, SCALE_BLOCK],
    "activation_scheme": "dynamic",
}
"""`quantization_config` of DeepSeek-V3."""
_QUANTISER = {"fmt": "e4m3", "activation_scheme": "dynamic"}
"""Defaults of transformers' fp8 quantiser for fields that it does not write."""


def _parse_published_precision(config: dict[str, Any]) -> str:
    """Return `fp8` if `quantization_config` equals DeepSeek-V3's; else `bf16`, as for a model that is not quantised.

    Other quantisations change how tensors are stored but no size; `check_checkpoint` refuses them for checkpoints.
    """
    return FP8 if _get_quantisation(config) == _FP8_BLOCKS else BF16


def _get_quantisation(config: dict[str, Any]) -> dict[str, object]:
    """Return the fields of _FP8_BLOCKS as a configuration has them; empty if nothing is quantised."""
    found = config.get("quantization_config")
    if not found:
        return {}
    if not isinstance(found, dict):
        return dict.fromkeys(_FP8_BLOCKS, found)
    return {name: found.get(name, _QUANTISER.get(name)) for name in _FP8_BLOCKS}


def _check_quantisation(path: Path) -> None:
    """Raise ModelError, naming the field, if config.json declares a storage of weights that cannot be read."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return  # load_shape reports the error
    found = _get_quantisation(config) if isinstance(config, dict) else {}
    differ = next((name for name, value in found.items() if value != _FP8_BLOCKS[name]), None)
    if differ is not None:
        raise ModelError(
            f"{path}: in 'quantization_config' {differ!r} is {_format_value(found[differ])}, and quantised weights are read in fp8 "
            f"with {_format_value(_FP8_BLOCKS[differ])} alone, as DeepSeek-V3 is published; give such a checkpoint, or one in bf16."
        )


def _apply_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with its family's defaults for the fields that it leaves out."""
    kind = config["model_type"]
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(
            f"'model_type' is {_format_value(kind)}, which may compute otherwise; {', '.join(FAMILIES)} are supported"
        )
    usual = FAMILIES[kind]
    found = usual | config
    routing = usual["scoring_func"]
    found["scoring_func"] = found["scoring_func"] or routing
    if found["scoring_func"] != routing:
        raise ValueError(f"'scoring_func' is {_format_value(found['scoring_func'])}; {kind} has {routing!r}")
    if found["topk_method"] not in TOPK_METHODS[routing]:
        known = " or ".join(repr(known) for known in TOPK_METHODS[routing] if known)
        raise ValueError(f"'topk_method' is {_format_value(found['topk_method'])}; {kind} has {known}")
    return found


def _check_fields(config: dict[str, Any]) -> None:
    """Raise ValueError for fields that request, or may request, a computation that the engine does not have."""
    for field, values in _FIXED.items():
        value = config.get(field)
        if value is not None and not any(type(value) is type(known) and value == known for known in values):
            raise ValueError(f"{field!r} is {_format_value(value)}; only {values[0]!r} is supported")
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or any(name not in _ARCHITECTURES for name in architectures):
        raise ValueError(
            f"'architectures' is {_format_value(architectures)}; {', '.join(_ARCHITECTURES)} are supported"
        )
    if config["model_type"] == "deepseek_v2" and config.get("rope_interleave") not in (None, True):
        raise ValueError(
            f"'rope_interleave' is {_format_value(config['rope_interleave'])}; deepseek_v2 has no other than True"
        )
    for field, value in config.items():
        if field in _READ or field in _HARMLESS or field.startswith("_") or value in _UNSET:
            continue
        raise ValueError(
            f"{_format_value(field)} is {_format_value(value)}, and dcpbench does not know what that changes; if it changes nothing "
            "that is computed, take it out of a copy of this file and give the copy"
        )


def _check_sizes(config: dict[str, Any], shape: ModelShape) -> None:
    """Raise ValueError if a field that repeats other ones contradicts them."""
    mlps = ["dense"] * shape.first_dense + ["sparse"] * (shape.layers - shape.first_dense)
    repeated: dict[str, tuple[object, str]] = {
        "num_key_value_heads": (shape.heads, "'num_attention_heads'"),
        "head_dim": (shape.rope, "'qk_rope_head_dim'"),
        "qk_head_dim": (shape.nope + shape.rope, "'qk_nope_head_dim' + 'qk_rope_head_dim'"),
        "num_experts": (shape.experts, "'n_routed_experts'"),
        "num_local_experts": (shape.experts, "'n_routed_experts'"),
        "layer_types": (["full_attention"] * shape.layers, "'num_hidden_layers' times 'full_attention'"),
        "mlp_layer_types": (mlps, "'first_k_dense_replace' times 'dense' and then 'sparse'"),
    }
    for field, (value, source) in repeated.items():
        if config.get(field) is not None and config[field] != value:
            raise ValueError(
                f"{field!r} is {_format_value(config[field])}; here it must be {source}, {_format_value(value)}"
            )


def _check_routing(shape: ModelShape) -> None:
    """Raise ValueError unless a token can be routed to `top_k` experts within the groups it may choose."""
    if shape.experts % shape.groups:
        raise ValueError(f"'n_group' is {shape.groups}, which does not divide {shape.experts} experts")
    if shape.routing == "sigmoid" and shape.experts // shape.groups == 1:
        raise ValueError(
            f"'n_group' is {shape.groups} for {shape.experts} experts, one in each; a group is scored by its best two"
        )
    if shape.top_groups > shape.groups:
        raise ValueError(f"'topk_group' is {shape.top_groups} of {shape.groups} groups")
    reachable = shape.experts // shape.groups * shape.top_groups
    if shape.top_k > reachable:
        raise ValueError(f"'num_experts_per_tok' is {shape.top_k}, but a token can reach {reachable} experts")


def _check_rope(shape: ModelShape) -> None:
    """Raise ValueError for rope settings that no table can be made of."""
    if shape.rope % 2:
        raise ValueError(f"'qk_rope_head_dim' is {shape.rope}, which is odd; rope rotates pairs")
    if shape.rope_theta <= 1:
        raise ValueError(f"'rope_theta' is {shape.rope_theta:g}; frequencies fall only where it is above 1")


def _parse_rope(config: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"the rope settings are {_format_value(rope)}, not an object")  # noqa: TRY004 - input, not a bug
    for field, value in rope.items():
        if field not in _ROPE and value is not None:
            raise ValueError(
                f"the rope setting {_format_value(field)} is {_format_value(value)}; it is none of YaRN as DeepSeek has it"
            )
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise ValueError(
            f"'partial_rotary_factor' is {_format_value(rope['partial_rotary_factor'])}; only 1 is supported"
        )
    return rope


def _parse_yarn(rope: dict[str, Any], max_position: int) -> Yarn | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise ValueError(f"rope scaling {_format_value(kind)} is not supported, only 'yarn'")
    factor = rope.get("attention_factor")
    return Yarn(
        factor=_parse_positive(rope, "factor"),
        original_max_position=_parse_int(rope, "original_max_position_embeddings", max_position),
        beta_fast=_parse_positive(_drop_unset(rope, "beta_fast"), "beta_fast", 32.0),
        beta_slow=_parse_positive(_drop_unset(rope, "beta_slow"), "beta_slow", 1.0),
        mscale=_parse_number(_drop_unset(rope, "mscale"), "mscale", 0.0, minimum=0),
        mscale_all_dim=_parse_number(_drop_unset(rope, "mscale_all_dim"), "mscale_all_dim", 0.0, minimum=0),
        attention_factor=None if factor is None else _parse_number(rope, "attention_factor"),
        truncate=_parse_bool(rope, "truncate", default=True),
    )


def _drop_unset(rope: dict[str, Any], field: str) -> dict[str, Any]:
    """Return the settings without a field that is null or 0: transformers replaces either by the default."""
    return rope if rope.get(field) else {}


def _parse_int(
    config: dict[str, Any], field: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_INT
) -> int:
    """Return a field that must be an integer within limits; raise KeyError if it is missing and has no default."""
    value = config[field] if default is None else config.get(field, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(
            f"{field!r} is {_format_value(value)}, which is not a {'positive' if minimum else 'non-negative'} integer"
        )
    if value > maximum:
        raise ValueError(f"{field!r} is {_format_value(value)}; it can be up to {maximum:,}")
    return value


def _parse_number(
    config: dict[str, Any], field: str, default: float | None = None, *, minimum: float | None = None
) -> float:
    """Return a field that must be a number in the range of fp32; raise KeyError if it is missing and has no default."""
    value = config[field] if default is None else config.get(field, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{field!r} is {_format_value(value)}, which is not a number")  # noqa: TRY004 - input, not a bug
    if value != 0 and not FP32_RANGE[0] <= abs(value) <= FP32_RANGE[1]:
        raise ValueError(f"{field!r} is {_format_value(value)}, which fp32 cannot hold")
    if minimum is not None and value < minimum:
        raise ValueError(f"{field!r} is {_format_value(value)}, which is below {minimum:g}")
    return float(value)


def _parse_positive(config: dict[str, Any], field: str, default: float | None = None) -> float:
    value = _parse_number(config, field, default)
    if value <= 0:
        raise ValueError(f"{field!r} is {value:g}, which is not a positive number")
    return value


def _parse_bool(config: dict[str, Any], field: str, *, default: bool) -> bool:
    value = config.get(field, default)
    if not isinstance(value, bool):
        raise ValueError(f"{field!r} is {_format_value(value)}, which is neither true nor false")  # noqa: TRY004 - input
    return value


def _format_value(value: object) -> str:
    """Format a value of a file for a sentence; long ones are shortened in the middle."""
    return reprlib.repr(value)
