"""Bands of forecast latencies: computed from published errors, checked without the machine itself, absent if the median
may jump.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import msgspec
import pytest

from dcpbench.points import latency_bands
from dcpbench.points.latency_bands import EMULATED, ESTIMATED, TOGETHER, Case, find_band
from dcpbench.recommend import answer_table, estimate, forecast
from dcpbench.records.record import Emulated, Record
from dcpbench.serving import replay
from tests.unit.test_recommend import make_choice, run
from tools import latency_check

PUBLISHED = latency_bands.load_published()
DP_LIVE = "serving_4xH200/attention-dp-live_4xH200_2026-11-27"
DOCS = Path(__file__).parents[2] / "docs"


def make_case(
    machine: str,
    ttft: float = 1.0,
    itl: float = 1.0,
    share: float | None = 0.0,
    measured: float | None = 0.0,
    **fields: str,
) -> Case:
    """Return a forecast of a closed loop, estimated unless `kind` is given."""
    fields = {"kind": ESTIMATED, "source": "results/x", "forecast": "", "load": "a load", "arrival": "closed"} | fields
    return Case(**fields, machine=machine, ttft=ttft, itl=itl, mixed_share=share, mixed_share_measured=measured)  # type: ignore[arg-type]


class TestBand:
    def test_band_is_symmetric_with_the_factor_of_the_largest_error(self) -> None:
        """Measured over forecast is 0.8 and 1.1, so the factor is 1.25: 100 ms may be 80 to 125; with a further 10 %
        72.7 to 137.5.
        """
        band = find_band(
            ESTIMATED, "ttft", "closed", [make_case("a", ttft=0.8), make_case("b", ttft=1.1), make_case("b", ttft=1.0)]
        )
        assert band == latency_bands.Band(low=0.8, high=1.1, cases=3, machines=2)
        assert band.compute_ends(100.0) == pytest.approx((80.0, 125.0))
        assert band.compute_ends(100.0, error=0.1) == pytest.approx((72.7273, 137.5))

    def test_band_includes_shorter_latencies_if_all_errors_were_longer(self) -> None:
        band = find_band(ESTIMATED, "ttft", "closed", [make_case("a", ttft=1.1), make_case("b", ttft=1.25)])
        assert band is not None
        assert band.compute_ends(100.0) == pytest.approx((80.0, 125.0))

    def test_band_uses_only_cases_of_its_kind(self) -> None:
        band = find_band(ESTIMATED, "ttft", "closed", [make_case("a"), make_case("a", ttft=2.0, kind=EMULATED)])
        assert band is not None
        assert band.high == 1.0
        assert find_band(TOGETHER, "ttft", "closed", [make_case("a"), make_case("b", kind=EMULATED)]) is None

    def test_other_arrivals_count_if_own_cases_are_of_one_machine(self) -> None:
        """Closed loops ran on a and b, loads at a rate only on a, and traces nowhere."""
        cases = [make_case("a", ttft=1.1), make_case("b", ttft=1.2), make_case("a", ttft=1.5, arrival="gamma")]
        bands = [find_band(ESTIMATED, "ttft", arrival, cases) for arrival in ("closed", "gamma", "trace")]
        assert [(band.high, band.cases) for band in bands if band] == [(1.2, 2), (1.5, 3), (1.5, 3)]

    def test_no_itl_band_if_the_median_may_be_a_step_with_a_prompt(self) -> None:
        """Shares of gaps with prompts were up to 0.2 larger than estimated, so from 0.3 on they may reach one half."""
        cases = [make_case("a", itl=1.1, share=0.1, measured=0.3), make_case("b", itl=4.0, share=0.4, measured=0.45)]
        assert latency_bands.compute_max_sure_share(cases) == pytest.approx(0.3)
        band = find_band(ESTIMATED, "itl", "closed", cases, 0.29)
        assert band is not None
        assert (band.high, band.cases) == (1.1, 1), "the case at 0.4 has no number either"
        assert find_band(ESTIMATED, "itl", "closed", cases, 0.31) is None
        assert find_band(ESTIMATED, "itl", "closed", cases) is None
        assert find_band(ESTIMATED, "ttft", "closed", cases, 0.9) is not None


class TestCoverage:
    def test_coverage_uses_bands_of_the_other_machines(self) -> None:
        """a: 0.9 and 1.0 are within b's factor of 1.2. b: 1.2 is outside of a's 1.11, and 0.9 inside."""
        cases = [make_case("a", ttft=0.9), make_case("a", ttft=1.0), make_case("b", ttft=1.2), make_case("b", ttft=0.9)]
        found = latency_check.compute_coverage(ESTIMATED, "ttft", "closed", cases)
        assert (found.inside, found.cases, found.without_number) == (3, 4, 0)

    def test_coverage_of_a_single_machine_is_unknown(self) -> None:
        found = latency_check.compute_coverage(ESTIMATED, "ttft", "closed", [make_case("a"), make_case("a")])
        assert (found.inside, found.cases, found.without_number) == (0, 0, 2)


class TestPublished:
    def test_every_case_names_a_folder_of_results(self) -> None:
        root = Path(__file__).parents[2]
        folders = {root.joinpath(*Path(c.source).parts[:2]) for c in PUBLISHED}
        assert all((folder / "raw.tar.xz").is_file() for folder in folders)
        assert {c.kind for c in PUBLISHED} == {ESTIMATED, EMULATED, TOGETHER}

    def test_documents_have_the_computed_bands_and_coverage(self) -> None:
        text = (DOCS / "recommend.md").read_text(encoding="utf-8") + (DOCS / "emulation.md").read_text(encoding="utf-8")
        for line in filter(None, latency_check.format_table(list(PUBLISHED))):
            assert line in text, line

    def test_bands_of_other_machines_contain_all_forecasts_of_one_host(self) -> None:
        """Each of four GPUs forecasts four live loads, with and without `prompts`; the bounds of three replays contain
        TTFT in 16 cases.
        """
        cases = [c for c in PUBLISHED if c.forecast.startswith(f"results/{DP_LIVE}/")]
        machine = cases[0].machine
        others = [c for c in PUBLISHED if c.machine != machine]
        assert ({c.machine for c in cases}, len(cases)) == ({machine}, 32)
        for found in cases:
            for metric, ratio in (("ttft", found.ttft), ("itl", found.itl)):
                band = find_band(found.kind, metric, found.arrival, others)  # type: ignore[arg-type]
                assert band is not None
                low, high = band.compute_ends(1.0)
                assert low <= ratio <= high, found

    def test_published_case_equals_that_of_its_records(self) -> None:
        """DeepSeek-V3 on tp4·dcp4 has 48 clients with 100 to 300 tokens out, forecast by GPU 0 alone, and served."""
        (found,) = (c for c in PUBLISHED if c.forecast == f"results/{DP_LIVE}/replays/alone-0-48-100-300")
        served = read_live_load()
        (forecast,) = (r for _, r in latency_check.read_served(f"{DP_LIVE}/replays/alone-0-48-100-300"))
        ratios = [get_p50_ms(served, metric) / get_p50_ms(forecast, metric) for metric in ("ttft", "itl")]
        assert [found.ttft, found.itl] == pytest.approx(ratios, abs=1e-4)
        assert found.kind == EMULATED

    def test_estimated_case_can_be_reproduced(self) -> None:
        """The case is one of the short loads, estimated with the terms of Kimi-K2's steps."""
        assert latency_check.estimate_case(f"results/{DP_LIVE}/dcp", read_live_load()) in PUBLISHED


