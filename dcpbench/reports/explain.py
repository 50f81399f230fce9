"""Provide the text around the tables: definitions, the meaning of warnings, reasons for absent values, and what to know first."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dcpbench.points.names import MOE_EP
from dcpbench.records.metrics import DECODE, METRIC, SERVE, get_definitions
from dcpbench.records.record import KV_LIMIT_FLAGS, OURS, SERVER_FLAG, is_imported_origin, is_server_origin
from dcpbench.records.stats import compute_min_samples
from dcpbench.reports import point_warnings
from dcpbench.reports.tables import Table
from dcpbench.show.numbers import format_number, format_percent, is_missing
from dcpbench.show.text import format_capitalized, format_count, format_list

if TYPE_CHECKING:
    import pandas as pd

    from dcpbench.records.runs import Run
    from dcpbench.reports.dataframes import Frames

MAX_NAMED = 10  # lines and values of a run, each with a separate sentence


def _split_paragraphs(text: str) -> list[str]:
    return [" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n")]


METHOD = (
    STEP_TIME,
    WARM_UP,
    INTERVALS,
    PERCENTILES,
    ITL,
    TTFT,
    OUTPUT,
    PER_USER,
    KV_TOKENS,
    PROFILE,
    SAMPLES,
    DIFFERENCES,
) = _split_paragraphs(
    f"""
    Step time: replays of a captured CUDA graph, timed by CUDA events on every rank; a sample is the time of the slowest rank.
    On a CPU it is wall time.

    Warm-up lasts until two successive medians agree within 1 %. Measuring stops when the 95 % interval of the median
    is within the requested precision, ±1 % by default. A time limit ends both: a point is
    marked unsettled if the limit ended its warm-up, and noisy if it ended its measurement.

    Intervals are distribution-free: two order statistics of the samples that hold the median with 95 % confidence
    (exact binomial). Where a point was repeated, the value is the median of the repeats and the interval spans the intervals
    of all repeats.

    Percentiles need {compute_min_samples(90)} samples for p90, {compute_min_samples(95)} for p95 and {compute_min_samples(99)} for p99:
    then at least two samples lie beyond the true percentile with 99 % probability. With fewer they are not reported.

    ITL (inter-token latency): the gap between two output tokens of a request. In the workload decode every request
    gets one token a step, so its samples are steps, not tokens. With drafts, further tokens of a step have gaps of 0.

    TTFT (time to first token): from submission to the first output token, queueing included. The workload decode has
    none.

    Output throughput: concurrency / step time, in tok/s, of the whole layout; with drafts, times the tokens of a request in a step.
    Per GPU: divided by tp, as DCP and attention DP add no GPUs.

    tok/s/user: 1000 / median step time in ms; with drafts, times the tokens of a step.

    KV tokens per GiB: tokens that the layout's pools hold, each counted once, over the GiB of one GPU's pool. It
    compares layouts independently of the sizes of their pools.

    Phases, idle time and host syncs come from a separate profiled pass, so that profiling does not affect the times.
    Calls to CUDA's allocator are counted over the timed steps.

    Every sample of a point is the same step: tokens, lengths and, with synthetic weights, the experts that tokens are
    routed to are drawn once, the same in all layouts. Intervals cover the measurement, not another random choice of these.

    A difference counts as clear if the intervals do not overlap and it is more than the difference between launches: 2 % for
    dcpbench's own engine, and for another server the difference between its launches in this report. Figures of a server
    that was launched once are marked "in one launch each", and none of their differences is called clear.
    """
)
OF_OWN_STEPS = (STEP_TIME, WARM_UP, SAMPLES)  # what holds only for steps of dcpbench's own engine
COMMON = (PERCENTILES, PER_USER, KV_TOKENS)  # what holds for served requests, too
ENGINE_STEPS = _split_paragraphs(
    """
    Steps of another engine (`sweep --engine`): requests of a point decode together on its server after their prompts have been
    prefilled, and a sample is the gap between two of their tokens at the client, as the median over requests. It contains scheduler,
    sampling and HTTP server as far as the engine does not hide them behind the GPU. The context grows by a token in each step;
    `measured_context` in the record has its range.

    Phases of another engine: GPU time of kernels by their names, from the engine's own profiler in steps after those that were timed.
    Kernels are `unknown` if no pattern matches their names.
    """
)
SERVED = _split_paragraphs(
    """
    Served requests: t0 is when a request was submitted (in an open loop, when it was due), t1 its first output token,
    tn its last, n its output tokens. TTFT = t1 - t0, queueing included. ITL: each gap between output tokens, pooled
    over requests. TPOT = (tn - t1) / (n - 1), one per request. E2EL = tn - t0. Latencies are those of finished
    requests.

    Output throughput of served requests: output tokens / (last token - first submission), ramp and drain included.
    Steady: the same over the longest time with at least 95 % of a closed loop's clients waiting for an answer.

    Goodput: finished requests that meet every objective / wall time. A request meets an ITL objective if 99 of 100 of its
    gaps do or, with fewer than 100 gaps, if all do.

    tok/s/user of served requests: 1000 / median TPOT in ms. TPOT includes stalls for the prefills of other requests.

    Live runs are measured. A replay runs the same scheduler, or the scheduling policy of a server's engine, in virtual time and takes
    step times from measurements of single steps; it is no measurement of a load, and no table or line here holds both.

    A served point has no interval of its own, because one run of a load is one sample. If a point was repeated, the value is the
    median of the repeats, and differences count only if they exceed those between repeats, and 2 %.
    """
)

WARNINGS = {
    "values_omitted": "a value that no reader would accept was left out; `omitted` in the record names it.",
    "noisy": "measuring ended, at the time limit or at the longest context of the point, while the interval of the median was wider than requested.",
    "unsettled": "warm-up ended by time, before two successive medians agreed within 1 %.",
    "drift": "the medians of the first and second half of the samples differ by more than 1 %.",
    "throttled": "the GPU lowered its clocks for heat or power while the point was measured.",
    "straggler": "one rank's GPU had a lower clock than the others, which wait for it, or its host took longer to plan a step; `straggler` in "
    "the record names it. A timed decode step contains no planning, so that only a lower clock makes it longer.",
    "emulated": "a forecast: one rank ran, and its waits for other ranks were modelled (docs/emulation.md).",
    "cpu": "functional run on a CPU; not a performance number.",
    "l2_warm": "weights or KV cache are so small that they may stay in the L2 cache, which flatters the time.",
    "host_sync": "the host waited for the GPU inside the step; `Where the host waited` names the lines.",
    "allocates": "memory was allocated from CUDA while steps were timed.",
    "gpu_idle": "no kernel ran during more than 3 % of the profiled step, or between steps without prefill.",
    "phases_differ": "the phases and the idle time of the profiled step do not add up to it within 3 %: do not compare its phases.",
    "graph_differs": "the captured graph and the eager step do not compute the same: do not use this point.",
    "inaccurate": "the attention output is further from fp64 than rounding explains: do not use this point.",
    "few_samples": "too few requests finished for every percentile of TTFT and ITL.",
    "cut_off": "the run ended before all of its requests did.",
    "rejections": "some requests can never fit and were rejected; all figures are for the others.",
    "summary_only": "means and percentiles as another tool computed them, without floors: the times of single requests are unknown.",
    "chunk_gaps": "stream chunks hold several tokens: ITL is the gap between chunks.",
    "nominal_lengths": "requests were on average more than 5 % shorter or longer than the requested lengths, by which they are listed: answers ended early, or lengths were random.",
    "requests_failed": "some requests failed; all figures are for the others.",
    "gaps_divided": "some tokens of a request were read several at a time: the gap before them is divided over them, so that single gaps are means "
    "of a few. `divided_tokens` of `server.facts` in the record has their share at decode points.",
    "client_bound": "the client that sent the requests was itself too slow, or other programs had its cores: it sent late, so that latencies are "
    "upper bounds and the output of clients that wait for answers is a lower one; give it cores of its own, or send less.",
    "dummy_weights": "the server has its engine's dummy weights, with which every token takes the same few experts: the speed of "
    "mixture-of-experts layers is not that of a real model (docs/servers.md).",
    "kv_sources_differ": "the server's endpoints, its log and the stated degrees do not agree on its KV capacity; `server.kv_sources` in the record "
    "holds each number and names those that differ.",
    "compiled": "a kernel was compiled or loaded while requests waited; `compiled` in the record names it.",
    "oversubscribed": "more ranks than CPU cores shared the machine.",
}

BOUNDS = {
    "weights": "weights: the pool takes what the weights leave.",
    "kv_memory": "kv_memory: the pool has the size given with --kv-memory.",
    "sweep": (
        "sweep: the pool was sized for the largest point of the run. On a GPU this is because not all weights fit: "
        "the KV capacity with all weights is unknown; compare tokens per GiB instead."
    ),
    SERVER_FLAG: (
        f"{SERVER_FLAG}: a flag of the server ({format_list(KV_LIMIT_FLAGS, 'or')}) limits its KV cache, so that its capacity without it is "
        "unknown."
    ),
}


WORDS = "Definitions"  # title of tables of definitions
KV = METRIC["kv_tokens_per_gib"]
FLOOR = METRIC["floor_ms"]
EVERYWHERE = {
    "p50, p90, p95, p99": (
        "null below 1, 64, 130, 662 samples: fewer do not bound the percentile with 99 % confidence",
        "",
    ),
    "SLO": (
        "compared with p99 or, if samples are too few, with the highest percentile that all points of a load have",
        "",
    ),
}
OTHERS = {
    KV.term: (KV.defined[SERVE], KV.unit),
    FLOOR.term: (FLOOR.defined[DECODE], FLOOR.unit),
    "phases, GPU idle": ("GPU time by range, and time without a kernel, in a separate profiled pass", "ms"),
    "host syncs": ("calls in a profiled step that made the host wait for the GPU", "per step"),
    "ratio, ×": (METRIC["dcp_ratio"].help, ""),
    "DCP pays": (
        "a layout with DCP meets the SLO and is clearly above the best layout without DCP that meets it, with the same load, GPUs, dtype and weights",
        "",
    ),
    "clearly": (
        "intervals do not overlap, and the difference is more than that between launches of the same engine",
        "",
    ),
}
DEFINED = {workload: get_definitions(workload) | EVERYWHERE for workload in (DECODE, SERVE)}


def build_definitions(frames: Frames, *names: str) -> Table:
    """Build a table with a line for each metric of the workloads at hand; `names` selects some, in that order.

    A metric that is defined differently per workload names its workload. See docs/metrics.md for more.
    """
    workloads = [w for w, points in ((DECODE, frames.points), (SERVE, frames.served)) if len(points)]
    rows = []
    floored = len(frames.points) > 0 and bool(frames.points[FLOOR.name].notna().any())
    for name in names or dict.fromkeys([*(n for w in workloads for n in DEFINED[w]), *OTHERS]):
        found = {w: DEFINED[w][name] for w in workloads if name in DEFINED[w]} or (
            {"": OTHERS[name]} if name in OTHERS and (floored or name != FLOOR.term) else {}
        )
        differ = len(set(found.values())) > 1
        for workload, (text, unit) in list(found.items())[: None if differ else 1]:
            definition = text + _explain_difference(frames, name)
            rows.append([f"{name} ({workload})" if differ else name, definition, unit or "—"])
    return Table(WORDS, ["metric", "definition", "unit"], rows, text_columns=3, fold=True)


def _explain_difference(frames: Frames, name: str) -> str:
    """Return what differs from the definition of a metric for imported points of a report; empty if nothing does."""
    served = frames.served
    if (
        name == "per GPU"
        and len(served)
        and bool((served["gpus"] != served["tp"])[served["origin"].map(is_imported_origin)].any())
    ):
        return "; of an import / all GPUs: tp × pp × pcp of every instance"
    return ""


def describe_method(frames: Frames) -> list[str]:
    """Describe how the workloads at hand were measured."""
    if frames.served.empty:
        return _describe_steps(frames.points)
    return [*(_describe_steps(frames.points) if len(frames.points) else COMMON), *SERVED]


def _describe_steps(points: pd.DataFrame) -> list[str]:
    """Describe how steps were measured, of dcpbench's engine and of others."""
    others = [is_server_origin(origin) for origin in points["origin"]] if len(points) else []
    if not any(others):
        return list(METHOD)
    return [*(p for p in METHOD if not (all(others) and p in OF_OWN_STEPS)), *ENGINE_STEPS]


