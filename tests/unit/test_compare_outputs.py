"""`dcpbench compare`: gates, every output format, and hostile records."""

from __future__ import annotations

import json
import math
import re
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import msgspec
import pytest
import yaml

from dcpbench import cli
from dcpbench.compare import (
    comparison_ci,
    comparison_markdown,
    comparison_table,
    comparison_text,
    fail_on,
    judging,
    picture,
    rounds,
    sides,
)
from dcpbench.compare.comparison import Comparison, Difference
from dcpbench.compare.judging import Options, judge_sides
from dcpbench.compare.sampling_error import read_record_requests
from dcpbench.errors import UsageError
from dcpbench.points.layout import Layout
from dcpbench.records.metrics import METRIC
from dcpbench.records.runs import Run
from dcpbench.serving.outcome import FINISHED, Row
from dcpbench.serving.samples import write_samples
from tests.unit import record_builder as build
from tests.unit import serve_record_builder as serving
from tests.unit.compare_builder import compare_launches, compare_records, make_forecast, write_launches

if TYPE_CHECKING:
    from dcpbench.records.record import Record

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]):
    """Return a function that runs a command in this process and returns exit code, stdout and stderr."""

    def run(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            cli.main([str(a) for a in args])
        return int(end.value.code or 0), *capsys.readouterr()

    return run


def compare_goodput(tmp_path: Path, launches: int, goodput_s: float | None, ttft_ms: float = 500.0) -> Comparison:
    """Compare launches of two served points with 3 good requests per second; the second one has another goodput in B, or another objective."""

    def write_side(side: str) -> list[Run]:
        folders = []
        for i in range(launches):
            records = []
            for clients in (8, 32):
                record = serving.make_served_record(serving.make_point(Layout(4), clients))
                good, ttft = (goodput_s, ttft_ms) if (side, clients) == ("b", 32) else (3.0, 500.0)
                serve = msgspec.structs.replace(record.serve, request_goodput=good, slo_ms={"ttft": ttft})
                records.append(msgspec.structs.replace(record, started_at=f"{side}{i}", serve=serve))
            folders.append(build.write_records(tmp_path / side / str(i), records))
        return sides.read_side(folders)

    return judge_sides(write_side("a"), write_side("b"), Options(metrics=("goodput",)))


def test_markdown_has_a_tick_only_if_all_is_decided_and_not_worse(tmp_path: Path) -> None:
    """Times of a CPU are UNDECIDED, and an empty comparison decides nothing."""
    p = build.make_point()
    decided = compare_records(tmp_path, [build.make_ok_record(p)], [build.make_ok_record(p)])
    for point in decided.points:
        point.rows = [row for row in point.rows if row.verdict == "SAME"]
    assert decided.points[0].rows
    assert comparison_markdown.render(decided).startswith("## ✅ ")
    decided.points[0].rows[0].verdict = "UNDECIDED"
    assert comparison_markdown.render(decided).startswith("## ❔ ")
    decided.points = []
    assert comparison_markdown.render(decided).startswith("## ❔ ")


def test_every_output_names_forecast_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The note is empty if all points were measured."""
    own_point = build.make_point(Layout(4), concurrency=16)
    a, b = ([make_forecast(ms, (0.1, 0.1)), build.make_ok_record(own_point)] for ms in (10, 8))
    found = compare_records(tmp_path, a, b, launch_noise=0.02)
    note = comparison_text.format_forecast_note(found)
    assert note.startswith(
        "Forecast: one rank ran for all of A and B in 1 of 2 points, and communication was modelled; "
    )
    (without,) = (point.without_ends for point in found.points if point.forecast)
    assert "ITL p90" in without
    assert note.endswith(f" Not judged, as forecasts have no ends for it: {', '.join(without)}.")
    figures = []
    monkeypatch.setattr(picture, "save_figure", lambda figure, *_: figures.append(figure) or [])
    picture.draw(found, tmp_path)
    title = figures[0].axes[0].get_title(loc="left").replace("\n", " ")
    text = "\n".join(line.plain for line in comparison_table.render(found))
    assert all(
        note in form for form in (text, comparison_markdown.render(found), comparison_ci.format_github(found), title)
    )
    measured = compare_records(tmp_path / "measured", a[1:], b[1:])
    assert (comparison_text.format_forecast_note(measured), measured.forecast) == ("", False)


def test_gate_does_not_pass_undecided_forecasts(tmp_path: Path) -> None:
    """A forecast that is 25 % slower and 30 % uncertain is undecided; a metric without ends or a single launch cannot
    be judged.
    """
    sides = [make_forecast(8, (0.3, 0.3))], [make_forecast(10, (0.3, 0.3))]
    found = compare_records(tmp_path, *sides, launch_noise=0.02)
    fail_on.apply_rules(found, fail_on.read_rules("slower:2%,itl_p90:2%"))
    gates = {row.metric: row.gate for row in found.points[0].rows if row.gate}
    assert gates == {"step_time": "undecided", "itl_p90": "unjudged"}
    single = compare_records(tmp_path, *sides)
    fail_on.apply_rules(single, fail_on.read_rules("slower:2%"))
    assert [f.status for f in single.findings] == ["unjudged"]


def test_labels_of_a_forest_plot_are_complete_and_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load, at the end of a label, differs between rows; intervals keep 3 inches next to it."""
    one = build.make_ok_record(
        build.make_point(Layout(16, 2, 8), exchange="ag_rs_registered", concurrency=2048, context=1_000_000)
    )
    figures = []
    monkeypatch.setattr(
        picture, "save_figure", lambda figure, *_: figures.append(figure) or figure.savefig(tmp_path / "f.png")
    )
    found = compare_records(tmp_path, [one], [one], launch_noise=0.02)
    picture.draw(found, tmp_path)
    (figure,) = figures
    (axes,) = figure.axes
    labels = axes.get_yticklabels()
    assert len(found.points[0].name) > 58
    assert all(label.get_text().startswith(f"{found.points[0].name} · ") for label in labels)
    assert min(label.get_window_extent().x0 for label in labels) >= 0
    assert axes.get_window_extent().width / figure.dpi > 3


def test_forest_plot_states_how_many_ratios_it_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare 61 points with one ratio each: 60 are drawn."""
    records = [build.make_ok_record(build.make_point(Layout(2), concurrency=n)) for n in range(1, picture.MAX_ROWS + 2)]
    found = compare_records(tmp_path, records, records, launch_noise=0.02, metrics=("step_time",))
    titles: list[str] = []
    monkeypatch.setattr(picture, "save_figure", lambda figure, *_: titles.append(figure.axes[0].get_title(loc="left")))
    picture.draw(found, tmp_path)
    found.points.pop()
    picture.draw(found, tmp_path)
    assert ["The worst 60 of 61 ratios;" in " ".join(title.split()) for title in titles] == [True, False]


def test_comparison_without_intervals_removes_the_forest_plot_of_an_older_one(tmp_path: Path) -> None:
    """A plot of other runs next to compare.md would show ratios that are not in it."""
    for name in ("forest.png", "forest.svg", "mine.png"):
        (tmp_path / name).write_bytes(b"older")
    one = build.make_ok_record(build.make_point())
    assert picture.draw(compare_records(tmp_path / "runs", [one], [one]), tmp_path) == []
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["mine.png"]


def test_metric_that_no_point_has_is_named_in_a_note(tmp_path: Path) -> None:
    one = build.make_ok_record(build.make_point())
    found = compare_records(tmp_path, [one], [one], metrics=("step_time", "ttft_p50"))
    assert [note for note in found.notes if "--metric" in note] == ["--metric ttft_p50: no point has it on both sides."]
    assert {row.metric for row in found.points[0].rows} == {"step_time"}


class TestGate:
    def apply(self, tmp_path: Path, rules: str | None, a: Record, *b: Record) -> Comparison:
        found = compare_records(tmp_path, [a], list(b))
        fail_on.apply_rules(found, fail_on.read_rules(rules))
        return found

    def test_one_more_sync_fails_a_limit_of_zero(self, tmp_path: Path) -> None:
        p = build.make_point()
        found = self.apply(
            tmp_path, "syncs:+0", build.make_ok_record(p), build.make_ok_record(p, host_syncs_per_step=1.0)
        )
        (failure,) = found.fails
        assert failure.message == (
            "kimi-k2 tp1 flashinfer, 8 × 4,000 tokens: host syncs worse by more than +0: 0 → 1 /step"
        )
        assert not self.apply(
            tmp_path, "syncs:+1", build.make_ok_record(p), build.make_ok_record(p, host_syncs_per_step=1.0)
        ).fails

    def test_rise_from_zero_has_no_ratio(self, tmp_path: Path) -> None:
        p = build.make_point()
        found = compare_records(tmp_path, [build.make_ok_record(p)], [build.make_ok_record(p, host_syncs_per_step=3.0)])
        assert "host syncs MORE: 0 → 3 /step" in comparison_ci.format_github(found)
        assert "host syncs: 0 → 3 /step: MORE" in comparison_ci.format_junit(found)

    @pytest.mark.parametrize(("launches", "code"), [(4, "fails"), (3, "unjudged")])
    def test_goodput_that_falls_to_zero_does_not_pass(self, tmp_path: Path, launches: int, code: str) -> None:
        """The other point has the metric on both sides. Ranges of four launches of each side prove the fall."""
        found = compare_goodput(tmp_path, launches, 0.0)
        fail_on.apply_rules(found, fail_on.read_rules("goodput:5%"))
        (finding,) = [f for f in found.findings if "32 clients" in f.point]
        assert finding.status == code
        row = found.points[0].find_row("goodput")
        if launches == 4:
            assert row is not None
            assert (row.a, row.b, row.verdict) == (3.0, 0.0, "FEWER")

    def test_goodput_of_other_objectives_is_not_compared(self, tmp_path: Path) -> None:
        found = compare_goodput(tmp_path, 4, 9.0, ttft_ms=800.0)
        assert [len(point.rows) for point in found.points] == [1, 0]
        fail_on.apply_rules(found, fail_on.read_rules("goodput:5%"))
        (finding,) = [f for f in found.unjudged if "32 clients" in f.point]
        assert finding.message.endswith("not judged: goodput (other objectives in B)")

    def test_metric_that_b_lacks_at_one_point_is_not_judged(self, tmp_path: Path) -> None:
        found = compare_goodput(tmp_path, 4, None)
        fail_on.apply_rules(found, fail_on.read_rules("goodput:5%"))
        (finding,) = [f for f in found.unjudged if "32 clients" in f.point]
        assert finding.message.endswith("not judged: goodput (absent in B)")
        assert "goodput (absent in B)" in comparison_markdown.render(found)
        fail_on.apply_rules(found, fail_on.read_rules("goodput:5%,missing"))
        assert [f.rule for f in found.fails] == ["missing"]

    def test_proven_slowdown_fails_only_beyond_its_limit(self, tmp_path: Path) -> None:
        found = compare_launches(tmp_path, 4, faster=1 / 1.05)
        fail_on.apply_rules(found, fail_on.read_rules("slower:2%"))
        assert len(found.fails) == 4
        fail_on.apply_rules(found, fail_on.read_rules("slower:10%,itl_p50:10%,tok_s:10%"))
        assert found.findings == []
        assert {row.gate for p in found.points for row in p.rows if row.metric == "step_time"} == {"passes"}

    def test_limit_can_be_given_in_the_unit_of_the_metric(self, tmp_path: Path) -> None:
        """A step of 10 ms becomes 10.5 ms."""
        found = compare_launches(tmp_path, 4, faster=1 / 1.05)
        fail_on.apply_rules(found, fail_on.read_rules("step_time:+0.2"))
        assert len(found.fails) == 4
        fail_on.apply_rules(found, fail_on.read_rules("step_time:+2"))
        assert found.fails == []

    def test_gate_with_single_launches_is_undecided(self, tmp_path: Path) -> None:
        """Single launches, 3 % slower with a limit of 2 %, cannot fail the rule."""
        p = build.make_point()
        a, b = build.make_ok_record(p, median_ms=10), build.make_ok_record(p, median_ms=10.3)
        found = self.apply(tmp_path, "slower:2%", a, b)
        assert [f.status for f in found.findings] == ["unjudged"]
        assert comparison_text.format_gate(found) == (
            "--fail-on slower:2%: 1 could not be judged, so the gate is UNDECIDED (exit code 3)."
        )
        assert "1 launch of A and 1 of B cannot show how launches scatter" in found.findings[0].message
        assert [f.status for f in self.apply(tmp_path, "slower:2%,undecided", a, b).findings] == ["fails"]

    def test_undecided_row_fails_only_with_undecided_rule_and_names_visible_change(self, tmp_path: Path) -> None:
        """Launches scatter by 3 %, so that the interval extends beyond a limit of 2 %."""
        a = write_launches(tmp_path / "a", 4, seed=1, cv=0.03)
        b = write_launches(tmp_path / "b", 4, seed=2, cv=0.03)
        found = judge_sides(sides.read_side([a]), sides.read_side([b]), Options(metrics=("step_time",)))
        fail_on.apply_rules(found, fail_on.read_rules("slower:2%"))
        assert {f.status for f in found.findings} == {"undecided"}
        row = found.points[0].rows[0]
        assert row.least_visible > 1.02
        assert f"{100 * (row.least_visible - 1):.0f}" in found.findings[0].message.rpartition("; ")[2]
        assert found.findings[0].message.endswith(" worse would have been found")
        assert comparison_text.format_gate(found).startswith("--fail-on slower:2%: nothing is proven worse; ")
        fail_on.apply_rules(found, fail_on.read_rules("slower:2%,undecided"))
        assert {f.status for f in found.findings} == {"fails"}

    def test_point_that_fails_only_in_b_fails_any_gate(self, tmp_path: Path) -> None:
        p = [build.make_point(concurrency=n) for n in (8, 16)]
        found = compare_records(
            tmp_path, [build.make_ok_record(x) for x in p], [build.make_ok_record(p[0]), build.make_failed_record(p[1])]
        )
        fail_on.apply_rules(found, fail_on.read_rules("syncs:+0"))
        assert [f.rule for f in found.fails] == ["failed"]

    def test_point_missing_in_b_fails_the_missing_rule(self, tmp_path: Path) -> None:
        p = [build.make_point(concurrency=n) for n in (8, 16)]
        found = compare_records(tmp_path, [build.make_ok_record(x) for x in p], [build.make_ok_record(p[0])])
        fail_on.apply_rules(found, fail_on.read_rules("missing"))
        assert [f.message for f in found.fails] == ["kimi-k2 tp1 flashinfer, 16 × 4,000 tokens: only in A"]

    def test_without_rules_nothing_fails(self, tmp_path: Path) -> None:
        p = build.make_point()
        assert (
            self.apply(
                tmp_path, None, build.make_ok_record(p), build.make_ok_record(p, host_syncs_per_step=9.0)
            ).findings
            == []
        )

    @pytest.mark.parametrize(
        ("text", "advice"),
        [
            ("slower", r"slower:2%\) or in its unit"),
            ("slower:2", "as a share"),
            ("slower:-2%", "as a share"),
            ("slower:nan%", "as a share"),
            ("quicker:2%", "give one of slower, tok_s"),
            ("slower:2%,", "give one of"),
            ("undecided:2%", "type undecided alone"),
        ],
    )
    def test_invalid_rule_raises_error_with_advice(self, text: str, advice: str) -> None:
        with pytest.raises(UsageError, match=advice):
            fail_on.read_rules(text)

    def test_rules_without_a_compared_metric_are_listed(self, tmp_path: Path) -> None:
        p = build.make_point()
        found = compare_records(tmp_path, [build.make_ok_record(p)], [build.make_ok_record(p)])
        assert fail_on.list_unused(found, fail_on.read_rules("ttft_p99:5%,slower:2%")) == ["ttft_p99:5%"]


class TestOutputs:
    def test_command_writes_all_outputs_and_fails_with_a_slower_run(
        self, tmp_path: Path, call, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The outputs are an exit code of 1, a table, annotations, the step summary, JUnit, Markdown, JSON and two
        pictures.
        """
        write_launches(tmp_path / "a", 4, seed=1, cv=0.002)
        write_launches(tmp_path / "b", 4, seed=2, cv=0.002, faster=0.9)
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
        code, out, _ = call(
            "compare",
            tmp_path / "a",
            tmp_path / "b",
            "--fail-on",
            "slower:2%,syncs:+0",
            "--github",
            "--junit",
            tmp_path / "j.xml",
            "-o",
            tmp_path / "out",
        )
        assert code == 1
        assert "4 SLOWER" in out
        assert "::error title=dcpbench compare%3A slower%3A2%25::kimi-k2 tp4 ep4 flashinfer, 8 × 4,000 tokens" in out
        assert "🔴 SLOWER" in (tmp_path / "summary.md").read_text()
        assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
            "compare.json",
            "compare.md",
            "forest.png",
            "forest.svg",
        ]
        root = ET.fromstring((tmp_path / "j.xml").read_text())  # noqa: S314 -- written by us
        assert root.get("failures") == "4"
        found = msgspec.json.decode((tmp_path / "out" / "compare.json").read_bytes(), type=Comparison)
        assert len(found.fails) == 4

    def test_gate_that_cannot_be_judged_exits_with_3(self, tmp_path: Path, call) -> None:
        """The exit code is 0 as soon as each side has four launches."""
        for n in (1, 4):
            write_launches(tmp_path / f"a{n}", n, seed=1, cv=0.002)
            write_launches(tmp_path / f"b{n}", n, seed=2, cv=0.002)
        report = tmp_path / "j.xml"
        code, out, _ = call(
            "compare", tmp_path / "a1", tmp_path / "b1", "--fail-on", "slower:2%", "--github", "--junit", report
        )
        assert code == 3
        assert "UNDECIDED (exit code 3)" in out
        assert "::error title=not judged%3A slower%3A2%25::" in out
        assert ET.fromstring(report.read_text()).get("errors") == "4"  # noqa: S314 -- written by us
        assert call("compare", tmp_path / "a4", tmp_path / "b4", "--fail-on", "slower:2%")[0] == 0
        unused = call("compare", tmp_path / "a4", tmp_path / "b4", "--fail-on", "ttft_p99:5%")
        assert (unused[0], "guards nothing" in unused[1]) == (3, True)
        assert call("compare", tmp_path / "a1", tmp_path / "b1")[0] == 0, "nothing can fail without a gate"

    def test_json_is_the_only_output_on_stdout(self, tmp_path: Path, call) -> None:
        one = build.write_records(tmp_path / "one", [build.make_ok_record(build.make_point())])
        code, out, err = call("compare", one, one, "--json", "-o", tmp_path / "out")
        assert code == 0
        assert json.loads(out)["points"][0]["name"] == "kimi-k2 tp1 flashinfer, 8 × 4,000 tokens"
        assert "Wrote" in err

    def test_rows_fit_into_80_columns(self, tmp_path: Path) -> None:
        found = compare_launches(tmp_path, 2)
        rows = [line.plain for line in comparison_table.render(found)]
        rows = [row for row in rows if re.match(r"  (step time|KV|memory|host|ITL)", row)]
        assert rows
        assert max(map(len, rows)) <= 80

    def test_example_workflow_uses_existing_options(self) -> None:
        import typer

        commands = typer.main.get_command(cli.app).commands
        steps = yaml.safe_load((EXAMPLES / "compare.yml").read_text())["jobs"]["compare"]["steps"]
        (judging,) = (s["run"].split() for s in steps if "dcpbench compare" in s.get("run", ""))
        with commands["compare"].make_context("compare", judging[2:]) as context:
            assert fail_on.read_rules(context.params["fail_on"])
        sweep = yaml.safe_load((EXAMPLES / "compare.yml").read_text())["jobs"]["compare"]["env"]["SWEEP"]
        with commands["sweep"].make_context("sweep", sweep.split()) as context:
            assert context.params["tp"] == "4"

    def test_example_workflow_runs_again_in_the_folder_of_an_earlier_job(self, tmp_path: Path) -> None:
        """A sweep refuses a folder with records. Rounds alternate: base, change, then change, base."""
        steps = yaml.safe_load((EXAMPLES / "compare.yml").read_text())["jobs"]["compare"]["steps"]
        (launch,) = [step["run"] for step in steps if step.get("name") == "Launch them in turn"]
        for side in ("base", "change"):
            program = tmp_path / f"env-{side}" / "bin" / "dcpbench"
            program.parent.mkdir(parents=True)
            program.write_text(
                '#!/bin/sh\nfor last; do :; done\nmkdir -p "${last%/*}" && mkdir "$last" && echo "$last" >> log\n'
            )
            program.chmod(0o755)
        for _ in range(2):
            subprocess.run(["bash", "-e", "-c", launch], cwd=tmp_path, check=True)
        done = (tmp_path / "log").read_text().split()
        assert len(done) == 2 * 2 * 8
        assert done[:4] == [
            f"runs/{name}" for name in ("base/round-1", "change/round-1", "change/round-2", "base/round-2")
        ]

    def test_launches_that_would_decide_are_stated_once(self, tmp_path: Path) -> None:
        """With fewer than four launches on each side, more of them are needed first; from four on, their number can be
        computed.
        """
        few = str(comparison_table.render(compare_launches(tmp_path / "x", 1)))
        assert "UNDECIDED, 4×: 1 launch of A and 1 of B cannot show how launches scatter; verdicts need 4" in few
        write_launches(tmp_path / "a", 4, seed=1, cv=0.01)
        write_launches(tmp_path / "b", 4, seed=5, cv=0.01, faster=1.03)
        options = Options(metrics=("step_time",))
        found = judge_sides(sides.read_side([tmp_path / "a"]), sides.read_side([tmp_path / "b"]), options)
        found.points[:] = [next(p for p in found.points if p.rows[0].verdict == "UNDECIDED")]
        (row,) = found.points[0].rows
        for paired, more, needed in ((False, 8, "8 more launches of each side"), (True, 1, "1 more round")):
            found.paired, row.more_launches = paired, more
            text = "".join(line.plain for line in comparison_table.render(found))
            assert f"UNDECIDED, 1×: {needed} would decide it (+N in a row)." in text

    def test_invalid_options_give_one_line_of_advice(self, tmp_path: Path, call) -> None:
        one = build.write_records(tmp_path / "one", [build.make_ok_record(build.make_point())])
        for arguments, advice in (
            (["--margin", "x"], "give one such as --margin 1%"),
            (["--margin", "99%"], "from 0% to 50%"),
            (["--margin", "0.5"], "--margin 0.5 has no unit; write --margin 0.5%."),
            (["--launch-noise", "2"], "--launch-noise 2 has no unit; write --launch-noise 2%."),
            (["--margin", "-1"], "--margin -1% cannot be; give a share from 0% to 50%"),
            (["--alpha", "nan"], "--alpha 0.05"),
            (["--metric", "x"], "--metric x: there is none"),
            (["--metric", ""], "--metric is empty; name something after it"),
            (
                ["--metric", "ttft_p50,goodput"],
                "--metric ttft_p50,goodput: no point has it on both sides; give some of step_time,",
            ),
            (["--across", ","], "--across is empty; name something after it"),
            (["--fail-on", "x"], "--fail-on x: give one of"),
            (["--fail-on", ""], "--fail-on '': give one of"),
        ):
            code, _, err = call("compare", one, one, *arguments)
            assert (code, err.count("\n")) == (2, 1)
            assert advice in err


