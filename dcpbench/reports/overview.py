"""Build the top of a report: a title with what was measured, one sentence with the answer, and the points of one chart.

Each point of the chart is a layout's output over that of the best other layout under the same load, so that a layout
above 1 is the one to choose. A layout that ran in several variants appears once per load, with its best variant.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from dcpbench.models import get_title
from dcpbench.points.gpus import format_machine_label
from dcpbench.points.names import CLOSED, ENGINE_NAMES, PREFILLS, REPLAY, TOOLS, UNKNOWN
from dcpbench.points.point import UNKNOWN_LAYOUT
from dcpbench.records.record import CPU, DUMMY_WEIGHTS, is_imported_origin, parse_origin
from dcpbench.records.stats import REPEATS_AGREE_WITHIN
from dcpbench.reports import (
    answer,
    engine_steps,
    engines,
    findings,
    floors,
    launch_bands,
    load_labels,
    point_warnings,
    recommendation,
    slo,
)
from dcpbench.show.numbers import format_number, format_percent, is_missing
from dcpbench.show.text import format_capitalized, format_count, format_list

if TYPE_CHECKING:
    import pandas as pd

    from dcpbench.reports.dataframes import Frames

MAX_NAMES = 6  # maximum number of layouts or models that a title names; above it the title counts them
MAX_CLAUSES = 3  # maximum number of loads without KV capacity that a bullet names
MAX_BULLETS = 4  # maximum number of bullets below the first sentence
CONDITIONS = {  # columns of findings.RIVAL_OF that a sentence names if they keep layouts from being compared
    "mtp": "drafts",
    "acceptance": "drafts",
    "emulate": "emulated machines",
    **dict.fromkeys(("dtype", "weights_dtype", "kv_dtype"), "precision"),
}


def format_title(frames: Frames) -> str:
    """Return `DeepSeek-V3 · tp4, tp4·dcp4 · 4 × NVIDIA H200 · bf16 · ag_rs · 2026-11-20`, without the parts that no record has."""
    table, lost = frames.everything, frames.others
    if table.empty and lost.empty:
        return f"dcpbench: {', '.join(run.name for run in frames.runs)}"
    named = lost if table.empty else table
    ordered = lost if table.empty else table.sort_values(["tp", "dp", "dcp"], kind="stable")
    measured = [_format_precisions(frames), _format_exchanges(frames)] if len(table) else []
    conditions = (
        [recommendation.format_forecast(table), _format_imports(table)] if len(table) else ["no point finished"]
    )
    parts = [
        _format_few([get_title(name) for name in load_labels.list_unique(named["model"])], "models"),
        _format_few([engine.run.name for engine in frames.engines if not engine.imported and len(table)], "engines"),
        _format_few(load_labels.list_unique(ordered["layout"]), "layouts"),
        format_report_hardware(frames),
        *measured,
        _format_dates(frames),
        *conditions,
    ]
    return load_labels.SEPARATOR.join(part for part in parts if part and part != UNKNOWN)


def _format_precisions(frames: Frames) -> str:
    """Return `fp8 weights + bf16 KV`; of several engines with the names of those that do not record theirs."""
    table = frames.everything
    if not frames.engines:
        found = load_labels.list_unique(table["precision"])
        return _format_few([kept.replace(", ", " + ") for kept in found], "precisions")
    unknown = table["precisions"].map(lambda pair: UNKNOWN in pair).astype(bool)
    known = dict.fromkeys(table["precisions"][~unknown])
    named = [weights if weights == kv else f"{weights} weights + {kv} KV" for weights, kv in known]
    hidden = load_labels.list_unique(table["run"][unknown])
    if not named:
        return ""
    aside = f" ({format_list(hidden)}: not recorded in full)" if hidden else ""
    return _format_few(named, "precisions") + aside


def _format_exchanges(frames: Frames) -> str:
    """Return the exchanges; empty for several engines if that of one is not known."""
    names = load_labels.list_unique(n for n in frames.everything["exchange"] if n != "none")
    if frames.engines and UNKNOWN in names:
        return ""
    return _format_few([name for name in names if name != UNKNOWN], "exchanges")


def _format_imports(table: pd.DataFrame) -> str:
    """Return `imported from vllm bench serve`, or `some imported from …` if dcpbench measured other points."""
    theirs = [name for name in load_labels.list_unique(table["origin"]) if is_imported_origin(name)]
    some = "" if table["origin"].map(is_imported_origin).all() else "some "
    return f"{some}imported from {format_list([TOOLS.get(name, name) for name in theirs])}" if theirs else ""


def format_report_hardware(frames: Frames) -> str:
    """Return `4 × NVIDIA H200` or `CPU`; empty if no record names the hardware."""
    if not frames.everything.empty:
        return format_table_hardware(frames.everything)
    return format_table_hardware(frames.others[frames.others["device"].notna()])


def format_table_hardware(table: pd.DataFrame) -> str:
    """Return the hardware of these points, as `format_report_hardware` does."""
    devices = [name for name in load_labels.list_unique(table["device"].dropna()) if name != UNKNOWN]
    if table["cpu"].all() or not devices:
        return _format_few(devices, "devices")
    many = recommendation.format_gpu_count(table)
    return f"{many} × {_format_few(devices, 'devices')}" if many else _format_few(devices, "devices")


def _format_dates(frames: Frames) -> str:
    days = sorted({record.started_at[:10] for record in frames.records if record.started_at})
    return "" if not days else days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def _format_policies(frames: Frames) -> str:
    """Return the scheduling policies of other engines that replays followed: `, with the scheduling policy of vLLM`."""
    used = {record.conditions.policy for record in frames.records if record.conditions and record.conditions.policy}
    names = format_list([ENGINE_NAMES.get(name, name) for name in sorted(used)])
    return f", with the scheduling polic{'ies' if len(used) > 1 else 'y'} of {names}" if used else ""


def _format_few(names: list[str], what: str) -> str:
    return ", ".join(names) if len(names) <= MAX_NAMES else f"{len(names)} {what}"


def list_caveats(frames: Frames) -> list[str]:
    """Return the conditions that change how the numbers are to be read, in a few words each."""
    table = frames.everything
    if table.empty:
        return []
    found = [text] if (text := point_warnings.describe_wrong(table)) else []
    found += recommendation.format_no_fit_notes(table)
    if (table["weights"] == "synthetic").any():
        found.append("synthetic weights")
    replayed = table["mode"] == REPLAY
    if replayed.any():
        some = _format_some(replayed, " ({})")
        found.append(
            f"replayed in virtual time over measured step times, not served live{some}{_format_policies(frames)}"
        )
    found += answer.list_draft_conditions(frames)
    found += answer.list_stage_conditions(frames)
    origins = [parse_origin(name) for name in load_labels.list_unique(table["origin"])]
    if servers := [origin.label for origin in origins if origin.engine]:
        some = "" if len(servers) == len(origins) else "some points "
        found.append(f"{some}measured over HTTP at a server of {format_list(servers)}")
    found += engines.list_unknown(frames)
    emulated = table["emulate"].fillna("") != ""
    if emulated.any():
        on = ", ".join(sorted({format_machine_label(PurePath(name).name) for name in table["emulate"][emulated]}))
        found.append(
            f"forecast: one rank ran, its communication modelled as of {on}{_format_some(emulated, ' ({})')}{_format_slow_end(frames)}"
        )
    waves = answer.select_lock_step(frames.served)
    if len(waves):
        every = "" if len(waves) == len(table) else f" at {len(waves):,} of {len(table):,} points"
        favours = (
            ", which favours attention DP; with varied lengths attention DP may be slower"
            if (waves["dp"] > 1).any()
            else ""
        )
        found.append(f"clients run in lock-step{every}: all their requests have one length{favours}")
    found += _list_engine_caveats(table)
    power = table["throttle_reasons"].map(lambda reasons: any("power" in reason for reason in reasons)).astype(bool)
    limited = power | point_warnings.has_warning(table, point_warnings.THROTTLED)
    if limited.any():
        by_steps = limited & replayed & ~table["throttle_reasons"].map(bool)
        both = by_steps.any() and (limited & ~by_steps).any()
        steps = f" ({f'{int(by_steps.sum()):,} ' if both else ''}by their step times)" if by_steps.any() else ""
        every = f" at {int(limited.sum()):,} of {len(table):,} points" if both else _format_some(limited)
        found.append(
            f"clocks limited{'' if (limited & ~power).any() else ' by power'}{every}{steps}, marked throttled in the tables"
        )
    return found


def _format_some(mask: pd.Series[bool], form: str = " at {}") -> str:
    """Return ` at 3 of 12 points`; empty for all points."""
    return "" if mask.all() else form.format(f"{int(mask.sum()):,} of {len(mask):,} points")


def _list_engine_caveats(table: pd.DataFrame) -> list[str]:
    """Return what the engine does that makes its speed another than that of a deployment."""
    found = []
    if (dummy := point_warnings.has_warning(table, DUMMY_WEIGHTS)).any():
        found.append(
            f"dummy weights of the engine{_format_some(dummy)}: every token takes the same few experts, so that the speed is not that of a "
            "real model"
        )
    if "load_prefill" in table and (slow := (table["load_prefill"] == PREFILLS[0]) & ~table["cpu"].astype(bool)).any():
        found.append(f"prompts are computed by sdpa{_format_some(slow)}, which takes longer than FlashInfer")
    return found


def _format_slow_end(frames: Frames) -> str:
    """State how much longer first tokens of forecasts take at the upper end of the step time estimate."""
    known = [(r.emulated.ttft_p50_ms_high, r.serve.ttft_ms.p50) for r in frames.records if r.emulated and r.serve]
    longer = max((high / p50 - 1 for high, p50 in known if high and p50), default=0.0)
    return f"; TTFT p50 up to {longer:.0%} longer where steps are as long as they may be" if longer > 0 else ""


def select_rejected_for_memory(frames: Frames) -> pd.DataFrame:
    """Return the points rejected for memory: model, mode, layout, context, `load` as served, and concurrency."""
    others = frames.others
    if others.empty:
        return others
    rejected = others[others["lacks_memory"].astype(bool)]
    return rejected.assign(mode=rejected["mode"].fillna("decode"))


def format_answer(frames: Frames, *, brief: bool = False) -> str:
    """Return which layout to use from which load on; for CPU runs and imported files, what the numbers are.

    `brief`: of several engines only which one is ahead, without the gain of DCP inside each.
    """
    table = frames.everything
    if table.empty:
        where = format_report_hardware(frames)
        on = f" on {'a CPU' if where == CPU else where}" if where else ""
        text = f"No point finished{on} ({answer.format_outcomes(frames)}), so no layout can be recommended."
        return " ".join(filter(None, (text, answer.format_commonest_reason(frames))))
    timed = findings.select_timed(table)
    foreign = [name for name in load_labels.list_unique(table["origin"]) if is_imported_origin(name)]
    if timed.empty and foreign:
        return _describe_imported(frames, foreign, timed)
    if table["cpu"].all():
        return _describe_functional(frames)
    if timed.empty:
        why = point_warnings.describe_wrong(table) or "no point has a rate of output"
        return f"{format_capitalized(why)}, so no layout can be recommended."
    rows = frames.findings.against_others
    if answer.has_engine_answer(frames):
        text = engines.format_lead(frames) if brief else engines.format_answer(frames)
    elif foreign:
        text = _describe_imported(frames, foreign, rows)
    elif rows.empty:
        text = _describe_single(frames, timed)
    else:
        text = recommendation.format_recommendation(rows, timed["model"].nunique())
    slow = int(table["cpu"].sum())
    return (
        f"{text} {format_capitalized(format_count(slow, 'point'))} ran on a CPU, so their times do not reflect GPU performance."
        if slow
        else text
    )


def _describe_functional(frames: Frames) -> str:
    """Return the sentence for runs on a CPU only."""
    ran = format_list(load_labels.list_unique(frames.everything["layout"]))
    lost = frames.others[frames.others["outcome"] != "rejected"] if len(frames.others) else frames.others
    not_all = f"; {format_count(len(lost), 'point')} did not finish" if len(lost) else ""
    text = f"Functional run on a CPU: it shows that {ran} can run{not_all}. Its times do not reflect GPU performance."
    return " ".join(filter(None, (text, slo.explain_unjudged(frames.everything, frames.slo))))


def _describe_single(frames: Frames, timed: pd.DataFrame) -> str:
    """Return the highest output, and the result of open loops, if no closed loop compares two layouts."""
    most = _format_maximum(timed)
    best = frames.findings.best
    where = recommendation.format_conditions(timed)
    names = load_labels.list_unique(timed["layout"])
    if best.empty or best["load_arrival"].eq(CLOSED).any():
        if len(names) > 1:
            advice = " To compare them, measure them with one command." if len(frames.runs) > 1 else ""
            why = format_capitalized(f"{where}{_explain_not_compared(frames, timed)}")
            return f"{why}, so no layout can be recommended: {most}.{advice}"
        rejected = select_rejected_for_memory(frames)
        lost = [n for n in load_labels.list_unique(rejected["layout"]) if n not in names] if len(rejected) else []
        if lost:
            why = f"as {format_list(lost)} {'has' if len(lost) == 1 else 'have'} too little memory"
            return f"{format_capitalized(where)}only {names[0]} ran, {why}: {most}."
        wrong = frames.everything[point_warnings.find_wrong(frames.everything)]
        ran = "ran" if set(wrong["layout"]) <= set(names) else "ran without wrong results"
        return f"{format_capitalized(where)}only {names[0]} {ran}, so no layout can be recommended: {most}."
    loads = format_count(len(best), "load")
    launches = f"{found}," if (found := launch_bands.format_launches(best)) else ""
    won = answer.count_winners(best)
    return f"{format_capitalized(where)}of {loads} with requests at a rate, the fastest{launches} is {won}: {most}."


def _format_maximum(timed: pd.DataFrame) -> str:
    """Return the highest output and its point, within the SLO if there is one, or the point nearest to it.

    Replayed points count only if all are replayed.
    """
    measured = timed[timed["mode"] != REPLAY]
    timed = timed if measured.empty else measured
    judged = timed[timed["slo_excess"].notna()]
    pool = timed if judged.empty else judged
    fits = pool[~(pool["slo_excess"] > 1)]
    within = "" if judged.empty else " within the SLO"
    top = (pool if fits.empty else fits).sort_values("output_tok_s", kind="stable").iloc[-1]
    most = f"{format_number(top['output_tok_s'], 3)} output tok/s{'' if fits.empty else within}, with {top['label']} at {recommendation.format_load(top)}"
    if len(fits):
        return f"at most {most}"
    near = pool.sort_values("slo_excess", kind="stable").iloc[0]
    nearest = "" if near.name == top.name else f": nearest is {near['label']} at {recommendation.format_load(near)}"
    return f"at most {most}; no point meets the SLO{nearest} ({near['slo_result']})"


def _explain_not_compared(frames: Frames, rows: pd.DataFrame) -> str:
    """Return why no layouts of these rows are compared."""
    of_one = " of one run" if len(frames.runs) > 1 else ""
    text = f"no two layouts ({format_list(load_labels.list_unique(rows['layout']))}) on as many GPUs ran under one load{of_one}"
    met = rows[rows.groupby([*findings.LOAD, "gpus"])["layout"].transform("nunique") > 1]
    differ = dict.fromkeys(text for name, text in CONDITIONS.items() if len(set(met[name].dropna())) > 1)
    return f"{text} with equal {format_list(list(differ))}" if differ else text


def _describe_imported(frames: Frames, foreign: list[str], rows: pd.DataFrame) -> str:
    """Return what the files of other tools measured, and whether they allow choosing a layout."""
    table = frames.everything
    theirs = table[table["origin"].map(is_imported_origin)]
    sources = format_list(
        [
            f"{format_count(int(theirs['repeats'][theirs['origin'] == n].sum()), 'result')} of {TOOLS.get(n, n)}"
            for n in foreign
        ]
    )
    machine = format_table_hardware(theirs)
    text = f"These figures are what the imported files measured: {sources}{f' on {machine}' if machine else ''}"
    tops = theirs.sort_values("output_tok_s", kind="stable").dropna(subset=["output_tok_s"])
    if len(tops):
        top = tops.iloc[-1]
        layout = "" if top["layout"] == UNKNOWN_LAYOUT else f" with {top['label']}"
        most = format_number(top["output_tok_s"], 3)
        text += f", at most {most} output tok/s ({top['model']}{layout} at {recommendation.format_load(top)})"
    if len(table) > len(theirs):
        text += f", in addition to {format_count(len(table) - len(theirs), 'point')} of dcpbench"
    if theirs["cpu"].all():
        return f"{text}. They ran on a CPU, so their times do not reflect GPU performance."
    compared, ours = (
        rows[~rows["origin"].map(is_imported_origin) == own] if len(rows) else rows for own in (False, True)
    )
    layouts = load_labels.list_unique(theirs["layout"])
    nothing = "so no layout can be recommended"
    if len(compared):
        text = f"{text}. By these, {recommendation.format_advice(compared, theirs['model'].nunique())}."
    elif layouts == [UNKNOWN_LAYOUT]:
        text = f"{text}. They do not say which layout ran, {nothing}."
    elif len(layouts) == 1:
        text = f"{text}. They are of one layout, {nothing}."
    else:
        text = f"{text}. {format_capitalized(_explain_not_compared(frames, theirs))}, {nothing}."
    if ours.empty:
        return text
    models = table["model"][~table["origin"].map(is_imported_origin).astype(bool)].nunique()
    return f"{text} Of dcpbench's own points: {recommendation.format_recommendation(ours, models)}"


def format_bullets(frames: Frames) -> list[str]:
    """Return at most MAX_BULLETS bullets for below the sentence; the last one states how far to trust the report."""
    if findings.select_timed(frames.everything).empty:
        return []
    bullets = [
        *([_describe_dcp_gain(frames)] if not frames.engines else engines.format_bullets(frames, 1)),
        *engine_steps.describe_differences(frames),
        answer.describe_replay_errors(findings.compare_replay_with_live(findings.select_timed(frames.served))),
        _describe_rejections(frames),
        floors.format_short_sentence(frames.points),
        _describe_kv_capacity(frames) if not frames.engines else "",
    ]
    trust = answer.describe_agreement(frames, answer.collect_repeat_differences(frames))
    return [*list(filter(None, bullets))[: MAX_BULLETS - 1], trust]


def _describe_dcp_gain(frames: Frames) -> str:
    against = frames.findings.against_best
    known = against[against["verdict"] != "no rival"] if len(against) else against
    if known.empty:
        return ""
    paying = known[known["verdict"].isin(findings.PAYS)]
    loads, paid = (len(table.drop_duplicates([*findings.LOAD, *findings.BEST_OF])) for table in (known, paying))
    within = " within the SLO" if known["slo_excess"].notna().any() else ""
    many = "the one load compared" if loads == 1 else f"{f'{paid:,}' if paid else 'none'} of {loads:,} loads"
    dcp = "is DCP" if not paid and loads > 1 else "DCP is" if paid else "DCP is not"
    if launch_bands.has_single_launches(known):
        text = f"At {many}, {launch_bands.IN_ONE_LAUNCH}, {dcp} ahead {launch_bands.BY_MORE} of the fastest layout without it{within}"
    else:
        text = f"At {many} {dcp} clearly ahead of the best layout without it{within}"
    rated = paying[paying["ratio"].notna()] if paid else known[known["ratio"].notna() & (known["verdict"] != "misses")]
    if rated.empty:
        return f"{text}."
    top = rated.sort_values("ratio", kind="stable").iloc[-1]
    who = f"{get_title(top['model'])}, {top['label']} at {recommendation.format_load(top)}"
    if paid:
        return f"{text}, by at most {format_percent(top['ratio'] - 1)} ({who})."
    return f"{text}; nearest is {top['ratio']:.2f}× ({who})."


def _describe_rejections(frames: Frames) -> str:
    lost = select_rejected_for_memory(frames)
    if lost.empty:
        return ""
    clauses: dict[str, list[str]] = {}
    for (context, mode, layout), rows in lost.groupby(["context", "mode", "layout"], sort=False):
        least = int(rows["concurrency"].min())
        length = f" of {'' if mode == 'decode' else 'up to '}{context:,} tokens" if context != 0 else ""
        clauses.setdefault(f"from {format_count(least, 'request')}{length} on", []).append(str(layout))
    texts = [f"{format_list(load_labels.list_unique(names))} {where}" for where, names in clauses.items()]
    more = f"; and {len(texts) - MAX_CLAUSES:,} more" if len(texts) > MAX_CLAUSES else ""
    return f"Does not fit into memory: {'; '.join(texts[:MAX_CLAUSES])}{more}."


def _describe_kv_capacity(frames: Frames) -> str:
    kv = frames.kv
    more = kv if kv.empty else kv[(kv["dcp"] > 1) & kv["kv_ratio"].notna()]
    if more.empty:
        return ""
    top = more.sort_values("kv_ratio", kind="stable").iloc[-1]
    same = kv[
        (kv["tp"] == top["tp"]) & (kv["dcp"] == 1) & (kv["kv_ratio"] >= top["kv_ratio"] * (1 - REPEATS_AGREE_WITHIN))
    ]
    too = f", as does {format_list(load_labels.list_unique(same['layout']), 'or')}" if len(same) else ""
    memory = "" if is_missing(top["kv_tokens_per_gib"]) else " in the same KV memory"
    return f"{top['layout']} holds {top['kv_ratio']:.2f}× the tokens of tp{top['tp']}{memory}{too}."
