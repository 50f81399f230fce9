"""Collect the answers of running servers, or of a server that is started for each setting, and compare them. No torch.

A setting is compared with the first one of its engine, and the first one of each further engine with that of the first engine: so a
difference between layouts is seen without the one between the kernels of two engines.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import DcpbenchError, UsageError
from dcpbench.points.redaction import format_command_line, redact
from dcpbench.records.record import StartPhase
from dcpbench.servers.answer_collector import Collector, decode_answers, find_shared_prompts
from dcpbench.servers.answer_counts import Cell, count_between, count_own, measure_length_sizes
from dcpbench.servers.answer_noise import Sizes, compute_limits
from dcpbench.servers.answer_verdict import (
    AGREE,
    CONSISTENT,
    DIFFER,
    UNDECIDED,
    Judgement,
    find_next_length,
    judge_counts,
)
from dcpbench.servers.edge_lengths import CHUNK, DOUBLED, PAGES, Edges, list_lengths, split_lengths
from dcpbench.servers.engine_flags import find_token_budget
from dcpbench.servers.engine_log import read_started_settings
from dcpbench.servers.exact_tests import LEVEL
from dcpbench.servers.exit_reason import Cause
from dcpbench.servers.kv_capacity import find_page_size
from dcpbench.servers.launch import Server, choose_log_path, find_free_port
from dcpbench.show.text import make_printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from dcpbench.records.record import EngineSettings
    from dcpbench.servers.answer_collector import CollectedAnswers, Questions, SharedPrompts
    from dcpbench.servers.client import Target
    from dcpbench.servers.engine_settings import Setting
    from dcpbench.servers.info import ServerInfo

START, PROMPTS, ANSWER = "start", "prompts", "answer"  # what failed: the start, the form of prompts, or a request
FAILED = "FAILED"  # verdict: a server that starts fails at a request
LAST_LINES, MAX_LINE = 10, 500  # lines of a log that are quoted, and characters of each
END_TIMEOUT_S = 5.0  # time in which a server that broke off an answer may end


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A server that did not start, or did not answer a request."""

    stage: str  # START, PROMPTS or ANSWER
    ended: bool  # whether its process ended
    reason: str
    cell: Cell | None  # conditions of the request; None before the first
    lines: list[str]  # the last lines of its log
    cause: Cause = Cause.UNKNOWN  # of its end


