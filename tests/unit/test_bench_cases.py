"""Options of a bench become cases: defaults of the device, shares of dcp, and words for what cannot work."""

import pytest

from dcpbench.bench.cases import BenchOptions, list_attention_cases, list_dp_slice_cases, list_kv_write_cases
from dcpbench.bench.record import Case
from dcpbench.errors import UsageError

KV = {
    "tokens": None,
    "dcp": None,
    "dtype": None,
    "variant": None,
    "layers": None,
    "scale": 1.0,
    "empty": True,
}
SLICE = {"tokens": None, "dp": None, "variant": None, "steps": None}


def kv_write(**typed) -> list[Case]:
    """Cases of kv-write with what was typed."""
    return list_kv_write_cases(BenchOptions(cpu=False, typed=KV | typed))


def dp_slice(**typed) -> list[Case]:
    """Cases of dp-slice with what was typed."""
    return list_dp_slice_cases(BenchOptions(cpu=False, typed=SLICE | typed))


def test_by_default_a_gpu_gets_16_to_65536_tokens_of_all_variants_in_both_types():
    """4 numbers of tokens × (dcp 1, dcp 8, dcp 8 with nothing owned) × 2 types × 3 variants = 72, of 61 layers."""
    cases = kv_write()
    assert len(cases) == 72
    assert {c.sizes["tokens"] for c in cases} == {16, 256, 4096, 65536}
    assert {c.calls for c in cases} == {61}


def test_one_token_of_dcp_is_this_ranks_and_an_empty_share_belongs_to_the_largest_dcp():
    """Of 10 tokens rank 0 of 3 owns 0, 3, 6 and 9, rank 0 of 4 owns 0, 4 and 8; the empty case is a rank of 4."""
    cases = kv_write(tokens="10", dcp="3,4", dtype="bf16", variant="filter")
    assert [(c.sizes["dcp"], c.sizes["owned"]) for c in cases] == [(3, 4), (4, 3), (4, 0)]


def test_variants_of_one_size_follow_each_other_so_that_they_can_share_tensors():
    cases = kv_write(tokens="16", dcp="2", dtype="fp8", empty=False)
    assert [c.variant for c in cases] == ["check-all", "filter", "masked-kernel"]
    assert len({tuple(c.sizes.items()) for c in cases}) == 1


def test_a_scale_is_a_column_only_where_something_is_scaled():
    cases = kv_write(tokens="16", dcp="1", empty=False, variant="filter", scale=0.5)
    assert [c.sizes.get("scale") for c in cases] == [None, 0.5]


def test_what_is_typed_twice_is_run_once():
    assert len(kv_write(tokens="16,16", dcp="1", empty=False, variant="filter,filter", dtype="bf16,bf16")) == 1


def test_each_way_to_divide_the_lengths_of_requests_is_a_case_of_its_own():
    typed = {"heads": "16", "requests": "8", "context": "100", "page": "1", "lengths": "uneven,even", "kv_dtype": None}
    cases = list_attention_cases(BenchOptions(cpu=False, typed=typed | {"backend": "triton", "layers": 2}))
    assert [c.sizes["lengths"] for c in cases] == ["even", "uneven"]


def test_rows_in_fp8_are_read_by_backends_that_can():
    typed = {"heads": "16", "requests": "8", "context": "100", "page": "64", "lengths": "even", "kv_dtype": "fp8,bf16"}
    cases = list_attention_cases(BenchOptions(cpu=False, typed=typed | {"backend": "flashinfer,triton", "layers": 2}))
    assert [(c.sizes["kv"], c.variant) for c in cases] == [
        ("bf16", "triton"),
        ("bf16", "flashinfer"),
        ("fp8", "triton"),
    ]
    with pytest.raises(UsageError, match="flashinfer does not read rows in fp8; use --backend triton"):
        list_attention_cases(
            BenchOptions(cpu=False, typed=typed | {"backend": "flashinfer", "kv_dtype": "fp8", "layers": 2})
        )


@pytest.mark.parametrize(
    ("packages", "backends"),
    [((), ["triton"]), (("flashinfer",), ["triton", "flashinfer"]), (("flash_mla",), ["triton", "flashmla"])],
)
def test_on_a_gpu_the_backends_that_are_installed_are_measured(packages, backends, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in packages else None)
    names = ("heads", "requests", "context", "page")
    typed = dict.fromkeys((*names, "kv_dtype", "lengths", "backend", "layers")) | dict.fromkeys(names, "1")
    cases = list_attention_cases(BenchOptions(cpu=False, typed=typed))
    assert sorted({c.variant for c in cases}) == sorted(backends)


def test_dp_slice_compares_both_variants_at_each_size():
    cases = dp_slice(tokens="16,32", dp="2", steps=3)
    assert [(c.variant, c.sizes["tokens"], c.sizes["dp"], c.calls) for c in cases] == [
        ("cuda-slice", 16, 2, 3),
        ("host-slice", 16, 2, 3),
        ("cuda-slice", 32, 2, 3),
        ("host-slice", 32, 2, 3),
    ]


@pytest.mark.parametrize(
    ("make", "typed", "says"),
    [
        (kv_write, {"tokens": "16,x"}, "'x' is not a positive whole number; write for example --tokens 16,256"),
        (kv_write, {"tokens": ""}, "'' is not a positive whole number"),
        (kv_write, {"tokens": "0"}, "'0' is not a positive whole number"),
        (kv_write, {"tokens": "9" * 30}, "9' is above 999,999,999; write for example --tokens 16,256"),
        (kv_write, {"dcp": "-2"}, "--dcp -2: '-2' is not a positive whole number; write for example --dcp 1,8"),
        (kv_write, {"dtype": "bf61"}, "--dtype 'bf61' is unknown; did you mean bf16?"),
        (kv_write, {"variant": "mask"}, "Write a comma list of: check-all, filter, masked-kernel."),
        (kv_write, {"layers": 0}, "--layers 0 is not a positive number; try --layers 61."),
        (kv_write, {"scale": 0.0}, "--scale 0 is not a positive number; try --scale 1."),
        (kv_write, {"scale": float("nan")}, "--scale nan is not a positive number"),
        (dp_slice, {"dp": "2,,4"}, "--dp 2,,4: '' is not a positive whole number; write for example --dp 8."),
        (dp_slice, {"steps": -1}, "--steps -1 is not a positive number; try --steps 16."),
        (dp_slice, {"variant": "host_slice"}, "did you mean host-slice?"),
    ],
)
def test_values_that_cannot_work_are_answered_with_ones_that_do(make, typed, says):
    with pytest.raises(UsageError) as caught:
        make(**typed)
    assert says in str(caught.value)
