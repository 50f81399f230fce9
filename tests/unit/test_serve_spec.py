"""Test which points `serve` expands to, which it rejects for which get_reason, and the KV pool of each."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec
import pytest

from dcpbench.errors import CapacityError, DcpbenchError, MissingPackageError, UsageError
from dcpbench.launch.progress import format_point_names, format_rejected
from dcpbench.models import SHAPES, load_shape
from dcpbench.plan import grid
from dcpbench.plan.serve_spec import SERVE_PARSERS, ServeLoads, find_short_slos, make_serve_spec, resolve_step_times
from dcpbench.plan.spec import read_options
from dcpbench.points import budget, memory
from dcpbench.points.layout import Layout
from dcpbench.points.memory import GIB
from dcpbench.points.names import CLOSED, GAMMA, MOE_TP, TRACE
from dcpbench.records.stats import compute_min_samples, find_highest_percentile
from dcpbench.serving.load_words import ANSWERS, CPU_ANSWERS, format_varied_lengths, is_lock_step, parse_lengths
from dcpbench.serving.loads import draw_arrival_times, draw_lengths
from tests.unit.probes import CPU, H200X4

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dcpbench.points.device_probe import Probe
    from dcpbench.points.point import Load


def expand(probe: Probe = CPU, **options: object) -> list[grid.Candidate]:
    """Return the candidates of options given as on the command line, without baselines."""
    return grid.expand_grid(make_serve_spec({"baseline": False, **options}, probe), probe)


def list_loads(probe: Probe = CPU, **options: object) -> list[Load]:
    """Return the loads of the points of these options."""
    found = [c.point.load for c in expand(probe, **options)]
    return [load for load in found if load is not None]


def get_reason(probe: Probe = CPU, **options: object) -> str:
    """Return the reason why the only point of these options cannot run."""
    (found,) = expand(probe, **options)
    return str(found.error)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Write a trace of four requests with times, with 20 to 50 tokens each."""
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,10,10\n1,20,10\n2,30,10\n3,40,10\n")
    return path


