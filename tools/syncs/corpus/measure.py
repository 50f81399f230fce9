"""Run the corpus under every detector that this machine allows: `python -m tools.syncs.corpus.measure FOLDER [VERSION=FILE] …`.

On a GPU: the clock, behind queued work; the live detector; torch's own debug mode; traces, with and without Python
stacks and `cuda_sync` events; and the checks of the named releases of vLLM. The dry run needs no GPU. Without a GPU the debug mode,
on which vLLM's check is based, is emulated in a dry run.
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from dcpbench.syncs.dry_run import dry_run
from dcpbench.syncs.scan import scan_traces
from tools.syncs.corpus.debug_mode import emulate_debug_mode
from tools.syncs.corpus.inputs import make_inputs
from tools.syncs.corpus.programs import PROGRAMS, Program
from tools.syncs.corpus.score import CorpusRun, Seen, Truth
from tools.syncs.corpus.vllm_check import MODES, load_check

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tools.syncs.corpus.vllm_check import Reports

RANGE = "corpus:"
TRACES = {"sync_stacks": (True, True), "sync": (True, False), "stacks": (False, True), "plain": (False, False)}
"""Traces by name: (with `cuda_sync` events, with Python stacks)."""
QUEUED_CYCLES = 40_000_000  # GPU cycles of work before a program that is timed: about 20 ms
SHORT_CYCLES = 2_000_000  # about 1 ms, for traces: longer than a program takes to its wait, even if it allocates
WARM_UPS = 2  # runs that load kernels and fill caches


def measure_corpus(folder: Path, checks: Sequence[str] = ()) -> CorpusRun:
    """Measure the corpus on this machine; traces go to `folder`, `checks` name releases of vLLM and their files."""
    run = CorpusRun(
        device="CPU",
        torch=str(torch.__version__),
        programs=[Truth(name=p.name, expected=_list_ids(p.expected), hazards=_list_ids(p.hazards)) for p in PROGRAMS],
        detectors={"dry run": {p.name: _run_dry(p) for p in PROGRAMS}},
    )
    if torch.cuda.is_available():
        _measure_gpu(run, folder, checks)
    else:
        with emulate_debug_mode():
            run.detectors["set_sync_debug_mode"] = _run_debug_mode_on_all(torch.device("cuda"))
            _check_all(run, checks, torch.device("cuda"))
    return run


def _measure_gpu(run: CorpusRun, folder: Path, checks: Sequence[str]) -> None:
    device = torch.device("cuda")
    run.device, run.cuda = torch.cuda.get_device_name(device), torch.version.cuda
    for p in PROGRAMS:
        for _ in range(WARM_UPS):
            p.run(make_inputs(device))
        torch.cuda.synchronize()
    run.queued_ms = _measure_held_ms(None, device)
    for truth, p in zip(run.programs, PROGRAMS, strict=True):
        truth.held_up_ms = min(_measure_held_ms(p, device) for _ in range(3))
    run.detectors["set_sync_debug_mode"] = _run_debug_mode_on_all(device)
    # The checks run before live detection: torch keeps its callbacks, and they lose an exception that is raised while memory is freed.
    _check_all(run, checks, device)
    for name, (sync, stacks) in TRACES.items():
        path = folder / f"corpus-{name}.json"
        _record_trace(path, device, sync=sync, stacks=stacks)
        run.detectors[f"scan, {_format_trace(sync=sync, stacks=stacks)}"] = read_trace_findings(path)
    run.detectors["live"] = {p.name: _run_live(p, device) for p in PROGRAMS}


def _run_debug_mode_on_all(device: torch.device) -> dict[str, Seen]:
    return {p.name: _run_debug_mode(p, device) for p in PROGRAMS}


def _check_all(run: CorpusRun, checks: Sequence[str], device: torch.device) -> None:
    for check, mode in itertools.product(checks, MODES):
        version, _, file = check.partition("=")
        run.detectors[f"vLLM {version}, {mode}"] = _run_vllm_check(Path(file), mode, device)


def read_trace_findings(trace: Path) -> dict[str, Seen]:
    """Return the findings of `scan` in a recorded trace of the corpus, by program."""
    seen = {p.name: Seen() for p in PROGRAMS}
    for site in scan_traces([trace], root=Path.cwd()).sites:
        program = seen.get(site.range.removeprefix(RANGE))
        if program is not None and not site.own:
            (program.hazards if site.may_block else program.syncs).extend([site.rule] * site.count)
    return seen


def _list_ids(rules: tuple[object, ...]) -> list[str]:
    return [rule.id for rule in rules]  # type: ignore[attr-defined]


def _format_trace(*, sync: bool, stacks: bool) -> str:
    return f"{'with' if sync else 'no'} cuda_sync, {'with' if stacks else 'no'} stacks"


def _run_dry(p: Program) -> Seen:
    with dry_run() as run:
        inputs = make_inputs(torch.device("cuda"))
        before = len(run.syncs)
        p.run(inputs)
        found = run.syncs[before:]
    return Seen(syncs=[s.rule for s in found if not s.may_block], hazards=[s.rule for s in found if s.may_block])


def _run_live(p: Program, device: torch.device) -> Seen:
    from dcpbench.syncs.live import watch

    inputs = make_inputs(device)
    torch.cuda.synchronize()
    with watch(threads="all") as seen:
        p.run(inputs)
    return Seen(syncs=[s.rule for s in seen.syncs], hazards=[s.rule for s in seen.hazards])


def _run_debug_mode(p: Program, device: torch.device) -> Seen:
    """Return the reports of torch's debug mode, which do not name the kind of wait."""
    inputs = make_inputs(device)
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            p.run(inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return Seen(syncs=["" for w in caught if "called a synchronizing CUDA operation" in str(w.message)])


def _run_vllm_check(file: Path, mode: str, device: torch.device) -> dict[str, Seen]:
    """Return the reports of vLLM's check for each program."""
    seen: dict[str, Seen] = {}
    with load_check(file, mode) as check:
        for p in PROGRAMS:
            inputs = make_inputs(device)
            torch.cuda.synchronize()
            seen[p.name] = attribute_reports(check(functools.partial(p.run, inputs)), p)
    return seen


def attribute_reports(reports: Reports, p: Program) -> Seen:
    """Return the reports as findings: reports of copies are hazards in a program with hazards, otherwise waits."""
    syncs, hazards = ([], [""] * reports.copies) if p.hazards else ([""] * reports.copies, [])
    return Seen(syncs=[""] * reports.syncs + syncs, hazards=hazards)


def _measure_held_ms(p: Program | None, device: torch.device) -> float:
    """Return the ms until a program behind queued work returns; without a program, until the work ends."""
    inputs = make_inputs(device)
    torch.cuda.synchronize()
    torch.cuda._sleep(QUEUED_CYCLES)  # noqa: SLF001 - torch's only kernel of a given duration
    start = time.perf_counter()
    if p is None:
        torch.cuda.synchronize()
    else:
        p.run(inputs)
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed * 1e3


def _record_trace(path: Path, device: torch.device, *, sync: bool, stacks: bool) -> None:
    """Record a trace of all programs, each in its range and behind a little work."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    config = torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=sync)  # noqa: SLF001 - there is no public name
    with torch.profiler.profile(activities=activities, with_stack=stacks, experimental_config=config) as profiler:
        for p in PROGRAMS:
            inputs = make_inputs(device)
            # Empty the cache, so that a program that does so frees no memory of other programs.
            torch.cuda.empty_cache()
            torch.cuda.synchronize()
            torch.cuda._sleep(SHORT_CYCLES)  # noqa: SLF001
            with torch.profiler.record_function(RANGE + p.name):
                p.run(inputs)
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))


if __name__ == "__main__":
    target = Path(sys.argv[1])
    (target / "corpus.json").write_bytes(
        msgspec.json.format(msgspec.json.encode(measure_corpus(target, sys.argv[2:])), indent=1)
    )
