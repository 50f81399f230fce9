"""Format an answer as text, JSON, Markdown and a picture: the sentence, a table of loads, what does not fit, commands. No torch."""

from __future__ import annotations

import dataclasses
import itertools
import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.models import load_shape
from dcpbench.models.weight_formats import PAPER_FORMATS
from dcpbench.plan.validate import find_live_limit
from dcpbench.points import latency_bands
from dcpbench.points.layout import place_experts
from dcpbench.points.names import CLOSED, ENGINE_NAMES, FP8, MOE_EP, MOE_TP, OBJECTIVES, SGLANG, VLLM, WEIGHT_FORMATS
from dcpbench.points.pipeline import split_layers
from dcpbench.points.speculation import SEPARATOR, make_speculation
from dcpbench.recommend.advise import (
    format_ab_command,
    format_measure_command,
    format_server_command,
    format_url_command,
)
from dcpbench.recommend.answer_table import LEGEND, choose_column_widths, format_row, list_columns, list_rows
from dcpbench.recommend.forecast import EMULATED, ESTIMATED, MEASURED, SOURCES
from dcpbench.recommend.layout_choice import (
    NO_WHOLE_MODEL,
    OTHER,
    TOO_MANY,
    compute_margin,
    compute_price,
    compute_tok_s_per_gpu,
    find_break_even,
    is_ahead,
)
from dcpbench.reports.recommendation import format_taken
from dcpbench.serving.gain_split import format_share
from dcpbench.serving.load_words import format_lock_step_warning, format_varied_option, is_lock_step
from dcpbench.show import numbers
from dcpbench.show.model_fit import format_no_fit, format_range
from dcpbench.show.numbers import format_number, format_percent, format_ratio
from dcpbench.show.text import format_capitalized, format_count, format_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D
    from rich.console import Console

    from dcpbench.points.point import Load
    from dcpbench.recommend.advise import Query
    from dcpbench.recommend.answer_table import Row
    from dcpbench.recommend.estimate import Steps
    from dcpbench.recommend.forecast import Forecast
    from dcpbench.recommend.layout_choice import Choice, Refusal

    Starts = Mapping[str, Sequence["Start"]]  # by recommended layout, one for each engine
    Flags = Mapping[str, Mapping[str, str]]  # command of each layout by engine; none if the engine cannot run it

STARTED_ENGINES = (SGLANG, VLLM)  # engines for which a command that starts the layout is printed
DASHED = "--"  # line style of estimates
MAX_NAMED = 4  # maximum number of layouts in a clause of the sentence
CONCURRENCY = "concurrency (requests in flight)"  # label of the x axis for loads without a request rate
CUT_AHEAD, EP_AHEAD, EP_LEVEL = "behind", "ahead", "level"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """Describe how an engine is started in a recommended layout or, if it lacks a part of that, in the nearest that it can run."""

    engine: str
    command: str = ""  # empty if there is no configuration that the engine can run
    lacking: Sequence[str] = ()  # parts of the recommended configuration that the engine does not have
    nearest: Forecast | None = None  # what the command starts, if it is not the recommended configuration
    load: str = ""  # the load that `nearest` is forecast for


def format_answer(query: Query, choices: Sequence[Choice]) -> str:
    """Return which layout to use from which load on, for which machine, and how certain that is."""
    able = [choice for choice in choices if choice.best]
    if not able:
        who, refusal = _find_nearest_refusal(choices[0])
        instead = choices[0].instead if refusal.kind != OTHER else []
        give = f"; give {format_list(instead, 'or')}" if instead else ""
        whole = all(one.kind == NO_WHOLE_MODEL for choice in choices for one in choice.refused.values())
        why = ", as the whole model and KV cache do not fit" if whole else ""
        return f"No layout of {query.model} on {_format_gpus(query)} can be recommended{why}: {who}: {refusal.reason.rstrip('.')}{give}."
    runs = []
    for text, group in itertools.groupby(able, key=_format_choice):
        loads = list(group)
        first, last = loads[0], loads[-1]
        begin = first.requests if first.lengths == last.lengths else first.name
        runs.append(f"at {last.name if first is last else f'{begin} to {last.name}'}, {text}")
    return f"{format_capitalized(_format_gpus(query))}{_format_layers_held(able)}{_format_drafts(query)}: {'; '.join(runs)} ({_format_basis(able)}).{_format_unjudged(choices)}{_format_lock_step(query, able)}"


def _find_nearest_refusal(choice: Choice) -> tuple[str, Refusal]:
    """Return the refused layout that lacks least, of those that are refused for the same reason as the first."""

    def measure_lack(who: str) -> int:
        if choice.refused[who].kind == TOO_MANY:
            return -choice.refused_points[who].dp
        capacity = choice.capacities.get(who)
        return 0 if capacity is None else capacity.missing_bytes

    first = next(iter(choice.refused.values()))
    who = min((who for who, one in choice.refused.items() if one.kind == first.kind), key=measure_lack)
    return who, choice.refused[who]


