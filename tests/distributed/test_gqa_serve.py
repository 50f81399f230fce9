"""Compare served token streams of models with grouped-query attention with `transformers`, with caching and chunks."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import msgspec
import pytest

from dcpbench.points.layout import Layout
from dcpbench.serving.loads import make_requests
from tests.distributed.checkpoints import VOCAB, write_llama, write_qwen3, write_qwen3_moe
from tests.distributed.test_serve import LOAD, make_point, read_streams, serve
from tests.distributed.verifying import continue_greedily

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.distributed

SMALL = {"num_hidden_layers": 2}
REPLICATED = {"exchange": "a2a", "q_replicate": True}

CASES: dict[str, tuple[Callable[[Path], None], Layout, dict[str, object], dict[str, object]]] = {
    "llama-tp2": (functools.partial(write_llama, kv_heads=8, **SMALL), Layout(2), {}, {}),
    "qwen3-tp2-dcp2-symm": (
        functools.partial(write_qwen3, kv_heads=1, **SMALL),
        Layout(2, dcp=2),
        {"exchange": "symm", "page_size": 4, "interleave": 2},
        {"policy": "prefill-first"},
    ),
    "qwen3-moe-tp2-dp2": (
        functools.partial(write_qwen3_moe, kv_heads=2, **SMALL),
        Layout(2, dp=2),
        {"ep": "1"},
        {"chunk": 8},
    ),
    "qwen3-moe-tp4-dcp2-a2a": (
        functools.partial(write_qwen3_moe, kv_heads=2, tie_word_embeddings=True, **SMALL),
        Layout(4, dcp=2),
        REPLICATED,
        {},
    ),
    "llama-tp4-dcp4-tight": (
        functools.partial(write_llama, kv_heads=1, **SMALL),
        Layout(4, dcp=4),
        {"page_size": 1},
        {"prefix_cache": False, "prefix_share": 0.0},
    ),
}
"""Checkpoint, layout, fields of the point and changes of LOAD."""


@pytest.mark.parametrize(
    "case",
    [name if name == "qwen3-tp2-dcp2-symm" else pytest.param(name, marks=pytest.mark.long) for name in CASES],
)
def test_answers_match_transformers(case: str, tmp_path: Path) -> None:
    """Use 12 prompts of 1 to 40 tokens, half of each shared: chunks, hits in the prefix cache, mixed steps."""
    write, layout, fields, changes = CASES[case]
    write(tmp_path / "checkpoint")
    folder = str(tmp_path / "checkpoint")
    load = msgspec.structs.replace(LOAD, **changes)
    (record,) = serve([make_point(folder, layout, load, **fields)], tmp_path / "run")
    found = read_streams(record, tmp_path / "run")
    assert found == [
        continue_greedily(folder, tuple(r.prompt.tolist()), r.output_tokens) for r in make_requests(load, VOCAB)
    ]
    assert (record.serve.finished, record.serve.rejected) == (LOAD.requests, 0)
    assert (record.serve.cached_tokens > 0) == (changes.get("prefix_cache") is not False)
