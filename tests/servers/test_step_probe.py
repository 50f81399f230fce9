"""Test measured steps of a running engine: times equal its step function, and impossible cases are refused."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from dcpbench.errors import WorkerError
from dcpbench.records.stats import StopRule
from dcpbench.servers import step_probe
from dcpbench.servers.client import Client, Target
from dcpbench.servers.decode_streams import (
    NotRunningError,
    compute_delay_ms,
    compute_step_times_ms,
    find_gap_ms,
    find_moment_between_steps,
    merge_arrivals,
)
from dcpbench.servers.info import fetch_info
from dcpbench.servers.prompt_format import COMPLETIONS, find_prompt_format
from dcpbench.servers.step_probe import (
    CaseSamples,
    Method,
    Refusal,
    RequestTimes,
    ServerLimits,
    StepProbe,
    UnsupportedCaseError,
    check_case,
    measure_case,
    measure_request_times,
)
from dcpbench.serving.step_times import HOT, UNEVEN, Case, Chunks, Decodes
from tests.servers.step_engine import compute_step_ms

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from dcpbench.servers.decode_streams import DecodeStreams

ROOT = Path(__file__).parents[2]
BUDGET = 512
LIMITS = ServerLimits(max_batched_tokens=BUDGET)
DECODES = Case(decodes=(Decodes(4, 900),))
CHUNK = Case(chunks=(Chunks(1, 500, 0),))
SEVERAL = Case(chunks=(Chunks(3, 150, 0),))
PREFIX = Case(chunks=(Chunks(1, 500, 2 * BUDGET),))
SHORT_PREFIX = Case(chunks=(Chunks(1, 400, 128),))
MIXED = Case(decodes=(Decodes(3, 700),), chunks=(Chunks(1, 400, 0),))


@contextlib.asynccontextmanager
async def open_probe(target: Target, rule: StopRule, limits: ServerLimits) -> AsyncIterator[StepProbe]:
    """Provide a probe of a running server within the block."""
    async with Client(target) as client:
        card = (await fetch_info(client)).find_model(None)
        prompt_format = await find_prompt_format(client, card.id, COMPLETIONS)
        limits = msgspec.structs.replace(limits, max_model_len=limits.max_model_len or card.max_model_len)
        yield StepProbe(client=client, prompt_format=prompt_format, limits=limits, rule=rule)


@contextlib.contextmanager
def run_engine(*flags: str) -> Iterator[str]:
    """Provide the URL of a stand-in engine."""
    words = [sys.executable, "-m", "tests.servers.step_engine", "--max-num-batched-tokens", str(BUDGET), *flags]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[-1]
        finally:
            server.kill()


def measure(
    url: str, *cases: Case, limits: ServerLimits = LIMITS, seconds: float = 1.5, hide_launch: bool = False
) -> list[CaseSamples]:
    """Return the samples of cases on a server."""

    async def run() -> list[CaseSamples]:
        target = Target.from_url(url, timeout_s=30.0)
        async with open_probe(target, StopRule(seconds=seconds), limits) as probe:
            return [await measure_case(probe, case, hide_launch=hide_launch) for case in cases]

    return asyncio.run(run())


def expect_ms(case: Case, *, separate: bool = False) -> float:
    """Return the time of a case by the engine's step function; with `separate` decodes and chunks run in sequence."""
    contexts = [d.context for d in case.decodes for _ in range(d.requests)]
    chunks = [(c.tokens, c.prefix) for c in case.chunks for _ in range(c.chunks)]
    if separate:
        return compute_step_ms(contexts, []) + compute_step_ms([], chunks)
    return compute_step_ms(contexts, chunks)


def check_median(found: CaseSamples, expected_ms: float, low: float = 0.97, high: float = 1.5) -> None:
    """Check a median; on a busy machine steps last longer than they should, but never less."""
    assert low * expected_ms <= np.median(found.samples_ms) <= high * expected_ms, found.samples_ms


def fetch_gaps_ms(url: str, prompts: int, decodes: int) -> list[float]:
    """Return the time since the previous step for each step with this batch, by the engine's clock."""
    with urllib.request.urlopen(f"{url}/steps") as answer:  # noqa: S310 - the stand-in's own address
        steps = json.loads(answer.read())
    pairs = itertools.pairwise(steps)
    return [
        (step[0] - before[0]) * 1e3 for before, step in pairs if step[1:] == [prompts, decodes] and before[2] == decodes
    ]


