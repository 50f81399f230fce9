"""tools/replay_live.py: what it asks for and how it compares, by hand."""

from pathlib import Path

import pytest

from tools import replay_live as tool


def test_open_loops_come_at_shares_of_the_most_that_is_served() -> None:
    """10 requests/s at most: 0.5, 0.7 and 0.95 of them."""
    assert tool.open_rates(10.0) == (5.0, 7.0, 9.5)


@pytest.mark.parametrize("job", tool.LOADS)
def test_no_load_is_the_one_that_the_step_times_come_from(job: str) -> None:
    """Neither its lengths nor its seed."""
    build = tool.words("deepseek-v3", tool.BUILD)
    load = tool.words("deepseek-v3", job, (1.0, 2.0, 3.0))
    assert "seed=7" in build
    assert "seed=7" not in load
    at = build.index("--input-tokens") + 1
    assert load[load.index("--input-tokens") + 1] != build[at]


def test_each_model_has_as_many_requests_as_the_bars_ask_for() -> None:
    """Each model has at least 200 requests, except the tiny model of rehearsals."""
    assert all(size.requests >= tool.ENOUGH for name, size in tool.SIZES.items() if name != "tiny")


def test_a_folder_without_runs_compares_nothing(tmp_path: Path) -> None:
    """The table says so instead of failing."""
    assert "0 of 0 loads hold" in tool.table(tmp_path)[-1]
    assert "nothing yet" in tool.table(tmp_path)[0]


def test_a_job_cut_off_before_its_first_point_has_measured_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder is there and holds no record, which is said."""
    (tmp_path / "live-tiny-open").mkdir()
    assert not tool.records(tmp_path / "live-tiny-open")
    assert "live-tiny-open" in capsys.readouterr().out
