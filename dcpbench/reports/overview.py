"""What a report opens with: a title that says what was measured, one sentence that answers, and the points of one chart.

Each point of the chart is a layout's output over that of the best other one under the same load, so that who is above 1
is who to take. Where a layout ran in several variants it stands there once a load, with its best.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import TYPE_CHECKING

import pandas as pd

from dcpbench.points.names import CLOSED, REPLAY, UNKNOWN
from dcpbench.records.record import OURS
from dcpbench.records.stats import REPEATS_AGREE_WITHIN
from dcpbench.reports import findings, words
from dcpbench.show.numbers import missing, percent
from dcpbench.show.text import capital, counted, listed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dcpbench.reports.frames import Frames

MOST_NAMES = 6
"""Layouts or models of more than this a title counts."""
ENOUGH = 0.75
"""Of all loads: a rule with one change from one layout to another that holds in fewer is told of each model apart."""
RULED_BY = ("model", "who", "concurrency", "input_typical", "slo_excess", "meets", "near", "ratio")
"""Columns of `against_others` that the sentence looks at, besides those of a load."""
MODELS = {"deepseek-v3": "DeepSeek-V3", "kimi-k2": "Kimi-K2"}
"""As their makers write them."""
NO_ROOM = re.compile(r"holds .* of KV cache per GPU|KV cache|does not fit|memory")
"""In the reason of a rejected point."""


def title(frames: Frames) -> str:
    """`DeepSeek-V3 · tp4, tp4·dcp4 · 4 × NVIDIA H200 · bf16 · ag_rs · 2026-11-20`; what no record says is left out."""
    table = frames.everything
    if table.empty:
        return "dcpbench: " + ", ".join(run.name for run in frames.runs)
    parts = [
        _few([MODELS.get(name, name) for name in words.unique(table["model"])], "models"),
        _few(words.unique(table.sort_values(["tp", "dp", "dcp"], kind="stable")["layout"]), "layouts"),
        hardware(frames),
        _few(words.unique(table["dtype"]), "precisions"),
        _few(words.unique(n for n in table["exchange"] if n not in ("none", UNKNOWN)), "exchanges"),
        _dates(frames),
    ]
    return words.SEPARATOR.join(part for part in parts if part and part != UNKNOWN)


def hardware(frames: Frames) -> str:
    """`4 × NVIDIA H200`, `CPU`; empty where no record says."""
    table = frames.everything
    devices = [name for name in words.unique(table["device"]) if name not in ("None", UNKNOWN)]
    if frames.cpu or not devices:
        return _few(devices, "devices")
    sizes = sorted({int(n) for n in table["tp"] if not missing(n) and n})
    many = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]}–{sizes[-1]}" if sizes else ""
    return f"{many} × {_few(devices, 'devices')}" if many else _few(devices, "devices")


def _dates(frames: Frames) -> str:
    days = sorted({record.started_at[:10] for record in frames.records if record.started_at})
    return "" if not days else days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def _few(names: list[str], what: str) -> str:
    return ", ".join(names) if len(names) <= MOST_NAMES else f"{len(names)} {what}"


def caveats(frames: Frames) -> list[str]:
    """What changes how the numbers are to be read, in a few words each."""
    table = frames.everything
    if table.empty:
        return []
    said = []
    held = table[table["layers_held"].notna() & (table["layers_held"] < table["layers"])]
    for (model, layers), rows in held.groupby(["model", "layers"], sort=False):
        counts = sorted({int(n) for n in rows["layers_held"]})
        many = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]}–{counts[-1]}"
        said.append(f"{MODELS.get(str(model), str(model))}: {many} of {layers:g} layers held and cycled")
    if (table["weights"] == "synthetic").any():
        said.append("synthetic weights")
    replayed = table["mode"] == REPLAY
    if replayed.any():
        every = "" if replayed.all() else f" ({int(replayed.sum()):,} of {len(table):,} points)"
        said.append(f"replayed in virtual time over measured step times, not served live{every}")
    limited = table["throttle_reasons"].str.contains("power", case=False).fillna(False)  # noqa: FBT003 - pandas' own
    if limited.any():
        every = "" if limited.all() else f" at {int(limited.sum()):,} of {len(table):,} points"
        said.append(f"clocks limited by power{every}")
    return said


def against_others(frames: Frames) -> pd.DataFrame:
    """A row for each load and layout that has another to be compared with, of closed loops not on a CPU.

    `who` is the layout, or the label where all are of one; `ratio` its output over that of the fastest other that meets
    the SLO, and of any other where none does; `meets` whether it does itself; `near` whether it meets the SLO as well
    as any other and none is clearly ahead of it.
    """
    points = frames.findings.points
    if points.empty:
        return points
    points = points[points["load_arrival"] == CLOSED]
    who = "layout" if len(set(points["layout"])) > 1 else "label"
    points = points.assign(who=points[who], meets=~(points["slo_excess"].astype(float) > 1))
    ordered = points.sort_values(["meets", "output_tok_s"], ascending=False, kind="stable")
    one = ordered.drop_duplicates([*findings.RIVAL_OF, "who"])
    groups = one.groupby(findings.RIVAL_OF, sort=False)
    one = one.assign(group=groups.ngroup(), place=groups.cumcount())
    # In a load the fastest that meets the SLO comes first: it is the other of all but itself, whose other is the next.
    rivals = one[one["place"] < 2].assign(place=lambda t: 1 - t["place"]).set_index(["group", "place"])  # noqa: PLR2004
    keys = pd.MultiIndex.from_arrays([one["group"], (one["place"] > 0).astype(int)])
    other = rivals.reindex(keys)[["who", "meets", "output_tok_s", "output_tok_s_low"]].set_axis(one.index)
    found = one["group"].ge(0) & other["who"].notna()
    one, other = one[found], other[found]
    clear = other["output_tok_s_low"] > one["output_tok_s_high"]
    behind = other["meets"].astype(bool) & clear
    behind &= other["output_tok_s"] / one["output_tok_s"] > 1 + REPEATS_AGREE_WITHIN
    ratio = one["output_tok_s"] / other["output_tok_s"]
    table = one.assign(ratio=ratio, rival=other["who"], near=one["meets"] & ~behind)
    by = ["model", "mode", "input_typical", "rest", "concurrency", "tp", "dp", "dcp"]
    table = table.sort_values("group", kind="stable").sort_values(by, kind="stable", ignore_index=True)
    return table.drop(columns=["group", "place"])


def no_room(frames: Frames) -> pd.DataFrame:
    """Points that were rejected for memory: model, mode, layout, context, `load` as served, and concurrency."""
    others = frames.others
    if others.empty:
        return others
    rejected = others[(others["outcome"] == "rejected") & others["reason"].str.contains(NO_ROOM)]
    return rejected.assign(mode=rejected["mode"].fillna("decode"))


def sentence(frames: Frames) -> str:
    """Which layout to take, and from which load on; on a CPU, and of other tools' files, what the numbers are."""
    if frames.everything.empty:
        return ""
    if frames.cpu:
        return (
            "This is a functional run on a CPU: it shows that the layouts run, and says nothing about how fast any is."
        )
    table = frames.everything
    foreign = [name for name in words.unique(table["origin"]) if name != OURS]
    rows = against_others(frames)
    if foreign:
        return _imported(frames, foreign, rows)
    if rows.empty:
        names = listed(words.unique(table["layout"]))
        return f"No load was run with two layouts ({names}), so these are measurements without a best one."
    rules = [_rule(rows)]
    if rules[0].share < ENOUGH and len(set(rows["model"])) > 1:
        rules = [_rule(own) for _, own in rows.groupby("model", sort=False)]
    said = [rule.words(named=len(rules) > 1) for rule in rules]
    where = hardware(frames)
    return f"On {where}, {'; '.join(said)}." if where else f"{capital('; '.join(said))}."