@pytest.mark.parametrize("flags", [(), ("--asynchronous",), ("--separate",)], ids=["plain", "asynchronous", "separate"])
def test_gap_between_decode_tokens_is_the_step_time(flags: tuple[str, ...]) -> None:
    """4 requests at 900 tokens take 20 + 4 · 0.5 + 4 · 900 · 0.001 = 25.6 ms; the window is centred on that context."""
    with run_engine(*flags) as url:
        [found] = measure(url, DECODES)
        gaps = fetch_gaps_ms(url, 0, 4)
    assert found.method is Method.DECODE
    check_median(found, 25.6)
    steps = len(found.samples_ms)
    windows = [float(np.median(gaps[first : first + steps])) for first in range(len(gaps) - steps + 1)]
    assert any(np.median(found.samples_ms) == pytest.approx(median, rel=0.03) for median in windows)
    assert found.context_mean == pytest.approx(900, abs=16)
    assert found.context_min is not None
    assert found.context_max is not None
    assert found.context_min < 900 < found.context_max
    assert found.divided_share == 0.0


def test_window_starts_when_the_context_is_reached() -> None:
    """Prompts for steps of 64 tokens are 28 tokens shorter than for 512, so the window starts later."""
    with run_engine() as url:
        [found] = measure(url, DECODES, limits=ServerLimits(max_batched_tokens=64))
    assert found.context_mean == pytest.approx(900, abs=16)


@pytest.mark.parametrize("flags", [(), ("--asynchronous",)], ids=["plain", "asynchronous"])
def test_prompts_are_timed_alone_together_and_after_a_prefix(flags: tuple[str, ...]) -> None:
    """500 tokens take 20 + 10 ms, and 5.1 ms more after 1,024; 400 after 128: 20 + 8 + 0.5 ms; 3 × 150: 20 + 9 ms."""
    with run_engine(*flags) as url:
        one, several, prefix, short = measure(url, CHUNK, SEVERAL, PREFIX, SHORT_PREFIX)
        [alone] = measure(url, CHUNK, limits=msgspec.structs.replace(LIMITS, max_model_len=2 * BUDGET))
    assert [one.method, several.method, prefix.method] == [Method.BEHIND, Method.BEHIND, Method.PREFIX]
    assert short.method is Method.BEHIND
    assert alone.method is Method.PREFILL
    check_median(one, expect_ms(CHUNK))
    check_median(alone, expect_ms(CHUNK))
    check_median(several, expect_ms(SEVERAL))
    check_median(prefix, expect_ms(PREFIX), low=0.9)
    check_median(short, expect_ms(SHORT_PREFIX))


def test_step_of_prompts_hides_the_launch_time_of_the_host() -> None:
    """3 decodes at 700 tokens take 71 ms, so a step that starts 90 ms after its planning is 19 ms late."""
    with run_engine("--asynchronous", "--begin-ms", "90", "--time-factor", "3") as url:
        [late] = measure(url, MIXED)
        [hidden] = measure(url, MIXED, hide_launch=True)
    assert hidden.queued_steps is None
    assert np.median(hidden.samples_ms) == pytest.approx(3 * expect_ms(MIXED), rel=0.1)
    assert np.median(late.samples_ms) - np.median(hidden.samples_ms) == pytest.approx(19, abs=9)