class TestPoints:
    def test_loads_are_sorted_from_the_smallest_to_the_largest(self) -> None:
        """Loads are sorted by length of prompts, then by rate."""
        found = list_loads(request_rate="2,0.5,1", input_tokens="300,20")
        assert [(load.input_tokens, load.request_rate) for load in found] == [
            ("20", 0.5),
            ("20", 1),
            ("20", 2),
            ("300", 0.5),
            ("300", 1),
            ("300", 2),
        ]

    def test_default_load_on_gpus(self) -> None:
        """The default is 768 requests of 4,000 tokens in and 1,350 to 1,650 out, with a mean of 1,500, for 8, 32 and 48
        clients.
        """
        found = grid.expand_grid(make_serve_spec({}, H200X4), H200X4)
        assert [(c.point.dcp, c.point.concurrency, c.added) for c in found] == [
            (1, 8, True),
            (1, 32, True),
            (1, 48, True),
            (4, 8, False),
            (4, 32, False),
            (4, 48, False),
        ]
        load = found[0].point.load
        assert load is not None
        assert (load.requests, load.input_tokens, load.output_tokens, load.chunk) == (
            768,
            "4000",
            format_varied_lengths(1500),
            8192,
        )
        assert (load.mode, load.arrival, load.policy, load.prefill) == ("live", CLOSED, "mixed", "flashinfer")
        context = 4000 + int(draw_lengths(load)[1].max())
        assert {(c.point.workload, c.point.context, c.error) for c in found} == {("serve", context, None)}

    @pytest.mark.parametrize("probe", [CPU, H200X4])
    def test_default_clients_do_not_run_in_lock_step(self, probe: Probe) -> None:
        """With answers of one length, they would."""
        for found in expand(probe):
            load = found.point.load
            assert load is not None
            assert not is_lock_step(load, found.point.concurrency)
            assert is_lock_step(msgspec.structs.replace(load, output_tokens="8"), found.point.concurrency)

    def test_default_load_on_cpu_is_small(self) -> None:
        (found,) = expand()
        assert (found.point.model, found.point.tp, found.point.dcp, found.point.concurrency) == ("tiny", 4, 4, 4)
        assert found.point.load is not None
        assert (found.point.load.input_tokens, found.point.load.output_tokens) == ("32", CPU_ANSWERS)
        assert found.point.context == 32 + parse_lengths("--output-tokens", CPU_ANSWERS).high

    def test_lengths_are_axes(self) -> None:
        """The order is that of the longest request: 11, 12, 12 and 13 tokens."""
        found = list_loads(input_tokens="10,uniform:5-9", output_tokens="2,3")
        assert [(x.input_tokens, x.output_tokens) for x in found] == [
            ("uniform:5-9", "2"),
            ("10", "2"),
            ("uniform:5-9", "3"),
            ("10", "3"),
        ]

    def test_equal_lengths_in_different_notations_are_one_point(self) -> None:
        assert [x.input_tokens for x in list_loads(input_tokens="010,10")] == ["10"]

    def test_context_is_the_length_of_the_longest_drawn_request(self) -> None:
        """The 16 prompts have 5 to 9 tokens, one of them 9, and 3 tokens out."""
        (found,) = expand(input_tokens="uniform:5-9", output_tokens=3)
        assert found.point.context == 12

    def test_rates_are_an_axis_of_open_loops(self) -> None:
        found = expand(request_rate="0.5,2")
        assert [(c.point.load.arrival, c.point.load.request_rate) for c in found] == [(GAMMA, 0.5), (GAMMA, 2.0)]

    def test_request_rate_inf_sends_all_requests_at_once(self) -> None:
        """The 16 requests are a closed loop of 16 clients; --concurrency 3 makes it one of 3, as --max-concurrency of
        vLLM's bench does.
        """
        for options, clients in (({}, 16), ({"concurrency": 3}, 3), ({"turns": "4"}, 4)):
            (found,) = expand(request_rate="inf", **options)
            load = found.point.load
            assert load is not None
            assert (load.arrival, load.request_rate, load.paced) == (CLOSED, None, False)
            assert (found.point.concurrency, found.point.clients) == (clients, clients)
            assert draw_arrival_times(load)[0] is None

    def test_request_rate_inf_can_be_combined_with_other_rates(self) -> None:
        found = expand(request_rate="2,inf")
        assert [(c.point.load.arrival, c.point.load.request_rate) for c in found] == [(CLOSED, None), (GAMMA, 2.0)]

    def test_request_rate_inf_sends_the_requests_of_a_file_at_once(self, trace: Path) -> None:
        (found,) = expand(requests=str(trace), request_rate="inf")
        assert found.point.load is not None
        assert (found.point.load.arrival, found.point.concurrency) == (CLOSED, found.point.load.requests)

    def test_counts_can_be_given_in_thousands(self) -> None:
        """The suffix k is 1,000, as in vLLM's --max-model-len 64k."""
        (found,) = expand(H200X4, num_requests="1k", concurrency="8", input_tokens="64k", chunk="8k", model="kimi-k2")
        load = found.point.load
        assert load is not None
        assert (load.requests, load.input_tokens, load.chunk) == (1000, "64000", 8000)

    def test_open_loop_concurrency_is_limited_by_layout_requests_and_option(self) -> None:
        """The limit is 512 for each replica, or all requests if they are fewer; --concurrency limits it further."""
        assert [c.point.concurrency for c in expand(request_rate=2, num_requests=2000, dp="1,2", tp=4)] == [512, 1024]
        assert [c.point.concurrency for c in expand(request_rate=2)] == [16]
        assert [c.point.concurrency for c in expand(request_rate=2, concurrency="3,5")] == [3, 5]

    def test_every_load_option_sets_its_field(self) -> None:
        (found,) = list_loads(
            num_requests=40,
            prefix_share=0.5,
            prefix_groups=3,
            policy="prefill-first",
            chunk=128,
            prefix_cache=False,
            mode="replay",
            seed=7,
            request_rate=2,
            burstiness=0.5,
        )
        assert (found.requests, found.prefix_share, found.prefix_groups, found.policy) == (40, 0.5, 3, "prefill-first")
        assert (found.chunk, found.prefix_cache, found.mode, found.seed) == (128, False, "replay", 7)
        assert (found.request_rate, found.burstiness) == (2.0, 0.5)

    def test_settings_have_the_options_that_all_points_share(self, trace: Path) -> None:
        spec = make_serve_spec(
            {"slo": "ttft=500", "limit_seconds": "60", "requests": str(trace), "profile": False}, CPU
        )
        assert (spec.settings.slo, spec.settings.limit_seconds) == ({"ttft": 500.0}, 60.0)
        assert (spec.settings.trace_path, spec.settings.profile) == (str(trace), False)

    def test_num_requests_shortens_the_load(self) -> None:
        (found,) = list_loads(num_requests="5")
        assert found.requests == 5
        assert make_serve_spec({"num_requests": 5}, CPU).settings.limit_seconds is None

    def test_default_concurrency_does_not_exceed_the_number_of_requests(self) -> None:
        assert [c.point.concurrency for c in expand(num_requests=3)] == [3]
        assert [c.point.concurrency for c in expand(H200X4, num_requests=40)] == [8, 32]

    def test_baselines_serve_the_same_load(self) -> None:
        one, two = grid.expand_grid(make_serve_spec({"request_rate": 2}, CPU), CPU)
        assert (one.point.dcp, two.point.dcp, one.added) == (1, 4, True)
        assert one.point.load == two.point.load

    def test_serve_points_have_a_name_and_a_table_row(self) -> None:
        (found,) = expand()
        name = f"tiny tp4·dcp4 reference ag_rs, 4 clients, 16 × 32→{CPU_ANSWERS} tokens"
        assert grid.format_point_name(found.point) == name
        (row,) = grid.make_table([found])
        assert (row["workload"], row["load"]["requests"]) == ("serve", 16)

    def test_points_with_different_loads_have_different_keys(self) -> None:
        one, two = (expand(seed=seed)[0].point.get_key() for seed in (0, 1))
        assert one != two


