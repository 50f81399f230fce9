"""Format the answer of a report as sentences: the few at its top, and the others, for all workloads, models and runs.

Every sentence is made from the records at hand. A sentence about an uncertain value states the uncertainty: intervals
in brackets, `level` where intervals overlap or a lead is within the difference between repeats.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

from dcpbench.points.names import CLOSED, MODES, TOOLS
from dcpbench.records.launches import is_clearly_ahead
from dcpbench.records.metrics import DECODE, REPLAYED
from dcpbench.records.record import is_imported_origin
from dcpbench.reports import (
    engine_steps,
    engines,
    findings,
    instance_ratios,
    kernel_gaps,
    launch_bands,
    point_warnings,
    slo,
    stalls,
)
from dcpbench.reports.dataframes import sort_commonest_first
from dcpbench.reports.load_labels import list_unique, make_short_shapes
from dcpbench.serving.load_words import format_lock_step_warning
from dcpbench.show.numbers import (
    format_integer,
    format_number,
    format_percent,
    format_tok_s,
    format_value_range,
    format_with_range,
    is_missing,
)
from dcpbench.show.text import fit_line, format_capitalized, format_count, format_list

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    import pandas as pd

    from dcpbench.reports.dataframes import Frames

MAX_SENTENCES = 9  # maximum number of sentences at the top of a report; less important ones stand further below
MAX_SHAPES = 4  # request lengths of which a sentence names loads at most; the table names all
MAX_LENGTHS = 8  # request lengths that the break-even sentence names at most; else it counts them
MAX_CLAUSES = 8  # changes along the concurrencies that a sentence names at most; else it counts loads
MAX_WARNINGS = 4
LOST = "no longer"  # text for a lead that exists at some concurrency but not at the highest one
IMPOSSIBLE, LACKS_MEMORY = "rejected before the start", "rejected for lack of memory"
NOT_RUN = {"rejected": "was rejected", "failed": "failed", "hung": "hung"}  # outcomes, as a sentence states them


def format_top_sentences(frames: Frames) -> list[str]:
    """Return the sentences at the top of a report, in reading order."""
    sentences, _ = split_sentences(frames)
    if has_engine_answer(frames):
        of_engines = [*engines.format_bullets(frames), *engine_steps.describe_slower_parts(frames)]
        return [engines.format_answer(frames), *of_engines, *sentences]
    return sentences


def has_engine_answer(frames: Frames) -> bool:
    """Return True if the answer of a report compares engines: several were measured on GPUs, and nothing is imported."""
    return bool(frames.engines) and not (
        findings.select_timed(frames.everything).empty or frames.everything["origin"].map(is_imported_origin).any()
    )


def split_sentences(frames: Frames) -> tuple[list[str], list[str]]:
    """Return the sentences at the top of a report, see `format_top_sentences`, and the remaining sentences of its answer."""
    notes = [(weight, text) for weight, text in _collect_ranked(frames) if text]
    kept = sorted(range(len(notes)), key=lambda i: notes[i][0])[:MAX_SENTENCES]
    top, rest = ([text for i, (_, text) in enumerate(notes) if (i in kept) == own] for own in (True, False))
    return top, rest


def collect_repeat_differences(frames: Frames) -> list[float]:
    """Return the difference between repeats of each point that was measured more than once."""
    tables = (frames.findings.repeats, findings.select_served_repeats(frames.served))
    return [float(value) for table in tables if len(table) for value in table["apart"]]


def _collect_ranked(frames: Frames) -> list[tuple[float, str]]:
    """Return pairs of rank and sentence; rank 0 is the most important, and a sentence may be empty."""
    if frames.everything.empty:
        return [
            (0, f"No point finished: {format_outcomes(frames)}. There is nothing to compare."),
            (0.1, format_commonest_reason(frames)),
        ]
    notes = [
        (0.0, describe_functional(frames)),
        (0.02, f"{format_capitalized(wrong)}." if (wrong := point_warnings.describe_wrong(frames.everything)) else ""),
        (0.05, slo.explain_unjudged(frames.everything, frames.slo)),
        (0.15, describe_imports(frames)),
        *((0.07, f"{format_capitalized(text)}.") for text in list_draft_conditions(frames)),
        *((0.08, f"{format_capitalized(text)}.") for text in list_stage_conditions(frames)),
    ]
    if len(frames.findings.points):
        notes += [
            (0.1, slo.describe_objectives(frames.findings.points, frames.slo)),
            (0.12, describe_lock_step(frames)),
            *_iterate_scopes(frames),
        ]
        notes.append((2.5, explain_jumps(frames.findings.points)))
        notes += [
            (1.2, sentence) for sentence in instance_ratios.describe_best_ratios(findings.select_timed(frames.served))
        ]
        notes.append(
            (3.5, describe_replay_errors(findings.compare_replay_with_live(findings.select_timed(frames.served))))
        )
    notes.append((3, describe_kv_capacity(frames.kv)))
    return [*notes, (0.2, describe_trust(frames, collect_repeat_differences(frames)))]


def describe_functional(frames: Frames) -> str:
    """State that times of a CPU allow no conclusion about performance; empty without CPU points."""
    if frames.everything.empty or not (slow := frames.everything["cpu"]).any():
        return ""
    nothing = "No conclusion about performance can be drawn from"
    if slow.all():
        return f"CPU: functional run. It shows which layouts run. {nothing} its times."
    return (
        f"CPU: {int(slow.sum()):,} of {format_count(len(slow), 'point')} are a functional run. {nothing} their times."
    )


def list_draft_conditions(frames: Frames) -> list[str]:
    """Return how many drafts steps verify, what acceptance was assumed, and how step times were obtained, each once."""
    found: dict[str, None] = {}
    for record in frames.records:
        stated, seen = record.point.speculation, record.serve.speculation if record.serve else None
        if stated is not None and (record.serve or record.metrics):
            drafts, tokens = format_count(stated.draft_tokens, "draft"), stated.expected_tokens
            assumed = (
                "without a stated acceptance: rates count one token per step"
                if tokens is None
                else f"accepted with assumed probabilities ({record.point.acceptance} for successive drafts): {tokens:.2f} tokens a step on average"
            )
            found[f"{drafts} a step, {assumed}"] = None
        elif seen is not None:
            found[f"the server verifies drafts: {seen.tokens_per_step:.2f} tokens a step by its own metrics"] = None
        if seen is not None and seen.step_times:
            found[f"times of steps with drafts are {seen.step_times}"] = None
    return list(found)


def list_stage_conditions(frames: Frames) -> list[str]:
    """Return how long stages wait in each layout with several, and how the times of their steps were obtained."""
    waits: dict[str, list[float]] = {}
    how: dict[str, None] = {}
    for record in frames.records:
        seen = record.serve.stages if record.serve else None
        if seen is not None:
            how[f"times of steps over stages are {seen.step_times}"] = None
            if record.point.pp > 1:
                waits.setdefault(f"{record.point.instance_name} with {seen.micro_batches} micro-batches", []).append(
                    seen.bubble_share
                )
    shares = {layout: format_value_range([100 * share for share in found], "{:.0f}") for layout, found in waits.items()}
    return [*how, *(f"a stage of {layout} waits for {share} % of a step" for layout, share in shares.items())]


def _iterate_scopes(frames: Frames) -> Iterable[tuple[float, str]]:
    """Yield sentences with their rank for each run, model and mode."""
    found = frames.findings
    tables = (found.points, found.best, found.best_within_slo, found.break_even, found.ratios, found.against_best)
    short = findings.find_kv_pressure(findings.select_timed(frames.served))
    for i, scope in enumerate(dict.fromkeys(findings.list_keys(found.points, findings.SCOPE))):
        points, best_found, most_found, even, over, against = (select_scope(table, *scope) for table in tables)
        lost = select_scope(frames.others, *scope[:2])
        lost = lost[lost["mode"].fillna("decode") == scope[2]] if len(lost) else lost
        judged = len(best_found) and best_found["slo_excess"].notna().any()
        plain = is_baseline_best(over, against)
        name = format_scope(frames, *scope)
        for weight, text in (
            (1.0 if len(best_found) else 4.5, describe_best(best_found)),
            (2.0, describe_maximum(most_found, best_found) if judged else ""),
            (1.5, "" if plain else describe_dcp_gain(against)),
            (1.5 if plain else 3.2, describe_break_even(even, over, lost, pays=plain)),
            (4.0, describe_kv_pressure(select_scope(short, *scope), points)),
            (4.1, stalls.describe_stalls(points)),
        ):
            yield weight + i / 10, f"{name}: {text}" if text else ""


def describe_imports(frames: Frames) -> str:
    """Return a sentence that counts the imported points by tool and limits their comparison; empty without any."""
    table = frames.served
    counts = Counter(name for name in table["origin"] if is_imported_origin(name)) if len(table) else Counter[str]()
    if not counts:
        return ""
    sources = " and ".join(f"{format_count(n, 'point')} of {TOOLS.get(name, name)}" for name, n in counts.items())
    others = len(table) - counts.total()
    addition = f", in addition to {format_count(others, 'point')} of dcpbench" if others else ""
    return (
        f"Imported: {sources}{addition}. Engines are measured through HTTP and with a tokenizer, dcpbench without either, "
        "so that more than the layout differs. A dash marks values that the imported files do not contain."
    )


def describe_lock_step(frames: Frames) -> str:
    """Describe that clients of closed loops run in lock-step and what that changes; empty if no point on a GPU does so."""
    found = select_lock_step(frames.served)
    if found.empty:
        return ""
    some = (
        ""
        if len(found) == len(frames.served)
        else f" at {len(found):,} of {format_count(len(frames.served), 'served point')}"
    )
    return format_lock_step_warning(found["load_output_tokens"].iloc[0], some=some, dp=bool((found["dp"] > 1).any()))


def select_lock_step(served: pd.DataFrame) -> pd.DataFrame:
    """Return the points on a GPU with clients that run in lock-step."""
    return served[served["in_step"].astype(bool) & ~served["cpu"].astype(bool)] if len(served) else served


def describe_best(found: pd.DataFrame) -> str:
    """Return the best layout of each load of one run, model and mode; consecutive loads with the same answer share a clause."""
    if found.empty:
        return "No load was run with two layouts of equally many GPUs, so none can be called the best."
    judged = bool(found["slo_excess"].notna().any())
    single = launch_bands.has_single_launches(found)
    kind = f"Fastest layout {launch_bands.IN_ONE_LAUNCH}," if single else "Best layout"
    what = f"{kind} by output tok/s" + (" within the SLO" if judged else "")
    along = found.sort_values(findings.BEST_OF, kind="stable")
    answers = along["rest"].str.cat(along["label"]).where(along["clear"], "tie")
    changes = int((answers != answers.shift()).sum())  # from one load to the next
    if found["rest"].nunique() > MAX_SHAPES or changes > MAX_CLAUSES:
        return f"{what}: of {format_count(len(found), 'load')}, {count_winners(found)}."
    short, on = make_short_shapes(found), format_gpus(found)
    shapes = [
        f"{short[str(rest)]}{on[gpus]}: {_format_winners(loads)}"
        for (rest, gpus, *_), loads in found.groupby(["rest", *findings.BEST_OF], sort=False)
    ]
    closed = found["load_arrival"].eq(CLOSED).all()
    return f"{what}{', at each concurrency' if closed else ''}. {format_capitalized('; '.join(shapes))}."


def format_gpus(found: pd.DataFrame) -> dict[Hashable, str]:
    """Return ` on 2 GPUs` for each number of GPUs of some points; empty texts if all have the same."""
    sizes = set(found["gpus"])
    return {n: f" on {format_count(int(n), 'GPU')}" if len(sizes) > 1 else "" for n in sizes}


def count_winners(found: pd.DataFrame) -> str:
    """Return in how many loads each layout is the best: `tp4 in 3, no layout clearly in 1 and none within the SLO in 2`."""
    clear, meets = found["clear"].astype(bool), found["meets"].astype(bool)
    others = {
        f"no layout {launch_bands.format_clearly(found)}": int((meets & ~clear).sum()),
        "none within the SLO": int((~meets).sum()),
    }
    won = found[clear]["label"].value_counts().to_dict() | {what: n for what, n in others.items() if n}
    return format_list([f"{who} in {n}" for who, n in won.items()])


def describe_maximum(found: pd.DataFrame, best_found: pd.DataFrame) -> str:
    """Return the highest output tok/s of any load that meets the SLO, with DCP and without, for each request length."""
    if found.empty:
        if best_found.empty:
            return ""
        near = best_found.sort_values("slo_excess", kind="stable").iloc[0]
        return f"No point meets the SLO; nearest is {near['label']} at {near['load']} ({near['slo_result']})."
    if len(found) > MAX_SHAPES:
        return ""
    short, on = make_short_shapes(found), format_gpus(found)
    clauses = []
    for _, r in found.iterrows():
        kind = "without DCP" if r["dcp"] > 1 else "with DCP"
        over = f"nothing {kind} meets it"
        if not is_missing(r["other"]):
            times = r["output_tok_s"] / r["other_tok_s"]
            lead = _compare_most(r, times)
            over = f"{lead} the most {kind} ({format_number(r['other_tok_s'], 3)}, {r['other']} at {r['other_load']})"
        value = format_tok_s(r["output_tok_s"], r["output_tok_s_low"], r["output_tok_s_high"])
        clauses.append(f"{short[r['rest']]}{on[r['gpus']]}: {value} with {r['label']} at {r['arrival']}, {over}")
    return f"Maximum output within the SLO: {'; '.join(clauses)}."


def _compare_most(row: pd.Series[Any], times: float) -> str:
    """Return `1.20 times`, `not clearly more than`, or `1.04 times, in one launch each,`."""
    bands = (row[launch_bands.COLUMN], row["other_band"])
    if any(map(is_missing, bands)):
        return f"{times:.2f} times, {launch_bands.IN_ONE_LAUNCH},"
    clear = is_clearly_ahead(times, row["output_tok_s_low"] / row["other_high"], max(bands))
    return f"{times:.2f} times" if clear else "not clearly more than"


def describe_dcp_gain(against: pd.DataFrame) -> str:
    """Return the loads in which DCP pays (findings.compare_dcp_with_best), with the layout and the gain."""
    compared = against[against["verdict"] != "no rival"] if len(against) else against
    if compared.empty:
        return ""
    judged = bool(compared["slo_excess"].notna().any())
    paying = compared[compared["verdict"].isin(findings.PAYS)]
    loads, paid = (len(table.drop_duplicates(["same_load", *findings.BEST_OF])) for table in (compared, paying))
    within = " within the SLO" if judged else ""
    single = launch_bands.has_single_launches(compared)
    many = f"DCP pays in {paid:,} of {format_count(loads, 'load')}, in output tok/s{within}"
    if single:
        text = f"{format_capitalized(launch_bands.IN_ONE_LAUNCH)}, {many} over the fastest layout without DCP"
    else:
        text = f"{many} over the best layout without DCP"
    if compared["rest"].nunique() > MAX_LENGTHS:
        return f"{text}."
    short = make_short_shapes(compared)
    shapes: dict[str, list[str]] = {}
    for rest, rows in compared.groupby("rest", sort=False):
        shapes.setdefault(_format_paying_loads(rows), []).append(short[str(rest)])
    clauses = [f"{', '.join(names)}: {where}" for where, names in shapes.items()]
    return f"{text}. {format_capitalized('; '.join(clauses))}."


def is_baseline_best(ratios: pd.DataFrame, against: pd.DataFrame) -> bool:
    """Return True if, for every DCP point, its baseline meets the SLO and is the best layout without DCP."""
    if ratios.empty or against["verdict"].isin(["misses", "alone"]).any():
        return ratios.empty
    return bool(((ratios["ratio"] == against["ratio"]) | (ratios["ratio"].isna() & against["ratio"].isna())).all())


def describe_break_even(even: pd.DataFrame, ratios: pd.DataFrame, others: pd.DataFrame, *, pays: bool) -> str:
    """Return, for each request length, the concurrency from which DCP is ahead of the same layout without it.

    `pays`: True if this is also where DCP pays, because that layout is the best one without DCP (is_baseline_best).
    """
    alone = _describe_missing_baseline(ratios, others)
    if even.empty:
        return f"{alone}." if alone else ""
    over = format_list(list_unique(even["baseline"]), "or")
    loosely = f"Compared with {over} alone{findings.format_slo_aside(ratios)}"
    if even["rest"].nunique() > MAX_LENGTHS:
        begins = "DCP starts to pay" if pays else f"{loosely}, DCP is ahead"
        found = f"{even['from'].notna().sum():,} of {len(even):,} combinations of layout and length"
        return f"{begins} at some concurrency in {found}; the tables below name them."
    short = make_short_shapes(even)
    shapes = []
    # a single layout with named variants, which then replace its name
    one = str(even["layout"].iloc[0]) if len(set(even["layout"])) == 1 and (even["variant"] != "").all() else ""
    begins = f"{one or 'DCP'} pays, in output tok/s over {over}, at these concurrencies"
    if not pays:
        begins = f"{loosely}, {one or 'DCP'} is ahead in output tok/s at these concurrencies"
    if even["single"].any():
        begins += f", {launch_bands.IN_ONE_LAUNCH}"
    if one:
        even = even.assign(label=even["variant"])
    for rest, rows in even.groupby("rest", sort=False):
        same = [
            f"never {r['measured'][-1]} {_format_never(r)}" if is_missing(r["from"]) else f"{r['from']} {r['least']}"
            for _, r in rows.iterrows()
        ]
        groups = [group for _, group in rows.assign(same=same).groupby("same", sort=False)]
        shapes.append(f"{short[str(rest)]}: {', '.join(map(_format_break_even, groups))}")
    text = f"{begins}. {format_capitalized('; '.join(shapes))}"
    return f"{text}. {alone}." if alone else f"{text}."


def _format_paying_loads(rows: pd.DataFrame) -> str:
    """Return `tp4·dcp4 at 24–32 (1.03–1.05× tp4)` or `nowhere (at most 0.99× tp4, tp4·dcp4 at 4)` for one request length.

    `nowhere clearly` is used only if some ratio is above 1, but by no more than repeats may differ.
    """
    within = rows[rows["verdict"] != "misses"]
    if within.empty:
        return "nowhere, as no layout with DCP meets the SLO"
    paying = within[within["verdict"].isin(findings.PAYS)]
    if paying.empty:
        top = within.sort_values("ratio", kind="stable").iloc[-1]
        nowhere = "nowhere" if top["ratio"] <= 1 else f"nowhere {launch_bands.format_clearly(rows)}"
        return f"{nowhere} (at most {top['ratio']:.2f}× {top['rival']}, {top['label']} at {_format_loads([top])})"
    fastest = paying.sort_values("output_tok_s", ascending=False, kind="stable").drop_duplicates(
        ["same_load", *findings.BEST_OF]
    )
    fastest = fastest.sort_values([*findings.BEST_OF, "concurrency"], kind="stable")
    clauses = []
    tried = sorted(set(rows["concurrency"]))
    keyed = []
    for place, (_, r) in enumerate(fastest.iterrows()):
        gap = tried.index(r["concurrency"]) - place if r["load_arrival"] == CLOSED else 0  # equal for consecutive loads
        keyed.append(((r["label"], "" if is_missing(r["rival"]) else r["rival"], gap), r))
    for (label, rival, _), group in itertools.groupby(keyed, key=lambda pair: pair[0]):
        loads = [r for _, r in group]
        over = (
            f"{format_value_range([r['ratio'] for r in loads])} {rival}"
            if rival
            else "no layout without DCP meets the SLO"
        )
        clauses.append(f"{label} at {_format_loads(loads)} ({over})")
    return ", ".join(clauses)


def explain_jumps(points: pd.DataFrame) -> str:
    """Explain jumps of throughput between neighbouring concurrencies that the layout does not cause; empty without any."""
    texts = []
    padded = findings.find_padded(points)
    clauses: dict[str, list[str]] = {}
    for layout, group in padded.groupby("layout", sort=False):
        pairs = sorted(set(findings.list_keys(group, ["concurrency", "rows"])))
        if len(pairs) <= MAX_CLAUSES:
            clauses.setdefault(format_list([f"{n:,} as {rows:,}" for n, rows in pairs]), []).append(str(layout))
    if clauses:
        runs = "; ".join(f"{format_list(names)} runs {pairs}" for pairs, names in clauses.items())
        texts.append(
            f"CUDA graphs have fixed sizes on each replica, and steps of fewer requests take as long: {runs}. "
            "Output jumps from there to the next size."
        )
    waves = findings.find_last_waves(points)
    for same, group in list(waves.groupby(["concurrency", "load_requests", "left"]))[:2] if len(waves) else ():
        n, requests, left = (f"{value:,.0f}" for value in same)
        texts.append(
            f"{requests} requests are no multiple of {n}, so the last {'one runs' if left == '1' else f'{left} run'} alone. On average "
            f"{group['decode_batch'].median():.0f} of {n} are in flight, which lowers the output at {n}."
        )
    return f"Jumps between concurrencies: {' '.join(texts)}" if texts else ""


def describe_kv_pressure(short_of_kv: pd.DataFrame, points: pd.DataFrame) -> str:
    """Return the heaviest load at which a layout was short of KV capacity, with the shortest and the best layout there."""
    if short_of_kv.empty:
        return ""
    heaviest = short_of_kv.sort_values(["input_typical", "concurrency"], kind="stable").iloc[-1]
    group = points[points["same_load"] == heaviest["same_load"]]
    least = group.sort_values("room_for", kind="stable").iloc[0]
    top = group.sort_values("output_tok_s", kind="stable").iloc[-1]
    clauses = [
        f"{r['label']} has KV for {format_integer(r['room_for'])} request{'' if r['room_for'] == 1 else 's'}, {format_integer(r['preemptions'])} "
        f"preemption{'' if r['preemptions'] == 1 else 's'}, TTFT p50 {format_number(r['ttft_p50_ms'], 3)} ms"
        for r in ([least, top] if least["label"] != top["label"] else [top])
    ]
    return f"KV pressure under {heaviest['load']}: {'; '.join(clauses)}."


def describe_kv_capacity(kv: pd.DataFrame) -> str:
    """Return how many more tokens the layout with the largest KV capacity holds; one sentence for all models if they agree."""
    more = kv if kv.empty else kv[(kv["dcp"] > 1) & kv["kv_ratio"].notna()]
    if more.empty:
        return ""
    top = more.sort_values("kv_ratio", kind="stable").drop_duplicates(["run", "model"], keep="last")
    per_gib = top["kv_tokens_per_gib"].notna()
    sentences = [
        f"{where}, {_format_capacities(own, 'model' if per_gib.all() else 'run')}."
        for where, own in (("Per GiB of KV memory on each GPU", top[per_gib]), ("In all", top[~per_gib]))
        if len(own)
    ]
    return " ".join(sentences)


def _format_capacities(top: pd.DataFrame, by: str) -> str:
    """Return `tp4·dcp4 holds 3.99 times as many tokens as tp4`, with the models or runs if there are several."""
    clauses: dict[str, list[str]] = {}
    for _, r in top.iterrows():
        clause = f"{r['layout']} holds {r['kv_ratio']:.2f} times as many tokens as tp{r['tp']}"
        clauses.setdefault(clause, []).append(str(r[by]))
    several = len(set(top[by])) > 1
    statements = [f"{text} ({format_list(list_unique(names))})" if several else text for text, names in clauses.items()]
    return "; ".join(statements)


def describe_replay_errors(found: pd.DataFrame) -> str:
    """Return the deviation of replays from the live runs of the same loads."""
    if found.empty:
        return ""
    parts = []
    for metric in REPLAYED:
        errors = found[f"{metric.name}_error"].dropna().abs()
        if len(errors):
            among = "" if len(errors) == len(found) else f" ({len(errors)} of {len(found)})"
            parts.append(f"{metric.brief} {format_percent(errors.max())}{among}")
    many = "1 point that was" if len(found) == 1 else f"{len(found)} points that were"
    return f"Replay against live, largest errors over {many} run both ways: {', '.join(parts)}."


def describe_agreement(frames: Frames, apart: list[float]) -> str:
    """State how well repeats agree, and whether gaps between kernels agree if that matters."""
    texts = (findings.format_repeats_sentence(apart), kernel_gaps.describe_unequal_gaps(frames.findings.points))
    return " ".join(filter(None, texts))


def describe_trust(frames: Frames, apart: list[float]) -> str:
    """State how well repeats and gaps between kernels agree, which points did not run, and how many points carry a warning."""
    texts = [describe_agreement(frames, apart)]
    if len(frames.others):
        texts.append(f"Points without a result: {format_outcomes(frames)}; a table lists the reasons.")
    marked = frames.findings.points
    if len(marked):
        counts = point_warnings.summarize_warnings(marked, MAX_WARNINGS)
        where = " on GPUs" if frames.cpu else ""
        texts += [f"Points with a warning, of {len(marked):,}{where}: {counts}."] if counts else []
    return " ".join(texts)


def format_outcomes(frames: Frames) -> str:
    """Return the counts of points without numbers by outcome, such as `8 rejected for lack of memory and 1 hung`."""
    others = frames.others
    if others.empty:
        return "the record file holds no point"
    outcomes = (
        others["outcome"].mask(others["lacks_memory"].astype(bool), LACKS_MEMORY).replace({"rejected": IMPOSSIBLE})
    )
    return format_list([f"{n} {outcome}" for outcome, n in outcomes.value_counts().items()])


def format_commonest_reason(frames: Frames) -> str:
    """Return the most frequent reason why points did not run, with its count; empty if all points ran."""
    others = sort_commonest_first(frames.others)
    if others.empty:
        return ""
    first = others.iloc[0]
    same = int((others["cause"] == first["cause"]).sum())
    of = "The reason" if same == len(others) else f"The reason at {same:,} of {len(others):,} points"
    reason = fit_line(first["cause"]).rstrip(".")
    return f"{of}: {reason}" + ("" if reason.endswith("…") else ".")


def format_scope(frames: Frames, run: str, model: str, mode: str) -> str:
    """Return `kimi-k2, run monday, replay` or `kimi-k2, vLLM 0.26.0`, without the parts of which there is only one."""
    where = frames.format_scope(run, model)
    return f"{where}, {mode}" if mode in MODES else where


def select_scope(table: pd.DataFrame, run: str, model: str, mode: str | None = None) -> pd.DataFrame:
    """Return the rows of one run and model, and of one mode if it is given."""
    if table.empty:
        return table
    rows = table[(table["run"] == run) & (table["model"] == model)]
    return rows if mode is None else rows[rows["mode"] == mode]


def _format_winners(found: pd.DataFrame) -> str:
    """Return `tp4 at 8–24 (1.03–1.05× the next), none within the SLO at 48`."""
    keyed = [(_format_winner(r), r) for _, r in found.iterrows()]
    clauses = []
    for winner, rows in itertools.groupby(keyed, key=lambda pair: pair[0]):
        group = [r for _, r in rows]
        leads = [r["lead"] for r in group if r["clear"] and not is_missing(r["lead"])]
        more = f" ({format_value_range(leads)} the next)" if leads else ""
        clauses.append(f"{winner} at {_format_loads(group)}{more}")
    return ", ".join(clauses)


def _format_winner(row: pd.Series[Any]) -> str:
    if not row["meets"]:
        return "none within the SLO"
    if is_missing(row["next"]):
        return f"only {row['label']}"
    level = format_list(sorted(row["level"]))
    if row["clear"]:
        return str(row["label"])
    return f"{level} ({row['how']})" if row["how"] == launch_bands.NOT_DISTINGUISHABLE else f"{row['how']}: {level}"


def _format_loads(group: list[pd.Series[Any]]) -> str:
    """Return the concurrencies, such as `8–24`, or the arrivals of open loops."""
    if any(r["load_arrival"] != CLOSED for r in group):
        return format_list(list_unique(r["arrival"] for r in group))
    values = [int(r["concurrency"]) for r in group]
    return f"{values[0]:,}" + (f"–{values[-1]:,}" if len(values) > 1 else "")


def _format_break_even(group: pd.DataFrame) -> str:
    """Return `from concurrency 32 on (tp4·dcp4 1.14× there)` or `never up to 48 (at most 0.96×, tp4·dcp4 at 8)`."""
    first = group.iloc[0]
    if is_missing(first["from"]):
        never = _format_never(first)
        top = group.sort_values("best", kind="stable").iloc[-1]
        who = format_list(list_unique(group["label"])) + " " if len(group) == 1 else ""
        where = "" if who else f"{top['label']} "
        last, at = first["measured"][-1], f"{where}at {top['best_at']:,}"
        if never == LOST:
            return f"{who}{never} at {last:,} ({format_value_range(group['last'])} there; at most {top['best']:.2f}×, {at})"
        return f"{who}{never} up to {last:,} (at most {top['best']:.2f}×, {at})"
    least = ", the lowest tried," if first["least"] else ""
    gains = [f"{r['label']} {format_with_range(r['ratio'], r['low'], r['high'])}" for _, r in group.iterrows()]
    if len(gains) > MAX_SHAPES:
        gains = [format_value_range(group["ratio"])]
    return f"from concurrency {first['from']:,.0f}{least} on ({', '.join(gains)} there)"


def _format_never(row: pd.Series[Any]) -> str:
    """Return `never` if no ratio is above 1, `never clearly` if one is within the difference between repeats, or LOST."""
    more = launch_bands.BY_MORE if row["single"] else "clearly"
    return LOST if row["ever"] else "never" if row["best"] <= 1 else f"never {more}"


def _describe_missing_baseline(ratios: pd.DataFrame, others: pd.DataFrame) -> str:
    """Return the DCP points with a baseline that did not run, where they are, and why it did not run.

    A baseline that was not requested, or that an interrupted run had not reached, is not missing.
    """
    alone = ratios[ratios["verdict"] == "no baseline"] if len(ratios) else ratios
    names = findings.list_without_dcp(alone)
    lost = others[others["layout"].isin(names)] if len(others) else others
    if alone.empty or lost.empty:
        return ""
    same = ["run", "model", "concurrency", "context"]
    missing = set(lost[same].itertuples(index=False, name=None))
    of_point = list(alone[same].itertuples(index=False, name=None))
    alone = alone[[mode != DECODE or point in missing for mode, point in zip(alone["mode"], of_point, strict=True)]]
    if alone.empty:
        return ""
    whys = [text for outcome, text in NOT_RUN.items() if outcome in set(lost["outcome"])]
    loads = list_unique(alone["load"])
    where = f" ({'; '.join(loads)})" if len(loads) <= MAX_SHAPES else ""
    ran = format_count(len(alone), "point")
    return f"{ran} with DCP ran under loads at which {format_list(names, 'or')} {' or '.join(whys)}{where}"
