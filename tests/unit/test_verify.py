"""`verify` must be able to fail: each check against an engine or an oracle that is wrong in its own way."""

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from dcpbench.engine import weights
from dcpbench.kernels.kv_write import write_kv
from dcpbench.launch.jobs import Check, Job
from dcpbench.points.point import Point
from dcpbench.points.settings import Settings
from dcpbench.workloads import oracle, verify
from dcpbench.workloads.oracle import Truth
from tests.unit import engine_builder as build

POINT = Point(model="tiny", tp=1, concurrency=2, context=9, backend="reference", dtype="fp32", page_size=2)
PROMPTS = [[3, 1, 4], [1]]
LONG = [[7 * k % 512 for k in range(60)]]
NEW = 2


def run(point=POINT, prompts=PROMPTS):
    """All checks of a point on one rank, as they are written to and read from checks.jsonl."""
    job = Job(
        kind="verify",
        tag="t",
        folder="/nowhere",
        device="cpu",
        points=[point],
        settings=Settings(),
        prompts=prompts,
        new_tokens=NEW,
    )
    checks = verify.run(point, build.TINY, job, rank=0, device=build.CPU)
    return {c.name: c for c in msgspec.json.decode(msgspec.json.encode(checks), type=list[Check])}


class TestStorage:
    def test_a_sound_engine_passes_both_checks(self):
        """Lengths 1, 2, 4, 7 and 9: around and between pages of 2."""
        checks = run()
        assert list(checks) == ["attention", "kv_write"]
        assert all(c.ok for c in checks.values())
        assert checks["attention"].detail == "lengths 1, 2, 4, 7, 9"
        assert (checks["kv_write"].error, checks["kv_write"].limit) == (0, 0)

    def test_a_write_of_one_row_too_many_is_counted(self, monkeypatch):
        """Row 6: rows 0, 1 are padding, 2 is the request of 1 token, 4, 5 that of 2, and 6 begins that of 4 tokens."""

        def sloppy(kv_KQ, new_BQ, loc_B, share, scale):
            write_kv(kv_KQ, new_BQ, loc_B, share, scale)
            kv_KQ[6] += 1

        monkeypatch.setattr("dcpbench.engine.model.write_kv", sloppy)
        assert (run()["kv_write"].error, run()["kv_write"].ok) == (1, False)

    def test_rows_that_are_not_written_are_counted(self, monkeypatch):
        """None of the five requests' new tokens is stored."""
        monkeypatch.setattr("dcpbench.engine.model.write_kv", lambda *_, **__: None)
        assert (run()["kv_write"].error, run()["kv_write"].ok) == (5, False)

    def test_a_row_next_to_the_right_one_is_two_mistakes(self, monkeypatch):
        """One row changed that should not have, one did not that should; for request of length 1, at page 1."""

        def shifted(kv_KQ, new_BQ, loc_B, share, scale):
            locs = loc_B.clone()
            locs[0] += 1
            write_kv(kv_KQ, new_BQ, locs, share, scale)

        monkeypatch.setattr("dcpbench.engine.model.write_kv", shifted)
        assert (run()["kv_write"].error, run()["kv_write"].ok) == (2, False)

    def test_an_all_reduce_of_our_own_is_compared_and_a_wrong_one_found(self, monkeypatch):
        """Alone a rank's sum is what it gave; twice that is wrong by as much as the truth."""
        symmetric = msgspec.structs.replace(POINT, all_reduce="symm")
        checks = run(symmetric)
        assert list(checks) == ["attention", "kv_write", "reduce"]
        assert (checks["reduce"].error, checks["reduce"].ok, checks["reduce"].all_reduce) == (0, True, "symm")
        monkeypatch.setattr("dcpbench.workloads.session.make_all_reduce", lambda *_: lambda x: 2 * x)
        assert run(symmetric)["reduce"].error == pytest.approx(1)
        assert not run(symmetric)["reduce"].ok

    def test_lengths_lie_around_every_edge(self):
        """dcp 8 in stripes of 2 deals out 16 tokens a round: 1 leaves 7 ranks empty, 15, 16 and 17 are an edge."""
        assert verify._lengths(8, 2, 200) == [1, 2, 15, 16, 17, 50, 112, 200]
        assert verify._lengths(8, 2, 16) == [1, 2, 15, 16], "none longer than the context"
        assert verify._lengths(1, 1, 3) == [1, 2, 3]


def truth(changed=None):
    """An oracle that says tokens 7, 8 and logits 0 … of each prompt, changed at (prompt, position)."""
    truths = []
    for i, prompt in enumerate(PROMPTS):
        logits = torch.arange(5.0).repeat(len(prompt) + NEW, 1)
        for where, value in (changed or {}).items():
            if where[0] == i:
                logits[where[1], 2] += value
        truths.append(Truth(tokens=[7, 8], logits=logits))
    return truths