class TestTraces:
    def test_trace_with_times_is_an_open_loop(self, trace: Path) -> None:
        (found,) = expand(requests=str(trace))
        load = found.point.load
        assert (load.arrival, load.requests, load.trace, load.input_tokens) == (TRACE, 4, "trace.csv", "trace")
        assert (found.point.context, found.point.concurrency) == (50, 4)
        assert len(load.trace_sha256) == 64

    def test_trace_with_concurrency_or_rate_is_a_closed_or_gamma_loop(self, trace: Path) -> None:
        assert [x.arrival for x in list_loads(requests=str(trace), concurrency=2)] == [CLOSED]
        assert [x.arrival for x in list_loads(requests=str(trace), request_rate=2)] == [GAMMA]

    def test_request_file_without_times_is_a_closed_loop(self, tmp_path: Path) -> None:
        path = tmp_path / "r.jsonl"
        path.write_text('{"input_tokens": 3, "output_tokens": 4}\n' * 9)
        assert [(c.point.load.arrival, c.point.concurrency) for c in expand(requests=str(path))] == [(CLOSED, 4)]

    def test_num_requests_takes_the_first_requests_of_a_file(self, trace: Path) -> None:
        (found,) = expand(requests=str(trace), num_requests=2)
        assert (found.point.load.requests, found.point.context) == (2, 30)

    @pytest.mark.parametrize("name", ["input_tokens", "output_tokens"])
    def test_lengths_of_a_request_file_exclude_the_length_options(self, trace: Path, name: str) -> None:
        with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} and --requests .* contradict each other"):
            expand(requests=str(trace), **{name: 5})

    def test_prefix_groups_of_a_file_require_prefix_share(self, tmp_path: Path) -> None:
        path = tmp_path / "r.jsonl"
        path.write_text('{"input_tokens": 3, "output_tokens": 4, "prefix_group": 1}\n')
        with pytest.raises(UsageError, match=r"for example --prefix-share 0\.5"):
            expand(requests=str(path))
        assert list_loads(requests=str(path), prefix_share=0.5)

    def test_groups_next_to_prompts_are_refused_once(self, tmp_path: Path) -> None:
        """Refuse the file with --prefix-share, too, as no value would be right."""
        path = tmp_path / "r.jsonl"
        path.write_text(
            '{"input_tokens": 3, "output_tokens": 4, "prefix_group": 1}\n{"prompt": [3], "output_tokens": 4}\n'
        )
        for share in (None, 0.5):
            with pytest.raises(UsageError, match="prefix_group in some requests, and prompt or hash_ids in others"):
                expand(requests=str(path), prefix_share=share)

    def test_prefix_hashes_of_a_file_exclude_prefix_share(self, tmp_path: Path) -> None:
        path = tmp_path / "r.jsonl"
        path.write_text('{"timestamp": 0, "input_length": 512, "output_length": 4, "hash_ids": [1]}\n')
        with pytest.raises(UsageError, match="states what its prompts share; leave --prefix-share out"):
            expand(requests=str(path), prefix_share=0.5)

    def test_token_ids_of_a_file_must_be_within_the_vocabulary(self, tmp_path: Path) -> None:
        path = tmp_path / "r.jsonl"
        path.write_text('{"prompt": [512], "output_tokens": 4}\n')
        with pytest.raises(UsageError, match="token id 512, and tiny has 512 of them"):
            expand(requests=str(path))

    def test_too_long_request_of_a_file_does_not_reject_the_point(self, tmp_path: Path) -> None:
        """The model has 65,536 positions; the scheduler rejects the second request, and the point runs."""
        path = tmp_path / "r.csv"
        path.write_text("input_tokens,output_tokens\n10,10\n65537,10\n")
        (found,) = expand(requests=str(path))
        assert (found.error, found.point.context) == (None, 65536)