def read_live_load() -> Record:
    """Return the served record of 48 clients with answers of 100 to 300 tokens."""
    (found,) = (
        record
        for _, record in latency_check.read_served(f"{DP_LIVE}/dcp")
        if record.point.concurrency == 48 and record.point.load and record.point.load.output_tokens == "uniform:100-300"
    )
    return found


def get_p50_ms(record: Record, metric: str) -> float:
    """Return a median latency of a served record."""
    assert record.serve is not None
    return float(getattr(record.serve, f"{metric}_ms").p50)


class TestForecasts:
    def test_estimates_of_served_loads_have_bands(self, capsys: pytest.CaptureFixture[str]) -> None:
        words = "--machine H200 --gpus 8 --concurrency 8 --input-tokens 4000 --output-tokens uniform:300-400 --json"
        code, out, _ = run(capsys, *words.split())
        assert code == 0
        for layout in json.loads(out)["loads"][0]["rows"]:
            for name in ("ttft", "itl"):
                low, high = layout[f"{name}_p50_ms_band"]
                assert low < layout[f"{name}_ms"]["p50"] < high
        assert "made from the steps of another model" in out

    def test_no_itl_is_estimated_if_prompts_are_in_many_steps(self, capsys: pytest.CaptureFixture[str]) -> None:
        """With answers of 4 tokens nearly every gap has a prompt of another request in its step, so an ITL objective is
        unknown.
        """
        words = "--machine H200 --gpus 8 --concurrency 16 --input-tokens 2000 --output-tokens 4 --slo itl=10000 --json"
        _, out, _ = run(capsys, *words.split())
        found = json.loads(out)
        layouts = found["loads"][0]["rows"]
        assert [layout["itl_ms"]["p50"] for layout in layouts] == [None] * len(layouts)
        assert [layout["itl_p50_ms_band"] for layout in layouts] == [None] * len(layouts)
        assert all(layout["ttft_p50_ms_band"] for layout in layouts)
        assert any(text.startswith("No ITL is estimated for") and "at least" in text for text in found["unknown"])
        assert {"ITL, which is not known"} == {missed for layout in layouts for missed in layout["misses"]}

    def test_band_of_a_decode_step_is_that_of_its_output(self, capsys: pytest.CaptureFixture[str]) -> None:
        _, out, _ = run(
            capsys, *["--machine", "H200", "--gpus", "8", "--context", "4000", "--concurrency", "8", "--json"]
        )
        layout = json.loads(out)["loads"][0]["rows"][0]
        low, high = layout["itl_p50_ms_band"]
        assert high / layout["itl_ms"]["p50"] == pytest.approx(layout["itl_ms"]["p50"] / low)
        assert high / layout["itl_ms"]["p50"] - 1 >= estimate.load_published_steps().band

    def test_bands_are_corrected_with_the_estimate(self) -> None:
        estimate = dataclasses.replace(
            make_choice(100.0).forecasts[0], ttft_bounds_ms=(80.0, 120.0), itl_bounds_ms=None
        )
        corrected = forecast.apply_factor(estimate, 0.5)
        assert (corrected.ttft_bounds_ms, corrected.itl_bounds_ms) == ((160.0, 240.0), None)

    def test_cell_has_the_band(self) -> None:
        assert answer_table.format_p50(20.0, (18.0, 25.0)) == "20.0 [18.0–25.0]"
        assert answer_table.format_p50(20.0, None) == "20.0"
        assert answer_table.format_p50(None, None) == "—"


