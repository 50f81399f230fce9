"""Measure steps of a running engine over HTTP, as a client sees them: cases of step-time files, without its Python. No torch.

    decode   all requests stream; a sample is the gap between two tokens of a request
    behind   prompts that share a step wait behind a prompt that fills the steps before; a sample is the time from its first token to
             theirs; a prefix shorter than a step shares the last of these steps
    prefill  a prompt on an idle server that takes no prompt of two steps; a sample is its time to first token
    prefix   the time to first token of a long prompt minus that of a prompt without its last chunk
    mixed    a prompt arrives while requests decode; a sample is the gap of their tokens in which its first token comes. It waits behind a
             prompt that fills the steps before, which hide how long the host takes to begin a step, unless hide_launch is False; the
             steps between hold the prefix of its last chunk

Samples contain what a user sees: HTTP, the scheduler and the detokeniser. The front end of a server may be busy with the first token
of a prompt, in proportion to its length, and sends no other tokens meanwhile (measure_first_token_us). A sample is then too long if it
ends with such a token, and too short if it begins with one; `CaseSamples.late_tokens` states by how many prompt tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import math
import secrets
import statistics
import time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from dcpbench.errors import UsageError, WorkerError
from dcpbench.records.stats import StopRule
from dcpbench.servers.answers import StreamReply
from dcpbench.servers.client import Client, RequestError
from dcpbench.servers.decode_streams import DecodeStreams, StepWindow, StreamedRequest, compute_delay_ms, find_gap_ms
from dcpbench.servers.descriptors import raise_open_file_limit
from dcpbench.servers.load import freeze_garbage_collector, set_realtime_priority
from dcpbench.servers.prompt_format import PATHS, PromptFormat
from dcpbench.serving.step_times import HOT, UNEVEN, Case, Chunks, Decodes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from contextlib import AbstractContextManager

    Hook = Callable[[DecodeStreams], Awaitable[None]]

MAX_CONTEXT_ERROR = 0.04  # deviation of the mean context of a window that is measured for longer than planned
DROPPED_STEPS = 4  # steps that are not timed after the last request has received its first token
WINDOW_STEPS, MAX_STEPS = 64, 400  # steps around which a window is centred, and after which it ends
HOOK_STEPS = 512  # output tokens that are left for a function that is called after the window
USUAL_TOKEN_BUDGET = 8192  # prompt tokens of a step if the server does not report its limit
MIN_REPEATS = 7  # fewer samples have no 95 % interval of the median (records/stats.py)
GAP_REQUESTS = 8  # requests by which the gap of a mixed case is measured
STEPS_BETWEEN = 4  # decode steps between two prompts of a mixed case
DELAY_STREAMS = 3  # streams, one after the other: delays of first tokens fall into two groups, and one stream shows few
CATCH_UP_STEPS = 48  # decode steps after a first token, of which the last half has caught up with its delay
OVERHEAD_TOKENS, OVERHEAD_REPEATS = 8, 9
MIN_REQUEST_MS = 0.1  # of a request outside of steps: a server never sees one in the instant of another's last token
POLL_INTERVAL_S, PROGRESS_INTERVAL_S = 0.2, 1.0  # between two looks at the samples, and between two reports of progress
MORE_STEPS = 1.25  # factor by which the steps grow until the samples of all requests are computed again
LOOKED_REQUESTS = 2  # requests of which the samples are looked at: tokens are not read meanwhile
FILLED_S = 0.02  # after which prompts follow the one that fills steps
SETTLE_S = 0.2  # after requests were cancelled; the engine ends them a step later
FILLED_STEPS = 2  # steps of the prompt behind which several prompts wait: a scheduler may plan one step ahead
PREFIX_FILLED_STEPS = FILLED_STEPS + 1  # the same for a prompt that begins in the last of them
MIN_DELAY_SHARE = 0.5  # of a decode step: shorter delays of a first token are noise
MAX_SPREAD = 0.1  # of a step: prompts did not share it if their first tokens are further apart
MAX_LATER = 0.5  # of a decode step between tokens of decodes and a prompt's first token that are of the same step


class Refusal(enum.Enum):
    """Reasons why a case cannot be produced by requests to a server, as sentences."""

    EMPTY = "the step has no work; give it decodes or chunks."
    HOT = "steps that follow others while the GPU is hot cannot be ordered over HTTP; leave hot cases out."
    REPLICAS = "the server chooses which replica takes a prompt; leave out cases of single replicas."
    MIXED_CHUNKS = (
        "several prompts that arrive while others decode need not share a step; measure one prompt with decodes."
    )
    PREFIX_CHUNKS = "chunks of several prompts with a prefix cannot be made to share a step; measure one such chunk."
    PREFIX_MIXED = "a chunk that runs with decodes cannot begin at {needed:,} tokens, which is no multiple of the {limit:,} prompt tokens of such a step; choose a multiple, such as {limit:,}."
    BUDGET_UNKNOWN = "the maximum number of tokens in a step of the server is unknown; state it (vLLM: --max-num-batched-tokens, SGLang: --chunked-prefill-size)."
    PREFIX_MULTIPLE = "a chunk begins at {needed:,} tokens only if that is a multiple of the {limit:,} tokens that the server takes in a step, or fewer if it takes prompts of three steps; choose such a prefix."
    TOKENS = "it has {needed:,} tokens, and the server takes {limit:,} in a step; choose fewer, or start the server with more (vLLM: --max-num-batched-tokens, SGLang: --chunked-prefill-size)."
    REQUESTS = "it needs {needed:,} requests at once, and the server runs {limit:,}; start it with more (vLLM: --max-num-seqs {needed}, SGLang: --max-running-requests {needed})."
    LENGTH = "its requests have up to {needed:,} tokens while they are measured, and the server takes {limit:,}; start it with more (vLLM: --max-model-len {needed}, SGLang: --context-length {needed})."
    KV = "its requests have {needed:,} tokens together, and the server's KV cache holds {limit:,}; choose fewer requests or a shorter context."
    CONTEXT = "a request attends to {limit:,} tokens at least when it is timed, and the case asks for {needed:,}; choose a longer context."


class UnsupportedCaseError(UsageError):
    """Report a case that requests to this server cannot produce; `refusal` is the reason."""

    def __init__(self, case: Case, refusal: Refusal, *, needed: int = 0, limit: int = 0) -> None:
        """Keep the reason with its numbers; `sentence` describes it without the case."""
        self.sentence = refusal.value.format(needed=needed, limit=limit)
        super().__init__(f"{case}: {self.sentence}")
        self.case, self.refusal, self.needed, self.limit = case, refusal, needed, limit


MIN_CONTEXT = 2 * (1 + DROPPED_STEPS + 1)  # tokens: shorter ones leave no steps before the window


class ServerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a server's steps and requests; None: unknown."""

    max_batched_tokens: int | None = None  # of a step: vLLM's --max-num-batched-tokens, SGLang's --chunked-prefill-size
    max_requests: int | None = None  # requests in a step: vLLM's --max-num-seqs, SGLang's --max-running-requests
    max_model_len: int | None = None
    kv_tokens: int | None = None