def list_file_notes(frames: Frames) -> list[str]:
    """Return what a reader must know about the files themselves."""
    notes = []
    for run in frames.runs:
        notes += [f"Run {run.name}: {note}" for note in list_left_out(run)]
        if run.replaced:
            notes.append(f"Run {run.name}: {run.replaced} records are left out, as their points were measured again.")
        if not run.records:
            notes.append(f"Run {run.name} holds no record.")
    return notes


def list_left_out(run: Run) -> list[str]:
    """Return a sentence for each line of a run's records that is left out, and for values that were omitted."""
    notes = ["the last line of its record file was cut short; it is left out."] if run.truncated else []
    notes += [
        f"line {bad.line} of its record file cannot be read and is left out: {bad.why}."
        for bad in run.bad_lines[:MAX_NAMED]
    ]
    if len(run.bad_lines) > MAX_NAMED:
        more = format_count(len(run.bad_lines) - MAX_NAMED, "more line")
        notes.append(f"{more} of its record file cannot be read; `dcpbench records check` lists all.")
    omitted = Counter(str(value) for record in run.records for value in record.omitted or [])
    for value, count in omitted.most_common(MAX_NAMED):
        notes.append(f"a value was left out of {format_count(count, 'record')} when it was written: {value}.")
    return notes


