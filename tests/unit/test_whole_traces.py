"""What scan finds in traces that are made at random, whole, as tests/data/said/traces/ has it.

Times are few round numbers, so that calls, copies and kernels often touch; threads, streams, names and ids are few, so that
they are taken for each other where that can be. `SAID=write` writes the files anew, as for test_whole_outputs.py.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import msgspec
import pytest

from dcpbench.syncs.gating import comments
from dcpbench.syncs.gating.gate import Gate, compute_verdict
from dcpbench.syncs.scan import scan_traces
from tests.unit.test_whole_outputs import hold, rounded
from tests.unit.trace_builder import HOST, PAGEABLE, PINNED, TO_GPU, Trace

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

TO_GPU_PINNED, WITHIN, BARE = "Memcpy HtoD (Pinned -> Device)", "Memcpy DtoD (Device -> Device)", "CopyDeviceToHost"
WAITS = (
    *(
        "cudaStreamSynchronize",
        "cudaEventSynchronize",
        "cudaDeviceSynchronize",
        "cudaStreamSynchronize",
        "cuCtxSynchronize",
    ),
    *(
        "cudaFree",
        "cudaMalloc",
        "cudaHostAlloc",
        "cudaEventQuery",
        "cudaEventElapsedTime",
        "hipStreamSynchronize",
        "urQueueFinish",
    ),
)
OPS = ("aten::item", "aten::to", "aten::nonzero", "aten::_local_scalar_dense", "aten::copy_", "mine::op", "aten::mm")
FRAMES = ("a/x.py(10): f", "a/x.py(20): g", "torch/y.py(5): h", "b.py(1): <module>")
SYNCS = ("Stream Sync", "Event Sync", "Context Synchronize", "Stream Wait Event")


def _kernel(trace: Trace, rng: random.Random, t: float, long: float, tid: int, stream: int) -> None:
    begin = t + rng.choice([1, 5, 10, 11, 50, 100])
    trace.kernel(t, begin, begin + min(long, rng.choice([5, 50, 100, 300])), tid=tid, stream=stream)


def _copy(trace: Trace, rng: random.Random, t: float, long: float, tid: int, stream: int) -> None:
    """A copy, and mostly a wait soon after it."""
    begin = t + rng.choice([0, 1, 10, 50])
    trace.copy(
        rng.choice([PINNED, PAGEABLE, TO_GPU, TO_GPU_PINNED, WITHIN, BARE]),
        (t, t + long),
        (begin, begin + rng.choice([1, 10, 50])),
        runtime=rng.choice(["cudaMemcpyAsync"] * 3 + ["cudaMemcpy", "cudaMemcpyWithStream", "hipMemcpyAsync"]),
        size=rng.choice([8, 1 << 20]),
        stream=stream,
        tid=tid,
    )
    if rng.random() < 0.6:
        wait = t + long + rng.choice([0, 1, 49, 50, 51])
        trace.call("cudaStreamSynchronize", wait, wait + rng.choice([2, 10, 11, 60]), tid=tid)


def _item(trace: Trace, rng: random.Random, t: float, long: float, tid: int, _: int) -> None:
    trace.item(t, t + long + 10, tid=tid, name=rng.choice([PINNED, PAGEABLE]))


def _range(trace: Trace, rng: random.Random, t: float, long: float, tid: int, _: int) -> None:
    trace.range(rng.choice(["prefill", "decode", "layer 3"]), t, t + long * 3, tid=tid)


def _event(trace: Trace, rng: random.Random, t: float, long: float, _: int, stream: int) -> None:
    ids = {"correlation": rng.randrange(1, 12), "stream": rng.choice([-1, stream])}
    trace.add("cuda_sync", rng.choice(SYNCS), t, t + long, pid=0, tid=stream, **ids)


def _wait(trace: Trace, rng: random.Random, t: float, long: float, tid: int, _: int) -> None:
    """A call, and now and then the time between two events behind it."""
    trace.call(rng.choice(WAITS), t, t + long, tid=tid)
    if rng.random() < 0.2:
        trace.call("cudaEventElapsedTime", t + long, t + long + 1, tid=tid)


ON_GPU, ON_HOST = (_kernel, _kernel, _kernel, _copy, _copy, _item), (_wait, _wait, _range, _event)


def made(seed: int) -> Trace:
    """A trace of a few steps."""
    rng = random.Random(seed)
    trace = Trace()
    if rng.random() < 0.7:
        trace.work()
    frames, ops = rng.choice([0.0, 0.5, 0.5]), rng.choice([0.0, 0.6, 0.6, 0.6])
    kinds = rng.choice([ON_GPU + ON_HOST] * 6 + [ON_HOST])
    threads, streams = rng.choice([1, 1, 2]), rng.choice([1, 1, 2])
    for step in range(rng.choice([0, 1, 2, 4])):
        name = rng.choice(["ProfilerStep#{}", "ProfilerStep#{}", "step {}", "decode"]).format(step)
        trace.range(name, 1000 * step, 1000 * step + rng.choice([900, 1000]))
    for _ in range(rng.choice([3, 8, 20])):
        t, tid, stream = 50.0 * rng.randrange(80), HOST + rng.randrange(threads), 7 + rng.randrange(streams)
        long = rng.choice([1, 9, 10, 11, 49, 50, 51, 100, 250])
        if rng.random() < frames:
            trace.frame(rng.choice(FRAMES), t - 5, t + long + 5, tid=tid)
        if rng.random() < ops:
            trace.op(rng.choice(OPS), t - rng.choice([0, 1, 2]), t + long + rng.choice([0, 1, 60]), tid=tid)
        rng.choice(kinds)(trace, rng, t, long, tid, stream)
    return trace


def short_site(site: dict[str, Any]) -> str:
    """What it says, without what it says twice."""
    worst = {} if site["worst"] == site["example"] else {"worst": site["worst"]}
    told = {k: v for k, v in site.items() if v not in (None, "", [], False) and k not in ("traces", "worst", "kind")}
    return json.dumps(told | worst, ensure_ascii=False).replace("FOLDER/", "")


PROGRAM = """# above
import torch

