"""Test that every format shows a report with verdict fully, follows published schemas, and escapes names."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpbench.errors import UsageError
from dcpbench.syncs import site_text, sync_report
from dcpbench.syncs.formats import FORMATS, github, render_report
from dcpbench.syncs.gating import baseline
from dcpbench.syncs.gating.config import Allow
from dcpbench.syncs.gating.gate import Gate, apply_permissions, compute_verdict
from dcpbench.syncs.rules import BY_ID, RULES
from dcpbench.syncs.sync_report import Report
from tests.unit import syncs_builder as build

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
SARIF = json.loads((ROOT / "tests/data/sarif-schema-2.1.0.json").read_text())
SAMPLE = Allow(function="sample", reason="tokens leave the GPU here", source="allow[0]")
CONTROL_CHARACTERS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters except the line feed, and marks that change the direction of text."""


def add_verdict(report: Report, **gate: Any) -> Report:
    """Return the report with the verdict of a gate that allows `sample`."""
    made = Gate(root=ROOT, **{"allow": (SAMPLE,), **gate})
    report.verdict = compute_verdict(report, made, apply_permissions(report.sites, made))
    return report


def render(report: Report, form: str, **changes: Any) -> str:
    """Return the report in a format."""
    return render_report(report, form, root=ROOT, **changes)


def make_empty_report() -> Report:
    """Return a report without sites and traces."""
    return build.make_report(traces=[])


REPORTS = (build.make_report_of_all_kinds, build.make_hostile_report, make_empty_report)


class TestEveryFormat:
    @pytest.mark.parametrize("make", REPORTS)
    @pytest.mark.parametrize("form", FORMATS)
    def test_no_format_contains_control_characters(self, form: str, make: Callable[[], Report]) -> None:
        text = render(add_verdict(make()), form)
        assert not CONTROL_CHARACTERS.search(text)
        assert text.encode()  # raises an error for a lone surrogate

    @given(name=st.text(st.characters(), max_size=40), line=st.one_of(st.none(), st.integers(-5, 99)))
    @settings(max_examples=60, deadline=None)
    def test_any_name_leaves_every_format_valid(self, name: str, line: int | None) -> None:
        """With any text in a trace, no control character is output, XML parses, SARIF is valid, and a GitHub command is
        one line.
        """
        names = dict.fromkeys(("function", "file", "op", "range", "direction", "call", "kind"), name)
        trace = build.make_trace(name, notes=[f"note {name}"])
        report = add_verdict(build.make_report(build.make_site(**names, line=line), traces=[trace]))
        shown = {form: render(report, form) for form in FORMATS}
        assert not any(CONTROL_CHARACTERS.search(text) for text in shown.values())
        assert ET.fromstring(shown["junit"]).tag == "testsuites"  # noqa: S314 -- our own
        assert jsonschema.Draft7Validator(SARIF).is_valid(json.loads(shown["sarif"]))
        assert all(TestGithub.COMMAND.fullmatch(line) for line in shown["github"].splitlines())

    @pytest.mark.parametrize("form", FORMATS)
    def test_rendering_does_not_change_the_report(self, form: str) -> None:
        report = add_verdict(build.make_hostile_report())
        before = msgspec.to_builtins(report)
        render(report, form)
        assert msgspec.to_builtins(report) == before

    def test_unknown_format_error_lists_the_known_formats(self) -> None:
        with pytest.raises(UsageError, match="table, json, sarif, junit, github, markdown"):
            render(build.make_report(), "html")


class TestWords:
    def test_unknown_time_is_shown_as_a_dash(self) -> None:
        assert site_text.format_microseconds(None) == "–"
        assert site_text.format_microseconds(1500.0) == "1.5 ms"

    def test_dotted_names_of_a_function_begin_at_every_folder(self) -> None:
        """The start of a package is not known, so that `engine.kv.f` must match and so must `python.engine.kv.f`."""
        assert site_text.list_dotted_names(build.make_site(function="f")) == [
            "python.engine.kv.f",
            "engine.kv.f",
            "kv.f",
            "f",
        ]
        assert site_text.list_dotted_names(build.make_site(function="f", file="/a/pkg/__init__.py")) == [
            "a.pkg.f",
            "pkg.f",
            "f",
        ]
        assert site_text.list_dotted_names(build.make_site(function="f", file="")) == ["f"]
        assert site_text.list_dotted_names(build.make_site(function="")) == []