def _format_drafts(query: Query) -> str:
    """Return how many drafts steps verify and what acceptance was assumed; empty for steps of one token."""
    drafts = make_speculation(query.mtp, query.acceptance)
    if drafts is None or drafts.expected_tokens is None:
        return ""
    return f" with {format_count(query.mtp, 'draft')} a step (assumed: successive drafts are accepted with probability {format_list(query.acceptance.split(SEPARATOR))}, so that a step yields {drafts.expected_tokens:.2f} tokens on average)"


def _format_unjudged(choices: Sequence[Choice]) -> str:
    """Return a sentence on the layouts that may fit but could not be judged; empty without any."""
    names = list(dict.fromkeys(who for c in choices for who, one in c.refused.items() if not one.for_memory))
    return f" {_format_names(names)} could not be judged at every load (reasons below)." if names else ""


def _format_names(names: Sequence[str]) -> str:
    return format_list(names) if len(names) <= MAX_NAMED else f"{len(names)} layouts"


def _format_layers_held(choices: Sequence[Choice]) -> str:
    """Return that the whole model does not fit, with the layers held, and by which layouts if the others hold all of them."""
    forecasts = [f for choice in choices for f in choice.forecasts]
    cut = [f for f in forecasts if f.layers_held]
    if not cut:
        return ""
    held, (_, layers) = [f.layers_held[0] for f in cut if f.layers_held], cut[0].layers_held or (0, 0)
    names = list(dict.fromkeys(f.point.layout_name for f in cut))
    some = "" if len(cut) == len(forecasts) else f" in {_format_names(names)}"
    return f" ({format_no_fit(format_range(held), str(layers))}{some})"


def _format_lock_step(query: Query, choices: Sequence[Choice]) -> str:
    """Return a sentence if the advantage of attention DP in the answer depends on clients that run in lock-step; else empty."""
    waves = _list_lock_step_loads(query)
    if not waves or not any(f.point.dp > 1 for choice in choices for f in choice.level):
        return ""
    return (
        " Clients with requests of one length run in lock-step, which favours attention DP: ask again with "
        f"{format_varied_option(waves[0].output_tokens)}."
    )


def _list_lock_step_loads(query: Query) -> list[Load]:
    """Return the loads in which clients run in lock-step."""
    return [load for requests, _, load in query.loads if load and is_lock_step(load, requests)]


def _format_gpus(query: Query) -> str:
    return f"{format_list([f'{n}' for n in query.gpus], 'or')} × {query.machine.label}"


def _format_choice(choice: Choice) -> str:
    """Return `take tp8·dcp8 (a2a)`, with what decides it, or the two layouts between which a measurement decides."""
    if not choice.meets:
        return (
            f"no layout meets the SLO; most output has {format_list([f.label for f in choice.level[:MAX_NAMED]], 'or')}"
        )
    assert choice.best is not None
    if not choice.decided:
        first, second = choice.tied[:2]
        more = len(choice.tied) - 2
        rest = f" ({more} more {'is' if more == 1 else 'are'} level with both)" if more else ""
        return f"{first.label} or {second.label}{rest}, between which only a measurement decides"
    text = f"take {format_taken([choice.best.label])}"
    others = [f.label for f in choice.level if f is not choice.best]
    if not others:
        return text
    return f"{text}, which is level with {_format_names(others)} in output tok/s and has more KV capacity"


def format_details(query: Query, choice: Choice) -> list[str]:
    """Return sentences on the recommended layout of a load: its figures, its KV capacity, and what else may be taken."""
    best, behind = choice.best, choice.next
    if best is None:
        return []
    sentences = [
        f"{best.label}: {numbers.format_tok_s(best.tok_s, *best.output_bounds_tok_s)}{_format_capacity(choice, best)}."
    ]
    if behind is not None:
        lead = compute_tok_s_per_gpu(best) / compute_tok_s_per_gpu(behind) - 1
        needed = compute_margin(best, behind)
        known = f"± {format_percent(needed)}" if math.isfinite(needed) else "in one launch"
        level = "" if is_ahead(best, behind) or is_ahead(behind, best) else ": they are level"
        holds = capacity.removeprefix(", ") if (capacity := _format_capacity(choice, behind)) else ""
        sentences.append(
            f"Its output per GPU differs from that of the next layout, {behind.label}, by {format_share(lead)} {known}{level}."
            + (f" {behind.label} has {holds}." if holds else "")
        )
    if choice.gain is not None:
        sentences.append(choice.gain.format())
    if command := _format_deciding_command(query, choice):
        gpus = max(f.point.gpus for f in choice.tied[:2])
        sentences.append(f"To decide, run on {gpus} × {query.machine.gpu}: {command}")
    return sentences


