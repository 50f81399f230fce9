"""Run a program for `dcpbench syncs dry-run`: `python -m dcpbench.syncs.dry_run.main JOB` is its process.

JOB is a file that dry_run_program.py writes; the answer goes to the path in it, even if the program fails.
"""

from __future__ import annotations

import runpy
import sys
import threading
import traceback
import types
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import dcpbench
from dcpbench.errors import ExitCode
from dcpbench.syncs.dry_run import dry_run
from dcpbench.syncs.dry_run.process_report import ProcessReport
from dcpbench.syncs.dry_run_program import ANSWER, Job

if TYPE_CHECKING:
    from types import TracebackType


def main() -> int:
    """Run the job's program to its end, and return the program's exit code."""
    job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Job)
    # Else pytest warns that it cannot rewrite the assertions of a plugin's package that is loaded already.
    dcpbench.__doc__ = f"{dcpbench.__doc__}\n\nPYTEST_DONT_REWRITE"
    with dry_run(assume_device=job.settings.assume_device) as run:
        report = ProcessReport(run, job.settings, job.name)
        report.begin(ANSWER)
        code = _run_to_exit_code(job)
        for thread in threading.enumerate():  # Python waits for them at its end, too
            if not thread.daemon and thread is not threading.main_thread():
                thread.join()
        report.write(code)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _run_to_exit_code(job: Job) -> int:
    """Run the program, and return its exit code as Python would, with its traceback on stderr."""
    try:
        _run_job(job)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BaseException as error:  # noqa: BLE001  (whatever it is, it is the program's)
        traceback.print_exception(error.with_traceback(_drop_own_frames(error.__traceback__)))
        return 1
    return 0


def _run_job(job: Job) -> None:
    sys.argv = [job.target, *job.arguments]
    if sys.flags.safe_path:  # there is no entry of ours to put another in the place of
        sys.path.insert(0, "")
    if job.kind == "module":
        sys.path[0] = str(Path.cwd())
        runpy.run_module(job.target, run_name="__main__", alter_sys=True)
        return
    if job.kind == "code":
        sys.argv[0], sys.path[0] = "-c", ""
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(job.target, "<string>", "exec"), module.__dict__)  # noqa: S102  (as `python -c` does)
        return
    script = Path(job.target).absolute()
    sys.path[0] = str(script.parent)
    runpy.run_path(str(script), run_name="__main__")


def _drop_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the program's first frame on."""
    while trace is not None and trace.tb_next is not None:
        file = trace.tb_frame.f_code.co_filename
        if file not in {__file__, runpy.__file__} and not file.startswith("<frozen"):
            break
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    sys.exit(main())