class TestOracle:
    @pytest.fixture
    def compare(self, monkeypatch):
        """`logits` and `tokens` of what one rank found for both prompts."""
        monkeypatch.setattr(oracle, "greedy", lambda *_, **__: truth())

        def compared(found, dtype="fp32"):
            mine = {i: (tokens, t.logits) for i, (tokens, t) in enumerate(found)}
            return verify._compare(msgspec.structs.replace(POINT, dtype=dtype), build.TINY, [mine], PROMPTS, NEW)

        return compared

    def test_what_agrees_is_ok(self, compare):
        """2 tokens of 2 requests."""
        logits, tokens = compare([([7, 8], t) for t in truth()])
        assert (logits.error, logits.ok) == (0, True)
        assert (tokens.error, tokens.ok, tokens.detail) == (0, True, "of 4 greedy tokens on all ranks")

    def test_one_logit_of_any_position_counts(self, compare):
        """The last position of the second prompt; the largest difference is what is said."""
        logits, _ = compare([([7, 8], t) for t in truth({(0, 1): 1e-5, (1, 2): -0.5})])
        assert (logits.error, logits.ok) == (0.5, False)

    @pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3], ids="logits-times-{}".format)
    def test_the_limit_is_a_share_of_the_largest_logit(self, monkeypatch, scale):
        """Logits reach 4: 2e-5 of it is 8e-5. The same model with all logits 1000 times as large is as right or wrong.

        An error of 6e-5 is below and one of 1e-4 above; an absolute 1e-4 would pass anything that has small logits.
        """
        scaled = [Truth(tokens=t.tokens, logits=t.logits.double() * scale) for t in truth()]
        monkeypatch.setattr(oracle, "greedy", lambda *_, **__: scaled)
        for error, ok in ((6e-5, True), (1e-4, False)):
            found = {i: (t.tokens, t.logits.double() * scale) for i, t in enumerate(truth({(0, 1): error}))}
            logits, _ = verify._compare(POINT, build.TINY, [found], PROMPTS, NEW)
            assert logits.ok is ok, error
            assert logits.limit == pytest.approx(8e-5 * scale)
            assert f"whose logits reach {4 * scale:.2g}" in logits.detail

    def test_a_logit_that_is_nan_is_wrong(self, compare):
        """max(0, NaN) is 0 in Python: without care the worst answer would pass as the best."""
        logits, _ = compare([([7, 8], t) for t in truth({(0, 1): float("nan")})])
        assert (logits.error, logits.ok) == (None, False)

    def test_a_wrong_token_counts_with_all_that_follow_it(self, compare):
        """First request: 7 then 9, one wrong. Second: 9 first, both wrong, as the second continues another text."""
        first, second = truth()
        logits, tokens = compare([([7, 9], first), ([9, 8], second)])
        assert (tokens.error, tokens.ok) == (3, False)
        assert logits.ok

    def test_logits_after_a_wrong_token_are_not_compared(self, compare):
        """Position 3 of the first prompt, [3, 1, 4], reads the wrong token; position 2 does not."""
        for position, error in ((3, 0.0), (2, 1.0)):
            first, second = truth({(0, position): 1.0})
            logits, _ = compare([([9, 8], first), ([7, 8], second)])
            assert logits.error == error

    def test_half_precision_reports_tokens_and_does_not_judge_them(self, compare):
        """A tie may fall either way in bf16. No limit is null, as JSON has no infinity."""
        logits, tokens = compare([([9, 9], t) for t in truth()], dtype="bf16")
        assert (logits.ok, logits.limit) == (True, pytest.approx(0.1 * 4))
        assert (tokens.error, tokens.limit, tokens.ok) == (4, None, True)
        read = msgspec.json.decode(msgspec.json.encode(tokens), type=Check)
        assert read == tokens

    def test_half_precision_judges_logits_by_the_median_position(self, compare):
        """5 + 3 positions: one that differs by 2, as when another expert was chosen, is told; five are wrong."""
        logits, _ = compare([([7, 8], t) for t in truth({(0, 0): 2.0})], dtype="bf16")
        assert (logits.error, logits.ok) == (0, True)
        assert "2 where rounding chose other experts" in logits.detail
        logits, _ = compare([([7, 8], t) for t in truth({(0, i): 2.0 for i in range(5)})], dtype="bf16")
        assert (logits.error, logits.ok) == (2, False)
        nan = {(0, i): float("nan") for i in range(5)}
        logits, _ = compare([([7, 8], t) for t in truth(nan)], dtype="bf16")
        assert (logits.error, logits.ok) == (None, False)


class TestRouting:
    """A checkpoint whose routing biases are all 8 higher: the same model, unless they are rounded."""

    @pytest.fixture
    def routed(self, tmp_path, monkeypatch):
        """The check `routing` in a dtype; what transformers would say of the logits is left out."""
        tensors = build.tensors(build.TINY)
        for name in tensors:
            if name.endswith("bias"):
                tensors[name] = 8 + 3 * tensors[name]
        save_file(tensors, tmp_path / "model.safetensors")
        truths = [Truth(tokens=[0] * NEW, logits=torch.zeros(len(p) + NEW, build.TINY.vocab)) for p in LONG]
        monkeypatch.setattr(oracle, "greedy", lambda *_, **__: truths)
        return lambda dtype: run(msgspec.structs.replace(POINT, weights=str(tmp_path), dtype=dtype), LONG)["routing"]

    @pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
    def test_no_token_goes_elsewhere(self, routed, dtype):
        check = routed(dtype)
        assert (check.error, check.limit, check.ok) == (0, 0, True)

    def test_biases_that_were_rounded_are_found(self, routed, monkeypatch):
        """bf16 has 8 and then 8.0625: biases of 0.03 are gone, and with them the choice of some tokens' experts."""
        read = weights.routing_bias
        monkeypatch.setattr(weights, "routing_bias", lambda *where: read(*where).bfloat16().float())
        check = routed("bf16")
        assert not check.ok
        assert check.error >= 1

    def test_a_model_without_such_biases_reads_none(self, tmp_path):
        save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
        point = msgspec.structs.replace(POINT, weights=str(tmp_path))
        assert verify._routing_biases(point, build.shape_like_tiny(routing="softmax"), build.CPU) == []
