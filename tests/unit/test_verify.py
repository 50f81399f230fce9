"""Test that the storage checks of `verify` fail for defective engines. Checks against a checkpoint:
test_checkpoint_checks.py, tests/distributed/test_verify_defects.py.
"""

import msgspec
import pytest

from dcpbench.kernels.kv_write import write_kv
from dcpbench.launch.jobs import Check, Job
from dcpbench.points.point import Point
from dcpbench.points.settings import Settings
from dcpbench.workloads import verify
from tests.unit import engine_builder as build

POINT = Point(model="tiny", tp=1, concurrency=2, context=9, backend="reference", dtype="fp32", page_size=2)
PROMPTS = [[3, 1, 4], [1]]
NEW = 2


def run(point=POINT, prompts=PROMPTS):
    """Return all checks of a point on one rank, after a round trip through the format of checks.jsonl."""
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
    def test_correct_engine_passes_both_checks(self):
        """Use lengths 1, 2, 4, 7 and 9: around and between pages of 2."""
        checks = run()
        assert list(checks) == ["attention", "kv_write"]
        assert all(c.ok for c in checks.values())
        assert checks["attention"].detail == "lengths 1, 2, 4, 7, 9"
        assert (checks["kv_write"].error, checks["kv_write"].limit) == (0, 0)

    def test_one_extra_written_row_is_counted(self, monkeypatch):
        """Change row 6: rows 0, 1 are padding, 2 is the request of 1 token, 4, 5 that of 2, and 6 begins that of 4
        tokens.
        """

        def write_extra_row(kv_KQ, new_BQ, loc_B, share, scale):
            write_kv(kv_KQ, new_BQ, loc_B, share, scale)
            kv_KQ[6] += 1

        monkeypatch.setattr("dcpbench.engine.model.write_kv", write_extra_row)
        assert (run()["kv_write"].error, run()["kv_write"].ok) == (1, False)

    def test_missing_rows_are_counted(self, monkeypatch):
        """Store none of the five requests' new tokens."""
        monkeypatch.setattr("dcpbench.engine.model.write_kv", lambda *_, **__: None)
        assert (run()["kv_write"].error, run()["kv_write"].ok) == (5, False)

    def test_row_written_to_the_wrong_place_counts_twice(self, monkeypatch):
        """Shift the row of the request of length 1 on page 1: one row is missing and one is extra."""

        def write_shifted(kv_KQ, new_BQ, loc_B, share, scale):
            locs = loc_B.clone()
            locs[0] += 1
            write_kv(kv_KQ, new_BQ, locs, share, scale)

        monkeypatch.setattr("dcpbench.engine.model.write_kv", write_shifted)
        assert (run()["kv_write"].error, run()["kv_write"].ok) == (2, False)

    def test_symmetric_all_reduce_is_checked_and_a_wrong_one_fails(self, monkeypatch):
        """Expect the input as the sum of one rank; twice the input has a relative error of 1."""
        symmetric = msgspec.structs.replace(POINT, all_reduce="symm")
        checks = run(symmetric)
        assert list(checks) == ["attention", "kv_write", "reduce"]
        assert (checks["reduce"].error, checks["reduce"].ok, checks["reduce"].all_reduce) == (0, True, "symm")
        monkeypatch.setattr("dcpbench.workloads.session.make_all_reduce", lambda *_: lambda x: 2 * x)
        assert run(symmetric)["reduce"].error == pytest.approx(1)
        assert not run(symmetric)["reduce"].ok

    def test_lengths_include_both_sides_of_each_boundary(self):
        """Use dcp 8 in stripes of 2, which distribute 16 tokens a round: 1 leaves 7 ranks empty, and 15, 16 and 17 are
        a boundary.
        """
        assert verify._list_lengths(8, 2, 200) == [1, 2, 15, 16, 17, 50, 112, 200]
        assert verify._list_lengths(8, 2, 16) == [1, 2, 15, 16], "none longer than the context"
        assert verify._list_lengths(1, 1, 3) == [1, 2, 3]
