"""Test what a record states about the client and the answers of a few requests."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from dcpbench.errors import UsageError, WorkerError
from dcpbench.records.file import read_records
from dcpbench.records.record import ClientLoad
from dcpbench.servers import info, measure
from dcpbench.servers.client import RequestError, Target
from dcpbench.servers.load import Call, LoadOptions, Outcome, Pace, Run, can_retry
from dcpbench.servers.measure import _has_other_lengths, _make_client_load, is_client_bound
from dcpbench.servers.prompt_format import Tokenized, Words, find_prompt_format
from dcpbench.servers.server_sweep import _make_log_path
from dcpbench.serving.outcome import format_summary
from dcpbench.serving.requests import ServeRequest
from dcpbench.serving.traffic import RequestResult
from tests.unit import record_builder, serve_record_builder

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.launch.jobs import Progress


@pytest.mark.parametrize(
    ("cpu", "lag_ms", "itl_ms", "bound"),
    [
        (0.9, None, None, False),
        (0.91, None, None, True),
        (0.5, 3.0, None, False),
        (0.5, 3.1, None, True),
        (0.5, 3.1, 20.0, True),
        (0.5, 5.0, 50.0, False),
        (0.5, 5.1, 50.0, True),
        (0.95, 0.1, 50.0, True),
    ],
)
def test_client_is_the_bottleneck_if_busy_or_late(
    cpu: float, lag_ms: float | None, itl_ms: float | None, bound: bool
) -> None:
    """The limits are 90 % of a core, and a p99 lag above both 3 ms and a tenth of the median ITL."""
    assert is_client_bound(ClientLoad(processes=1, cpu_share=cpu, lag_p99_ms=lag_ms), itl_ms) is bound
    assert not is_client_bound(None, itl_ms)


def test_client_load_is_that_of_the_busiest_process() -> None:
    """In 10 s one process is busy for 4 s and starved for 1 s; 100 requests are 1 to 100 ms late, so p99 is 99.01."""
    paces = [
        Pace(lags_s=[0.001] * 100, ages_s=[0.004], cpu_s=4.0, starved_s=0.5, realtime=True, wall_s=10.0),
        Pace(lags_s=[0.003] * 100, ages_s=[0.002], cpu_s=2.0, starved_s=1.0, realtime=False, wall_s=10.0),
    ]
    calls = [Outcome(Call(i, b"", 1), submitted_s=5.0, sent_s=5.0 + (i + 1) / 1e3) for i in range(100)]
    load = _make_client_load([*calls, Outcome(Call(100, b"", 1), submitted_s=5.0)], paces)
    assert load.late_p99_ms == pytest.approx(99.01)
    assert load.read_late_p99_ms == pytest.approx(3.98)
    expected = ClientLoad(
        processes=2,
        cpu_share=0.4,
        late_p99_ms=load.late_p99_ms,
        lag_p99_ms=3.0,
        read_late_p99_ms=load.read_late_p99_ms,
        starved_share=0.1,
        realtime=False,
    )
    assert msgspec.to_builtins(load) == msgspec.to_builtins(expected)


@pytest.mark.parametrize(
    ("kind", "status", "again"),
    [
        ("HTTP", 429, True),
        ("HTTP", 503, True),
        ("HTTP", 502, False),
        ("HTTP", 504, False),
        ("refused", 0, True),
        ("cut off", 0, False),
    ],
)
def test_busy_or_unreachable_server_is_retried(kind: str, status: int, again: bool) -> None:
    assert can_retry(RequestError(kind, "", status=status)) is again


def test_remaining_time_of_a_load_is_never_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that starts at 100 s with a limit of 30 s has 20 s left at 110 s, and none at 131 s."""
    load = Run(None, [], LoadOptions(clients=1, limit_s=30.0))  # type: ignore[arg-type]  # nothing is sent
    load.start_s = 100.0
    for now, left in ((110.0, 20.0), (130.0, 0.0), (131.0, 0.0)):
        monkeypatch.setattr("dcpbench.servers.load.time.perf_counter", lambda now=now: now)
        assert load._compute_left_s() == left
    assert Run(None, [], LoadOptions(clients=1))._compute_left_s() is None  # type: ignore[arg-type]


