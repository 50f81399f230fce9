"""Record one process with torch's profiler, step by step, and write its trace where `dcpbench syncs run` looks for it.

    FOLDER/rank0-pid123.json    the trace, with the name that multiprocessing gives to the process, if any
    FOLDER/123.note             outcome for the process, even if it was not recorded

Without steps, recording begins as soon as the process uses CUDA: no sooner, as a process that has touched CUDA may no
longer fork workers that use it. Nothing here may ever fail the program.
"""

import atexit
import contextlib
import functools
import inspect
import json
import multiprocessing.process
import multiprocessing.util
import os
import re
import signal
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

WAITING, RECORDING, DONE = "waiting", "recording", "done"
_SECRET = re.compile(r"((?:api[-_]?key|token|secret|password)[=\s]\s*)\S+", re.IGNORECASE)  # in a command line
_UNSAFE = re.compile(r"[^\w.]+")  # in the name of a file
STEP = "ProfilerStep#"
SHELL = """
def _wrapped_call_impl(self, *args, **kwargs):
    _dcpbench_enter()
    try:
        return _dcpbench_call(self, *args, **kwargs)
    finally:
        _dcpbench_leave()
"""
"""Compiled under torch's own file name: a stack must not show a line of ours as the program's innermost one."""
OWN_PROFILER = "the program used torch's profiler itself, of which there can be one at a time: its own went first"