def test_server_that_dies_after_a_full_step_raises_one_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The prompt that fills steps fails first; asyncio would log an exception that is not awaited."""

    async def fail(_probe: object, _tokens: list[int]) -> None:
        raise WorkerError("nothing answers")

    async def run() -> str:
        probe = step_probe.StepProbe(client=None, prompt_format=None, limits=LIMITS)  # type: ignore[arg-type]
        try:
            await step_probe._measure_several_ms(probe, [Chunks(1, 8, 0)])
        except WorkerError as e:
            return str(e)
        return ""

    monkeypatch.setattr(step_probe, "_send_prompts", fail)
    assert asyncio.run(run()) == "nothing answers"
    gc.collect()
    assert not caplog.records


@pytest.mark.parametrize("launch_ms", [0, 26])
def test_request_overhead_is_separated_from_launch_time(launch_ms: int) -> None:
    """A launch of 26 ms is not hidden by a step of 8 tokens (20.2 ms), but it is by one of 512 (30.2 ms)."""

    async def run(url: str) -> RequestTimes:
        target = Target.from_url(url, timeout_s=30.0)
        async with open_probe(target, StopRule(seconds=1.5), LIMITS) as probe:
            return await measure_request_times(probe)

    with run_engine("--asynchronous", "--launch-ms", str(launch_ms)) as url:
        found = asyncio.run(run(url))
    assert found.request_ms < found.launch_ms / 2
    assert found.launch_ms == pytest.approx(max(launch_ms, 20.2), rel=0.2)


FIRST_TOKEN_US = 20.0


def test_delay_of_first_tokens_is_measured_and_removed() -> None:
    """A first token delays all tokens by 20 µs for each prompt token, and the 20 ms and more of the steps after it hide that.

    Behind a prompt of 1,024 tokens, a step of 30 ms with one of 500 seems 524 · 0.02 = 10.5 ms shorter. It seems 10 ms longer behind
    decodes.
    """
    exposed = msgspec.structs.replace(MIXED, decodes=(Decodes(2, 700),))
    cases = CHUNK, SEVERAL, PREFIX, SHORT_PREFIX, MIXED

    async def run(url: str) -> float:
        target = Target.from_url(url, timeout_s=30.0)
        async with open_probe(target, StopRule(seconds=1.5), LIMITS) as probe:
            return await step_probe.measure_first_token_us(probe)

    with run_engine("--asynchronous", "--first-token-us", str(FIRST_TOKEN_US)) as url:
        assert 0.8 <= asyncio.run(run(url)) / FIRST_TOKEN_US <= 1.5
        found = measure(url, *cases, hide_launch=True) + measure(url, exposed)
    assert [one.late_tokens for one in found] == [500 - 1024, 450 - 1024, 500, 528 - 1408, 400 - 1018, 400]
    for one in found:
        late_ms = one.late_tokens * FIRST_TOKEN_US / 1e3
        whole = msgspec.structs.replace(one, samples_ms=[ms - late_ms for ms in one.samples_ms])
        check_median(whole, expect_ms(one.case), low=0.8)
    with run_engine("--asynchronous", "--max-model-len", "600") as url:
        assert asyncio.run(run(url)) == 0.0, "the stream is longer than the server takes"


@pytest.mark.parametrize(
    ("flags", "separate"),
    [((), False), (("--asynchronous",), False), (("--separate",), True)],
    ids=["plain", "asynchronous", "separate"],
)
def test_prompt_lengthens_the_gap_between_decode_tokens(flags: tuple[str, ...], separate: bool) -> None:
    """The engine runs one step of both, or two steps if it does not mix prompts and decodes."""
    with run_engine(*flags) as url:
        [found] = measure(url, MIXED)
        gaps = fetch_gaps_ms(url, 1, 3)
    assert found.method is Method.MIXED
    assert found.separate_prefill is separate
    check_median(found, expect_ms(MIXED, separate=separate))
    if not separate:  # each sample is one step of the engine, and steps differ on a busy machine
        apart = [min(abs(gap / sample - 1) for gap in gaps) for sample in found.samples_ms]
        assert np.median(apart) <= 0.05, (found.samples_ms, gaps)


@pytest.mark.parametrize("hide_launch", [False, True])
def test_chunk_with_a_prefix_is_timed_together_with_decodes(hide_launch: bool) -> None:
    """The previous step has 509 tokens of the prompt and 3 decodes."""
    case = Case(decodes=(Decodes(3, 700),), chunks=(Chunks(1, 400, BUDGET - 3),))
    with run_engine("--asynchronous") as url:
        [found] = measure(url, case, hide_launch=hide_launch)
    check_median(found, expect_ms(case))


def test_callback_runs_while_all_requests_decode() -> None:
    running: list[int] = []

    async def look(streams: DecodeStreams) -> None:
        await streams.wait_for_chunks(5)
        running.append(streams.started)

    async def run(url: str) -> None:
        target = Target.from_url(url, timeout_s=30.0)
        async with open_probe(target, StopRule(seconds=0.5), LIMITS) as probe:
            await measure_case(probe, DECODES, while_running=look)

    with run_engine() as url:
        asyncio.run(run(url))
    assert running == [4]


def test_server_with_fewer_slots_is_reported() -> None:
    """Two of four requests run; the others start only after these have ended."""
    with run_engine("--max-num-seqs", "2", "--time-factor", "0.05") as url, pytest.raises(NotRunningError) as failure:
        measure(url, Case(decodes=(Decodes(4, 40),)))
    assert (failure.value.running, failure.value.requests) == (2, 4)


def test_case_is_checked_before_requests_are_sent() -> None:
    with run_engine() as url, pytest.raises(UnsupportedCaseError):
        measure(url, Case(chunks=(Chunks(1, BUDGET + 1, 0),)))


def test_dead_engine_is_reported() -> None:
    with run_engine("--dies-after", "40") as url, pytest.raises(WorkerError):
        measure(url, DECODES)


@pytest.mark.parametrize(
    ("case", "limits", "refusal"),
    [
        (Case(), LIMITS, Refusal.EMPTY),
        (Case(decodes=(Decodes(4, 900),), use=HOT, after=(Chunks(1, 512, 0),)), LIMITS, Refusal.HOT),
        (Case(chunks=(Chunks(1, 500, 0),), use=UNEVEN, replicas=1), LIMITS, Refusal.REPLICAS),
        (Case(decodes=(Decodes(1, 90),), chunks=(Chunks(2, 50, 0),)), LIMITS, Refusal.MIXED_CHUNKS),
        (Case(decodes=(Decodes(1, 90),), chunks=(Chunks(1, 50, BUDGET),)), LIMITS, Refusal.PREFIX_MIXED),  # 511 tokens
        (Case(chunks=(Chunks(2, 50, BUDGET),)), LIMITS, Refusal.PREFIX_CHUNKS),
        (CHUNK, ServerLimits(), Refusal.BUDGET_UNKNOWN),
        (Case(chunks=(Chunks(1, 50, BUDGET + 100),)), LIMITS, Refusal.PREFIX_MULTIPLE),
        (
            Case(chunks=(Chunks(1, 50, 100),)),
            msgspec.structs.replace(LIMITS, max_model_len=3 * BUDGET),
            Refusal.PREFIX_MULTIPLE,
        ),
        (Case(chunks=(Chunks(1, BUDGET + 1, 0),)), LIMITS, Refusal.TOKENS),
        (DECODES, ServerLimits(max_requests=3), Refusal.REQUESTS),
        (DECODES, ServerLimits(max_model_len=1000), Refusal.LENGTH),
        (DECODES, ServerLimits(kv_tokens=3000), Refusal.KV),
        (Case(decodes=(Decodes(4, 1),)), LIMITS, Refusal.CONTEXT),
    ],
    ids=lambda value: value.name if isinstance(value, Refusal) else "",
)
def test_case_that_requests_cannot_produce_is_refused(case: Case, limits: ServerLimits, refusal: Refusal) -> None:
    with pytest.raises(UnsupportedCaseError) as error:
        check_case(limits, case)
    assert error.value.refusal is refusal


def test_step_time_is_the_median_gap_over_requests() -> None:
    """Steps take 10, 12 and 11 ms; a token that is 2 ms late and the unfinished step do not count."""
    first = np.array([0.0, 0.010, 0.022, 0.033])
    times = [first, first + 0.0002, np.append(first + np.array([0.001, 0.003, 0.001, 0.001]), 0.045)]
    assert find_moment_between_steps(times, -0.001) == pytest.approx(0.028)
    assert compute_step_times_ms(times, -0.001) == pytest.approx([10.0, 12.0, 11.0])
    assert compute_step_times_ms(times, 0.016) == pytest.approx([11.0])
    assert compute_step_times_ms(times, 0.03) == []


def test_tokens_of_one_read_share_the_time_since_the_previous_read() -> None:
    """Two chunks of one token each have the time of one read."""
    assert merge_arrivals([0.0, 0.03, 0.03, 0.04], [1, 1, 1, 2]) == ([0.0, 0.03, 0.04], [1, 2, 2])


def test_gap_of_a_prompt_is_the_one_that_contains_its_token() -> None:
    """Decode steps take 10 ms, the step with the prompt 19.9 ms.

    Its token arrives at 0.030 with that step's others, 3 ms after them because a first token takes longer to send, or
    at 0.025 between two steps.
    """
    times = np.array([0.0, 0.010, 0.0299, 0.040, 0.050])
    for came in (0.030, 0.0329, 0.025, 0.0299):
        assert find_gap_ms(times, came, 0.005) == pytest.approx((19.9, 0.0299))
    assert find_gap_ms(times, 0.055, 0.005) is None


def test_gap_of_a_short_step_is_not_that_of_a_longer_step_next_to_it() -> None:
    """Another prompt's step of 150 ms ends at 0.160, the step of this prompt 5 ms later, and a decode step at 0.175."""
    times = np.array([0.0, 0.010, 0.160, 0.165, 0.175])
    for came in (0.1649, 0.165, 0.1655):
        assert find_gap_ms(times, came, 0.005) == pytest.approx((5.0, 0.165))


