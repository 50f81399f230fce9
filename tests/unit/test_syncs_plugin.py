"""The pytest plugin, in pytest runs of its own: by a dry run, and live where fake_cuda stands for a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

IMPORTS = "import pytest, torch, unittest\n"
LIVE = """
import pytest, sys
sys.path.insert(0, {root!r})
from dcpbench.syncs import live, checked
@pytest.fixture(autouse=True, scope="session")
def _gpu():
    live.has_cuda = lambda: True
checked.resolve = lambda mode: checked.Mode("off" if mode == "off" else "live", "seen live on a test")
"""
"""conftest.py that makes the plugin watch; the callbacks are fired by the tests themselves."""


@pytest.fixture
def run(pytester: pytest.Pytester):
    """Runs a test file in a pytest of its own, with strict marks."""

    def run_file(source: str, *options: str, conftest: str = "") -> pytest.RunResult:
        if conftest:
            pytester.makeconftest(conftest)
        pytester.makepyfile(IMPORTS + source)
        command = ["-p", "no:cacheprovider", "-p", "no:randomly", "--strict-markers", "--strict-config", *options]
        return pytester.runpytest_subprocess(*command)

    return run_file


@pytest.fixture
def dry(run):
    """The same by a dry run, on every machine."""
    return lambda source, *options: run(source, "--cuda-sync-mode", "dry-run", *options)


class TestDryRun:
    def test_a_sync_fails_the_test_and_shows_its_line(self, dry) -> None:
        result = dry("""
@pytest.mark.no_cuda_sync
def test_step():
    lengths = torch.ones(4, device="cuda")
    if lengths.sum() > 3:
        pass
""")
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines([
            "cuda syncs: found by a dry run, as asked for, 1 test",
            "1 CUDA synchronisation where none may be, found by a dry run, as asked for:",
            "*test_a_sync_fails*.py:6 in test_step: A tensor's value is read into Python [[]SYNC001[]]*",
            ">     6 |     if lengths.sum() > 3:",
            "  why: *",
            "  fix: Take the value from a host-side mirror of it*",
        ])  # fmt: skip

    def test_a_clean_test_passes(self, dry) -> None:
        dry("""
@pytest.mark.no_cuda_sync
def test_step():
    torch.ones(4, device="cuda").masked_fill_(torch.ones(4, device="cuda") > 0, 0.0)
""").assert_outcomes(passed=1)

    def test_a_number_of_syncs_may_be(self, dry) -> None:
        result = dry("""
@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.max_cuda_syncs(2)
def test_step(times):
    for _ in range(times):
        torch.ones(1, device="cuda").item()
""")
        result.assert_outcomes(passed=1, failed=1)
        result.stdout.fnmatch_lines(["3 CUDA synchronisations where at most 2 may be*", "*, 3 times"])

    def test_fixtures_may_synchronise(self, dry) -> None:
        dry("""
@pytest.fixture
def lengths():
    lengths = torch.ones(4, device="cuda")
    assert lengths.tolist() == [1.0] * 4
    yield lengths
    lengths.cpu()

@pytest.mark.no_cuda_sync
def test_step(lengths):
    lengths + 1
""").assert_outcomes(passed=1)

    def test_the_fixture_counts_for_the_test_to_judge(self, dry) -> None:
        dry("""
def test_step(cuda_syncs):
    assert cuda_syncs.count == 0
    torch.ones(4, device="cuda").cpu()
    assert [s.rule for s in cuda_syncs.syncs] == ["SYNC003"]
    assert "test_step" in cuda_syncs.text()
    assert cuda_syncs.report().totals.syncs == 1
    assert cuda_syncs.mode == "dry-run"
""").assert_outcomes(passed=1)

    def test_functions_may_be_allowed_by_globs(self, dry) -> None:
        dry("""
def sample(x):
    return x.argmax().item()

@pytest.mark.no_cuda_sync(allow=["sam*"])
def test_allowed():
    sample(torch.ones(4, device="cuda"))

@pytest.mark.no_cuda_sync(allow=["other.sample"])
def test_not_meant():
    sample(torch.ones(4, device="cuda"))
""").assert_outcomes(passed=1, failed=1)

    def test_a_region_with_a_reason_may_synchronise(self, dry) -> None:
        dry("""