class Recorder:
    """Record this process.

    Settings: `folder`; `warmup`, the number of steps before; `steps`, the number of recorded steps, or None for all that follow;
    `cpu`, record without a GPU, for tests; `step`, `MODULE:FUNCTION`, of which one call is a step. Without `step`, a
    step lasts from one outermost call of an nn.Module to the next: work after the model, such as sampling, belongs to
    it.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.folder = Path(settings["folder"])
        self.warmup = int(settings["warmup"])
        self.steps = settings["steps"]
        self.last = None if self.steps is None else self.warmup + int(self.steps)  # step after the last recorded one
        self.cpu = bool(settings["cpu"])
        self._module, _, self._function = settings["step"].partition(":")
        self.step_found = not self._function  # True if the function of `step` was found, or if none is given
        self.state = WAITING
        self.count = 0  # number of steps begun
        self.cut = False  # True if recording ended sooner than requested
        self.problems: list[str] = []
        self._local = threading.local()
        self._undo: list[Callable[[], None]] = []  # functions that remove the marks of steps
        self._torch: Any = None
        self._profiler: Any = None
        self._trace = ""
        self._lock = threading.RLock()
        self._own = False  # True while this recorder calls the profiler
        self._cuda = self.cpu  # True if CUDA is in use
        self._wanted = False  # True if the current activity is to be recorded
        self._writing = False
        self._terminated = False
        self._open: tuple[int, Any] | None = None  # thread and range of the current step

    def handle_torch_import(self, torch: Any) -> None:  # noqa: ANN401  (a module)
        """Start to watch for CUDA, or for steps."""
        self._torch = torch
        atexit.register(self.finish_at_exit)
        os.register_at_fork(after_in_child=self._handle_fork)
        self._finish_before_exit()
        self._handle_program_profiler()
        torch.cuda._lazy_call(self._handle_cuda_init)  # noqa: SLF001  (the only notification)
        if self.steps is None and not self.warmup:
            self._start_with_cuda()
        try:
            self._attach_to_modules(torch.nn.Module.__call__)
        except (AttributeError, TypeError, ValueError) as error:
            self.problems.append(f"calls of nn.Module cannot be marked in this torch: {error!r}")
        self.find_step_function()

    def begin_step(self) -> None:
        """Begin a step, and end one that has not ended yet."""
        with self._lock, self._record_problems("marking a step"):
            if self.state == DONE or self._torch is None:
                return
            self._close_step()
            number, self.count = self.count, self.count + 1
            if self.last is not None and number >= self.last:
                self.finish()
                return
            if number >= self.warmup:
                self._start_with_cuda()
            if self.state == RECORDING:
                step = self._torch.autograd.profiler.record_function(f"{STEP}{number}")
                step.__enter__()
                self._open = (threading.get_ident(), step)

    def end_step(self) -> None:
        """End the step; after the last one to record, the trace is written."""
        with self._lock, self._record_problems("marking a step"):
            self._close_step()
            if self.last is not None and self.count >= self.last:
                self.finish()

    def finish(self) -> None:
        """Write the trace, once; the program continues without the profiler."""
        with self._lock:
            if self.state != RECORDING:
                return
            self.state, self._writing = DONE, True
            with self._record_problems("writing the trace"):
                self._close_step()
                self._write_trace()
            with self._record_problems("taking the hooks away"):
                while self._undo:
                    self._undo.pop()()
            self.write_note()
            self._writing = False
            if self._terminated:
                _kill_process()

    def finish_at_exit(self) -> None:
        """Finish when the process ends."""
        if self._torch is not None:
            with self._lock:
                self.finish()
                self.write_note()

    def write_note(self) -> None:
        """Write a note with the outcome for this process."""
        with contextlib.suppress(Exception):
            about = {
                "pid": os.getpid(),
                "rank": os.environ.get("RANK", ""),
                "role": _get_role(),
                "program": _SECRET.sub(r"\1(API key)", " ".join(sys.argv))[:200],
                "trace": self._trace,
                "cuda": self._cuda,
                "cut": self.cut,
                "steps": self.count,
                "step_found": self.step_found,
                "problems": list(dict.fromkeys(self.problems)),
            }
            (self.folder / f"{os.getpid()}.note").write_text(json.dumps(about), encoding="utf-8")

    @contextlib.contextmanager
    def _record_problems(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  (the program must go on, whatever the profiler says)
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.problems.append(f"{what} failed: {error!r} ({Path(where.filename).name}:{where.lineno})")

    def _start_with_cuda(self) -> None:
        """Start now if CUDA is in use, else with its first use."""
        self._wanted = True
        if self._cuda:
            self._start_recording()

    def _handle_cuda_init(self) -> None:
        """Handle that torch is about to initialise CUDA, or has."""
        with self._lock, self._record_problems("starting with CUDA"):
            self._cuda = True
            self.write_note()  # a process that is killed from now on is known
            self.find_step_function()  # a script has mostly defined its functions before it uses CUDA
            if self._wanted:
                self._start_recording()

    def _close_step(self) -> None:
        """Close the step's range on the thread that opened it, as is required; the profiler closes what is left."""
        if self._open is not None:
            (thread, step), self._open = self._open, None
            if thread == threading.get_ident():
                step.__exit__(None, None, None)

    def _start_recording(self) -> None:
        with self._lock:
            if self.state != WAITING:
                return
            if self._torch.autograd._profiler_enabled():  # noqa: SLF001  (there is no public name)
                self.problems.append(OWN_PROFILER)
                return
            for all_threads in (True, False):
                try:
                    self._start_profiler(all_threads=all_threads)
                except Exception as error:  # noqa: BLE001  (see _unfailing)
                    self.problems.append(f"starting the profiler failed: {error!r}")
                else:
                    self.state = RECORDING
                    self.problems.clear()
                    self.write_note()
                    # torchrun ends the other ranks with SIGTERM when one fails. A handler of the program's own stays.
                    main = threading.current_thread() is threading.main_thread()
                    if main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
                        signal.signal(signal.SIGTERM, self._handle_sigterm)
                    # Children of multiprocessing end without atexit.
                    multiprocessing.util.Finalize(None, self.finish_at_exit, exitpriority=0)
                    return

    def _start_profiler(self, *, all_threads: bool) -> None:
        profiler = self._torch.profiler
        config = {"enable_cuda_sync_events": True, **({"profile_all_threads": True} if all_threads else {})}
        activities = [profiler.ProfilerActivity.CPU]
        if not self.cpu:
            activities.append(profiler.ProfilerActivity.CUDA)
        with self._apply_own_mark():
            made = profiler.profile(
                activities=activities,
                with_stack=True,
                experimental_config=self._torch._C._profiler._ExperimentalConfig(**config),  # noqa: SLF001  (see above)
            )
            made.start()
        self._profiler = made

    def _write_trace(self) -> None:
        """Write the trace; the profiler is stopped first, whether or not that succeeds."""
        rank = os.environ.get("RANK", "")
        role = _UNSAFE.sub("_", _get_role())
        parts = [role, f"rank{rank}" if rank.isdecimal() else "", f"pid{os.getpid()}"]
        name = "-".join(filter(None, parts))
        with self._apply_own_mark():
            info = self._get_distributed_info()
            if info:
                self._profiler.add_metadata_json("distributedInfo", json.dumps(info))
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            part, whole = self.folder / f"{name}.part", self.folder / f"{name}.json"
            profiler.export_chrome_trace(str(part))
        part.replace(whole)
        self._trace = whole.name

    def _get_distributed_info(self) -> dict[str, object]:
        """Return rank and world size, also of a job that has already closed its process groups."""
        dist = self._torch.distributed
        if dist.is_available() and dist.is_initialized():
            return {"backend": dist.get_backend(), "rank": dist.get_rank(), "world_size": dist.get_world_size()}
        rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
        return {"rank": int(rank), "world_size": int(size)} if rank.isdecimal() and size.isdecimal() else {}

    @contextlib.contextmanager
    def _apply_own_mark(self) -> Iterator[None]:
        """Mark calls into the profiler as the recorder's own meanwhile, and suppress its warnings."""
        self._own = True
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            self._own = False

    def _handle_program_profiler(self) -> None:
        """End this recording before a profiler of the program's own begins, which then works as usual."""
        home = self._torch.autograd.profiler
        for name in ("_prepare_profiler", "_enable_profiler"):
            original = getattr(home, name, None)
            if original is not None:
                setattr(home, name, self._finish_before(original))

    def _finish_before(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call_original(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (whatever torch's function takes)
            if self.state == RECORDING and not self._own:
                self.problems.append(OWN_PROFILER)
                self.cut = True
                self.finish()
            return original(*args, **kwargs)

        return call_original

    def _finish_before_exit(self) -> None:
        """Finish before os._exit, too, by which forked children end."""
        leave = os._exit

        @functools.wraps(leave)
        def finish_and_exit(status: int) -> Any:  # noqa: ANN401  (never)
            if self.state == RECORDING:
                self.finish_at_exit()
            leave(status)

        os._exit = finish_and_exit

    def _handle_sigterm(self, _number: int, _frame: object) -> None:
        self._terminated = True
        if self.state == RECORDING:
            self.finish()
        elif not self._writing:
            _kill_process()

    def _handle_fork(self) -> None:
        """Disable recording in this child: the profiler's threads have stayed with the parent."""
        if self.state == RECORDING:
            self.state, self._cuda = DONE, False
        self._lock = threading.RLock()

    def find_step_function(self) -> None:
        """Mark the function of --step as soon as it can be found."""
        if self.step_found:
            return
        owner: Any = sys.modules.get(self._module)
        *path, name = self._function.split(".")
        for part in path:
            owner = getattr(owner, part, None)
        raw = inspect.getattr_static(owner, name, None) if owner is not None else None
        function = raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw
        if function is None:
            return
        self.step_found = True
        if not callable(function) or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            self.problems.append(f"{self._module}:{self._function} is no function that returns")
            return
        marked = self._make_marked_function(function)
        setattr(owner, name, type(raw)(marked) if isinstance(raw, staticmethod | classmethod) else marked)
        self._undo.append(lambda: setattr(owner, name, raw))

    def _make_marked_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        async def run_coroutine(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (the program's own)
            with self._open_step():
                return await function(*args, **kwargs)

        return run_coroutine if inspect.iscoroutinefunction(function) else self._open_step()(function)

    @contextlib.contextmanager
    def _open_step(self) -> Iterator[None]:
        self._handle_enter()
        try:
            yield
        finally:
            self._handle_leave(ends=True)

    def _attach_to_modules(self, call: Any) -> None:  # noqa: ANN401  (nn.Module.__call__)
        """Wrap the code of nn.Module.__call__; the function object stays, because torch.compile compares it."""
        code, home = call.__code__, call.__globals__
        home["_dcpbench_call"] = types.FunctionType(code, home, call.__name__, call.__defaults__, call.__closure__)
        home["_dcpbench_enter"] = self.find_step_function if self._function else self._handle_enter
        home["_dcpbench_leave"] = (lambda: None) if self._function else self._handle_leave
        made: dict[str, Any] = {}
        exec(compile(SHELL, code.co_filename, "exec"), made)  # noqa: S102  (the text above)
        call.__code__ = made["_wrapped_call_impl"].__code__
        self._undo.append(lambda: setattr(call, "__code__", code))

    def _handle_enter(self) -> None:
        depth = getattr(self._local, "depth", 0)
        self._local.depth = depth + 1
        if depth == 0:
            self.begin_step()

    def _handle_leave(self, *, ends: bool = False) -> None:
        self._local.depth -= 1
        if ends and self._local.depth == 0:
            self.end_step()


def _get_role() -> str:
    """Return the name that multiprocessing gives to this process; empty for the main one."""
    name = multiprocessing.process.current_process().name
    return "" if name == "MainProcess" else name


def _kill_process() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def install(settings: dict[str, Any], run_after_import: Callable[[str, Callable[[ModuleType], None]], None]) -> None:
    """Install the recorder, which is inactive before the program imports torch."""
    recorder = Recorder(settings)
    if settings["step"]:
        run_after_import(settings["step"].partition(":")[0], lambda _: recorder.find_step_function())
    run_after_import("torch", recorder.handle_torch_import)
