"""tools/replay_live.py: its loads and comparisons."""

from pathlib import Path

import pytest

from tools import replay_live as tool


def test_open_loop_rates_are_shares_of_the_highest_served_rate() -> None:
    """0.5, 0.7 and 0.95 of 10 requests/s."""
    assert tool.compute_open_rates(10.0) == (5.0, 7.0, 9.5)


@pytest.mark.parametrize("job", tool.LOADS)
def test_loads_differ_from_the_load_of_the_step_times(job: str) -> None:
    """Lengths and seed differ."""
    build = tool.list_options("deepseek-v3", tool.BUILD)
    load = tool.list_options("deepseek-v3", job, (1.0, 2.0, 3.0))
    assert "seed=7" in build
    assert "seed=7" not in load
    at = build.index("--input-tokens") + 1
    assert load[load.index("--input-tokens") + 1] != build[at]


def test_each_model_has_enough_requests() -> None:
    """Only the tiny model of rehearsals may have fewer than 200 requests."""
    assert all(size.requests >= tool.MIN_REQUESTS for name, size in tool.SIZES.items() if name != "tiny")


def test_table_of_an_empty_folder_compares_nothing(tmp_path: Path) -> None:
    """The table states that instead of failing."""
    assert "0 of 0 loads are within the limits" in tool.format_table(tmp_path)[-1]
    assert "nothing yet" in tool.format_table(tmp_path)[0]


def test_job_without_records_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder of the job exists, but has no record."""
    (tmp_path / "live-tiny-open").mkdir()
    assert not tool.read_records(tmp_path / "live-tiny-open")
    assert "live-tiny-open" in capsys.readouterr().out
