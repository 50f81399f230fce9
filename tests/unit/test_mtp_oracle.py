"""DeepSeek-V3's layer that drafts tokens, compared with one built from transformers' modules. transformers does not run
that layer. The oracle follows section 2.2 of DeepSeek-V3's report (arXiv 2412.19437): at position i the layer gets a
projection of [norm of the embedding of token i + 1, norm of the hidden state of token i], and the shared LM head
follows a separate norm. The embedding is first, and the hidden state is taken after the model's last norm, as in vLLM
0.26, which also zeroes the embedding at position 0; that is left out here.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
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
from dcpbench.engine.prefill import Prefiller
from dcpbench.engine.serve_engine import ServeEngine
from dcpbench.engine.weights import load_weights
from dcpbench.models import load_shape
from dcpbench.points.layout import Layout
from dcpbench.points.speculation import Speculation
from dcpbench.serving.allocator import PADDING_PAGE
from dcpbench.serving.requests import ServeRequest
from dcpbench.serving.scheduler import Scheduler, SchedulerConfig
from tests.distributed.checkpoints import write_changed_deepseek_v3
from tests.unit.engine_builder import CPU, make_groups, make_layers
from tests.unit.engine_drafts import accept_drafts, append_drafts

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from dcpbench.engine.decode_engine import Batch
    from dcpbench.engine.model import StepInput
    from dcpbench.serving.requests import Sequence

LAYERS, LENGTH, DRAFTS = 3, 11, 2
PAGE, CHUNK = 4, 8  # tokens of a page, and of the prompts of a step, where requests are served
LIMIT = 1e-4  # of the largest number of a hidden state
PREFIX = f"model.layers.{LAYERS}."


class Oracle:
    """A V3 with LAYERS layers, and one after them that drafts tokens, with random weights; `folder` gets their
    checkpoint.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        write_changed_deepseek_v3(folder, {"num_hidden_layers": LAYERS + 1, "seed": seed}, {})
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
            tokens.append(self.sample(tokens))
        return tokens

    @torch.no_grad()
    def sample(self, tokens: list[int]) -> int:
        """Return the greedy token behind `tokens`."""
        return int(self.model(torch.tensor([tokens])).logits[0, -1].argmax())

    @torch.no_grad()
    def draft_tokens(self, tokens: list[int]) -> list[int]:
        """Return the DRAFTS tokens that the layer drafts behind `tokens`; the input of each further pass is the output of the one before."""
        inner, found = self.model.model, list[int]()
        before, after = torch.tensor([tokens[:-1]]), torch.tensor([tokens[1:]])
        embedded, hidden = inner.embed_tokens(after), inner(before).last_hidden_state
        while len(found) < DRAFTS:
            out = self.run_layer(embedded, hidden)
            found.append(int((out[0, -1] @ self.model.lm_head.weight.T).argmax()))
            embedded = torch.cat((embedded, inner.embed_tokens(torch.tensor([found[-1:]]))), 1)
            hidden = torch.cat((hidden, out[:, -1:]), 1)
        return found

    @torch.no_grad()
    def draft(self, tokens: list[int]) -> Tensor:
        """Return the hidden states [T - 1, D] from which the LM head drafts the tokens after tokens[1:]."""
        before, after = torch.tensor([tokens[:-1]]), torch.tensor([tokens[1:]])
        inner = self.model.model
        return self.run_layer(inner.embed_tokens(after), inner(before).last_hidden_state)[0]

    def run_layer(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Return the hidden states [1, T, D] behind the layer's last norm, of all positions from 0 on."""
        parts = (self.normalize("enorm", embedded), self.normalize("hnorm", hidden))
        joined = torch.cat(parts, -1) @ self.added[PREFIX + "eh_proj.weight"].T
        length = joined.shape[1]
        positions = torch.arange(length)[None]
        mask = torch.full((length,) * 2, float("-inf")).triu(1)[None, None]
        rotary = self.model.model.rotary_emb(joined, positions)
        out = self.layer(joined, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        return self.normalize("shared_head.norm", out[0] if isinstance(out, tuple) else out)


def make_engine(folder: Path, *, context: int = LENGTH + 2 * DRAFTS, pages: int = 0, requests: int = 1) -> DecodeEngine:
    """Return the engine of one rank in fp32 with the checkpoint's weights."""
    shape = load_shape(str(folder)).add_drafts(DRAFTS)
    layout = Layout(1)
    source = CheckpointSource(folder, torch.float32, CPU)
    weights = load_weights(source, shape, layout, 0, make_layers(shape))
    page_size = PAGE if pages else 1
    kv = KvPool(shape.stored_layers, pages or 2 * context, page_size, shape.compute_kv_width(1), torch.float32, CPU)
    model = Model(shape, layout, make_groups(layout, 0), weights, kv, interleave=1, max_context=context, device=CPU)
    return DecodeEngine(
        model,
        backend="reference",
        exchange="none",
        max_requests=requests,
        max_context=context,
        query_length=DRAFTS + 1,
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
        engine.request_pool.set_tokens(request.slot, position, verified)
        batch = engine.plan_step([request], query_length=DRAFTS + 1)
        engine.run_eager(batch)
        assert accept_drafts(engine, batch, [request]) == [tokens[position + 1 : position + 2 + DRAFTS]]
        position += DRAFTS + 1
        start = request.length - 1
        append_drafts(engine, request, [0] * DRAFTS)
        engine.plan_drafts(batch, [request], [start])
        engine.run_drafts(batch)
        batch.draft_batches = None  # the next step only verifies
        drafted.append(int(batch.drafts[0, 0]))
    hidden = torch.cat(found)
    assert len(hidden) == position >= 9
    assert float((hidden - expected[:position]).abs().max() / expected.abs().max()) < LIMIT
    logits = expected[:position] @ oracle.model.lm_head.weight.T
    assert drafted == logits.argmax(-1)[DRAFTS :: DRAFTS + 1].tolist()


PROMPTS = (5, 13, 6, 8)
"""Lengths of prompts: one with room in its last page, one in two steps, one that ends next to it, and one of whole pages."""
ANSWER = 7


def poison(engine: DecodeEngine, sequences: list[Sequence]) -> None:
    """Make all KV rows NaN but those of computed tokens and of the padding page, so also those of rejected and further drafts."""
    kept = {PADDING_PAGE * PAGE + i for i in range(PAGE)}
    for sequence in sequences:
        if sequence.allocation is not None:
            kept.update(sequence.allocation.compute_locs(0, sequence.computed).tolist())
    rows = engine.model.kv.get_all_rows()
    rows[:, [row for row in range(rows.shape[1]) if row not in kept]] = float("nan")


@pytest.mark.parametrize("seed", range(2))
def test_steps_with_prompts_run_the_layer_that_drafts(seed: int, tmp_path: Path) -> None:
    """Requests come one after the other, so that steps hold decodes, chunks of a prompt and prompts that end. The drafts behind each
    token of theirs are those of transformers' modules over all tokens before it. Rejected drafts and unused pages are NaN.
    """
    oracle = Oracle(tmp_path, seed)
    engine = make_engine(tmp_path, context=max(PROMPTS) + ANSWER + 2 * DRAFTS, pages=24, requests=len(PROMPTS))
    serving = ServeEngine(engine, Prefiller(engine.model, backend="sdpa", tokens=CHUNK, rows=32), None)
    serving.capture_steps()
    setup = SchedulerConfig(
        replicas=1,
        pages=24,
        page_size=PAGE,
        dcp=1,
        max_requests=len(PROMPTS),
        chunk=CHUNK,
        prefix_cache=False,
        max_context=engine.max_context,
        speculation=Speculation(DRAFTS, (0.0,) * DRAFTS),
    )
    scheduler, numbers = Scheduler(setup), np.random.default_rng(seed)
    known: dict[int, list[int]] = {}
    kinds = set()
    for count in range(40):
        if len(known) < len(PROMPTS) and count % 2 == 0:
            number = len(known)
            prompt = numbers.integers(2, oracle.model.config.vocab_size, PROMPTS[number]).astype(np.int32)
            known[number] = prompt.tolist()
            assert not scheduler.submit(ServeRequest(number=number, prompt=prompt, output_tokens=ANSWER))  # type: ignore[arg-type]
        step = scheduler.plan_step()
        if step is None:
            break
        (mine,) = step.replicas
        tokens = serving.launch_step(step).wait_tokens()
        for sequence, token in zip(mine.emitting_sequences, tokens, strict=True):
            own = known[sequence.request.number]
            assert token == oracle.sample(own)
            own.append(token)
            if mine.chunks or not sequence.is_finished:
                drafts = engine.request_pool.tokens[sequence.slot, len(own) : len(own) + DRAFTS].tolist()
                assert drafts == oracle.draft_tokens(own), (count, len(own))
        for chunk in (chunk for chunk in mine.chunks if chunk.samples and chunk.sequence.allocation is not None):
            written = engine.request_pool.table[chunk.slot, chunk.stop : chunk.stop + DRAFTS - 1] // PAGE
            assert set(written.tolist()) <= set(chunk.sequence.allocation.pages.tolist()), (
                "rows of further drafts are its own"
            )
        kinds.add((bool(mine.decodes), len(mine.chunks), sum(chunk.samples for chunk in mine.chunks)))
        poison(engine, scheduler.replicas[0].running)
    assert all(len(known[n]) == PROMPTS[n] + ANSWER for n in range(len(PROMPTS)))
    assert {(True, 1, 0), (True, 1, 1), (True, 0, 0)} <= kinds, (
        "decodes with a part of a prompt, with its end, and alone"
    )
