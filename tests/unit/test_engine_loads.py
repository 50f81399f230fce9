"""tools/engine_loads.py: what is asked, what counts as right, and the table of docs/recommend.md."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dcpbench.cli import main
from dcpbench.errors import UsageError
from dcpbench.models import load_shape
from dcpbench.recommend import advise
from dcpbench.recommend.estimate import load_published_steps
from dcpbench.records.runs import read_run
from tools import engine_loads
from tools.engine_loads import RUNS, WITH, WITHOUT, Answer, Score
from tools.published_crossovers import Entry, read_entries
from tools.results import unpack_all

if TYPE_CHECKING:
    from dcpbench.recommend.advise import Query

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "recommend.md"
RESULTS = unpack_all()
COMMAND = "--machine H200 --gpus 2 --weights-dtype fp8 --exchange ag_rs --concurrency 8,32"


@pytest.fixture(scope="module")
def scores() -> list[Score]:
    """Return the scores of all engines."""
    return engine_loads.score_engines(RESULTS, load_published_steps())


def test_the_model_is_that_of_deepseek_v3_with_eight_layers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(engine_loads.CONFIG))
    found = load_shape(str(tmp_path))
    assert found == dataclasses.replace(load_shape("deepseek-v3"), layers=8, name=found.name, mtp_layers=0)


@pytest.mark.parametrize(
    ("load", "number"),
    [("--input-tokens 16000 --output-tokens uniform:100-200", 2), ("--context 4000,16000,32000,128000", 8)],
)
def test_query_for_a_load_is_that_of_a_command_line(
    load: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries: list[Query] = []

    def note(query: Query, *_: object) -> None:
        queries.append(query)
        raise UsageError("enough")

    records = [r for engine in RUNS for found in engine_loads.read_pairs(RESULTS, engine).values() for r in found]
    _, query = engine_loads.make_query(records, tmp_path)
    monkeypatch.setattr(advise, "choose_layouts", note)
    with pytest.raises(SystemExit):
        main(["recommend", "--model", str(tmp_path), *COMMAND.split(), *load.split(), "--json"])
    (typed,) = queries
    assert dataclasses.replace(typed, loads=(), typed=frozenset()) == dataclasses.replace(query, loads=())
    assert len(typed.loads) == number
    assert all(load in query.loads for load in typed.loads)


def test_no_load_is_part_of_the_fit() -> None:
    fitted = {ROOT / run for run in load_published_steps().sources}
    served = {RESULTS / folder for of in RUNS.values() for group in of for folder in group}
    assert served
    assert not fitted & served
    times = {record.started_at for run in fitted for record in read_run(run).records}
    assert not times & {record.started_at for folder in served for record in read_run(folder).records}


def test_loads_are_paired_within_a_group_of_runs() -> None:
    """SGLang's third run has no layout with DCP, so its launches count for the difference of launches alone."""
    found = engine_loads.read_pairs(RESULTS, "sglang")
    assert sorted(len(records) for records in found.values()) == [2, 2, 2, 2, 2, 3]
    assert all({record.point.dcp for record in records} == {1, 2} for records in found.values())
    assert engine_loads.measure_scatter(RESULTS, "sglang") == pytest.approx(438.41 / 421.81 - 1, abs=1e-4)
    assert engine_loads.measure_scatter(RESULTS, "dcpbench") is None


def test_at_least_ten_loads_of_real_engines_are_scored(scores: list[Score]) -> None:
    names = [score.name for score in scores]
    assert names == ["vLLM 0.26.0", "SGLang 0.5.17", "dcpbench"]
    real = scores[:2]
    assert sum(len(score.answers) for score in real) == 15
    assert all(score.correct_count >= len(score.answers) - 1 for score in real)
    assert all(score.count_constant(WITHOUT) == len(score.answers) for score in real), "the page says that tp2 is right"


def test_the_page_has_the_table(scores: list[Score]) -> None:
    """`python -m tools.recommend_check --engines` prints it."""
    text = PAGE.read_text(encoding="utf-8")
    for line in engine_loads.format_table([*scores, engine_loads.score_published(read_entries())]):
        assert f"  {line}\n" in text


def test_an_answer_is_right_if_each_named_layout_is_near_the_best() -> None:
    """DCP is 4 % behind: naming both is right within launches that differ by 5 %, and wrong within 3 %."""
    answer = Answer(load="", gain="", forecast="", named=(WITHOUT, WITH), behind={WITHOUT: 0.0, WITH: 0.04})
    found = Score(
        name="", answers=[answer, dataclasses.replace(answer, named=(WITHOUT,), behind={WITHOUT: 0.02, WITH: 0.0})]
    )
    assert (found.correct_count, found.decided_count, found.correct_in_scatter_count) == (1, 1, None)
    assert dataclasses.replace(found, scatter=0.05).correct_in_scatter_count == 2
    assert [found.count_constant(*same) for same in ((WITHOUT,), (WITH,), (WITHOUT, WITH))] == [2, 1, 1]
    assert ["right" in line for line in [*engine_loads.format_answers(found)][1:]] == [False, True]


@pytest.mark.parametrize(
    ("forecast", "right"),
    [(10.0, [True, True]), (8.0, [False, True]), (16.0, [True, True]), (17.0, [True, False]), (4.0, [False, True])],
)
def test_a_crossover_is_two_loads_of_which_dcp_is_ahead_at_the_higher(forecast: float, right: list[bool]) -> None:
    entry = Entry(
        source="", url="", read="", model="kimi-k2", machine="B200", weights_dtype="fp8", layout=(8, 1, 8),
        baseline=(8, 1, 1), input_tokens="32768", crossover=(8, 16), forecast=forecast,
    )  # fmt: skip
    found = engine_loads.score_published([entry])
    assert [answer.is_correct(*answer.named) for answer in found.answers] == right
    assert (found.count_constant(WITH), found.count_constant(WITHOUT)) == (1, 1)


@pytest.mark.parametrize(("gain", "forecast", "right"), [(1.5, 1.1, 1), (1.5, 0.9, 0), (1.0, 0.9, 1), (0.8, 0.9, 1)])
def test_a_published_gain_is_a_load(gain: float, forecast: float, right: int) -> None:
    entry = Entry(
        source="", url="", read="", model="kimi-k2", machine="B200", weights_dtype="fp8", layout=(8, 1, 8),
        baseline=(8, 1, 1), input_tokens="4000", output_tokens="1500", concurrency=8, gain=gain, forecast=forecast,
    )  # fmt: skip
    assert engine_loads.score_published([entry]).correct_count == right
