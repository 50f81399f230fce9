"""Test the gate: limits, baselines, permissions with reasons, and incomplete traces."""

from __future__ import annotations

import ast
import copy
import datetime as dt
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dcpbench.errors import UsageError
from dcpbench.syncs import sync_report
from dcpbench.syncs.gating import baseline as baselines
from dcpbench.syncs.gating import comments
from dcpbench.syncs.gating.config import Allow
from dcpbench.syncs.gating.gate import Gate, apply_permissions, can_be_finding, compute_verdict
from dcpbench.syncs.sites import merge_sites
from dcpbench.syncs.sync_report import CallLine
from tests.unit import syncs_builder as build

if TYPE_CHECKING:
    from dcpbench.syncs.sync_report import Report, Site, Verdict

NOWHERE = Path("/nonexistent")
TODAY = dt.date(2026, 6, 15)


def judge(report: Report, **gate: Any) -> Verdict:
    """Return the judge of a gate that reads no sources."""
    made = Gate(**{"root": NOWHERE, **gate})
    return compute_verdict(report, made, apply_permissions(report.sites, made, TODAY))


def test_verdict_leaves_the_report_as_it_is() -> None:
    """Only `apply_permissions` sets `allowed`, so that a verdict can be computed again and for another gate."""
    report = build.make_report_of_all_kinds()
    before = copy.deepcopy(report)
    gate = Gate(root=NOWHERE, allow=(Allow(function="sample", reason="made", source="allow[0]"),))
    verdicts = [compute_verdict(report, gate) for _ in range(2)]
    assert report == before
    assert verdicts[0] == verdicts[1]
    apply_permissions(report.sites, gate)
    assert [site.allowed for site in report.sites if site.function == "sample"] == ["made"]
    assert len(compute_verdict(report, gate).findings) == len(verdicts[0].findings) - 1


def make_baseline(report: Report) -> baselines.Baseline:
    """Return a baseline with every site that can be a finding."""
    return baselines.build_baseline(filter(can_be_finding, report.sites))


def allow(**globs: Any) -> Allow:
    """Return a permission."""
    return Allow(**{"reason": "on purpose", "source": "allow[0]", **globs})


class TestWithoutLimits:
    def test_no_site_is_clean(self) -> None:
        found = judge(build.make_report())
        assert (found.status, found.exit_code, found.findings) == ("clean", 0, [])

    def test_any_site_is_a_finding(self) -> None:
        found = judge(build.make_report(build.make_site()))
        assert (found.status, found.exit_code) == ("findings", 1)
        assert [(f.reason, f.fingerprint) for f in found.findings] == [("sync", "f1")]
        assert "check_all (python/engine/kv.py:12), 1 per step, 10 in all" in found.findings[0].message

    @pytest.mark.parametrize("changes", [{"own": True}, {"warmup_only": True}, {"may_block": True}], ids=str)
    def test_profiler_warm_up_and_may_block_sites_are_never_findings(self, changes: dict[str, bool]) -> None:
        report = build.make_report(build.make_site(**changes))
        assert judge(report).exit_code == 0
        limits = {"max_per_step": 0.0, "max_bubble_us": 0.0, "baseline": baselines.build_baseline([])}
        assert judge(report, **limits).exit_code == 0

    def test_site_that_never_waited_is_a_finding(self) -> None:
        """With more queued work, such a call waits."""
        (finding,) = judge(build.make_report(build.make_site(count=1, waited=0))).findings
        assert "(0 of 1 waited)" in finding.message

    def test_explicit_synchronisation_is_a_finding(self) -> None:
        assert judge(build.make_report(build.make_site(explicit=True))).exit_code == 1

    def test_findings_are_sorted_worst_first(self) -> None:
        report = build.make_report(*(build.make_site(f"f{n}", bubble_us=float(n)) for n in (1, 3, 2)))
        assert [f.fingerprint for f in judge(report).findings] == ["f3", "f2", "f1"]

    def test_length_of_waits_alone_fails_no_limit(self) -> None:
        """The microseconds of a wait depend on the machine."""
        report = build.make_report(build.make_site(wait_us=1e9))
        assert judge(report, max_per_step=1.0, max_bubble_us=300.0).exit_code == 0