import dcpbench.syncs

@pytest.mark.no_cuda_sync
def test_step():
    with dcpbench.syncs.allow("the batch is over"):
        torch.ones(4, device="cuda").cpu()
""").assert_outcomes(passed=1)

    def test_a_mark_holds_for_a_class_and_the_tests_own_comes_first(self, dry) -> None:
        dry("""
@pytest.mark.no_cuda_sync
class TestStep:
    def test_strict(self):
        torch.ones(1, device="cuda").item()

    @pytest.mark.max_cuda_syncs(1)
    def test_own(self):
        torch.ones(1, device="cuda").item()
""").assert_outcomes(passed=1, failed=1)

    def test_methods_of_unittest_are_checked_without_their_set_up(self, dry) -> None:
        result = dry("""
@pytest.mark.no_cuda_sync
class Step(unittest.TestCase):
    def setUp(self):
        self.x = torch.ones(1, device="cuda")
        self.x.item()

    def tearDown(self):
        self.x.item()

    def test_clean(self):
        self.x + 1

    def test_sync(self):
        self.x.item()

@pytest.mark.no_cuda_sync
class Served(unittest.IsolatedAsyncioTestCase):
    async def test_sync_in_a_coroutine(self):
        torch.ones(1, device="cuda").item()
""")
        result.assert_outcomes(passed=1, failed=2)
        result.stdout.fnmatch_lines(["*in test_sync: *", "*in test_sync_in_a_coroutine: *"])

    def test_a_test_that_fails_by_itself_says_so(self, dry) -> None:
        result = dry("""
@pytest.mark.no_cuda_sync
def test_step():
    torch.ones(1, device="cuda").item()
    assert 1 == 2
""")
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(["*assert 1 == 2*"])

    def test_an_expected_failure_and_a_skip_stay_what_they_are(self, dry) -> None:
        dry("""
@pytest.mark.no_cuda_sync
@pytest.mark.xfail(strict=True)
def test_known():
    torch.ones(1, device="cuda").item()

@pytest.mark.no_cuda_sync
@pytest.mark.skip
def test_skipped(): ...
""").assert_outcomes(xfailed=1, skipped=1)

    def test_a_test_that_never_touched_the_gpu_is_named(self, dry) -> None:
        """It passes, and has not been checked."""
        result = dry("""
@pytest.mark.no_cuda_sync
def test_on_the_host():
    torch.ones(1).item()
""")
        result.assert_outcomes(passed=1)
        result.stdout.fnmatch_lines(["*put nothing on the virtual GPU*", "  *::test_on_the_host"])

    def test_the_next_test_is_not_in_the_dry_run(self, dry) -> None:
        dry("""
before = torch.cuda.is_available()

@pytest.mark.no_cuda_sync
def test_dry():
    assert torch.cuda.is_available()

def test_after():
    assert torch.cuda.is_available() == before
""").assert_outcomes(passed=2)

    def test_workers_of_xdist_check_as_well(self, dry) -> None:
        result = dry("""
@pytest.mark.parametrize("number", range(4))
@pytest.mark.no_cuda_sync
def test_step(number):
    x = torch.ones(1, device="cuda")
    if number % 2:
        x.item()
""", "-n", "2")  # fmt: skip
        result.assert_outcomes(passed=2, failed=2)


class TestLive:
    @staticmethod
    def conftest() -> str:
        return LIVE.format(root=str(Path(__file__).parents[2]))

    def test_a_wait_fails_the_test_and_shows_its_line(self, run) -> None:
        result = run("""
from tests.unit import fake_cuda

@pytest.fixture
def noisy():
    fake_cuda.device()
    yield
    fake_cuda.device()

@pytest.mark.no_cuda_sync
def test_step(noisy):
    fake_cuda.stream()

@pytest.mark.no_cuda_sync
def test_clean(noisy): ...
""", conftest=self.conftest())  # fmt: skip
        result.assert_outcomes(passed=1, failed=1)
        result.stdout.fnmatch_lines(
            ["1 CUDA synchronisation where none may be, seen live on a test:", ">*fake_cuda.stream()"]
        )

    def test_other_threads_count_only_on_request(self, run) -> None:
        result = run("""