def _imported(frames: Frames, foreign: list[str], rows: pd.DataFrame) -> str:
    table = frames.everything
    theirs = table[table["origin"] != OURS]
    tops = theirs.sort_values("output_tok_s", kind="stable").dropna(subset=["output_tok_s"])
    text = f"These files measured {counted(len(theirs), 'load')} of servers with {listed(foreign)}"
    if len(tops):
        top = tops.iloc[-1]
        text += (
            f": at most {top['output_tok_s']:,.0f} output tok/s, {top['model']} with {top['label']} at {top['arrival']}"
        )
    beside = (
        f"; {counted(len(table) - len(theirs), 'point')} of dcpbench beside them" if len(table) > len(theirs) else ""
    )
    alone = "" if len(rows) else "; they do not compare layouts under one load"
    return f"{text}{beside}{alone}."


@dataclasses.dataclass(frozen=True)
class _Rule:
    """One layout up to a number of tokens in flight, and one from there on, which may be the same."""

    rows: pd.DataFrame
    first: str
    then: str
    at: int
    """Of `loads`, the place of the first where `then` is to be taken."""
    loads: list[pd.DataFrame]
    right: int
    tried: int

    @property
    def share(self) -> float:
        return self.right / self.tried if self.tried else 1.0

    def words(self, *, named: bool) -> str:
        """`take tp4, and tp4·dp4 from 32 requests of 32,000 tokens on, up to 1.12× the best other; …`."""
        model = f"{listed([MODELS.get(m, m) for m in words.unique(self.rows['model'])])}: " if named else ""
        judged = self.rows["slo_excess"].notna().any()
        if not self.loads:
            return f"{model}no layout meets the SLO under any of {counted(self.tried_in_all, 'load')}"
        after = pd.concat(self.loads[self.at :])
        text = f"{model}take {self.first}"
        if self.then != self.first:
            text += f", and {self._with_level(after, self.then)} from {_load(self.loads[self.at])} in flight on"
        else:
            text = f"{model}take {self._with_level(after, self.then)}"
        own = self._taken()
        lead = own["ratio"].max()
        ahead = f", up to {percent(lead - 1)} ahead of the best other" if lead > 1 + REPEATS_AGREE_WITHIN else ""
        within = " within the SLO" if judged else ""
        text += f": best{within} or level in {self.right:,} of {counted(self.tried, 'load')}{ahead}"
        none = self.tried_in_all - self.tried
        return text + (f"; in {none:,} more no layout meets the SLO" if none else "")

    @property
    def tried_in_all(self) -> int:
        return int(self.rows.drop_duplicates(findings.RIVAL_OF).shape[0])

    def _taken(self) -> pd.DataFrame:
        chosen = [g[g["who"] == (self.first if i < self.at else self.then)] for i, g in enumerate(self.loads)]
        return pd.concat(chosen)

    def _with_level(self, after: pd.DataFrame, who: str) -> str:
        loads = after.drop_duplicates(findings.RIVAL_OF).shape[0]
        near = after[after["near"]]["who"].value_counts()
        same = [name for name in words.unique(after["who"]) if name != who and near.get(name, 0) == loads]
        return listed([who, *same], "or")


