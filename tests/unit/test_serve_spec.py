"""What `serve` expands to, what it rejects and why, and the KV pool that its points get."""

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
from dcpbench.points.names import CLOSED, CUT, GAMMA, TRACE
from dcpbench.records.stats import compute_min_samples, find_highest_percentile
from dcpbench.serving.load_words import ANSWERS, CPU_ANSWERS, format_varied_lengths, is_lock_step, parse_lengths
from dcpbench.serving.loads import draw_arrival_times, draw_lengths
from tests.unit.test_judge import CPU, GIB, H200X4

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dcpbench.points.device_probe import Probe
    from dcpbench.points.point import Load


def expand(probe: Probe = CPU, **options: object) -> list[grid.Candidate]:
    """Candidates of options given as on the command line, without baselines."""
    return grid.expand_grid(make_serve_spec({"baseline": False, **options}, probe), probe)


def loads(probe: Probe = CPU, **options: object) -> list[Load]:
    """What the points serve."""
    found = [c.point.load for c in expand(probe, **options)]
    return [load for load in found if load is not None]


def reason(probe: Probe = CPU, **options: object) -> str:
    """Why the one point of these options cannot run."""
    (found,) = expand(probe, **options)
    return str(found.error)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Four requests with times, of 20 to 50 tokens in all."""
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,10,10\n1,20,10\n2,30,10\n3,40,10\n")
    return path


class TestPoints:
    def test_loads_run_from_the_smallest_to_the_largest_however_they_were_typed(self) -> None:
        """Loads are ordered by length of prompts, then by rate."""
        found = loads(request_rate="2,0.5,1", input_tokens="300,20")
        assert [(load.input_tokens, load.request_rate) for load in found] == [
            ("20", 0.5),
            ("20", 1),
            ("20", 2),
            ("300", 0.5),
            ("300", 1),
            ("300", 2),
        ]

    def test_on_gpus_the_default_is_the_load_dcp_was_first_measured_with_but_for_lengths_of_answers(self) -> None:
        """768 requests of 4,000 tokens in and 1,350 to 1,650 out, 1,500 in the middle, at 8, 32 and 48 clients."""
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
    def test_by_default_clients_do_not_go_in_step(self, probe: Probe) -> None:
        """They would with answers of one length."""
        for found in expand(probe):
            load = found.point.load
            assert load is not None
            assert not is_lock_step(load, found.point.concurrency)
            assert is_lock_step(msgspec.structs.replace(load, output_tokens="8"), found.point.concurrency)

    def test_on_a_cpu_it_is_small(self) -> None:
        (found,) = expand()
        assert (found.point.model, found.point.tp, found.point.dcp, found.point.concurrency) == ("tiny", 4, 4, 4)
        assert found.point.load is not None
        assert (found.point.load.input_tokens, found.point.load.output_tokens) == ("32", CPU_ANSWERS)
        assert found.point.context == 32 + parse_lengths("--output-tokens", CPU_ANSWERS).high

    def test_lengths_are_axes(self) -> None:
        """In the order of the longest request: 11, 12, 12 and 13 tokens."""
        found = loads(input_tokens="10,uniform:5-9", output_tokens="2,3")
        assert [(x.input_tokens, x.output_tokens) for x in found] == [
            ("uniform:5-9", "2"),
            ("10", "2"),
            ("uniform:5-9", "3"),
            ("10", "3"),
        ]

    def test_lengths_are_written_in_one_way_so_that_equal_points_are_one(self) -> None:
        assert [x.input_tokens for x in loads(input_tokens="010,10")] == ["10"]

    def test_the_context_is_the_longest_request_that_is_drawn(self) -> None:
        """16 prompts of 5 to 9 tokens, one of which has 9, and 3 out."""
        (found,) = expand(input_tokens="uniform:5-9", output_tokens=3)
        assert found.point.context == 12

    def test_rates_are_an_axis_of_open_loops(self) -> None:
        found = expand(request_rate="0.5,2")
        assert [(c.point.load.arrival, c.point.load.request_rate) for c in found] == [(GAMMA, 0.5), (GAMMA, 2.0)]

    def test_a_rate_of_inf_sends_all_requests_at_once(self) -> None:
        """16 requests are a closed loop of 16 clients; with 3 in flight it is one of 3, as --max-concurrency of vLLM's bench."""
        for options, clients in (({}, 16), ({"concurrency": 3}, 3), ({"turns": "4"}, 4)):
            (found,) = expand(request_rate="inf", **options)
            load = found.point.load
            assert load is not None
            assert (load.arrival, load.request_rate, load.paced) == (CLOSED, None, False)
            assert (found.point.concurrency, found.point.clients) == (clients, clients)
            assert draw_arrival_times(load)[0] is None

    def test_a_rate_of_inf_can_stand_beside_others(self) -> None:
        found = expand(request_rate="2,inf")
        assert [(c.point.load.arrival, c.point.load.request_rate) for c in found] == [(CLOSED, None), (GAMMA, 2.0)]

    def test_a_rate_of_inf_sends_the_requests_of_a_file_at_once(self, trace: Path) -> None:
        (found,) = expand(requests=str(trace), request_rate="inf")
        assert found.point.load is not None
        assert (found.point.load.arrival, found.point.concurrency) == (CLOSED, found.point.load.requests)

    def test_counts_can_be_typed_in_thousands(self) -> None:
        """As vLLM reads --max-model-len 64k: k is 1,000."""
        (found,) = expand(H200X4, num_requests="1k", concurrency="8", input_tokens="64k", chunk="8k", model="kimi-k2")
        load = found.point.load
        assert load is not None
        assert (load.requests, load.input_tokens, load.chunk) == (1000, "64000", 8000)

    def test_an_open_loop_has_as_many_in_flight_as_layouts_take(self) -> None:
        """512 for each replica, or all requests where they are fewer; --concurrency bounds them."""
        assert [c.point.concurrency for c in expand(request_rate=2, num_requests=2000, dp="1,2", tp=4)] == [512, 1024]
        assert [c.point.concurrency for c in expand(request_rate=2)] == [16]
        assert [c.point.concurrency for c in expand(request_rate=2, concurrency="3,5")] == [3, 5]

    def test_every_option_of_a_load_reaches_it(self) -> None:
        (found,) = loads(
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

    def test_settings_hold_what_is_the_same_for_all_points(self, trace: Path) -> None:
        spec = make_serve_spec(
            {"slo": "ttft=500", "limit_seconds": "60", "requests": str(trace), "profile": False}, CPU
        )
        assert (spec.settings.slo, spec.settings.limit_seconds) == ({"ttft": 500.0}, 60.0)
        assert (spec.settings.trace_path, spec.settings.profile) == (str(trace), False)

    def test_a_limit_in_requests_shortens_the_load(self) -> None:
        (found,) = loads(num_requests="5")
        assert found.requests == 5
        assert make_serve_spec({"num_requests": 5}, CPU).settings.limit_seconds is None

    def test_fewer_requests_than_usual_clients_have_as_many_clients(self) -> None:
        assert [c.point.concurrency for c in expand(num_requests=3)] == [3]
        assert [c.point.concurrency for c in expand(H200X4, num_requests=40)] == [8, 32]

    def test_baselines_serve_the_same_load(self) -> None:
        one, two = grid.expand_grid(make_serve_spec({"request_rate": 2}, CPU), CPU)
        assert (one.point.dcp, two.point.dcp, one.added) == (1, 4, True)
        assert one.point.load == two.point.load

    def test_points_have_a_name_and_a_row(self) -> None:
        (found,) = expand()
        name = f"tiny tp4·dcp4 reference ag_rs, 4 clients, 16 × 32→{CPU_ANSWERS} tokens"
        assert grid.format_point_name(found.point) == name
        (row,) = grid.make_table([found])
        assert (row["workload"], row["load"]["requests"]) == ("serve", 16)

    def test_loads_make_points_different(self) -> None:
        one, two = (expand(seed=seed)[0].point.get_key() for seed in (0, 1))
        assert one != two


class TestTraces:
    def test_a_trace_with_times_is_an_open_loop_at_them(self, trace: Path) -> None:
        (found,) = expand(requests=str(trace))
        load = found.point.load
        assert (load.arrival, load.requests, load.trace, load.input_tokens) == (TRACE, 4, "trace.csv", "trace")
        assert (found.point.context, found.point.concurrency) == (50, 4)
        assert len(load.trace_sha256) == 64

    def test_with_concurrency_it_is_a_closed_loop_and_with_a_rate_its_lengths_come_at_that(self, trace: Path) -> None:
        assert [x.arrival for x in loads(requests=str(trace), concurrency=2)] == [CLOSED]
        assert [x.arrival for x in loads(requests=str(trace), request_rate=2)] == [GAMMA]

    def test_a_file_without_times_is_a_closed_loop(self, tmp_path: Path) -> None:
        path = tmp_path / "r.jsonl"
        path.write_text('{"input_tokens": 3, "output_tokens": 4}\n' * 9)
        assert [(c.point.load.arrival, c.point.concurrency) for c in expand(requests=str(path))] == [(CLOSED, 4)]

    def test_a_limit_takes_the_first_requests(self, trace: Path) -> None:
        (found,) = expand(requests=str(trace), num_requests=2)
        assert (found.point.load.requests, found.point.context) == (2, 30)

    @pytest.mark.parametrize("name", ["input_tokens", "output_tokens"])
    def test_what_it_says_itself_cannot_be_typed(self, trace: Path, name: str) -> None:
        with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} and --requests .* contradict each other"):
            expand(requests=str(trace), **{name: 5})

    def test_groups_need_a_share(self, tmp_path: Path) -> None:
        path = tmp_path / "r.jsonl"
        path.write_text('{"input_tokens": 3, "output_tokens": 4, "prefix_group": 1}\n')
        with pytest.raises(UsageError, match="say with --prefix-share how much"):
            expand(requests=str(path))
        assert loads(requests=str(path), prefix_share=0.5)

    def test_hashes_say_what_is_shared(self, tmp_path: Path) -> None:
        path = tmp_path / "r.jsonl"
        path.write_text('{"timestamp": 0, "input_length": 512, "output_length": 4, "hash_ids": [1]}\n')
        with pytest.raises(UsageError, match="says itself what its prompts share; leave --prefix-share out"):
            expand(requests=str(path), prefix_share=0.5)

    def test_token_ids_must_be_the_models(self, tmp_path: Path) -> None:
        path = tmp_path / "r.jsonl"
        path.write_text('{"prompt": [512], "output_tokens": 4}\n')
        with pytest.raises(UsageError, match="token id 512, and tiny has 512 of them"):
            expand(requests=str(path))

    def test_a_request_too_long_for_the_model_does_not_stop_the_others(self, tmp_path: Path) -> None:
        """65,536 positions: the scheduler rejects the second request by name, the point runs."""
        path = tmp_path / "r.csv"
        path.write_text("input_tokens,output_tokens\n10,10\n65537,10\n")
        (found,) = expand(requests=str(path))
        assert (found.error, found.point.context) == (None, 65536)