def test_server_log_is_named_after_layout_and_settings(tmp_path: Path) -> None:
    """Names keep letters, digits and -_.=, have at most 120 characters, and get a number if the file exists."""
    engine = SimpleNamespace(name="vllm")
    point = SimpleNamespace(tp=4, dp=2, dcp=2, ep_degree=1, settings="a b/c=1.5_x")
    log = _make_log_path(tmp_path, engine, point)  # type: ignore[arg-type]
    assert log == tmp_path / "servers" / "vllm-tp4-dp2-dcp2-ep1-a_b_c=1.5_x.log"
    log.parent.mkdir()
    log.touch()
    assert _make_log_path(tmp_path, engine, point).name == "vllm-tp4-dp2-dcp2-ep1-a_b_c=1.5_x-1.log"  # type: ignore[arg-type]
    point.settings = "x" * 200
    assert len(_make_log_path(tmp_path, engine, point).stem) == 120  # type: ignore[arg-type]


def test_missing_client_measurements_are_absent() -> None:
    load = _make_client_load([], [Pace(realtime=True)])
    assert load == ClientLoad(processes=1, cpu_share=0.0, realtime=True)


@pytest.mark.parametrize(
    ("prompt", "tokens", "nominal"),
    [
        (100, 20, False),
        (105, 21, False),
        (95, 19, False),
        (106, 20, True),
        (94, 20, True),
        (100, 18, True),
        (100, 22, True),
    ],
)
def test_lengths_that_differ_by_more_than_5_percent_are_flagged(prompt: int, tokens: int, nominal: bool) -> None:
    """The first request asks for 20 tokens after 100; the second one did not finish, so its lengths are ignored."""

    def request(number: int, length: int, output: int) -> ServeRequest:
        return ServeRequest(number=number, prompt=np.zeros(length, np.int32), output_tokens=output, arrival_s=0.0)

    requested = [request(0, 100, 20), request(1, 100, 20)]
    samples = [
        RequestResult(request(0, prompt, tokens), 0.0, token_s=[1.0] * tokens),
        RequestResult(request(1, 500, 20), 0.0, token_s=[1.0]),
    ]
    assert _has_other_lengths(samples, requested) is nominal


def test_load_cancelled_before_its_start_has_zero_duration() -> None:
    async def main() -> Run:
        load = Run(SimpleNamespace(ages_s=[]), [], LoadOptions(clients=1))  # type: ignore[arg-type]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0):
                await load.send_load(time.perf_counter() + 1000)
        return load

    assert asyncio.run(main()).pace.wall_s == 0.0


def test_duration_of_a_load_is_measured_from_its_start() -> None:
    """The start is 2 s in the past, so the duration is 2 s plus the time that the call takes."""

    async def main() -> Run:
        load = Run(SimpleNamespace(ages_s=[]), [], LoadOptions(clients=1))  # type: ignore[arg-type]
        await load.send_load(began - 2.0)
        return load

    began = time.perf_counter()
    took = asyncio.run(main()).pace.wall_s
    assert 2.0 <= took <= time.perf_counter() - began + 2.0


def test_progress_events_have_the_summary_or_the_failure_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = serve_record_builder.make_run()[0]
    bad = record_builder.make_failed_record(good.point)
    records = iter([(good, None), (bad, None), (bad, KeyboardInterrupt())])
    monkeypatch.setattr(measure, "measure_point", lambda *_: next(records))
    seen: list[Progress] = []
    places = measure.list_point_progress([good.point] * 3, seen.append)
    with pytest.raises(KeyboardInterrupt):
        measure.measure_points(places, SimpleNamespace(folder=tmp_path, exit_reason=""))  # type: ignore[arg-type]
    assert good.serve is not None
    assert [(e.stage, e.note, e.index, e.of) for e in seen] == [
        ("done", format_summary(good.serve), 0, 3),
        ("failed", bad.reason, 1, 3),
    ]
    assert [r.outcome for r in read_records(tmp_path)] == ["ok", "failed", "failed"]


def test_error_quotes_the_last_refused_trial_request() -> None:
    """The last trial has the fewest fields; one more request tries the other endpoint."""

    class Refuses:
        target = Target.from_url("http://127.0.0.1:9")
        requests = 0

        async def send_request(self, *_: object) -> None:
            self.requests += 1
            raise RequestError("HTTP 400", f"HTTP 400: number {self.requests}", status=400)

    client = Refuses()
    with pytest.raises(WorkerError) as error:
        asyncio.run(find_prompt_format(client, "fake", "completions"))  # type: ignore[arg-type]
    assert client.requests > 4
    assert str(error.value) == (
        f"http://127.0.0.1:9 accepts no request to /v1/completions; the last one failed: HTTP 400: number {client.requests - 1}"
    )


