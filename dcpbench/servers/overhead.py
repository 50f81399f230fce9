"""Measure the cost and the delay of the client itself, against a minimal server (null_server.py)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np

from dcpbench.errors import WorkerError
from dcpbench.launch import package
from dcpbench.servers import null_server
from dcpbench.servers.client import Target
from dcpbench.servers.load import Call
from dcpbench.servers.shares import open_load

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dcpbench.servers.load import Outcome

TOKENS = 40
"""Tokens of each stream: 0.8 s."""
BEGIN_S = 0.4
"""Within which they begin, one after the other: all at once would measure how long it takes to send them."""
MAX_STREAMS = 512
"""Files that a process may have open by default are a thousand."""
P99 = 99


def count_peak_streams(outcomes: Sequence[Outcome]) -> int:
    """Return the maximum number of simultaneously streaming answers."""
    spans = [(o.submitted_s, o.answer.chunk_s[-1]) for o in outcomes if o.answer is not None and o.answer.chunk_s]
    edges = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    return int(max(np.cumsum([step for _, step in edges]), default=0))


@contextlib.contextmanager
def start_null_server() -> Iterator[Target]:
    """Provide a null server within the block. Raise WorkerError if it does not start."""
    words = [sys.executable, "-m", null_server.__name__]
    env = os.environ | package.get_environment()
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            port = server.stdout.readline().strip()
            if not port:
                raise WorkerError(f"the null server did not start (exit code {server.wait()}).")
            yield Target.from_url(f"http://127.0.0.1:{port}", timeout_s=10.0)
        finally:
            server.stdin.close()
            server.terminate()


async def measure_overhead(streams: int, processes: int, *, realtime: bool = False) -> dict[str, float | int]:
    """Return the fields of ClientLoad that begin with null_, for `streams` simultaneous streams. Raise WorkerError on
    failure.
    """
    streams = max(min(streams, MAX_STREAMS), 1)
    with start_null_server() as target:
        data = target.encode_request("POST", "/v1/completions", b'{"max_tokens": %d}' % TOKENS)
        calls = [Call(number, data, TOKENS, number * BEGIN_S / streams) for number in range(streams)]
        async with open_load(target, calls, None, processes, realtime=realtime) as run:
            await run.prepare(streams)
            await run.send_load()
    answers = [o.answer for o in run.outcomes if o.error is None and o.answer is not None]
    if len(answers) < streams:
        failed = next(o.error for o in run.outcomes if o.error is not None)
        raise WorkerError(f"{streams - len(answers)} of {streams} streams of the null server failed: {failed.sentence}")
    first = [o.answer.chunk_s[0] - o.submitted_s for o in run.outcomes if o.answer is not None]
    gaps = np.concatenate([np.diff(answer.chunk_s) for answer in answers]) - null_server.GAP_S
    return {
        "null_streams": streams,
        "null_event_us": sum(p.cpu_s for p in run.paces) / sum(len(a.chunk_s) for a in answers) * 1e6,
        "null_ttft_p50_ms": float(np.median(first)) * 1e3,
        "null_lag_p99_ms": float(np.percentile(gaps, P99)) * 1e3,
    }
