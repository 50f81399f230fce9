"""What a record says of the client and of the answers, worked out from a few requests."""

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
from dcpbench.serving.traffic import Sample
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
def test_a_client_is_the_bottleneck_where_it_is_busy_or_late(
    cpu: float, lag_ms: float | None, itl_ms: float | None, bound: bool
) -> None:
    """Past 90 % of a core, or at p99 later than 3 ms and than a tenth of the median gap."""
    assert is_client_bound(ClientLoad(processes=1, cpu_share=cpu, lag_p99_ms=lag_ms), itl_ms) is bound
    assert not is_client_bound(None, itl_ms)


def test_the_worst_process_stands_for_the_client() -> None:
    """Two processes for 10 s, of which one was busy for 4 and starved for 1; 100 requests 1 to 100 ms late: p99 is 99.01."""
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
def test_a_server_that_is_busy_or_not_there_is_asked_again(kind: str, status: int, again: bool) -> None:
    assert can_retry(RequestError(kind, "", status=status)) is again


def test_a_load_has_the_time_to_its_limit_and_never_less_than_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begun at 100 s with 30 s: 20 s are left at 110 s, and none at 131 s."""
    load = Run(None, [], LoadOptions(clients=1, limit_s=30.0))  # type: ignore[arg-type]  # nothing is sent
    load.start_s = 100.0
    for now, left in ((110.0, 20.0), (130.0, 0.0), (131.0, 0.0)):
        monkeypatch.setattr("dcpbench.servers.load.time.perf_counter", lambda now=now: now)
        assert load._compute_left_s() == left
    assert Run(None, [], LoadOptions(clients=1))._compute_left_s() is None  # type: ignore[arg-type]


def test_each_server_of_a_run_has_a_log_named_by_its_layout_and_settings(tmp_path: Path) -> None:
    """Letters, digits, -_.= stay; 120 of them; a second server of the same name has a number."""
    engine = SimpleNamespace(name="vllm")
    point = SimpleNamespace(tp=4, dp=2, dcp=2, ep_degree=1, settings="a b/c=1.5_x")
    log = _make_log_path(tmp_path, engine, point)  # type: ignore[arg-type]
    assert log == tmp_path / "servers" / "vllm-tp4-dp2-dcp2-ep1-a_b_c=1.5_x.log"
    log.parent.mkdir()
    log.touch()
    assert _make_log_path(tmp_path, engine, point).name == "vllm-tp4-dp2-dcp2-ep1-a_b_c=1.5_x-1.log"  # type: ignore[arg-type]
    point.settings = "x" * 200
    assert len(_make_log_path(tmp_path, engine, point).stem) == 120  # type: ignore[arg-type]


def test_what_no_process_noted_is_absent() -> None:
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
def test_lengths_that_differ_by_more_than_a_twentieth_are_said(prompt: int, tokens: int, nominal: bool) -> None:
    """20 tokens were asked for behind 100; of the second request, which did not finish, nothing is asked."""

    def request(number: int, length: int, output: int) -> ServeRequest:
        return ServeRequest(number=number, prompt=np.zeros(length, np.int32), output_tokens=output, arrival_s=0.0)

    asked = [request(0, 100, 20), request(1, 100, 20)]
    came = [
        Sample(request(0, prompt, tokens), 0.0, token_s=[1.0] * tokens),
        Sample(request(1, 500, 20), 0.0, token_s=[1.0]),
    ]
    assert _has_other_lengths(came, asked) is nominal


def test_a_load_that_is_ended_before_it_began_took_no_time() -> None:
    async def main() -> Run:
        load = Run(SimpleNamespace(ages_s=[]), [], LoadOptions(clients=1))  # type: ignore[arg-type]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0):
                await load.send_load(time.perf_counter() + 1000)
        return load

    assert asyncio.run(main()).pace.wall_s == 0.0


def test_a_load_took_the_time_from_its_start_to_its_end() -> None:
    """No more than has passed for who looks at the same clock."""

    async def main() -> Run:
        load = Run(SimpleNamespace(ages_s=[]), [], LoadOptions(clients=1))  # type: ignore[arg-type]
        await load.send_load(began - 2.0)
        return load

    began = time.perf_counter()
    took = asyncio.run(main()).pace.wall_s
    assert 2.0 <= took <= time.perf_counter() - began + 2.0


def test_what_ended_is_said_of_each_point_with_its_figures_or_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = serve_record_builder.run()[0]
    bad = record_builder.failed(good.point)
    records = iter([(good, None), (bad, None), (bad, KeyboardInterrupt())])
    monkeypatch.setattr(measure, "measure_point", lambda *_: next(records))
    seen: list[Progress] = []
    places = measure.list_places([good.point] * 3, seen.append)
    with pytest.raises(KeyboardInterrupt):
        measure.measure_points(places, SimpleNamespace(folder=tmp_path, exit_reason=""))  # type: ignore[arg-type]
    assert good.serve is not None
    assert [(e.stage, e.note, e.index, e.of) for e in seen] == [
        ("done", format_summary(good.serve), 0, 3),
        ("failed", bad.reason, 1, 3),
    ]
    assert [r.outcome for r in read_records(tmp_path)] == ["ok", "failed", "failed"]


def test_of_all_that_a_server_refused_the_last_is_told() -> None:
    """What was asked last is the plainest request there is; then the other endpoint is tried."""

    class Refuses:
        target = Target.from_url("http://127.0.0.1:9")
        asked = 0

        async def send_request(self, *_: object) -> None:
            self.asked += 1
            raise RequestError("HTTP 400", f"HTTP 400: number {self.asked}", status=400)

    client = Refuses()
    with pytest.raises(WorkerError) as error:
        asyncio.run(find_prompt_format(client, "fake", "completions"))  # type: ignore[arg-type]
    assert client.asked > 4
    assert str(error.value) == (
        f"http://127.0.0.1:9 accepts no request to /v1/completions; the last one failed: HTTP 400: number {client.asked - 1}"
    )


def asked(answers: dict[str, object]) -> info.ServerInfo:
    """What a server is that answers these paths; a number is a status, text as it is, all else as JSON."""

    class Asked:
        target = Target.from_url("http://127.0.0.1:9")

        async def get(self, path: str, *_: float) -> SimpleNamespace:
            said = answers.get(path, 404)
            if isinstance(said, RequestError):
                raise said
            status = said if isinstance(said, int) else 200
            data = (
                b"" if isinstance(said, int) else said.encode() if isinstance(said, str) else msgspec.json.encode(said)
            )
            return SimpleNamespace(status=status, headers={}, data=data)

    return asyncio.run(info.fetch_info(Asked()))  # type: ignore[arg-type]


def capacity(found: info.ServerInfo) -> int | None:
    """Return its KV capacity without data or context parallelism."""
    return found.with_kv_capacity(dp=0, dcp=1).kv_capacity_tokens


CARDS = {"data": [{"id": "v3", "max_model_len": 4096}]}


def test_a_server_is_what_it_says_of_itself() -> None:
    """vLLM by /version and metrics of its replicas; SGLang by what it serves; else one of OpenAI's API."""
    metrics = "\n".join(
        f'vllm:cache_config_info{{block_size="16",cache_dtype="fp8",engine="{n}",num_gpu_blocks="200"}} 1.0'
        for n in (0, 1)
    )
    vllm = asked({"/v1/models": CARDS, "/version": {"version": "0.32.0"}, "/metrics": metrics})
    assert (vllm.engine, vllm.version, capacity(vllm)) == ("vllm", "0.32.0", 3200)
    assert vllm.facts == {"cache_dtype": "fp8", "block_size": "16"}
    assert vllm.find_model(None).max_model_len == 4096
    (path,) = info.SGLANG_INFO[:1]
    states = [{"max_total_num_tokens": 5000}]
    sglang = asked({"/v1/models": CARDS, path: {"version": "0.5", "internal_states": states, "model_path": "/v3"}})
    assert (sglang.engine, sglang.version, capacity(sglang)) == ("sglang", "0.5", 5000)
    own = asked({"/v1/models": CARDS, path: {"max_total_num_tokens": 7000, "internal_states": states}})
    assert (capacity(own), own.version) == (5000, "")
    odd = asked(
        {"/v1/models": CARDS, path: {"max_total_num_tokens": True, "internal_states": []}, "/version": {"version": 5}}
    )
    assert (odd.engine, capacity(odd)) == ("sglang", None)
    plain = asked({"/v1/models": CARDS, "/version": "[1", "/metrics": RequestError("closed", "gone")})
    assert (plain.engine, plain.version, capacity(plain), plain.facts) == ("openai", "", None, {})