import threading
from tests.unit import fake_cuda

def in_a_thread():
    thread = threading.Thread(target=fake_cuda.stream)
    thread.start()
    thread.join()

@pytest.mark.no_cuda_sync
def test_own(): in_a_thread()

@pytest.mark.no_cuda_sync(threads="all")
def test_all(): in_a_thread()
""", conftest=self.conftest())  # fmt: skip
        result.assert_outcomes(passed=1, failed=1)

    def test_the_fixture_sees_what_has_happened_so_far(self, run) -> None:
        run("""
from tests.unit import fake_cuda

def test_step(cuda_syncs):
    fake_cuda.stream()
    assert cuda_syncs.count == 1
    fake_cuda.event()
    assert [s.rule for s in cuda_syncs.syncs] == ["SYNC006", "SYNC007"]
    assert cuda_syncs.report().traces[0].coverage.detector == "live"
""", conftest=self.conftest()).assert_outcomes(passed=1)  # fmt: skip


class TestUsage:
    @pytest.mark.parametrize(
        ("mark", "says"),
        [
            ("no_cuda_sync(2)", "*no_cuda_sync*takes 0 positional*write @pytest.mark.no_cuda_sync or*"),
            ("max_cuda_syncs", "*max_cuda_syncs*missing 1 required*write @pytest.mark.max_cuda_syncs(2)*"),
            ("max_cuda_syncs('2')", "*'2' is no number of synchronisations*"),
            ("max_cuda_syncs(-1)", "*-1 is no number of synchronisations*"),
            ("no_cuda_sync(allow='engine.*')", "*'engine.*' is no list of globs*"),
            ("no_cuda_sync(allowed=[])", "*unexpected keyword*allowed*"),
            ("no_cuda_sync(threads='mine')", "*neither 'current' nor 'all'*"),
        ],
    )
    def test_a_wrong_mark_ends_the_run_with_a_sentence(self, dry, mark: str, says: str) -> None:
        result = dry(f"@pytest.mark.{mark}\ndef test_step(): ...\n")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([says])
        assert "Traceback" not in result.stderr.str()

    def test_a_mode_that_is_none_lists_those_there_are(self, run) -> None:
        result = run("", "--cuda-sync-mode", "wet")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines(["*'wet' is none of auto, live, dry-run, off*"])

    def test_live_without_a_device_says_what_to_use(self, run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        result = run("def test_step(cuda_syncs): ...\n", "--cuda-sync-mode", "live")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines(["*live needs a CUDA device, and there is none; use auto or dry-run*"])

    def test_the_ini_file_may_switch_it_off(self, run, pytester: pytest.Pytester) -> None:
        pytester.makeini("[pytest]\ncuda_sync_mode = off\n")
        result = run("""
@pytest.mark.no_cuda_sync
def test_step(cuda_syncs):
    assert not cuda_syncs.count
    assert cuda_syncs.mode == "off"
""")
        result.assert_outcomes(passed=1)
        result.stdout.fnmatch_lines(["cuda syncs: off, tests that are not checked: 1"])

    def test_the_marks_explain_themselves(self, pytester: pytest.Pytester) -> None:
        result = pytester.runpytest_subprocess("--markers")
        result.stdout.fnmatch_lines(["@pytest.mark.no_cuda_sync*", "@pytest.mark.max_cuda_syncs(n*"])


class TestInert:
    def test_who_does_not_use_it_loads_nothing_and_reads_nothing(self, pytester: pytest.Pytester) -> None:
        pytester.makepyfile("""
            import sys
            def test_nothing():
                heavy = {"torch", "numpy", "msgspec", "rich", "typer", "dcpbench.syncs.checked", "dcpbench.syncs.live"}
                assert "dcpbench.syncs.plugin" in sys.modules
                assert not heavy & set(sys.modules)
        """)  # fmt: skip
        result = pytester.runpytest_subprocess("-p", "no:hypothesispytest", "-p", "no:anyio")
        result.assert_outcomes(passed=1)
        assert "cuda syncs" not in result.stdout.str()

    def test_importing_it_imports_no_torch(self) -> None:
        code = "import sys, dcpbench.syncs.plugin; print('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout == "False\n"