def explain_absent(points: pd.DataFrame) -> list[str]:
    """Explain why a dash stands where a value could be."""
    if points.empty:
        return []
    why = [
        f"p{p} needs {compute_min_samples(p)} steps in one measurement"
        for p in (90, 95, 99)
        if (points[f"itl_p{p}_ms"].isna() & points["itl_p50_ms"].notna()).any()
    ]
    if points["output_tok_s"].isna().any():
        why.append("some records hold no metrics, though their point ended well")
    if points["spread"].isna().any():
        why.append("a point measured once has no repeats to compare")
    return [f"A dash means not measured: {'; '.join(why)}."] if why else []


def describe_served(points: pd.DataFrame) -> list[str]:
    """Describe the served points of one mode: their objectives, the accuracy of step predictions, and the reasons for dashes."""
    slos = [slo for slo in dict.fromkeys(points["slo"]) if slo]
    without = " (not all points)" if (points["slo"] == "").any() else ""
    objectives = f"Objectives behind goodput{without}: {'; or '.join(slos)}."
    sentences = [objectives if slos else "No objective was given (--slo), so there is no goodput."]
    errors = points["step_error"].dropna()
    if len(errors):
        among = f"known for {len(errors)} of {format_count(len(points), 'point')}"
        sentences.append(
            f"Steps that were measured to check their prediction were up to {format_percent(errors.max())} off ({among})."
        )
    return sentences + explain_absent_served(points)


