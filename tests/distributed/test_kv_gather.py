"""Test the gather of a KV prefix over 2 and 4 gloo ranks that read each other's memory."""

import json

import pytest

from tests.distributed import kv_gather_ranks as ranks
from tests.distributed.forked import run_forked


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.long)])
def found(request, tmp_path_factory):
    """Return the results of each rank, in rank order."""
    folder = tmp_path_factory.mktemp("gather")
    run_forked("tests.distributed.kv_gather_ranks", str(request.param), str(folder), log=folder / "log")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(request.param)]


@pytest.mark.distributed
class TestKvGather:
    def test_every_variant_and_buffer_gathers_all_rows_in_token_order(self, found):
        """Gather twice in a row on every rank, so that a buffer is overwritten right after its use."""
        for rank in found:
            for case in ranks.list_cases(len(found)):
                assert rank[case.name()]["differences"] == [""] * 3, case.name()

    def test_pass_without_a_layer_fails_the_check(self, found):
        assert {rank["a call is missing"] for rank in found} == {"layer 1: 7 of 7 rows differ, the first is token 0"}

    def test_received_bytes_are_the_rows_of_other_ranks(self, found):
        """Use 50 tokens of requests with 16 and 34: 2 ranks hold 25 each, of 4 the first holds 4 + 9 and the last 4 +
        8. A row is 1,152 bytes. nccl receives N − 1 parts of the largest size, direct only the rows.
        """
        held = {2: [25, 25], 4: [13, 13, 12, 12]}[len(found)]
        for own, rank in zip(held, found, strict=True):
            by_variant = {
                case.variant: rank[case.name()] for case in ranks.list_cases(len(found)) if case.sizes["tokens"] == 50
            }
            assert by_variant["direct"]["received_bytes"] == by_variant["nccl"]["received_bytes"] == (50 - own) * 1152
            assert by_variant["nccl"]["comm_bytes"] == (len(found) - 1) * held[0] * 1152
            assert by_variant["direct"]["comm_bytes"] == (50 - own) * 1152