def test_bands_of_emulated_loads_include_published_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """TTFT of 100 ms: three replays give 99 to 125, and the published ratio is 0.9, so the band is 90 to 125. Without
    cases there is no band.
    """
    cases = (make_case("a", ttft=0.9, itl=0.99, kind=EMULATED), make_case("b", ttft=1.05, itl=1.2, kind=EMULATED))
    monkeypatch.setattr(latency_bands, "load_published", lambda: cases)
    record = next(
        r
        for _, r in latency_check.read_served(
            "serving_4xH200/attention-dp-live_4xH200_2026-11-27/replays/alone-0-48-100-300"
        )
    )
    assert record.serve is not None
    assert record.emulated is not None
    found = msgspec.structs.replace(
        record.serve,
        ttft_ms=msgspec.structs.replace(record.serve.ttft_ms, p50=100.0),
        itl_ms=msgspec.structs.replace(record.serve.itl_ms, p50=10.0),
    )
    spans = {"ttft_p50_ms_low": 99.0, "ttft_p50_ms_high": 125.0, "itl_p50_ms_low": 8.0, "itl_p50_ms_high": 10.3}
    assert replay._widen_spans(spans, found, record.emulated, record.point) == pytest.approx(
        {"ttft_p50_ms_low": 90.0, "ttft_p50_ms_high": 125.0, "itl_p50_ms_low": 8.0, "itl_p50_ms_high": 12.0}
    )
    together = msgspec.structs.replace(record.emulated, prompts=((128, 1.01),))
    assert isinstance(together, Emulated)
    assert replay._widen_spans(spans, found, together, record.point) == {}