class TestMaxPerStep:
    def make_report(self) -> Report:
        """Return a report of two sites, with 1.5 and 0.5 calls per step."""
        return build.make_report(build.make_site("a", count_per_step=1.5), build.make_site("b", count_per_step=0.5))

    @pytest.mark.parametrize(("limit", "code"), [(0.0, 1), (1.9, 1), (2.0, 0), (3.0, 0)])
    def test_max_per_step_limits_the_sum_over_all_sites(self, limit: float, code: int) -> None:
        assert judge(self.make_report(), max_per_step=limit).exit_code == code

    def test_max_per_step_message_has_sum_limit_and_sites(self) -> None:
        (finding,) = judge(self.make_report(), max_per_step=1.0).findings
        assert (finding.reason, finding.fingerprint) == ("per-step", "")
        assert finding.message.startswith("2 synchronisations per step, the limit is 1: 1.5 in check_all")

    def test_sites_of_different_ranks_do_not_add_up(self) -> None:
        """Both ranks wait twice a step at a common place, and each once more at a place of its own: three times, not four."""
        common = build.make_site("a", count_per_step=2.0, traces=["r0", "r1"])
        own = [build.make_site(f, function=f, traces=[trace]) for f, trace in (("first", "r0"), ("last", "r1"))]
        report = build.make_report(common, *own, traces=[build.make_trace("r0"), build.make_trace("r1")])
        assert judge(report, max_per_step=3.0).exit_code == 0
        (finding,) = judge(report, max_per_step=2.0).findings
        assert finding.message.endswith(
            "the limit is 2: 2 in check_all (python/engine/kv.py:12), 1 in first (python/engine/kv.py:12)"
        )

    def test_message_sums_up_the_sites_that_it_does_not_name(self) -> None:
        """Five sites have one call per step and 300 µs each: three are named, and two with 600 µs of 1.5 ms are not."""
        report = build.make_report(*(build.make_site(f"f{n}", function=f"g{n}") for n in range(5)))
        (steps,) = judge(report, max_per_step=1.0).findings
        (bubble,) = judge(report, max_bubble_us=1.0).findings
        assert steps.message.endswith("1 in g2 (python/engine/kv.py:12), 2 in 2 more sites")
        assert bubble.message.endswith("300 µs in g2 (python/engine/kv.py:12), 600 µs in 2 more sites")

    def test_message_that_names_all_sites_mentions_no_more(self) -> None:
        report = build.make_report(*(build.make_site(f"f{n}", function=f"g{n}") for n in range(3)))
        assert "more" not in judge(report, max_per_step=1.0).findings[0].message

    def test_allowed_sites_do_not_count_towards_the_limit(self) -> None:
        report = build.make_report(build.make_site("a"), build.make_site("b", function="sample"))
        assert judge(report, max_per_step=1.0, allow=(allow(function="sample"),)).exit_code == 0

    def test_max_per_step_without_steps_cannot_answer_and_names_the_option(self) -> None:
        report = build.make_report(build.make_site(count_per_step=None), traces=[build.make_trace(steps=None)])
        found = judge(report, max_per_step=5.0)
        assert (found.status, found.exit_code) == ("cannot answer", 3)
        assert "--step-range" in found.reasons[0]

    def test_max_per_step_cannot_answer_if_one_rank_has_no_steps(self) -> None:
        report = build.make_report(traces=[build.make_trace("a.json"), build.make_trace("b.json", steps=0)])
        found = judge(report, max_per_step=5.0)
        assert found.exit_code == 3
        assert found.reasons[0].startswith("b.json ")


