"""The tables about served requests, as strings. A table holds live runs or replays, and its title says which."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcpbench.records.metrics import METRIC, REPLAYED, SERVED_COUNTS, SERVED_DETAILS, SERVED_TABLE
from dcpbench.records.provenance import OURS
from dcpbench.records.stats import REPEATS_AGREE_WITHIN, least_samples
from dcpbench.reports.origins import some_imported
from dcpbench.reports.serving import words
from dcpbench.reports.tables import FOLD_ABOVE, Column, Table, column, columns, idle, make_table
from dcpbench.show.numbers import ABSENT, missing, number, percent, text

if TYPE_CHECKING:
    import pandas as pd

LOADED: list[Column] = [("model", lambda r: str(r["model"])), ("load", lambda r: str(r["load"]))]
WHOSE: list[Column] = [("origin", lambda r: str(r["origin"]))]
FEW_SAMPLES = "few_samples"
"""The mark that dashes in a row, and the words above the table, say already."""
TITLES = {
    "live": "Served live",
    "replay": "Replay: the same scheduler in virtual time, over step times measured before",
}


def points(served: pd.DataFrame, mode: str) -> Table:
    """What was asked for first: rates and latencies of every point of a mode."""
    return make_table(
        TITLES.get(mode, mode),
        _mode(served, mode),
        [
            *LOADED,
            ("layout", lambda r: str(r["label"])),
            *WHOSE[: some_imported(served)],
            ("marks", lambda r: text(", ".join(m for m in str(r["marks"]).split(", ") if m != FEW_SAMPLES))),
            *columns(SERVED_TABLE),
            ("SLO", lambda r: text(r["slo_said"])),
            *columns(SERVED_COUNTS, finished=("finished", _finished)),
            ("repeats apart", lambda r: percent(r["spread"])),
        ],
        text_columns=4 + some_imported(served),
        optional=("marks", "SLO", "goodput req/s", "repeats apart"),
        fold=len(_mode(served, mode)) > FOLD_ABOVE,
    )


def details(served: pd.DataFrame, mode: str) -> Table:
    """The other latencies, and how the steps went."""
    found = _mode(served, mode)
    return make_table(
        f"More of each point, {words.MODES.get(mode, mode)}",
        found,
        [
            *LOADED,
            ("layout", lambda r: str(r["label"])),
            *columns(
                SERVED_DETAILS,
                decode_steps=("without prefill", _without_prefill),
                idle_fraction=("GPU idle between", idle),
                host_syncs_per_step=column(METRIC["host_syncs_per_step"], "host syncs per step"),
            ),
        ],
        text_columns=3,
        optional=("GPU idle between", "host syncs per step"),
        fold=len(found) > FOLD_ABOVE // 4,
    )


def replay(found: pd.DataFrame) -> Table:
    """How far replay lies from live."""
    compared: list[Column] = [*LOADED, ("layout", lambda r: str(r["label"]))]
    for metric in REPLAYED:
        compared += [column(metric, f"{metric.in_brief} live"), ("error", _error(f"{metric.name}_error"))]
    cpu = len(found) > 0 and bool(found["cpu"].any())
    return make_table(
        "Replay against live" + (" (CPU: functional run)" if cpu else "") + ": replay / live - 1",
        found,
        compared,
        text_columns=3,
    )


def repeats(found: pd.DataFrame) -> Table:
    """Points whose repeats disagree."""
    apart = found[found["apart"] > REPEATS_AGREE_WITHIN].sort_values("apart", ascending=False) if len(found) else found
    return make_table(
        f"Served points whose repeats differ by more than {REPEATS_AGREE_WITHIN * 100:.0f} % in output throughput",
        apart,
        [
            *LOADED,
            ("layout", lambda r: str(r["label"])),
            ("output tok/s", lambda r: f"{number(r['output_tok_s_low'])} to {number(r['output_tok_s_high'])}"),
            ("apart", lambda r: percent(r["apart"])),
        ],
        text_columns=3,
    )


def absent(served: pd.DataFrame) -> list[str]:
    """Why a dash stands where a percentile could be, and how many samples it needs."""
    why = []
    given = served[served["origin"] == OURS]
    for name, what, samples in (("ttft", "TTFT", "finished requests"), ("itl", "ITL", "gaps between tokens")):
        for p in (90, 95, 99):
            lacking = given[given[f"{name}_p{p}_ms"].isna() & given[f"{name}_p50_ms"].notna()]
            if len(lacking):
                most = int(lacking[f"{name}_samples"].max())
                why.append(
                    f"{what} p{p} needs {least_samples(p)} {samples} in one run (where it is missing: at most {most:,})"
                )
    said = [f"A dash means not known: {'; '.join(why)}."] if why else []
    if some_imported(served):
        said.append("Of imported points a dash is what their files do not say.")
    if (given["steady_tok_s"].isna() & given["output_tok_s"].notna()).any():
        said.append("No steady throughput: nothing is targeted in an open loop, or the target was never reached.")
    if (served["cancelled"] > 0).any():
        said.append(
            "Some runs ended before their requests did: tokens of requests that were cut off count as output, and "
            "their latencies are not known. Those that wait longest are missing, so latencies look better than they "
            "were."
        )
    if (served["rejected"] > 0).any():
        said.append("Some requests could never fit and were rejected; all figures are of the others.")
    return said


def _mode(table: pd.DataFrame, mode: str) -> pd.DataFrame:
    return table if table.empty else table[table["mode"] == mode]


def _finished(row: pd.Series[Any]) -> str:
    if missing(row["finished"]):
        return ABSENT
    of = "" if missing(row["submitted"]) else f" of {row['submitted']:,.0f}"
    return f"{row['finished']:,.0f}{of}"


def _without_prefill(row: pd.Series[Any]) -> str:
    return percent(row["decode_steps"] / row["steps"] if row["steps"] else None)


def _error(name: str) -> Any:  # noqa: ANN401 - what prints a column
    return lambda r: ABSENT if missing(r[name]) else f"{r[name] * 100:+.1f} %"
