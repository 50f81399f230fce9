"""Compare the times that `dcpbench server --url` measures with those in the log of a test server in another process.

    python -m tools.client_accuracy [-o FILE.md] [--quick] [OPTIONS OF serve, as --client processes=2]

Each line has the server's value, dcpbench's value, and `yes` if they differ by at most 2 % or 1 ms. Unlike in real use, server and client share
the cores of one machine. Both use the arrival times of the kernel if it provides them. Answers have different lengths, so that the clients do not
send in lock-step: requests that arrive together wait until the server reads them, and the server's log does not have this time.

Exit code 1: a value differs too much.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dcpbench.records.runs import read_run
from dcpbench.serving.samples import read_samples

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from dcpbench.records.record import Record

    Floats = npt.NDArray[np.float64]

TOLERANCE, TOLERANCE_MS, MAX_LATE_MS = 0.02, 1.0, 2.0
SHARE_WITHIN = 0.99  # share of the gaps of a request that must be within an ITL objective to meet it
SLO = {"ttft": 200.0, "itl": 60.0}


@dataclasses.dataclass(frozen=True)
class Case:
    """Hold a load, and the flags of the server for it."""

    name: str
    server: str
    load: str
    requests: int


CASES = (
    Case("200 streams of 50 ms", "--ttft-ms 30 --gap-ms 50", "--concurrency 200 --output-tokens uniform:50-150", 600),
    Case("20 streams of 10 ms", "--ttft-ms 30 --gap-ms 10", "--concurrency 20 --output-tokens uniform:50-150", 200),
    Case(
        "one gap in 80 is 500 ms",
        "--ttft-ms 30 --gap-ms 20 --stall-every 80",
        "--concurrency 50 --output-tokens uniform:50-150",
        300,
    ),
    Case(
        "4 tokens in a chunk",
        "--ttft-ms 30 --gap-ms 40 --burst 4",
        "--concurrency 50 --output-tokens uniform:50-150",
        200,
    ),
    Case("open loop, 100 a second", "--ttft-ms 30 --gap-ms 20", "--request-rate 100 --output-tokens 10", 1000),
)
QUICK = (Case("quick", "--ttft-ms 30 --gap-ms 20", "--concurrency 20 --output-tokens 20", 60),)


@contextlib.contextmanager
def run_test_server(flags: str, log: Path) -> Iterator[str]:
    """Run the test server with these flags inside the block, and yield its address. Its log is complete after the block."""
    command = [sys.executable, "-m", "tests.servers.fake_server", "--port", "0", "--log", str(log), *flags.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[-1]
        finally:
            server.terminate()
            server.wait()


def read_server_log(log: Path, requests: int) -> list[dict[str, Any]]:
    """Return the last `requests` entries of the server's log with tokens, in the order of arrival."""
    found = [json.loads(line) for line in log.read_text().splitlines()]
    return sorted((sent for sent in found if sent["token_s"]), key=lambda sent: float(sent["came_s"]))[-requests:]


def compute_gaps(token_s: list[float]) -> Floats:
    """Return the gaps between tokens in s; tokens of one chunk share the time since the previous chunk evenly, and those of
    the first chunk have gaps of 0.
    """
    times, counts = np.unique(token_s, return_counts=True)
    shared = np.repeat(np.diff(times) / counts[1:], counts[1:])
    return np.concatenate([np.zeros(counts[0] - 1), shared])