class TestTable:
    def test_table_shows_place_operator_count_and_cost(self) -> None:
        text = render(add_verdict(build.make_report_of_all_kinds()), "table")
        for part in (
            "check_all",
            "python/engine/kv.py:12",
            " _local_scalar_dense ",
            "420 µs",
            "40 µs",
            "300 µs",
            "DtoH pinned",
            "10 B",
            "[own, explicit]",
            "[allowed]",
            "[warm-up]",
            "[may block]",
            "SYNC003 copy-to-host",
            "upper bound",
            build.NOTE,
            "allowed: sample: tokens leave the GPU here",
            "2 findings: exit code 1.",
        ):
            assert part in text

    def test_calls_of_one_line_are_told_apart_by_the_operator_that_the_program_called(self) -> None:
        made = (
            build.make_site(name, op_chain=[f"my::{name}", "aten::nonzero"], op="aten::nonzero") for name in ("x", "y")
        )
        report = add_verdict(build.make_report(*made))
        place = "in check_all (python/engine/kv.py:12)"
        assert [finding.message.partition(",")[0] for finding in report.verdict.findings] == [
            f"scalar-read: aten::nonzero by my::{name} {place}" for name in ("x", "y")
        ]
        assert all(f"by my::{name}" in render(report, "table") for name in ("x", "y"))
        assert all(f"by <code>my&#58;&#58;{name}" in render(report, "markdown") for name in ("x", "y"))

    def test_sites_without_times_have_no_cost(self) -> None:
        """A dry run knows no times."""
        site = build.make_site(wait_us=None, wait_median_us=None, bubble_us=None)
        report = add_verdict(build.make_report(site, traces=[build.make_trace(detector="dry-run")]))
        assert "Total: 10 synchronisations at 1 site.\n" in render(report, "table", width=60)
        assert "**10 synchronisations** at **1 site**\n" in render(report, "markdown")
        assert not any("wait –" in render(report, form, width=60) for form in ("table", "markdown"))

    def test_table_concludes_no_synchronisation_for_clean_reports_only(self) -> None:
        """A trace without GPU events shows no wait, which proves nothing."""
        lines = render(add_verdict(build.make_report(traces=[build.make_trace(gpu_events=0)])), "table").splitlines()
        assert lines[-1] == ("This cannot be answered: exit code 3. No synchronisation was seen in what was recorded.")
        assert not [line for line in lines[:-1] if "No synchronisation" in line]

    def test_table_names_the_ranges_that_are_steps(self) -> None:
        trace = build.make_trace(steps=44, steps_from="execute_new_N_cached_M", steps_share=0.987)
        trace.coverage.steps_by_phase = {"decode": 40, "prefill": 4}
        trace.rank, trace.world_size = 1, 8
        text = " ".join(render(add_verdict(build.make_report(traces=[trace])), "table").split())
        assert (
            "rank 1 of 8, 44 steps (ranges 'execute_new_N_cached_M'; 40 decode, 4 prefill; 99% of the work), 100 GPU events"
            in text
        )

    def test_table_and_markdown_mark_guessed_steps(self) -> None:
        trace = build.make_trace(steps_from="stage ", steps_guessed=True, steps_share=0.6)
        for form in ("table", "markdown"):
            text = " ".join(render(add_verdict(build.make_report(traces=[trace])), form).split())
            assert "10 steps (ranges 'stage ', a guess by their numbers; 60% of the work)" in text

    def test_table_and_markdown_show_the_count_per_step_of_each_phase(self) -> None:
        site = build.make_site(
            count_per_step=2.0, count_per_phase={"prefill": 2.0, "decode": 0.5, "mixed": 0.0}, outside=3
        )
        report = add_verdict(build.make_report(site))
        assert "2 per prefill step, 0.5 per decode step, 10 in all, 3 of them in no step" in " ".join(
            render(report, "table").split()
        )
        assert "2 prefill, 0.5 decode" in render(report, "markdown")

    def test_table_begins_with_the_worst_site(self) -> None:
        """The bubbles are 9 ms, 300 µs and 50 µs, in any order in the report."""
        report = add_verdict(build.make_report_of_all_kinds())
        report.sites.reverse()
        text = render(report, "table")
        assert text.index(" load ") < text.index(" check_all ") < text.index(" sample ")

    def test_table_explains_each_rule_that_occurs_once(self) -> None:
        text = " ".join(render(add_verdict(build.make_report_of_all_kinds()), "table").split())
        for rule in RULES:
            times = 1 if rule.id in {"SYNC001", "SYNC003", "SYNC005"} else 0
            assert text.count(rule.why) == text.count(rule.fix) == times

    @pytest.mark.parametrize("width", [30, 60, 80, 109, 110, 140, 300])
    @pytest.mark.parametrize("make", REPORTS)
    def test_no_table_line_is_wider_than_the_terminal(self, make: Callable[[], Report], width: int) -> None:
        lines = render(add_verdict(make()), "table", width=width).splitlines()
        assert max(len(line) for line in lines) <= width

    @pytest.mark.parametrize("width", [60, 140])
    def test_table_keeps_all_numbers_in_a_narrow_terminal(self, width: int) -> None:
        text = render(add_verdict(build.make_report_of_all_kinds()), "table", width=width)
        for part in ("9 ms", "300 µs", "50 µs", "python/engine/kv.py:40", " copy_"):
            assert part in text

    def test_table_links_existing_files_on_terminals_only(self, tmp_path: Path) -> None:
        (tmp_path / "python/engine").mkdir(parents=True)
        (tmp_path / "python/engine/kv.py").touch()
        report = add_verdict(build.make_report(build.make_site(), build.make_site("g", file="python/gone.py")))
        link = f"{(tmp_path / 'python/engine/kv.py').as_uri()}#12"
        shown = render_report(report, "table", root=tmp_path, terminal=True)
        assert link in shown
        assert shown.count("\x1b]8;;\x1b\\") == 1
        assert "gone.py#" not in shown
        assert "\x1b" not in render_report(report, "table", root=tmp_path)

    def test_table_without_sites_shows_the_notes_of_traces(self) -> None:
        text = render(add_verdict(build.make_report()), "table")
        assert "No synchronisation was seen." in text
        assert build.NOTE in text
        assert "Clean" in text

    def test_table_prints_the_same_note_of_several_ranks_once(self) -> None:
        """The text counts the traces that have the note, here two of three."""
        traces = [build.make_trace("a.json"), build.make_trace("b.json"), build.make_trace("c.json", notes=[])]
        text = render(add_verdict(build.make_report(traces=traces)), "table")
        assert text.count(build.NOTE) == 1
        assert "(2 of 3 traces)" in text