def _rule(rows: pd.DataFrame) -> _Rule:
    """The rule that holds in the most loads: its layout is best or level there, and meets the SLO."""
    rows = rows[list(dict.fromkeys([*findings.RIVAL_OF, *RULED_BY]))]
    rows = rows.assign(tokens=rows["concurrency"] * rows["input_typical"].fillna(0))
    within = rows[rows.groupby(findings.RIVAL_OF)["meets"].transform("any")]
    loads = [group for _, group in within.groupby(findings.RIVAL_OF, sort=False)]
    loads.sort(key=lambda g: (g["tokens"].iloc[0], g["input_typical"].iloc[0]))
    near = [dict(zip(g["who"], g["near"], strict=True)) for g in loads]
    ratios = [dict(zip(g["who"], g["ratio"], strict=True)) for g in loads]
    names = words.unique(rows["who"])
    until = {n: list(itertools.accumulate((bool(of.get(n, False)) for of in near), initial=0)) for n in names}
    best = ("", "", 0)
    most: tuple[int, bool, float] = (-1, False, 0.0)
    tokens = [g["tokens"].iloc[0] for g in loads]
    for first, then in itertools.product(names, names):
        for at in range(1, len(loads)) if first != then else [0]:
            if at and tokens[at - 1] == tokens[at]:
                continue
            right = until[first][at] + until[then][-1] - until[then][at]
            if right < most[0]:
                continue
            taken = [first if i < at else then for i in range(len(loads))]
            score = (right, first == then, sum(ratios[i].get(name, 0.0) for i, name in enumerate(taken)))
            if score > most:
                best, most = (first, then, at), score
    return _Rule(rows, *best, loads, max(most[0], 0), len(loads))