class SettingResult(msgspec.Struct, frozen=True, kw_only=True):
    """A setting and its result."""

    name: str
    reference: str = ""  # name of the setting that it is compared with; empty: it is compared with itself alone
    url: str = ""  # of a server that runs already
    command: str = ""  # of a server that is started
    log: str = ""
    start: list[StartPhase] = []  # phases of its start
    dummy_weights: bool = False  # whether it has the engine's own dummy weights
    requests: int = 0
    hit_tokens: int | None = None  # prefix-cache hits; None if the server does not report them
    lengths: list[int] = []  # of the prompts that it answered
    left_out: list[int] = []  # lengths that are longer than its maximum context
    max_model_len: int | None = None
    failure: Failure | None = None
    judgement: Judgement | None = None  # None if it did not answer

    @property
    def verdict(self) -> str:
        """Return the verdict: one that does not start cannot be judged."""
        if self.judgement is not None:
            return self.judgement.verdict
        return FAILED if self.failure is not None and self.failure.stage == ANSWER else UNDECIDED


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All settings, in the order in which they ran."""

    results: list[SettingResult]
    not_run: list[str] = []  # settings without a result
    interrupted: bool = False  # whether they have none because of an interruption, else because the first one failed
    seed: int
    new_tokens: int

    @property
    def verdict(self) -> str:
        """Return the verdict on all settings together."""
        verdicts = {result.verdict for result in self.results} | ({UNDECIDED} if self.not_run else set())
        if wrong := [verdict for verdict in (DIFFER, FAILED, UNDECIDED) if verdict in verdicts]:
            return wrong[0]
        return AGREE if len(self.results) > 1 else CONSISTENT


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineCheck:
    """Describe a comparison of settings that are started here."""

    settings: Sequence[Setting]
    model: str
    questions: Questions
    target: Target  # the port is replaced
    max_context: int
    tolerance: float
    start_timeout_s: float
    folder: Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged:
    """Hold the answers of a server and the verdict on them."""

    name: str
    answers: CollectedAnswers
    judgement: Judgement
    sizes: Sizes  # of its own answers


class EngineComparison:
    """Start and question settings, one after another, and judge them; keep the answers of the first of each engine."""

    def __init__(self, check: EngineCheck, tell: Callable[[str], None]) -> None:
        self.check, self.tell = check, tell
        self.results: list[SettingResult] = []
        self._first: dict[str, Judged] = {}  # by engine, in the order in which they ran
        self._prompts: SharedPrompts | None = None

    def run(self) -> None:
        """Question all settings. After a failure of the first, no other is started; an interruption leaves the rest out."""
        for number, setting in enumerate(self.check.settings):
            self.question_setting(number, setting)
            if not self._first:
                break

    def make_report(self) -> Report:
        """Return the report of the settings that were judged or failed so far."""
        left = [setting.name for setting in self.check.settings[len(self.results) :]]
        return Report(
            results=self.results,
            not_run=left,
            interrupted=bool(left) and (not self.results or bool(self._first)),
            seed=self.check.questions.seed,
            new_tokens=self.check.questions.tokens,
        )

    def question_setting(self, number: int, setting: Setting) -> None:
        """Start the server of a setting, collect its answers, end it, and append the result."""
        port = find_free_port()
        words = setting.make_command(self.check.model, port)
        log = choose_log_path(self.check.folder, f"{number}-{setting.name}")
        result = SettingResult(name=setting.name, command=format_command_line(words), log=str(log))
        target = dataclasses.replace(self.check.target, port=port)
        collector = Collector(target, self.check.questions, functools.partial(_tell_named, self.tell, setting.name))
        with Server(words, log, setting.environment, port, setting.engine.ready) as server:
            stage = START
            try:
                start = server.wait_until_ready(self.check.start_timeout_s, collector.tell)
                found, dummy = read_started_settings(server.read_log(), setting.point.weights, setting.environment)
                stage, result = ANSWER, msgspec.structs.replace(result, start=start, dummy_weights=dummy)
                choose = functools.partial(_choose_lengths, self.check, words, found)
                answers, self._prompts = asyncio.run(collector.collect(self._prompts, choose))
            except DcpbenchError as e:
                stage = PROMPTS if isinstance(e, UsageError) else stage
                failure = _make_failure(server, stage, str(e), collector.cell)
                self.results.append(_complete_result(result, collector, failure=failure))
                return
        self.tell(f"{setting.name}: comparing")
        engine = setting.engine.name
        reference = self._first.get(engine) or next(iter(self._first.values()), None)
        level = LEVEL / len(self.check.settings)
        judged = judge_answers(setting.name, answers, reference, self.check.tolerance, level)
        self._first.setdefault(engine, judged)
        self.results.append(_complete_result(result, collector, judged=judged, reference=reference))


def compare_running(
    targets: Sequence[Target], questions: Questions, tolerance: float, tell: Callable[[str], None]
) -> Report:
    """Question servers that run already, A and perhaps B, judge them, and narrow a difference down to the length of an answer."""
    prompts = asyncio.run(find_shared_prompts(targets, questions))
    collectors: list[Collector] = []
    answers: list[CollectedAnswers] = []
    for name, target in zip("AB", targets, strict=False):
        collectors.append(Collector(target, questions, functools.partial(_tell_named, tell, name)))
        found, prompts = asyncio.run(collectors[-1].collect(prompts, lambda _: DOUBLED))
        answers.append(found)
    while True:
        judged: list[Judged] = []
        for name, one in zip("AB", answers, strict=False):
            reference = judged[0] if judged else None
            judged.append(judge_answers(name, one, reference, tolerance, LEVEL / len(answers)))
        length = find_next_length([one.judgement for one in judged], questions.tokens)
        if length is None:
            break
        further = dataclasses.replace(prompts, lengths=[length])
        for i, collector in enumerate(collectors):
            if collector.max_model_len is not None and length + questions.tokens > collector.max_model_len:
                continue
            found, _ = asyncio.run(collector.collect(further, lambda _: DOUBLED))
            answers[i] += found
    results = [
        _complete_result(
            SettingResult(name=one.name, url=collector.target.url),
            collector,
            judged=one,
            reference=None if one is judged[0] else judged[0],
        )
        for collector, one in zip(collectors, judged, strict=True)
    ]
    return Report(results=results, seed=questions.seed, new_tokens=questions.tokens)


def _tell_named(tell: Callable[[str], None], name: str, note: str) -> None:
    tell(f"{name}: {note}")


def judge_answers(
    name: str, answers: CollectedAnswers, reference: Judged | None, tolerance: float, level: float
) -> Judged:
    """Compare the answers of a server with each other and with those of the reference.

    The rounding is that of the reference, or of the server itself where the reference shows none.
    """
    sizes = _measure_all_sizes(answers)
    limits = compute_limits(
        tolerance,
        [*([reference.sizes] if reference else []), sizes],
        (reference.answers if reference else answers).scored,
        answers.scored,
    )
    own, between = [], []
    for length, data in answers.lengths.items():
        found = decode_answers(data)
        own += count_own(found, limits)
        if reference is not None:
            between += count_between(decode_answers(reference.answers.lengths[length]), found, limits)
    judgement = judge_counts(
        own,
        None if reference is None else between,
        [] if reference is None else reference.judgement.counts,
        limits=limits,
        base_repeats=reference is None or reference.judgement.repeats_itself,
        level=level,
    )
    return Judged(name=name, answers=answers, judgement=judgement, sizes=sizes)


def _measure_all_sizes(answers: CollectedAnswers) -> Sizes:
    """Return how far the answers of one server are apart."""
    found = (measure_length_sizes(decode_answers(data)) for data in answers.lengths.values())
    return sum(found, Sizes(gaps={}, drifts={}))


def _choose_lengths(
    check: EngineCheck, words: Sequence[str], settings: EngineSettings | None, info: ServerInfo
) -> list[int]:
    """Return the lengths of prompts at the edges of the first server: its pages and token budget where its command, its log or its
    reports have them.
    """
    points, tokens = [setting.point for setting in check.settings], check.questions.tokens
    edges = Edges(
        dcp=tuple(sorted({point.dcp for point in points})),
        interleave=max((point.interleave for point in points), default=1) or 1,
        pages=tuple(sorted({*PAGES, find_page_size(settings, info.facts) or PAGES[0]})),
        chunk=find_token_budget(words, settings) or CHUNK,
    )
    return split_lengths(list_lengths(edges, tokens), check.max_context - tokens)[0]


def _complete_result(
    result: SettingResult,
    collector: Collector,
    *,
    failure: Failure | None = None,
    judged: Judged | None = None,
    reference: Judged | None = None,
) -> SettingResult:
    """Return the result with the requested settings and their outcome."""
    return msgspec.structs.replace(
        result,
        reference=reference.name if reference else "",
        requests=collector.sent,
        hit_tokens=judged.answers.hit_tokens if judged else None,
        lengths=collector.lengths,
        left_out=collector.left_out,
        max_model_len=collector.max_model_len,
        failure=failure,
        judgement=judged.judgement if judged else None,
    )


def _make_failure(server: Server, stage: str, message: str, cell: Cell | None) -> Failure:
    """Return the failure of a server; one that ends shortly after an answer broke off gave its reason in the log."""
    until = time.monotonic() + (END_TIMEOUT_S if stage == ANSWER else 0.0)
    while not (ended := server.exit_reason) and time.monotonic() < until:
        time.sleep(0.1)
    lines = [make_printable(redact(line))[:MAX_LINE] for line in server.read_log().splitlines() if line.strip()]
    reason = f"the server died: {ended}" if ended and stage == ANSWER else message
    return Failure(
        stage=stage, ended=bool(ended), reason=reason, cell=cell, lines=lines[-LAST_LINES:], cause=server.exit_cause
    )
