"""Options of `bench kv-gather` become cases, which say what has no room in the pool."""

import pytest

from dcpbench.bench.bench_record import Case
from dcpbench.bench.cases import BenchOptions, list_kv_gather_cases
from dcpbench.errors import UsageError

NOTHING = dict.fromkeys(("requests", "tokens", "variant", "buffer", "pool_bytes", "layers"))


def kv_gather(ranks: int = 4, **typed) -> list[Case]:
    """Cases on so many GPUs, with what was typed."""
    return list_kv_gather_cases(BenchOptions(cpu=False, ranks=ranks, typed=NOTHING | typed))


def buffers(cases: list[Case]) -> set[tuple[str, object, object]]:
    """Return which way has which buffer at how many tokens."""
    return {(case.variant, case.sizes["tokens"], case.sizes["buffer"]) for case in cases}


def test_by_default_the_longest_prefix_outgrows_the_pool_of_4_gib_where_all_ranks_rows_are_received():
    """4,194,304 tokens of 1,152 bytes are 4.5 GiB, and a quarter of them, which direct keeps, 1.1 GiB."""
    found = buffers(kv_gather(buffer="pool"))
    assert ("nccl", 4194304, "outgrown") in found
    assert ("direct", 4194304, "pool") in found
    assert {kind for way, tokens, kind in found if tokens < 4194304} == {"pool"}


def test_a_pool_is_full_to_the_last_row():
    """64 tokens on 4 ranks: parts of 16 rows, 18,432 bytes; nccl receives 4 of them."""
    part_bytes = 16 * 1152
    for pool_bytes, expected in (
        (4 * part_bytes, {("nccl", 64, "pool"), ("direct", 64, "pool")}),
        (4 * part_bytes - 1, {("nccl", 64, "outgrown"), ("direct", 64, "pool")}),
        (part_bytes - 1, {("nccl", 64, "outgrown"), ("direct", 64, "outgrown")}),
    ):
        cases = kv_gather(requests="1", tokens="64", buffer="pool", pool_bytes=f"{pool_bytes}B")
        assert buffers(cases) == expected
        assert {case.sizes["pool_bytes"] for case in cases} == {pool_bytes}


def test_without_a_pool_nothing_can_outgrow_it():
    assert {kind for _, _, kind in buffers(kv_gather(buffer="plain", pool_bytes="1KB"))} == {"plain"}


def test_a_registered_pool_holds_the_own_part_too_and_says_when_it_is_outgrown():
    """64 tokens on 4 ranks: 4 parts of 18,432 bytes received, and the own one; both multiples of 256. NCCL alone."""
    need = 5 * 16 * 1152
    for pool_bytes, expected in ((need, "registered"), (need - 1, "registered-outgrown")):
        cases = kv_gather(requests="1", tokens="64", buffer="registered", pool_bytes=f"{pool_bytes}B")
        assert buffers(cases) == {("nccl", 64, expected)}


def test_registered_memory_is_measured_where_it_is_asked_for():
    assert {kind for _, _, kind in buffers(kv_gather(tokens="64"))} == {"pool", "plain"}


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ({"pool_bytes": "0B"}, "--pool-bytes 0B: must be more than 0 bytes; write for example --pool-bytes 100GiB."),
        ({"pool_bytes": "4"}, "--pool-bytes 4 has no unit; write for example --pool-bytes 100GiB or 40GB."),
        ({"buffer": "pol"}, "--buffer 'pol' is unknown; did you mean pool?"),
        ({"buffer": "registered", "variant": "direct"}, "which direct does not use; try --variant nccl."),
        ({"variant": "ag"}, "Write a comma list of: nccl, direct."),
        ({"requests": "100", "tokens": "64"}, "--tokens 64 are fewer than --requests 100; try --tokens 6400."),
    ],
)
def test_values_that_cannot_work_are_answered_with_ones_that_do(typed, says):
    with pytest.raises(UsageError) as caught:
        kv_gather(**typed)
    assert says in str(caught.value)