class TestJson:
    @pytest.mark.parametrize("make", REPORTS)
    def test_json_decodes_to_the_report(self, make: Callable[[], Report]) -> None:
        report = add_verdict(make())
        assert msgspec.json.decode(render(report, "json"), type=Report) == site_text.make_report_printable(report)

    @pytest.mark.parametrize("make", REPORTS)
    def test_json_is_valid_by_the_schema_in_docs(self, make: Callable[[], Report]) -> None:
        published = json.loads((ROOT / "docs/syncs.schema.json").read_text())
        jsonschema.Draft202012Validator.check_schema(published)
        jsonschema.validate(json.loads(render(add_verdict(make()), "json")), published)

    def test_schema_refuses_invalid_reports(self) -> None:
        report = json.loads(render(add_verdict(build.make_report_of_all_kinds()), "json"))
        for breakage in ({"schema_version": 2}, {"sites": [{}]}, {"verdict": {"status": "fine"}}):
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate({**report, **breakage}, sync_report.build_json_schema())

    def test_schema_in_docs_equals_the_generated_one(self) -> None:
        """The command `python -m dcpbench.syncs.sync_report > docs/syncs.schema.json` writes the schema again."""
        assert (ROOT / "docs/syncs.schema.json").read_text() == json.dumps(
            sync_report.build_json_schema(), indent=2, ensure_ascii=False
        ) + "\n"