def _format_deciding_command(query: Query, choice: Choice) -> str:
    """Return the command that decides between the two first layouts; empty if one is recommended, or none is within the SLO."""
    if choice.decided or not choice.meets:
        return ""
    first, second = (f.point for f in choice.tied[:2])
    if any(point.gpus > point.tp for point in (first, second)):
        return f"{format_url_command(first, second)}, once for each server as started below"
    if find_live_limit(load_shape(query.model), query.weights_dtype):
        return format_server_command(first, second)
    return format_ab_command(query, first, second)


def _format_capacity(choice: Choice, of: Forecast) -> str:
    """Return how many requests of a load a layout's KV cache holds; empty if that is unknown."""
    capacity = choice.capacities.get(of.label)
    if capacity is None or capacity.requests is None:
        return ""
    return f", KV for {capacity.requests:,} requests of {of.point.context:,} tokens"


def format_placements(choices: Sequence[Choice]) -> str:
    """Return which placement of experts is ahead under attention data parallelism, and by how much; empty if none was compared."""
    found: dict[str, list[tuple[str, float]]] = {}  # load and ratio, by verdict
    for choice in choices:
        known = {(f.point.layout, f.point.ep): f for f in choice.forecasts if f.point.dp > 1}
        for (layout, ep), cut in known.items():
            whole = known.get((layout, MOE_EP))
            if ep != MOE_TP or whole is None:
                continue
            verdict = EP_AHEAD if is_ahead(whole, cut) else CUT_AHEAD if is_ahead(cut, whole) else EP_LEVEL
            found.setdefault(verdict, []).append((choice.name, whole.tok_s / cut.tok_s))
    count = sum(map(len, found.values()))
    clauses = [
        f"{text} in {'all ' if len(pairs) == count else ''}{format_count(len(pairs), 'pair')} ({numbers.format_value_range(ratio for _, ratio in pairs)} the output"
        f"{_format_loads([load for load, _ in pairs], choices)})"
        for text in (CUT_AHEAD, EP_AHEAD, EP_LEVEL)
        if (pairs := found.get(text))
    ]
    if not clauses:
        return ""
    return (
        "With attention data parallelism, layouts are compared in pairs: expert parallel (ep above 1) with tensor-parallel experts (ep1, the engines' "
        f"default). Expert parallel is {format_list(clauses)}."
    )


def _format_loads(names: Sequence[str], choices: Sequence[Choice]) -> str:
    """Return `, at 8 requests × 4,000 tokens` for some of the loads; empty for all of them."""
    some = list(dict.fromkeys(names))
    if len(some) == len(choices):
        return ""
    return f", at {format_list(some)}" if len(some) <= MAX_NAMED else f", at {len(some)} of {len(choices)} loads"


def _format_basis(choices: Sequence[Choice]) -> str:
    used = dict.fromkeys(f.source for choice in choices for f in choice.forecasts)
    sources = [name for name in SOURCES if name in used]
    estimates = [f for choice in choices for f in choice.forecasts if f.source == ESTIMATED]
    band = (
        f", error of output tok/s up to ±{format_percent(max(f.high / f.tok_s - 1 for f in estimates))}"
        if estimates
        else ""
    )
    return f"{format_list(sources)}{band}"


def format_break_even(choices: Sequence[Choice]) -> str:
    """Return from which concurrency on a layout with DCP is clearly ahead of all without; empty if the loads do not compare them."""
    closed = [
        c for c in choices if c.forecasts and (f := c.forecasts[0].point.load) is not None and f.arrival == CLOSED
    ]
    steps = [c for c in choices if c.forecasts and c.forecasts[0].point.load is None]
    sentences: list[str] = []
    groups: dict[str, list[Choice]] = {}
    for choice in (*steps, *closed):
        groups.setdefault(choice.lengths, []).append(choice)
    for of, group in groups.items():
        least, compared, ratios = find_break_even(group)
        if not compared:
            continue
        ends = dict.fromkeys((min(c.concurrency for c in group), max(c.concurrency for c in group)))
        tried = " to ".join(map(str, ends))
        if len(ends) == 1:
            where = f"at concurrency {tried}, the only one compared"
        else:
            where = f"{'at any concurrency' if least is None else f'from concurrency {least} on'} (compared: {tried})"
        ahead = (
            "no layout with DCP is clearly ahead of the best layout without DCP"
            if least is None
            else "the best layout with DCP is clearly ahead of every layout without DCP"
        )
        gain = (
            f": its output is {numbers.format_value_range(ratios)} that of the best layout without DCP"
            if ratios
            else ""
        )
        sentences.append(f"With {of}, {ahead} {where}{gain}.")
    return " ".join(sentences)


