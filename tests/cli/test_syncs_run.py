"""`dcpbench syncs run` from the outside. Processes record on the CPU here, where nothing can wait for a GPU."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest

from dcpbench.errors import CapacityError, OutputError, UsageError
from dcpbench.syncs import run as runs
from dcpbench.syncs.commands import GateOptions, Out
from dcpbench.syncs.model import Coverage, Example, Report, Site, TraceSummary
from dcpbench.syncs.run import Note, Recording

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
    """Folder of a program `training.py`, whose processes record without a GPU."""
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


def record(tmp_path: Path, *command: str, **options: object) -> tuple[int, dict[str, dict], list[Note]]:
    """(exit code, traces by file name, notes) of a program."""
    folder = tmp_path / "traces"
    folder.mkdir()
    code = runs.start([sys.executable, *command], folder, Recording(**options))
    traces = {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}
    return code, traces, runs.notes_in(folder)


def named(trace: dict, name: str) -> list[dict]:
    return [event for event in trace["traceEvents"] if event.get("name", "").startswith(name)]


def steps_of(trace: dict) -> list[int]:
    """Numbers of the marked steps, in order of time."""
    marks = [event for event in named(trace, "ProfilerStep#") if event["ph"] == "X"]
    return [int(e["name"].partition("#")[2]) for e in sorted(marks, key=lambda e: e["ts"])]


class TestSteps:
    def test_without_steps_all_is_recorded_with_its_stacks(self, tmp_path: Path, program: Path) -> None:
        name = script(program, "import training; training.loop(3)")
        code, traces, notes = record(tmp_path, name)
        (trace,) = traces.values()
        assert code == 0
        assert steps_of(trace) == [0, 1, 2]
        assert len(named(trace, "aten::item")) == 3
        assert [e for e in trace["traceEvents"] if "train_step" in e["name"] and e["cat"] == "python_function"]
        assert (notes[0].steps, notes[0].problems) == (3, [])

    def test_a_step_reaches_from_one_call_of_the_model_to_the_next(self, tmp_path: Path, program: Path) -> None:
        """So that `.item()` after the model lies in it; inner modules are no steps."""
        _, traces, _ = record(tmp_path, script(program, "import training; training.loop(3)"))
        (trace,) = traces.values()
        items = sorted(event["ts"] for event in named(trace, "aten::item"))
        marks = sorted((e["ts"], e["ts"] + e["dur"]) for e in named(trace, "ProfilerStep#") if e["ph"] == "X")
        assert [start < item < end for item, (start, end) in zip(items, marks, strict=True)] == [True] * 3

    def test_warm_up_is_left_out_and_recording_ends_after_the_steps(self, tmp_path: Path, program: Path) -> None:
        """Of steps 0 … 5 the two after the first three: 3 and 4. The program runs to its end."""
        name = script(program, "import training; training.loop(6); print('end')")
        code, traces, _ = record(tmp_path, name, warmup=3, steps=2)
        (trace,) = traces.values()
        assert code == 0
        assert steps_of(trace) == [3, 4]
        assert len(named(trace, "aten::item")) == 2

    @pytest.mark.parametrize("step", ["training:train_step", "training:Trainer.step", "training:Trainer.shared"])
    def test_a_named_function_is_a_step(self, tmp_path: Path, program: Path, step: str) -> None:
        """Imported by name before it can be marked, as programs do; a method and a static one, too."""
        (program / "training.py").write_text(
            MODEL
            + "\nclass Trainer:\n    def step(self): return train_step()\n"
            + "    @staticmethod\n    def shared(): return Trainer().step()\n"
        )
        name = script(program, "from training import Trainer, train_step\nfor _ in range(4): Trainer.shared()")
        _, traces, notes = record(tmp_path, name, warmup=1, steps=2, step=step)
        (trace,) = traces.values()
        assert steps_of(trace) == [1, 2]
        assert notes[0].problems == []

    def test_a_function_of_the_script_itself_is_a_step_once_the_model_has_run(
        self, tmp_path: Path, program: Path
    ) -> None:
        """Nothing tells when a script has defined its functions, so the first call goes uncounted."""
        text = "import training\ndef step(): training.train_step()\nfor _ in range(4): step()"
        _, traces, _ = record(tmp_path, script(program, text), step="__main__:step")
        (trace,) = traces.values()
        assert steps_of(trace) == [0, 1, 2]

    def test_a_coroutine_is_a_step(self, tmp_path: Path, program: Path) -> None:
        (program / "training.py").write_text(MODEL + "\nasync def serve(): return train_step()\n")
        text = "import asyncio, training\nfor _ in range(3): asyncio.run(training.serve())"
        _, traces, _ = record(tmp_path, script(program, text), warmup=1, steps=1, step="training:serve")
        (trace,) = traces.values()
        assert (steps_of(trace), len(named(trace, "aten::item"))) == ([1], 1)

    def test_steps_of_another_thread_are_recorded(self, tmp_path: Path, program: Path) -> None:
        text = "import threading, training\nt = threading.Thread(target=training.loop, args=(3,)); t.start(); t.join()"
        _, traces, _ = record(tmp_path, script(program, text))
        (trace,) = traces.values()
        assert len(named(trace, "aten::item")) == 3


class TestProcesses:
    @pytest.mark.distributed
    def test_every_rank_of_torchrun_is_recorded_with_its_number(
        self, tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        name = script(program, """
            import torch, torch.distributed as dist, training
            dist.init_process_group("gloo")
            training.loop(2)
            dist.all_reduce(torch.ones(1))
            dist.destroy_process_group()
        """)  # fmt: skip
        code, traces, _ = record(
            tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", name, steps=2
        )
        assert code == 0
        ranks = {trace["distributedInfo"]["rank"]: steps_of(trace) for trace in traces.values()}
        assert ranks == {0: [0, 1], 1: [0, 1]}

    def test_a_spawned_child_is_recorded(self, tmp_path: Path, program: Path) -> None:
        name = script(program, """
            import multiprocessing, training
            if __name__ == "__main__":
                child = multiprocessing.get_context("spawn").Process(target=training.loop, args=(3,))
                child.start(); child.join()
        """)  # fmt: skip
        _, traces, _ = record(tmp_path, name)
        assert sorted(steps_of(trace) for trace in traces.values()) == [[], [0, 1, 2]]

    def test_a_forked_child_of_a_recorded_process_goes_unrecorded(self, tmp_path: Path, program: Path) -> None:
        """As a DataLoader's workers do; they could not use CUDA either."""
        name = script(program, """
            import multiprocessing, training
            training.loop(1)
            child = multiprocessing.get_context("fork").Process(target=training.loop, args=(3,))
            child.start(); child.join(); assert child.exitcode == 0
            training.loop(1)
        """)  # fmt: skip
        code, traces, notes = record(tmp_path, name)
        assert code == 0
        assert [steps_of(trace) for trace in traces.values()] == [[0, 1]]
        assert [note.cuda for note in notes] == [True]

    def test_sigterm_writes_the_trace_and_still_ends_the_process(self, tmp_path: Path, program: Path) -> None:
        """As torchrun does with the other ranks when one has failed."""
        text = (
            "import os, signal, time, training\ntraining.loop(2)\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)"
        )
        code, traces, _ = record(tmp_path, script(program, text))
        assert code == -signal.SIGTERM
        assert [steps_of(trace) for trace in traces.values()] == [[0, 1]]

    def test_a_program_without_torch_leaves_nothing(self, tmp_path: Path, program: Path) -> None:
        code, traces, notes = record(tmp_path, script(program, "print(1)"))
        assert (code, traces, notes) == (0, {}, [])
        assert "imported torch" in runs.explain(notes, Recording())[0]

    def test_without_cuda_there_is_a_note_and_no_trace(
        self, tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As for torchrun's own process."""
        monkeypatch.delenv(runs.CPU_VARIABLE)
        _, traces, notes = record(tmp_path, script(program, "import training; training.loop(2)"))
        assert traces == {}
        assert [(note.cuda, note.trace, note.steps) for note in notes] == [(False, "", 2)]
        assert "used CUDA" in runs.explain(notes, Recording())[0]
        assert program.exists()


class TestUnchanged:
    def test_input_output_and_exit_code_are_the_programs_own(self, tmp_path: Path, program: Path) -> None:
        text = (
            "import sys, training\ntraining.loop(1)\nprint(sys.stdin.read())\nprint('no', file=sys.stderr)\nsys.exit(7)"
        )
        name = script(program, text)
        code = (
            "from pathlib import Path; import sys; from dcpbench.syncs import run; "
            f"sys.exit(run.start([sys.executable, {name!r}], Path({str(tmp_path)!r}), run.Recording()))"
        )
        done = subprocess.run([sys.executable, "-c", code], input="hello", capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (7, "hello\n", "no\n")

    def test_the_path_the_modules_and_their_loaders_are_as_without(self, tmp_path: Path, program: Path) -> None:
        text = """
            import sys, torch
            assert not [p for p in sys.path if "recorder" in p], sys.path
            assert not [f for f in sys.meta_path if "recorder" in type(f).__module__], sys.meta_path
            assert "exec_module" not in vars(torch.__spec__.loader)
        """
        assert record(tmp_path, script(program, text))[0] == 0

    def test_a_sitecustomize_of_the_programs_own_runs_too(
        self, tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        home = tmp_path / "home"
        home.mkdir()
        (home / "sitecustomize.py").write_text("import os\nos.environ['CUSTOM'] = __file__\n")
        monkeypatch.setenv("PYTHONPATH", str(home))
        text = "import os, sitecustomize as s, training\ntraining.loop(1)\nassert os.environ['CUSTOM'] == s.__file__"
        code, traces, _ = record(tmp_path, script(program, text))
        assert (code, len(traces)) == (0, 1)

    def test_modules_are_called_as_before_once_recording_is_over(self, tmp_path: Path, program: Path) -> None:
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
    def test_a_profiler_of_the_programs_own_goes_first(self, tmp_path: Path, program: Path, profiler: str) -> None:
        """What was recorded until then is kept, and the report may not say that it is all."""
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
        assert [steps_of(trace) for trace in traces.values()] == [[0, 1]]
        assert notes[0].cut
        assert "profiler itself" in notes[0].problems[0]

    def test_recording_waits_for_a_profiler_that_is_at_work(self, tmp_path: Path, program: Path) -> None:
        text = """
            import torch, training
            with torch.profiler.profile():
                training.loop(3)
            training.loop(2)
        """
        code, traces, _ = record(tmp_path, script(program, text), warmup=1, steps=4)
        assert code == 0
        assert [steps_of(trace) for trace in traces.values()] == [[3, 4]]


class TestWhole:
    """The command from its options to its exit code, with a scan that answers what it is told to."""

    @pytest.fixture
    def scanned(self, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
        """Paths that were scanned; each is a clean trace."""
        from dcpbench.syncs import scan as home

        seen = []

        def scan(paths: list[Path], **_: object) -> Report:
            seen.extend(paths)
            coverage = Coverage(detector="scan", gpu_events=1, runtime_events=1)
            return Report(traces=[TraceSummary(path=str(p), steps=2, coverage=coverage) for p in paths])

        monkeypatch.setattr(home, "scan", scan)
        return seen

    @staticmethod
    def code_of(*command: str, **options: object) -> int:
        return runs.run([sys.executable, *command], Recording(**options), GateOptions(), Out())

    def test_a_clean_program_ends_with_0_and_its_traces_are_gone(self, program: Path, scanned: list[Path]) -> None:
        assert self.code_of(script(program, "import training; training.loop(2)")) == 0
        assert len(scanned) == 1
        assert not scanned[0].exists()

    def test_a_program_that_failed_never_ends_with_0(
        self, program: Path, scanned: list[Path], capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert self.code_of(script(program, "import training; training.loop(2); raise SystemExit(9)")) == 4
        assert len(scanned) == 1
        assert "ended with exit code 9" in capfd.readouterr().err

    def test_a_program_that_recorded_nothing_cannot_be_clean(self, program: Path, scanned: list[Path]) -> None:
        assert self.code_of(script(program, "pass")) == 3
        assert scanned == []

    def test_a_recording_that_was_cut_short_cannot_be_clean(self, program: Path, scanned: list[Path]) -> None:
        text = "import torch, training\ntraining.loop(2)\nwith torch.profiler.profile(): pass"
        assert self.code_of(script(program, text)) == 3
        assert scanned

    def test_kept_traces_stay_without_notes(self, tmp_path: Path, program: Path, scanned: list[Path]) -> None:
        keep = tmp_path / "kept" / "here"
        assert self.code_of(script(program, "import training; training.loop(2)"), keep=keep) == 0
        assert [path.suffix for path in keep.iterdir()] == [".json"]
        assert scanned[0].parent == keep

    def test_without_a_gpu_it_says_what_to_type(self, program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(runs.CPU_VARIABLE)
        monkeypatch.setattr(runs, "has_gpu", lambda: False)
        with pytest.raises(CapacityError, match="dcpbench syncs dry-run -- ") as raised:
            self.code_of(script(program, "pass"))
        assert raised.value.exit_code == 3

    def test_ctrl_c_reaches_the_program_and_ends_with_130(self, tmp_path: Path, program: Path) -> None:
        """The terminal sends it to every process of the group; what was recorded is still scanned."""
        name = script(program, "import time, training\ntraining.loop(1)\nprint('up', flush=True)\ntime.sleep(60)")
        command = [sys.executable, "-m", "dcpbench.cli", "syncs", "run", "--format", "json", "--", sys.executable, name]
        code = f"import sys; sys.argv[1:] = {command[3:]!r}; from dcpbench.cli import main; main()"
        running = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        assert running.stdout is not None
        assert running.stdout.readline() == b"up\n"
        os.killpg(running.pid, signal.SIGINT)
        out, err = running.communicate()
        assert running.returncode == 130, err.decode()
        assert json.loads(out)["traces"]
        assert tmp_path.exists()


class TestReport:
    def test_a_rank_without_its_trace_keeps_the_report_from_saying_clean(self) -> None:
        report = Report(traces=[TraceSummary(path="rank0-pid1.json", coverage=Coverage(detector="scan"))])
        notes = [Note(pid=1, rank="0", trace="rank0-pid1.json", cuda=True, steps=3), Note(pid=2, rank="1", cuda=True)]
        runs.add_notes(report, notes, Recording(warmup=4))
        assert [(t.rank, t.coverage.complete) for t in report.traces] == [(None, True), (1, False)]
        assert "--warmup 4 leaves none" in report.traces[1].coverage.notes[0]

    def test_traces_go_by_their_names_when_their_folder_is_gone(self) -> None:
        example = Example(trace="/gone/a.json")
        site = Site(fingerprint="f", rule="SYNC001", kind="k", example=example, traces=["/gone/a.json"])
        report = Report(traces=[TraceSummary(path="/gone/a.json", coverage=Coverage(detector="scan"))], sites=[site])
        made = runs.without_folder(report, Path("/gone"))
        assert "/gone" not in msgspec.json.encode(made).decode()
        assert made.sites[0].worst is None

    def test_steps_that_were_never_seen_are_told(self) -> None:
        notes = [Note(pid=1, trace="pid1.json", cuda=True, steps=0)]
        assert "a:b was never called" in runs.explain(notes, Recording(step="a:b"))[0]
        assert "--step MODULE:FUNCTION" in runs.explain(notes, Recording())[0]


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "says"),
        [({"warmup": -1}, "from 0"), ({"steps": 0}, "from 1"), ({"step": "train_step"}, "MODULE:FUNCTION")],
    )
    def test_wrong_numbers_and_names_say_what_would_do(self, options: dict, says: str) -> None:
        with pytest.raises(UsageError, match=says):
            Recording(**options).check()

    def test_a_folder_with_traces_is_not_mixed_with_others(self, tmp_path: Path) -> None:
        (tmp_path / "rank0-pid1.json").write_text("{}")
        with pytest.raises(OutputError, match="already holds traces"):
            Recording(keep=tmp_path).check()

    @pytest.mark.parametrize(("command", "says"), [([], "after `--`"), (["script.py"], "-- python script.py")])
    def test_a_command_that_cannot_start_says_how(self, command: list[str], says: str) -> None:
        with pytest.raises(UsageError, match=says):
            runs.run(command, Recording(), GateOptions(), Out())