EVIL = "<script>alert(1)</script>|`$x^2$`\x1b[31m\n::error::x" + "long" * 1000


class TestHostileRecords:
    def make_hostile_records(self) -> list[Record]:
        """Return records with hostile names and invalid numbers."""
        p = build.make_point(model=EVIL, backend=EVIL, exchange=EVIL)
        good = build.make_ok_record(build.make_point(Layout(2)))
        metrics = good.metrics
        found = []
        for n, value in enumerate((math.nan, math.inf, -1.0, 0.0, 1e308, 5e-324)):
            wrong = msgspec.structs.replace(
                metrics, step_ms=msgspec.structs.replace(metrics.step_ms, median=value), step_samples_ms=[value] * 30
            )
            point = msgspec.structs.replace(p, concurrency=n + 1, tp=3, dcp=2)
            found.append(
                msgspec.structs.replace(
                    good,
                    point=point,
                    metrics=wrong,
                    warnings=[EVIL],
                    host_syncs_per_step=value,
                    memory_peak_bytes=10**300,
                    environment=msgspec.structs.replace(good.environment, device=EVIL, settings={EVIL: EVIL}),
                )
            )
        return [*found, msgspec.structs.replace(good, environment=found[0].environment)]

    def test_hostile_records_break_no_output(self, tmp_path: Path) -> None:
        a = [Run("a" + EVIL, tmp_path / "a", self.make_hostile_records())]
        b = [
            Run(
                "b",
                tmp_path / "b",
                [msgspec.structs.replace(r, memory_peak_bytes=1, started_at="x") for r in self.make_hostile_records()],
            )
        ]
        found = judge_sides(a, b, Options(launch_noise=0.02))
        fail_on.apply_rules(found, fail_on.read_rules("slower:2%,syncs:+0,memory:1%,missing,undecided"))
        text = comparison_markdown.render(found)
        assert "<script" not in text
        assert "\x1b" not in "".join(line.plain for line in comparison_table.render(found))
        assert all(line.startswith("::") for line in comparison_ci.format_github(found).splitlines())
        assert "\n::error::x" not in comparison_ci.format_github(found)
        ET.fromstring(comparison_ci.format_junit(found))  # noqa: S314 -- written by us
        assert picture.draw(found, tmp_path)
        assert "<script" not in (tmp_path / "forest.svg").read_text()
        json.loads(msgspec.json.encode(found))
        mixed = [Run("a" + EVIL, tmp_path / "a", [*a[0].records, build.make_ok_record(build.make_point(Layout(4)))])]
        with pytest.raises(UsageError) as refused:
            judge_sides(mixed, b, Options())
        assert "\x1b" not in str(refused.value)
        assert len(str(refused.value)) < 1000

    def test_samples_file_outside_the_run_is_not_read(self, tmp_path: Path) -> None:
        record = serving.make_served_record(serving.make_point())
        row = Row(
            number=0,
            outcome=FINISHED,
            reason=None,
            submitted_s=0.0,
            first_token_s=1.0,
            end_s=2.0,
            input_tokens=3,
            output_tokens=2,
            cached_tokens=0,
            preemptions=0,
            replica=0,
            token_s=[1.0, 2.0],
            tokens=[1, 2],
        )
        run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
        inside = write_samples(run, record.point, [row])
        outside = elsewhere / write_samples(elsewhere, record.point, [row])

        def found(name: str) -> int:
            evil = msgspec.structs.replace(record, serve=msgspec.structs.replace(record.serve, samples_file=name))
            return len(read_record_requests(evil, run).times)

        assert found(inside) == 1
        up = outside.relative_to(tmp_path)
        for name in (f"../{up}", str(outside), f"samples/../../{up}", "\0", "a" * 300):
            assert found(name) == 0

    def test_too_many_points_are_refused_and_long_names_are_cut(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        long = build.make_ok_record(build.make_point(model="m" * 10_000_000))
        (point,) = compare_records(tmp_path / "x", [long], [long]).points
        assert len(point.name) <= 320
        monkeypatch.setattr(sides, "MAX_POINTS", 1)
        two = [build.make_ok_record(build.make_point(concurrency=n)) for n in (8, 16)]
        with pytest.raises(UsageError, match="2 points are in both, more than the 1"):
            compare_records(tmp_path / "y", two, two)

    def test_damaged_records_are_an_error_without_traceback(self, tmp_path: Path, call) -> None:
        bad = tmp_path / "bad"
        bad.mkdir()
        (bad / "records.jsonl").write_text('{"schema_version": 99}\n{"x": NaN}\n')
        code, _, err = call("compare", bad, bad)
        assert code == 2
        assert "schema_version 99" in err
        assert "Traceback" not in err


@pytest.mark.parametrize(("count", "last"), [(20, "  setting 19: 1 | 2"), (21, "  and 1 more"), (25, "  and 5 more")])
def test_first_twenty_differences_are_listed_and_others_counted(count: int, last: str) -> None:
    found = [Difference(what=f"setting {n}", a="1", b="2") for n in range(count)]
    shown = comparison_table._format_differences(SimpleNamespace(differences=found))  # type: ignore[arg-type]
    assert (shown[1].plain, shown[-1].plain) == ("  setting 0: 1 | 2", last)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (0, None),
        (1, "… and 1 more point (1 SAME); --all shows it."),
        (3, "… and 3 more points (1 SLOWER, 2 SAME); --all shows them."),
    ],
)
def test_points_left_out_on_a_terminal_are_counted_by_verdict(tmp_path: Path, more: int, expected: str | None) -> None:
    """Forty points are shown; a slower one may be among the others."""
    p = build.make_point()
    found = compare_records(tmp_path, [build.make_ok_record(p)], [build.make_ok_record(p)])
    (one,) = found.points
    one.rows = [row for row in one.rows if row.verdict == "SAME"]
    slower = msgspec.structs.replace(one, rows=[msgspec.structs.replace(one.rows[0], verdict="SLOWER"), *one.rows])
    found.points = [*[slower] * (40 + more // 3), *[one] * (more - more // 3)]
    lines = [line.plain for line in comparison_table.render(found)]
    assert [line for line in lines if line.startswith("… and")] == ([expected] if expected else [])
    assert not any(
        line.startswith("… and") for line in (text.plain for text in comparison_table.render(found, every=True))
    )


def test_latency_of_zero_counts_as_not_measured(tmp_path: Path) -> None:
    """Zero has no logarithm; counts can be 0."""
    record = build.make_ok_record(build.make_point())
    assert record.metrics is not None
    none = msgspec.structs.replace(record.metrics.step_ms, median=0.0)
    record = msgspec.structs.replace(record, metrics=msgspec.structs.replace(record.metrics, step_ms=none))
    run = Run("a", tmp_path, [record])
    assert judging._estimate_launch(METRIC["step_ms"], "steps", run, [record], {}) is None


@pytest.mark.parametrize(
    ("faster", "expected"),
    [
        ([1.25], "step time 10 → 8.003 ms, B/A 0.800"),
        ([1.25, 0.5, 1.0], "step time B/A 0.800 to 2.000 in 3 points, median 1.000"),
        ([1e-4], "step time 10 → 100,035 ms, B/A 1e+04"),
        ([1.25, None], "step time 10 → 8.003 ms, B/A 0.800; 1 point did not run in B"),
        ([None], "nothing ran on both sides; 1 point did not run in B"),
    ],
)
def test_round_of_ab_is_summarised_in_one_line(tmp_path: Path, faster: list[float | None], expected: str) -> None:
    """A takes 10 ms a step; B is this many times as fast, or did not run. Medians are those of synthetic samples."""
    points = [build.make_point(context=1000 * (n + 1)) for n in range(len(faster))]
    a = [build.make_ok_record(p, median_ms=10.0) for p in points]
    b = [
        build.make_ok_record(p, median_ms=10.0 / x) if x else build.make_failed_record(p)
        for p, x in zip(points, faster, strict=True)
    ]
    assert rounds.format_round(Run("a", tmp_path, a), Run("b", tmp_path, b)) == expected
