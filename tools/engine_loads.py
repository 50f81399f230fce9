"""Score recommendations against loads that vLLM, SGLang and dcpbench's engine served in several layouts.

`python -m tools.recommend_check --engines` prints the score; docs/recommend.md has its table. It needs no GPU.

The loads of RUNS were measured at tp2 and tp2·dcp2 on the same GPUs. None of them is part of the fit of estimates, which use no record
of an engine. The recommendation is one layout, or two if it is undecided. An answer is right if the measured output of each named layout is
at most score.NEAR below the best one. The tool also prints how many answers are right within the scatter of launches.

Published loads are those of tools/published_crossovers.json, with the stored forecasts.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcpbench.points.cluster_specs import MEASURED_ON, load_machine
from dcpbench.points.names import LIVE, REPLAY
from dcpbench.points.point import Load
from dcpbench.recommend.advise import Evidence, Query, choose_layouts
from dcpbench.recommend.forecast import ROUNDS
from dcpbench.recommend.score import NEAR
from dcpbench.records.record import OURS, get_origin, parse_origin
from dcpbench.records.runs import read_run
from tools.published_crossovers import format_load, read_entries

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dcpbench.points.point import Point
    from dcpbench.recommend.estimate import Steps
    from dcpbench.recommend.layout_choice import Choice
    from dcpbench.records.record import Record
    from tools.published_crossovers import Entry

FOLDER = "engines_H200/engines_2xH200_2026-11-29"
RUNS: dict[str, tuple[tuple[str, ...], ...]] = {
    "vllm": (
        (f"{FOLDER}/vllm-a", f"{FOLDER}/vllm-b"),
        (f"{FOLDER}/vllm-c", f"{FOLDER}/vllm-d"),
        ("engines_H200/engines-vllm_2xH200_2026-11-28/run",),
        (f"{FOLDER}/steps-vllm-a", f"{FOLDER}/steps-vllm-b"),
    ),
    "sglang": (
        (f"{FOLDER}/sglang-a", f"{FOLDER}/sglang-b"),
        (f"{FOLDER}/sglang-c",),
        (f"{FOLDER}/steps-sglang-a", f"{FOLDER}/steps-sglang-b"),
    ),
    OURS: ((f"{FOLDER}/dcpbench",), (f"{FOLDER}/steps-dcpbench",)),
}
"""Folders of results/ by engine, in groups that were measured on the same GPUs within an hour."""
LAYERS = 8  # layers of the model folder; records of servers do not have the number
MAX_BATCHED_TOKENS = 8192  # prompt tokens of a step: the default of vLLM on this GPU, and a flag of SGLang
QUERY: dict[str, Any] = {
    "machine": load_machine(MEASURED_ON),
    "named": MEASURED_ON,
    "gpus": (2,),
    "weights_dtype": "fp8",
    "kv_dtype": "bf16",
    "exchanges": ("ag_rs",),
    "slo": {},
}
"""Conditions that records of servers lack. Both engines merge by `ag_rs` unless a flag names another exchange."""
CONFIG: dict[str, Any] = {  # config.json of the model that all engines served: LAYERS layers of DeepSeek-V3
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 163840,
    "vocab_size": 129280,
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}


WITHOUT, WITH = "without DCP", "with DCP"  # the two layouts of each load


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """Hold the answer for a load that was measured with and without DCP."""

    load: str
    gain: str  # measured output with DCP over that without
    forecast: str  # the same ratio from the estimates
    named: tuple[str, ...]  # recommended layouts: WITH, WITHOUT, or both if the answer is undecided
    behind: Mapping[str, float]  # relative shortfall of each layout's output from the better one

    def is_correct(self, *named: str, limit: float = NEAR) -> bool:
        """Return True if the shortfall of each of these layouts is at most `limit`."""
        return all(self.behind[side] <= limit for side in named)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """Hold the answers for a set of loads."""

    name: str
    answers: Sequence[Answer]
    scatter: float | None = None  # largest relative difference of two launches of a layout and load; None if unknown

    @property
    def correct_count(self) -> int:
        """Return the number of loads with a correct answer."""
        return sum(a.is_correct(*a.named) for a in self.answers)

    @property
    def decided_count(self) -> int:
        """Return the number of loads with one named layout."""
        return sum(len(a.named) == 1 for a in self.answers)

    @property
    def correct_in_scatter_count(self) -> int | None:
        """Return the number of loads with a correct answer if the limit is the scatter of launches; None if the scatter is unknown."""
        scatter = self.scatter
        return None if scatter is None else sum(a.is_correct(*a.named, limit=scatter) for a in self.answers)

    def count_constant(self, *named: str) -> int:
        """Return the number of loads for which an answer that always names these layouts is correct."""
        return sum(a.is_correct(*named) for a in self.answers)


def read_pairs(results: Path, engine: str) -> dict[str, list[Record]]:
    """Return the measured records of loads that an engine served in two layouts on the same GPUs, by the load's name."""
    found: dict[str, list[Record]] = {}
    for group in RUNS[engine]:
        loads: dict[str, list[Record]] = {}
        for record in (record for folder in group for record in _read_measured(results, folder)):
            loads.setdefault(_format_load(record), []).append(record)
        for name, records in loads.items():
            if len({record.point.dcp for record in records}) > 1:
                found.setdefault(name, []).extend(records)
    return found