def _iter_estimate_notes(query: Query, choices: Sequence[Choice], steps: Steps) -> Iterator[str]:
    """Yield sentences on the basis of the estimates, and on conditions for which they were not checked."""
    folders = list(dict.fromkeys(Path(source).parts[1] for source in steps.sources))
    yield (
        f"The time of a step is estimated as its floor, the minimum time that {query.machine.gpu} allows, times the ratio of measured time to floor "
        f"in {steps.steps:,} steps on {steps.machine} (records: {format_list(folders)} in results/)."
    )
    shape = load_shape(query.model)
    if query.weights_dtype in PAPER_FORMATS:
        yield (
            f"No measured step had {query.weights_dtype} weights: the floors are computed for them, and the ratios of bf16 and fp8 are assumed."
        )
    elif query.weights_dtype != FP8 and any(load for _, _, load in query.loads):
        yield "All measured steps with prompts had fp8 weights: whether bf16 has the same ratios there was not checked."
    if shape.indexer:
        yield (
            "No measured step had sparse attention: it and its indexer are assumed to have the ratios of MLA over all tokens. The indexer's "
            "keys are divided over DCP ranks; an engine that keeps them on every rank holds fewer tokens."
        )
    if shape.gqa:
        yield "No measured step had grouped-query attention: it is assumed to have the ratios of MLA."
    if query.weights_dtype != FP8 and query.kv_dtype == FP8:
        yield "No measured step had bf16 weights with an fp8 cache."
    if query.mtp:
        drafting = (
            "The MTP layer runs once per draft and is estimated as one layer with embedding and head"
            if shape.mtp_layers
            else "The model has no MTP layer, and drafting takes no time in the estimate"
        )
        yield (
            "No measured step had drafts. In the estimate attention reads the KV cache once for all rows of a request, and other parts compute "
            f"more rows. {drafting}."
        )
    yield from _iter_machine_notes(query, steps)
    yield from _iter_stage_notes(query, choices)
    if limit := find_live_limit(shape, query.weights_dtype):
        yield f"No measured step can replace the estimates: {limit}."
    elif any(f.point.gpus == f.point.tp for choice in choices for f in choice.forecasts):
        yield (
            f"To replace the estimates, measure the steps of one rank on one {query.machine.gpu}: {format_emulate_command(query, choices)}, then "
            "add that folder to this command."
        )


def _iter_stage_notes(query: Query, choices: Sequence[Choice]) -> Iterator[str]:
    """Yield sentences on pipeline stages and prefill context parallelism, of which no step was measured."""
    staged: dict[int, list[Forecast]] = {}
    for f in (f for choice in choices for f in choice.forecasts if f.point.pp > 1):
        staged.setdefault(f.point.pp, []).append(f)
    for pp, found in staged.items():
        waits = format_range([round(100 * (f.bubble_share or 0.0)) for f in found])
        yield (
            f"pp{pp}: stages of {format_list([str(n) for n in split_layers(load_shape(query.model).layers, pp)])} layers, "
            f"{query.micro_batches or pp} micro-batches in flight; a stage waits for {waits} % of a decode step on average. "
            "The table has the weights of the stage with the most. No such step was measured."
        )
    if any(f.point.pcp > 1 for choice in choices for f in choice.forecasts):
        yield (
            "Prefill context parallelism (pcp): prompts are divided over the pcp groups of GPUs. Each group computes all decodes and, without DCP, "
            "holds a copy of the KV cache. Experts are divided over all GPUs of a stage. No such step was measured."
        )


def _iter_machine_notes(query: Query, steps: Steps) -> Iterator[str]:
    """Yield sentences on how the machine differs from that of the measured steps."""
    if query.machine.gpu != steps.machine:
        yield f"No step was measured on {query.machine.gpu}: its ratios are assumed to be those of {steps.machine}."
    if query.machine.on_paper:
        yield f"{query.machine.gpu} is a machine on paper: its rates and memory are from data sheets and public logs."
    if not query.machine.card.cuda:
        yield f"{query.machine.gpu} does not run CUDA: a port of the kernels is assumed to have these ratios."
    if max(query.gpus) > 4:  # noqa: PLR2004 - the published runs'
        yield "No step with more than 4 ranks was measured: the communication model estimates collectives over more ranks, and the model's error is part of the band."