def test_a_folder_of_step_times_is_no_file_of_them(tmp_path: Path) -> None:
    """A run's folder, or step-times/ in it: the error names a file in it."""
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
    ("options", "words"),
    [
        ({"request_rate": "0"}, "--request-rate 0 is not a positive number of requests per second; try"),
        ({"request_rate": "-1"}, "--request-rate -1 is not"),
        ({"request_rate": "-inf"}, "try --request-rate 2, or --request-rate inf for all requests at once."),
        ({"request_rate": "inf", "burstiness": 2}, "--request-rate inf has none; leave --burstiness out."),
        ({"request_rate": "nan"}, "--request-rate nan is not"),
        ({"request_rate": "fast"}, "--request-rate fast: not a number; write for example --request-rate 0.5,2"),
        ({"request_rate": ""}, "--request-rate is empty"),
        ({"request_rate": True}, "--request-rate True: not a number"),
        ({"burstiness": 0, "request_rate": 1}, "--burstiness 0 is not positive"),
        ({"burstiness": 1e-300, "request_rate": 1}, "--burstiness 1e-300 is not positive, or too near to 0"),
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
            "more than the 2 requests, so that fewer are in flight; use --num-requests 40",
        ),
        ({"concurrency": "0"}, "--concurrency 0 is not positive"),
        ({"concurrency": "17"}, "--concurrency 17 is more than the 16 requests"),
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
def test_what_cannot_work_is_said_before_anything_runs(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as e:
        expand(**options)
    assert words in str(e.value)


class TestRejections:
    def test_more_output_than_context(self) -> None:
        """32 + 65,536 tokens in 65,536 positions."""
        assert reason(output_tokens=65536) == (
            "requests of --input-tokens 32 --output-tokens 65536, 65,568 tokens together, pass tiny's 65,536 "
            "positions; lower --input-tokens or --output-tokens."
        )

    def test_a_trace_with_too_long_a_request_is_told_to_lose_it(self, tmp_path: Path) -> None:
        """The lengths are the file's, and --input-tokens beside it is refused."""
        path = tmp_path / "long.csv"
        path.write_text("arrival_s,input_tokens,output_tokens\n0,65536,1\n")
        found = expand(requests=str(path))
        assert str(found[0].error).endswith("65,536 positions; take longer ones out of the file.")
        (line,) = format_rejected(grid.make_table(found))
        assert line.partition(" at ")[2].startswith("trace times, 1 of long.csv: ")

    def test_chunks_are_an_axis_that_names_of_points_say(self) -> None:
        """Engines have room for the largest; a run with one chunk does not repeat it in every line."""
        found = expand(tp=4, dcp=4, concurrency=2, chunk="32,64")
        points = [c.point for c in found]
        assert [p.load.chunk for p in points] == [32, 64]
        assert {c.plan.chunk for c in found} == {64}
        assert [name.rsplit(", ", 1)[1] for name in format_point_names(points).values()] == ["chunk 32", "chunk 64"]
        assert "chunk" not in format_point_names(points[:1])[points[0].get_key()]
        assert [row["load_text"].rsplit(", ", 1)[1] for row in grid.make_table(found)] == ["chunk 32", "chunk 64"]

    def test_a_chunk_holds_a_page_of_every_rank_of_every_replica(self) -> None:
        """tp8·dp2·dcp4 with pages of 8: 8 × 4 = 32 tokens for each of 2 replicas."""
        assert "use --prefill chunk=64 or more, or a smaller --page-size" in reason(
            tp=8, dp=2, dcp=4, page_size=8, chunk=63
        )
        assert expand(tp=8, dp=2, dcp=4, page_size=8, chunk=64)[0].error is None

    def test_a_chunk_larger_than_a_gpu_is_refused_with_what_it_would_need(self) -> None:
        found = reason(H200X4, concurrency=8, chunk=10**8)
        assert found.startswith("--prefill chunk=100000000: a step with this many prompt tokens needs")
        assert found.endswith("on a GPU of 139.0 GiB; use a smaller one, such as --prefill chunk=8192.")

    def test_flashinfer_prefills_on_gpus_that_have_it_with_its_widths(self) -> None:
        assert "needs a GPU" in reason(prefill="flashinfer")
        without = msgspec.structs.replace(H200X4, packages={})
        (found, *_) = expand(without, prefill="flashinfer", concurrency=8)
        assert isinstance(found.error, MissingPackageError)
        (found, *_) = expand(without, concurrency=8)
        assert found.point.load is not None
        assert found.point.load.prefill == "sdpa"
        assert "keys of 192 and values of 128" in reason(
            H200X4, model="tiny", backend="triton", prefill="flashinfer", concurrency=8
        )

    @pytest.mark.parametrize("name", ["backend", "exchange"])
    def test_nothing_is_chosen_by_time(self, name: str) -> None:
        assert f"dcpbench sweep --{name} auto finds the fastest" in reason(H200X4, concurrency=8, **{name: "auto"})

    def test_a_model_that_needs_gpus_is_told_what_to_type_instead(self) -> None:
        assert "type: dcpbench serve --model tiny" in reason(model="deepseek-v3")
        assert "Type instead: dcpbench serve --model kimi-k2" in reason(H200X4, tp=8, model="kimi-k2", concurrency=8)

    def test_more_clients_than_the_largest_graph_run_eagerly(self) -> None:
        assert expand(H200X4, concurrency=600, num_requests=600, model="deepseek-v2-lite")[0].error is None


class TestPools:
    def of(self, **options: object) -> grid.Candidate:
        (found,) = expand(H200X4, model="deepseek-v3", concurrency=48, **options)
        return found

    def test_it_holds_all_requests_in_flight_where_not_all_weights_fit(self) -> None:
        """48 requests of ceil(5500 / (64·4)) = 22 pages, one more for each, and the padding page."""
        found = self.of(output_tokens=1500)
        assert budget.count_needed_pages(found.point) == found.plan.pages == 48 * (22 + 1) + 1

    def test_of_lengths_that_differ_the_longest_decides(self) -> None:
        """1,350 to 1,650 tokens behind 4,000: the longest that is drawn has more than 22 pages of 256, and 23 hold it."""
        found = self.of(output_tokens=ANSWERS)
        assert 22 * 64 * 4 < found.point.context <= 4000 + 1650
        assert budget.count_needed_pages(found.point) == found.plan.pages == 48 * (23 + 1) + 1

    def test_no_more_requests_are_in_flight_than_there_are(self) -> None:
        point = msgspec.structs.replace(self.of(output_tokens=1500).point, concurrency=1000)
        assert point.load is not None
        assert budget.count_needed_pages(point) == point.load.requests * 23 + 1 == 768 * 23 + 1

    def test_requests_that_do_not_fit_at_once_wait(self) -> None:
        """A decode sweep rejects 48 requests of 128,000 tokens on tp4; serving them is a point under pressure."""
        found = self.of(dcp=1, input_tokens=128000)
        assert found.error is None
        need = budget.count_needed_pages(found.point)
        most = budget.compute_max_pages(found.point, SHAPES["deepseek-v3"], H200X4)
        page = memory.compute_page_bytes(SHAPES["deepseek-v3"], 64, 2)
        assert found.plan.kv_bytes == most * page < need * page

    def test_beside_all_weights_it_is_what_they_leave(self) -> None:
        """V2-Lite, 31 GB of weights on 4 GPUs: far more than the load needs."""
        (found,) = expand(H200X4, model="deepseek-v2-lite", concurrency=8)
        assert found.plan.layers_held == found.plan.layers
        assert found.plan.kv_bytes > 100 * GIB

    def test_memory_for_chunks_is_kept(self) -> None:
        """Larger chunks, smaller pool."""
        small, large = (
            expand(H200X4, model="deepseek-v2-lite", concurrency=8, chunk=chunk)[0].plan.kv_bytes
            for chunk in (8192, 65536)
        )
        layout, shape = Layout(tp=4, dcp=4), SHAPES["deepseek-v2-lite"]
        more, less = (memory.compute_prefill_bytes(shape, layout, chunk, 2, CUT) for chunk in (65536, 8192))
        assert abs(small - large - (more - less)) < memory.compute_page_bytes(shape, 64, 2)

    def test_a_given_size_is_taken_even_if_requests_have_to_wait(self) -> None:
        found = self.of(kv_memory="2GiB")
        assert found.error is None
        assert (
            found.plan.kv_bytes
            <= 2 * GIB
            < budget.count_needed_pages(found.point) * memory.compute_page_bytes(SHAPES["deepseek-v3"], 64, 2)
        )

    def test_a_size_in_which_no_request_fits_is_refused_with_what_would(self) -> None:
        """22 pages of 64 rows of 70,272 B and the padding page: 98.65 MiB, so that 98.6 would not do when typed."""
        found = self.of(kv_memory="50MiB", output_tokens=1500)
        assert isinstance(found.error, CapacityError)
        assert "all requests here need 98.7MiB or more" in str(found.error)
        assert self.of(kv_memory="98.7MiB", output_tokens=1500).error is None
        assert self.of(kv_memory="98.6MiB", output_tokens=1500).error is not None

    def test_a_size_in_which_only_short_requests_fit_serves_those(self) -> None:
        assert self.of(kv_memory="50MiB", input_tokens="uniform:10-4000", output_tokens=10).error is None

    def test_a_size_that_no_gpu_has_is_refused(self) -> None:
        assert "--kv-memory can be up to" in str(self.of(kv_memory="500GiB").error)


def test_a_file_holds_the_same_names_as_the_command_line(tmp_path: Path) -> None:
    """Tables and numbers of TOML, and `no-` for what is on by default."""
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


def test_a_length_of_more_digits_than_python_writes_is_refused(tmp_path: Path) -> None:
    """36,000 bits, as hexadecimal digits of TOML."""
    path = tmp_path / "serve.toml"
    path.write_text(f"input-tokens = [0x{'f' * 9000}]\n")
    spec = make_serve_spec(read_options(path, SERVE_PARSERS), CPU)
    with pytest.raises(DcpbenchError, match=r"--input-tokens \(a number of 36,000 bits\): not a length"):
        spec.make_loads(1, load_shape("tiny"))


@pytest.mark.parametrize("name", ["context", "seconds"])
def test_what_only_a_sweep_has_is_not_known(tmp_path: Path, name: str) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(f"{name} = 5\n")
    with pytest.raises(DcpbenchError, match=f"unknown option '{name}'"):
        read_options(path, SERVE_PARSERS)


def test_both_modes_are_two_points_of_one_engine():
    """`--mode live,replay` holds a replay against a live run: the same load twice, side by side in the job."""
    points = [c.point for c in expand(mode="live,replay", concurrency="2", tp="1")]
    assert [p.load.mode for p in points] == ["live", "replay"]
    assert budget.is_same_engine(*points)
    assert msgspec.structs.replace(points[0].load, mode="replay") == points[1].load


class TestInstances:
    """--disaggregate: how many instances of a layout serve together."""

    REPLAY: Mapping[str, object] = {"mode": "replay", "tp": 4, "dcp": 1}

    def test_each_ratio_over_each_link_is_a_point(self) -> None:
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

    def test_loads_run_one_after_the_other_on_all_ratios(self) -> None:
        found = expand(**self.REPLAY, disaggregate="1,1:1", transfer_gb_s=50, concurrency="2,4")
        assert [(c.point.concurrency, c.point.disaggregate) for c in found] == [
            (2, ""),
            (2, "1:1"),
            (4, ""),
            (4, "1:1"),
        ]

    def test_one_that_does_both_is_a_point_as_ever(self) -> None:
        (found,) = expand(**self.REPLAY, disaggregate=1)
        (usual,) = expand(**self.REPLAY)
        assert found.point.get_key() == usual.point.get_key()

    def test_a_ratio_has_as_many_instances_that_do_both_beside_it(self) -> None:
        """Both have the same without DCP."""
        asked = {"mode": "replay", "tp": 4, "disaggregate": "1:2", "transfer_gb_s": 50}
        found = grid.expand_grid(make_serve_spec(asked, CPU), CPU)
        assert {(c.point.layout_name, c.added) for c in found} == {
            ("tp4·dcp4 1P2D", False),
            ("tp4 1P2D", True),
            ("tp4·dcp4 ×3", True),
            ("tp4 ×3", True),
        }
        assert all(c.point.transfer_gb_s == (50 if "P" in c.point.layout_name else 0) for c in found)
        assert len({c.point.gpus for c in found}) == 1

    def test_the_plan_is_that_of_an_instance(self) -> None:
        """Its memory does not depend on how many there are; and one machine's GPUs suffice, as one is measured."""
        apart, alone = expand(H200X4, **self.REPLAY, disaggregate="8:8,1", transfer_gb_s=50, concurrency=8)
        plans = [msgspec.structs.replace(c.plan, point=alone.point) for c in (apart, alone) if c.plan]
        assert len(plans) == 2
        assert plans[0] == plans[1]

    def test_rows_say_it(self) -> None:
        (found,) = expand(**self.REPLAY, output_tokens=8, disaggregate="1:2", transfer_gb_s=50, transfer_ms=2)
        name = "tiny tp4 1P2D reference 50 GB/s links 2 ms a transfer, 4 clients, 16 × 32→8 tokens, replay"
        assert grid.format_point_name(found.point) == name
        (row,) = grid.make_table([found])
        assert [row[name] for name in ("layout", "disaggregate", "transfer_gb_s")] == ["tp4 1P2D", "1:2", 50]

    def test_a_live_run_has_one_instance(self) -> None:
        """Asked for both modes, the replay runs."""
        assert "take --mode replay alone" in reason(
            **self.REPLAY | {"mode": "live"}, disaggregate="1:1", transfer_gb_s=50
        )
        both = expand(**self.REPLAY | {"mode": "live,replay"}, disaggregate="1:1", transfer_gb_s=50)
        assert {c.point.load.mode: c.error is None for c in both if c.point.load} == {"live": False, "replay": True}

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"disaggregate": "1:1"}, "add gb-s=50"),
            ({"disaggregate": "2", "transfer_gb_s": 50}, "no KV crosses; add --disaggregate 1:1"),
            ({"transfer_ms": 3}, "--disaggregate ms without instances"),
            ({"disaggregate": "0:2", "transfer_gb_s": 50}, "no instance would prefill"),
            ({"disaggregate": "2:0", "transfer_gb_s": 50}, "no instance would decode"),
            ({"disaggregate": "0"}, "write 1 to 256"),
            ({"disaggregate": "200:57", "transfer_gb_s": 50}, "257 instances; write 1 to 256"),
            ({"disaggregate": "one"}, "not a ratio of instances; write P:D such as 1:2"),
            ({"disaggregate": 62}, "write it in quotes, or 1P2D"),
            ({"disaggregate": "1:1", "transfer_gb_s": 0}, "not 0.001 to 1,000,000 GB/s"),
            ({"disaggregate": "1:1", "transfer_gb_s": float("inf")}, "not 0.001 to"),
            ({"disaggregate": "1:1", "transfer_gb_s": "fast"}, "not a number"),
            ({"disaggregate": "1:1", "transfer_gb_s": 50, "transfer_ms": -1}, "not 0 to 60,000 ms"),
        ],
        ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
    )
    def test_what_cannot_be_is_refused(self, options: dict[str, object], said: str) -> None:
        with pytest.raises(UsageError) as e:
            expand(**self.REPLAY, **options)
        assert said in str(e.value)


