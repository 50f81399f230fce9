"""Test the pytest plugin in separate pytest runs: in a dry run, and live with fake_cuda in place of a GPU.

The tests of syncs_plugin_cases.py share one run, and those of syncs_plugin_live_cases.py another, both of them forks of
a process that has imported torch. Runs without torch are in this process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

# Imported before the runs in this process, which unload the modules that they import first.
from dcpbench.syncs.live import checked  # noqa: F401
from tests import forks

pytest_plugins = ["pytester"]

HERE = Path(__file__).parent
OTHERS = ("cacheprovider", "randomly", "hypothesispytest", "anyio", "timeout", "faulthandler")
"""Plugins that would take time, or interfere with the outer pytest."""
QUIET = (*(word for name in OTHERS for word in ("-p", f"no:{name}")), "--strict-markers", "--strict-config")


@dataclasses.dataclass(frozen=True)
class PluginRun:
    """Represent a pytest run by its output and the (outcome, message) of each test, with names `Class.test` in classes."""

    stdout: str
    tests: dict[str, tuple[str, str]]

    def get_outcomes(self, *names: str) -> list[str]:
        return [self.tests[name][0] for name in names]

    def list_after(self, heading: str) -> list[str]:
        """Return the indented lines of the list that follows a heading on stdout."""
        _, found, after = self.stdout.partition(heading)
        assert found
        begun = itertools.dropwhile(lambda line: not line.startswith("  "), after.splitlines())
        return list(itertools.takewhile(lambda line: line.startswith("  "), begun))

    def assert_failed_with(self, name: str, *lines: str) -> None:
        """Assert that a test failed with these lines in its message, as patterns of fnmatch."""
        outcome, message = self.tests[name]
        assert outcome == "failed"
        pytest.LineMatcher(message.splitlines()).fnmatch_lines(lines)


def run_plugin(folder: Path, cases: str, *options: str) -> PluginRun:
    """Run a file of tests as a user does, in a folder without settings."""
    shutil.copy(HERE / cases, folder)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    arguments = ("-m", "pytest", *QUIET, "--junitxml", "report.xml", *options, cases)
    env |= {"PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}
    with contextlib.chdir(folder):
        (code,) = forks.run_programs(forks.Program(arguments, env, "output.txt"))
    stdout = (folder / "output.txt").read_text()
    assert code == pytest.ExitCode.TESTS_FAILED, stdout
    tests = {}
    for case in ET.parse(folder / "report.xml").getroot().iter("testcase"):  # noqa: S314 - our own
        name = ".".join([*case.get("classname").split(".")[1:], case.get("name")])
        tests[name] = ("passed", "")
        for kind, outcome in (("skipped", "skipped"), ("failure", "failed"), ("error", "error")):
            for found in case.iter(kind):
                is_expected = found.get("type") == "pytest.xfail"
                tests[name] = ("xfailed" if is_expected else outcome, found.text or "")
    return PluginRun(stdout, tests)


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> PluginRun:
    """Run the tests of syncs_plugin_cases.py in a dry run."""
    return run_plugin(tmp_path_factory.mktemp("dry"), "syncs_plugin_cases.py", "--cuda-sync-mode", "dry-run")


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> PluginRun:
    """Run the tests of syncs_plugin_live_cases.py live."""
    return run_plugin(tmp_path_factory.mktemp("live"), "syncs_plugin_live_cases.py")


class TestDryRun:
    """Test dry runs, which work on every machine."""

    def test_synchronisation_fails_the_test_and_shows_its_line(self, dry: PluginRun) -> None:
        dry.assert_failed_with(
            "test_a_sync",
            "1 CUDA synchronisation where none may be, found by a dry run, as requested:",
            "syncs_plugin_cases.py:16 in test_a_sync: A tensor's value is read into Python [[]SYNC001[]]*",
            ">    16 |     if lengths.sum() > 3:",
            "  why: *",
            "  fix: Read the value from a host-side copy*",
        )

    def test_failure_message_is_printed_in_the_terminal(self, dry: PluginRun) -> None:
        assert dry.tests["test_a_sync"][1] in dry.stdout

    def test_clean_test_passes(self, dry: PluginRun) -> None:
        assert dry.get_outcomes("test_clean") == ["passed"]

    def test_max_cuda_syncs_allows_a_number_of_syncs(self, dry: PluginRun) -> None:
        assert dry.get_outcomes("test_at_most_two[2]") == ["passed"]
        dry.assert_failed_with("test_at_most_two[3]", "3 CUDA synchronisations where at most 2 may be*", "*, 3 times")

    def test_fixtures_may_synchronise(self, dry: PluginRun) -> None:
        assert dry.get_outcomes("test_of_a_fixture_that_synchronises") == ["passed"]

    def test_fixture_counts_without_failing_the_test(self, dry: PluginRun) -> None:
        assert dry.get_outcomes("test_of_the_fixture_that_counts") == ["passed"]

    def test_functions_can_be_allowed_by_globs(self, dry: PluginRun) -> None:
        assert dry.get_outcomes("test_an_allowed_function") == ["passed"]
        dry.assert_failed_with(
            "test_a_function_that_is_not_meant", "1 CUDA synchronisation where none may be*", "* in sample: *"
        )

    def test_region_with_a_reason_may_synchronise(self, dry: PluginRun) -> None:
        assert dry.get_outcomes("test_an_allowed_region") == ["passed"]

    def test_mark_of_a_test_takes_precedence_over_that_of_its_class(self, dry: PluginRun) -> None:
        assert dry.get_outcomes("TestMarked.test_by_its_class", "TestMarked.test_by_itself") == ["failed", "passed"]

    def test_unittest_methods_are_checked_without_their_set_up(self, dry: PluginRun) -> None:
        assert dry.get_outcomes("Step.test_clean") == ["passed"]
        dry.assert_failed_with("Step.test_sync", "1 CUDA synchronisation where *", "*in test_sync: *")
        dry.assert_failed_with(
            "Served.test_sync_in_a_coroutine", "1 CUDA synchronisation where *", "*in test_sync_in_a_coroutine: *"
        )

    def test_test_that_fails_by_itself_keeps_its_message(self, dry: PluginRun) -> None:
        dry.assert_failed_with("test_that_fails_by_itself", "*for a separate reason*")
        assert "CUDA synchronisation where" not in dry.tests["test_that_fails_by_itself"][1]

    def test_xfail_and_skip_keep_their_outcome(self, dry: PluginRun) -> None:
        assert dry.get_outcomes("test_expected_to_fail", "test_skipped") == ["xfailed", "skipped"]

    def test_test_without_gpu_work_is_listed(self, dry: PluginRun) -> None:
        """The test passes, and has not been checked."""
        assert dry.get_outcomes("test_on_the_host") == ["passed"]
        listed = dry.list_after("These tests put nothing on the virtual GPU")
        assert [line.rpartition("::")[2] for line in listed] == ["test_on_the_host", "test_dry"]

    def test_test_with_unmeasured_operators_is_listed(self, dry: PluginRun) -> None:
        """The test passes, and it is unknown if the operator waits."""
        assert dry.get_outcomes("test_operator_that_was_never_measured") == ["passed"]
        listed = dry.list_after("These tests use operators of which it was never measured whether they wait.")
        names = [line.partition("::")[2] for line in listed]
        assert names == ["test_operator_that_was_never_measured: aten::poisson"]

    @pytest.mark.parametrize("heading", ["These tests put nothing on the virtual GPU", "These tests use operators"])
    def test_blank_line_ends_each_list(self, dry: PluginRun, heading: str) -> None:
        """Without it, an indented line that pytest writes next looks like a part of the list."""
        listed = dry.list_after(heading)
        assert f"  {listed[-1].strip()}\n\n" in dry.stdout

    def test_next_test_is_outside_the_dry_run(self, dry: PluginRun) -> None:
        assert dry.get_outcomes("TestNeighbours.test_dry", "TestNeighbours.test_behind_it") == ["passed", "passed"]

    def test_checked_tests_are_counted(self, dry: PluginRun) -> None:
        """All tests count except the one after the dry run, which has no mark."""
        words = f"cuda syncs: found by a dry run, as requested, {len(dry.tests) - 1} tests"
        assert words in dry.stdout.splitlines()

    @pytest.mark.long
    def test_xdist_workers_check_their_tests(self, tmp_path: Path) -> None:
        chosen = ("-n", "2", "-k", "test_at_most_two or TestMarked")
        found = run_plugin(tmp_path, "syncs_plugin_cases.py", "--cuda-sync-mode", "dry-run", *chosen)
        assert {name: outcome for name, (outcome, _) in found.tests.items()} == {
            "test_at_most_two[2]": "passed",
            "test_at_most_two[3]": "failed",
            "TestMarked.test_by_its_class": "failed",
            "TestMarked.test_by_itself": "passed",
        }


class TestLive:
    def test_live_wait_fails_the_test_and_shows_its_line(self, watched: PluginRun) -> None:
        assert watched.get_outcomes("test_clean") == ["passed"]
        watched.assert_failed_with(
            "test_a_wait",
            "1 CUDA synchronisation where none may be, seen live on a test:",
            ">*fake_cuda.stream()",
        )

    def test_other_threads_count_only_on_request(self, watched: PluginRun) -> None:
        assert watched.get_outcomes("test_own_thread") == ["passed"]
        watched.assert_failed_with("test_all_threads", "1 CUDA synchronisation where none may be*")

    def test_fixture_counts_waits_so_far(self, watched: PluginRun) -> None:
        assert watched.get_outcomes("test_of_the_fixture") == ["passed"]


class TestUsage:
    """Test programs in which nothing waits for a GPU, so that the tests need no torch and run in this process."""

    @pytest.fixture
    def run(self, pytester: pytest.Pytester):
        def run_file(source: str, *options: str) -> pytest.RunResult:
            pytester.makepyfile(f"import pytest\n{source}")
            return pytester.runpytest_inprocess(*QUIET, *options)

        return run_file

    @pytest.mark.parametrize(
        ("mark", "message"),
        [
            ("no_cuda_sync(2)", "*no_cuda_sync*takes 0 positional*write @pytest.mark.no_cuda_sync or*"),
            ("max_cuda_syncs", "*max_cuda_syncs*missing 1 required*write @pytest.mark.max_cuda_syncs(2, allow=*"),
            ("max_cuda_syncs('2')", "*'2' is no number of synchronisations*"),
            ("max_cuda_syncs(-1)", "*-1 is no number of synchronisations*"),
            ("no_cuda_sync(allow='engine.*')", "*'engine.*' is no list of globs*"),
            ("no_cuda_sync(allow=['engine.*', 2])", "*2] is no list of globs*"),
            ("no_cuda_sync(allow=['engine.*', ' '])", "*' '] is no list of globs*"),
            ("max_cuda_syncs(True)", "*True is no number of synchronisations*"),
            ("no_cuda_sync(allowed=[])", "*unexpected keyword*allowed*"),
            ("no_cuda_sync(threads='mine')", "*neither 'current' nor 'all'*"),
        ],
    )
    def test_invalid_mark_is_a_usage_error(self, run, mark: str, message: str) -> None:
        result = run(f"@pytest.mark.{mark}\ndef test_step(): ...\n", "--cuda-sync-mode", "dry-run")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([message])
        assert "Traceback" not in result.stderr.str()

    def test_single_checked_test_is_counted(self, run) -> None:
        source = "@pytest.mark.no_cuda_sync\ndef test_step(): ...\ndef test_other(): ...\n"
        result = run(source, "--cuda-sync-mode", "dry-run", "--collect-only")
        result.stdout.fnmatch_lines(["cuda syncs: found by a dry run, as requested, 1 test"])

    def test_unknown_mode_error_lists_the_modes(self, run) -> None:
        result = run("", "--cuda-sync-mode", "wet")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines(["*'wet' is none of auto, live, dry-run, off*"])

    def test_live_mode_without_a_device_error_suggests_other_modes(self, pytester: pytest.Pytester) -> None:
        """The test uses a separate process, as one that has found a GPU keeps it."""
        pytester.makepyfile("def test_step(cuda_syncs): ...\n")
        arguments = ("-m", "pytest", *QUIET, "--cuda-sync-mode", "live")
        (code,) = forks.run_programs(forks.Program(arguments, os.environ | {"CUDA_VISIBLE_DEVICES": ""}, "output.txt"))
        assert code == pytest.ExitCode.USAGE_ERROR
        message = "*live needs a CUDA device, and there is none; use auto or dry-run*"
        pytest.LineMatcher(Path("output.txt").read_text().splitlines()).fnmatch_lines([message])

    def test_ini_file_can_switch_checks_off(self, run, pytester: pytest.Pytester) -> None:
        pytester.makeini("[pytest]\ncuda_sync_mode = off\n")
        result = run("""