def test_step_times_folder_is_refused_with_a_file_in_it(tmp_path: Path) -> None:
    """A run's folder and its step-times/ are both refused."""
    with pytest.raises(UsageError, match="is a folder; name a file below step-times/ of a run"):
        expand(mode="replay", step_times=str(tmp_path))
    file = tmp_path / "step-times" / "a.json"
    file.parent.mkdir()
    file.write_text("{}")
    for folder in (tmp_path, file.parent):
        with pytest.raises(UsageError) as e:
            expand(mode="replay", step_times=str(folder))
        assert str(e.value).endswith(f"is a folder; name a file in it, such as {file}.")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"request_rate": "0"}, "--request-rate 0 is not a positive number of requests per second; try"),
        ({"request_rate": "-1"}, "--request-rate -1 is not"),
        ({"request_rate": "-inf"}, "try --request-rate 2, or --request-rate inf for all requests at once."),
        ({"request_rate": "inf", "burstiness": 2}, "--request-rate inf has none; leave --burstiness out."),
        ({"request_rate": "nan"}, "--request-rate nan is not"),
        ({"request_rate": "fast"}, "--request-rate fast: not a number; write for example --request-rate 0.5,2"),
        ({"request_rate": ""}, "--request-rate is empty"),
        ({"request_rate": True}, "--request-rate True: not a number"),
        ({"burstiness": 0, "request_rate": 1}, "--burstiness 0 is no number from 0.001 on"),
        ({"burstiness": 1e-300, "request_rate": 1}, "--burstiness 1e-300 is no number from 0.001 on"),
        ({"burstiness": "x", "request_rate": 1}, "--burstiness x: not a number; write for example --burstiness 0.5"),
        ({"request_rate": "1e-308"}, "the last of 16 requests would come after years"),
        ({"burstiness": 2}, "--burstiness shapes --request-rate, which was not given"),
        ({"prefix_share": 1}, "--prefix-share 1 is not a share"),
        ({"prefix_share": -0.1}, "--prefix-share -0.1 is not a share"),
        ({"prefix_groups": 2}, "--prefix-share groups without a share"),
        ({"prefix_groups": 0, "prefix_share": 0.5}, "--prefix-share groups=0 is not positive"),
        ({"num_requests": 0}, "--num-requests 0 is not positive"),
        ({"num_requests": 10**11}, "which would not fit in memory"),
        ({"num_requests": "9" * 5000}, "not a whole number; write for example --num-requests 1000"),
        ({"prefix_share": "50%"}, "--prefix-share 50%: not a number; write for example --prefix-share 0.5"),
        ({"chunk": "2x"}, "--prefill chunk=2x: not a whole number; write for example --prefill chunk=8192"),
        (
            {"chunk": "2K"},
            "--prefill chunk=2K: K is 1,000 in some tools and 1,024 in others; write 2000 (or 2k), or 2048.",
        ),
        ({"input_tokens": "64K"}, "--input-tokens 64K: K is 1,000 in some tools and 1,024 in others; write 64000"),
        ({"mode": ""}, "--mode is empty; write for example --mode replay"),
        ({"slo": ""}, "--slo is empty"),
        (
            {"concurrency": "4", "num_requests": "2"},
            "more than there are requests (2); use --num-requests 40",
        ),
        ({"concurrency": "0"}, "--concurrency 0 is not positive"),
        ({"concurrency": "17"}, "--concurrency 17 is more than there are requests (16)"),
        ({"seed": -1}, "--requests seed=-1 is negative"),
        ({"chunk": 0}, "--prefill chunk=0 is not positive"),
        ({"policy": "fair"}, "--prefill policy=fair is unknown. Known: mixed, prefill-first"),
        ({"prefill": "flashinfr"}, "did you mean flashinfer?"),
        ({"mode": "reply"}, "--mode reply is unknown; did you mean replay?"),
        ({"step_times": "x.json"}, "--step-times x.json is for replays alone; add --mode replay"),
        ({"step_times": "x.json", "mode": "replay"}, "--step-times x.json: no such file"),
        ({"input_tokens": "uniform:9-4"}, "--input-tokens uniform:9-4: 9 is more than 4"),
        (
            {"output_tokens": "4,,5"},
            "--output-tokens '4,,5' has an empty entry; write a comma list such as --output-tokens 500,1500",
        ),
        ({"limit_seconds": "-5"}, "--timeout load=-5 is not a positive number"),
        ({"slo": "p99=3"}, "--slo p99: not one of ttft"),
        ({"requests": "none.jsonl"}, "--requests none.jsonl cannot be read"),
    ],
    ids=lambda x: "-".join(f"{k}={v}" for k, v in x.items()) if isinstance(x, dict) else "",
)
def test_invalid_options_are_refused_before_anything_runs(options: dict[str, object], expected: str) -> None:
    with pytest.raises(UsageError) as e:
        expand(**options)
    assert expected in str(e.value)