def list_unknowns(query: Query, choices: Sequence[Choice], steps: Steps) -> list[str]:
    """Return sentences on what the answer does not know."""
    used = [f for choice in choices for f in choice.forecasts]
    sentences: list[str] = []
    if any(f.source == ESTIMATED for f in used):
        sentences += _iter_estimate_notes(query, choices, steps)
    if right := [f"{format_ratio(c.factor)} at {c.name}" for c in choices if c.factor]:
        sentences.append(
            f"Estimates of loads that have records are corrected by the ratio of recorded to estimated output ({format_list(right)}): tok/s are "
            "multiplied by it, latencies are divided by it."
        )
    sentences += describe_latencies(used)
    waves = _list_lock_step_loads(query)
    if waves and used:
        some = "" if len(waves) == len(query.loads) else f" under {len(waves)} of {len(query.loads)} loads"
        sentences.append(
            format_lock_step_warning(waves[0].output_tokens, some=some, dp=any(f.point.dp > 1 for f in used))
        )
    for choice in choices:
        sentences += [f"{who} at {choice.name} is estimated: {why.rstrip('.')}." for who, why in choice.short.items()]
    if query.cycled:
        sentences.append(
            "With --cycled, weights need not fit: servers of these layouts may not start on this many GPUs."
        )
    if any(f.source == EMULATED for f in used):
        sentences.append("Emulated points model the time that ranks wait for each other (limits: docs/emulation.md).")
    sentences.append(_format_energy(choices))
    published = load_shape(query.model).published.name
    if used and query.weights_dtype != published and query.weights_dtype in WEIGHT_FORMATS:
        sentences.append(f"The commands name a checkpoint in {published}; give one in {query.weights_dtype} instead.")
    if query.kv_memory is not None and used:
        sentences.append(
            "The commands of SGLang and vLLM do not include --kv-memory: these engines choose the sizes of their own KV pools."
        )
    sentences.append(describe_engines(used))
    return sentences


def describe_engines(forecasts: Sequence[Forecast]) -> str:
    """Return a sentence that names the engines (kernels and schedulers) of the forecasts."""
    names = [*dict.fromkeys(f.engine for f in forecasts)]
    if not any(names):
        return "The forecasts are for dcpbench's engine; SGLang and vLLM have other kernels and schedulers."
    engines = format_list([name or "dcpbench's engine" for name in names])
    if len(names) == 1:
        return f"The forecasts are for the kernels and the scheduling policy of {engines}."
    return (
        f"The forecasts are for the kernels and the scheduling policies of {engines}, so that differences between layouts are "
        "also differences between engines. Give evidence of one engine to compare layouts."
    )


def describe_latencies(forecasts: Sequence[Forecast]) -> list[str]:
    """Return what the latencies of served estimates rest on, and which layouts have no ITL, with the reason."""
    estimates = [f for f in forecasts if f.source == ESTIMATED and f.mixed_share is not None]
    if not estimates:
        return []
    cases = latency_bands.load_published()
    arrivals = list(dict.fromkeys(f.point.load.arrival for f in estimates if f.point.load))
    bands = [latency_bands.find_band(latency_bands.ESTIMATED, "ttft", arrival, cases) for arrival in arrivals]
    count = sum(band.cases for band in bands if band)
    sentences = [
        (
            f"The bands of TTFT and ITL p50 are the largest errors of estimates for {count} measured loads, made from the steps of another model. Other percentiles, TPOT and "
            "E2EL have no bands, even if --slo limits them."
        )
    ]
    if without := list(dict.fromkeys(f.label for f in estimates if f.itl_bounds_ms is None)):
        limit = latency_bands.compute_max_sure_share(cases)
        sentences.append(
            f"No ITL is estimated for {format_list(without)}: at least {format_percent(limit)} of the gaps between their tokens contain a step with "
            "prompts. Such a step takes several times as long as a decode step, and whether the median gap contains one is unknown."
        )
    return sentences


def _format_energy(choices: Sequence[Choice]) -> str:
    """Return the measured energy per token in J of the best of each load, or that none was measured."""
    known = [
        f"{f.label} {format_number(f.joules_per_token)} at {choice.name}"
        for choice in choices
        for f in sorted(choice.forecasts, key=lambda f: f.joules_per_token or math.inf)
        if f.joules_per_token
    ]
    if not known:
        return "Energy per token is unknown: no given record contains energy readings of NVML."
    return (
        f"Energy per token of all GPUs, in J, by NVML: {'; '.join(known)}. The energy of the other layouts is unknown."
    )


def format_emulate_command(query: Query, choices: Sequence[Choice]) -> str:
    """Return the command that measures one rank of each layout, on a machine with a GPU."""
    points = [f.point for choice in choices for f in choice.forecasts if f.point.gpus == f.point.tp]
    by_default = all(point.ep == place_experts(MOE_TP, point.tp) for point in points)
    axes = ["tp", "dp", "dcp", *([] if by_default else ["ep"])]
    return f"{format_measure_command(query, points, axes)} --emulate {shlex.quote(query.named)} -o runs/emulated"


def list_recommended(choices: Sequence[Choice]) -> list[tuple[Choice, Forecast]]:
    """Return the best layouts, each once, with the first load that it is best for; both of a load that is undecided."""
    found: dict[str, tuple[Choice, Forecast]] = {}
    for choice in choices:
        for best in choice.tied[: 2 if choice.meets else 1]:
            found.setdefault(best.label, (choice, best))
    return list(found.values())


