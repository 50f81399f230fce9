"""What records of served requests say, computed: best layout per load, where DCP pays, KV pressure, replay's error.

Live runs and replays are never compared with each other except in `replay_against_live`, which is there to do so. No
sentence speaks of the speed of a CPU run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from dcpbench.choices import CLOSED, LIVE, REPLAY
from dcpbench.reports.findings import NOT_RUN, over_baseline
from dcpbench.reports.merge import missing
from dcpbench.reports.serving import words
from dcpbench.reports.tables import number
from dcpbench.stats import REPEATS_AGREE_WITHIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.reports.frames import Frames

LOAD = ["run", "model", "mode", "same_load"]
BASELINE_OF = [*LOAD, "tp", "dp", "backend", "dtype", "page_size", "weights", "all_reduce"]
"""What a DCP point and its dcp=1 baseline have in common."""
SAME_BUT_MODE = [
    "model", "device", "same_load", "served_with", "tp", "dp", "dcp", "exchange", "q_replicate", "project_first",
    "overlap", "all_reduce", "backend", "dtype", "page_size", "interleave", "weights",
]  # fmt: skip
"""What a replay and the live run that it stands for have in common."""
SHOWN = ["run", "model", "mode", "load", "arrival", "rest", "concurrency", "input_typical", "label", "layout", "tp"]
COMPARED = {
    "output_tok_s": "output tok/s",
    "ttft_p50_ms": "TTFT p50",
    "ttft_p99_ms": "TTFT p99",
    "itl_p50_ms": "ITL p50",
    "itl_p99_ms": "ITL p99",
}


def timed(served: pd.DataFrame) -> pd.DataFrame:
    """Points whose speed may be spoken about: measured or replayed, and not on a CPU."""
    return served if served.empty else served[served["output_tok_s"].notna() & ~served["cpu"]]


def best_per_load(points: pd.DataFrame) -> pd.DataFrame:
    """The layout with the highest output throughput of each load that at least two layouts ran, each mode by itself.

    `clear` is False where repeats overlap or it leads by no more than repeats may differ.
    """
    rows: list[dict[str, Any]] = []
    for _, group in points.groupby(LOAD, sort=False) if len(points) else ():
        if len(group) < 2:  # noqa: PLR2004 - a best of one says nothing
            continue
        first, second = (row for _, row in group.sort_values("output_tok_s", ascending=False).head(2).iterrows())
        lead = first["output_tok_s"] / second["output_tok_s"]
        apart = first["output_tok_s_low"] > second["output_tok_s_high"]
        rows.append(
            {name: first[name] for name in (*SHOWN, "output_tok_s", "ttft_p50_ms", "itl_p50_ms")}
            | {"next": second["label"], "lead": lead, "clear": bool(apart and lead > 1 + REPEATS_AGREE_WITHIN)}
        )
    return pd.DataFrame(rows)


def dcp_against_baseline(points: pd.DataFrame) -> pd.DataFrame:
    """Output throughput of every DCP point over that of the same layout without DCP, under the same load and mode.

    `ratio` is missing where the baseline did not run. `verdict` is `higher` or `lower` only if what repeats reached
    lies apart, and the ratio differs from 1 by more than repeats may.
    """
    return over_baseline(
        points, BASELINE_OF, [*SHOWN, "dcp", "variant", "load_arrival"],
        lambda point, over: {
            "ttft_ratio": _over(point["ttft_p50_ms"], over["ttft_p50_ms"]),
            "itl_ratio": _over(point["itl_p50_ms"], over["itl_p50_ms"]),
        },
    )  # fmt: skip


def break_even(ratios: pd.DataFrame) -> pd.DataFrame:
    """Per layout, exchange and shape of requests of closed loops: the least concurrency from which on DCP pays.

    It pays where the verdict is `higher`. `from` is missing where it does not at the highest concurrency tried;
    `least` says whether it is the lowest one tried, so that the true one may be lower.
    """
    known = ratios[ratios["ratio"].notna()] if "ratio" in ratios else ratios.iloc[:0]
    known = known[known["load_arrival"] == CLOSED] if len(known) else known
    rows: list[dict[str, Any]] = []
    keys = ["run", "model", "mode", "label", "rest"]
    for key, group in known.groupby(keys, sort=False) if len(known) else ():
        ordered = group.sort_values("concurrency", kind="stable")
        pays = ordered["verdict"].eq("higher").tolist()
        first = next((i for i in range(len(pays)) if all(pays[i:])), None)
        top = ordered.sort_values("ratio", kind="stable").iloc[-1]
        rows.append(
            dict(zip(keys, key, strict=True))
            | {
                "input_typical": ordered["input_typical"].iloc[0],
                "from": None if first is None else int(ordered["concurrency"].iloc[first]),
                "ratio": None if first is None else float(ordered["ratio"].iloc[first]),
                "least": first == 0,
                "measured": ordered["concurrency"].tolist(),
                "best": float(top["ratio"]),
                "best_at": int(top["concurrency"]),
            }
        )
    return pd.DataFrame(rows)


def pressure(points: pd.DataFrame) -> pd.DataFrame:
    """Points whose KV cache was short: requests were preempted, or fewer fit than were in flight."""
    if points.empty:
        return points
    short = (points["load_arrival"] == CLOSED) & (points["kv_capacity_requests"] < points["concurrency"])
    return points[(points["preemptions"] > 0) | short]


def replay_against_live(served: pd.DataFrame) -> pd.DataFrame:
    """Each replay beside the live run of the same point and load: `…_error` = replay / live - 1."""
    if served.empty:
        return pd.DataFrame()
    known = served[served["output_tok_s"].notna()]
    live = known[known["mode"] == LIVE].drop_duplicates(SAME_BUT_MODE, keep="last").set_index(SAME_BUT_MODE)
    rows: list[dict[str, Any]] = []
    for _, point in known[known["mode"] == REPLAY].iterrows():
        key = tuple(point[SAME_BUT_MODE])
        if key in live.index:
            of = live.loc[key]
            row = {name: point[name] for name in (*SHOWN, "cpu")} | {"cpu": bool(point["cpu"] or of["cpu"])}
            row |= {name: of[name] for name in COMPARED}
            row |= {f"{name}_replay": point[name] for name in COMPARED}
            ratios = {name: _over(point[name], of[name]) for name in COMPARED}
            rows.append(row | {f"{name}_error": None if r is None else r - 1 for name, r in ratios.items()})
    return pd.DataFrame(rows)


def repeats(served: pd.DataFrame) -> pd.DataFrame:
    """Live points that were run more than once; a replay repeats itself exactly, which says nothing."""
    if served.empty:
        return pd.DataFrame()
    again = served[served["spread"].notna() & (served["mode"] == LIVE)]
    return again.rename(columns={"spread": "apart"})


def sentences(frames: Frames) -> list[str]:
    """What a report opens with."""
    points = timed(frames.served)
    if points.empty:
        return []
    said = []
    ratios = dcp_against_baseline(points)
    tables = (best_per_load(points), ratios, break_even(ratios), pressure(points))
    for run, model, mode in dict.fromkeys(zip(points["run"], points["model"], points["mode"], strict=True)):
        where = f"{model}, run {run}" if len(frames.runs) > 1 else str(model)
        best, over, even, short = (_of(table, run, model, mode) for table in tables)
        told = [*_best(best), *_even(even), *_without_baseline(over, _of(frames.others, run, model, mode))]
        told += _pressure(short, _of(points, run, model, mode))
        said += [f"{where}, {words.MODES.get(mode, mode)}: {sentence}" for sentence in told]
    return said + _replay(replay_against_live(points))


def _best(best: pd.DataFrame) -> list[str]:
    if best.empty:
        return []
    clear = best[best["clear"]]
    won = [f"{label} in {n}" for label, n in clear["label"].value_counts().items()]
    won += [f"no layout clearly in {len(best) - len(clear)}"] if len(best) > len(clear) else []
    top = best.sort_values(["input_typical", "concurrency"], kind="stable").iloc[-1]
    lead = f"{top['lead']:.2f} times {top['next']}" if top["clear"] else f"not clearly more than {top['next']}"
    loads = "1 load" if len(best) == 1 else f"{len(best)} loads"
    text = f"of {loads}, the highest output throughput is that of {_list(won)}. Under {top['load']} it is "
    return [text + f"{top['label']} with {top['output_tok_s']:,.0f} tok/s, {lead}."]


def _even(even: pd.DataFrame) -> list[str]:
    """`DCP starts to pay …`: with each layout and exchange, from which concurrency on for each shape of requests."""
    pays, never = (even[even["from"].notna()], even[even["from"].isna()]) if len(even) else (even, even)
    said = []
    if len(pays):
        clauses = [
            f"with {label} from {_list([_from(r) for _, r in rows.iterrows()])}"
            for label, rows in pays.groupby("label", sort=False)
        ]
        least = " ≤ marks the lowest concurrency tried." if pays["least"].any() else ""
        said.append(
            "DCP starts to pay, in output tok/s over the same layout without it, at concurrency × load: "
            f"{'; '.join(clauses)}.{least}"
        )
    if len(never):
        clauses = [
            f"{label} at {_list([_at_most(r) for _, r in rows.iterrows()])}"
            for label, rows in never.groupby("label", sort=False)
        ]
        said.append(f"at the highest concurrency tried DCP does not pay with {'; '.join(clauses)}.")
    return said


def _from(row: pd.Series[Any]) -> str:
    return f"{'≤ ' if row['least'] else ''}{row['from']:,.0f} × {row['rest']} ({row['ratio']:.2f}×)"


def _at_most(row: pd.Series[Any]) -> str:
    return f"{max(row['measured']):,} × {row['rest']} (best {row['best']:.2f}×, at {row['best_at']:,})"


def _without_baseline(ratios: pd.DataFrame, others: pd.DataFrame) -> list[str]:
    """DCP points with nothing to be compared with, and why that did not run."""
    alone = 0 if ratios.empty else int((ratios["verdict"] == "no baseline").sum())
    lost = others[others["dcp"] == 1] if len(others) else others
    if not alone or lost.empty:
        return []  # where nobody asked for it, nothing is missing
    whys = [said for outcome, said in NOT_RUN.items() if outcome in set(lost["outcome"])]
    points = "1 point" if alone == 1 else f"{alone} points"
    return [f"{points} with DCP ran where the same layout without it did not, because it {' or '.join(whys)}."]


def _pressure(short: pd.DataFrame, points: pd.DataFrame) -> list[str]:
    """The heaviest load under which a layout was short of KV, and what became of all layouts there."""
    if short.empty:
        return []
    heaviest = short.sort_values(["input_typical", "concurrency"], kind="stable").iloc[-1]
    group = points[points["same_load"] == heaviest["same_load"]]
    clauses = []
    for _, r in group.iterrows():
        fits = "" if missing(r["kv_capacity_requests"]) else f"has room for {r['kv_capacity_requests']:,.0f} requests, "
        clauses.append(
            f"{r['label']} {fits}{r['preemptions']:,.0f} preemptions, TTFT p50 {number(r['ttft_p50_ms'], 3)} ms"
        )
    return [f"KV pressure under {heaviest['load']}: {'; '.join(clauses)}."]


def _replay(found: pd.DataFrame) -> list[str]:
    if found.empty:
        return []
    parts = []
    for name, what in COMPARED.items():
        errors = found[f"{name}_error"].dropna().abs()
        if len(errors):
            among = "" if len(errors) == len(found) else f" ({len(errors)} of {len(found)})"
            parts.append(f"{what} {errors.max() * 100:.2g} %{among}")
    many = "1 point that was" if len(found) == 1 else f"{len(found)} points that were"
    return [f"Replay against live, largest errors over {many} run both ways: {', '.join(parts)}."]


def _of(table: pd.DataFrame, run: str, model: str, mode: str) -> pd.DataFrame:
    if table.empty:
        return table
    return table[(table["run"] == run) & (table["model"] == model) & (table["mode"] == mode)]


def _over(value: float | None, base: float | None) -> float | None:
    if value is None or base is None or missing(value) or missing(base) or not base:
        return None
    return float(value) / float(base)


def _list(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))