class TestRejections:
    def test_more_output_than_positions_is_refused(self) -> None:
        """The request has 32 + 65,536 tokens, and the model 65,536 positions."""
        assert get_reason(output_tokens=65536) == (
            "requests of --input-tokens 32 --output-tokens 65536, 65,568 tokens together, pass tiny's 65,536 "
            "positions; lower --input-tokens or --output-tokens."
        )

    def test_error_for_a_too_long_request_of_a_file_suggests_its_removal(self, tmp_path: Path) -> None:
        """The lengths are those of the file, for which --input-tokens is refused."""
        path = tmp_path / "long.csv"
        path.write_text("arrival_s,input_tokens,output_tokens\n0,65536,1\n")
        found = expand(requests=str(path))
        assert str(found[0].error).endswith("65,536 positions; take longer ones out of the file.")
        (line,) = format_rejected(grid.make_table(found))
        assert line.partition(" at ")[2].startswith("trace times, 1 of long.csv: ")

    def test_prefill_chunks_are_an_axis_and_appear_in_point_names(self) -> None:
        """Engines have memory for the largest chunk; a run with one chunk size does not repeat it in every line."""
        found = expand(tp=4, dcp=4, concurrency=2, chunk="32,64")
        points = [c.point for c in found]
        assert [p.load.chunk for p in points] == [32, 64]
        assert {c.plan.chunk for c in found} == {64}
        assert [name.rsplit(", ", 1)[1] for name in format_point_names(points).values()] == ["chunk 32", "chunk 64"]
        assert "chunk" not in format_point_names(points[:1])[points[0].get_key()]
        assert [row["load_text"].rsplit(", ", 1)[1] for row in grid.make_table(found)] == ["chunk 32", "chunk 64"]

    def test_prefill_chunk_has_at_least_a_page_for_every_rank(self) -> None:
        """For tp8·dp2·dcp4 with pages of 8, each of 2 replicas needs 8 × 4 = 32 tokens."""
        assert "use --prefill chunk=64 or more, or a smaller --page-size" in get_reason(
            tp=8, dp=2, dcp=4, page_size=8, chunk=63
        )
        assert expand(tp=8, dp=2, dcp=4, page_size=8, chunk=64)[0].error is None

    def test_prefill_chunk_that_exceeds_gpu_memory_is_refused_with_its_size(self) -> None:
        found = get_reason(H200X4, concurrency=8, chunk=10**8)
        assert found.startswith("--prefill chunk=100000000: a step with this many prompt tokens needs")
        assert found.endswith("on a GPU of 139.0 GiB; use a smaller one, such as --prefill chunk=8192.")

    def test_flashinfer_prefill_requires_a_gpu_the_package_and_its_head_sizes(self) -> None:
        assert "needs a GPU" in get_reason(prefill="flashinfer")
        without = msgspec.structs.replace(H200X4, packages={})
        (found, *_) = expand(without, prefill="flashinfer", concurrency=8)
        assert isinstance(found.error, MissingPackageError)
        (found, *_) = expand(without, concurrency=8)
        assert found.point.load is not None
        assert found.point.load.prefill == "sdpa"
        assert "keys of 192 and values of 128" in get_reason(
            H200X4, model="tiny", backend="triton", prefill="flashinfer", concurrency=8
        )

    @pytest.mark.parametrize("name", ["backend", "exchange"])
    def test_auto_choices_are_refused_for_serve(self, name: str) -> None:
        assert f"dcpbench sweep --{name} auto finds the fastest" in get_reason(H200X4, concurrency=8, **{name: "auto"})

    def test_model_without_enough_gpus_is_refused_with_a_command(self) -> None:
        assert "type: dcpbench serve --model tiny" in get_reason(model="deepseek-v3")
        assert "Type instead: dcpbench serve --model kimi-k2" in get_reason(
            H200X4, tp=8, model="kimi-k2", concurrency=8
        )

    def test_more_clients_than_the_largest_graph_are_accepted(self) -> None:
        assert expand(H200X4, concurrency=600, num_requests=600, model="deepseek-v2-lite")[0].error is None


class TestPools:
    def expand_v3(self, **options: object) -> grid.Candidate:
        (found,) = expand(H200X4, model="deepseek-v3", concurrency=48, **options)
        return found

    def test_kv_pool_holds_all_requests_in_flight_with_held_layers(self) -> None:
        """Each of 48 requests takes ceil(5500 / (64·4)) = 22 pages and one more, and the padding page is added."""
        found = self.expand_v3(output_tokens=1500)
        assert budget.count_needed_pages(found.point) == found.plan.pages == 48 * (22 + 1) + 1

    def test_kv_pool_is_sized_for_the_longest_drawn_request(self) -> None:
        """With 1,350 to 1,650 tokens after 4,000, the longest drawn request exceeds 22 pages of 256 and fits in 23."""
        found = self.expand_v3(output_tokens=ANSWERS)
        assert 22 * 64 * 4 < found.point.context <= 4000 + 1650
        assert budget.count_needed_pages(found.point) == found.plan.pages == 48 * (23 + 1) + 1

    def test_kv_pool_counts_no_more_requests_than_the_load_has(self) -> None:
        point = msgspec.structs.replace(self.expand_v3(output_tokens=1500).point, concurrency=1000)
        assert point.load is not None
        assert budget.count_needed_pages(point) == point.load.requests * 23 + 1 == 768 * 23 + 1

    def test_requests_that_exceed_the_kv_pool_do_not_reject_the_point(self) -> None:
        """A decode sweep rejects 48 requests of 128,000 tokens on tp4; when served, some of them wait."""
        found = self.expand_v3(dcp=1, input_tokens=128000)
        assert found.error is None
        need = budget.count_needed_pages(found.point)
        most = budget.compute_max_pages(found.point, SHAPES["deepseek-v3"], H200X4)
        page = memory.compute_page_bytes(SHAPES["deepseek-v3"], 64, 2)
        assert found.plan.kv_bytes == most * page < need * page

    def test_kv_pool_takes_the_memory_that_whole_weights_leave(self) -> None:
        """V2-Lite has 31 GB of weights on 4 GPUs, so that the pool is far larger than the load needs."""
        (found,) = expand(H200X4, model="deepseek-v2-lite", concurrency=8)
        assert found.plan.layers_held == found.plan.layers
        assert found.plan.kv_bytes > 100 * GIB

    def test_larger_prefill_chunks_reduce_the_kv_pool(self) -> None:
        small, large = (
            expand(H200X4, model="deepseek-v2-lite", concurrency=8, chunk=chunk)[0].plan.kv_bytes
            for chunk in (8192, 65536)
        )
        layout, shape = Layout(tp=4, dcp=4), SHAPES["deepseek-v2-lite"]
        more, less = (memory.compute_prefill_bytes(shape, layout, chunk, 2, MOE_TP) for chunk in (65536, 8192))
        assert abs(small - large - (more - less)) < memory.compute_page_bytes(shape, 64, 2)

    def test_kv_memory_is_used_even_if_requests_have_to_wait(self) -> None:
        found = self.expand_v3(kv_memory="2GiB")
        assert found.error is None
        assert (
            found.plan.kv_bytes
            <= 2 * GIB
            < budget.count_needed_pages(found.point) * memory.compute_page_bytes(SHAPES["deepseek-v3"], 64, 2)
        )

    def test_kv_memory_below_one_request_is_refused_with_a_sufficient_size(self) -> None:
        """The 22 pages of 64 rows of 70,272 B and the padding page take 98.65 MiB, so that 98.7 suffices and 98.6 does
        not.
        """
        found = self.expand_v3(kv_memory="50MiB", output_tokens=1500)
        assert isinstance(found.error, CapacityError)
        assert "to serve all requests, give --kv-memory 98.7MiB or more" in str(found.error)
        assert self.expand_v3(kv_memory="98.7MiB", output_tokens=1500).error is None
        assert self.expand_v3(kv_memory="98.6MiB", output_tokens=1500).error is not None

    def test_kv_memory_for_short_requests_only_is_accepted(self) -> None:
        assert self.expand_v3(kv_memory="50MiB", input_tokens="uniform:10-4000", output_tokens=10).error is None

    def test_kv_memory_larger_than_the_gpu_is_refused(self) -> None:
        assert "--kv-memory can be up to" in str(self.expand_v3(kv_memory="500GiB").error)


