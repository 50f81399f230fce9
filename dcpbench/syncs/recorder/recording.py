"""Records one process with torch's profiler, and writes its trace where `dcpbench syncs run` looks for it.

    FOLDER/rank0-pid123.json    the trace
    FOLDER/123.note             what became of the process, also of one that was not recorded

Without steps, recording begins as soon as the process uses CUDA: no sooner, as a process that has touched CUDA may no
longer fork workers that use it. Nothing here may ever fail the program.
"""

import atexit
import contextlib
import json
import multiprocessing.util
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

WAITING, RECORDING, DONE = "waiting", "recording", "done"
STEP = "ProfilerStep#"
OWN_PROFILER = "the program used torch's profiler itself, of which there can be one at a time: its own went first"


class Recorder:
    """The recording of this process.

    Settings: `folder`; `warmup`, steps that are not recorded; `steps`, how many are, or None for all that follow;
    `cpu`, record although there is no GPU, for tests.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.folder = Path(settings["folder"])
        self.warmup = int(settings["warmup"])
        self.steps = settings["steps"]
        self.cpu = bool(settings["cpu"])
        self.state = WAITING
        self.count = 0
        """Steps begun."""
        self.cut = False
        """Recording ended sooner than asked for."""
        self.problems: list[str] = []
        self.when_cuda: list[Callable[[], None]] = []
        self.when_done: list[Callable[[], None]] = []
        self.found = True
        """The function whose calls are steps, if there is one."""
        self._torch: Any = None
        self._profiler: Any = None
        self._trace = ""
        self._lock = threading.RLock()
        self._own = False
        """The profiler is being called from here."""
        self._cuda = self.cpu
        """CUDA is in use."""
        self._wanted = False
        """What happens now is to be recorded."""
        self._writing = False
        self._terminated = False
        self._open: tuple[int, Any] | None = None
        """Thread and range of the step that goes on."""

    @property
    def last(self) -> int | None:
        """Number of the step after the last one that is recorded."""
        return None if self.steps is None else self.warmup + int(self.steps)

    def torch_imported(self, torch: Any) -> None:  # noqa: ANN401  (a module)
        """Begins to look out for CUDA, or for steps."""
        self._torch = torch
        atexit.register(self.exit)
        os.register_at_fork(after_in_child=self._forked)
        self._give_way_to_the_program()
        torch.cuda._lazy_call(self._cuda_begins)  # noqa: SLF001  (the only way to be told)
        if self.steps is None and not self.warmup:
            self._start_with_cuda()

    def begin_step(self) -> None:
        """A step begins, and one that has not ended yet ends."""
        with self._lock, self._unfailing("marking a step"):
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
        """The step ends. After the last that is to be recorded the trace is written."""
        with self._lock, self._unfailing("marking a step"):
            self._close_step()
            if self.last is not None and self.count >= self.last:
                self.finish()

    def finish(self) -> None:
        """Writes the trace, once; the program goes on without the profiler."""
        with self._lock:
            if self.state != RECORDING:
                return
            self.state, self._writing = DONE, True
            with self._unfailing("writing the trace"):
                self._close_step()
                self._write()
            for done in self.when_done:
                with self._unfailing("taking the hooks away"):
                    done()
            self.note()
            self._writing = False
            if self._terminated:
                _terminate()

    def exit(self) -> None:
        """The process ends."""
        if self._torch is not None:
            with self._lock:
                self.finish()
                self.note()

    def note(self) -> None:
        """Writes down what became of this process."""
        with contextlib.suppress(Exception):
            about = {
                "pid": os.getpid(),
                "rank": os.environ.get("RANK", ""),
                "program": " ".join(sys.argv)[:200],
                "trace": self._trace,
                "cuda": self._cuda,
                "cut": self.cut,
                "steps": self.count,
                "found": self.found,
                "problems": list(dict.fromkeys(self.problems)),
            }
            (self.folder / f"{os.getpid()}.note").write_text(json.dumps(about), encoding="utf-8")

    @contextlib.contextmanager
    def _unfailing(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  (the program must go on, whatever the profiler says)
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.problems.append(f"{what} failed: {error!r} ({Path(where.filename).name}:{where.lineno})")

    def _start_with_cuda(self) -> None:
        """Starts now where CUDA is in use, else with its first use."""
        self._wanted = True
        if self._cuda:
            self._start()

    def _cuda_begins(self) -> None:
        """torch is about to initialise CUDA, or has."""
        with self._lock, self._unfailing("starting with CUDA"):
            self._cuda = True
            for look in self.when_cuda:
                look()
            if self._wanted:
                self._start()

    def _close_step(self) -> None:
        """A range can only be closed by the thread that opened it; the profiler closes what is left."""
        if self._open is not None:
            (thread, step), self._open = self._open, None
            if thread == threading.get_ident():
                step.__exit__(None, None, None)

    def _start(self) -> None:
        with self._lock:
            if self.state != WAITING:
                return
            if self._torch.autograd._profiler_enabled():  # noqa: SLF001  (there is no public name)
                self.problems.append(OWN_PROFILER)
                return
            for all_threads in (True, False):
                try:
                    self._profile(all_threads=all_threads)
                except Exception as error:  # noqa: BLE001  (see _unfailing)
                    self.problems.append(f"starting the profiler failed: {error!r}")
                else:
                    self.state = RECORDING
                    self.problems.clear()
                    self.note()
                    self._write_when_terminated()
                    # Children of multiprocessing end without atexit.
                    multiprocessing.util.Finalize(None, self.exit, exitpriority=0)
                    return

    def _profile(self, *, all_threads: bool) -> None:
        profiler = self._torch.profiler
        config = {"enable_cuda_sync_events": True, **({"profile_all_threads": True} if all_threads else {})}
        activities = [profiler.ProfilerActivity.CPU]
        if not self.cpu:
            activities.append(profiler.ProfilerActivity.CUDA)
        with self._calling():
            made = profiler.profile(
                activities=activities,
                with_stack=True,
                experimental_config=self._torch._C._profiler._ExperimentalConfig(**config),  # noqa: SLF001  (likewise)
            )
            made.start()
        self._profiler = made

    def _write(self) -> None:
        """The profiler is stopped first, whatever becomes of its trace."""
        rank = os.environ.get("RANK", "")
        name = f"rank{rank}-pid{os.getpid()}" if rank.isdecimal() else f"pid{os.getpid()}"
        with self._calling():
            info = self._distributed()
            if info:
                self._profiler.add_metadata_json("distributedInfo", json.dumps(info))
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            part, whole = self.folder / f"{name}.part", self.folder / f"{name}.json"
            profiler.export_chrome_trace(str(part))
        part.replace(whole)
        self._trace = whole.name

    def _distributed(self) -> dict[str, object]:
        """Rank and world size, also of a job that has already closed its process groups."""
        dist = self._torch.distributed
        if dist.is_available() and dist.is_initialized():
            return {"backend": dist.get_backend(), "rank": dist.get_rank(), "world_size": dist.get_world_size()}
        rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
        return {"rank": int(rank), "world_size": int(size)} if rank.isdecimal() and size.isdecimal() else {}

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        """Calls into the profiler are ours meanwhile, and its warnings nobody's."""
        self._own = True
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            self._own = False

    def _give_way_to_the_program(self) -> None:
        """A profiler of the program's own works as ever: this recording ends before it begins."""
        home = self._torch.autograd.profiler
        for name in ("_prepare_profiler", "_enable_profiler"):
            original = getattr(home, name, None)
            if original is not None:
                setattr(home, name, self._before(original))

    def _before(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (whatever torch's function takes)
            if self.state == RECORDING and not self._own:
                self.problems.append(OWN_PROFILER)
                self.cut = True
                self.finish()
            return original(*args, **kwargs)

        return call

    def _write_when_terminated(self) -> None:
        """torchrun ends the other ranks with SIGTERM when one fails. A handler of the program's own stays."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_terminate)

    def _on_terminate(self, _number: int, _frame: object) -> None:
        self._terminated = True
        if self.state == RECORDING:
            self.finish()
        elif not self._writing:
            _terminate()

    def _forked(self) -> None:
        """The profiler's threads have stayed with the parent, so that this child can record nothing."""
        if self.state == RECORDING:
            self.state, self._cuda = DONE, False
        self._lock = threading.RLock()


def _terminate() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
