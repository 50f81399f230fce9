"""Test `server --url` against a server with its own log: times, records, and options that do not apply."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import msgspec
import pytest

from dcpbench import cli
from dcpbench.points import redaction
from dcpbench.points.engine_points import make_engine_load, make_engine_point
from dcpbench.records.file import RecordFile
from dcpbench.records.record import Server, SpeculationMetrics
from dcpbench.records.runs import read_run
from dcpbench.servers.client import Target
from dcpbench.servers.draft_counters import DraftCounters, summarize_drafts
from dcpbench.servers.measure import make_candidates
from dcpbench.serving.samples import read_samples
from tools.client_accuracy import QUICK, compare_metrics, read_server_log, run_test_server

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.records.record import Record, ServeMetrics

REQUESTS = QUICK[0].requests


class Ran:
    """Hold a run against a server and the server's log."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder / "run", folder / "sent.jsonl"

    @property
    def record(self) -> Record:
        """Return the only record."""
        (record,) = read_run(self.folder).records
        return record


def dcpbench(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run a command and return its exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as end:
        cli.main([*words])
    return int(end.value.code or 0), *capsys.readouterr()


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Measure 60 requests of 20 clients, with a key in the environment."""
    found = Ran(tmp_path_factory.mktemp("served"))
    with pytest.MonkeyPatch.context() as patch, run_test_server(QUICK[0].server, found.log) as url:
        patch.setenv("OPENAI_API_KEY", "sk-never-recorded")
        words = f"server --url {url} --device cpu --tp 8 --dcp 8 --num-requests {REQUESTS} --input-tokens 100"
        with pytest.raises(SystemExit) as end:
            cli.main([*words.split(), *QUICK[0].load.split(), "--slo", "ttft=200,itl=60", "-o", str(found.folder)])
        assert not end.value.code
    return found


def test_measured_itl_and_rates_agree_with_the_server_log(ran: Ran) -> None:
    """The tolerances allow for a busy machine; `python -m tools.client_accuracy` has those of an idle machine."""
    assert ran.record.serve is not None
    rows = read_samples(ran.folder / ran.record.serve.samples_file)
    found = {
        metric: (true, measured)
        for metric, true, measured, _ in compare_metrics(QUICK[0], ran.record, read_server_log(ran.log, REQUESTS), rows)
    }
    for metric in ("ITL p50 ms", "output tok/s"):
        true, measured = found[metric]
        assert measured == pytest.approx(true, rel=0.1), metric
    assert found["TTFT p50 ms"][1] >= found["TTFT p50 ms"][0]
    assert len(rows) == REQUESTS
    assert all(len(row.token_s) == 20 for row in rows)


def test_record_has_its_origin_and_client_settings(ran: Ran) -> None:
    """The record never contains the key."""
    record = ran.record
    assert record.origin == "engine vllm 0.32.0"
    assert record.point.backend == "vllm"
    assert str(record.point.layout) == "tp8·dcp8"
    server = record.server
    assert isinstance(server, msgspec.Struct)
    assert (server.prompts, server.counted) == ("token ids", "usage")
    assert server.kv_capacity_tokens == 16_000
    assert server.kv_sources is not None
    assert (server.kv_sources.source, server.kv_sources.conflicts) == ("kv_cache_size_tokens", [])
    assert server.client is not None
    assert server.failures == []
    assert record.serve is not None
    assert record.serve.failed == 0
    assert record.serve.steps is None
    everything = "".join(p.read_text("latin-1") for p in ran.folder.rglob("*") if p.is_file())
    assert "sk-never-recorded" not in everything
    assert "sk-never-recorded" in ran.log.read_text()


def test_report_lists_the_run_as_a_measured_server(ran: Ran) -> None:
    """The report must not describe it as an imported file."""
    page = (ran.folder / "report" / "report.html").read_text()
    assert "vLLM 0.32.0" in page
    assert "Imported:" not in page


def test_run_of_a_server_can_be_exported_and_shown(
    ran: Ran, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows have the origin of the run."""
    code, out, _ = dcpbench(capsys, "show", str(ran.folder))
    assert code == 0
    assert "tp8·dcp8" in out
    assert dcpbench(capsys, "export", str(ran.folder), "--to", "csv", "-o", str(tmp_path / "x.csv"))[0] == 0
    assert "engine vllm 0.32.0" in (tmp_path / "x.csv").read_text()


def test_failed_requests_are_counted_by_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every fourth request is answered with 500, and the others keep their times."""
    faults = ["", "", "", *["", "", "", "500"] * 6]  # the first three are trial requests
    (tmp_path / "scripts").write_text("".join(json.dumps({"fault": fault}) + "\n" for fault in faults))
    with run_test_server(f"--gap-ms 1 --script {tmp_path / 'scripts'}", tmp_path / "log") as url:
        code, _, _ = dcpbench(
            capsys,
            *("server", "--url", url, "--device", "cpu", "--num-requests", "24", "--concurrency", "4"),
            *(
                "--input-tokens",
                "20",
                "--output-tokens",
                "4",
                "--client",
                "warm-up=0",
                "-o",
                str(tmp_path / "run"),
                "--json",
            ),
        )
    (record,) = read_run(tmp_path / "run").records
    server = record.server
    assert isinstance(server, msgspec.Struct)
    assert code == 0
    assert record.serve is not None
    assert record.serve.failed
    assert record.serve.finished == 24 - record.serve.failed
    assert "requests_failed" in record.warnings
    (kind,) = server.failures
    assert (kind.kind, kind.requests) == ("HTTP 500", record.serve.failed)
    assert "Internal Server Error" in kind.first


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--backend triton", "--backend is an option of `dcpbench serve`, which measures dcpbench's own engine."),
        ("--tp 4,8", "a server has one value"),
        ("--dcp 8", "add the number of the server's GPUs, for example --tp 8"),
        ("--nodes 2", "--nodes is an option of `dcpbench serve`, which measures dcpbench's own engine."),
        ("--endpoint embeddings", "embeddings"),
        ("--timeout 0", "--timeout 0 is not a positive number"),
        ("--client warm-up=-1", "--client warm-up=-1 is negative"),
        ("--engine vllm", "--engine starts a server, and --url measures one that runs already; leave out --url"),
        ("--weights dummy", "--weights is for servers that dcpbench starts; leave it out with --url."),
        ("--engine-args --x", "--engine-args is for servers that dcpbench starts"),
        ("--header X-Team", "--header takes a name and a value with a colon between them"),
        ("--header content-length:9", "--header content-length: dcpbench sets this header itself"),
        ("--header X-A:1 --header x-a:2", "--header x-a is given twice"),
        ("--header X-A:", "--header X-A: its value is empty"),
        ("--extra-body {", "is no JSON"),
        ("--extra-body [1]", "is no JSON object"),
        ('--extra-body {"stream":false,"model":"m"}', "dcpbench sets model and stream itself; leave them out"),
        ('--extra-body {"max_tokens":5}', "dcpbench sets max_tokens itself; leave it out"),
        ("--timeout start=9", "--timeout start is for servers that dcpbench starts"),
        ("--device tpu", "--device tpu is unknown"),
        ("--tp 8 --gpu H200,count=4", "--gpu count=4: a server has at least 8"),
        ("--gpu H200,count=0", "--gpu count=0: a server has at least 1"),
        ("--serve-cmd x{port}", "leave out --url http://127.0.0.1:9 to start one, or leave out --serve-cmd."),
    ],
)
def test_inapplicable_options_are_refused_before_any_request(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = dcpbench(capsys, "server", "--url", "http://127.0.0.1:9", *words.split())
    assert code == 2
    assert message in err


def test_unreachable_server_is_one_error_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Options of servers without --url or --engine are refused too."""
    code, _, err = dcpbench(capsys, "server", "--url", "http://127.0.0.1:9", "-o", str(tmp_path / "x"))
    assert code
    assert "http://127.0.0.1:9" in err
    assert "Traceback" not in err
    code, _, err = dcpbench(capsys, "server", "--client", "warm-up=3")
    assert code == 2
    assert "add for example --url" in err
    assert not (tmp_path / "x").exists()


def test_sglang_without_metrics_gives_a_hint_with_the_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The hint is in the terminal and in the record; the KV capacity is known nevertheless."""
    words = ["--device", "cpu", "--num-requests", "4", "--concurrency", "2", "--input-tokens", "20"]
    words += ["--output-tokens", "4", "-o", str(tmp_path / "run")]
    with run_test_server("--engine sglang --no-offer-metrics", tmp_path / "log") as url:
        code, _, err = dcpbench(capsys, "server", "--url", url, *words)
    assert code == 0
    assert "start it with --enable-metrics." in err
    (record,) = read_run(tmp_path / "run").records
    assert isinstance(record.server, Server)
    assert record.server.facts["no_metrics"].endswith("start it with --enable-metrics")
    assert record.server.kv_capacity_tokens == 16_000
    assert record.serve is not None
    assert record.serve.preemptions is None


def serve_drafts(flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> ServeMetrics:
    """Measure six answers of 13 tokens in chunks of 3, 3, 3, 3 and 1; the server verifies three drafts per step."""
    words = ["--device", "cpu", "--num-requests", "6", "--concurrency", "2", "--input-tokens", "20"]
    words += ["--output-tokens", "13", "--client", "warm-up=2", "-o", str(tmp_path / "run")]
    with run_test_server(f"--burst 3 --gap-ms 4 --draft-tokens 3 {flags}", tmp_path / "log") as url:
        code, _, err = dcpbench(capsys, "server", "--url", url, *words)
    assert code == 0, err
    (record,) = read_run(tmp_path / "run").records
    assert record.serve is not None
    assert "gaps_divided" not in record.warnings
    return record.serve


def test_accepted_drafts_are_the_increase_of_vllm_counters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each answer has 4 steps after its first chunk, which accept 2, 2, 2 and 0 drafts: 1 + 6/4 tokens per step.

    Tokens of a step arrive together, so 8 of 12 gaps are 0, and the speed per user follows from TPOT.
    """
    found = serve_drafts("", tmp_path, capsys)
    assert found.speculation == SpeculationMetrics(
        draft_tokens=3, steps=24, accepted=[18, 18, 0], tokens_per_step=pytest.approx(2.5)
    )
    assert found.itl_ms.p50 == 0
    assert found.tpot_ms.p50 is not None
    assert found.tok_s_per_user == pytest.approx(1000 / found.tpot_ms.p50)
    report = (tmp_path / "run/report/report.md").read_text()
    assert "the server verifies drafts: 2.50 tokens a step by its own metrics" in report.lower()


def test_accepted_drafts_are_computed_from_sglang_accept_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The mean and the generated tokens before and after the load are used; first chunks count as tokens of steps."""
    found = serve_drafts("--engine sglang", tmp_path, capsys).speculation
    assert found is not None
    assert (found.draft_tokens, found.steps, found.accepted) == (3, None, [])
    assert found.tokens_per_step == pytest.approx(2.5, rel=0.05)


@pytest.mark.parametrize(
    ("before", "after", "tokens"),
    [
        (DraftCounters(steps=10, accepted=(8, 4)), DraftCounters(steps=30, accepted=(24, 14)), 1 + (16 + 10) / 20),
        (DraftCounters(), DraftCounters(steps=4, accepted=(4, 2)), 2.5),
        (DraftCounters(steps=30, accepted=(24, 14)), DraftCounters(steps=10, accepted=(8, 4)), None),
        (DraftCounters(), DraftCounters(steps=4, accepted=(9, 2)), None),
        (DraftCounters(steps=0, accepted=(0, 0)), DraftCounters(steps=0, accepted=(0, 0)), None),
        (DraftCounters(), DraftCounters(tokens_per_step=1.8, draft_tokens=1), 1.8),
        (
            DraftCounters(generated=100, tokens_per_step=2.0, draft_tokens=3),
            DraftCounters(generated=400, tokens_per_step=2.5, draft_tokens=3),
            300 / (400 / 2.5 - 100 / 2.0),
        ),
        (DraftCounters(), DraftCounters(tokens_per_step=math.inf), None),
    ],
)
def test_tokens_per_step_are_unknown_after_a_restart_or_invalid_counters(
    before: DraftCounters, after: DraftCounters, tokens: float | None
) -> None:
    found = summarize_drafts(before, after)
    assert (found and found.tokens_per_step) == (tokens and pytest.approx(tokens))


def test_dry_run_prints_the_plan_without_sending_a_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The server gets only the requests for its model and version."""
    with run_test_server("", tmp_path / "log") as url:
        code, out, _ = dcpbench(
            capsys,
            "server",
            "--url",
            url,
            "--device",
            "cpu",
            "--concurrency",
            "1,2",
            "--num-requests",
            "4",
            "--dry-run",
            "--json",
        )
    assert code == 0
    assert [point["concurrency"] for point in json.loads(out)] == [1, 2]
    assert not read_server_log(tmp_path / "log", 9)


@pytest.mark.parametrize(("longest", "refused"), [(None, False), (30, False), (29, True)])
def test_requests_beyond_the_maximum_context_are_not_planned(longest: int | None, refused: bool) -> None:
    """20 input and 10 output tokens are 30; a server that reports no maximum gets the requests."""
    load = make_engine_load(requests=4, input_tokens="20", output_tokens="10")
    layout = dict.fromkeys(("tp", "dp", "dcp"), 0)
    point = make_engine_point(
        model="m", layout=layout, backend="openai", load=load, concurrency=2, context=30, precision={"dtype": "unknown"}
    )
    (candidate,) = make_candidates([point], longest)
    assert (candidate.error is not None) == refused
    assert "the server accepts 29 (max_model_len)" in str(candidate.error) or not refused


def test_key_echoed_by_the_server_is_not_recorded(ran: Ran, tmp_path: Path) -> None:
    """The key may be in an error or in the start command; a word that stands for no key is kept."""
    record = msgspec.structs.replace(
        ran.record, reason='wrong key sk-with"quotes', detail={"command": 'x sk-with"quotes'}
    )
    redaction.reset_secrets()
    redaction.register_secrets('sk-with"quotes', "wrong")
    RecordFile(tmp_path).append(record)
    redaction.reset_secrets()
    text = (tmp_path / "records.jsonl").read_text()
    assert "sk-with" not in text
    assert text.count("(API key)") == 2
    assert text.count("wrong key") == 1


def test_headers_and_body_fields_are_sent_and_header_values_are_redacted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record has header names and body fields; the command line and echoed secrets are redacted."""
    run, secret = tmp_path / "run", "tok-0123456789abcdef"
    words = ["--device", "cpu", "--num-requests", "4", "--concurrency", "2", "--input-tokens", "20"]
    words += ["--output-tokens", "4", "-o", str(run)]
    words += [
        "--header",
        f"Authorization: Bearer {secret}",
        "--header=X-Route: blue-lane",
        "--extra-body",
        '{"priority": 3}',
    ]
    with pytest.MonkeyPatch.context() as patch, run_test_server(f"--api-key {secret}", tmp_path / "log") as url:
        patch.setattr("sys.argv", ["dcpbench", "server", "--url", url, *words])
        code, out, err = dcpbench(capsys, "server", "--url", url, *words)
    assert code == 0, err
    (record,) = read_run(run).records
    assert isinstance(record.server, Server)
    assert record.server.facts["headers"] == "Authorization, X-Route"
    assert record.server.facts["extra_body"] == '{"priority":3}'
    assert record.environment is not None
    assert "--header 'Authorization: …' '--header=X-Route: …'" in record.environment.command
    everything = out + err + "".join(p.read_text("latin-1") for p in run.rglob("*") if p.is_file())
    assert secret not in everything
    assert "blue-lane" not in everything
    sent = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert {(s["headers"]["authorization"], s["headers"]["x-route"]) for s in sent} == {
        (f"Bearer {secret}", "blue-lane")
    }
    assert {s["body"]["priority"] for s in sent} == {3}
    repeated = msgspec.structs.replace(record, reason=f"wrong token {secret}")
    redaction.reset_secrets()
    Target.from_url(url, headers=(("Authorization", f"Bearer {secret}"),))
    RecordFile(tmp_path).append(repeated)
    redaction.reset_secrets()
    assert "wrong token (API key)" in (tmp_path / "records.jsonl").read_text()
