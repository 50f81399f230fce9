"""Test `dcpbench syncs diff` on pairs of traces, and how it matches and judges sites."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pytest
from typer.testing import CliRunner

from dcpbench.commands.syncs import app
from dcpbench.errors import UsageError
from dcpbench.syncs.formats.changes_text import render_markdown
from dcpbench.syncs.site_changes import ChangeKind, Reason, Thresholds, compare_reports
from dcpbench.syncs.sync_report import encode_json
from tests.unit import syncs_builder as build
from tests.unit.trace_builder import Trace

if TYPE_CHECKING:
    from pathlib import Path

STEPS, STEP_US = 6, 10_000


class Wait(NamedTuple):
    """Describe an `.item()`, `times` times in each step, with a result that is ready `ready_us` after the call."""

    function: str = "sample"
    file: str = "engine/sampler.py"
    line: int = 10
    times: int = 1
    ready_us: float = 500.0
    last_steps: int = STEPS


def record(*waits: Wait, steps: bool = True) -> Trace:
    """Write a trace of steps in which these functions wait."""
    trace = Trace().work()
    for step in range(STEPS):
        begin = STEP_US * (step + 1)
        if steps:
            trace.range(f"ProfilerStep#{step}", begin, begin + STEP_US - 100)
        trace.kernel(begin + 10, begin + 20, begin + 100)
        at = begin + 200.0
        for wait in waits:
            for _ in range(wait.times if step >= STEPS - wait.last_steps else 0):
                trace.frame(f"{wait.file}({wait.line}): {wait.function}", at, at + wait.ready_us + 20)
                trace.item(at + 2, at + wait.ready_us)
                trace.kernel(at + wait.ready_us + 40, at + wait.ready_us + 60, at + wait.ready_us + 80)
                at += wait.ready_us + 200
    return trace


SAMPLE, CHECK = Wait(), Wait("check", "engine/kv.py", 20)

PAIRS: dict[str, tuple[tuple[Wait, ...], tuple[Wait, ...], int, dict[str, int]]] = {
    "nothing changed": ((SAMPLE,), (SAMPLE,), 0, {"same": 1}),
    "no site on either side": ((), (), 0, {}),
    "a new site": ((SAMPLE,), (SAMPLE, CHECK), 1, {"new": 1, "same": 1}),
    "a site is gone": ((SAMPLE, CHECK), (SAMPLE,), 0, {"gone": 1, "same": 1}),
    "its lines moved": ((SAMPLE,), (SAMPLE._replace(line=99),), 0, {"same": 1}),
    "its file has another name": ((SAMPLE,), (SAMPLE._replace(file="core/sampler.py"),), 0, {"same": 1}),
    "its function has another name": ((SAMPLE,), (SAMPLE._replace(function="draw"),), 1, {"new": 1, "gone": 1}),
    "it waits twice in a step": ((SAMPLE,), (SAMPLE._replace(times=2),), 1, {"worse": 1}),
    "it waits half as often": ((SAMPLE._replace(times=2),), (SAMPLE,), 0, {"better": 1}),
    "each wait takes longer": ((SAMPLE,), (SAMPLE._replace(ready_us=900.0),), 1, {"worse": 1}),
    "each wait is shorter": ((SAMPLE._replace(ready_us=900.0),), (SAMPLE,), 0, {"better": 1}),
    "a wait is 4 % longer": ((SAMPLE,), (SAMPLE._replace(ready_us=520.0),), 0, {"same": 1}),
    "one moves and another is new": (
        (SAMPLE,),
        (SAMPLE._replace(file="core/sampler.py"), CHECK),
        1,
        {"new": 1, "same": 1},
    ),
}


def run_diff(*words: object) -> Any:
    return CliRunner().invoke(app, ["diff", *map(str, words)])


def write(folder: Path, name: str, *waits: Wait, **options: Any) -> Path:
    path = folder / name
    path.write_text(record(*waits, **options).text())
    return path


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_traces(name: str, tmp_path: Path) -> None:
    old, new, code, kinds = PAIRS[name]
    sides = write(tmp_path, "old.json", *old), write(tmp_path, "new.json", *new)
    result = run_diff(*sides, "--json")
    assert result.exit_code == code, result.output
    changes = json.loads(result.stdout)["changes"]
    found = [change["kind"] for change in changes]
    assert {kind: found.count(kind) for kind in found} == kinds
    for form in ("table", "markdown"):
        assert run_diff(*sides, "--format", form).exit_code == code


def test_truncated_trace_on_either_side_gives_no_answer(tmp_path: Path) -> None:
    """A missing site may be in the lost part."""
    whole, cut = write(tmp_path, "a.json", SAMPLE), tmp_path / "b.json"
    cut.write_text(whole.read_text()[:-400])
    for sides in ((whole, cut), (cut, whole)):
        result = run_diff(*sides, "--format", "markdown")
        assert result.exit_code == 3
        assert "cannot be compared" in result.stdout


def test_diff_with_one_side_without_steps_gives_no_answer(tmp_path: Path) -> None:
    result = run_diff(write(tmp_path, "a.json", SAMPLE), write(tmp_path, "b.json", SAMPLE, steps=False))
    assert result.exit_code == 3
    assert "new side marks no steps" in result.stdout


def test_traces_without_steps_are_compared_by_total_counts(tmp_path: Path) -> None:
    one = write(tmp_path, "a.json", SAMPLE, steps=False)
    two = write(tmp_path, "b.json", SAMPLE._replace(times=2), steps=False)
    assert run_diff(one, one).exit_code == 0
    result = run_diff(one, two)
    assert result.exit_code == 1
    assert f"{STEPS} in all" in result.stdout
    assert f"{2 * STEPS} in all" in result.stdout


def test_waits_of_a_trace_without_steps_count_next_to_one_with_steps(tmp_path: Path) -> None:
    """Each side has a trace with steps and one without; only the latter waits more often."""
    for side, times in (("old", 1), ("new", 2)):
        (tmp_path / side).mkdir()
        write(tmp_path / side, "a.json", SAMPLE)
        write(tmp_path / side, "b.json", SAMPLE._replace(times=times), steps=False)
    result = run_diff(tmp_path / "old", tmp_path / "new")
    assert result.exit_code == 1
    assert f"(+{STEPS} outside)" in result.stdout
    assert f"(+{2 * STEPS} outside)" in result.stdout


def test_reports_in_json_are_compared_like_their_traces(tmp_path: Path) -> None:
    old = record(SAMPLE).scan(tmp_path, "a.json")
    new = record(SAMPLE, CHECK).scan(tmp_path, "b.json")
    for name, report in (("old", old), ("new", new)):
        (tmp_path / f"{name}-report.json").write_text(encode_json(report))
    results = [
        run_diff(tmp_path / a, tmp_path / b, "--json")
        for a, b in (("a.json", "b.json"), ("old-report.json", "new-report.json"), ("a.json", "new-report.json"))
    ]
    assert [result.exit_code for result in results] == [1, 1, 1]
    assert len({json.dumps(json.loads(result.stdout)["changes"]) for result in results}) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{a}", "{missing}"], "missing"),
        (["{a}", "{dry}"], "one detector"),
        (["{a}", "{a}", "--format", "pdf"], "table, markdown, json"),
        (["{a}", "{a}", "--tolerance", "-1"], "--tolerance"),
        (["{a}", "{a}", "--min-us", "nan"], "--min-us"),
        (["{a}", "{broken}"], "no report"),
        (["{a}", "{older}"], "scan the trace again"),
        (["{a}", "{a}", "--json", "--format", "markdown"], "two formats"),
        (["{a}", "{a}", "--step-range", "("], "no regular expression"),
        (["{a}", "{report}", "--step-range", "^Profiler"], "leave --step-range out"),
    ],
)
def test_bad_input_is_explained(words: list[str], message: str, tmp_path: Path) -> None:
    a = write(tmp_path, "a.json", SAMPLE)
    dry = build.make_report(build.make_site(), traces=[build.make_trace(detector="dry-run")])
    older = build.make_report(build.make_site())
    older.schema_version = 0
    contents = {"dry": encode_json(dry), "broken": '{"schema_version": 1, "sites": 7}', "older": encode_json(older)}
    contents["report"] = encode_json(build.make_report(build.make_site()))
    for name, content in contents.items():
        (tmp_path / f"{name}.json").write_text(content)
    names = {name: tmp_path / f"{name}.json" for name in (*contents, "missing")}
    result = run_diff(*(word.format(a=a, **names) for word in words))
    assert isinstance(result.exception, UsageError)
    assert message in str(result.exception)


def test_allowed_site_never_fails_a_diff(tmp_path: Path) -> None:
    sides = write(tmp_path, "a.json", SAMPLE), write(tmp_path, "b.json", SAMPLE, CHECK)
    assert run_diff(*sides).exit_code == 1
    result = run_diff(*sides, "--allow", "engine.kv.check")
    assert result.exit_code == 0
    assert "1 of the changed ones is allowed" in result.stdout


def test_permission_without_a_site_on_either_side_is_named(tmp_path: Path) -> None:
    sides = write(tmp_path, "a.json", SAMPLE), write(tmp_path, "b.json", SAMPLE, CHECK)
    result = run_diff(*sides, "--allow", "engine.kv.check", "--allow", "nothing")
    assert "note: --allow 'nothing' matched nothing" in result.stderr
    assert "engine.kv.check" not in result.stderr


def test_report_in_a_file_of_any_name_is_compared(tmp_path: Path) -> None:
    (tmp_path / "report").write_text(encode_json(record(SAMPLE).scan(tmp_path, "a.json")))
    assert run_diff(tmp_path / "report", tmp_path / "a.json").exit_code == 0


def test_bubble_of_a_side_without_sites_is_0(tmp_path: Path) -> None:
    """A dash would mean that it is unknown."""
    changes = json.loads(run_diff(write(tmp_path, "a.json", SAMPLE), write(tmp_path, "b.json"), "--json").stdout)
    assert changes["old_bubble_us"] > 0
    assert changes["new_bubble_us"] == 0


def test_warm_up_sites_are_left_out(tmp_path: Path) -> None:
    """A site in the first step only is no new site."""
    trace = record(SAMPLE)
    at = STEP_US + 5_000.0
    trace.frame("engine/load.py(3): load", at, at + 520)
    trace.item(at + 2, at + 500)
    (tmp_path / "b.json").write_text(trace.text())
    result = run_diff(write(tmp_path, "a.json", SAMPLE), tmp_path / "b.json", "--json")
    assert result.exit_code == 0
    assert [change["kind"] for change in json.loads(result.stdout)["changes"]] == ["same"]


def compare(old: list[Any], new: list[Any], **thresholds: float) -> Any:
    return compare_reports(build.make_report(*old), build.make_report(*new), Thresholds(**thresholds))


def test_functions_with_the_same_name_are_matched_by_the_ends_of_their_paths() -> None:
    old = [build.make_site("a", file="src/llama/attention.py"), build.make_site("b", file="src/qwen/attention.py")]
    new = [build.make_site("c", file="lib/qwen/attention.py"), build.make_site("d", file="lib/llama/attention.py")]
    changes = compare(old, new).changes
    assert {(c.old.file, c.new.file) for c in changes} == {
        ("src/llama/attention.py", "lib/llama/attention.py"),
        ("src/qwen/attention.py", "lib/qwen/attention.py"),
    }
    assert all(c.kind is ChangeKind.SAME and c.moved for c in changes)


def test_third_function_with_the_same_name_is_new() -> None:
    new = [build.make_site("c", file="lib/kv.py"), build.make_site("d", file="lib/other.py")]
    changes = compare([build.make_site("a", file="engine/kv.py")], new).changes
    assert [(c.kind, c.latest.file) for c in changes] == [
        (ChangeKind.NEW, "lib/other.py"),
        (ChangeKind.SAME, "lib/kv.py"),
    ]


def test_times_are_means_over_steps() -> None:
    """The times 300 µs in 10 steps and 600 µs in 20 are equal; counts per step do not depend on the length either."""
    longer = build.make_report(
        build.make_site(count=20, bubble_us=600.0, wait_us=840.0), traces=[build.make_trace(steps=20)]
    )
    (change,) = compare_reports(build.make_report(build.make_site()), longer, Thresholds()).changes
    assert change.kind is ChangeKind.SAME
    assert change.old is not None
    assert change.old.bubble_us == 30.0


@pytest.mark.parametrize(
    ("bubble_us", "share", "microseconds", "kind"),
    [
        (390.0, 0.2, 10.0, ChangeKind.SAME),  # 9 µs more per step
        (450.0, 0.2, 10.0, ChangeKind.WORSE),  # 15 µs, 50 %
        (450.0, 0.6, 10.0, ChangeKind.SAME),
        (450.0, 0.2, 20.0, ChangeKind.SAME),
        (150.0, 0.2, 10.0, ChangeKind.BETTER),
    ],
)
def test_both_thresholds_must_be_exceeded(
    bubble_us: float, share: float, microseconds: float, kind: ChangeKind
) -> None:
    (change,) = compare(
        [build.make_site()], [build.make_site(bubble_us=bubble_us)], share=share, microseconds=microseconds
    ).changes
    assert change.kind is kind


def test_bubble_takes_precedence_over_the_wait() -> None:
    """A longer wait during which the GPU has work costs nothing."""
    (change,) = compare([build.make_site()], [build.make_site(wait_us=9_000.0)]).changes
    assert change.kind is ChangeKind.SAME
    without = {"bubble_us": None}
    (change,) = compare([build.make_site(**without)], [build.make_site(wait_us=9_000.0, **without)]).changes
    assert (change.kind, change.reason) == (ChangeKind.WORSE, Reason.WAIT)


def test_phases_are_compared_separately() -> None:
    """More waits in decode steps are worse even if prefill steps have fewer."""
    old = build.make_site(count_per_step=2.0, count_per_phase={"decode": 1.0, "prefill": 2.0})
    new = build.make_site(count_per_step=2.0, count_per_phase={"decode": 2.0, "prefill": 1.0})
    (change,) = compare([old], [new]).changes
    assert (change.kind, change.reason) == (ChangeKind.WORSE, Reason.COUNT)


def test_phase_that_only_the_new_side_has_is_compared_with_the_worst_old_one() -> None:
    """A mixed step that waits five times is worse than all steps before; one that waits twice is as a prefill step."""
    old = build.make_site(count_per_step=2.0, count_per_phase={"decode": 1.0, "prefill": 2.0})
    for mixed, kind in ((2.0, ChangeKind.SAME), (5.0, ChangeKind.WORSE)):
        phases = {"decode": 1.0, "mixed": mixed, "prefill": 2.0}
        (change,) = compare([old], [build.make_site(count_per_step=mixed, count_per_phase=phases)]).changes
        assert change.kind is kind


def test_markdown_of_many_sites_fits_in_a_comment() -> None:
    """Long paths with underscores, each of which Markdown needs five characters for, in files with other names."""
    folder = "python/sglang/srt/managers/scheduler_components/batch_result_processor_mixin"
    sides = [
        [build.make_site(f"{side}{n}", function=f"f_{n}", file=f"{folder}_{side}.py") for n in range(300)]
        for side in "ab"
    ]
    changes = compare(sides[0], [msgspec.structs.replace(site, count_per_step=2.0) for site in sides[1]])
    text = render_markdown(changes)
    rows = text.count("| ❌ | worse by count<br>moved |")
    assert 50 < rows < 300
    assert f"{300 - rows} more sites left out here" in text
    assert len(text) < 65_536


def test_rank_that_only_one_side_has_is_noted(tmp_path: Path) -> None:
    """Without its trace on the new side, the comparison finds nothing worse."""
    for folder, ranks in (("old", 3), ("new", 2)):
        (tmp_path / folder).mkdir()
        for rank in range(ranks):
            (tmp_path / folder / f"rank{rank}.json").write_text(record(Wait(line=10 + rank)).text())
    result = run_diff(tmp_path / "old", tmp_path / "new")
    assert "note: The old side has traces of ranks 0, 1, 2, the new one of 0, 1: waits of" in result.stderr
    assert "note:" not in run_diff(tmp_path / "old", tmp_path / "old").stderr


def test_names_cannot_change_the_markdown(tmp_path: Path) -> None:
    hostile = Wait("f|`<b>", "engine/a|b.py")
    result = run_diff(write(tmp_path, "a.json"), write(tmp_path, "b.json", hostile), "--format", "markdown")
    (row,) = [line for line in result.stdout.splitlines() if line.startswith("| ❌")]
    assert row.replace("\\|", "").count("|") == 8