def test_options_file_has_the_names_of_the_command_line(tmp_path: Path) -> None:
    """The file has tables and numbers of TOML, and `no-` for options that are on by default."""
    path = tmp_path / "serve.toml"
    path.write_text(
        'request-rate = [0.5, 2]\ninput_tokens = [10, "uniform:5-9"]\nprefill = {prefix-cache = false}\nno-baseline = true\n'
        "timeout = {load = 9}\n[slo]\nttft = 500\n"
    )
    given = read_options(path, SERVE_PARSERS)
    spec = make_serve_spec(given, CPU)
    assert (spec.settings.slo, spec.settings.limit_seconds, spec.baseline) == ({"ttft": 500.0}, 9.0, False)
    found = spec.make_loads(1, load_shape("tiny"))
    assert [(x.load.input_tokens, x.load.request_rate) for x in found] == [
        ("10", 0.5),
        ("10", 2.0),
        ("uniform:5-9", 0.5),
        ("uniform:5-9", 2.0),
    ]
    assert not found[0].load.prefix_cache


def test_length_with_too_many_digits_for_python_is_refused(tmp_path: Path) -> None:
    """The number has 36,000 bits, as hexadecimal digits of TOML."""
    path = tmp_path / "serve.toml"
    path.write_text(f"input-tokens = [0x{'f' * 9000}]\n")
    spec = make_serve_spec(read_options(path, SERVE_PARSERS), CPU)
    with pytest.raises(DcpbenchError, match=r"--input-tokens \(a number of 36,000 bits\): not a length"):
        spec.make_loads(1, load_shape("tiny"))


@pytest.mark.parametrize("name", ["context", "seconds"])
def test_options_of_sweep_are_unknown_to_serve(tmp_path: Path, name: str) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(f"{name} = 5\n")
    with pytest.raises(DcpbenchError, match=f"unknown option '{name}'"):
        read_options(path, SERVE_PARSERS)


def test_live_and_replay_are_two_points_of_one_engine():
    """The options `--mode live,replay` compare a replay with a live run of the same load."""
    points = [c.point for c in expand(mode="live,replay", concurrency="2", tp="1")]
    assert [p.load.mode for p in points] == ["live", "replay"]
    assert budget.is_same_engine(*points)
    assert msgspec.structs.replace(points[0].load, mode="replay") == points[1].load


