"""DeepSeek-V3's layer that drafts tokens, compared with one built from transformers' modules. transformers does not run
that layer. The oracle follows section 2.2 of DeepSeek-V3's report (arXiv 2412.19437): at position i the layer gets a
projection of [norm of the embedding of token i + 1, norm of the hidden state of token i], and the shared LM head
follows a norm of its own. The embedding is first, and the hidden state is taken after the model's last norm, as in vLLM
0.26, which also zeroes the embedding at position 0; that is left out here.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

from dcpbench.engine.checkpoint import CheckpointSource
from dcpbench.engine.decode_engine import DecodeEngine
from dcpbench.engine.kv_pool import KvPool
from dcpbench.engine.model import Model
from dcpbench.engine.weights import load_weights
from dcpbench.models import load_shape
from dcpbench.points.layout import Layout
from tests.distributed.checkpoints import deepseek_v3_of
from tests.unit.engine_builder import CPU, alone, layers

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from dcpbench.engine.decode_engine import Batch
    from dcpbench.engine.model import StepInput

LAYERS, LENGTH, DRAFTS = 3, 11, 2
LIMIT = 1e-4  # of the largest number of a hidden state
PREFIX = f"model.layers.{LAYERS}."


class Oracle:
    """A V3 with LAYERS layers, and one after them that drafts tokens, with random weights; `folder` gets their
    checkpoint.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        deepseek_v3_of(folder, {"num_hidden_layers": LAYERS + 1, "seed": seed}, {})
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.layer = self.model.model.layers[LAYERS]
        self.model.model.layers = self.model.model.layers[:LAYERS]
        hidden = self.model.config.hidden_size
        self.added = {
            PREFIX + f"{name}.weight": 1 + 0.3 * torch.randn(hidden) for name in ("enorm", "hnorm", "shared_head.norm")
        } | {PREFIX + "eh_proj.weight": torch.randn(hidden, 2 * hidden) / (2 * hidden) ** 0.5}
        (file,) = folder.glob("*.safetensors")
        save_file(load_file(file) | self.added, file, {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
        (folder / "config.json").write_text(json.dumps(config))

    def normalize(self, name: str, x: Tensor) -> Tensor:
        """Return x after one of the added norms."""
        norm = DeepseekV3RMSNorm(x.shape[-1], self.model.config.rms_norm_eps)
        norm.weight = nn.Parameter(self.added[PREFIX + f"{name}.weight"])
        return norm(x)

    @torch.no_grad()
    def generate(self, first: int) -> list[int]:
        """Return greedy tokens after `first`."""
        tokens = [first]
        while len(tokens) < LENGTH:
            tokens.append(int(self.model(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens

    @torch.no_grad()
    def draft(self, tokens: list[int]) -> Tensor:
        """Return the hidden states [T - 1, D] from which the LM head drafts the tokens after tokens[1:]."""
        before, after = torch.tensor([tokens[:-1]]), torch.tensor([tokens[1:]])
        inner = self.model.model
        parts = (
            self.normalize("enorm", inner.embed_tokens(after)),
            self.normalize("hnorm", inner(before).last_hidden_state),
        )
        joined = torch.cat(parts, -1) @ self.added[PREFIX + "eh_proj.weight"].T
        positions = torch.arange(before.shape[1])[None]
        mask = torch.full((before.shape[1],) * 2, float("-inf")).triu(1)[None, None]
        rotary = inner.rotary_emb(joined, positions)
        out = self.layer(joined, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        return self.normalize("shared_head.norm", out[0] if isinstance(out, tuple) else out)[0]


def make_engine(folder: Path) -> DecodeEngine:
    """Return the engine of one rank in fp32 with the checkpoint's weights."""
    shape = load_shape(str(folder)).add_drafts(DRAFTS)
    layout, context = Layout(1), LENGTH + 2 * DRAFTS
    source = CheckpointSource(folder, torch.float32, CPU)
    weights = load_weights(source, shape, layout, 0, layers(shape))
    kv = KvPool(shape.stored_layers, 2 * context, 1, shape.compute_kv_width(1), torch.float32, CPU)
    model = Model(shape, layout, alone(layout, 0), weights, kv, interleave=1, max_context=context, device=CPU)
    return DecodeEngine(
        model, backend="reference", exchange="none", max_requests=1, max_context=context, query_length=DRAFTS + 1
    )


@pytest.mark.parametrize("seed", range(3))
def test_draft_layer_equals_that_of_the_report(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of three tokens, two of them correct drafts, run the layer over all positions of the request."""
    oracle = Oracle(tmp_path, seed)
    tokens = oracle.generate(first=seed + 5)
    expected = oracle.draft(tokens)
    engine = make_engine(tmp_path)
    found: list[Tensor] = []
    run = engine.model.run_draft_layer

    def keep(batch: StepInput, hidden_BD: Tensor, decodes: Batch) -> Tensor:
        out = run(batch, hidden_BD, decodes)
        if len(out) == DRAFTS + 1:
            found.append(out.clone())
        return out

    monkeypatch.setattr(engine.model, "run_draft_layer", keep)
    request = engine.add_request(DRAFTS + 1)
    position, drafted = 0, []
    while position + DRAFTS + 1 < LENGTH:
        verified = tokens[position : position + DRAFTS + 1]
        engine.requests.set_tokens(request.slot, position, verified)
        batch = engine.plan_step([request], query_length=DRAFTS + 1)
        engine.run_eager(batch)
        assert engine.accept_drafts(batch, [request]) == [tokens[position + 1 : position + 2 + DRAFTS]]
        position += DRAFTS + 1
        start = request.length - 1
        engine.append_drafts(request, [0] * DRAFTS)
        engine.plan_drafts(batch, [request], [start])
        engine.run_drafts(batch)
        batch.later = None  # the next step only verifies
        drafted.append(int(batch.drafts[0, 0]))
    hidden = torch.cat(found)
    assert len(hidden) == position >= 9
    assert float((hidden - expected[:position]).abs().max() / expected.abs().max()) < LIMIT
    logits = expected[:position] @ oracle.model.lm_head.weight.T
    assert drafted == logits.argmax(-1)[DRAFTS :: DRAFTS + 1].tolist()
