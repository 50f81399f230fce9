"""Test benches exchange and collectives in one process: their work, and that wrong results fail the check."""

import pytest
import torch

from dcpbench.bench.bench_record import Case
from dcpbench.bench.operators import collectives, exchange
from dcpbench.bench.operators.collectives import Collectives
from dcpbench.bench.operators.exchange import ExchangeBench, Inputs, compute_work
from dcpbench.exchange import make_exchange


def make_case(variant: str = "ag_rs", **sizes) -> Case:
    """Return a case of 3 requests and 4 heads in a group of one rank."""
    default = {"heads": 4, "requests": 3, "ranks": 1, "value": 512, "q": "gathered"}
    return Case(variant=variant, calls=2, sizes=default | sizes)


@pytest.mark.parametrize("variant", ["ag_rs", "ag_rs-bf16", "a2a"])
@pytest.mark.parametrize(("value", "q"), [(512, "gathered"), (128, "gathered"), (512, "replicated")])
def test_correct_exchange_passes_the_check(value, q, variant, device):
    calls = ExchangeBench(device, 0).build_calls(make_case(variant, value=value, q=q))
    assert calls.check(calls.run) == ""
    assert calls.error() < exchange.LIMIT


class WrongExchange:
    """An exchange that passes its results through the function `spoil`."""

    def __init__(self, spec, spoil) -> None:
        self.right, self.spoil = make_exchange("ag_rs", exchange.get_world_group(), spec), spoil
        self.get_query_buffer, self.get_partial_buffers = self.right.get_query_buffer, self.right.get_partial_buffers

    def gather_q(self, q_BhQ):
        """See Exchange."""
        return self.spoil("q", self.right.gather_q(q_BhQ).clone())

    def merge_partials(self, o_BHR, lse_BH):
        """See Exchange."""
        return self.spoil("o", self.right.merge_partials(o_BHR, lse_BH))


def heads_swapped(what, x):
    """Reorder the ranks' heads in q."""
    return x.flip(1) if what == "q" else x


def two_percent_off(what, x):
    """Use weights that do not add up to 1."""
    return x * 1.02 if what == "o" else x


def requests_swapped(what, x):
    """Give one request another's output."""
    return x.flip(1) if what == "o" else x


def nan_from_an_empty_shard(what, x):
    """Return NaN instead of 0 for a request without rows on any rank."""
    if what == "o":
        x[:, exchange.EMPTY_EVERYWHERE] = float("nan")
    return x


@pytest.mark.parametrize("spoil", [heads_swapped, two_percent_off, requests_swapped, nan_from_an_empty_shard])
def test_wrong_exchange_fails_the_check(spoil, device, monkeypatch):
    monkeypatch.setattr(exchange, "make_variant", lambda _variant, _group, spec: WrongExchange(spec, spoil))
    calls = ExchangeBench(device, 0).build_calls(make_case())
    assert calls.check(calls.run) != ""


def test_pass_without_calls_fails_the_check(device):
    calls = ExchangeBench(device, 0).build_calls(make_case())
    assert calls.check(lambda: None) != ""


def test_inputs_include_requests_with_empty_shards(device):
    """Use NaN as o of empty shards, which must not reach any result."""
    inputs = Inputs.from_case(make_case(ranks=2), device, 0)
    assert torch.isneginf(inputs.lse_NBH)[:, :, 0].tolist() == [[False, False, True], [False, True, True]]
    assert inputs.o_NBHR.isnan()[:, :, 0, 0].tolist() == [[False, False, True], [False, True, True]]
    assert not inputs.merge_heads(slice(0, 4))[:, exchange.EMPTY_EVERYWHERE].any()


