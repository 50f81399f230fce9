"""Traces of a running server: start and stop its profiler over HTTP and wait for the files of its ranks. No torch."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dcpbench.errors import UsageError, WorkerError
from dcpbench.servers import info as server_info
from dcpbench.servers.client import CLIENT_ERROR, Client, RequestError, Target
from dcpbench.servers.load import LoadOptions, Run
from dcpbench.servers.prompt_format import find_prompt_format
from dcpbench.servers.sessions import make_calls
from dcpbench.serving.requests import ServeRequest
from dcpbench.show.text import format_count
from dcpbench.syncs.files import drop_copies
from dcpbench.syncs.gating.gate import can_be_finding, explain_guesses, explain_missing, explain_no_answer
from dcpbench.syncs.recorded import MAX_RECORD_SITES, build_sync_sites
from dcpbench.syncs.scan import scan_traces
from dcpbench.syncs.sites import find_worst_step

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from dcpbench.records.record import SyncSite
    from dcpbench.servers.load import Call

START, STOP = "/start_profile", "/stop_profile"
KINDS = (".json", ".json.gz")
SETTLED_S = 2.0  # a file that has not grown for this long is complete: ranks write one after the other
POLL_S = 0.2
FOLDERS = ("VLLM_TORCH_PROFILER_DIR", "SGLANG_TORCH_PROFILER_DIR")  # set for servers that dcpbench starts
HOW = (
    'start vLLM with --profiler-config \'{"profiler": "torch", "torch_profiler_dir": "FOLDER"}\' (before 0.13: the environment variable '
    "VLLM_TORCH_PROFILER_DIR), SGLang with SGLANG_TORCH_PROFILER_DIR=FOLDER"
)


def make_traces_folder(folder: Path) -> None:
    """Create the folder of --traces with its parents. Raises UsageError if it cannot be a folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(
            f"--traces {folder}: no folder can be made there ({e.strerror}); name the one into which the server writes its traces."
        ) from e


def find_traces(folder: Path) -> dict[Path, int]:
    """Return the files below a folder that may be traces, each with its size."""
    return {p: p.stat().st_size for p in folder.rglob("*") if p.is_file() and p.name.endswith(KINDS)}


async def profile_server(
    target: Target,
    folder: Path,
    *,
    requests: int,
    concurrency: int,
    input_tokens: int,
    output_tokens: int,
    endpoint: str,
    wait_s: float,
    extra_body: Mapping[str, object] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Path]:
    """Return the traces that the server wrote into `folder`, on a shared file system, while it served a small load.

    Raise UsageError for a folder that cannot be made, WorkerError if the server does not profile or no trace appears.
    """
    await asyncio.to_thread(make_traces_folder, folder)
    async with Client(target) as client:
        info = await server_info.fetch_info(client)
        prompt_format = await find_prompt_format(client, info.find_model(None).id, endpoint, extra_body=extra_body)
        generator = np.random.Generator(np.random.PCG64(0))
        prompts = generator.integers(0, prompt_format.vocab, (requests, input_tokens), dtype=np.int32)
        sent = [ServeRequest(number=i, prompt=prompt, output_tokens=output_tokens) for i, prompt in enumerate(prompts)]
        calls = make_calls(target, prompt_format, sent)
        return await record_traces(client, calls, concurrency, folder, wait_s, tell)


async def record_traces(
    client: Client,
    calls: Sequence[Call],
    concurrency: int,
    folder: Path,
    wait_s: float,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Path]:
    """Send one call as warm-up and then all calls under the profiler; return the traces. Raises WorkerError if none comes."""
    before = await asyncio.to_thread(find_traces, folder)
    run = Run(client, calls, LoadOptions(clients=concurrency))
    await Run(client, calls[:1], LoadOptions(clients=1)).send_load()
    async with run_profiler(client):
        tell("profiling")
        await run.send_load()
    if failed := [outcome.error for outcome in run.outcomes if outcome.error is not None]:
        raise WorkerError(
            f"{len(failed)} of {format_count(len(calls), 'request')} failed while the server was profiled; the first one: {failed[0].sentence}"
        )
    return await wait_for_traces(folder, before, wait_s, tell)


def find_waits(paths: Sequence[Path]) -> tuple[float, list[SyncSite]]:
    """Return the host-blocking calls of a step and their source lines, for the worst rank of a server's traces.

    If the engine's annotations distinguish prefill from decode, the number is that of the phase with the most waits.

    Raise WorkerError if the traces are insufficient: no GPU events, damaged, a rank's trace missing, or no steps
    marked. A front end's trace is left out.
    """
    report = scan_traces(drop_copies(paths, lambda *_: None), root=Path.cwd())
    reasons = [reason for trace in report.traces if (reason := explain_no_answer(trace))]
    if reasons := [*reasons, *explain_missing(report.traces, all_ranks=True), *explain_guesses(report)]:
        raise WorkerError(reasons[0])
    if not all(trace.steps or trace.front_end for trace in report.traces):
        raise WorkerError(
            "its traces mark no steps, so that waits cannot be counted by step; see `dcpbench syncs scan`."
        )
    per_step = find_worst_step([site for site in report.sites if can_be_finding(site)]).waits
    return per_step, build_sync_sites(report.sites, "engine")[:MAX_RECORD_SITES]


@contextlib.asynccontextmanager
async def run_profiler(client: Client) -> AsyncIterator[None]:
    """Let the server profile itself within the block. Raise WorkerError if it does not."""
    await _switch_profiler(client, START)
    try:
        yield
    finally:
        await _switch_profiler(client, STOP)


async def _switch_profiler(client: Client, path: str) -> None:
    try:
        await client.post(path, timeout_s=600.0)
    except RequestError as e:
        how = f" It does not profile; {HOW}." if e.status >= CLIENT_ERROR and path == START else ""
        raise WorkerError(f"{client.target.url}{path}: {e.sentence}{how}") from e


async def wait_for_traces(
    folder: Path, before: dict[Path, int], wait_s: float, tell: Callable[[str], None]
) -> list[Path]:
    """Return the files that came after `before`, once none has grown for SETTLED_S. Raise WorkerError if none comes."""
    began = last = time.monotonic()
    known: dict[Path, int] = {}
    while time.monotonic() - began < wait_s or (known and time.monotonic() - last < SETTLED_S):
        new = {p: size for p, size in (await asyncio.to_thread(find_traces, folder)).items() if before.get(p) != size}
        if new != known:
            known, last = new, time.monotonic()
            tell(f"{format_count(len(new), 'trace')}, {sum(new.values()) / 1e6:,.1f} MB")
        elif known and time.monotonic() - last >= SETTLED_S:
            return sorted(known)
        await asyncio.sleep(POLL_S)
    raise WorkerError(
        f"no trace came into {folder} within {wait_s:g} s (--wait): the server writes it on its own machine and into the folder that it "
        f"was started with; {HOW}."
    )