def measure_scatter(results: Path, engine: str) -> float | None:
    """Return the largest relative difference of two launches of a layout and load on any GPUs; None if none was launched twice."""
    launches: dict[tuple[str, str], dict[str, list[float]]] = {}
    for folder in (folder for group in RUNS[engine] for folder in group):
        for record in _read_measured(results, folder):
            key = (_format_load(record), record.point.layout_name)
            launches.setdefault(key, {}).setdefault(folder, []).append(_get_tok_s(record))
    rates = [
        [statistics.median(launch_rates) for launch_rates in found.values()]
        for found in launches.values()
        if len(found) > 1
    ]
    return max((max(launch_rates) / min(launch_rates) - 1 for launch_rates in rates), default=None)


def _read_measured(results: Path, folder: str) -> list[Record]:
    """Return the successful records of a run without replays."""
    return [
        record
        for record in read_run(results / folder).records
        if record.outcome == "ok" and (record.point.load is None or record.point.load.mode == LIVE)
    ]


def score_engines(results: Path, steps: Steps) -> list[Score]:
    """Return the score of the recommendations for the loads of each engine."""
    pairs = {engine: read_pairs(results, engine) for engine in RUNS}
    choices = choose_for_loads(
        [record for loads in pairs.values() for found in loads.values() for record in found], steps
    )
    return [
        Score(
            name=parse_origin(get_origin(next(iter(loads.values()))[0])).label,
            answers=[answer_load(name, found, choices[name]) for name, found in loads.items()],
            scatter=measure_scatter(results, engine),
        )
        for engine, loads in pairs.items()
    ]


def make_query(records: Sequence[Record], folder: Path) -> tuple[list[str], Query]:
    """Return the names of the records' loads, and the query for them; write the model's config.json to `folder`."""
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    loads = {_format_load(record): _make_load(record) for record in records}
    return [*loads], Query(model=str(folder), loads=tuple(loads.values()), **QUERY)


def choose_for_loads(records: Sequence[Record], steps: Steps) -> dict[str, Choice]:
    """Return the choice for each load of these records, by the load's name."""
    with tempfile.TemporaryDirectory() as folder:
        names, query = make_query(records, Path(folder))
        choices, _ = choose_layouts(query, Evidence(), steps)
    return dict(zip(names, choices, strict=True))


def _make_load(record: Record) -> tuple[int, int, Load | None]:
    """Return the load of a record in the form of Query."""
    point, served = record.point, record.point.load
    if served is None:
        return point.concurrency, point.context, None
    load = Load(
        mode=REPLAY,
        requests=ROUNDS * point.concurrency,
        input_tokens=served.input_tokens,
        output_tokens=served.output_tokens,
        chunk=MAX_BATCHED_TOKENS,
        prefill="flashinfer",
    )
    return point.concurrency, point.context, load


def answer_load(name: str, records: Sequence[Record], choice: Choice) -> Answer:
    """Return the answer of a choice among the measured layouts; the median of several launches is used."""
    rates: dict[str, list[float]] = {}
    for record in records:
        rates.setdefault(_get_side(record.point), []).append(_get_tok_s(record))
    measured = {side: statistics.median(side_rates) for side, side_rates in rates.items()}
    names = {record.point.layout_name for record in records}
    measured_choice = dataclasses.replace(
        choice, forecasts=[f for f in choice.forecasts if f.point.layout_name in names]
    )
    expected = {_get_side(f.point): f.tok_s for f in measured_choice.forecasts}
    return Answer(
        load=name,
        gain=f"{measured[WITH] / measured[WITHOUT]:.3f}",
        forecast=f"{expected[WITH] / expected[WITHOUT]:.3f}",
        named=tuple(_get_side(f.point) for f in measured_choice.tied),
        behind=_compute_shortfalls(measured),
    )