class TestMaxBubble:
    @pytest.mark.parametrize(("limit", "code"), [(299.0, 1), (300.0, 0)])
    def test_max_bubble_limits_the_sum_over_all_sites(self, limit: float, code: int) -> None:
        """The sum is 200 + 100 µs; sites alone are no finding once there is a limit."""
        report = build.make_report(build.make_site("a", bubble_us=200.0), build.make_site("b", bubble_us=100.0))
        assert judge(report, max_bubble_us=limit).exit_code == code

    def test_message_of_a_bubble_just_above_its_limit_has_the_difference(self) -> None:
        (finding,) = judge(build.make_report(build.make_site(bubble_us=477.3)), max_bubble_us=477.0).findings
        assert finding.message.startswith(
            "bubble of 477 µs in all, 0.3 µs above the limit of 477 µs: 477 µs in check_all"
        )

    def test_max_bubble_with_an_unknown_bubble_cannot_answer(self) -> None:
        found = judge(build.make_report(build.make_site(bubble_us=None)), max_bubble_us=10.0)
        assert found.exit_code == 3
        assert "--max-bubble-us" in found.reasons[0]


class TestBaseline:
    def test_sites_of_the_baseline_pass(self) -> None:
        report = build.make_report(build.make_site("a"), build.make_site("b", count_per_step=0.33333333))
        found = judge(report, baseline=make_baseline(report))
        assert (found.exit_code, found.stale) == (0, [])

    def test_site_outside_the_baseline_is_a_finding(self) -> None:
        known = make_baseline(build.make_report(build.make_site("a")))
        found = judge(build.make_report(build.make_site("a"), build.make_site("b", function="late")), baseline=known)
        assert [(f.reason, f.fingerprint) for f in found.findings] == [("new", "b")]

    def test_more_calls_per_step_than_the_baseline_are_a_finding(self) -> None:
        known = make_baseline(build.make_report(build.make_site(count_per_step=2.0, count=20)))
        assert judge(build.make_report(build.make_site(count_per_step=2.0, count=2000)), baseline=known).exit_code == 0
        found = judge(build.make_report(build.make_site(count_per_step=2.5, count=5)), baseline=known)
        assert [f.reason for f in found.findings] == ["more"]
        assert found.findings[0].message.endswith("2.5 per step here, 2 in the baseline")
        known = make_baseline(build.make_report(build.make_site(count_per_step=1.0)))
        (finding,) = judge(build.make_report(build.make_site(count_per_step=5001 / 5000)), baseline=known).findings
        assert finding.message.endswith("1.0002 per step here, 1 in the baseline")

    def test_phase_that_the_baseline_lacks_is_compared_with_its_worst_phase(self) -> None:
        """The baseline has 1 wait in decode and 2 in prefill steps, so a mixed step may have 2 and a decode step 1."""
        known = make_baseline(
            build.make_report(build.make_site(count_per_step=2.0, count_per_phase={"decode": 1.0, "prefill": 2.0}))
        )
        for phases, code in (
            ({"decode": 1.0, "mixed": 2.0}, 0),
            ({"decode": 1.0, "mixed": 5.0}, 1),
            ({"decode": 2.0}, 1),
        ):
            report = build.make_report(build.make_site(count_per_step=max(phases.values()), count_per_phase=phases))
            assert judge(report, baseline=known).exit_code == code

    def test_line_without_phases_is_not_left_out_of_their_sum(self) -> None:
        """The second line is of a trace without phases, and waits 50 times per step instead of 5."""
        marked = build.make_site(line=1, count_per_phase={"decode": 1.0, "prefill": 0.0})
        known = make_baseline(build.make_report(marked, build.make_site(line=2, count_per_step=5.0)))
        (finding,) = judge(
            build.make_report(marked, build.make_site(line=2, count_per_step=50.0)), baseline=known
        ).findings
        assert finding.message.endswith("51 per step here, 6 in the baseline")

    def test_baseline_sums_lines_that_share_a_fingerprint(self) -> None:
        """Moved or split lines are no new site: the baseline has 1 + 1 per step, and the report 0.5 + 1.5; a third line
        exceeds it.
        """
        known = make_baseline(build.make_report(build.make_site(line=1), build.make_site(line=2)))
        assert [(e.fingerprint, e.count_per_step) for e in known.sites] == [("f1", 2.0)]
        moved = [build.make_site(line=3, count_per_step=0.5), build.make_site(line=4, count_per_step=1.5)]
        assert judge(build.make_report(*moved), baseline=known).exit_code == 0
        found = judge(build.make_report(*moved, build.make_site(line=5)), baseline=known)
        assert [f.reason for f in found.findings] == ["more"]

    def test_baseline_without_steps_compares_total_counts(self) -> None:
        traces = [build.make_trace(steps=None)]
        known = make_baseline(build.make_report(build.make_site(count_per_step=None, count=4), traces=traces))
        assert known.sites[0].count == 4
        for count, code in ((4, 0), (5, 1)):
            report = build.make_report(build.make_site(count_per_step=None, count=count), traces=traces)
            assert judge(report, baseline=known).exit_code == code

    def test_baseline_per_step_cannot_judge_a_trace_without_steps(self) -> None:
        known = make_baseline(build.make_report(build.make_site()))
        report = build.make_report(build.make_site(count_per_step=None), traces=[build.make_trace(steps=None)])
        found = judge(report, baseline=known)
        assert found.exit_code == 3
        assert "--step-range" in found.reasons[0]

    def test_baseline_per_step_does_not_hide_the_waits_of_a_trace_without_steps(self) -> None:
        """The same site is in a trace with steps, as in the baseline, and 30 times in a trace without."""
        known = make_baseline(build.make_report(build.make_site()))
        site = merge_sites([[build.make_site()], [build.make_site(count=30, count_per_step=None)]])
        report = build.make_report(*site, traces=[build.make_trace(), build.make_trace("rank1.json", steps=None)])
        (finding,) = judge(report, baseline=known).findings
        assert "30 outside the steps here, 0 in the baseline" in finding.message
        assert judge(report, baseline=make_baseline(report)).exit_code == 0

    def test_limits_apply_in_addition_to_a_baseline(self) -> None:
        report = build.make_report(build.make_site())
        assert judge(report, baseline=make_baseline(report), max_per_step=0.5).exit_code == 1

    def test_baseline_entry_without_a_site_is_reported_and_passes(self) -> None:
        known = make_baseline(build.make_report(build.make_site("gone", function="old")))
        found = judge(build.make_report(), baseline=known)
        assert found.exit_code == 0
        assert "old in python/engine/kv.py was not found" in found.stale[0]

    def test_baseline_leaves_out_sites_that_cannot_be_findings(self) -> None:
        sites = [
            build.make_site("a"),
            build.make_site("b", own=True),
            build.make_site("c", warmup_only=True),
            build.make_site("d", allowed="x"),
            build.make_site("e", may_block=True),
        ]
        assert [e.fingerprint for e in make_baseline(build.make_report(*sites)).sites] == ["a"]

    def test_baseline_text_does_not_depend_on_order_or_times(self) -> None:
        """A diff therefore shows the changes of the code only."""
        sites = [build.make_site("a", file="z.py"), build.make_site("b", file="a.py")]
        again = [
            build.make_site("b", file="a.py", wait_us=1.0, count=99),
            build.make_site("a", file="z.py", bubble_us=0.0, line=99),
        ]
        text = sync_report.encode_json(make_baseline(build.make_report(*sites)))
        assert text == sync_report.encode_json(make_baseline(build.make_report(*again)))
        assert text.index('"a.py"') < text.index('"z.py"')
        assert "count" not in text.replace("count_per_step", "")

    def test_baseline_is_read_as_it_was_written(self, tmp_path: Path) -> None:
        made = make_baseline(build.make_report_of_all_kinds())
        (tmp_path / "b.json").write_text(sync_report.encode_json(made))
        assert baselines.read_baseline(tmp_path / "b.json") == made

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, "There is no baseline"),
            (b"{", "is no baseline"),
            (b'{"schema_version": 1, "sites": []}', "is no baseline"),
            (b"\xff", "is no baseline"),
            (b'{"sites": [{"rule": "x"}]}', "is no baseline"),
            (b'{"baseline_version": 9, "detector": "scan"}', "version 9"),
            (b"[]", "is no baseline"),
        ],
    )
    def test_unreadable_baseline_error_has_the_command_that_makes_one(
        self, tmp_path: Path, content: bytes | None, message: str
    ) -> None:
        if content is not None:
            (tmp_path / "b.json").write_bytes(content)
        with pytest.raises(UsageError, match=f"(?s){message}.*dcpbench syncs baseline TRACE"):
            baselines.read_baseline(tmp_path / "b.json")

    def test_file_that_is_no_baseline_is_not_to_be_overwritten(self, tmp_path: Path) -> None:
        """It may be a trace or a report."""
        (tmp_path / "b.json").write_text('{"traceEvents": []}')
        with pytest.raises(UsageError) as error:
            baselines.read_baseline(tmp_path / "b.json")
        assert "--force" not in str(error.value)

    def test_baseline_command_quotes_a_path_with_spaces(self, tmp_path: Path) -> None:
        path = tmp_path / "my base.json"
        for content in (None, '{"baseline_version": 9, "detector": "scan"}'):
            if content is not None:
                path.write_text(content)
            with pytest.raises(UsageError, match=re.escape(f"TRACE -o '{path}'")):
                baselines.read_baseline(path)


