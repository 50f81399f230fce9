"""Provide a good file of each kind that users may pass, the function that reads it, and random damage to it."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from dcpbench.dashboard import discovery
from dcpbench.errors import DcpbenchError, RecordsError
from dcpbench.hangs import evidence
from dcpbench.hangs import finding as hang_finding
from dcpbench.hangs import format as hang_format
from dcpbench.imports import Overrides, import_files
from dcpbench.launch import jobs
from dcpbench.models import load_shape
from dcpbench.plan import grid, serve_spec, spec
from dcpbench.points import cluster_specs, prompts
from dcpbench.points.device_probe import Probe
from dcpbench.points.layout import Layout
from dcpbench.points.settings import Settings
from dcpbench.records.file import RecordFile, is_last_line_cut_short, read_records
from dcpbench.records.folder import CHECKS_FILE, FAILED_FILE, RECORDS_FILE
from dcpbench.records.repair import audit_file
from dcpbench.records.runs import read_last_records
from dcpbench.serving import samples, step_times
from dcpbench.serving.request_files import read_requests
from dcpbench.serving.requests import Step
from dcpbench.syncs.gating import baseline, config
from dcpbench.syncs.scan import scan_traces
from dcpbench.syncs.sync_report import encode_json
from dcpbench.top.facts import Facts
from tests.unit import engine_files_builder as engines
from tests.unit import record_builder as build
from tests.unit import serve_record_builder as serve
from tests.unit import step_times_builder as times
from tests.unit import tool_files_builder as tools
from tests.unit import trace_builder as traces
from tests.unit.test_hangs import IN_REDUCE, SPY, Job, make_flight_record, make_merge_signals
from tests.unit.test_records import CHECK
from tests.unit.test_shapes import V3
from tests.unit.test_step_times import make_replica

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from pathlib import Path

ROWS = [
    samples.Row(
        number=n,
        outcome="finished",
        reason=None,
        submitted_s=0.5 * n,
        first_token_s=n + 0.25,
        end_s=n + 0.75,
        input_tokens=32,
        output_tokens=3,
        cached_tokens=0,
        preemptions=0,
        replica=0,
        token_s=[n + 0.25, n + 0.5, n + 0.75],
        tokens=[5, 7, 9],
    )
    for n in range(20)
]
TINY = load_shape("tiny")
PROBE = Probe(device="cpu", count=0, name="CPU")
HOSTILE = (  # values that replace others
    "1e400",
    "-1",
    "0",
    "null",
    "true",
    "NaN",
    "Infinity",
    "1e308",
    "5e-324",
    "9" * 400,
    "9" * 10_000,
    "1000000007",
    '""',
    '"\\ud800"',
    '"\\u0000"',
    "[]",
    "{}",
    "[" * 3_000,
    "{" * 3_000,
    '{"a":' * 3_000,
    "[[[[0]]]]",
    "\x00",
    "\u202e",
    "*a",
    "&a [*a]",
    "2026-99-99",
    "0x" + "f" * 9_000,
    "1:" + "59:" * 3_000 + "1",
)


def damage_text(text: bytes, rng: random.Random) -> bytes:
    """Return the text with random damage: a flipped bit, a removed or doubled piece, a cut end, or a hostile value."""
    kind = rng.randrange(5)
    begin = rng.randrange(len(text))
    end = min(begin + rng.choice((1, 2, 8, 64, 512)), len(text))
    if kind == 0:
        return text[:begin] + bytes([text[begin] ^ 1 << rng.randrange(8)]) + text[begin + 1 :]
    if kind == 1:
        return text[:begin] + text[begin:end] * rng.randrange(3) + text[end:]
    if kind == 2:
        return text[:begin] + bytes(rng.choice((0, 0, 4096)))
    return replace_value(text, begin, rng.choice(HOSTILE).encode("utf-8", "surrogatepass"))


def replace_value(text: bytes, begin: int, value: bytes) -> bytes:
    """Return the text with `value` in place of the text between the next two marks of JSON, TOML or YAML."""
    marks = b":=,[]{}\n"
    while begin < len(text) and text[begin : begin + 1] not in (b":", b"=", b",", b"["):
        begin += 1
    end = begin + 1
    while end < len(text) and text[end : end + 1] not in [marks[i : i + 1] for i in range(len(marks))]:
        end += 1
    return text[: begin + 1] + b" " + value + text[end:]


def make_record_lines() -> bytes:
    """Return lines of the first version, without a checksum that would find the damage first."""
    found = [
        build.make_ok_record(build.make_point(Layout(4)), steps=3),
        serve.make_served_record(serve.make_point(Layout(4, 1, 4))),
    ]
    return b"".join(
        msgspec.json.encode(record) + b"\n"
        for record in [*found, build.make_failed_record(build.make_point(Layout(4)))]
    )


def make_sealed_lines(folder: Path) -> bytes:
    """Return lines with checksums."""
    for record in (
        build.make_ok_record(build.make_point(Layout(4)), steps=3),
        build.make_rejected_record(build.make_point(Layout(4))),
    ):
        RecordFile(folder).append(record)
    return (folder / RECORDS_FILE).read_bytes()


def read_run(path: Path) -> None:
    """Read the run as `show`, `top` and `dashboard` do."""
    Facts(path.parent).read_updates()
    discovery.load_runs(path.parent, {}, lambda _: None)
    is_last_line_cut_short(path.parent)
    read_records(path.parent)


def read_job(path: Path) -> None:
    """Read a job with its events as `top`, `dashboard` and every rank do."""
    (path.parent / "progress-t.jsonl").write_bytes(path.read_bytes())
    (path.parent / "error-0.json").write_bytes(path.read_bytes())
    (path.parent / CHECKS_FILE).write_bytes(path.read_bytes())
    facts = Facts(path.parent)
    facts.read_updates()
    facts.find_failure()
    with contextlib.suppress(DcpbenchError):
        jobs.read_checks(path.parent)
    jobs.read_job(path)


def read_times(path: Path) -> None:
    """Read step times and predict with them."""
    found = step_times.read_step_times(path)
    found.check_errors()
    found.make_probe()
    for step in (Step(0, [make_replica([99, 1000], [(700, 256)])]), Step(0, [make_replica([9], [])])):
        found.predict_duration_ms(step)
        found.predict_host_ms(step)


def plan_sweep(path: Path) -> None:
    """Expand a sweep's options into points of a grid."""
    found = spec.make_spec(spec.read_options(path), PROBE)
    grid.expand_grid(found, PROBE)