def fetch_fake_info(answers: dict[str, object]) -> info.ServerInfo:
    """Return the info of a server with these answers per path: a status, a text, or JSON."""

    class FakeClient:
        target = Target.from_url("http://127.0.0.1:9")

        async def get(self, path: str, *_: float) -> SimpleNamespace:
            answer = answers.get(path, 404)
            if isinstance(answer, RequestError):
                raise answer
            status = answer if isinstance(answer, int) else 200
            data = (
                b""
                if isinstance(answer, int)
                else answer.encode()
                if isinstance(answer, str)
                else msgspec.json.encode(answer)
            )
            return SimpleNamespace(status=status, headers={}, data=data)

    return asyncio.run(info.fetch_info(FakeClient()))  # type: ignore[arg-type]


def get_capacity(found: info.ServerInfo) -> int | None:
    """Return its KV capacity without data or context parallelism."""
    return found.with_kv_capacity(dp=0, dcp=1).kv_capacity_tokens


CARDS = {"data": [{"id": "v3", "max_model_len": 4096, "root": "/models/v3"}]}


@pytest.mark.parametrize(
    ("lines", "started_s"),
    [(["1.78e9"], 1.78e9), ([], None), (["1.78e9", "1.79e9"], None)],
    ids=["one-process", "unknown", "several"],
)
def test_start_of_a_server_with_one_process_is_known(lines: list[str], started_s: float | None) -> None:
    metrics = "\n".join(f'process_start_time_seconds{{n="{n}"}} {value}' for n, value in enumerate(lines))
    assert fetch_fake_info({"/v1/models": CARDS, "/metrics": metrics}).started_s == started_s


def test_engine_version_and_kv_capacity_are_detected() -> None:
    """vLLM is detected by /version and /metrics, SGLang by its info endpoint, and any other server is "openai"."""
    metrics = "\n".join(
        f'vllm:cache_config_info{{block_size="16",cache_dtype="fp8",engine="{n}",num_gpu_blocks="200"}} 1.0'
        for n in (0, 1)
    )
    vllm = fetch_fake_info({"/v1/models": CARDS, "/version": {"version": "0.32.0"}, "/metrics": metrics})
    assert (vllm.engine, vllm.version, get_capacity(vllm)) == ("vllm", "0.32.0", 3200)
    assert vllm.facts == {"cache_dtype": "fp8", "block_size": "16"}
    assert vllm.find_model(None) == info.Card("v3", 4096, "/models/v3")
    (path,) = info.SGLANG_INFO[:1]
    states = [{"max_total_num_tokens": 5000}]
    sglang = fetch_fake_info(
        {"/v1/models": CARDS, path: {"version": "0.5", "internal_states": states, "model_path": "/v3"}}
    )
    assert (sglang.engine, sglang.version, get_capacity(sglang)) == ("sglang", "0.5", 5000)
    own = fetch_fake_info({"/v1/models": CARDS, path: {"max_total_num_tokens": 7000, "internal_states": states}})
    assert (get_capacity(own), own.version) == (5000, "")
    odd = fetch_fake_info(
        {"/v1/models": CARDS, path: {"max_total_num_tokens": True, "internal_states": []}, "/version": {"version": 5}}
    )
    assert (odd.engine, get_capacity(odd)) == ("sglang", None)
    plain = fetch_fake_info({"/v1/models": CARDS, "/version": "[1", "/metrics": RequestError("closed", "gone")})
    assert (plain.engine, plain.version, get_capacity(plain), plain.facts) == ("openai", "", None, {})


@pytest.mark.parametrize(
    ("models", "name", "message"),
    [
        ([], None, "the server names no model; name one with --model."),
        (["a", "b"], None, "the server serves a and b; name one with --model"),
        (["a", "b"], "c", "--model c: the server serves a and b; leave --model out, or name one of these."),
        (["a", "b"], "b", None),
        (["a"], None, None),
        ([], "c", None),
    ],
)
def test_find_model_returns_the_named_or_the_only_model(
    models: list[str], name: str | None, message: str | None
) -> None:
    """A server without /v1/models accepts any name."""
    served = fetch_fake_info({"/v1/models": {"data": [{"id": one} for one in models]} if models else 404})
    if message:
        with pytest.raises(UsageError, match=re.escape(message)):
            served.find_model(name)
    else:
        assert served.find_model(name).id == (name or models[0])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (401, "HTTP 401: no message. Put its API key into the environment variable that --api-key-env names"),
        (500, "cannot be measured: the server answered HTTP 500"),
        (RequestError("refused", "nobody listens."), "cannot be measured: nobody listens."),
    ],
)
def test_unusable_server_raises_worker_error(answer: object, message: str) -> None:
    with pytest.raises(WorkerError, match=re.escape(message)):
        fetch_fake_info({"/v1/models": answer})


