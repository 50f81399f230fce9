"""Test `dcpbench syncs run` as a command; processes record on the CPU, where no call waits for a GPU."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from dcpbench.errors import CapacityError
from dcpbench.syncs import run as runs
from dcpbench.syncs.commands import GateOptions, OutputOptions
from dcpbench.syncs.run import Note, Recording
from dcpbench.syncs.sync_report import Coverage, Report, TraceSummary
from tests import forks

ROOT = Path(__file__).parents[2]
MODEL = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())

def train_step():
    return model(torch.ones(2, 4)).sum().item()

def loop(times):
    for _ in range(times):
        train_step()
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a program `training.py` whose processes record without a GPU."""
    monkeypatch.setenv(runs.CPU_VARIABLE, "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "training.py").write_text(MODEL)
    monkeypatch.chdir(folder)
    return folder


def script(folder: Path, text: str, name: str = "script.py") -> str:
    (folder / name).write_text(textwrap.dedent(text))
    return name


def record(
    tmp_path: Path, *command: str, start: Callable[..., int] = forks.run_command, **options: object
) -> tuple[int, dict[str, dict], list[Note]]:
    """Return (exit code, traces by file name, notes) of a program."""
    folder = tmp_path / "traces"
    folder.mkdir()
    code = start([sys.executable, *command], runs.build_environment(folder, Recording(**options)))
    traces = {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}
    return code, traces, runs.read_notes(folder)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, list[Note]]:
    """Return (folder, exit code, notes) of a recording of three steps, which several tests use."""
    home = tmp_path_factory.mktemp("three")
    (home / "training.py").write_text(MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(runs.CPU_VARIABLE, "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        code, _, notes = record(home, str(home / script(home, "import training; training.loop(3)")))
    return home / "traces", code, notes


@pytest.fixture
def trace_of_three(three: tuple[Path, int, list[Note]]) -> dict:
    """Return the trace of the three steps."""
    (path,) = three[0].glob("*.json")
    return json.loads(path.read_text())


def find_named(trace: dict, name: str) -> list[dict]:
    return [event for event in trace["traceEvents"] if event.get("name", "").startswith(name)]


def list_steps(trace: dict) -> list[int]:
    """Return the numbers of marked steps in order of time."""
    marks = [event for event in find_named(trace, "ProfilerStep#") if event["ph"] == "X"]
    return [int(e["name"].partition("#")[2]) for e in sorted(marks, key=lambda e: e["ts"])]


class TestSteps:
    @pytest.mark.long
    def test_program_without_steps_is_recorded_whole_with_stacks(
        self, three: tuple[Path, int, list[Note]], trace_of_three: dict
    ) -> None:
        _, code, notes = three
        assert code == 0
        assert list_steps(trace_of_three) == [0, 1, 2]
        assert len(find_named(trace_of_three, "aten::item")) == 3
        events = trace_of_three["traceEvents"]
        assert [e for e in events if "train_step" in e["name"] and e["cat"] == "python_function"]
        assert (notes[0].steps, notes[0].problems) == (3, [])

    def test_step_lasts_from_one_call_of_the_model_to_the_next(self, trace_of_three: dict) -> None:
        """The step includes `.item()` after the model's call; inner modules are no steps."""
        items = sorted(event["ts"] for event in find_named(trace_of_three, "aten::item"))
        steps = [e for e in find_named(trace_of_three, "ProfilerStep#") if e["ph"] == "X"]
        marks = sorted((e["ts"], e["ts"] + e["dur"]) for e in steps)
        assert [start < item < end for item, (start, end) in zip(items, marks, strict=True)] == [True] * 3

    def test_recording_covers_only_the_steps_after_warm_up(self, tmp_path: Path, program: Path) -> None:
        """Steps 3 and 4 of 0 … 5 follow three warm-up steps; the program runs to its end."""
        name = script(program, "import training; training.loop(6); print('end')")
        code, traces, _ = record(tmp_path, name, warmup=3, steps=2)
        (trace,) = traces.values()
        assert code == 0
        assert list_steps(trace) == [3, 4]
        assert len(find_named(trace, "aten::item")) == 2

    @pytest.mark.parametrize("step", ["training:train_step", "training:Trainer.step", "training:Trainer.shared"])
    def test_named_function_is_a_step(self, tmp_path: Path, program: Path, step: str) -> None:
        """The function is imported by name before it can be patched; methods and static methods work too."""
        (program / "training.py").write_text(
            MODEL
            + "\nclass Trainer:\n    def step(self): return train_step()\n"
            + "    @staticmethod\n    def shared(): return Trainer().step()\n"
        )
        name = script(program, "from training import Trainer, train_step\nfor _ in range(4): Trainer.shared()")
        _, traces, notes = record(tmp_path, name, warmup=1, steps=2, step=step)
        (trace,) = traces.values()
        assert list_steps(trace) == [1, 2]
        assert notes[0].problems == []

    def test_function_of_the_script_is_a_step_after_the_first_model_call(self, tmp_path: Path, program: Path) -> None:
        """No event marks the definition of a script's functions, so the first call is not counted."""
        text = "import training\ndef step(): training.train_step()\nfor _ in range(4): step()"
        _, traces, _ = record(tmp_path, script(program, text), step="__main__:step")
        (trace,) = traces.values()
        assert list_steps(trace) == [0, 1, 2]

    def test_coroutine_is_a_step(self, tmp_path: Path, program: Path) -> None:
        (program / "training.py").write_text(MODEL + "\nasync def serve(): return train_step()\n")
        text = "import asyncio, training\nfor _ in range(3): asyncio.run(training.serve())"
        _, traces, _ = record(tmp_path, script(program, text), warmup=1, steps=1, step="training:serve")
        (trace,) = traces.values()
        assert (list_steps(trace), len(find_named(trace, "aten::item"))) == ([1], 1)

    def test_steps_of_other_threads_are_recorded(self, tmp_path: Path, program: Path) -> None:
        text = "import threading, training\nt = threading.Thread(target=training.loop, args=(3,)); t.start(); t.join()"
        _, traces, _ = record(tmp_path, script(program, text))
        (trace,) = traces.values()
        assert len(find_named(trace, "aten::item")) == 3


class TestProcesses:
    @pytest.mark.distributed
    @pytest.mark.long
    def test_every_rank_of_torchrun_is_recorded_with_its_rank(
        self, tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        name = script(
            program,
            """
            import torch, torch.distributed as dist, training
            dist.init_process_group("gloo")
            training.loop(2)
            dist.all_reduce(torch.ones(1))
            dist.destroy_process_group()
        """,
        )
        code, traces, _ = record(
            tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", name, steps=2
        )
        assert code == 0
        ranks = {trace["distributedInfo"]["rank"]: list_steps(trace) for trace in traces.values()}
        assert ranks == {0: [0, 1], 1: [0, 1]}

    @pytest.mark.long
    def test_spawned_child_is_recorded(self, tmp_path: Path, program: Path) -> None:
        name = script(
            program,
            """
            import multiprocessing, training
            if __name__ == "__main__":
                child = multiprocessing.get_context("spawn").Process(target=training.loop, args=(3,))
                child.start(); child.join()
        """,
        )
        _, traces, _ = record(tmp_path, name)
        assert sorted(list_steps(trace) for trace in traces.values()) == [[], [0, 1, 2]]

    def test_forked_child_of_a_recorded_process_is_not_recorded(self, tmp_path: Path, program: Path) -> None:
        """Workers of a DataLoader are such children; they cannot use CUDA either."""
        name = script(
            program,
            """
            import multiprocessing, training
            training.loop(1)
            child = multiprocessing.get_context("fork").Process(target=training.loop, args=(3,))
            child.start(); child.join(); assert child.exitcode == 0
            training.loop(1)
        """,
        )
        code, traces, notes = record(tmp_path, name)
        assert code == 0
        assert [list_steps(trace) for trace in traces.values()] == [[0, 1]]
        assert [note.cuda for note in notes] == [True]

    @pytest.mark.parametrize("end", ["", "os._exit(0)"], ids=["returns", "_exit"])
    def test_core_forked_before_the_first_step_is_recorded_with_its_name(
        self, tmp_path: Path, program: Path, end: str
    ) -> None:
        name = script(
            program,
            f"""
            import multiprocessing, os, training

            def core():
                training.loop(4)
                {end}

            child = multiprocessing.get_context("fork").Process(target=core, name="EngineCore DP0")
            child.start(); child.join(); assert child.exitcode == 0
        """,
        )
        code, traces, notes = record(tmp_path, name, warmup=1)
        [(trace, events)] = traces.items()
        assert (code, list_steps(events)) == (0, [1, 2, 3])
        assert trace in {f"EngineCore_DP0-pid{note.pid}.json" for note in notes}
        assert sorted(note.role for note in notes) == ["", "EngineCore DP0"]

    def test_sigterm_writes_the_trace_and_still_ends_the_process(self, tmp_path: Path, program: Path) -> None:
        """torchrun sends SIGTERM to the other ranks after one has failed."""
        text = "import os, signal, training\ntraining.loop(2)\nos.kill(os.getpid(), signal.SIGTERM)\nsignal.pause()"
        code, traces, _ = record(tmp_path, script(program, text))
        assert code == -signal.SIGTERM
        assert [list_steps(trace) for trace in traces.values()] == [[0, 1]]

    def test_program_without_torch_leaves_no_files(self, tmp_path: Path, program: Path) -> None:
        code, traces, notes = record(tmp_path, script(program, "print(1)"), start=runs.run_process)
        assert (code, traces, notes) == (0, {}, [])
        assert "imported torch" in runs.explain_notes(notes, Recording())[0]

    def test_process_without_cuda_leaves_a_note_and_no_trace(
        self, tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """torchrun's own process is an example."""
        monkeypatch.delenv(runs.CPU_VARIABLE)
        _, traces, notes = record(tmp_path, script(program, "import training; training.loop(2)"))
        assert traces == {}
        assert [(note.cuda, note.trace, note.steps) for note in notes] == [(False, "", 2)]
        assert "used CUDA" in runs.explain_notes(notes, Recording())[0]
        assert program.exists()


class TestUnchanged:
    @pytest.fixture(scope="class")
    @staticmethod
    def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict, Path]:
        """Run a program with its own sitecustomize; return its result, its view of Python, and the folder of traces."""
        home = tmp_path_factory.mktemp("home")
        (home / "training.py").write_text(MODEL)
        (home / "sitecustomize.py").write_text("import os\nos.environ['CUSTOM'] = __file__\n")
        (home / "traces").mkdir()
        script(
            home,
            """
            import json, os, sitecustomize, sys, torch, training
            seen = {
                "path": sys.path, "finders": [type(finder).__module__ for finder in sys.meta_path],
                "loader": sorted(vars(torch.__spec__.loader)),
                "custom": [os.environ["CUSTOM"], sitecustomize.__file__],
            }
            with open("seen.json", "w") as file: json.dump(seen, file)
            training.loop(1)
            print(sys.stdin.read())
            print("no", file=sys.stderr)
            sys.exit(7)
        """,
        )
        code = (
            "from pathlib import Path; import sys; from dcpbench.syncs import run; "
            "sys.exit(run.run_process([sys.executable, 'script.py'], run.build_environment(Path('traces'), run.Recording())))"
        )
        env = os.environ | {runs.CPU_VARIABLE: "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{home}{os.pathsep}{ROOT}"}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=home, env=env, input="hello", capture_output=True, text=True, check=False
        )
        return done, json.loads((home / "seen.json").read_text()), home / "traces"

    @pytest.mark.long
    def test_recorded_program_keeps_its_input_output_and_exit_code(self, ended) -> None:
        done, _, traces = ended
        assert (done.returncode, done.stdout, done.stderr) == (7, "hello\n", "no\n")
        assert len(list(traces.glob("*.json"))) == 1, "a failing program is recorded too"

    def test_recording_leaves_sys_path_modules_and_loaders_unchanged(self, ended) -> None:
        _, seen, _ = ended
        assert seen["path"]
        assert not [path for path in seen["path"] if "recorder" in path]
        assert not [module for module in seen["finders"] if "recorder" in module]
        assert "exec_module" not in seen["loader"]

    def test_sitecustomize_of_the_program_runs(self, ended) -> None:
        _, seen, traces = ended
        name, imported = seen["custom"]
        assert name == imported == str(traces.parent / "sitecustomize.py")
        assert len(list(traces.glob("*.json"))) == 1

    def test_module_calls_are_restored_after_recording(self, tmp_path: Path, program: Path) -> None:
        text = """
            import torch, training
            call = torch.nn.Module.__call__
            training.loop(1); assert "_dcpbench_enter" in call.__code__.co_names
            training.loop(2); assert "_dcpbench_enter" not in call.__code__.co_names
            assert torch.nn.Module.__call__ is call and training.train_step() == training.train_step()
        """
        code, _, notes = record(tmp_path, script(program, text), steps=1)
        assert (code, notes[0].problems) == (0, [])

    @pytest.mark.parametrize("profiler", ["torch.profiler.profile()", "torch.autograd.profiler.profile()"])
    def test_profiler_of_the_program_takes_precedence(self, tmp_path: Path, program: Path, profiler: str) -> None:
        """The trace up to then is kept, and the report must not claim to be complete."""
        text = f"""
            import torch, training
            training.loop(2)
            with {profiler} as mine:
                training.loop(1)
            assert [event for event in mine.key_averages() if event.key == "aten::item"][0].count == 1
            training.loop(1)
        """
        code, traces, notes = record(tmp_path, script(program, text))
        assert code == 0
        assert [list_steps(trace) for trace in traces.values()] == [[0, 1]]
        assert notes[0].cut
        assert "profiler itself" in notes[0].problems[0]

    def test_recording_waits_for_a_running_profiler(self, tmp_path: Path, program: Path) -> None:
        text = """
            import torch, training
            with torch.profiler.profile():
                training.loop(3)
            training.loop(2)
        """
        code, traces, _ = record(tmp_path, script(program, text), warmup=1, steps=4)
        assert code == 0
        assert [list_steps(trace) for trace in traces.values()] == [[3, 4]]


class TestWhole:
    """Test the command from its options to its exit code, with a scan that returns prepared results."""

    @pytest.fixture
    def scanned(self, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
        """Return the list of scanned paths; each is a clean trace."""
        from dcpbench.syncs import scan as home

        seen = []

        def scan(paths: list[Path], **_: object) -> Report:
            seen.extend(paths)
            coverage = Coverage(detector="scan", gpu_events=1, runtime_events=1)
            return Report(traces=[TraceSummary(path=str(p), steps=2, coverage=coverage) for p in paths])

        monkeypatch.setattr(home, "scan_traces", scan)
        return seen

    @pytest.fixture
    def forked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Start the program without a delay."""
        monkeypatch.setattr(runs, "run_process", forks.run_command)

    @pytest.fixture
    def replayed(self, three: tuple[Path, int, list[Note]]) -> str:
        """Return the start of a script that copies the files of a recorded process."""
        return (
            f"import json, os, shutil\nto = json.loads(os.environ[{runs.VARIABLE!r}])['folder']\n"
            f"shutil.copytree({str(three[0])!r}, to, dirs_exist_ok=True)\n"
        )

    @staticmethod
    def code_of(*command: str, **options: object) -> int:
        return runs.run_program([sys.executable, *command], Recording(**options), GateOptions(), OutputOptions())

    @pytest.mark.usefixtures("forked")
    def test_clean_program_exits_with_0_and_its_traces_are_deleted(self, program: Path, scanned: list[Path]) -> None:
        assert self.code_of(script(program, "import training; training.loop(2)")) == 0
        assert len(scanned) == 1
        assert not scanned[0].exists()

    def test_failed_program_never_exits_with_0(
        self, program: Path, replayed: str, scanned: list[Path], capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert self.code_of(script(program, f"{replayed}raise SystemExit(9)")) == 4
        assert len(scanned) == 1
        shown = capfd.readouterr()
        assert "ended with exit code 9, so this command ends with exit code 4" in shown.err
        assert "ended with exit code 9, so the rest of its run is not known" in shown.out
        assert "Clean" not in shown.out

    def test_program_without_a_trace_is_not_clean(self, program: Path, scanned: list[Path]) -> None:
        assert self.code_of(script(program, "pass")) == 3
        assert scanned == []

    @pytest.mark.usefixtures("forked")
    def test_incomplete_recording_is_not_clean(self, program: Path, scanned: list[Path]) -> None:
        text = "import torch, training\ntraining.loop(2)\nwith torch.profiler.profile(): pass"
        assert self.code_of(script(program, text)) == 3
        assert scanned

    @pytest.mark.usefixtures("scanned")
    def test_python_process_without_the_recorder_is_named_and_not_clean(
        self, program: Path, replayed: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        start = "import subprocess, sys\nsubprocess.run([sys.executable, {}'-c', 'pass'], check=True)"
        assert self.code_of(script(program, replayed + start.format(""))) == 0
        assert self.code_of(script(program, replayed + start.format("'-I', "))) == 3
        assert f"{sys.executable} -I -c pass did not load the recorder" in " ".join(capfd.readouterr().out.split())

    def test_kept_traces_have_no_notes(self, tmp_path: Path, program: Path, replayed: str, scanned: list[Path]) -> None:
        keep = tmp_path / "kept" / "here"
        assert self.code_of(script(program, replayed), keep=keep) == 0
        assert [path.suffix for path in keep.iterdir()] == [".json"]
        assert scanned[0].parent == keep

    def test_missing_gpu_error_has_a_suggestion(self, program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(runs.CPU_VARIABLE)
        monkeypatch.setattr(runs, "has_gpu", lambda: False)
        with pytest.raises(CapacityError, match="dcpbench syncs dry-run -- ") as raised:
            self.code_of(script(program, "pass"))
        assert raised.value.exit_code == 3

    @pytest.mark.long
    def test_ctrl_c_reaches_the_program_and_exits_with_130(self, program: Path) -> None:
        """The terminal sends SIGINT to every process of the group, and the trace up to then is scanned.

        The test repeats the signal, because a program may miss one just before it sleeps.
        """
        name = script(
            program, "import time, training\ntraining.loop(1)\nprint('up', flush=True)\nwhile True: time.sleep(0.1)"
        )
        command = [sys.executable, "-m", "dcpbench.cli", "syncs", "run", "--format", "json", "--", sys.executable, name]
        code = f"import sys; sys.argv[1:] = {command[3:]!r}; from dcpbench.cli import main; main()"
        running = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        assert running.stdout is not None
        assert running.stdout.readline() == b"up\n"
        for _ in range(3):
            os.killpg(running.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                out, err = running.communicate(timeout=100)
                break
        else:
            os.killpg(running.pid, signal.SIGKILL)
            pytest.fail(f"it goes on: {running.communicate()}")
        assert running.returncode == 130, err.decode()
        assert json.loads(out)["traces"]