def plan_serve(path: Path) -> None:
    """Expand the options of `serve` into points of a grid."""
    found = serve_spec.make_serve_spec(spec.read_options(path, serve_spec.SERVE_PARSERS), PROBE)
    grid.expand_grid(found, PROBE)


def make_samples(folder: Path) -> bytes:
    """Return samples of requests next to a record."""
    return (folder / samples.write_samples(folder, serve.make_point(Layout(4, 1, 4)), ROWS)).read_bytes()


def to_json(value: object) -> bytes:
    """Return a value as JSON."""
    return json.dumps(value).encode()


JOB = jobs.Job(
    kind="sweep", tag="t", folder="/nowhere", device="cpu", settings=Settings(), points=[build.make_point(Layout(4))]
)
TOML = b'model = "tiny"\ntp = [4, 8]\ndcp = [1, 4]\nconcurrency = [2, 8]\ncontext = 100\nseconds = 2.5\nrepeats = 2\n'
YAML = b"model: tiny\ntp: [4, 8]\ndcp: [1, 4]\nconcurrency: [2, 8]\ncontext: 100\nseconds: 2.5\nkv-memory: 1GiB\n"
SERVE = b'tp = 4\ninput-tokens = ["32", "uniform:10-20"]\nrequest-rate = [0.5, 2]\nprefix-share = 0.5\nslo = "ttft=5"\n'
REQUESTS = b'{"arrival_s": 0.5, "input_tokens": 9, "output_tokens": 3}\n' * 3
MOONCAKE = b'{"timestamp": 500, "input_length": 700, "output_length": 3, "hash_ids": [1, 2]}\n' * 3
QWEN = (
    b'{"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 30, "output_length": 3, "hash_ids": [1, 2]}\n'
    * 3
)
AIPERF = (
    b'{"session_id": "a", "timestamp": 5, "input_length": 30, "output_length": 3}\n'
    b'{"session_id": "a", "delay": 5, "input_length": 30, "output_length": 3}\n'
)
AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:01:51.1,9,3\n2023-11-16 18:01:52.2,9,3\n"
CSV = b"arrival_s,input_tokens,output_tokens,prefix_group\n0.5,9,3,1\n0.7,9,3,\n"
SYNCS = (
    b"[tool.dcpbench.syncs]\nmax-per-step = 2\nmax-bubble-us = 1.5\n"
    b'allow = [{ function = "engine.sampler.*", reason = "tokens", expires = 2026-12-31 }]\n'
)
BASELINE = encode_json(baseline.Baseline(baseline_version=baseline.VERSION, detector="scan"))