def explain_start(start: Start) -> str:
    """Return what the engine lacks and what its command starts in place of that; empty if it lacks nothing."""
    if not start.lacking:
        return ""
    name, parts = ENGINE_NAMES[start.engine], format_list(list(start.lacking), "or")
    if start.nearest is None:
        return f"{name} has no {parts}, and no similar configuration that {name} can run was forecast, so there is no command for it."
    of = start.nearest
    rate = numbers.format_tok_s(of.tok_s, *of.output_bounds_tok_s)
    return f"{name} has no {parts}. The nearest that it can run is {of.label}, {rate} at {start.load} ({of.origin}):"


def list_refused(choices: Sequence[Choice]) -> list[str]:
    """Return a sentence for each reason for refusing layouts: `Not tp4 at 48 requests × 32,000 tokens: …`.

    Layouts that miss memory for the whole model are left out: their rows state how much.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for choice in choices:
        for who, one in choice.refused.items():
            if one.kind != NO_WHOLE_MODEL:
                found.setdefault(one.reason, {}).setdefault(who, []).append(choice.name)
    sentences = []
    for reason, of in found.items():
        names: dict[str, list[str]] = {}
        for who, loads in of.items():
            names.setdefault("" if len(loads) == len(choices) else f" at {format_list(loads)}", []).append(who)
        those = [f"{format_list(group)}{at}" for at, group in names.items()]
        sentences.append(f"Not {'; '.join(those)}: {reason.rstrip('.')}.")
    return sentences


def convert_to_json(
    query: Query, choices: Sequence[Choice], notes: Sequence[str], steps: Steps, starts: Starts, flags: Flags
) -> dict[str, Any]:
    """Return the complete answer for JSON; numbers in tok/s, ms, bytes and dollars."""
    return {
        "answer": format_answer(query, choices),
        "details": [text for choice in choices for text in format_details(query, choice)],
        "experts": format_placements(choices),
        "break_even": format_break_even(choices),
        "machine": query.machine.name,
        "on_paper": query.machine.on_paper,
        "gpus": list(query.gpus),
        "model": query.model,
        "mtp": query.mtp,
        "acceptance": query.acceptance,
        "loads": [
            {
                "load": choice.name,
                "concurrency": choice.concurrency,
                "best": choice.best.label if choice.best else None,
                "decided": choice.decided,
                "level": [f.label for f in choice.level],
                "meets_slo": choice.meets,
                "undecided_between": [f.label for f in choice.tied[:2]] if not choice.decided else [],
                "command_that_decides": _format_deciding_command(query, choice),
                "gain_by_cause": msgspec.to_builtins(choice.gain),
                "rows": [_make_row_json(query, choice, row, flags) for row in list_rows(choice)],
            }
            for choice in choices
        ],
        "commands": {who: {s.engine: s.command for s in of if not s.lacking} for who, of in starts.items()},
        "nearest": {
            who: {s.engine: _make_nearest_json(query, s) for s in lacking}
            for who, of in starts.items()
            if (lacking := [s for s in of if s.lacking])
        },
        "unknown": [*notes, *list_unknowns(query, choices, steps)],
    }


def _make_nearest_json(query: Query, start: Start) -> dict[str, Any]:
    """Return what an engine lacks of a recommended configuration, and the nearest that it can run."""
    found: dict[str, Any] = {"lacks": list(start.lacking), "layout": None, "load": None, "command": None}
    if start.nearest is not None:
        layout = _make_forecast_json(query, start.nearest)
        found |= {"layout": layout, "load": start.load, "command": start.command}
    return found


def _make_row_json(query: Query, choice: Choice, row: Row, flags: Flags) -> dict[str, Any]:
    """Return a row of the table; the figures of a layout without a forecast are absent."""
    capacity, f = row.capacity, row.forecast
    found: dict[str, Any] = {
        "layout": row.layout,
        "experts": row.experts,
        "recommended": row.recommended,
        "level": row.level,
        "fits": row.refusal is None and not (capacity is not None and capacity.missing_bytes),
        "reason": None if row.refusal is None else row.refusal.reason,
        "missing_bytes_per_gpu": None if capacity is None else capacity.missing_bytes,
        "weights_bytes_per_gpu": None if capacity is None else capacity.weight_bytes,
        "kv_capacity_tokens": None if capacity is None else capacity.kv_tokens,
        "kv_capacity_requests": None if capacity is None else capacity.requests,
        "commands": dict(flags.get(row.layout, {})),
    }
    if f is None:
        return found
    objectives = [dataclasses.asdict(judged) | {"met": judged.met} for judged in f.judge(query.slo)]
    return found | _make_forecast_json(query, f) | {"misses": choice.misses.get(f.label, []), "objectives": objectives}


def _make_forecast_json(query: Query, f: Forecast) -> dict[str, Any]:
    cost = compute_price(query.price, f) if query.price is not None else None
    return {
        "layout": f.label,
        "gpus": f.point.gpus,
        "source": f.source,
        "corrected_by": f.factor,
        "basis": f.basis,
        "engine": f.engine,
        "output_tok_s": dict(zip(("mean", "low", "high"), (f.tok_s, *f.output_bounds_tok_s), strict=True)),
        "output_tok_s_per_gpu": compute_tok_s_per_gpu(f),
        **{f"{name}_ms": msgspec.to_builtins(getattr(f, f"{name}_ms")) for name in OBJECTIVES},
        "ttft_p50_ms_band": f.ttft_bounds_ms,
        "itl_p50_ms_band": f.itl_bounds_ms,
        "bubble_share": f.bubble_share,
        "joules_per_token": f.joules_per_token,
        "dollars_per_million_output_tokens": None
        if cost is None
        else dict(zip(("mean", "low", "high"), cost, strict=True)),
    }


def list_sentences(query: Query, choices: Sequence[Choice]) -> list[str]:
    """Return the sentences above the tables."""
    details = [text for choice in choices for text in format_details(query, choice)] if len(choices) == 1 else []
    return [
        text
        for text in (format_answer(query, choices), *details, format_placements(choices), format_break_even(choices))
        if text
    ]


def show(
    query: Query,
    choices: Sequence[Choice],
    notes: Sequence[str],
    steps: Steps,
    starts: Starts,
    flags: Flags,
    terminal: Console,
) -> None:
    """Print the answer on a terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    def print_lines(lines: Iterable[str]) -> None:
        for line in lines:
            terminal.print(line, soft_wrap=True)

    print_lines(list_sentences(query, choices))
    for choice in choices:
        table = Table(box=SIMPLE_HEAD, title=choice.name, title_justify="left", collapse_padding=True, pad_edge=False)
        names, rows = list_columns(query), [format_row(query, choice, row) for row in list_rows(choice)]
        widths = choose_column_widths(names, rows, terminal.width)
        for n, (name, width) in enumerate(widths.items()):
            table.add_column(name, overflow="fold", no_wrap=n == 0, width=width)
        for row in rows:
            table.add_row(*(cell for name, cell in zip(names, row, strict=True) if name in widths))
        terminal.print(table)
        if left_out := [name.replace("\n", " ") for name in names if name not in widths]:
            terminal.print(f"left out, as it is narrow here: {', '.join(left_out)}", style="dim", soft_wrap=True)
        if len(choices) > 1:
            print_lines(format_details(query, choice))
    unknown = (f"- {text}" for text in (*notes, *list_unknowns(query, choices, steps)))
    print_lines([LEGEND, *list_refused(choices), *_list_command_lines(starts, flags)])
    print_lines(["\nLimits of this answer:", *unknown])


