"""Files that anybody may hand us, damaged at random: each is read, or refused in a sentence, and nothing else."""

from __future__ import annotations

import contextlib
import json
import random
from typing import TYPE_CHECKING

import msgspec
import pytest

from dcpbench.dashboard import finding, running
from dcpbench.errors import DcpbenchError
from dcpbench.imports import Told, import_files
from dcpbench.launch import jobs
from dcpbench.plan import grid, serve_spec, spec
from dcpbench.points import prompts
from dcpbench.points.layout import Layout
from dcpbench.points.machine import Probe
from dcpbench.points.settings import Settings
from dcpbench.points.shapes import load_shape
from dcpbench.records.file import RecordFile, cut_short, read_records
from dcpbench.records.folder import CHECKS_FILE, RECORDS_FILE
from dcpbench.serving import samples, step_times
from dcpbench.serving.request_files import read_requests
from dcpbench.serving.requests import Step
from dcpbench.syncs.gating import baseline, config
from dcpbench.syncs.model import encode
from dcpbench.top.facts import Facts
from tests.unit import engine_files_builder as engines
from tests.unit import record_builder as build
from tests.unit import serve_record_builder as serve
from tests.unit import step_times_builder as times
from tests.unit.test_shapes import V3
from tests.unit.test_step_times import replica