@pytest.mark.parametrize("late_ms", [0.0, 13.0, 37.0])
@pytest.mark.parametrize("chunk", [1, 7])
def test_delay_of_a_token_is_what_those_after_it_catch_up(late_ms: float, chunk: int) -> None:
    """Steps take 2 ms from 0.1 s on. Those that end while the front end is busy arrive 0.5 ms after each other, or several in one
    chunk, which arrives a whole step after the late token. A later pause of the server, from its 40th step on, does not count.
    """
    punctual = 0.1 + 2e-3 * np.arange(60)
    punctual[40:] += 0.03
    times = np.maximum(punctual, 0.1 + late_ms / 1e3 + 0.5e-3 * np.arange(60))
    if chunk > 1 and late_ms:
        late = int(np.flatnonzero(times == punctual)[0])
        times[1:late] = times[0] + 2e-3 * (1 + np.arange(late - 1) // chunk)
        times = np.maximum(times, punctual)
    before = 0.1 - 2e-3 * np.arange(5, 0, -1)
    assert compute_delay_ms(np.concatenate((before, times)), 0.0995) == pytest.approx(late_ms, abs=1e-6)
    assert compute_delay_ms(times, times[-2]) is None


class FakeWindow:
    """Window in which each poll finds 40 steps more; `all_samples` are of all requests, and two always have 1 ms."""

    def __init__(self, all_samples: list[float]) -> None:
        self.all_samples, self.steps, self.full_looks = all_samples, 0, 0
        self.streams = self

    def check_running(self) -> None:
        """Accept, as no request fails."""

    def list_samples_ms(self, requests: int | None = None) -> list[float]:
        """Return all samples up to now."""
        self.steps += 40 if requests else 0
        self.full_looks += not requests
        return [1.0] * self.steps if requests else self.all_samples[: self.steps]


SCATTERED = [0.9, 1.1] * 40  # samples with an interval of the median of ±10 %


@pytest.mark.parametrize(
    ("all_samples", "samples", "precise"),
    [
        ([1.0] * 400, 80, True),
        (SCATTERED + [1.0] * 320, 120, True),
        (SCATTERED * 5, 400, False),
    ],
)
def test_window_ends_when_samples_of_all_requests_are_precise(
    monkeypatch: pytest.MonkeyPatch, all_samples: list[float], samples: int, precise: bool
) -> None:
    """Samples of the two requests that are polled first are precise at once, long before the time limit."""
    monkeypatch.setattr(step_probe, "POLL_INTERVAL_S", 0.0)
    window = FakeWindow(all_samples)
    plan = step_probe.DecodePlan(steps_before=0, window=64, max_steps=400, steps_after=0)
    found = asyncio.run(step_probe._take_steps(StopRule(seconds=60), window, plan, lambda _: None))  # type: ignore[arg-type]
    assert (len(found[0]), found[1]) == (samples, precise)
    assert window.full_looks < 10


def test_first_poll_of_samples_imports_no_module() -> None:
    """An import takes tens of ms, during which the client reads no tokens."""
    program = """
import sys
import numpy as np
from dcpbench.records.stats import StopRule
from dcpbench.servers import step_probe
from dcpbench.servers.decode_streams import compute_step_times_ms
before = set(sys.modules)
StopRule().get_stop_reason(compute_step_times_ms([np.arange(100.0)] * 4, 0.5), 1.0)
print(sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