x = [
    torch.ones(3).item(),  # in a list
    lambda y: y,
]


# above f
# and above that
@decorated(
    1,
)
@again
def f(a,
      b=lambda: 1):
    # below the head
    if a:
        b.item()
    else:
        for i in range(
            3
        ):
            i.item()

    def inner():
        return [
            c.item() for c in b
        ]
    class Own:
        z = 1
        def method(self): return self.z
    return inner, lambda: (
        a.item())


async def g(): return 1
with open("x") as file, \\
     open("y"):
    file.read()
try:
    g()
except ValueError:
    raise
finally:
    # at the end
    g()
"""


def test_lines_on_which_a_comment_allows_a_wait(tmp_path: Path) -> None:
    """For each line of a program: of a call there, and of a function that begins there."""
    (tmp_path / "made.py").write_text(PROGRAM)
    source = comments._read_source(tmp_path, "made.py")
    assert source is not None
    lines = [
        f"{number:2} {text:32} {sorted(set(comments._list_lines(source, number, call=True)))} {sorted(set(comments._list_lines(source, number, call=False)))}"
        for number, text in enumerate(PROGRAM.splitlines(), 1)
    ]
    hold("comment-lines.txt", "\n".join([*lines, str(sorted(source.alone))]), tmp_path)


@pytest.mark.parametrize("many", range(6))
def test_traces_made_at_random(many: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight together are a file: each one's sites, notes and verdict; and those of two of them as ranks of one program."""
    monkeypatch.chdir(tmp_path)  # where paths are short
    lines = []
    for seed in range(8 * many, 8 * many + 8):
        path = tmp_path / f"trace-{seed}.json"
        path.write_text(made(seed).text())
        report = scan_traces([path], root=tmp_path)
        report.verdict = compute_verdict(report, Gate(root=tmp_path, max_per_step=1.0, max_bubble_us=40.0))
        told = rounded(msgspec.to_builtins(report))
        (summary,) = told["traces"]
        notes = [note[:30] for note in summary["coverage"].pop("notes")]
        lines += [f"--- {seed}", json.dumps([summary, notes, told["totals"]], ensure_ascii=False)]
        lines += [f"  {finding['message']}" for finding in told["verdict"]["findings"]]
        lines += [f"  {short_site(site)}" for site in told["sites"]]
    both = scan_traces([tmp_path / f"trace-{8 * many + n}.json" for n in (0, 1)], root=tmp_path)
    lines += ["--- together", *(short_site(rounded(msgspec.to_builtins(site))) for site in both.sites)]
    hold(f"traces/{many}.txt", "\n".join(lines).replace(f"{tmp_path}/", ""), tmp_path)
