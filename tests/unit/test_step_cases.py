"""Test cases as steps for an engine: the right work, in separate slots and pages, the same on every rank."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpbench.points.layout import Layout
from dcpbench.serving.step_cases import CHECK, LATE, CaseMaker, CaseSteps, Extent, make_cases
from dcpbench.serving.step_model import compute_step_works
from dcpbench.serving.step_times import HOT, Case, Chunks, Decodes
from tests.unit import serve_record_builder
from tests.unit.serving_builder import make_config

CONFIG = make_config(pages=33, page_size=2, dcp=2, max_requests=6, chunk=16, max_context=40)
EXTENT = Extent(requests=6, context=40, pages=32, virtual_page=4, chunk=16)
VOCAB = 50


def list_steps(case: Case, **changes: object) -> CaseSteps:
    return CaseMaker(make_config(pages=33, max_requests=6, chunk=16, max_context=40, **changes), VOCAB).make_steps(case)


@pytest.mark.parametrize("case", make_cases(EXTENT), ids=str)
def test_step_has_the_work_of_its_case(case: Case) -> None:
    """Both the first step and its repetitions have the work that predictions assume."""
    made = list_steps(case)
    assert compute_step_works(made.first) == compute_step_works(made.again) == [case.compute_work()]


@pytest.mark.parametrize("case", make_cases(EXTENT), ids=str)
def test_requests_have_separate_slots_and_locations(case: Case) -> None:
    """Slot 0 and page 0, with locations 0 to 3, are padding; every token that a request reads or writes has a location."""
    (todo,) = list_steps(case).first.replicas
    assert [write.slot for write in todo.table] == list(range(1, case.requests + 1))
    locs = np.concatenate([write.locs for write in todo.table])
    assert len(set(locs.tolist())) == len(locs)
    assert locs.min() >= 4
    assert locs.max() < 33 * 4
    reads = [p + 1 for p in todo.positions] + [c.stop for c in todo.chunks]
    assert [len(write.locs) for write in todo.table] == reads


def test_requests_that_exceed_the_pool_share_pages() -> None:
    """The pool has 32 pages of 4 tokens, and six requests take ten pages each. No request has a page twice, and none is
    padding.
    """
    (todo,) = list_steps(Case(decodes=(Decodes(6, 40),))).first.replicas
    pages = [set((write.locs // 4).tolist()) for write in todo.table]
    assert [len(own) for own in pages] == [10] * 6
    assert set.union(*pages) == set(range(1, 33))


def test_chunks_begin_at_a_page_and_sample() -> None:
    """Two chunks of 5 tokens after 8 are [8, 13), in slots 1 and 2."""
    (todo,) = list_steps(Case(chunks=(Chunks(2, 5, 8),))).again.replicas
    assert [(c.slot, c.start, c.stop, c.samples) for c in todo.chunks] == [(1, 8, 13, True), (2, 8, 13, True)]


def test_repeated_step_has_the_same_positions() -> None:
    """A case can therefore be repeated for any number of tokens."""
    made = list_steps(Case(decodes=(Decodes(2, 40),)))
    assert made.first.replicas[0].positions == made.again.replicas[0].positions == [39, 39]
    assert not made.again.replicas[0].table


def test_all_replicas_have_the_same_work() -> None:
    made = list_steps(Case(decodes=(Decodes(2, 40),)), replicas=3)
    assert len(made.again.replicas) == 3
    assert len({id(replica) for replica in made.again.replicas}) == 1


def test_no_request_finishes() -> None:
    made = list_steps(Case(decodes=(Decodes(2, 40),), chunks=(Chunks(1, 4, 0),)))
    assert not made.first.finished
    assert not any(s.is_finished for s in made.first.replicas[0].sampled_sequences)


def test_prompts_are_equal_on_all_ranks_and_have_separate_numbers() -> None:
    """An engine identifies the prompt of a slot by its number, which no load may have."""
    makers = [CaseMaker(CONFIG, VOCAB) for _ in range(2)]
    case = Case(chunks=(Chunks(2, 5, 8),))
    found = [
        [c.sequence.request for _ in range(2) for c in m.make_steps(case).first.replicas[0].chunks] for m in makers
    ]
    for first, second in zip(*found, strict=True):
        assert first.number == second.number < 0
        assert (first.prompt == second.prompt).all()
        assert 0 <= first.prompt.min() <= first.prompt.max() < VOCAB
    assert all(a.number != b.number for a, b in itertools.combinations(found[0], 2))


@pytest.mark.parametrize("shared", [False, True])
def test_check_cases_have_prefixes_between_measured_ones(shared: bool) -> None:
    """Without capacity for a page of prefix, no chunk is checked: a chunk without a prefix is a line case."""
    for context, pages in itertools.product(range(9, 41), (4, 8, 32)):
        extent = Extent(requests=6, context=context, pages=pages, virtual_page=4, chunk=16, shared=shared)
        checked = [chunk for case in make_cases(extent) if case.use == CHECK for chunk in case.chunks]
        assert all(chunk.prefix > 0 and chunk.prefix % 4 == 0 for chunk in checked)


EXTENTS = st.builds(
    Extent,
    requests=st.integers(1, 6),
    context=st.integers(1, 48),
    pages=st.integers(1, 16),
    virtual_page=st.sampled_from([1, 2, 4]),
    chunk=st.just(300),
    shared=st.booleans(),
)


@given(tokens=st.integers(1, 48), extent=EXTENTS)
def test_fewest_chunks_are_the_first_number_that_fits(tokens: int, extent: Extent) -> None:
    """Each chunk has as many tokens as the longest request, and none is shared."""
    alone = dataclasses.replace(extent, shared=False)
    fits = [
        n
        for n in range(1, extent.max_running + 1)
        if alone.supports_case(Case(chunks=(Chunks(n, -(-tokens // n), 0),)))
    ]
    assert extent.compute_min_chunks(tokens) == (fits[0] if fits else None)


@given(tokens=st.integers(1, 48), extent=EXTENTS)
def test_chunks_with_most_attention_have_a_prefix_and_a_quarter_of_the_context(tokens: int, extent: Extent) -> None:
    """Chunks attend to a prefix, and to half of their own tokens on average; the result is None if no tokens are left
    for a prefix.
    """
    fewest = extent.compute_min_chunks(tokens) or 1
    numbers = [
        n for n in range(fewest, extent.max_running + 1) if n == fewest or tokens / (n - 1) > extent.context / LATE
    ]
    prefixes = {n: extent.compute_max_prefix(n, -(-tokens // n)) for n in numbers}
    attended = {n: prefix + tokens / n / 2 for n, prefix in prefixes.items() if prefix > 0}
    found = extent.compute_late_chunks(tokens)
    assert found in attended or found is None
    if found is None:
        assert not attended
    else:
        assert attended[found] == max(attended.values())
        assert extent.supports_case(Case(chunks=(Chunks(1, -(-tokens // found), prefixes[found]),)))


def test_chunk_sizes_are_measured_on_both_sides_of_kernel_changes() -> None:
    """The sizes are 768 rows and the next ones, 800; and 1,792 rows and the next ones, 1,856. These have no prefix,
    unless their size is measured anyway.
    """
    extent = Extent(requests=16, context=2000, pages=1000, virtual_page=64, chunk=4096)
    plain, changed = (make_cases(dataclasses.replace(extent, changes=changes)) for changes in ((), (512, 768, 1823)))
    more = [case for case in changed if case not in plain]
    assert set(plain) <= set(changed)
    assert sorted({case.compute_work().tokens for case in more}) == [800, 1792, 1856]
    assert all(not case.decodes and not case.compute_work().prefix for case in more)
    assert {544, 768} <= {case.compute_work().tokens for case in plain}


def test_rows_past_the_largest_step_are_not_measured() -> None:
    extent = Extent(requests=16, context=2000, pages=1000, virtual_page=64, chunk=600, changes=(256, 768))
    assert max(case.compute_work().tokens for case in make_cases(extent)) == 600


def test_case_text_has_requests_and_chunks() -> None:
    case = Case(decodes=(Decodes(47, 5500),), chunks=(Chunks(1, 2048, 256), Chunks(2, 100, 0)))
    assert str(case) == "47 × 1 token at 5,500 + 1 × 2,048 tokens at 256 + 2 × 100 tokens at 0"
    hot = Case(decodes=(Decodes(4, 20),), use=HOT, after=(Chunks(1, 512, 0),), since=2)
    assert str(hot) == "4 × 1 token at 20, 2 steps later, behind 1 × 512 tokens at 0"


def test_extent_covers_the_largest_of_all_points() -> None:
    """Two replicas share 5, 16 and 9 requests and a chunk; a page of 16 tokens on each of two ranks is 32 tokens."""
    loads = [("100", 512, 400), ("uniform:50-100", 2048, 900), ("300", 1024, 700)]
    points = [
        serve_record_builder.make_point(
            Layout(8, 2, 2), requests, {"input_tokens": prompts, "chunk": chunk}, context=context, page_size=16
        )
        for requests, (prompts, chunk, context) in zip((5, 16, 9), loads, strict=True)
    ]
    expected = Extent(
        requests=8,
        context=900,
        pages=99,
        virtual_page=32,
        chunk=1024,
        replicas=2,
        targets=(3, 5, 8),
        prompts=(100, 300),
    )
    assert Extent.from_points(points, pages=100, max_context=1000) == expected
    assert Extent.from_points(points, pages=100, max_context=899).context == 899
    assert Extent.from_points(points, pages=100, max_context=1000, changes=[768, 256]).changes == (256, 768)


@pytest.mark.parametrize(
    ("changed", "shared"),
    [
        ({}, False),
        ({"prefix_share": 0.5}, True),
        ({"prefix_share": 0.5, "prefix_cache": False}, False),
        ({"trace": "requests.jsonl"}, True),
        ({"trace": "requests.jsonl", "prefix_cache": False}, False),
        ({"turns": "4"}, True),
    ],
)
def test_extent_is_shared_if_any_load_shares_prefixes(changed: dict[str, object], shared: bool) -> None:
    """Requests with a common prefix, of a file, and of sessions share prefixes; one such load is enough."""
    one = serve_record_builder.make_point(changed={"prefix_cache": True} | changed)
    plain = serve_record_builder.make_point(changed={"prefix_cache": True})
    assert [Extent.from_points(points, pages=9, max_context=440).shared for points in ([one], [plain, one])] == [
        shared
    ] * 2


@pytest.mark.parametrize(
    ("arrivals", "open_loop", "targets"),
    [(["closed"], False, (4,)), (["closed", "poisson"], True, (4,)), (["poisson"], True, ())],
)
def test_extent_is_open_loop_if_any_load_has_arrival_times(
    arrivals: list[str], open_loop: bool, targets: tuple[int, ...]
) -> None:
    """The clients of a closed loop are target sizes; an open loop may have any number of requests."""
    points = [
        serve_record_builder.make_point(
            concurrency=4, changed={"arrival": a, "request_rate": 1.0 if a != "closed" else None}
        )
        for a in arrivals
    ]
    extent = Extent.from_points(points, pages=9, max_context=440)
    assert (extent.open_loop, extent.targets) == (open_loop, targets)