class TestTracesThatCannotAnswer:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"gpu_events": 0}, "no GPU events"),
            ({"runtime_events": 0}, "no calls of the CUDA runtime"),
            ({"complete": False}, "ends early"),
        ],
    )
    @pytest.mark.parametrize("limits", [{}, {"max_per_step": 9.0}, {"baseline": baselines.build_baseline([])}], ids=str)
    def test_incomplete_trace_is_never_clean(self, changes: dict[str, Any], words: str, limits: dict[str, Any]) -> None:
        found = judge(build.make_report(traces=[build.make_trace("t.json", **changes)]), **limits)
        assert (found.status, found.exit_code) == ("cannot answer", 3)
        assert found.reasons[0].startswith("t.json ")
        assert words in found.reasons[0]

    def test_findings_take_precedence_over_incomplete_traces(self) -> None:
        found = judge(build.make_report(build.make_site(), traces=[build.make_trace(complete=False)]))
        assert (found.status, found.exit_code) == ("findings", 1)
        assert found.reasons

    def test_one_incomplete_rank_makes_the_report_incomplete(self) -> None:
        traces = [build.make_trace("a.json"), build.make_trace("b.json", gpu_events=0), build.make_trace("c.json")]
        assert judge(build.make_report(traces=traces)).exit_code == 3

    def test_report_without_traces_is_not_clean(self) -> None:
        assert judge(build.make_report(traces=[])).exit_code == 3

    def test_detectors_that_see_no_gpu_events_can_be_clean(self) -> None:
        for detector in ("live", "dry-run"):
            coverage = {"detector": detector, "gpu_events": 0, "runtime_events": 0}
            assert judge(build.make_report(traces=[build.make_trace(**coverage)])).exit_code == 0