class TestInstances:
    """Test --disaggregate, which sets how many instances of a layout serve together."""

    REPLAY: Mapping[str, object] = {"mode": "replay", "tp": 4, "dcp": 1}

    def test_each_ratio_with_each_link_speed_is_a_point(self) -> None:
        found = expand(**self.REPLAY, disaggregate="1:2,2P1D", transfer_gb_s="25,50", transfer_ms=2)
        points = [c.point for c in found]
        assert [(p.disaggregate, p.transfer_gb_s, p.transfer_ms) for p in points] == [
            ("1:2", 25, 2),
            ("1:2", 50, 2),
            ("2:1", 25, 2),
            ("2:1", 50, 2),
        ]
        assert {(p.layout_name, p.gpus, p.tp) for p in points} == {("tp4 1P2D", 12, 4), ("tp4 2P1D", 12, 4)}
        assert all(c.error is None for c in found)

    def test_each_load_runs_on_all_ratios_before_the_next(self) -> None:
        found = expand(**self.REPLAY, disaggregate="1,1:1", transfer_gb_s=50, concurrency="2,4")
        assert [(c.point.concurrency, c.point.disaggregate) for c in found] == [
            (2, ""),
            (2, "1:1"),
            (4, ""),
            (4, "1:1"),
        ]

    def test_single_instance_has_the_key_of_a_usual_point(self) -> None:
        (found,) = expand(**self.REPLAY, disaggregate=1)
        (usual,) = expand(**self.REPLAY)
        assert found.point.get_key() == usual.point.get_key()

    def test_disaggregated_point_has_a_baseline_of_as_many_usual_instances(self) -> None:
        """The points with and without DCP have such a baseline."""
        point = {"mode": "replay", "tp": 4, "disaggregate": "1:2", "transfer_gb_s": 50}
        found = grid.expand_grid(make_serve_spec(point, CPU), CPU)
        assert {(c.point.layout_name, c.added) for c in found} == {
            ("tp4·dcp4 1P2D", False),
            ("tp4 1P2D", True),
            ("tp4·dcp4 ×3", True),
            ("tp4 ×3", True),
        }
        assert all(c.point.transfer_gb_s == (50 if "P" in c.point.layout_name else 0) for c in found)
        assert len({c.point.gpus for c in found}) == 1

    def test_plan_of_a_disaggregated_point_is_that_of_one_instance(self) -> None:
        """The memory of an instance does not depend on their number, and the GPUs of one machine suffice, since one
        instance is measured.
        """
        disaggregated, single = expand(H200X4, **self.REPLAY, disaggregate="8:8,1", transfer_gb_s=50, concurrency=8)
        plans = [msgspec.structs.replace(c.plan, point=single.point) for c in (disaggregated, single) if c.plan]
        assert len(plans) == 2
        assert plans[0] == plans[1]

    def test_names_and_rows_show_instances_and_links(self) -> None:
        (found,) = expand(**self.REPLAY, output_tokens=8, disaggregate="1:2", transfer_gb_s=50, transfer_ms=2)
        name = "tiny tp4 1P2D reference 50 GB/s links 2 ms a transfer, 4 clients, 16 × 32→8 tokens, replay"
        assert grid.format_point_name(found.point) == name
        (row,) = grid.make_table([found])
        assert [row[name] for name in ("layout", "disaggregate", "transfer_gb_s")] == ["tp4 1P2D", "1:2", 50]

    def test_live_mode_refuses_several_instances(self) -> None:
        """With both modes, the replay runs."""
        assert "take --mode replay alone" in get_reason(
            **self.REPLAY | {"mode": "live"}, disaggregate="1:1", transfer_gb_s=50
        )
        both = expand(**self.REPLAY | {"mode": "live,replay"}, disaggregate="1:1", transfer_gb_s=50)
        assert {c.point.load.mode: c.error is None for c in both if c.point.load} == {"live": False, "replay": True}

    def test_file_states_instances_as_the_command_line_does(self, tmp_path: Path) -> None:
        """YAML 1.1 would read 1:2 as 62, a number of base 60."""
        path = tmp_path / "serve.yaml"
        for text in ("1:2,gb-s=50", "{instances: 1:2, gb-s: 50}", "{instances: [1:2], gb-s: 50}"):
            path.write_text(f"disaggregate: {text}\nmode: replay\n")
            assert read_options(path, SERVE_PARSERS)["disaggregate"] == ("1:2",)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"disaggregate": "1:1"}, "add gb-s=50"),
            ({"disaggregate": "2", "transfer_gb_s": 50}, "no KV is sent; add for example --disaggregate 1:1"),
            ({"transfer_ms": 3}, "--disaggregate ms without instances"),
            ({"disaggregate": "0:2", "transfer_gb_s": 50}, "no instance would prefill"),
            ({"disaggregate": "2:0", "transfer_gb_s": 50}, "no instance would decode"),
            ({"disaggregate": "0"}, "write 1 to 256"),
            ({"disaggregate": "200:57", "transfer_gb_s": 50}, "257 instances; write 1 to 256"),
            ({"disaggregate": "one"}, "not a ratio of instances; write P:D such as 1:2"),
            ({"disaggregate": "1:1", "transfer_gb_s": 0}, "not 0.001 to 1,000,000 GB/s"),
            ({"disaggregate": "1:1", "transfer_gb_s": float("inf")}, "not 0.001 to"),
            ({"disaggregate": "1:1", "transfer_gb_s": "fast"}, "not a number"),
            ({"disaggregate": "1:1", "transfer_gb_s": 50, "transfer_ms": -1}, "not 0 to 60,000 ms"),
        ],
        ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
    )
    def test_invalid_instances_are_refused(self, options: dict[str, object], message: str) -> None:
        with pytest.raises(UsageError) as e:
            expand(**self.REPLAY, **options)
        assert message in str(e.value)


@pytest.mark.parametrize(
    ("requests", "clients"), [(7, (7,)), (8, (8,)), (32, (8, 32)), (40, (8, 32)), (768, (8, 32, 48))]
)
def test_default_clients_have_at_least_one_request_each(requests: int, clients: tuple[int, ...]) -> None:
    """The default is 8, 32 and 48 clients; with fewer requests, there are as many clients as requests."""
    given = {"num_requests": str(requests), "tp": "4"}
    serve = make_serve_spec(given, H200X4).serve
    assert serve is not None
    assert serve.concurrency == clients


