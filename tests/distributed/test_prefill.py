"""Compare the logits of steps with decodes and prompt chunks over 2 and 4 gloo ranks with `transformers`."""

import json

import pytest
import torch

from dcpbench.points.layout import Layout
from tests.distributed import prefill_ranks as ranks
from tests.distributed.checkpoints import WRITERS
from tests.distributed.forked import run_forked

LIMIT = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write the checkpoints, and the oracle's logits of both replicas' prompts."""
    from transformers import AutoModelForCausalLM  # takes seconds

    made = tmp_path_factory.mktemp("prefill")
    texts = torch.tensor(ranks.make_prompts(0) + ranks.make_prompts(1))
    truth = {}
    for name in ("v3", "v2"):
        WRITERS[name](made / name)
        oracle = AutoModelForCausalLM.from_pretrained(
            made / name, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        with torch.no_grad():
            truth[name] = torch.stack([oracle(text[None], use_cache=False).logits[0] for text in texts])
    one = ranks.Case("v3", Layout(1), kv="fp8")
    truth[one.truth] = torch.cat([ranks.compute_logits_alone(one, made, replica) for replica in range(2)])
    exact = torch.cat([ranks.compute_logits_alone(ranks.Case("v3", Layout(1)), made, replica) for replica in range(2)])
    known = ~exact.isnan()
    assert (exact - truth["v3"])[known].abs().max() < LIMIT, "one rank with fp32 rows agrees with transformers"
    off = (truth[one.truth] - exact)[known].abs().max() / exact[known].abs().max()
    assert off > 1e-3, "one rank with fp8 rows differs from transformers"
    torch.save(truth, made / "truth.pt")
    return made


@pytest.mark.distributed
@pytest.mark.parametrize("world", ranks.CASES)
@pytest.mark.long
def test_logits_agree_with_transformers_on_every_layout(world, folder):
    """Compare all rows of every step on every rank: chunks with and without a prefix, with decodes. Use windows of one
    page up to the whole prefix, stripes, both ways to gather, and projections that are held for all heads of the DCP
    group. Where --collectives all-reduce=symm has memory for two rows, prompt steps are reduced without it. Over fp8
    rows, logits equal those of one rank with all rows, because stored rows are exchanged.
    """
    run_forked("tests.distributed.prefill_ranks", str(world), str(folder), log=folder / f"log-{world}")
    for rank in range(world):
        errors = json.loads((folder / f"{world}-{rank}.json").read_text())
        for case, error in zip(ranks.CASES[world], errors, strict=True):
            assert error < LIMIT, case