class TestSarif:
    def render_run(self, report: Report) -> dict[str, Any]:
        """Return the only run of a log, after validation by the published schema."""
        log = json.loads(render(report, "sarif"))
        validator = jsonschema.Draft7Validator(SARIF, format_checker=jsonschema.FormatChecker())
        assert [error.message for error in validator.iter_errors(log)] == []
        return log["runs"][0]

    @pytest.mark.parametrize("make", REPORTS)
    @pytest.mark.parametrize("gate", [{}, {"max_per_step": 0.0}, {"max_bubble_us": 1.0}], ids=str)
    def test_sarif_is_valid_by_the_published_schema(self, make: Callable[[], Report], gate: dict[str, float]) -> None:
        run = self.render_run(add_verdict(make(), **gate))
        assert run["tool"]["driver"]["name"] == "dcpbench syncs"

    def test_sarif_levels_suppressions_and_fingerprints_follow_the_verdict(self) -> None:
        run = self.render_run(add_verdict(build.make_report_of_all_kinds()))
        found = {r["partialFingerprints"]["dcpbenchSyncs/v1"]: r for r in run["results"]}
        assert {f: r["level"] for f, r in found.items()} == {
            "f1": "error",
            "f2": "note",
            "f3": "note",
            "f5": "error",
            "f6": "note",
        }
        assert [f for f, r in found.items() if "suppressions" in r] == ["f2"]
        assert found["f2"]["suppressions"][0]["justification"] == SAMPLE.reason

    def test_sarif_results_name_their_rule_by_id_and_index(self) -> None:
        run = self.render_run(add_verdict(build.make_report_of_all_kinds()))
        rules = run["tool"]["driver"]["rules"]
        assert [r["id"] for r in rules] == [r.id for r in RULES]
        assert all(rules[r["ruleIndex"]]["id"] == r["ruleId"] for r in run["results"])
        assert all(r["help"]["text"] and r["help"]["markdown"] for r in rules)

    def test_sarif_locations_are_relative_with_a_region_for_known_lines(self) -> None:
        report = add_verdict(
            build.make_report(
                build.make_site("a"),
                build.make_site("b", line=None, file="a b/é.py"),
                build.make_site("c", file="/x.py"),
            )
        )
        where = {
            r["partialFingerprints"]["dcpbenchSyncs/v1"]: r["locations"][0]["physicalLocation"]
            for r in self.render_run(report)["results"]
        }
        artifact = {"uri": "python/engine/kv.py", "uriBaseId": "%SRCROOT%"}
        assert where["a"] == {"artifactLocation": artifact, "region": {"startLine": 12}}
        assert where["b"] == {"artifactLocation": {"uri": "a%20b/%C3%A9.py", "uriBaseId": "%SRCROOT%"}}
        assert where["c"]["artifactLocation"] == {"uri": "file:///x.py"}

    def test_sarif_location_of_a_site_without_a_file_is_its_trace(self) -> None:
        """Code scanning refuses results without a physical location."""
        (result,) = self.render_run(add_verdict(build.make_report(build.make_site(file="", line=None))))["results"]
        assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "rank0.json"

    def test_sarif_has_notifications_for_limits_of_the_trace(self) -> None:
        run = self.render_run(add_verdict(build.make_report(traces=[build.make_trace(gpu_events=0)])))
        (invocation,) = run["invocations"]
        assert not invocation["executionSuccessful"]
        assert invocation["exitCode"] == 3
        notifications = {n["level"]: n["message"]["text"] for n in invocation["toolExecutionNotifications"]}
        assert "no GPU events" in notifications["error"]
        assert notifications["note"] == build.NOTE

    def test_sarif_messages_escape_braces_and_brackets_of_names(self) -> None:
        (result,) = self.render_run(add_verdict(build.make_report(build.make_site(function="f{0}[a](b)"))))["results"]
        assert r"f{{0}}\[a\](b)" in result["message"]["text"]