def test_step_times_error_names_the_first_file_of_a_folder(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / "step-times").mkdir(exist_ok=True)
        (tmp_path / "step-times" / f"{name}.json").touch()
    with pytest.raises(UsageError, match=rf"name a file in it, such as {tmp_path}/step-times/a\.json\."):
        resolve_step_times({"step_times": str(tmp_path), "mode": "replay"})


class TestObjectives:
    def find(self, slo: str, **options: object) -> list[tuple[tuple[str, ...], int, int]]:
        spec = make_serve_spec({"slo": slo, "tp": "4", **options}, H200X4)
        assert isinstance(spec.serve, ServeLoads)
        found = find_short_slos(spec.serve, spec.settings.slo, spec.settings.trace_path)
        return [(short.objectives, short.percentile, short.samples) for short in found]

    def test_default_load_has_enough_requests_for_p99_of_ttft(self) -> None:
        """The load has at least 662 completed requests even if a tenth fails, and 8, 32 and 48 divide their number."""
        spec = make_serve_spec({"tp": "4"}, H200X4)
        assert isinstance(spec.serve, ServeLoads)
        requests = spec.serve.num_requests
        assert find_highest_percentile(requests - requests // 10) == 99
        assert [requests % clients for clients in spec.serve.concurrency] == [0, 0, 0]
        assert self.find("ttft=500,itl=50,e2el=9000") == []

    def test_fewer_requests_are_judged_at_a_lower_percentile(self) -> None:
        """The percentile p90 needs 64 requests, and p95 130; ITL has 12 × 10 gaps."""
        shape = {"concurrency": "4", "output_tokens": "11"}
        assert self.find("ttft=500", num_requests=12, **shape) == [(("ttft",), 50, 12)]
        assert self.find("ttft=500,e2el=900", num_requests=64, **shape) == [(("ttft", "e2el"), 90, 64)]
        assert self.find("ttft=500", num_requests=661, **shape) == [(("ttft",), 95, 661)]
        assert self.find("ttft=500", num_requests=compute_min_samples(99), **shape) == []
        assert self.find("itl=50", num_requests=12, **shape) == [(("itl",), 90, 120)]

    def test_slo_warning_suggests_num_requests(self) -> None:
        spec = make_serve_spec({"slo": "ttft=500", "tp": "4", "num_requests": "12"}, H200X4)
        assert isinstance(spec.serve, ServeLoads)
        (short,) = find_short_slos(spec.serve, spec.settings.slo, "")
        assert short.describe() == (
            "Warning: --slo TTFT: with 12 requests the SLO is judged at p50, not at p99, which needs 662 completed requests. "
            "For p99 use --num-requests 768."
        )


class TestPolicies:
    def test_policies_of_other_engines_require_a_replay(self) -> None:
        assert [load.policy for load in list_loads(policy="vllm", mode="replay", tp="1")] == ["vllm"]
        with pytest.raises(UsageError, match="only replays follow the policies of other engines; add --mode replay"):
            list_loads(policy="sglang", mode="live,replay")

    def test_policies_of_other_engines_refuse_disaggregation(self) -> None:
        with pytest.raises(UsageError, match="leave out --disaggregate"):
            list_loads(policy="vllm", mode="replay", disaggregate="1:1", transfer_gb_s="50")

    def test_policies_of_other_engines_require_one_attention_replica(self) -> None:
        assert get_reason(policy="vllm", mode="replay", model="tiny", tp="2", dp="2").startswith(
            "--prefill policy=vllm is modelled for one"
        )


class TestDrafts:
    def test_each_number_of_drafts_is_a_point_with_as_many_acceptances(self) -> None:
        found = expand(
            H200X4, tp=4, dcp=4, concurrency=8, mode="replay", mtp="0,1,3", acceptance="0.85/0.6/0.4", baseline=False
        )
        assert [(c.point.mtp, c.point.acceptance) for c in found] == [(0, ""), (1, "0.85"), (3, "0.85/0.6/0.4")]
        assert [grid.format_path(c.point).partition("ag_rs ")[2].rpartition("fp8")[0].strip() for c in found] == [
            "",
            "mtp1 acceptance 0.85",
            "mtp3 acceptance 0.85/0.6/0.4",
        ]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"mtp": 2},
                "Add the probability that each draft is accepted if those before it were, as in --mtp 2,acceptance=0.8/0.6,",
            ),
            ({"mtp": 8, "acceptance": "1"}, "a step verifies 1 to 7 drafts (0: none); write for example --mtp 3"),
            ({"mtp": 2, "acceptance": "0.5"}, "state one for each draft, such as acceptance=0.8/0.6"),
        ],
    )
    def test_acceptance_must_be_given_for_each_draft(self, changes: dict[str, object], message: str) -> None:
        with pytest.raises(UsageError, match=re.escape(message)):
            expand(H200X4, concurrency=8, mode="replay", **changes)

    def test_policies_of_other_engines_are_refused_with_drafts(self) -> None:
        drafts = {"mtp": 1, "acceptance": "0.85"}
        found = get_reason(H200X4, concurrency=8, mode="replay", policy="vllm", backend="triton", **drafts)
        assert found.startswith("--prefill policy=vllm is not modelled with drafts; leave out --mtp")
