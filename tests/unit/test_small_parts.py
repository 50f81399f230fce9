"""Test parts of formulas and searches separately, each with its arithmetic."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from dcpbench.commands.machines import machines
from dcpbench.compare.resampling import compute_request_block_length, estimate_pooled_error
from dcpbench.plan import grid, spec
from dcpbench.points.cluster_specs import LINKS
from dcpbench.points.device_probe import Probe
from dcpbench.points.sizes import format_size
from dcpbench.recommend.score import Load, Score
from dcpbench.servers import load
from dcpbench.serving.step_cases import Extent
from dcpbench.serving.step_times import Case, Chunks, Decodes
from dcpbench.syncs.traces.python_lines import Repository, parse_frame
from tests.unit.probes import CPU

GPU = Probe(device="cuda", count=4, name="NVIDIA H200", memory_bytes=141 << 30)


class TestPooled:
    def test_block_length_is_twice_the_cube_root_and_at_most_a_fourth(self) -> None:
        assert [compute_request_block_length(n) for n in (1, 8, 27, 64, 1000)] == [1, 2, 6, 8, 20]

    def test_quantile_of_equal_groups_is_certain(self) -> None:
        """Every request has the same gaps: for any draw, the median is 2."""
        error = estimate_pooled_error([np.array([1.0, 2.0, 3.0])] * 20, 0.5, 0)
        assert error is not None
        assert error.variance == pytest.approx(0.0)

    def test_many_samples_are_thinned_evenly(self) -> None:
        """The 400,000 samples of 10 requests are thinned to 200,000, with about the same error."""
        rng = np.random.default_rng(0)
        groups = [rng.exponential(1 + 0.1 * i, 40_000) for i in range(10)]
        many, few = estimate_pooled_error(groups, 0.9, 0), estimate_pooled_error([g[::2] for g in groups], 0.9, 0)
        assert many is not None
        assert few is not None
        assert many.variance == pytest.approx(few.variance, rel=0.1)


class TestExtent:
    EXTENT = Extent(requests=4, context=100, pages=10, virtual_page=16, chunk=64)

    @pytest.mark.parametrize(
        ("case", "fits"),
        [
            (Case(decodes=(Decodes(requests=4, context=32),)), True),
            (Case(decodes=(Decodes(requests=5, context=16),)), False),
            (Case(decodes=(Decodes(requests=3, context=48),)), True),
            (Case(decodes=(Decodes(requests=3, context=49),)), False),
            (Case(decodes=(Decodes(requests=1, context=100),)), True),
            (Case(decodes=(Decodes(requests=1, context=101),)), False),
            (Case(chunks=(Chunks(chunks=2, tokens=32, prefix=32),)), True),
            (Case(chunks=(Chunks(chunks=2, tokens=33, prefix=16),)), False),
            (Case(chunks=(Chunks(chunks=1, tokens=20, prefix=81),)), False),
            (Case(decodes=(Decodes(requests=1, context=16),), chunks=(Chunks(chunks=3, tokens=21, prefix=0),)), True),
        ],
    )
    def test_extent_requires_enough_slots_pages_context_and_chunk(self, case: Case, fits: bool) -> None:
        """The extent is 4 requests, 10 pages of 16, 100 tokens each, and 64 in a chunk."""
        assert self.EXTENT.supports_case(case) is fits

    def test_shared_pages_need_no_capacity(self) -> None:
        case = Case(decodes=(Decodes(requests=3, context=49),))
        assert dataclasses.replace(self.EXTENT, shared=True).supports_case(case)

    def test_case_text_describes_its_step(self) -> None:
        case = Case(decodes=(Decodes(requests=47, context=5500),), chunks=(Chunks(chunks=1, tokens=2048, prefix=1256),))
        assert str(case) == "47 × 1 token at 5,500 + 1 × 2,048 tokens at 1,256"
        assert case.requests == 48


class TestScore:
    SCORE = Score(
        loads=[
            Load(name="a", measured={"x": 100.0, "y": 80.0}, forecast={"x": 110.0, "y": 100.0}),
            Load(name="b", measured={"x": 50.0, "y": 60.0}, forecast={"x": 50.0, "y": 48.0}),
        ]
    )

    def test_score_has_errors_of_points_and_of_ratios(self) -> None:
        """The errors are (110 / 100) / (100 / 80) - 1 = -0.12, and (50 / 48) / (50 / 60) - 1 = 0.25."""
        assert self.SCORE.errors == pytest.approx([0.1, 0.25, 0.0, -0.2])
        assert self.SCORE.ratio_errors == pytest.approx([-0.12, 0.25])

    def test_choices_within_three_percent_of_the_best_are_right(self) -> None:
        one = Load(name="a", measured={"x": 100.0, "y": 97.0, "z": 96.9}, forecast={"x": 1.0, "y": 2.0, "z": 1.5})
        assert (one.best, one.picked) == ("x", "y")
        assert [one.is_right(who) for who in ("x", "y", "z", "none")] == [True, True, False, False]

    def test_best_constant_choice_is_most_often_right(self) -> None:
        assert self.SCORE.constant == ("x", 1)
        assert self.SCORE.winners == {"x": 1, "y": 1}


class TestDefaults:
    def test_default_on_cpu_is_the_tiny_model_at_two_loads(self) -> None:
        found = spec.get_defaults(CPU)
        assert (found["model"], found["tp"], found["concurrency"], found["context"]) == (
            ("tiny",),
            (8,),
            (2, 8),
            (100,),
        )
        assert (found["page_size"], found["dtype"]) == (1, "fp32")

    def test_default_on_gpus_is_v3_on_all_of_them(self) -> None:
        found = spec.get_defaults(GPU)
        assert (found["model"], found["tp"], found["concurrency"]) == (("deepseek-v3",), (4,), (8, 32, 48))

    def test_link_rates_are_the_published_ones(self) -> None:
        """The links have 400 and 800 Gb/s for each GPU."""
        assert {link.name: (link.bytes_s, link.latency_us) for link in LINKS} == {
            "rdma-400": (50e9, 4.0),
            "rdma-800": (100e9, 4.0),
        }

    @pytest.mark.parametrize(("dp", "dcp", "baseline"), [(1, 4, (1, 1)), (2, 2, (2, 1)), (4, 1, (1, 1))])
    def test_baseline_has_no_dcp_and_its_own_baseline_no_dp(self, dp: int, dcp: int, baseline: tuple[int, int]) -> None:
        options = {"tp": (4,), "dp": (dp,), "dcp": (dcp,), "baseline": True}
        sweep = spec.make_spec(options, GPU)
        point = next(c.point for c in grid.expand_grid(sweep, GPU) if (c.point.dp, c.point.dcp) == (dp, dcp))
        found = grid._make_baseline(point)
        assert (found.dp, found.dcp, found.exchange) == (*baseline, "none")


@pytest.mark.parametrize(("text", "seconds"), [("5 2500000000 7", 2.5), ("x y z", None), ("5", None)])
def test_starved_time_is_the_second_number_of_schedstat(
    text: str, seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number is in nanoseconds."""
    monkeypatch.setattr(Path, "read_text", lambda _: text)
    assert load.read_starved_s() == seconds


def test_caller_of_a_library_is_the_innermost_frame_outside_libraries(tmp_path: Path) -> None:
    """Frames are sorted outermost first; a site with frames of libraries only has no caller."""
    (tmp_path / "own.py").touch()
    own, library = parse_frame("own.py(3): main"), parse_frame("/usr/lib/python3/dist-packages/torch/x.py(5): f")
    repository = Repository(tmp_path)
    assert repository.find_caller([own, own, library, library], 3) == 1
    assert repository.find_caller([library, library, own], 1) is None
    assert repository.find_caller([library, own], 1) is None


def test_machines_and_plans_agree_on_the_memory_of_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """The memory of an H100 is 79.18 GiB, rounded down in both."""
    machines(as_json=False)
    h100 = next(line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["H100"])
    assert format_size(spec.make_planned_probe("H100", 8).memory_bytes or 0) in h100
