"""Cases of `bench kv-gather` from its options, with a note if rows exceed the pool."""

import pytest

from dcpbench.bench.bench_record import Case
from dcpbench.bench.cases import BenchOptions, list_kv_gather_cases
from dcpbench.errors import UsageError

NOTHING = dict.fromkeys(("requests", "tokens", "variant", "buffer", "pool_bytes", "layers"))


def kv_gather(ranks: int = 4, **options) -> list[Case]:
    """Return the cases on this number of GPUs with these options."""
    return list_kv_gather_cases(BenchOptions(cpu=False, ranks=ranks, typed=NOTHING | options))


def collect_buffers(cases: list[Case]) -> set[tuple[str, object, object]]:
    """Return the variants with their buffer for each number of tokens."""
    return {(case.variant, case.sizes["tokens"], case.sizes["buffer"]) for case in cases}


def test_longest_default_prefix_outgrows_the_pool_with_nccl_only():
    """4,194,304 tokens of 1,152 bytes are 4.5 GiB, more than the pool of 4 GiB; direct keeps a quarter, 1.1 GiB."""
    found = collect_buffers(kv_gather(buffer="pool"))
    assert ("nccl", 4194304, "outgrown") in found
    assert ("direct", 4194304, "pool") in found
    assert {kind for variant, tokens, kind in found if tokens < 4194304} == {"pool"}


def test_pool_is_used_to_the_last_row():
    """64 tokens on 4 ranks are parts of 16 rows, 18,432 bytes; nccl receives 4 of them."""
    part_bytes = 16 * 1152
    for pool_bytes, expected in (
        (4 * part_bytes, {("nccl", 64, "pool"), ("direct", 64, "pool")}),
        (4 * part_bytes - 1, {("nccl", 64, "outgrown"), ("direct", 64, "pool")}),
        (part_bytes - 1, {("nccl", 64, "outgrown"), ("direct", 64, "outgrown")}),
    ):
        cases = kv_gather(requests="1", tokens="64", buffer="pool", pool_bytes=f"{pool_bytes}B")
        assert collect_buffers(cases) == expected
        assert {case.sizes["pool_bytes"] for case in cases} == {pool_bytes}


def test_plain_buffers_never_outgrow_a_pool():
    assert {kind for _, _, kind in collect_buffers(kv_gather(buffer="plain", pool_bytes="1KB"))} == {"plain"}


def test_registered_pool_includes_the_own_part():
    """64 tokens on 4 ranks: NCCL receives 4 parts of 18,432 bytes, and the own part is in the pool, too; both are
    multiples of 256.
    """
    required = 5 * 16 * 1152
    for pool_bytes, expected in ((required, "registered"), (required - 1, "registered-outgrown")):
        cases = kv_gather(requests="1", tokens="64", buffer="registered", pool_bytes=f"{pool_bytes}B")
        assert collect_buffers(cases) == {("nccl", 64, expected)}


def test_registered_memory_is_measured_only_on_request():
    assert {kind for _, _, kind in collect_buffers(kv_gather(tokens="64"))} == {"pool", "plain"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool_bytes": "0B"}, "--pool-bytes 0B: must be more than 0 bytes; write for example --pool-bytes 100GiB."),
        ({"pool_bytes": "4"}, "--pool-bytes 4 has no unit; write for example --pool-bytes 100GiB or 40GB."),
        ({"buffer": "pol"}, "--buffer 'pol' is unknown; did you mean pool?"),
        ({"buffer": "registered", "variant": "direct"}, "which direct does not use; try --variant nccl."),
        ({"variant": "ag"}, "Write a comma list of: nccl, direct."),
        ({"requests": "100", "tokens": "64"}, "--tokens 64 are fewer than --requests 100; try --tokens 6400."),
    ],
)
def test_invalid_options_raise_usage_error_with_a_suggestion(options, message):
    with pytest.raises(UsageError) as caught:
        kv_gather(**options)
    assert message in str(caught.value)