def test_work_of_the_minimum_traffic_and_of_ag_rs():
    """Use H=128, N=4, B=8. A rank lacks 3/4 of all heads: 8 · 128 · 3/4 = 768 rows. q: 768 · 576 · 2 B = 884,736 B. o:
    768 · 512 · 2 B = 786,432 B. lse: 768 · 4 B = 3,072 B. ag_rs: o in fp32, twice; lse of all heads from 3 ranks, 8 ·
    128 · 3 · 4 B = 12,288 B.
    """
    sizes = {"heads": 128, "requests": 8, "ranks": 4}
    symm = compute_work(make_case("symm", **sizes))
    assert symm.received_bytes == symm.comm_bytes == 884_736 + 786_432 + 3_072
    assert symm.barriers == 2
    assert compute_work(make_case("ag_rs", **sizes)).received_bytes == symm.received_bytes, (
        "the limit is the same for all"
    )
    assert compute_work(make_case("ag_rs", **sizes)).comm_bytes == 884_736 + 2 * 786_432 + 12_288
    assert compute_work(make_case("ag_rs-bf16", **sizes)).comm_bytes == 884_736 + 786_432 + 12_288


def test_work_leaves_out_data_that_options_keep_local():
    """Send no q and 128 of 512 columns: 786,432 / 4 + 3,072 B behind one barrier."""
    work = compute_work(make_case("a2a", heads=128, requests=8, ranks=4, value=128, q="replicated"))
    assert work.received_bytes == 786_432 // 4 + 3_072
    assert work.barriers == 1


def make_message_case(variant: str) -> Case:
    """Return a case of a [3, 8] message in bf16."""
    return Case(variant=variant, calls=2, sizes={"requests": 3, "width": 8, "ranks": 1})


@pytest.mark.parametrize("variant", collectives.NCCL)
def test_correct_collective_passes_the_check(variant, device):
    calls = Collectives(device, 0).build_calls(make_message_case(variant))
    assert calls.check(calls.run) == ""


@pytest.mark.parametrize("variant", collectives.NCCL)
def test_wrong_collective_fails_the_check(variant, device, monkeypatch):
    """Scale the result by a little more than rounding, or return zeros."""
    right = collectives.NCCL[variant]
    monkeypatch.setitem(collectives.NCCL, variant, lambda group, x: right(group, x) * 1.02)
    calls = Collectives(device, 0).build_calls(make_message_case(variant))
    assert calls.check(calls.run) != ""
    monkeypatch.setitem(collectives.NCCL, variant, lambda _group, x: torch.zeros_like(x))
    calls = Collectives(device, 0).build_calls(make_message_case(variant))
    assert calls.check(calls.run) != ""


@pytest.mark.parametrize("variant", collectives.INTO)
def test_collective_in_registered_memory_is_checked(variant, device, monkeypatch):
    """Replace registered memory by a buffer with wrong content."""
    make_buffer = lambda _owner, _group, nbytes, *_: torch.full((nbytes,), 0xFF, dtype=torch.uint8, device=device)  # noqa: E731
    monkeypatch.setattr(collectives, "get_shared_buffer", make_buffer)
    calls = Collectives(device, 0).build_calls(make_message_case(f"{variant}-registered"))
    assert calls.check(calls.run) == ""
    right = collectives.INTO[variant]
    monkeypatch.setitem(collectives.INTO, variant, lambda group, x, out: right(group, x, out) * 1.02)
    calls = Collectives(device, 0).build_calls(make_message_case(f"{variant}-registered"))
    assert calls.check(calls.run) != ""


def test_compute_expected_returns_the_collective_results():
    """Use messages 1 2 3 4 and 10 20 30 40 of two ranks."""
    messages = [torch.tensor([1.0, 2, 3, 4]), torch.tensor([10.0, 20, 30, 40])]
    assert collectives.compute_expected("all-gather", messages, 1).tolist() == [1, 2, 10, 20]
    assert collectives.compute_expected("all-to-all", messages, 1).tolist() == [3, 4, 30, 40]
    assert collectives.compute_expected("reduce-scatter", messages, 1).tolist() == [33, 44]
    assert collectives.compute_expected("all-reduce", messages, 0).tolist() == [11, 22, 33, 44]
    assert collectives.compute_expected("all-reduce-symm", messages, 0).tolist() == [11, 22, 33, 44]
