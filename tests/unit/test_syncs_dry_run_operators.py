"""Test that a dry run predicts the waits of operators and backward passes that an H200 measured."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from dcpbench.syncs.dry_run import DryRun, dry_run
from dcpbench.syncs.dry_run.measured_operators import EQUIVALENT, FILE, is_measured
from dcpbench.syncs.formats import render_report
from dcpbench.syncs.gating import baseline as baselines
from dcpbench.syncs.gating.gate import Gate, compute_verdict
from tools.results import unpack
from tools.syncs.corpus.inputs import make_inputs
from tools.syncs.corpus.programs import PROGRAMS
from tools.syncs.operators.cases import _load_databases
from tools.syncs.operators.compare import read_measurement
from tools.syncs.operators.predict import predict
from tools.syncs.operators.table import format_operators

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dcpbench.syncs.sync_report import Report

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "syncs-graphs_H200"
RECORDS = [
    RESULTS / "hidden-syncs-operators_H200_2026-11-28/ops.jsonl",
    RESULTS / "documented-calls_H200_2026-11-30/documented.jsonl",
]
READ, TO_HOST, FROM_HOST, COUNT, STREAM = "SYNC001", "SYNC003", "SYNC004", "SYNC002", "SYNC006"
COMPARED = (  # operators of torch's own test database for which prediction and measurement are compared
    "cholesky",
    "cumprod",
    "linalg.eigh",
    "linalg.ldl_solve",
    "linalg.lstsq",
    "linalg.lu_factor_ex",
    "linalg.matrix_rank",
    "linalg.pinv",
    "linalg.svdvals",
    "masked_fill",
    "mode",
    "nn.functional.ctc_loss",
    "prod",
)


@pytest.fixture
def run() -> Iterator[DryRun]:
    """Start a dry run around the test."""
    with dry_run() as seen:
        yield seen


def count_waits(run: DryRun, call: Callable[[], object]) -> dict[str, int]:
    """Return how often the call waits, by rule."""
    run.syncs.clear()
    call()
    return dict(Counter(sync.rule for sync in run.syncs if not sync.may_block))


def make_matrices(*shape: int) -> torch.Tensor:
    """Return symmetric positive definite matrices on the virtual GPU if the shape is square, else random ones."""
    torch.manual_seed(0)
    made = torch.randn(shape)
    return (made @ made.mT + torch.eye(shape[-1]) if shape[-1] == shape[-2] else made).to("cuda")


class TestMatrices:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("svd", {TO_HOST: 1, READ: 1}),
            ("svdvals", {TO_HOST: 1, READ: 1}),
            ("eigh", {TO_HOST: 1, READ: 1}),
            ("eigvalsh", {TO_HOST: 1, READ: 1}),
            ("eig", {READ: 3, FROM_HOST: 1}),
            ("eigvals", {READ: 3, FROM_HOST: 1}),
            ("pinv", {TO_HOST: 1, READ: 1}),
            ("matrix_rank", {TO_HOST: 1, READ: 1}),
            ("cond", {TO_HOST: 1, READ: 1}),
            ("ldl_factor_ex", {TO_HOST: 6}),
            ("matrix_exp", {READ: 1, TO_HOST: 1, FROM_HOST: 1}),
            ("cholesky", {READ: 1}),
            ("inv", {READ: 1}),
            ("lu_factor_ex", {}),
            ("qr", {}),
            ("det", {}),
        ],
    )
    def test_waits_for_one_matrix_of_five_rows(self, run: DryRun, name: str, expected: dict[str, int]) -> None:
        matrix = make_matrices(5, 5)
        assert count_waits(run, lambda: getattr(torch.linalg, name)(matrix)) == expected

    @pytest.mark.parametrize("name", ["svd", "eigh", "pinv", "ldl_factor_ex", "matrix_exp"])
    def test_empty_matrix_does_not_wait(self, run: DryRun, name: str) -> None:
        matrix = torch.ones(0, 0, device="cuda")
        assert count_waits(run, lambda: getattr(torch.linalg, name)(matrix)) == {}

    def test_eig_and_lstsq_also_read_flags_of_an_empty_matrix(self, run: DryRun) -> None:
        matrix = torch.ones(0, 0, device="cuda")
        assert count_waits(run, lambda: torch.linalg.eig(matrix)) == {READ: 3}
        assert count_waits(run, lambda: torch.linalg.lstsq(matrix, matrix)) == {READ: 1}

    def test_batched_matrices_use_other_library_functions(self, run: DryRun) -> None:
        """Batched `eigh` copies nothing to the host, `ldl_solve` copies once for each matrix, and batched solves wait
        inside.
        """
        two = make_matrices(2, 5, 5)
        factor, pivots, _ = torch.linalg.ldl_factor_ex(two)
        lower = torch.linalg.cholesky_ex(two).L
        assert count_waits(run, lambda: torch.linalg.eigh(two)) == {READ: 1}
        assert count_waits(run, lambda: torch.linalg.ldl_factor_ex(two)) == {TO_HOST: 11}
        assert count_waits(run, lambda: torch.linalg.ldl_solve(factor, pivots, two)) == {TO_HOST: 2}
        assert count_waits(run, lambda: torch.cholesky_inverse(lower)) == {STREAM: 1}
        assert count_waits(run, lambda: torch.cholesky_inverse(lower[0])) == {}
        assert count_waits(run, lambda: torch.cholesky_solve(lower[0], lower)) == {STREAM: 1}
        assert count_waits(run, lambda: torch.cholesky_solve(lower[0], lower[0])) == {}

    @pytest.mark.parametrize("name", ["cholesky_ex", "inv_ex", "lu_factor_ex", "ldl_factor_ex", "solve_ex"])
    def test_check_errors_reads_a_flag(self, run: DryRun, name: str) -> None:
        """The docs of torch state: "this function synchronizes only when check_errors = True"."""
        matrix, function = make_matrices(5, 5), getattr(torch.linalg, name)
        given = (matrix, matrix) if name == "solve_ex" else (matrix,)
        unchecked = count_waits(run, lambda: function(*given))
        checked = count_waits(run, lambda: function(*given, check_errors=True))
        assert checked == {**unchecked, READ: 1}

    def test_lu_waits_only_for_non_square_matrices(self, run: DryRun) -> None:
        square, wide = make_matrices(3, 5, 5), make_matrices(5, 3)
        assert count_waits(run, lambda: torch.linalg.lu_factor_ex(wide)) == {STREAM: 1}
        assert count_waits(run, lambda: torch.linalg.lu(wide)) == {STREAM: 2}
        assert count_waits(run, lambda: torch.linalg.lu_factor_ex(square)) == {}
        assert count_waits(run, lambda: torch.linalg.lu(square)) == {}


class TestBackward:
    def test_prod_waits_once_except_for_a_single_number(self, run: DryRun) -> None:
        x = torch.ones(4, 3, device="cuda", requires_grad=True)
        one = torch.ones((), device="cuda", requires_grad=True)
        assert count_waits(run, lambda: x.prod().backward()) == {COUNT: 1}
        assert count_waits(run, lambda: x.prod(1).sum().backward()) == {READ: 1}
        assert count_waits(run, lambda: one.prod().backward()) == {}

    def test_cumprod_waits_three_times_with_a_zero(self, run: DryRun) -> None:
        x = torch.ones(4, device="cuda", requires_grad=True)
        mask = torch.tensor([1.0, 0.0, 1.0, 1.0], device="cpu").to("cuda")
        assert count_waits(run, lambda: x.cumprod(0).sum().backward()) == {READ: 1}
        assert count_waits(run, lambda: (x * mask).cumprod(0).sum().backward()) == {READ: 1, COUNT: 2}

    def test_masked_fill_waits_only_for_the_gradient_of_its_value(self, run: DryRun) -> None:
        x, mask = torch.ones(4, device="cuda", requires_grad=True), torch.ones(4, dtype=torch.bool, device="cuda")
        for grad, expected in ((True, {COUNT: 1}), (False, {})):
            y = x.masked_fill(mask, torch.ones((), device="cuda", requires_grad=grad)).sum()
            assert count_waits(run, y.backward) == expected

    def test_hooks_of_saved_tensors_run_once(self, run: DryRun) -> None:
        """The prediction reads no saved tensor: a checkpoint would compute it twice."""
        x, unpacked = torch.ones(4, device="cuda", requires_grad=True), 0

        def unpack_saved(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal unpacked
            unpacked += 1
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack_saved):
            y = x.prod()
        assert count_waits(run, y.backward) == {COUNT: 1}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack_saved):
            y = x.exp()
        count = unpacked
        y.sum().backward()
        assert (count, unpacked) == (2, 3)  # input and result of prod, result of exp

    def test_host_mask_is_copied_when_gradients_are_accumulated(self, run: DryRun) -> None:
        x, mask = (
            torch.ones(4, device="cuda", requires_grad=True),
            torch.tensor([True, False, True, True], device="cpu"),
        )
        y = x[mask].sum()
        assert count_waits(run, y.backward) == {FROM_HOST: 1}


class TestOtherOperators:
    def test_mode_waits_for_long_slices(self, run: DryRun) -> None:
        for size, expected in ((2048, {}), (2049, {COUNT: 1})):
            x = torch.ones(size, device="cuda")
            assert count_waits(run, x.mode) == expected

    def test_segment_reduce_checks_lengths_unless_unsafe(self, run: DryRun) -> None:
        x, lengths = torch.ones(4, device="cuda"), torch.full((2,), 2, device="cuda")
        assert count_waits(run, lambda: torch.segment_reduce(x, "sum", lengths=lengths)) == {READ: 2}
        assert count_waits(run, lambda: torch.segment_reduce(x, "sum", lengths=lengths, unsafe=True)) == {}

    def test_index_fill_reads_a_value_on_the_gpu_and_never_its_index(self, run: DryRun) -> None:
        x, index = torch.ones(4, device="cuda"), torch.zeros(1, dtype=torch.long, device="cuda")
        value = torch.ones((), device="cuda")
        assert count_waits(run, lambda: x.index_fill(0, index, 2.0)) == {}
        assert count_waits(run, lambda: x.index_fill(0, index, value)) == {READ: 1}

    def test_record_stream_does_not_wait(self, run: DryRun) -> None:
        x = torch.ones(4, device="cuda")
        assert count_waits(run, lambda: x.record_stream(torch.cuda.Stream())) == {}

    def test_ctc_loss_copies_lengths_in_both_directions(self, run: DryRun) -> None:
        """Measured are four copies to the host and three from it, and three from it in the backward pass."""
        logits = torch.randn(10, 2, 5, device="cuda", requires_grad=True)
        targets = torch.ones(2, 3, dtype=torch.long, device="cuda")
        lengths = torch.full((2,), 10, device="cuda"), torch.full((2,), 3, device="cuda")
        losses = []

        def forward() -> None:
            losses.append(torch.nn.functional.ctc_loss(logits.log_softmax(2), targets, *lengths, reduction="sum"))

        assert count_waits(run, forward) == {TO_HOST: 4, FROM_HOST: 3}
        assert count_waits(run, losses[0].backward) == {FROM_HOST: 3}

    @pytest.mark.usefixtures("run")
    def test_hermitian_fft_has_a_gradient(self) -> None:
        """The backward pass takes the real part of a tensor that is conjugated lazily."""
        values = torch.arange(5.0, device="cpu")
        there, here = values.to("cuda").requires_grad_(), values.clone().requires_grad_()
        torch.fft.hfft(there).square().sum().backward()
        torch.fft.hfft(here).square().sum().backward()
        assert there.grad is not None
        assert here.grad is not None
        torch.testing.assert_close(there.grad.cpu(), here.grad)

    def test_data_parallel_gradients_are_copied_on_the_gpu(self, run: DryRun, tmp_path: Path) -> None:
        """The measured backward pass of a group of one rank does not wait."""
        torch.distributed.init_process_group("nccl", rank=0, world_size=1, init_method=(tmp_path / "store").as_uri())
        try:
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4).to("cuda"))
            loss = model(torch.ones(2, 4, device="cuda")).sum()
            assert count_waits(run, loss.backward) == {}
        finally:
            torch.distributed.destroy_process_group()


class TestAgainstTheMeasurement:
    def test_operator_list_equals_the_record(self) -> None:
        """The second line of the list has the command that writes it again."""
        unpack(RESULTS)
        assert FILE.read_text(encoding="utf-8") == format_operators([read_measurement(path) for path in RECORDS])

    @pytest.mark.parametrize("name", COMPARED)
    def test_predicted_and_measured_cases_that_wait_are_equal(self, name: str) -> None:
        """The samples of these operators are the same in several versions of torch."""
        unpack(RESULTS)
        measured = read_measurement(RECORDS[0]).map_cases()
        infos, _ = _load_databases()
        groups = [f"op:{n}" for n, info in enumerate(infos) if info.name == name]
        calls = [call for group in groups for call in predict(group)["calls"] if call["what"] in measured]
        assert any(call["waits"] for call in calls)
        assert [call["what"] for call in calls if bool(call["waits"]) != measured[call["what"]]] == []

    def test_every_operator_of_the_corpus_is_measured(self, run: DryRun) -> None:
        inputs = make_inputs(torch.device("cuda", 0))
        for program in PROGRAMS:
            program.run(inputs)
        assert run.unmeasured == set()


class TestUnmeasured:
    @pytest.fixture
    def report(self, run: DryRun) -> Report:
        """Return the report of a program that uses two unmeasured operators, and does not wait."""
        x = torch.ones(4, device="cuda")
        library = torch.library.Library("dry_run_test", "FRAGMENT")
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda y: y + y, "CPU")
        torch.ops.dry_run_test.twice(x)
        torch.poisson(x)
        x.add_(1).view(2, 2).t()
        made = run.report(program="python engine.py")
        library._destroy()
        return made

    def test_unmeasured_operators_are_named_and_the_report_is_not_clean(self, report: Report) -> None:
        assert report.traces[0].coverage.unmeasured == ["aten::poisson", "dry_run_test::twice"]
        report.verdict = compute_verdict(report, Gate(root=ROOT))
        assert (report.verdict.status, report.verdict.exit_code) == ("cannot answer", 3)
        assert "aten::poisson, dry_run_test::twice" in report.verdict.reasons[0]
        assert "dry-run --write-baseline FILE -- python engine.py" in report.verdict.reasons[0]

    @pytest.mark.parametrize("form", ["table", "json", "markdown", "github", "junit", "sarif"])
    def test_every_format_names_unmeasured_operators_despite_a_baseline(self, report: Report, form: str) -> None:
        known = baselines.build_baseline([], "dry-run", report.traces[0].coverage.unmeasured)
        report.verdict = compute_verdict(report, Gate(root=ROOT, baseline=known))
        assert report.verdict.exit_code == 0
        text = render_report(report, form, root=ROOT, width=200, terminal=False)
        assert "poisson" in text
        assert "Clean" not in text or "apart from 2 operators that were never measured" in text

    def test_baseline_accepts_only_its_unmeasured_operators(self, report: Report) -> None:
        known = baselines.build_baseline([], "dry-run", ["aten::poisson", "aten::binomial"])
        found = compute_verdict(report, Gate(root=ROOT, baseline=known))
        assert found.exit_code == 3
        assert "dry_run_test::twice" in found.reasons[0]
        assert "poisson" not in found.reasons[0]
        assert found.stale == [
            "baseline: the operator aten::binomial was not used, or has been measured since: write the baseline again."
        ]

    def test_views_and_in_place_variants_need_no_measurement(self) -> None:
        assert is_measured(torch.ops.aten.add_.Tensor)
        assert is_measured(torch.ops.aten.unsqueeze.default)
        assert not is_measured(torch.ops.aten.binomial.default)

    def test_composite_operators_of_measured_ones_are_known(self) -> None:
        assert set(EQUIVALENT.values()) <= {line.split()[0] for line in FILE.read_text(encoding="utf-8").splitlines()}
        assert is_measured(torch.ops.aten.rand_like.default)