@pytest.mark.parametrize(
    ("models", "name", "said"),
    [
        ([], None, "the server names no model; say with --model which is meant."),
        (["a", "b"], None, "the server serves a and b; say with --model"),
        (["a", "b"], "c", "--model c: the server serves a and b; leave --model out, or name one of these."),
        (["a", "b"], "b", None),
        (["a"], None, None),
        ([], "c", None),
    ],
)
def test_a_model_is_the_one_that_is_named_or_the_only_one(
    models: list[str], name: str | None, said: str | None
) -> None:
    """A server without /v1/models takes any name."""
    served = asked({"/v1/models": {"data": [{"id": one} for one in models]} if models else 404})
    if said:
        with pytest.raises(UsageError, match=re.escape(said)):
            served.find_model(name)
    else:
        assert served.find_model(name).id == (name or models[0])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (401, "HTTP 401: no message. Put its API key into the environment variable that --api-key-env names"),
        (500, "cannot be measured: the server answered HTTP 500"),
        (RequestError("refused", "nobody listens."), "cannot be measured: nobody listens."),
    ],
)
def test_a_server_that_cannot_be_asked_is_a_sentence(answer: object, said: str) -> None:
    with pytest.raises(WorkerError, match=re.escape(said)):
        asked({"/v1/models": answer})