class TestJunit:
    def parse(self, report: Report) -> ET.Element:
        """Return the document, after checking its counts against its cases."""
        root = ET.fromstring(render(report, "junit"))  # noqa: S314 -- our own
        for suite in (root, *root):
            cases = list(suite.iter("testcase"))
            assert int(suite.get("tests")) == len(cases)
            for tag, name in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
                assert int(suite.get(name)) == sum(case.find(tag) is not None for case in cases)
        return root

    def test_junit_fails_findings_and_skips_allowed_sites(self) -> None:
        root = self.parse(add_verdict(build.make_report_of_all_kinds()))
        cases = list(root.find("testsuite[@name='hidden syncs']"))
        outcome = {c.get("name").split()[-1]: [child.tag for child in c] for c in cases}
        assert outcome == {
            "f3": ["system-out"],
            "f1": ["failure"],
            "f2": ["skipped"],
            "f5": ["failure"],
            "f6": ["system-out"],
        }
        (first,) = (c for c in cases if c.get("name").endswith("f1"))
        assert (first.get("classname"), first.get("file"), first.get("line")) == (
            "python.engine.kv",
            "python/engine/kv.py",
            "12",
        )

    def test_junit_error_for_an_incomplete_trace(self) -> None:
        root = self.parse(
            add_verdict(
                build.make_report(traces=[build.make_trace("good.json"), build.make_trace("bad.json", complete=False)])
            )
        )
        outcome = {c.get("name"): c.find("error") is not None for c in root.iter("testcase")}
        assert outcome == {"good.json": False, "bad.json": True}

    def test_junit_has_a_separate_failure_for_an_exceeded_limit(self) -> None:
        root = self.parse(add_verdict(build.make_report(build.make_site()), max_per_step=0.0))
        assert root.find("testsuite[@name='limits']/testcase/failure") is not None

    @pytest.mark.parametrize("make", REPORTS)
    def test_junit_is_well_formed_for_all_reports(self, make: Callable[[], Report]) -> None:
        assert self.parse(add_verdict(make())).tag == "testsuites"


