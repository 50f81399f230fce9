"""Compare logits and greedy tokens with `transformers` on every supported layout; several ranks run as torchrun jobs."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from dcpbench import models
from dcpbench.launch import launcher
from dcpbench.launch.jobs import Check, Job
from dcpbench.launch.torchrun import RendezvousOptions
from dcpbench.models import deepseek_v3, load_shape
from dcpbench.models.tensor_names import TensorNames
from dcpbench.points.layout import Layout, compute_local_length
from dcpbench.points.point import Point
from dcpbench.points.settings import Settings
from dcpbench.records.folder import FAILED_FILE
from dcpbench.records.runs import read_last_records
from dcpbench.workloads import verify as workload
from tests.distributed.checkpoints import (
    ABSENT,
    VOCAB,
    WRITERS,
    make_yarn,
    write_changed_deepseek_v2,
    write_changed_deepseek_v3,
)
from tests.distributed.verifying import verify_by_job

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.distributed

PROMPTS = tuple(tuple((31 * i + 7 * k) % VOCAB for k in range(n)) for i, n in enumerate((13, 1, 3, 4)))
NEW = 5
LIMIT = 1e-4
CHECKS = ["attention", "kv_write", "layers", "logits", "tokens", "routing"]

PLAIN = {"page_size": 1, "interleave": 1}
PAGED = {"page_size": 4, "interleave": 1}
STRIPED = {"page_size": 4, "interleave": 2}

NONE = {"exchange": "none"}
AG_RS = {"exchange": "ag_rs"}
A2A = {"exchange": "a2a"}
SYMM = {"exchange": "symm"}
REPLICATED = {"q_replicate": True}
PROJECTED = {"project_first": True}
REDUCED = {"all_reduce": "symm"}

CUT = {"ep": "1"}
WHOLE = {"ep": "tp"}

GRID = {
    Layout(1): [("v3", PLAIN, NONE), ("v2", PAGED, NONE), ("v2-greedy", PLAIN, NONE)],
    Layout(2): [("v3", PAGED, NONE | CUT), ("v2", PLAIN, NONE | WHOLE)],
    Layout(2, dcp=2): [
        ("v3", PLAIN, AG_RS | WHOLE),
        ("v2", STRIPED, A2A | CUT),
        ("v2-greedy", PAGED, A2A | REPLICATED | WHOLE),
    ],
    Layout(4): [("v2", PAGED, NONE | CUT), ("v2-greedy", PLAIN, NONE | WHOLE)],
    Layout(4, dcp=2): [
        ("v3", STRIPED, A2A | REPLICATED | PROJECTED | CUT),
        ("v2", PLAIN, AG_RS | REPLICATED | WHOLE),
    ],
    Layout(4, dcp=4): [("v3", PLAIN, AG_RS | WHOLE), ("v2", STRIPED, A2A | PROJECTED | CUT)],
    Layout(4, dp=2, dcp=2): [
        ("v3", PAGED, A2A | REPLICATED | PROJECTED | CUT),
        ("v2", PLAIN, AG_RS | PROJECTED | WHOLE),
    ],
    Layout(4, dp=4): [("v3", PAGED, NONE | WHOLE), ("v2-greedy", PLAIN, NONE | CUT)],
    Layout(8, dcp=8): [("v3", PLAIN, A2A | WHOLE), ("v2", STRIPED, AG_RS | CUT)],
}
"""Checkpoint, storage and path of each point: every layout with two exchanges and with tensor-parallel and
expert-parallel experts, and every option with both."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Write each checkpoint, and return the folders by name."""
    base = tmp_path_factory.mktemp("checkpoints")
    for name, write in WRITERS.items():
        write(base / name)
    return {name: str(base / name) for name in WRITERS}


def make_point(
    model: str,
    layout: Layout,
    storage: dict[str, int],
    exchange: dict[str, object],
    backend: str = "reference",
    context: int = 37,
) -> Point:
    """Return a point in fp32 on the checkpoint in the folder `model`."""
    return Point(
        model=model,
        weights=model,
        tp=layout.tp,
        dp=layout.dp,
        dcp=layout.dcp,
        concurrency=4,
        context=context,
        backend=backend,
        dtype="fp32",
        **storage,
        **exchange,
    )


def verify(points: list[Point], prompts: tuple[tuple[int, ...], ...], new: int, folder: Path) -> None:
    """Run a verify job for each world size, in order; every point must agree."""
    assert_verified(points, verify_by_job(points, prompts, new, folder), len(prompts) * new)