def explain_absent_served(points: pd.DataFrame) -> list[str]:
    """Explain why a dash stands where a percentile could be, and how many samples it needs."""
    given = points[points["origin"] == OURS]
    why = [
        f"{what} p{p} needs {compute_min_samples(p)} {samples} in one run (where it is missing: at most "
        f"{int(lacking[f'{name}_samples'].max()):,})"
        for name, what, samples in (("ttft", "TTFT", "finished requests"), ("itl", "ITL", "gaps between tokens"))
        for p in (90, 95, 99)
        if len(lacking := given[given[f"{name}_p{p}_ms"].isna() & given[f"{name}_p50_ms"].notna()])
    ]
    sentences = [f"A dash means not known: {'; '.join(why)}."] if why else []
    if points["origin"].map(is_imported_origin).any():
        sentences.append("For imported points, a dash is a value that their files do not contain.")
    if points["origin"].map(is_server_origin).any():
        sentences.append("For servers a dash is also a value that they do not report.")
    if (given["steady_tok_s"].isna() & given["output_tok_s"].notna()).any():
        sentences.append("No steady throughput: an open loop has no target, or the target was never reached.")
    if (points["cancelled"] > 0).any():
        sentences.append(
            "Some runs ended before their requests did: tokens of requests that were cut off count as output, and "
            "their latencies are not known. Those that wait longest are missing, so latencies look better than they "
            "were."
        )
    if (points["rejected"] > 0).any():
        sentences.append("Some requests could never fit and were rejected; all figures are of the others.")
    return sentences