UNLIMITED, DEFAULT_RULE = ServerLimits(), StopRule()
NOTHING = contextlib.nullcontext()


class Method(enum.StrEnum):
    """Ways in which samples are obtained; see the module."""

    DECODE = "decode gaps"
    PREFILL = "time to first token"
    BEHIND = "time after a full step"
    PREFIX = "difference of times to first token"
    MIXED = "gap of decodes"


class CaseSamples(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the measured times of a case."""

    case: Case
    samples_ms: list[float]
    method: Method
    precise: bool  # True if the 95 % interval of the median is within the precision of the stop rule
    context_min: int | None = None
    context_max: int | None = None
    context_mean: float | None = None  # of KV tokens to which decodes attended; None without decodes
    divided_share: float = 0.0  # of tokens that arrived several in a chunk: times of their steps are known together
    separate_prefill: bool | None = None  # True if the prompt of a mixed case ran in a separate step; None for others
    decode_ms: float | None = None  # time of a step with the decodes of a mixed case alone. None for others
    queued_steps: float | None = (
        None  # decode steps between the sending of a mixed case's prompt and the begin of its step:
    )
    # up to 1 if an engine decides a step after it has read the one before, from 1 to 2 if it decides one step ahead
    counted_by: str = ""  # source of the number of tokens in a chunk, as in records of servers; empty without decodes
    client_cpu_share: float | None = None  # CPU time of the client over that of a decode window: at 1 it is too slow
    discarded: int = 0  # repeats that were left out because their prompts did not share a step
    late_tokens: int = 0  # prompt tokens of first tokens that end a sample, less those of first tokens that begin it


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepProbe:
    """A server with all that is needed to measure its steps."""

    client: Client
    prompt_format: PromptFormat
    limits: ServerLimits = UNLIMITED
    rule: StopRule = DEFAULT_RULE
    realtime: bool = True  # True if the client gets real-time priority while it measures, if the kernel allows it


async def measure_case(
    probe: StepProbe,
    case: Case,
    *,
    during_window: AbstractContextManager[object] = NOTHING,
    while_running: Hook | None = None,
    tell: Callable[[str], None] = lambda _: None,
    hide_launch: bool = False,
) -> CaseSamples:
    """Return the times of a case on the server, which must be idle otherwise.

    Args:
        probe: The server.
        case: Work of a step.
        during_window: Entered for the timed window of a decode case.
        while_running: Called after the timed window of a decode case, while all its requests still decode.
        tell: Called with the progress of a decode case.
        hide_launch: True to time steps of decodes and chunks behind other steps with chunks instead of behind decode steps, if the
            server takes the prompts for that.

    Raises:
        UnsupportedCaseError: Requests to this server cannot produce the case.
        NotRunningError: The server did not decode all requests at the same time.
        WorkerError: Requests failed.
    """
    check_case(probe.limits, case)
    streams = case.requests + 1
    with (
        raise_open_file_limit(streams, certain=True),
        freeze_garbage_collector(),
        set_realtime_priority(wanted=probe.realtime),
    ):
        if case.decodes and case.chunks:
            return await _measure_mixed(probe, case, hide_launch=hide_launch and _takes_filler(probe.limits))
        if case.decodes:
            return await _measure_decodes(probe, case, during_window, while_running, tell)
        return await _measure_chunks(probe, case)


def check_case(limits: ServerLimits, case: Case) -> None:
    """Raise UnsupportedCaseError if requests to a server with these limits cannot produce a case."""
    if not case.decodes and not case.chunks:
        raise UnsupportedCaseError(case, Refusal.EMPTY)
    if case.use == HOT or case.after or case.since:
        raise UnsupportedCaseError(case, Refusal.HOT)
    if case.use == UNEVEN or case.replicas:
        raise UnsupportedCaseError(case, Refusal.REPLICAS)
    if case.chunks:
        _check_chunks(limits, case)
    if case.decodes and min(d.context for d in case.decodes) < MIN_CONTEXT:
        raise UnsupportedCaseError(
            case, Refusal.CONTEXT, needed=min(d.context for d in case.decodes), limit=MIN_CONTEXT
        )
    for refusal, needed, limit in (
        (Refusal.REQUESTS, case.requests, limits.max_requests),
        (Refusal.LENGTH, max(_list_lengths(limits, case)), limits.max_model_len),
        (Refusal.KV, sum(_list_lengths(limits, case)), limits.kv_tokens),
    ):
        if limit is not None and needed > limit:
            raise UnsupportedCaseError(case, refusal, needed=needed, limit=limit)


def _check_chunks(limits: ServerLimits, case: Case) -> None:
    """Raise UnsupportedCaseError if the chunks of a case cannot be placed in one step."""
    count, prefix = sum(c.chunks for c in case.chunks), max(c.prefix for c in case.chunks)
    for refusal, holds in (
        (Refusal.MIXED_CHUNKS, case.decodes and count > 1),
        (Refusal.PREFIX_CHUNKS, prefix and count > 1),
        (Refusal.BUDGET_UNKNOWN, limits.max_batched_tokens is None),
    ):
        if holds:
            raise UnsupportedCaseError(case, refusal)
    budget, requests = limits.max_batched_tokens or 0, sum(d.requests for d in case.decodes)
    if requests and prefix % max(budget - requests, 1):
        raise UnsupportedCaseError(case, Refusal.PREFIX_MIXED, needed=prefix, limit=max(budget - requests, 1))
    if not requests and prefix % budget and not (prefix < budget and _takes_filler(limits, PREFIX_FILLED_STEPS)):
        raise UnsupportedCaseError(case, Refusal.PREFIX_MULTIPLE, needed=prefix, limit=budget)
    tokens = sum(c.chunks * c.tokens for c in case.chunks) + requests
    if tokens > budget:
        raise UnsupportedCaseError(case, Refusal.TOKENS, needed=tokens, limit=budget)


def _list_lengths(limits: ServerLimits, case: Case) -> list[int]:
    """Return the tokens of each request of a case at the end of its measurement."""
    plan = plan_decodes(limits, case)
    lengths = [d.context + plan.steps_after for d in case.decodes for _ in range(d.requests)]
    lengths += [c.prefix + c.tokens + 1 for c in case.chunks for _ in range(c.chunks)]
    several = not case.decodes and sum(c.chunks for c in case.chunks) > 1
    return [*lengths, FILLED_STEPS * (limits.max_batched_tokens or 0) + 1] if several else lengths


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """Steps of a decode case around its window."""

    steps_before: int  # tokens by which prompts are shorter than the context
    window: int  # steps around which the window is centred
    max_steps: int  # steps after which the window ends
    steps_after: int  # tokens beyond the context that a request may reach


def plan_decodes(limits: ServerLimits, case: Case) -> DecodePlan:
    """Return by how much the prompts of decodes are shorter than their context.

    While prompts are prefilled one after the other, an engine that mixes prompts with decodes gives the first requests a token in
    each step; on average each gets half as many tokens as there are such steps.
    """
    if not case.decodes:
        return DecodePlan(0, 0, 0, 0)
    budget = limits.max_batched_tokens or USUAL_TOKEN_BUDGET
    shortest = min(d.context for d in case.decodes)
    prefill_steps = -(-sum(d.requests * d.context for d in case.decodes) // budget) + 1
    window = max(min(WINDOW_STEPS, shortest // 2), 1)
    max_steps = min(window + int(2 * MAX_CONTEXT_ERROR * shortest), MAX_STEPS)
    before = min(prefill_steps // 2 + DROPPED_STEPS + window // 2 + 2, shortest - 1)
    return DecodePlan(before, window, max_steps, prefill_steps + MAX_STEPS + HOOK_STEPS)


async def _measure_decodes(
    probe: StepProbe,
    case: Case,
    during_window: AbstractContextManager[object],
    while_running: Hook | None,
    tell: Callable[[str], None],
) -> CaseSamples:
    plan = plan_decodes(probe.limits, case)
    async with DecodeStreams(probe.client, _make_decodes(probe, case)) as streams:
        window = await _open_window(streams, case, plan, tell)
        with during_window:
            began, cpu = time.perf_counter(), time.process_time()
            samples, precise = await _take_steps(probe.rule, window, plan, tell)
            cpu_share = (time.process_time() - cpu) / (time.perf_counter() - began)
        of_window = _describe_window(window, len(samples))
        if while_running is not None:
            await while_running(streams)
    await _settle(probe)
    return CaseSamples(
        case=case,
        samples_ms=samples,
        method=Method.DECODE,
        precise=precise,
        **of_window,
        counted_by=streams.replies[0].counted_by,
        client_cpu_share=cpu_share,
    )


def _describe_window(window: StepWindow, steps: int) -> dict[str, Any]:
    """Return the fields of CaseSamples about the first `steps` steps: contexts, and the share of tokens that arrived several at a time."""
    low, high, mean = window.compute_contexts(steps)
    divided = window.streams.compute_divided_share(window.begin_s)
    return {"context_min": low, "context_max": high, "context_mean": mean, "divided_share": divided}


async def _take_steps(
    rule: StopRule, window: StepWindow, plan: DecodePlan, tell: Callable[[str], None]
) -> tuple[list[float], bool]:
    """Return the times of the steps of a window, and whether they are precise.

    The window ends when the stop rule is met after as many steps as planned, at its time limit or after the maximum number of steps.
    The times are medians over all requests. Computing them takes long enough to delay the client, so that a few requests are
    looked at until they meet the rule.
    """
    began = reported_s = time.perf_counter()
    needed = plan.window
    while True:
        await asyncio.sleep(POLL_INTERVAL_S)
        window.streams.check_running()
        looked = time.perf_counter()
        samples = window.list_samples_ms(LOOKED_REQUESTS)[: plan.max_steps]
        verdict = rule.get_stop_reason(samples, looked - began)
        is_over = verdict == "noisy" or len(samples) == plan.max_steps
        if is_over or (verdict is not None and len(samples) >= needed):
            found = window.list_samples_ms()[: plan.max_steps]
            of_all = rule.get_stop_reason(found, looked - began)
            if is_over or of_all is not None:
                return found, of_all == "precise"
            needed = math.ceil(len(samples) * MORE_STEPS)
        if looked - reported_s >= PROGRESS_INTERVAL_S:
            reported_s = looked
            tell(f"{len(samples)} steps" + (f" of {statistics.median(samples):.2f} ms" if samples else ""))


async def _open_window(
    streams: DecodeStreams, case: Case, plan: DecodePlan, tell: Callable[[str], None] = lambda _: None
) -> StepWindow:
    """Return the window of steps once all requests decode and their context is half a window below the case's."""
    requests = sum(d.requests for d in case.decodes)
    context = sum(d.requests * d.context for d in case.decodes) / requests
    await streams.wait_until_started(lambda started: tell(f"prefilled {started} of {len(streams.requests)} prompts"))
    await streams.wait_for_chunks(DROPPED_STEPS)
    await streams.wait_for_context(context - plan.window / 2 - 2)
    return await streams.open_window()


def _make_decodes(probe: StepProbe, case: Case) -> list[StreamedRequest]:
    """Return the requests of the decodes."""
    plan = plan_decodes(probe.limits, case)
    output = plan.steps_before + plan.steps_after
    prompts = [d.context - plan.steps_before for d in case.decodes for _ in range(d.requests)]
    limit = probe.limits.max_model_len
    return [
        _make_request(probe, tokens, output if limit is None else min(output, limit - tokens)) for tokens in prompts
    ]


def _make_request(probe: StepProbe, tokens: int, output: int) -> StreamedRequest:
    """Return a request with a new random prompt, which no prefix cache holds."""
    generator = np.random.Generator(np.random.PCG64(secrets.randbits(64)))
    prompt = generator.integers(0, probe.prompt_format.vocab, tokens, dtype=np.int32)
    body = probe.prompt_format.encode_body(prompt, output)
    data = probe.client.target.encode_request("POST", PATHS[probe.prompt_format.endpoint], body)
    return StreamedRequest(data, tokens, output)


async def _settle(probe: StepProbe) -> None:
    """Wait until the server is idle after requests were cancelled."""
    await asyncio.sleep(SETTLE_S)
    await _send_prompts(probe, [OVERHEAD_TOKENS])


async def _send_prompts(probe: StepProbe, tokens: Sequence[int]) -> list[tuple[float, float]]:
    """Send prompts at once, each for one token; return when each was sent and when its token came.

    Raise WorkerError if one of them fails.
    """
    requests = [_make_request(probe, count, 1) for count in tokens]
    with contextlib.suppress(RequestError):
        await probe.client.open_connections(len(requests))
    return await asyncio.gather(*(_send_prompt(probe, request) for request in requests))


async def _send_prompt(probe: StepProbe, request: StreamedRequest) -> tuple[float, float]:
    reply, sent = StreamReply(request.output_tokens, prompt_tokens=request.prompt_tokens), time.perf_counter()
    try:
        await probe.client.send_request(request.data, reply)
    except RequestError as e:
        raise WorkerError(f"a prompt of the step failed: {e.sentence}") from e
    return sent, reply.chunk_s[0]


async def _measure_ttft_ms(probe: StepProbe, tokens: int) -> float:
    """Return the time to first token of a prompt on the idle server."""
    [(sent, came)] = await _send_prompts(probe, [tokens])
    return (came - sent) * 1e3


async def _measure_overhead_ms(probe: StepProbe) -> float:
    """Return the median time to first token of a very short prompt on the idle server."""
    await _measure_ttft_ms(probe, OVERHEAD_TOKENS)
    return statistics.median([await _measure_ttft_ms(probe, OVERHEAD_TOKENS) for _ in range(OVERHEAD_REPEATS)])


@dataclasses.dataclass(frozen=True)
class RequestTimes:
    """Times of a request on an idle server that its steps do not contain."""

    request_ms: float  # time outside of steps: HTTP, tokenizing, scheduling on an idle server, and the way back
    launch_ms: float  # for which the host launches a step with prompts; a step behind a longer one hides it
    shortest_ms: float = 0.0  # of the shortest step with a prompt, which `launch_ms` is at least; 0: unknown


async def measure_first_token_us(probe: StepProbe) -> float:
    """Return the time in µs for which the server's front end sends no tokens with the first token of a prompt, per prompt token.

    A stream decodes when the first token of another prompt comes. Its tokens that come late are followed by others at once. Return 0
    if the server does not take such a stream.
    """
    budget, case = probe.limits.max_batched_tokens or USUAL_TOKEN_BUDGET, Case(decodes=(Decodes(1, MIN_CONTEXT),))
    longest = probe.limits.max_model_len
    tokens = FILLED_STEPS * budget if longest is None else min(FILLED_STEPS * budget, longest - 1)
    try:
        check_case(probe.limits, case)
    except UnsupportedCaseError:
        return 0.0
    delays_ms: list[float] = []
    with freeze_garbage_collector(), set_realtime_priority(wanted=probe.realtime):
        for _ in range(DELAY_STREAMS):
            found, step_ms = await _measure_delays_ms(probe, case, tokens)
            delays_ms += found
    late_ms = _compute_middle_mean(delays_ms) if delays_ms else 0.0
    return 1e3 * late_ms / tokens if late_ms > MIN_DELAY_SHARE * step_ms else 0.0


def _compute_middle_mean(samples: Sequence[float]) -> float:
    """Return the mean of the middle half of samples: others may come from pauses of the client."""
    left_out = len(samples) // 4
    return statistics.fmean(sorted(samples)[left_out : len(samples) - left_out])


async def _measure_delays_ms(probe: StepProbe, case: Case, tokens: int) -> tuple[list[float], float]:
    """Return the delays of a stream's tokens by first tokens of prompts of `tokens` tokens, and the time of its steps."""
    async with DecodeStreams(probe.client, _make_decodes(probe, case)) as streams:
        window = await _open_window(streams, case, plan_decodes(probe.limits, case))
        await streams.wait_for_chunks(STEPS_BETWEEN)
        step_ms = statistics.median(window.list_samples_ms())

        async def take() -> float | None:
            [(_, came)] = await _send_prompts(probe, [tokens])
            await streams.wait_for_chunks(CATCH_UP_STEPS)
            [times] = streams.list_arrivals()
            return compute_delay_ms(times, came - MAX_LATER * step_ms / 1e3)

        delays_ms, _, _ = await _repeat(probe, take, lambda: len(window.list_samples_ms()) >= MAX_STEPS)
    await _settle(probe)
    return delays_ms, step_ms


async def measure_request_times(probe: StepProbe, first_token_us: float = 0.0) -> RequestTimes:
    """Return the times of a request outside of steps, from times to first token on the idle server.

    A prompt that fills a step takes its time behind another prompt, where the launch is hidden, and the time of a request; the
    launch is shorter than such a step. The time to first token of a very short prompt then is that of a request and of the launch.
    All times are without `first_token_us` of each prompt token.
    """
    overhead, budget = await _measure_overhead_ms(probe), probe.limits.max_batched_tokens
    overhead -= OVERHEAD_TOKENS * first_token_us / 1e3
    if budget is None or not _takes_filler(probe.limits):
        decode = await measure_case(probe, Case(decodes=(Decodes(1, MIN_CONTEXT),)))
        request = max(overhead - statistics.median(decode.samples_ms), MIN_REQUEST_MS)
        return RequestTimes(request, max(overhead - request, 0.0))

    async def measure_behind_ms(tokens: int) -> float | None:
        """Return the median time of a prompt behind another one."""
        chunks = [Chunks(1, tokens, 0)]
        found, _, _ = await _repeat(probe, lambda: _measure_several_ms(probe, chunks))
        late_us = first_token_us * _count_late_tokens(probe.limits, chunks)
        return statistics.median(found) - late_us / 1e3 if found else None

    short, whole = await measure_behind_ms(OVERHEAD_TOKENS), await measure_behind_ms(budget)
    alone, _, _ = await _repeat(probe, lambda: _measure_ttft_ms(probe, budget))
    request = overhead - (short or 0.0)
    if whole is not None:
        request = min(request, statistics.median(alone) - budget * first_token_us / 1e3 - whole)
    request = max(request, MIN_REQUEST_MS)
    return RequestTimes(request, max(overhead - request, 0.0), short or 0.0)


def _takes_filler(limits: ServerLimits, steps: int = FILLED_STEPS) -> bool:
    """Return True if the server takes a prompt that fills the steps behind which others are timed."""
    budget, longest = limits.max_batched_tokens, limits.max_model_len
    return budget is not None and (longest is None or steps * budget < longest)


async def _measure_chunks(probe: StepProbe, case: Case) -> CaseSamples:
    """Measure a step of chunks alone, in one of three ways."""
    chunks = [c for c in case.chunks for _ in range(c.chunks)]
    late_tokens = chunks[0].tokens
    if chunks[0].prefix and not chunks[0].prefix % (probe.limits.max_batched_tokens or 1):
        method, take = Method.PREFIX, lambda: _measure_difference_ms(probe, chunks[0])
    elif len(chunks) > 1 or _takes_filler(probe.limits):
        method, take = Method.BEHIND, lambda: _measure_several_ms(probe, chunks)
        late_tokens = _count_late_tokens(probe.limits, chunks)
    else:
        method, take = Method.PREFILL, lambda: _measure_ttft_ms(probe, chunks[0].tokens)
    samples, discarded, precise = await _repeat(probe, take)
    if not samples and len(chunks) == 1 and method is Method.BEHIND and not chunks[0].prefix:
        method, late_tokens = Method.PREFILL, chunks[0].tokens
        samples, discarded, precise = await _repeat(probe, lambda: _measure_ttft_ms(probe, chunks[0].tokens))
    if not samples:
        raise WorkerError(
            f"{case}: its prompts never shared a step in {discarded} attempts; the server may limit how many prompts begin at "
            "once. Measure a single prompt instead."
        )
    return CaseSamples(
        case=case,
        samples_ms=samples,
        method=method,
        precise=precise,
        discarded=discarded,
        late_tokens=late_tokens,
    )


async def _repeat(
    probe: StepProbe, take: Callable[[], Awaitable[float | None]], is_over: Callable[[], bool] = lambda: False
) -> tuple[list[float], int, bool]:
    """Take samples until the stop rule is met or `is_over`; return them, the number of discarded ones, and whether they are
    precise.

    The first one is a warm-up. None is a sample to discard.
    """
    rule = dataclasses.replace(probe.rule, least_samples=MIN_REPEATS)
    await take()
    samples: list[float] = []
    discarded, began = 0, time.perf_counter()
    while True:
        sample = await take()
        if sample is None:
            discarded += 1
        else:
            samples.append(sample)
        elapsed = time.perf_counter() - began
        if (verdict := rule.get_stop_reason(samples, elapsed)) is not None:
            return samples, discarded, verdict == "precise"
        if samples and is_over():
            return samples, discarded, False
        if discarded >= MIN_REPEATS and not samples:
            return [], discarded, False


@dataclasses.dataclass(frozen=True)
class _Sent:
    """Prompts that were sent while another prompt filled the steps before."""

    sent_s: float  # when the last of them was sent, in s of time.perf_counter()
    came_s: list[float]  # when the first token of each came
    before_s: float  # when the first token of the prompt before them came
    in_time: bool  # True if they were sent early enough for the step behind that prompt


async def _send_behind(probe: StepProbe, tokens: Sequence[int], filler: int, steps: int = FILLED_STEPS) -> _Sent:
    """Send prompts while another one of `filler` tokens fills the next `steps` steps, so that the scheduler finds all of them at once.

    Raise WorkerError if one of them fails.
    """
    filling = asyncio.create_task(_send_prompts(probe, [filler]))
    try:
        await asyncio.sleep(FILLED_S)
        found = await _send_prompts(probe, tokens)
        [(began, before)] = await filling
    finally:
        filling.cancel()
        await asyncio.gather(filling, return_exceptions=True)
    sent = max(sent for sent, _ in found)
    return _Sent(sent, [came for _, came in found], before, sent - began < (before - began) / steps)


async def _measure_several_ms(probe: StepProbe, chunks: Sequence[Chunks]) -> float | None:
    """Return the time of a step of several prompts, None if they did not share one.

    The time counts from the first token of the prompt before them. The last step of that prompt has capacity for the prefix of a
    single chunk.
    """
    filler, steps = _count_filler_tokens(probe.limits, chunks)
    found = await _send_behind(probe, [c.prefix + c.tokens for c in chunks], filler, steps)
    step = statistics.median(found.came_s) - found.before_s
    together = max(found.came_s) - min(found.came_s) <= MAX_SPREAD * step
    return step * 1e3 if found.in_time and step > 0 and together else None


def _count_filler_tokens(limits: ServerLimits, chunks: Sequence[Chunks]) -> tuple[int, int]:
    """Return the tokens and the steps of the prompt behind which chunks without decodes are timed."""
    steps = PREFIX_FILLED_STEPS if chunks[0].prefix else FILLED_STEPS
    assert limits.max_batched_tokens is not None
    return steps * limits.max_batched_tokens - chunks[0].prefix, steps


def _count_late_tokens(limits: ServerLimits, chunks: Sequence[Chunks]) -> int:
    """Return CaseSamples.late_tokens of chunks that are timed behind another prompt."""
    return sum(c.prefix + c.tokens for c in chunks) - _count_filler_tokens(limits, chunks)[0]


async def _measure_difference_ms(probe: StepProbe, chunk: Chunks) -> float | None:
    """Return the time of a prompt's last chunk, by a prompt without it; None if noise makes it negative."""
    prefix = await _measure_ttft_ms(probe, chunk.prefix)
    whole = await _measure_ttft_ms(probe, chunk.prefix + chunk.tokens)
    return whole - prefix if whole > prefix else None


async def _measure_mixed(probe: StepProbe, case: Case, *, hide_launch: bool) -> CaseSamples:
    """Measure the gap of decodes in which a prompt arrives, behind a prompt that fills the steps before if `hide_launch`."""
    plan, [chunk] = plan_decodes(probe.limits, case), case.chunks
    prompt = chunk.prefix + chunk.tokens
    filler = FILLED_STEPS * ((probe.limits.max_batched_tokens or 0) - sum(d.requests for d in case.decodes))
    together: list[bool] = []
    queued: list[float] = []
    async with DecodeStreams(probe.client, _make_decodes(probe, case)) as streams:
        window = await _open_window(streams, case, plan)
        await streams.wait_for_chunks(STEPS_BETWEEN)
        decode_s = statistics.median(window.list_samples_ms()) / 1e3

        async def take() -> float | None:
            if hide_launch:
                found = await _send_behind(probe, [prompt], filler)
                [came], in_time = found.came_s, found.in_time
            else:
                [(sent, came)] = await _send_prompts(probe, [prompt])
                in_time = True
            await streams.wait_for_chunks(STEPS_BETWEEN)
            if not in_time:
                return None
            arrivals = streams.list_arrivals(GAP_REQUESTS)
            gaps = [find_gap_ms(times, came, MAX_LATER * decode_s) for times in arrivals]
            known = [gap for gap in gaps if gap is not None]
            if not hide_launch:
                queued.append((statistics.median(end - gap / 1e3 for gap, end in known) - sent) / decode_s)
            together.append(statistics.median(end for _, end in known) - came <= MAX_LATER * decode_s)
            return statistics.median(gap for gap, _ in known)

        samples, discarded, precise = await _repeat(probe, take, lambda: len(window.list_samples_ms(1)) >= MAX_STEPS)
        described = _describe_window(window, len(window.list_samples_ms()))
    await _settle(probe)
    if not samples:
        raise WorkerError(
            f"{case}: its prompt was never in time for the step behind another prompt in {discarded} attempts; the machine of the "
            "client may be busy."
        )
    return CaseSamples(
        case=case,
        samples_ms=samples,
        method=Method.MIXED,
        precise=precise,
        **described,
        separate_prefill=sum(together) * 2 < len(together),
        decode_ms=decode_s * 1e3,
        queued_steps=statistics.median(queued) if queued else None,
        discarded=discarded,
        late_tokens=prompt - (filler if hide_launch and not chunk.prefix else 0),
    )
