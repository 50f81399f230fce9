"""Cases of a bench from its options: defaults of the device, shares of DCP, and errors with advice."""

import pytest

from dcpbench.bench.bench_record import Case
from dcpbench.bench.cases import BenchOptions, list_attention_cases, list_collectives_cases, list_gqa_cases
from dcpbench.errors import UsageError

COLLECTIVES = dict.fromkeys(("requests", "width", "variant", "layers"))


def list_cases(**typed) -> list[Case]:
    """Return the cases of collectives on two ranks with these options."""
    return list_collectives_cases(BenchOptions(cpu=False, ranks=2, typed=COLLECTIVES | typed))


def test_gpu_defaults_are_1_to_512_requests_of_all_collectives():
    """There are 5 collectives × 5 numbers of requests."""
    cases = list_cases()
    assert len(cases) == 25
    assert {c.sizes["requests"] for c in cases} == {1, 8, 32, 128, 512}


def test_variants_of_one_size_are_adjacent_to_be_measured_in_turns():
    cases = list_cases(requests="16", width="64", variant="all-reduce,all-gather")
    assert [c.variant for c in cases] == ["all-gather", "all-reduce"]
    assert len({tuple(c.sizes.items()) for c in cases}) == 1


def test_repeated_option_values_give_one_case():
    assert len(list_cases(requests="16,16", width="64", variant="all-reduce,all-reduce")) == 1


ONE_ROW = {"kv_dtype": None, "query_length": None}


def test_query_rows_are_measured_together_and_as_separate_requests():
    """FlashInfer takes query rows as requests only; all variants of a number of rows have the same sizes, so that they
    take turns.
    """
    typed = {"heads": "16", "requests": "8", "context": "100", "page": "64", "lengths": "even", "kv_dtype": None}
    typed |= {"backend": "flashinfer,triton", "layers": 2, "query_length": "1,4"}
    cases = list_attention_cases(BenchOptions(cpu=False, typed=typed))
    assert [(c.sizes.get("query_length"), c.variant) for c in cases] == [
        (None, "triton"),
        (None, "flashinfer"),
        (4, "triton"),
        (4, "triton-rows"),
        (4, "flashinfer-rows"),
    ]
    for wrong, message in (
        ({"query_length": "9"}, "--query-length 9 is above 8"),
        ({"query_length": "x"}, "--query-length x: 'x' is not a positive whole number"),
        ({"kv_dtype": "fp9"}, "--kv-dtype 'fp9' is unknown"),
        (
            {"context": "100,3"},
            "--context 3 with --query-length 4: each query row has a KV row; use --context 4 or more.",
        ),
    ):
        with pytest.raises(UsageError, match=message):
            list_attention_cases(BenchOptions(cpu=False, typed=typed | wrong))


def test_even_and_uneven_lengths_are_separate_cases():
    typed = {"heads": "16", "requests": "8", "context": "100", "page": "1", "lengths": "uneven,even"} | ONE_ROW
    cases = list_attention_cases(BenchOptions(cpu=False, typed=typed | {"backend": "triton", "layers": 2}))
    assert [c.sizes["lengths"] for c in cases] == ["even", "uneven"]


def test_fp8_rows_are_measured_with_backends_that_support_them():
    typed = (
        {"heads": "16", "requests": "8", "context": "100", "page": "64", "lengths": "even"}
        | ONE_ROW
        | {"kv_dtype": "fp8,bf16"}
    )
    cases = list_attention_cases(BenchOptions(cpu=False, typed=typed | {"backend": "flashinfer,triton", "layers": 2}))
    assert [(c.sizes["kv"], c.variant) for c in cases] == [
        ("bf16", "triton"),
        ("bf16", "flashinfer"),
        ("fp8", "triton"),
    ]
    typed |= {"backend": "flashinfer", "kv_dtype": "fp8", "layers": 2, "kv_heads": "4", "head_dim": "128"}
    for list_them in (list_attention_cases, list_gqa_cases):
        with pytest.raises(UsageError, match="flashinfer does not read rows in fp8; use --backend triton"):
            list_them(BenchOptions(cpu=False, typed=typed))


@pytest.mark.parametrize(
    ("packages", "backends"),
    [((), ["triton"]), (("flashinfer",), ["triton", "flashinfer"]), (("flash_mla",), ["triton", "flashmla"])],
)
def test_installed_backends_are_measured_on_a_gpu(packages, backends, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in packages else None)
    names = ("heads", "requests", "context", "page")
    typed = dict.fromkeys((*names, *ONE_ROW, "lengths", "backend", "layers")) | dict.fromkeys(names, "1")
    cases = list_attention_cases(BenchOptions(cpu=False, typed=typed))
    assert sorted({c.variant for c in cases}) == sorted(backends)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ({"requests": "16,x"}, "'x' is not a positive whole number; write for example --requests 1,8"),
        ({"requests": ""}, "'' is not a positive whole number"),
        ({"requests": "0"}, "'0' is not a positive whole number"),
        ({"requests": "2,,4"}, "--requests 2,,4: '' is not a positive whole number"),
        ({"requests": "9" * 30}, "9' is above 999,999,999; write for example --requests 1,8"),
        ({"width": "-2"}, "--width -2: '-2' is not a positive whole number"),
        ({"variant": "all_gather"}, "--variant 'all_gather' is unknown; did you mean all-gather?"),
        ({"variant": "sum"}, "Write a comma list of: all-gather, reduce-scatter"),
        ({"layers": 0}, "--layers 0 is not a positive number; try --layers 16."),
    ],
)
def test_invalid_option_values_raise_errors_with_valid_ones(typed, message):
    with pytest.raises(UsageError) as caught:
        list_cases(**typed)
    assert message in str(caught.value)