MATCHES = [
    ({"function": "check_all"}, True),
    ({"function": "kv.check_all"}, True),
    ({"function": "engine.*"}, True),
    ({"function": "python.engine.kv.check_all"}, True),
    ({"function": "*.check_*"}, True),
    ({"function": "check"}, False),
    ({"function": "gine.kv.check_all"}, False),
    ({"range": "decode*"}, True),
    ({"range": "prefill"}, False),
    ({"file": "python/engine/*.py"}, True),
    ({"file": "kv.py"}, False),
    ({"function": "decode"}, False),
    ({"function": "decode", "or_range": True}, True),
    ({"function": "check_all", "range": "prefill"}, False),
    ({"function": "check_all", "range": "decode", "file": "*"}, True),
]


class TestPermissions:
    @pytest.mark.parametrize(("globs", "matches"), MATCHES, ids=str)
    def test_permission_globs_match_dotted_names_ranges_and_files(self, globs: dict[str, Any], matches: bool) -> None:
        assert allow(**globs).matches(build.make_site(range="decode")) is matches

    @pytest.mark.parametrize("key", ["function", "range", "file"])
    def test_permission_star_does_not_match_an_unknown_field(self, key: str) -> None:
        assert not allow(**{key: "*"}).matches(build.make_site(function="", file="", range=""))

    def test_allowed_site_passes_with_its_reason(self) -> None:
        found = judge(build.make_report(build.make_site()), allow=(allow(function="check_all"),))
        assert (found.exit_code, found.allowed, found.stale) == (0, {"f1": "on purpose"}, [])

    @pytest.mark.parametrize(("day", "code"), [(TODAY, 0), (TODAY - dt.timedelta(days=1), 1)])
    def test_permission_is_valid_through_its_last_day(self, day: dt.date, code: int) -> None:
        found = judge(build.make_report(build.make_site()), allow=(allow(function="check_all", expires=day),))
        assert found.exit_code == code
        assert [f"expired on {day}" in text for text in found.stale] == [True] * code

    def test_permission_without_a_site_is_reported_and_passes(self) -> None:
        found = judge(build.make_report(), allow=(allow(function="gone"),))
        assert (found.exit_code, found.stale) == (0, ['allow[0] function = "gone" matched nothing: remove it.'])