def _list_command_lines(starts: Starts, flags: Flags) -> Iterator[str]:
    """Yield the commands of the recommended layouts, and vLLM's of all others."""
    for who, of in starts.items():
        yield f"\n{who}:"
        for start in of:
            yield from (f"  {text}" for text in (explain_start(start), start.command) if text)
    others = {who: commands[VLLM] for who, commands in flags.items() if who not in starts and VLLM in commands}
    if others:
        yield "\nvLLM in the other layouts:"
    for who, command in others.items():
        yield f"  {who}: {command}"


def render_markdown(
    query: Query, choices: Sequence[Choice], notes: Sequence[str], steps: Steps, starts: Starts, flags: Flags
) -> str:
    """Return the answer as a Markdown page, with a link to the picture."""
    names = [*(name.replace("\n", " ") for name in list_columns(query)), "vLLM", "SGLang"]
    lines = [f"# {query.model} on {_format_gpus(query)}", ""]
    for text in list_sentences(query, choices):
        lines += [text, ""]
    lines += ["![Output tokens a second and GPU of each layout; hollow: not measured](recommendation.png)"]
    for choice in choices:
        lines += ["", f"## {choice.name}", "", "| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
        for row in list_rows(choice):
            commands = flags.get(row.layout, {})
            cells = [
                *format_row(query, choice, row),
                *(f"`{c}`" if (c := commands.get(e)) else "" for e in (VLLM, SGLANG)),
            ]
            lines.append("| " + " | ".join(cells) + " |")
        if len(choices) > 1:
            lines += ["", *(f"- {text}" for text in format_details(query, choice))]
    lines += ["", LEGEND, "", *(f"- {text}" for text in list_refused(choices))]
    for who, of in starts.items():
        lines += ["", f"## {who}"]
        for start in of:
            lines += ["", text] if (text := explain_start(start)) else []
            lines += ["", "```", start.command, "```"] if start.command else []
    unknown = [f"- {text}" for text in (*notes, *list_unknowns(query, choices, steps))]
    lines += ["", "## Limits of this answer", "", *unknown]
    return "\n".join(lines) + "\n"


def draw_picture(query: Query, choices: Sequence[Choice], path: Path) -> None:
    """Draw output tok/s per GPU over concurrency or request rate: a line with its band per layout, a panel per request length.

    Layouts are named as in the table. Points that were not measured have hollow markers, and estimates are joined by
    dashes.
    """
    from matplotlib.figure import Figure

    from dcpbench.show.figure_style import (
        apply_style,
        choose_columns,
        draw_legend_below,
        format_axis_label,
        make_hollow_entry,
        save_figure,
        set_axis_labels,
        set_headline,
        set_measured_ticks,
    )

    groups: dict[tuple[str, str], list[Choice]] = {}
    for choice in choices:
        if choice.forecasts:
            groups.setdefault((choice.lengths, _get_load_axis(choice)[0]), []).append(choice)
    columns = choose_columns(len(groups))
    drawn = [f for group in groups.values() for c in group for f in c.forecasts]
    looks = _choose_styles(drawn)
    with apply_style():
        figure = Figure(figsize=(5.5 * columns, 3.6 * -(-len(groups) // columns)), layout="constrained")
        panels = figure.subplots(-(-len(groups) // columns), columns, squeeze=False).ravel()
        handles: dict[str, Any] = {}
        for ax in panels[len(groups) :]:
            ax.set_visible(False)
        for ax, ((lengths, _), group) in zip(panels, groups.items(), strict=False):
            for who in dict.fromkeys(f.label for choice in group for f in choice.forecasts):
                seen = [(_get_load_axis(c)[1], f) for c in group for f in c.forecasts if f.label == who]
                handles[who] = _draw_line(ax, sorted(seen, key=lambda pair: pair[0]), looks[who])
            set_measured_ticks(ax, [_get_load_axis(c)[1] for c in group])
            ax.set_title(lengths)
            ax.set_ylim(bottom=0)
        set_headline(
            figure, f"{query.model} on {_format_gpus(query)}: {_format_basis([c for g in groups.values() for c in g])}"
        )
        set_axis_labels(figure, CONCURRENCY, "output per GPU (tok/s/GPU)")
        for ax, (_, label) in zip(panels, groups, strict=False):
            ax.set_xlabel(format_axis_label(label, ax.get_xscale()))
        sources = [name for name in SOURCES if any(f.source == name for f in drawn)]
        ran = [name for name in sources if name not in (MEASURED, ESTIMATED)]
        signs = [make_hollow_entry(format_list(ran, "or"))] if ran else []
        signs += [make_hollow_entry(ESTIMATED, DASHED)] if ESTIMATED in sources else []
        draw_legend_below(figure, [*handles.values(), *signs])
        save_figure(figure, path.with_suffix(""), "png")


def _get_load_axis(choice: Choice) -> tuple[str, float]:
    """Return the label of the x axis for a load, and the load's place on it."""
    load = choice.forecasts[0].point.load
    if load is not None and load.request_rate is not None:
        return "request rate (requests/s)", load.request_rate
    return CONCURRENCY, choice.concurrency


def _choose_styles(forecasts: Sequence[Forecast]) -> dict[str, dict[str, str]]:
    """Return colour and marker of each name: those of its layout, with further markers for other names of the same layout."""
    from dcpbench.show.figure_style import get_marker
    from dcpbench.show.layouts import Degrees, find_marker_index, get_colours

    found: dict[str, dict[str, str]] = {}
    places: dict[Degrees, int] = {}
    for f in forecasts:
        degrees = Degrees(f.point.tp, f.point.dp, f.point.dcp)
        if f.label not in found:
            place = places.setdefault(degrees, find_marker_index(degrees))
            found[f.label] = {"color": get_colours(degrees)[0], "marker": get_marker(place), "label": f.label}
            places[degrees] = place + 1
    return found


def _draw_line(ax: Axes, seen: Sequence[tuple[float, Forecast]], look: Mapping[str, str]) -> Line2D:
    """Draw a layout over its loads with its band, and return its legend entry."""
    from matplotlib.lines import Line2D

    colour = look["color"]
    for (x, f), (after, other) in itertools.pairwise(seen):
        style = DASHED if ESTIMATED in (f.source, other.source) else "-"
        ax.plot([x, after], [compute_tok_s_per_gpu(f), compute_tok_s_per_gpu(other)], color=colour, linestyle=style)
    for x, f in seen:
        face = colour if f.source == MEASURED else "white"
        ax.plot(
            [x], [compute_tok_s_per_gpu(f)], color=colour, marker=look["marker"], markerfacecolor=face, linestyle=""
        )
    low, high = zip(*(f.output_bounds_tok_s for _, f in seen), strict=True)
    gpus = seen[0][1].point.gpus
    ax.fill_between(
        [x for x, _ in seen], [n / gpus for n in low], [n / gpus for n in high], color=colour, alpha=0.08, linewidth=0
    )
    return Line2D([], [], **look)