if TYPE_CHECKING:
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
ROUNDS = 100
"""Damaged files of each kind."""
HOSTILE = (
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
"""What may stand where a value was."""


def damaged(text: bytes, rng: random.Random) -> bytes:
    """The text with a flipped bit, a piece cut out, doubled or cut off, or with a hostile value for one of its own."""
    kind = rng.randrange(5)
    begin = rng.randrange(len(text))
    end = min(begin + rng.choice((1, 2, 8, 64, 512)), len(text))
    if kind == 0:
        return text[:begin] + bytes([text[begin] ^ 1 << rng.randrange(8)]) + text[begin + 1 :]
    if kind == 1:
        return text[:begin] + text[begin:end] * rng.randrange(3) + text[end:]
    if kind == 2:
        return text[:begin] + bytes(rng.choice((0, 0, 4096)))
    return spoiled(text, begin, rng.choice(HOSTILE).encode("utf-8", "surrogatepass"))


def spoiled(text: bytes, begin: int, value: bytes) -> bytes:
    """With `value` in place of what stands between the next two marks of JSON, TOML or YAML."""
    marks = b":=,[]{}\n"
    while begin < len(text) and text[begin : begin + 1] not in (b":", b"=", b",", b"["):
        begin += 1
    end = begin + 1
    while end < len(text) and text[end : end + 1] not in [marks[i : i + 1] for i in range(len(marks))]:
        end += 1
    return text[: begin + 1] + b" " + value + text[end:]


def record_lines() -> bytes:
    """Lines as the first version wrote them, without a checksum that would find the damage first."""
    found = [build.ok(build.point(Layout(4)), steps=3), serve.served(serve.point(Layout(4, 1, 4)))]
    return b"".join(msgspec.json.encode(record) + b"\n" for record in [*found, build.failed(build.point(Layout(4)))])


def sealed_lines(folder: Path) -> bytes:
    """The same with checksums."""
    for record in (build.ok(build.point(Layout(4)), steps=3), build.rejected(build.point(Layout(4)))):
        RecordFile(folder).append(record)
    return (folder / RECORDS_FILE).read_bytes()


def read_run(path: Path) -> None:
    """As `show`, `top` and `dashboard` read it."""
    Facts(path.parent).look()
    finding.find(path.parent, {}, lambda _: None)
    cut_short(path.parent)
    read_records(path.parent)


def read_job(path: Path) -> None:
    """A job with its events, as `top`, `dashboard` and every rank read it."""
    (path.parent / "progress-t.jsonl").write_bytes(path.read_bytes())
    (path.parent / "error-0.json").write_bytes(path.read_bytes())
    (path.parent / CHECKS_FILE).write_bytes(path.read_bytes())
    facts = Facts(path.parent)
    facts.look()
    facts.failure()
    running._events(path.parent / "progress-t.jsonl")
    with contextlib.suppress(DcpbenchError):
        jobs.read_checks(path.parent)
    jobs.read_job(path)


def read_times(path: Path) -> None:
    """Step times with what is predicted by them."""
    found = step_times.read_step_times(path)
    found.check_errors()
    found.probe()
    for step in (Step(0, [replica([99, 1000], [(700, 256)])]), Step(0, [replica([9], [])])):
        found.duration_ms(step)
        found.host_ms(step)


def plan(path: Path) -> None:
    """A sweep's options as points of a grid."""
    found = spec.make_spec(spec.read_options(path), PROBE)
    grid.expand(found, PROBE)


def plan_serve(path: Path) -> None:
    """The same of `serve`."""
    found = serve_spec.make_serve_spec(spec.read_options(path, serve_spec.SERVE_PARSERS), PROBE)
    grid.expand(found, PROBE)


def made_samples(folder: Path) -> bytes:
    """Requests beside a record."""
    return (folder / samples.write_samples(folder, serve.point(Layout(4, 1, 4)), ROWS)).read_bytes()


def text(value: object) -> bytes:
    """JSON of it."""
    return json.dumps(value).encode()


JOB = jobs.Job(
    kind="sweep", tag="t", folder="/nowhere", device="cpu", settings=Settings(), points=[build.point(Layout(4))]
)
TOML = b'model = "tiny"\ntp = [4, 8]\ndcp = [1, 4]\nconcurrency = [2, 8]\ncontext = 100\nseconds = 2.5\nrepeats = 2\n'
YAML = b"model: tiny\ntp: [4, 8]\ndcp: [1, 4]\nconcurrency: [2, 8]\ncontext: 100\nseconds: 2.5\nkv-memory: 1GiB\n"
SERVE = b'tp = 4\ninput-tokens = ["32", "uniform:10-20"]\nrequest-rate = [0.5, 2]\nprefix-share = 0.5\nslo = "ttft=5"\n'
REQUESTS = b'{"arrival_s": 0.5, "input_tokens": 9, "output_tokens": 3}\n' * 3
CSV = b"arrival_s,input_tokens,output_tokens,prefix_group\n0.5,9,3,1\n0.7,9,3,\n"
SYNCS = (
    b"[tool.dcpbench.syncs]\nmax-per-step = 2\nmax-bubble-us = 1.5\n"
    b'allow = [{ function = "engine.sampler.*", reason = "tokens", expires = 2026-12-31 }]\n'
)
BASELINE = encode(baseline.Baseline(baseline_version=baseline.VERSION))

KINDS: dict[str, tuple[str, Callable[[Path], bytes] | bytes, Callable[[Path], object]]] = {
    "records": (RECORDS_FILE, record_lines(), read_run),
    "records with checksums": (RECORDS_FILE, sealed_lines, read_run),
    "model": ("config.json", text(V3), lambda path: load_shape(str(path))),
    "samples": ("x.parquet", made_samples, samples.read_samples),
    "job": ("job-t.json", msgspec.json.encode(JOB), read_job),
    "step times": ("x.json", msgspec.json.encode(times.step_times()), read_times),
    "options in TOML": ("x.toml", TOML, plan),
    "options in YAML": ("x.yaml", YAML, plan),
    "options of serve": ("x.toml", SERVE, plan_serve),
    "requests": ("x.jsonl", REQUESTS, read_requests),
    "requests in CSV": ("x.csv", CSV, read_requests),
    "prompts": ("x.json", b"[[1, 5, 7], [2]]", lambda path: prompts.read_prompts(path, TINY, 8)),
    "results of vLLM": (
        "x.json",
        text(engines.vllm()),
        lambda path: import_files([path], "vllm", path.parent / "run", Told(), force=True),
    ),
    "results of SGLang": (
        "x.json",
        text(engines.sglang()),
        lambda path: import_files([path], "sglang", path.parent / "run", Told(), force=True),
    ),
    "baseline of syncs": ("x.json", BASELINE.encode(), baseline.read),
    "pyproject": ("pyproject.toml", SYNCS, lambda path: config.find_config(path.parent, path.parent)),
}
"""Of each kind: the file's name, a good one, and what reads it."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_read_or_refused_in_a_sentence(kind: str, tmp_path: Path) -> None:
    """A fixed seed for each kind. Whatever is no DcpbenchError would be a traceback on somebody's terminal."""
    name, good, read = KINDS[kind]
    content = good if isinstance(good, bytes) else good(tmp_path)
    path = tmp_path / name
    path.write_bytes(content)
    read(path)
    rng = random.Random(kind)
    said = []
    for number in range(ROUNDS):
        wrong = damaged(content, rng)
        path.write_bytes(wrong)
        try:
            read(path)
        except DcpbenchError as e:
            said.append(str(e))
        except Exception as e:
            raise AssertionError(f"{kind}, round {number}: {type(e).__name__} of {wrong[:300]!r}") from e
    assert said, "some of these cannot be read"
    assert max(map(len, said)) < 3_000, "sentences, whatever the files hold"