SOURCE = """\
import torch


def plain(t):
    return t.item()


def commented(t):
    # dcpbench: allow-sync(the loop needs the length)
    return t.item()


@torch.no_grad()  # dcpbench: allow-sync(decorated)
def decorated(t):
    return t.item()


def outer(t):
    def inner(t):
        return t.item()  # dcpbench: allow-sync(inner alone)
    return t.item(), inner(t)


def reasonless(t):
    return t.item()  # dcpbench: allow-sync()


def text(t):
    print("# dcpbench: allow-sync(in a string)")
    return t.item()


# dcpbench: allow-sync(above the function)
def above(t):
    a = t.item(
        1,
    )  # dcpbench: allow-sync(last line of it)
    return t.tolist()
"""
CALL, FUNCTION = "call", "function"
COMMENTS = [
    (4, FUNCTION, None),
    (5, CALL, None),
    (8, FUNCTION, "the loop needs the length"),
    (10, CALL, "the loop needs the length"),
    (13, FUNCTION, "decorated"),
    (14, FUNCTION, "decorated"),
    (15, CALL, "decorated"),
    (18, FUNCTION, None),
    (19, FUNCTION, "inner alone"),
    (20, CALL, "inner alone"),
    (21, CALL, None),
    (24, FUNCTION, None),
    (25, CALL, None),
    (28, FUNCTION, None),
    (30, CALL, None),
    (34, FUNCTION, "above the function"),
    (35, CALL, "last line of it"),
    (38, CALL, "above the function"),
    (999, CALL, None),
    (1, CALL, None),
]