@pytest.mark.no_cuda_sync
def test_step(cuda_syncs):
    assert not cuda_syncs.count
    assert cuda_syncs.mode == "off"
""")
        result.assert_outcomes(passed=1)
        result.stdout.fnmatch_lines(["cuda syncs: off, tests that are not checked: 1"])

    def test_markers_option_describes_the_marks(self, pytester: pytest.Pytester) -> None:
        result = pytester.runpytest_inprocess(*QUIET, "--markers")
        result.stdout.fnmatch_lines(["@pytest.mark.no_cuda_sync*", "@pytest.mark.max_cuda_syncs(n*"])


class TestInert:
    def test_unused_plugin_loads_no_heavy_module(self, pytester: pytest.Pytester) -> None:
        pytester.makepyfile("""
            import sys
            def test_nothing():
                heavy = {"torch", "numpy", "msgspec", "rich", "typer", "dcpbench.syncs.live.checked", "dcpbench.syncs.live"}
                assert "dcpbench.syncs.plugin" in sys.modules
                assert not heavy & set(sys.modules)
        """)
        result = pytester.runpytest_subprocess("-p", "no:hypothesispytest", "-p", "no:anyio")
        result.assert_outcomes(passed=1)
        assert "cuda syncs" not in result.stdout.str()

    def test_plugin_import_loads_no_torch(self) -> None:
        code = "import sys, dcpbench.syncs.plugin; print('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout == "False\n"
