"""Bench kv-write: a layer's new KV rows go to the pool of a rank that owns one token of N; -1 marks the others.

    check-all       check whether all rows are valid, filter if not: the code before the published fix
    filter          always filter: the published fix, which is described as avoiding synchronisation
    masked-kernel   the mask inside a kernel

Every layer has its own pool and rows, which a pass therefore reads and writes in device memory. A pool is poisoned with
NaN, and the rows of tokens that this rank does not own are NaN of other bits, so that every misplaced write or read is
detected.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import torch

from dcpbench.bench.operators.calls import Calls
from dcpbench.errors import CapacityError
from dcpbench.kernels.kv_write import convert_to_stored, write_rows, write_rows_reference
from dcpbench.points.floors import Work
from dcpbench.points.memory import GIB
from dcpbench.points.shapes import KV_WIDTH

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcpbench.bench.record import Case

SPARE_ROWS = 64
"""Unused rows of a pool, in every layer."""
POISON = {torch.bfloat16: 0x7FEB, torch.uint8: 0xFF}
"""Bits of the NaN that fills pools, by dtype of the pool: bf16 and float8_e4m3fn as bytes."""
FOREIGN = 0x7FC0
"""bf16 bits of another NaN, for rows that are not this rank's; in float8_e4m3fn it becomes 0x7F."""
STORAGE = {"bf16": torch.bfloat16, "fp8": torch.uint8}
"""Dtype of a pool; fp8 is stored as bytes, because index_put does not support float8."""


def check_all(kv_KQ: torch.Tensor, new_BQ: torch.Tensor, loc_B: torch.Tensor, scale: float) -> None:
    """Write with the code before the fix: read a value of the mask on the host, then filter with it if necessary."""
    valid = loc_B >= 0
    if not valid.all():
        loc_B, new_BQ = loc_B[valid], new_BQ[valid]
    kv_KQ[loc_B] = _convert_to_stored(new_BQ, kv_KQ.dtype, scale)


def filter_always(kv_KQ: torch.Tensor, new_BQ: torch.Tensor, loc_B: torch.Tensor, scale: float) -> None:
    """Write with the published fix: always filter; each boolean index needs the number of remaining rows."""
    valid = loc_B >= 0
    kv_KQ[loc_B[valid]] = _convert_to_stored(new_BQ[valid], kv_KQ.dtype, scale)


def masked_kernel(kv_KQ: torch.Tensor, new_BQ: torch.Tensor, loc_B: torch.Tensor, scale: float, share: int = 1) -> None:
    """Write rows with the mask in a kernel, without a count. Without a GPU it runs in Triton's interpreter.

    The preceding kernel writes another layer, so all inputs of this one have been written long before: `settled`.
    """
    write_rows(kv_KQ, new_BQ, loc_B, scale=scale, share=share, settled=True)


VARIANTS: dict[str, Callable[..., None]] = {
    "check-all": check_all,
    "filter": filter_always,
    "masked-kernel": masked_kernel,
}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Tensors that all variants of a case share."""

    pool: torch.Tensor
    """[layers, rows, 576]"""
    new: torch.Tensor
    """[layers, tokens, 576]: the same numbers for each, at other addresses"""
    loc: torch.Tensor
    """[tokens], int64: a row of the pool, or -1"""
    scale: float

    @functools.cached_property
    def wanted(self) -> torch.Tensor:
        """Return a layer of the pool as written by the reference, one row at a time on the host."""
        wanted = torch.empty_like(self.pool[0], device="cpu")
        write_poison(wanted)
        write_rows_reference(wanted, self.new[0].cpu(), self.loc.cpu(), self.scale)
        return wanted.to(self.pool.device)

    def check_pass(self, run: Callable[[], None]) -> str:
        """Poison all layers, run a pass, compare every byte."""
        write_poison(self.pool)
        run()
        for layer, got in enumerate(self.pool):
            wrong = (got.view(torch.uint8) != self.wanted.view(torch.uint8)).any(dim=1).nonzero().flatten()
            if len(wrong):
                return f"layer {layer}: {len(wrong)} of {len(got)} rows differ, the first is row {int(wrong[0])}"
        return ""


class KvWrite:
    """Build cases; inputs are reused if only the variant changes between cases."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device, self.seed = device, seed
        self._key: tuple[object, ...] = ()
        self._inputs: Inputs | None = None

    def build_calls(self, case: Case) -> Calls:
        """Return calls of a case with sizes tokens, dcp, owned, dtype and optionally scale, one for each of
        `case.calls` layers.
        """
        key = (*case.sizes.items(), case.calls)
        if key != self._key or self._inputs is None:
            self._inputs = None  # frees the old pool before the new one is made
            self._inputs, self._key = self._make_inputs(case), key
        inputs = self._inputs
        write = VARIANTS[case.variant]
        if case.variant == "masked-kernel":  # the one that has use for it
            write = functools.partial(write, share=int(case.sizes["dcp"]))
        row_bytes = KV_WIDTH * (inputs.new.itemsize + inputs.pool.itemsize)
        copied_bytes = int(case.sizes["owned"]) * row_bytes
        return Calls(
            calls=[
                functools.partial(write, kv, new, inputs.loc, inputs.scale)
                for kv, new in zip(inputs.pool, inputs.new, strict=True)
            ],
            check=inputs.check_pass,
            written_bytes=case.calls * copied_bytes,
            work=Work(memory_bytes=copied_bytes + inputs.loc.nbytes),
        )

    def _make_inputs(self, case: Case) -> Inputs:
        tokens, owned, dcp = (int(case.sizes[name]) for name in ("tokens", "owned", "dcp"))
        dtype = STORAGE[str(case.sizes["dtype"])]
        generator = torch.Generator().manual_seed(self.seed)
        # Rank 0 of dcp, or a rank without owned tokens.
        mine = (torch.arange(tokens) % dcp == 0) & (owned > 0)
        loc = torch.where(mine, torch.randperm(tokens + SPARE_ROWS, generator=generator)[:tokens], -1)
        new = torch.randn(tokens, KV_WIDTH, generator=generator).to(torch.bfloat16)
        new.view(torch.int16)[~mine] = FOREIGN
        shape = (case.calls, tokens + SPARE_ROWS, KV_WIDTH)
        try:
            pool = torch.empty(shape, dtype=dtype, device=self.device)
            sources = new.to(self.device).expand(case.calls, -1, -1).clone()
        except torch.OutOfMemoryError as e:
            need = math.prod(shape) * (dtype.itemsize + new.itemsize) / GIB
            raise CapacityError(
                f"pools and rows of {case.calls} layers, {need:.1f} GiB, do not fit; lower --tokens or --layers."
            ) from e
        return Inputs(pool=pool, new=sources, loc=loc.to(self.device), scale=float(case.sizes.get("scale", 1.0)))


def write_poison(kv: torch.Tensor) -> None:
    """Fill a pool with a NaN that occurs nowhere else here."""
    bits = kv.view(torch.int16) if kv.dtype == torch.bfloat16 else kv
    bits.fill_(POISON[kv.dtype])


def _convert_to_stored(new_BQ: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Return rows in the pool's format; without a scale by the plain cast of the published code."""
    if dtype == torch.uint8 and scale == 1.0:
        return new_BQ.to(torch.float8_e4m3fn).view(dtype)
    return convert_to_stored(new_BQ, dtype, scale)