def verify_alone(tested: Point, prompts: tuple[tuple[int, ...], ...], new: int, folder: Path) -> list[Check]:
    """Return the checks of `verify` for a point of one rank, in this process."""
    job = Job(
        kind="verify",
        tag="t",
        folder=str(folder),
        device="cpu",
        points=[tested],
        settings=Settings(),
        prompts=prompts,
        new_tokens=new,
    )
    return workload.run(tested, load_shape(tested.weights), job, rank=0, device=torch.device("cpu"))


def assert_verified(points: list[Point], checks: list[Check], tokens_of_a_rank: int) -> None:
    """Check the results of all points, in order."""
    reduced = [c for c in checks if c.name == "reduce"]
    assert [c.all_reduce for c in reduced] == [p.all_reduce for p in points if p.all_reduce != "nccl"]
    assert all(c.error <= LIMIT for c in reduced)
    checks = [c for c in checks if c.name != "reduce"]
    assert [c.name for c in checks] == CHECKS * len(points)
    for i, p in enumerate(points):
        made = checks[i * len(CHECKS) : (i + 1) * len(CHECKS)]
        assert {(c.layout, c.ep, c.backend, c.exchange) for c in made} == {
            (str(p.layout), p.ep_degree, p.backend, p.format_exchange_label() or "none")
        }
        attention, kv_write, layers, logits, tokens, routing = made
        assert attention.error <= LIMIT, p
        assert kv_write.error == 0, p
        assert layers.error <= layers.limit <= LIMIT, (p, layers)
        assert logits.error <= LIMIT, p
        assert tokens.error == 0, p
        compared = tokens_of_a_rank * p.layout.attn_tp
        assert tokens.detail.startswith(f"of {compared} greedy tokens on all ranks;"), p
        assert routing.error == 0, p