def compare_metrics(
    case: Case, record: Record, sent: list[dict[str, Any]], rows: list[Any]
) -> list[tuple[str, float, float, bool]]:
    """Return (metric, the server's value, dcpbench's value, True if they agree) for each metric of one load."""
    assert record.serve is not None
    m = record.serve
    first = np.array([s["token_s"][0] - s["came_s"] for s in sent]) * 1e3
    gaps = np.concatenate([compute_gaps(s["token_s"]) for s in sent]) * 1e3
    wall = max(s["token_s"][-1] for s in sent) - min(s["came_s"] for s in sent)
    tokens = sum(len(s["token_s"]) for s in sent)
    good = sum(
        first[i] <= SLO["ttft"] and np.mean(compute_gaps(s["token_s"]) * 1e3 <= SLO["itl"]) >= SHARE_WITHIN
        for i, s in enumerate(sent)
    )
    values: list[tuple[str, float, float | None]] = [
        ("TTFT p50 ms", float(np.median(first)), m.ttft_ms.p50),
        ("ITL p50 ms", float(np.median(gaps)), m.itl_ms.p50),
        ("ITL p99 ms", float(np.percentile(gaps, 99)), m.itl_ms.p99),
        ("output tok/s", tokens / wall, m.output_tok_s),
        ("goodput req/s", good / wall, m.request_goodput),
    ]
    compared = [
        (
            metric,
            true,
            ours or 0.0,
            abs((ours or 0.0) - true) <= max(TOLERANCE * true, TOLERANCE_MS if metric.endswith("ms") else 0.0),
        )
        for metric, true, ours in values
    ]
    if "request-rate" in case.load:
        due = sorted(row.submitted_s for row in rows)
        late = np.array([s["came_s"] - d for s, d in zip(sent, due, strict=True)])
        late_ms = float(np.percentile((late - late.min()) * 1e3, 99))
        compared.append(("arrival after the scheduled time, p99 ms", 0.0, late_ms, late_ms <= MAX_LATE_MS))
    return compared


def measure_case(
    case: Case, folder: Path, extra: Sequence[str] = ()
) -> tuple[Record, list[tuple[str, float, float, bool]]]:
    """Measure one case; return its record and the compared metrics."""
    log, run = folder / "sent.jsonl", folder / "run"
    slo = ",".join(f"{name}={ms:g}" for name, ms in SLO.items())
    with run_test_server(case.server, log) as url:
        command_line = f"server --url {url} --device cpu --num-requests {case.requests} --input-tokens 100 {case.load} --slo {slo} -o {run}"
        environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
        subprocess.run(
            [sys.executable, "-m", "dcpbench.cli", *command_line.split(), *extra],
            check=True,
            capture_output=True,
            env=environment,
        )
    (record,) = read_run(run).records
    assert record.serve is not None
    rows = read_samples(run / record.serve.samples_file)
    return record, compare_metrics(case, record, read_server_log(log, case.requests), rows)


def main() -> int:
    """Measure all cases, and print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="also write the table to this file")
    parser.add_argument("--quick", action="store_true", help="measure one short load")
    args, extra = parser.parse_known_args()
    lines = ["| load | metric | server | dcpbench | within 2 % or 1 ms |", "|---|---|---:|---:|---|"]
    right = True
    for case in QUICK if args.quick else CASES:
        with tempfile.TemporaryDirectory() as folder:
            record, found = measure_case(case, Path(folder), extra)
        for metric, true, ours, ok in found:
            right &= ok
            lines.append(f"| {case.name} | {metric} | {true:,.2f} | {ours:,.2f} | {'yes' if ok else '**no**'} |")
        client = record.server.client if record.server else None
        if client is not None:
            lines.append(
                f"| {case.name} | client: CPU, waiting for a core, sent late, lag, read late p99 ms | | {client.cpu_share:.0%}, {client.starved_share or 0:.0%}, {client.late_p99_ms or 0:.2f}, {client.lag_p99_ms or 0:.2f}, {client.read_late_p99_ms or 0:.2f} | |"
            )
    checks = [line for line in lines if line.endswith((" yes |", " **no** |"))]
    text = "\n".join(lines) + f"\n\n{sum(line.endswith(' yes |') for line in checks)} of {len(checks)} agree.\n"
    sys.stdout.write(text)
    if args.output:
        args.output.write_text(text)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