class TestTokenizer:
    """Words that are tokens, as a model's tokenizer would have them."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """A tokenizer of 100 words, of which "w7" is token 7."""
        import tokenizers

        made = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(100)}, "w0"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        made.save(str(tmp_path / "tokenizer.json"))
        return tmp_path

    def test_a_prompt_is_text_of_as_many_tokens(self, folder: Path) -> None:
        """Less what a chat template adds; one at least."""
        for place in (folder, folder / "tokenizer.json"):
            of = Tokenized(place)
            assert of.vocab == 100
            assert of(np.array([5, 7, 9])) == "w5 w7 w9"
        assert Tokenized(folder, fixed=2.0)(np.array([5, 7, 9])) == "w5"
        assert Tokenized(folder, fixed=9.0)(np.array([5, 7, 9])) == "w5"

    def test_text_that_makes_other_tokens_is_cut_or_prolonged(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Ids that decode to nothing leave too few: the prompt's own are put behind."""
        of = Tokenized(folder)
        real = of._tokenizer

        class Drops:
            """Leaves out token 5 wherever it stands."""

            def decode(self, ids: list[int], **_: object) -> str:
                return " ".join(f"w{n}" for n in ids if n != 5)

            def encode(self, text: str, **options: bool) -> object:
                return real.encode(text, **options)

        monkeypatch.setattr(of, "_tokenizer", Drops())
        for ids in ([7, 5, 9, 7], [5, 7, 9, 7], [5, 5, 9]):
            assert len(of(np.array(ids)).split()) == len(ids), "also where the first one is nothing"

    def test_what_is_no_tokenizer_is_a_sentence(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"no tokenizer could be read from tokenizer\.json .*; name the folder"):
            Tokenized(tmp_path)


def test_words_are_as_many_as_the_server_counts_tokens() -> None:
    """1.5 tokens a word and 4 beside: of 100 tokens 64 words; one at least."""
    words = Words(1.5, 4.0)
    assert len(words(np.arange(100)).split()) == 64
    assert len(words(np.arange(3)).split()) == 1
    assert words(np.arange(100)) != words(np.arange(1, 101))


@pytest.mark.parametrize(("ended", "asked", "counted"), [(True, 20, 3), (False, 20, 20), (False, 3, 4), (False, 2, 4)])
def test_a_request_that_was_cut_off_had_more_to_say_than_it_said(ended: bool, asked: int, counted: int) -> None:
    """Of three tokens that came; one that finished said what it had to."""
    request = ServeRequest(number=0, prompt=np.arange(5), output_tokens=asked)
    sent = SimpleNamespace(run=SimpleNamespace(start_s=10.0), requests=[request])
    answer = SimpleNamespace(chunk_s=[11.0, 12.0, 13.0], list_chunk_tokens=lambda: [1, 1, 1], tokens=[], usage=None)
    outcome = Outcome(Call(0, b"", asked), 10.5, answer=answer, ended=ended)  # type: ignore[arg-type]
    sample = measure._make_sample(outcome, sent, together=False)  # type: ignore[arg-type]
    assert (sample.request.output_tokens, sample.token_s) == (counted, [1.0, 2.0, 3.0])


@pytest.mark.parametrize(("ids", "kept"), [([7, 8, 9], [7, 8, 9]), ([7, 8], []), ([], [])])
def test_ids_of_tokens_are_kept_where_all_are_told(ids: list[int], kept: list[int]) -> None:
    """With the tokens of each chunk where some brought several, and how long the server counted the prompt."""
    request = ServeRequest(number=0, prompt=np.arange(5), output_tokens=3, session=4, turn=2, arrival_s=0.5)
    sent = SimpleNamespace(run=SimpleNamespace(start_s=10.0), requests=[request])
    usage = SimpleNamespace(prompt_tokens=6, cached_tokens=2)
    answer = SimpleNamespace(chunk_s=[11.0, 13.0], list_chunk_tokens=lambda: [1, 2], tokens=ids, usage=usage)
    outcome = Outcome(Call(0, b"", 3), 10.5, answer=answer, ended=True, error=RequestError("closed", "gone."))  # type: ignore[arg-type]
    sample = measure._make_sample(outcome, sent, together=False)  # type: ignore[arg-type]
    assert (sample.tokens, sample.chunk_tokens, sample.token_s) == (kept, [1, 2], [1.0, 2.0, 3.0])
    assert (sample.submitted_s, sample.failed, sample.cached_tokens) == (0.5, "gone.", 2)
    of = sample.request
    assert (len(of.prompt), of.output_tokens, of.session, of.turn, of.arrival_s) == (6, 4, 4, 2, 0.5)