@pytest.mark.parametrize("tp", [1, 2, *(pytest.param(tp, marks=pytest.mark.long) for tp in (4, 8))])
def test_logits_and_greedy_tokens_equal_those_of_transformers(tp, checkpoints, tmp_path):
    """Start four requests three steps apart, so that batches hold padding rows, token by token; a single rank runs in
    this process. Each of the 4 requests yields 5 tokens on each of the tp / dp ranks of its replica: 20 · tp / dp are
    compared.
    """
    points = [
        make_point(checkpoints[model], layout, storage, exchange)
        for layout, cases in GRID.items()
        if layout.tp == tp
        for model, storage, exchange in cases
    ]
    if tp == 1:
        checks = [check for p in points for check in verify_alone(p, PROMPTS, NEW, tmp_path)]
        assert_verified(points, checks, len(PROMPTS) * NEW)
    else:
        verify(points, PROMPTS, NEW, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_two_gpus_agree_with_transformers_with_tp_and_ep_experts(dtype, checkpoints, tmp_path):
    """Use the kernels of decode batches in bf16, compared by the median position. Half an expert has 12 numbers, 24
    bytes.
    """
    points = [
        msgspec.structs.replace(make_point(checkpoints[model], layout, PAGED, NONE | ep, "triton"), dtype=dtype)
        for layout in (Layout(2), Layout(2, dp=2))
        for model in ("v3", "v2")
        for ep in (CUT, WHOLE)
    ]
    options = launcher.JobOptions(
        folder=tmp_path, settings=Settings(), device="cuda", kind="verify", prompts=PROMPTS, new_tokens=NEW
    )
    launcher.run_points(points, options, RendezvousOptions(), lambda _: None)
    assert {r.point.get_key(): r.reason for r in read_last_records(tmp_path, FAILED_FILE).values()} == {}
    checks = [msgspec.json.decode(line, type=Check) for line in (tmp_path / "checks.jsonl").read_bytes().splitlines()]
    assert [c for c in checks if not c.ok] == []
    assert {(c.layout, c.ep) for c in checks if c.name == "logits"} == {(str(p.layout), p.ep_degree) for p in points}


@pytest.mark.long
def test_triton_backend_and_symmetric_memory_agree_with_transformers(checkpoints, tmp_path):
    """Use few and short prompts, because Triton's interpreter takes seconds for milliseconds of the reference."""
    prompts, new = ((5, 90, 17), (202,)), 1
    one = make_point(checkpoints["v3"], Layout(1), PAGED, NONE, "triton", context=3)
    assert_verified([one], verify_alone(one, prompts, new, tmp_path), len(prompts) * new)
    points = [
        make_point(checkpoints["v2"], Layout(2, dcp=2), PLAIN, A2A, "triton", context=3),
        make_point(checkpoints["v2"], Layout(2, dcp=2), PAGED, SYMM | REDUCED, context=3),
        make_point(checkpoints["v2"], Layout(2, dcp=2), PLAIN, SYMM | REPLICATED | PROJECTED, context=3),
    ]
    verify(points, prompts, new, tmp_path)


YARN = make_yarn(1.0, 0.8)
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
OF_V3 = {
    "n_group": 8,
    "topk_group": 4,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 3,
    "rope_parameters": PLAIN_ROPE,
}
VARIANTS: dict[str, tuple[Any, dict[str, object], dict[str, object]]] = {
    "no-shared-experts": (write_changed_deepseek_v3, {"n_shared_experts": 0}, {}),
    "null-shared-experts": (write_changed_deepseek_v3, {"n_shared_experts": 0}, {"n_shared_experts": None}),
    "v2-null-shared-experts": (write_changed_deepseek_v2, {"n_shared_experts": 0}, {"n_shared_experts": None}),
    "yarn-not-truncated": (write_changed_deepseek_v3, {"rope_parameters": YARN | {"truncate": False}}, {}),
    "v2-yarn-not-truncated": (write_changed_deepseek_v2, {"rope_parameters": YARN | {"truncate": False}}, {}),
    "yarn-truncated": (write_changed_deepseek_v3, {"rope_parameters": YARN | {"truncate": True}}, {}),
    "yarn-without-its-first-length": (
        write_changed_deepseek_v3,
        {},
        {"rope_parameters": {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"}},
    ),
    "yarn-attention-factor": (write_changed_deepseek_v3, {"rope_parameters": YARN | {"attention_factor": 1.3}}, {}),
    "yarn-of-nulls": (
        write_changed_deepseek_v3,
        {},
        {"rope_parameters": YARN | dict.fromkeys(("attention_factor", "beta_fast", "beta_slow", "mscale"))},
    ),
    "rope-scaling-as-published": (
        write_changed_deepseek_v3,
        {},
        {
            "rope_parameters": ABSENT,
            "rope_theta": 7000,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4,
                "original_max_position_embeddings": 64,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "two-thetas": (write_changed_deepseek_v3, {}, {"rope_theta": 10.0}),
    "rope-in-halves": (write_changed_deepseek_v3, {"rope_interleave": False}, {}),
    "not-normalised": (write_changed_deepseek_v3, {"norm_topk_prob": False}, {}),
    "v2-normalised": (write_changed_deepseek_v2, {"norm_topk_prob": True}, {}),
    "v2-groups-that-greedy-ignores": (write_changed_deepseek_v2, {"n_group": 4, "topk_group": 1}, {}),
    "v2-one-expert-a-group": (
        write_changed_deepseek_v2,
        {"topk_method": "group_limited_greedy", "n_group": 16, "topk_group": 5},
        {},
    ),
    "experts-of-23-columns": (write_changed_deepseek_v3, {"moe_intermediate_size": 23}, {}),
    "tied": (write_changed_deepseek_v3, {"tie_word_embeddings": True}, {}),
    "kimi-k2": (
        write_changed_deepseek_v3,
        {"n_group": 1, "topk_group": 1},
        {
            "model_type": "kimi_k2",
            "num_nextn_predict_layers": 0,
            "ep_size": 1,
            "aux_loss_alpha": 0.001,
            "seq_aux": True,
            "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
        },
    ),
    "what-v3-leaves-out": (
        write_changed_deepseek_v3,
        OF_V3,
        dict.fromkeys(
            (
                "n_group",
                "topk_group",
                "first_k_dense_replace",
                "norm_topk_prob",
                "routed_scaling_factor",
                "rms_norm_eps",
                "rope_interleave",
                "tie_word_embeddings",
                "attention_bias",
                "hidden_act",
                "rope_parameters",
                "head_dim",
                "qk_head_dim",
                "num_key_value_heads",
                "architectures",
            ),
            ABSENT,
        ),
    ),
    "what-v2-leaves-out": (
        write_changed_deepseek_v2,
        {"first_k_dense_replace": 0, "rope_parameters": PLAIN_ROPE},
        dict.fromkeys(
            (
                "n_group",
                "topk_group",
                "first_k_dense_replace",
                "norm_topk_prob",
                "routed_scaling_factor",
                "rms_norm_eps",
                "topk_method",
                "tie_word_embeddings",
                "attention_bias",
                "mlp_bias",
                "hidden_act",
                "rope_parameters",
            ),
            ABSENT,
        ),
    ),
    "harmless": (
        write_changed_deepseek_v3,
        {},
        {
            "num_nextn_predict_layers": 2,
            "mlp_only_layers": [],
            "zero_expert_num": 0,
            "partial_rotary_factor": 1.0,
            "sliding_window": None,
            "use_qk_norm": False,
            "index_topk": None,
            "attention_dropout": 0.1,
            "head_dim": 16,
            "moe_layer_freq": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "mlp_layer_types": None,
            "hidden_act": None,
            "attention_bias": None,
        },
    ),
}
"""Accepted configurations: the function that writes the checkpoint, its fields, and changes of its config.json."""


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")  # experts of width 0
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.long
def test_every_accepted_configuration_agrees_with_the_oracle(variant, tmp_path):
    """Run in one process, because all layouts share the arithmetic that is compared."""
    write, changed, written = VARIANTS[variant]
    write(tmp_path, changed, written)
    tested = make_point(str(tmp_path), Layout(1), PLAIN, NONE, context=9)
    checks = {c.name: c for c in verify_alone(tested, PROMPTS, NEW, tmp_path)}
    assert list(checks) == CHECKS
    assert {name: c.error for name, c in checks.items() if not c.ok} == {}
    assert checks["logits"].error <= LIMIT


def run_verify(*arguments: str) -> tuple[int, dict[str, Any], str]:
    """Run `dcpbench verify …`, and return its exit code, JSON output and stderr."""
    program = [sys.executable, "-m", "tests.distributed.quick_dcpbench", "verify"]
    line = [*program, *arguments, "--backend", "reference", "--json"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.long
def test_verify_command_compares_in_half_precision(checkpoints, tmp_path):
    """Check tokens too, as rounding is the engine's own in both."""
    code, result, _ = run_verify(
        "--checkpoint", checkpoints["v2"], "--tp", "1", "--weights-dtype", "bf16", "-o", str(tmp_path)
    )
    checks = {c["name"]: c for c in result["checks"]}
    assert list(checks) == CHECKS
    assert (code, result["ok"]) == (0, True)
    assert checks["tokens"]["limit"] == 0
    assert checks["layers"]["error"] > LIMIT, "the engine computed in bf16, not in fp32"


def test_family_with_other_field_and_tensor_names_agrees(checkpoints, tmp_path, monkeypatch):
    """Use the language model of a family with nested config.json fields and a prefix in its tensor names."""
    family = dataclasses.replace(
        deepseek_v3.FAMILY,
        model_type="named_otherwise",
        nested_in="text_config",
        tensors=TensorNames(
            embedding="language.model.embed_tokens.weight",
            final_norm="language.model.norm.weight",
            lm_head="language.lm_head.weight",
            layer="language.model.layers.{}.",
        ),
    )
    monkeypatch.setattr(models, "FAMILIES", (*models.FAMILIES, family))
    folder = tmp_path / "named_otherwise"
    shutil.copytree(checkpoints["v3"], folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "named_otherwise", "text_config": fields}))
    tensors = load_file(folder / "model.safetensors")
    save_file({f"language.{name}": t for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    tested = make_point(str(folder), Layout(1), PLAIN, NONE)
    checks = {check.name: check for check in verify_alone(tested, PROMPTS[:2], NEW, tmp_path)}
    assert [name for name, check in checks.items() if not check.ok] == []
    assert {"layers", "logits", "tokens"} <= checks.keys()


@pytest.mark.long
def test_verify_command_names_a_missing_tensor(checkpoints, tmp_path):
    """Expect the error in the failed point and on the terminal, without a traceback."""
    broken = tmp_path / "broken"
    shutil.copytree(checkpoints["v3"], broken)
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.layers.1.mlp.gate.weight"]
    save_file(tensors, broken / "model.safetensors")
    code, result, errors = run_verify("--checkpoint", str(broken), "--tp", "1", "-o", str(tmp_path / "run"))
    assert (code, result["ok"], result["checks"]) == (4, False, [])
    assert "has no tensor 'model.layers.1.mlp.gate.weight'" in result["failed"][0]["reason"]
    assert "has no tensor 'model.layers.1.mlp.gate.weight'" in errors
    assert "Traceback" not in errors


def test_prompts_leave_shards_empty_and_uneven():
    """Divide 13 + 5 tokens over 8 ranks: 2 ranks store 3, the others 2; one token leaves 7 ranks without any. In
    stripes of 2, 3 tokens lie on ranks 0 (two) and 1 (one), and 18 start a second round on rank 0.
    """
    assert [len(p) for p in PROMPTS] == [13, 1, 3, 4]
    assert [compute_local_length(13 + NEW, rank, 8) for rank in range(8)] == [3, 3, 2, 2, 2, 2, 2, 2]
    assert [compute_local_length(1, rank, 8) for rank in range(8)] == [1, 0, 0, 0, 0, 0, 0, 0]
    assert [compute_local_length(3, rank, 8, 2) for rank in range(8)] == [2, 1, 0, 0, 0, 0, 0, 0]
    assert [compute_local_length(13 + NEW, rank, 8, 2) for rank in range(8)] == [4, 2, 2, 2, 2, 2, 2, 2]