def explain_warnings(points: pd.DataFrame) -> list[str]:
    """Return the warnings that occur, with their meaning."""
    if points.empty:
        return []
    found = sorted({warning for warnings in points["warnings"] for warning in warnings if warning})
    everyone = point_warnings.find_shared_warnings(points)
    sentences = []
    for warning in found:
        where = f" (all {len(points):,} points{'' if warning in point_warnings.STAY else ', so it is not repeated per point'})"
        here = (
            format_capitalized(point_warnings.describe_clocks(points)) + "."
            if warning == point_warnings.THROTTLED
            else ""
        )
        meaning = WARNINGS.get(warning, "not known to this version of dcpbench.")
        sentences.append(f"{warning}{where if warning in everyone else ''}: {meaning} {here}".rstrip())
    return sentences


def describe_phases(points: pd.DataFrame) -> list[str]:
    """Describe how long the GPU idled and the host blocked, and what the profiled pass did not see."""
    if points.empty:
        return []
    sentences = []
    if points["cpu"].any():
        sentences.append(
            "On a CPU there is no GPU to idle and no host sync; phases are host time by range on one rank."
        )
    on_gpu = points[~points["cpu"]]
    idle, syncs = on_gpu["idle_fraction"].dropna(), on_gpu["host_syncs_per_step"].dropna()
    if len(idle):
        sentences.append(
            f"The GPU idled {format_percent(idle.min())} to {format_percent(idle.max())} of a profiled step."
        )
    if len(syncs):
        most = syncs.max()
        sentences.append(
            "No step made the host wait for the GPU."
            if most == 0
            else f"Up to {format_number(most, 3)} calls in a step made the host wait for the GPU; the tables say where."
        )
    if points["idle_us"].isna().any():
        sentences.append("A dash means that the point had no profiled pass, or that the device has no such number.")
    return sentences


def explain_bounds(points: pd.DataFrame) -> list[str]:
    """Return an explanation of each limit that bounded a KV pool of these points."""
    if points.empty:
        return []
    found = dict.fromkeys(str(v) for v in points["kv_bounded_by"] if not is_missing(v))
    return [BOUNDS.get(name, f"{name}: not known to this version of dcpbench.") for name in found]


def describe_conditions(points: pd.DataFrame) -> list[str]:
    """Describe weights, layers and checks of correctness in sentences."""
    if points.empty:
        return []
    sentences = []
    kinds = sorted(set(map(str, points["weights"])))
    if kinds == ["synthetic"]:
        sentences.append(
            "Weights are synthetic: random numbers in the real sizes. Which experts a token goes to is drawn, too: "
            "close to uniform, and the same in every layout."
        )
    else:
        sentences.append(f"Weights: {', '.join(kinds)}.")
    sentences += _describe_uneven_experts(points)
    held = points.dropna(subset=["layers", "layers_held"])
    if len(held) and (held["layers_held"] < held["layers"]).any():
        sentences.append(
            "Not all layers' weights fit into memory. The distinct layers that were held are cycled through, so a step "
            "does the work of all layers; the KV cache of every layer is real."
        )
    error = points["attention_error"].dropna()
    if len(error):
        sentences.append(
            f"Worst relative error of the merged attention output against fp64: {format_number(error.max(), 2)} "
            f"(checked for {len(error)} of {format_count(len(points), 'point')})."
        )
    else:
        sentences.append("The attention output of these points was not compared with a reference.")
    return sentences


def _describe_uneven_experts(points: pd.DataFrame) -> list[str]:
    """Return how much more than the mean rank the busiest rank of expert parallel reads, if any record has it."""
    if "busiest_rank_experts" not in points:
        return []
    whole = points[(points["ep"] == MOE_EP) & (points["tp"] > 1)]["busiest_rank_experts"].dropna()
    if whole.empty:
        return []
    reach = " to ".join(dict.fromkeys(f"{share:.2f}" for share in (whole.min(), whole.max())))
    sentence = (
        f"With expert parallel (--ep tp) the busiest rank had {reach} × as many experts to read as the mean, and the others waited "
        "for it. With tensor-parallel experts (--ep 1) all ranks do the same work."
    )
    return [sentence]