class Kind(NamedTuple):
    """Describe a kind of file."""

    name: str  # name of the file
    good: Callable[[Path], bytes] | bytes  # content of a good file, or a function that makes it in a folder
    read: Callable[[Path], object]

    def content(self, folder: Path) -> bytes:
        """Return the content of a good file."""
        return self.good if isinstance(self.good, bytes) else self.good(folder)


def make_heartbeats(folder: Path) -> bytes:
    """Return the heartbeats of a rank of two that has made a few steps."""
    job = Job(folder, 2)
    job.run_steps(3)
    return (folder / "heartbeats-0.bin").read_bytes()


def make_signals(folder: Path) -> bytes:
    """Write the signals of rank 1, which has passed the barrier, and return those of rank 0, which waits in it."""
    (folder / "signals-1.json").write_bytes(msgspec.json.encode(make_merge_signals(1, 2, 5, {0: 5})))
    return msgspec.json.encode(make_merge_signals(0, 2, 4, {1: 4}))


def read_signals(path: Path) -> None:
    """Read the file together with the other rank's; raise RecordsError if any was not read."""
    found = evidence.read_evidence([path, *path.parent.glob("signals-1.json")])
    hang_finding.find_cause(found)
    if found.unread:
        raise RecordsError(found.unread[0])


def read_failed(path: Path) -> None:
    """Read the records of points that verify could not check."""
    read_last_records(path.parent, FAILED_FILE)


def read_audited(path: Path) -> None:
    """Read the records as `records check` does."""
    audit_file(path.parent)
    read_run(path)


def explain_hang(path: Path) -> None:
    """Read and format the file as `hang explain` does."""
    hang_finding.find_cause(evidence.read_evidence([path]))
    (hang,) = hang_format.read_hangs([path])
    hang_format.format_text(hang)
    hang_format.render_page([hang])


def make_importer(engine: str, model: str | None = None) -> Callable[[Path], object]:
    """Return a function that reads results of an engine."""
    return lambda path: import_files([path], engine, path.parent / "run", Overrides(model=model), force=True)


def describe_requests(path: Path) -> None:
    """Read a file of requests and describe it, as the commands do."""
    read_requests(path).describe(2)


def make_trace() -> bytes:
    """Return a small trace with steps, operators, frames and waits."""
    trace = traces.Trace()
    for step in range(3):
        begin = 1000.0 * step
        trace.range(f"ProfilerStep#{step}", begin, begin + 900)
        trace.frame("engine.py(12): step", begin + 1, begin + 800)
        trace.op("aten::item", begin + 10, begin + 200)
        trace.add("cuda_runtime", "cudaStreamSynchronize", begin + 20, begin + 150, correlation=step)
        trace.add("kernel", "add", begin + 30, begin + 140, pid=0, tid=7, correlation=step + 50, stream=7)
    return trace.text().encode()