class TestTokenizer:
    """Each word is one token."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """Write a tokenizer of 100 words, in which "w7" is token 7."""
        import tokenizers

        made = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(100)}, "w0"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        made.save(str(tmp_path / "tokenizer.json"))
        return tmp_path

    def test_prompt_text_has_the_requested_number_of_tokens(self, folder: Path) -> None:
        """Tokens of the chat template are subtracted, and at least one token remains."""
        for place in (folder, folder / "tokenizer.json"):
            tokenized = Tokenized(place)
            assert tokenized.vocab == 100
            assert tokenized(np.array([5, 7, 9])) == "w5 w7 w9"
        assert Tokenized(folder, fixed=2.0)(np.array([5, 7, 9])) == "w5"
        assert Tokenized(folder, fixed=9.0)(np.array([5, 7, 9])) == "w5"

    def test_text_with_other_token_count_is_cut_or_extended(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Ids that decode to no text leave too few tokens, so ids of the prompt are appended."""
        tokenized = Tokenized(folder)
        real = tokenized._tokenizer

        class Drops:
            """Drop token 5 from decoded text."""

            def decode(self, ids: list[int], **_: object) -> str:
                return " ".join(f"w{n}" for n in ids if n != 5)

            def encode(self, text: str, **options: bool) -> object:
                return real.encode(text, **options)

        monkeypatch.setattr(tokenized, "_tokenizer", Drops())
        for ids in ([7, 5, 9, 7], [5, 7, 9, 7], [5, 5, 9]):
            assert len(tokenized(np.array(ids)).split()) == len(ids), "also if the first id decodes to no text"

    def test_missing_tokenizer_raises_usage_error(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"no tokenizer could be read from tokenizer\.json .*; name the folder"):
            Tokenized(tmp_path)


def test_number_of_words_follows_the_fitted_token_count() -> None:
    """100 tokens at 1.5 tokens per word plus 4 need 64 words; there is at least one word."""
    words = Words(1.5, 4.0)
    assert len(words(np.arange(100)).split()) == 64
    assert len(words(np.arange(3)).split()) == 1
    assert words(np.arange(100)) != words(np.arange(1, 101))


@pytest.mark.parametrize(
    ("ended", "requested", "counted"), [(True, 20, 3), (False, 20, 20), (False, 3, 4), (False, 2, 4)]
)
def test_output_length_of_a_cut_off_request_exceeds_its_tokens(ended: bool, requested: int, counted: int) -> None:
    """Three tokens arrived; only a finished request has an output length of three."""
    request = ServeRequest(number=0, prompt=np.arange(5), output_tokens=requested)
    sent = SimpleNamespace(run=SimpleNamespace(start_s=10.0), requests=[request])
    answer = SimpleNamespace(chunk_s=[11.0, 12.0, 13.0], list_chunk_tokens=lambda: [1, 1, 1], tokens=[], usage=None)
    outcome = Outcome(Call(0, b"", requested), 10.5, answer=answer, ended=ended)  # type: ignore[arg-type]
    sample = measure._make_sample(outcome, sent, together=False)  # type: ignore[arg-type]
    assert (sample.request.output_tokens, sample.token_s) == (counted, [1.0, 2.0, 3.0])


@pytest.mark.parametrize(("ids", "kept"), [([7, 8, 9], [7, 8, 9]), ([7, 8], []), ([], [])])
def test_token_ids_are_kept_only_if_all_are_known(ids: list[int], kept: list[int]) -> None:
    """The sample also has the tokens per chunk and the prompt length that the server counted."""
    request = ServeRequest(number=0, prompt=np.arange(5), output_tokens=3, session=4, turn=2, arrival_s=0.5)
    sent = SimpleNamespace(run=SimpleNamespace(start_s=10.0), requests=[request])
    usage = SimpleNamespace(prompt_tokens=6, cached_tokens=2)
    answer = SimpleNamespace(chunk_s=[11.0, 13.0], list_chunk_tokens=lambda: [1, 2], tokens=ids, usage=usage)
    outcome = Outcome(Call(0, b"", 3), 10.5, answer=answer, ended=True, error=RequestError("closed", "gone."))  # type: ignore[arg-type]
    sample = measure._make_sample(outcome, sent, together=False)  # type: ignore[arg-type]
    assert (sample.tokens, sample.chunk_tokens, sample.token_s) == (kept, [1, 2], [1.0, 2.0, 3.0])
    assert (sample.submitted_s, sample.failed, sample.cached_tokens) == (0.5, "gone.", 2)
    request_of_sample = sample.request
    assert (
        len(request_of_sample.prompt),
        request_of_sample.output_tokens,
        request_of_sample.session,
        request_of_sample.turn,
        request_of_sample.arrival_s,
    ) == (6, 4, 4, 2, 0.5)