class TestComments:
    def site(self, line: int, line_is: str, file: str = "m.py") -> Site:
        return build.make_site(file=file, line=line, line_is=line_is)

    def allowed(self, root: Path, site: Site) -> str | None:
        return judge(build.make_report(site), root=root).allowed.get("f1")

    @pytest.mark.parametrize(("line", "line_is", "reason"), COMMENTS)
    def test_comment_allows_its_statement_or_its_function(
        self, tmp_path: Path, line: int, line_is: str, reason: str | None
    ) -> None:
        (tmp_path / "m.py").write_text(SOURCE)
        assert self.allowed(tmp_path, self.site(line, line_is)) == reason

    def test_comment_allows_only_its_line_of_two_with_the_same_fingerprint(self, tmp_path: Path) -> None:
        (tmp_path / "m.py").write_text("def f(t):\n    t.item()\n    t.item()  # dcpbench: allow-sync(here)\n")
        lines = [self.site(2, CALL), self.site(3, CALL)]
        assert judge(build.make_report(*lines), root=tmp_path).exit_code == 1
        assert [line.allowed for line in lines] == ["", "here"]

    @pytest.mark.parametrize(
        ("lines", "source", "reason"),
        [((2,), None, None), ((3,), None, "here"), ((2, 3), None, "here"), ((), None, "here"), ((2,), NOWHERE, "here")],
        ids=str,
    )
    def test_comment_allows_the_call_of_a_trace_if_its_line_is_known(
        self, tmp_path: Path, lines: tuple[int, ...], source: Path | None, reason: str | None
    ) -> None:
        """Otherwise a second wait in the function would pass; lines of another source are no lines of the comment's file."""
        (tmp_path / "m.py").write_text("def f(t):\n    t.item()\n    t.tolist()  # dcpbench: allow-sync(here)\n")
        calls = [CallLine(line=line, text="") for line in lines]
        site = build.make_site(file="m.py", line=1, line_is=FUNCTION, call_lines=calls)
        assert judge(build.make_report(site), root=tmp_path, source=source).allowed.get("f1") == reason

    @pytest.mark.parametrize(
        ("comment", "reason"),
        [
            ("(one read (of a step))", "one read (of a step)"),
            ("(one read)  # noqa: S101 (see above)", "one read"),
            ("(see #12) because", "see #12"),
        ],
    )
    def test_reason_ends_before_a_further_comment(self, comment: str, reason: str, tmp_path: Path) -> None:
        (tmp_path / "m.py").write_text(f"t.item()  # dcpbench: allow-sync{comment}\n")
        assert self.allowed(tmp_path, self.site(1, CALL)) == reason

    def test_comment_without_a_reason_is_reported(self, tmp_path: Path) -> None:
        (tmp_path / "m.py").write_text(SOURCE)
        found = judge(build.make_report(self.site(25, CALL)), root=tmp_path)
        assert found.exit_code == 1
        assert found.stale[0].startswith("m.py:25: allow-sync allows nothing without a reason")

    def test_comment_in_a_file_that_does_not_parse_allows_its_line_only(self, tmp_path: Path) -> None:
        (tmp_path / "m.py").write_text("def f(:\n    x  # dcpbench: allow-sync(here)\n    y\n")
        assert self.allowed(tmp_path, self.site(2, CALL)) == "here"
        assert self.allowed(tmp_path, self.site(3, CALL)) is None

    @pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"", b"# -*- coding: nonsense -*-\n", b"x" * 100 + b"\x00"])
    def test_unreadable_source_file_allows_nothing(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "m.py").write_bytes(content)
        assert self.allowed(tmp_path, self.site(1, CALL)) is None

    def test_comments_of_files_outside_the_repository_are_not_read(self, tmp_path: Path) -> None:
        """The path comes from the trace, and a link counts as the file that it points to."""
        root = tmp_path / "repo"
        root.mkdir()
        (tmp_path / "m.py").write_text(SOURCE)
        (root / "link.py").symlink_to(tmp_path / "m.py")
        for file in ("../m.py", str(tmp_path / "m.py"), "link.py", "a\x00b.py"):
            assert self.allowed(root, self.site(10, CALL, file)) is None


@pytest.mark.parametrize(("size", "read"), [(4 << 20, True), (comments.MAX_SOURCE_BYTES + 1, False)])
def test_source_file_of_more_than_4_mib_is_not_read(size: int, read: bool, tmp_path: Path) -> None:
    line = b"x.item()  # dcpbench: allow-sync (made)\n"
    (tmp_path / "made.py").write_bytes(line + b"#" * (size - len(line)))
    source = comments._read_source(tmp_path, "made.py")
    assert ([*source.notes] if source else None) == ([1] if read else None)


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        (1, (1, 1)),
        (2, (2, 3)),
        (3, (2, 3)),
        (4, (4, 4)),
        (5, (5, 5)),
        (6, (6, 6)),
        (7, (7, 9)),
        (9, (7, 9)),
        (10, (10, 10)),
    ],
)
def test_lines_of_a_compound_statement_exclude_its_body(line: int, lines: tuple[int, int]) -> None:
    """The text has a condition over two lines, its body, a body on its own line, and a call over three lines."""
    text = "a = 1\nif (a\n    and a):\n    b = 2\nfor x in y:\n    pass\nf(\n    a,\n)\nif a: b\n"
    assert comments._Source({}, set(), ast.parse(text)).statements[line] == lines