SPY_DUMP = SPY.format(pid=100, frames=IN_REDUCE).encode()
FLIGHT = to_json(make_flight_record(("all_reduce", [4, 3], "completed"), ("all_gather", [4], "started")))
CHECKS = msgspec.json.encode(CHECK) + b"\n"
MACHINE = cluster_specs.format_machine(cluster_specs.load_built_in("H200")).encode()

KINDS = {
    "records": Kind(RECORDS_FILE, make_record_lines(), read_audited),
    "records with checksums": Kind(RECORDS_FILE, make_sealed_lines, read_audited),
    "failed points": Kind(FAILED_FILE, make_record_lines(), read_failed),
    "checks": Kind(CHECKS_FILE, CHECKS * 3, lambda path: jobs.read_checks(path.parent)),
    "model": Kind("config.json", to_json(V3), lambda path: load_shape(str(path))),
    "samples": Kind("x.parquet", make_samples, samples.read_samples),
    "job": Kind("job-t.json", msgspec.json.encode(JOB), read_job),
    "step times": Kind("x.json", msgspec.json.encode(times.make_step_times()), read_times),
    "options in TOML": Kind("x.toml", TOML, plan_sweep),
    "options in YAML": Kind("x.yaml", YAML, plan_sweep),
    "options of serve": Kind("x.toml", SERVE, plan_serve),
    "machine": Kind("machine.toml", MACHINE, cluster_specs.read_machine),
    "requests": Kind("x.jsonl", REQUESTS, read_requests),
    "requests of Mooncake": Kind("x.jsonl", MOONCAKE, read_requests),
    "requests in CSV": Kind("x.csv", CSV, read_requests),
    "requests of Qwen": Kind("x.jsonl", QWEN, describe_requests),
    "requests of AIPerf": Kind("x.jsonl", AIPERF, describe_requests),
    "requests of Azure": Kind("x.csv", AZURE, describe_requests),
    "prompts": Kind("x.json", b"[[1, 5, 7], [2]]", lambda path: prompts.read_prompts(path, TINY, 8)),
    "results of vLLM": Kind("x.json", to_json(engines.make_vllm_result()), make_importer("vllm")),
    "results of SGLang": Kind("x.json", to_json(engines.make_sglang_result()), make_importer("sglang")),
    "results of InferenceX": Kind("x.json", to_json(engines.make_inferencex_row()), make_importer("inferencex")),
    "results of GuideLLM": Kind(
        "x.json", to_json(tools.make_guidellm_result({"type_": "concurrent", "streams": 2})), make_importer("guidellm")
    ),
    "results of AIPerf": Kind("x.json", to_json(tools.make_aiperf_summary()), make_importer("aiperf")),
    "phases of AIPerf": Kind(
        "x.json", to_json(tools.make_aiperf_summary(input_config=tools.PHASES)), make_importer("aiperf")
    ),
    "requests that AIPerf measured": Kind(
        "x.jsonl", to_json(tools.make_aiperf_line(7, [30.0, 31.0])), make_importer("aiperf", model="m")
    ),
    "steps of vLLM": Kind(
        "x.json", to_json(tools.make_forward_case("a", [9, 9])), make_importer("vllm-forward", model="m")
    ),
    "batches of SGLang": Kind(
        "x.json", to_json(tools.make_one_batch_result()), make_importer("sglang-one-batch", model="m")
    ),
    "trace": Kind("trace.json", make_trace(), lambda path: scan_traces([path], root=path.parent)),
    "heartbeats": Kind("heartbeats-0.bin", make_heartbeats, explain_hang),
    "dump of py-spy": Kind("stacks-0.txt", SPY_DUMP, explain_hang),
    "signals of a hang": Kind("signals-0.json", make_signals, read_signals),
    "flight recorder": Kind("flight-0.json", FLIGHT, explain_hang),
    "baseline of syncs": Kind("x.json", BASELINE.encode(), baseline.read_baseline),
    "pyproject": Kind("pyproject.toml", SYNCS, lambda path: config.find_config(path.parent, path.parent)),
}