def _load(rows: pd.DataFrame) -> str:
    """`32 requests of 32,000 tokens`."""
    row = rows.iloc[0]
    if missing(row["input_typical"]):
        return f"concurrency {int(row['concurrency']):,}"
    return f"{counted(int(row['concurrency']), 'request')} of {row['input_typical']:,.0f} tokens"


def short(frames: Frames) -> list[str]:
    """At most four short bullets below the sentence."""
    table = frames.everything
    if table.empty or frames.cpu:
        return []
    return [text for text in (_pays(frames), _full(frames), *_room(frames), _trust(frames)) if text][:4]


def _pays(frames: Frames) -> str:
    against = frames.findings.against_best
    known = against[against["verdict"] != "no rival"] if len(against) else against
    if known.empty:
        return ""
    paying = known[known["verdict"].isin(findings.PAYS)]
    keys = findings.LOAD
    loads, paid = known.drop_duplicates(keys).shape[0], paying.drop_duplicates(keys).shape[0]
    within = " within the SLO" if known["slo_excess"].notna().any() else ""
    text = f"DCP beats the best layout without it{within} in {paid:,} of {counted(loads, 'load')}"
    rated = known[known["ratio"].notna() & (known["verdict"] != "misses")]
    if rated.empty:
        return f"{text}."
    top = rated.sort_values("ratio", kind="stable").iloc[-1]
    return f"{text}; at most {top['ratio']:.2f}× ({top['model']}, {top['label']} at {top['load']})."


def _full(frames: Frames) -> str:
    lost = no_room(frames)
    if lost.empty:
        return ""
    clauses = []
    for (layout, context), rows in lost.groupby(["layout", "context"], sort=False):
        length = f" of {context:,} tokens" if rows["context"].iloc[0] else ""
        clauses.append(f"{layout} for {int(rows['concurrency'].min()):,} requests{length}")
    more = f" and {len(clauses) - 4} more" if len(clauses) > 4 else ""  # noqa: PLR2004 - as many as one line holds
    return f"No room: {', '.join(clauses[:4])}{more}."


def _room(frames: Frames) -> Iterable[str]:
    kv = findings.kv_by_layout(frames.everything)
    more = kv if kv.empty else kv[(kv["dcp"] > 1) & kv["kv_ratio"].notna()]
    if len(more):
        top = more.sort_values("kv_ratio", kind="stable").iloc[-1]
        yield f"{top['layout']} holds {top['kv_ratio']:.2f}× the tokens of tp{top['tp']} in the same KV memory."


def _trust(frames: Frames) -> str:
    tables = (frames.findings.repeats, findings.served_repeats(frames.served))
    return findings.repeats_sentence([float(value) for table in tables if len(table) for value in table["apart"]])