@pytest.mark.parametrize(
    ("requests", "clients"), [(7, (7,)), (8, (8,)), (32, (8, 32)), (40, (8, 32)), (768, (8, 32, 48))]
)
def test_usual_clients_are_those_that_requests_are_enough_for(requests: int, clients: tuple[int, ...]) -> None:
    """8, 32 and 48, each with a request at least; where there are fewer, as many as requests."""
    given = {"num_requests": str(requests), "tp": "4"}
    loads = make_serve_spec(given, H200X4).serve
    assert loads is not None
    assert loads.concurrency == clients


def test_of_several_step_times_in_a_folder_the_first_is_named(tmp_path: Path) -> None:
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

    def test_the_default_load_can_show_p99_of_ttft(self) -> None:
        """The load has at least 662 completed requests; a tenth of them may fail, and 8, 32 and 48 clients share them evenly."""
        spec = make_serve_spec({"tp": "4"}, H200X4)
        assert isinstance(spec.serve, ServeLoads)
        requests = spec.serve.num_requests
        assert find_highest_percentile(requests - requests // 10) == 99
        assert [requests % clients for clients in spec.serve.concurrency] == [0, 0, 0]
        assert self.find("ttft=500,itl=50,e2el=9000") == []

    def test_fewer_requests_are_judged_at_a_lower_percentile(self) -> None:
        """p90 needs 64 requests and p95 130; ITL has 12 × 10 gaps."""
        shape = {"concurrency": "4", "output_tokens": "11"}
        assert self.find("ttft=500", num_requests=12, **shape) == [(("ttft",), 50, 12)]
        assert self.find("ttft=500,e2el=900", num_requests=64, **shape) == [(("ttft", "e2el"), 90, 64)]
        assert self.find("ttft=500", num_requests=661, **shape) == [(("ttft",), 95, 661)]
        assert self.find("ttft=500", num_requests=compute_min_samples(99), **shape) == []
        assert self.find("itl=50", num_requests=12, **shape) == [(("itl",), 90, 120)]

    def test_the_warning_says_what_to_type(self) -> None:
        spec = make_serve_spec({"slo": "ttft=500", "tp": "4", "num_requests": "12"}, H200X4)
        assert isinstance(spec.serve, ServeLoads)
        (short,) = find_short_slos(spec.serve, spec.settings.slo, "")
        assert short.describe() == (
            "Warning: --slo TTFT: with 12 requests the SLO is judged at p50, not at p99, which needs 662 completed requests. "
            "For p99 use --num-requests 768."
        )


class TestPolicies:
    def test_replays_alone_follow_the_policies_of_other_engines(self) -> None:
        assert [load.policy for load in loads(policy="vllm", mode="replay", tp="1")] == ["vllm"]
        with pytest.raises(UsageError, match="only replays follow the policies of other engines; add --mode replay"):
            loads(policy="sglang", mode="live,replay")

    def test_they_have_no_instances_that_only_prefill(self) -> None:
        with pytest.raises(UsageError, match="leave out --disaggregate"):
            loads(policy="vllm", mode="replay", disaggregate="1:1", transfer_gb_s="50")

    def test_they_are_modelled_for_one_attention_replica(self) -> None:
        assert reason(policy="vllm", mode="replay", model="tiny", tp="2", dp="2").startswith(
            "--prefill policy=vllm is modelled for one"
        )


class TestDrafts:
    def test_numbers_of_drafts_are_points_with_the_acceptance_of_as_many(self) -> None:
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
        ("changes", "says"),
        [
            (
                {"mtp": 3},
                "Add the probability that each draft is accepted if those before it were, as in --mtp 3,acceptance=",
            ),
            ({"mtp": 8, "acceptance": "1"}, "a step verifies 1 to 7 drafts (0: none); write for example --mtp 3"),
            ({"mtp": 2, "acceptance": "0.5"}, "state one for each draft, such as acceptance=0.8/0.6"),
        ],
    )
    def test_acceptance_is_stated_and_never_assumed(self, changes: dict[str, object], says: str) -> None:
        with pytest.raises(UsageError, match=re.escape(says)):
            expand(H200X4, concurrency=8, mode="replay", **changes)

    def test_policies_of_other_engines_are_refused_with_drafts(self) -> None:
        drafts = {"mtp": 1, "acceptance": "0.85"}
        found = reason(H200X4, concurrency=8, mode="replay", policy="vllm", backend="triton", **drafts)
        assert found.startswith("--prefill policy=vllm is not modelled with drafts; leave out --mtp")