class TestGithub:
    COMMAND = re.compile(r"::(error|warning|notice) (?:file=[^:,]+,(?:line=\d+,)?)?title=[^:,]*::[^\r\n]+")

    @pytest.mark.parametrize("make", REPORTS)
    def test_github_lines_are_complete_commands(self, make: Callable[[], Report]) -> None:
        lines = render(add_verdict(make()), "github").splitlines()
        assert lines
        assert [line for line in lines if not self.COMMAND.fullmatch(line)] == []

    def test_github_finding_is_an_error_on_its_line_with_the_fix(self) -> None:
        line, *_ = render(add_verdict(build.make_report_of_all_kinds()), "github").splitlines()
        assert line.startswith("::error file=python/engine/kv.py,line=12,title=SYNC001 scalar-read::")
        assert "host-side copy" in line

    def test_github_escapes_percent_colon_and_comma_of_names(self) -> None:
        line, *_ = render(add_verdict(build.make_report(build.make_site(file="a%b:c,d.py"))), "github").splitlines()
        assert line.startswith("::error file=a%25b%3Ac%2Cd.py,line=12,")
        assert "(a%25b:c,d.py:12)" in line

    def test_github_shows_the_ten_worst_sites_of_each_level(self) -> None:
        """The findings with bubbles of 12 to 3 µs are shown, of twelve with 1 to 12 µs."""
        sites = [build.make_site(f"s{n}", function=f"fn{n}_", bubble_us=float(n)) for n in range(1, 13)]
        lines = [
            line
            for line in render(add_verdict(build.make_report(*sites)), "github").splitlines()
            if line.startswith("::error")
        ]
        assert [re.search(r"fn(\d+)_", line)[1] for line in lines] == [str(n) for n in range(12, 2, -1)]

    @pytest.mark.parametrize("file", ["", "/opt/torch/functional.py", "<string>"])
    def test_github_annotations_name_files_of_the_repository_only(self, file: str) -> None:
        line, *_ = render(add_verdict(build.make_report(build.make_site(file=file))), "github").splitlines()
        assert line.startswith("::error title=SYNC001 scalar-read::")

    def test_github_findings_have_advice_and_allowed_sites_their_reason(self) -> None:
        report = add_verdict(build.make_report(build.make_site(), build.make_site("c", function="sample")))
        lines = render(report, "github").splitlines()
        (error,) = [line for line in lines if line.startswith("::error file=")]
        assert BY_ID["SYNC001"].fix in error
        (allowed,) = [line for line in lines if line.startswith("::notice file=")]
        assert allowed.endswith(f". Allowed: {SAMPLE.reason}")

    @pytest.mark.parametrize("found", [True, False])
    def test_github_incomplete_trace_is_a_warning_with_findings_and_otherwise_an_error(self, found: bool) -> None:
        sites = [build.make_site()] if found else []
        lines = render(
            add_verdict(build.make_report(*sites, traces=[build.make_trace(runtime_events=0)])), "github"
        ).splitlines()
        commands = [line.partition("::")[2].partition("::")[0] for line in lines]
        assert ("warning title=Not all is known" in commands) == found
        assert ("error title=The trace cannot answer" in commands) != found

    @pytest.mark.parametrize(("count", "left"), [(9, 0), (10, 0), (12, 2)])
    def test_github_counts_sites_without_an_annotation(self, count: int, left: int) -> None:
        """At most ten findings and ten allowed sites are shown."""
        found = [build.make_site(f"{name}{n}", function=name) for n in range(count) for name in ("check", "sample")]
        report = add_verdict(build.make_report(*found))
        levels = [line.partition(" ")[0] for line in render(report, "github").splitlines() if "file=" in line]
        assert [levels.count(level) for level in ("::error", "::notice")] == [count - left] * 2
        assert github.count_left_out(report) == 2 * left

    @pytest.mark.parametrize(("count", "left"), [(8, 0), (9, 1), (12, 4)])
    def test_github_exceeded_limits_replace_annotations_of_sites(self, count: int, left: int) -> None:
        """Two of ten annotations are for limits, in addition to new sites."""
        found = [build.make_site(f"s{n}") for n in range(count)]
        report = add_verdict(
            build.make_report(*found), max_per_step=1.0, max_bubble_us=1.0, baseline=baseline.build_baseline([])
        )
        errors = [line for line in render(report, "github").splitlines() if line.startswith("::error")]
        assert ["file=" in line for line in errors] == [False] * 2 + [True] * (count - left)
        assert github.count_left_out(report) == left

    def test_github_error_for_a_trace_without_runtime_events(self) -> None:
        line, *_ = render(
            add_verdict(build.make_report(traces=[build.make_trace(runtime_events=0)])), "github"
        ).splitlines()
        assert line.startswith("::error title=The trace cannot answer::")


class TestMarkdown:
    def test_markdown_table_has_a_complete_row_for_every_site(self) -> None:
        for make in (build.make_report_of_all_kinds, build.make_hostile_report):
            report = add_verdict(make())
            rows = [line for line in render(report, "markdown").splitlines() if line.startswith("|")]
            assert len(rows) == len(report.sites) + 2
            assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {12}

    def test_markdown_escapes_html_links_and_mentions_in_names(self) -> None:
        text = render(add_verdict(build.make_hostile_report()), "markdown")
        assert "<script" not in text
        assert "<b>" not in text
        assert "@all" not in text
        assert "](y)" not in text

    def test_markdown_counts_the_sites_that_a_long_report_leaves_out(self) -> None:
        """A step summary can have at most 1 MiB."""
        text = render(add_verdict(build.make_report(*(build.make_site(f"s{n}") for n in range(600)))), "markdown")
        assert "100 more sites are left out here" in text