def _compute_shortfalls(measured: Mapping[str, float]) -> dict[str, float]:
    return {side: 1 - tok_s / max(measured.values()) for side, tok_s in measured.items()}


def _get_side(point: Point) -> str:
    return WITH if point.dcp > 1 else WITHOUT


def _get_tok_s(record: Record) -> float:
    if record.serve is not None:
        return record.serve.output_tok_s
    assert record.metrics is not None
    return record.metrics.output_tok_s.median


def _format_load(record: Record) -> str:
    """Format a load as `8 × 4,000 tokens` for decode steps, and as `8 × 16000 → uniform:100-200 tokens` for a served load."""
    point = record.point
    if point.load is None:
        return f"{point.concurrency} × {point.context:,} tokens"
    return f"{point.concurrency} × {point.load.input_tokens} → {point.load.output_tokens} tokens"


def score_published(entries: Sequence[Entry]) -> Score:
    """Return the score of published loads: each gain, and both concurrencies of a crossover, of which the higher one favours DCP.

    The named layout is that with more output in the stored forecast.
    """
    return Score(name="published by others", answers=[a for entry in entries for a in _answer_entry(entry)])


def _answer_entry(entry: Entry) -> Iterator[Answer]:
    assert entry.forecast is not None
    if entry.crossover is None:
        assert entry.gain is not None
        yield Answer(
            load=f"{entry.source}, {format_load(entry)}",
            gain=f"{entry.gain:.3f}",
            forecast=f"{entry.forecast:.3f}",
            named=(WITH if entry.forecast > 1 else WITHOUT,),
            behind=_compute_shortfalls({WITH: entry.gain, WITHOUT: 1.0}),
        )
        return
    for level, best in zip(entry.crossover, (WITHOUT, WITH), strict=True):
        if level:
            yield Answer(
                load=f"{entry.source}, {level} × {entry.input_tokens} tokens",
                gain="above 1" if best == WITH else "below 1",
                forecast=f"1 at {entry.forecast:.1f}",
                named=(WITH if level >= entry.forecast else WITHOUT,),
                behind={side: 0.0 if side == best else math.inf for side in (WITHOUT, WITH)},
            )


def format_answers(score: Score) -> Iterator[str]:
    """Yield a line for each load of a score."""
    launches = "" if score.scatter is None else f", launches differ by at most {score.scatter:.1%}"
    yield f"{score.name}{launches}:"
    for a in score.answers:
        most = max(a.behind[side] for side in a.named)
        verdict = "right" if a.is_correct(*a.named) else f"wrong by {most:.1%}" if math.isfinite(most) else "wrong"
        yield f"  {a.load}: measured {a.gain}, forecast {a.forecast}; {' or '.join(a.named)}: {verdict}"


def print_scores(results: Path, steps: Steps) -> None:
    """Print the answer of each load, then the table."""
    scores = [*score_engines(results, steps), score_published(read_entries())]
    for score in scores:
        sys.stdout.writelines(f"{line}\n" for line in format_answers(score))
        if score.correct_in_scatter_count is not None:
            sys.stdout.write(
                f"  right within the scatter of launches: {score.correct_in_scatter_count} of {len(score.answers)}\n"
            )
    sys.stdout.writelines(f"{line}\n" for line in format_table(scores))


def format_table(scores: Sequence[Score]) -> Iterator[str]:
    """Yield the lines of the Markdown table of docs/recommend.md."""
    yield "| loads | number | `recommend`: right; names one layout | always tp | always dcp | always undecided |"
    yield "|---|--:|--:|--:|--:|--:|"
    for score in scores:
        constants = [score.count_constant(*sides) for sides in ((WITHOUT,), (WITH,), (WITHOUT, WITH))]
        cells = [score.name, len(score.answers), f"{score.correct_count}; {score.decided_count}", *constants]
        yield f"| {' | '.join(map(str, cells))} |"
