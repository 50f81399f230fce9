"""The backend `triton` of grouped-query attention: our own kernel, its workspace, and its tile sizes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
import triton

from dcpbench.kernels.attention.partition import LN_2, PartialOutputs
from dcpbench.kernels.attention.triton_mla import INTERPRETED_PARTS, LOG2_E, PageTables
from dcpbench.kernels.block_scaled import get_launch_options
from dcpbench.kernels.gqa.decode_kernel import decode_kernel

if TYPE_CHECKING:
    from dcpbench.kernels.attention import Shards
    from dcpbench.kernels.gqa import GqaSpec

MAX_GROUP_BLOCK = 64  # maximum number of query heads of one program
MIN_DOT_SIZE = 16  # side of the smallest product that the tensor cores take
MAX_HEAD_DIM = 128  # columns of a head up to which several programs fit on a multiprocessor
ROWS = 64  # rows of a tile in 16 bits
REGISTERS, MAX_REGISTERS = 65536, 255  # registers of a multiprocessor, and the most of a thread


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Sizes of a program's tiles, and the number of programs for each multiprocessor."""

    rows: int
    warps: int
    stages: int
    programs: int

    @property
    def registers(self) -> int:
        """Return the registers of a thread with which all programs of a multiprocessor run at the same time."""
        return min(REGISTERS // (32 * self.warps * self.programs) // 8 * 8, MAX_REGISTERS)


def choose_tiling(spec: GqaSpec) -> Tiling:
    """Return the tiling for these sizes; a multiprocessor holds the tiles of all stages of all its programs."""
    if spec.dtype == torch.float32:
        return Tiling(rows=32, warps=4, stages=2, programs=1)
    if spec.query_length * spec.heads // spec.kv_heads > MAX_GROUP_BLOCK // 2 or spec.head_dim > MAX_HEAD_DIM:
        return Tiling(rows=ROWS, warps=4, stages=4, programs=1)
    return Tiling(rows=ROWS, warps=4, stages=3, programs=3)


class TritonGqa:
    """Triton backend; X must be a power of two of at least 16.

    Work is divided on the device in each run, from the lengths there, so lengths and tables may change in place at any
    time. A run is two kernels: the attention, and the merge of requests that were cut.
    """

    rounds: tuple[str, ...] = ()

    def __init__(self, spec: GqaSpec, tiling: Tiling | None = None) -> None:
        self.spec = spec
        self.tiling = tiling or choose_tiling(spec)
        group = spec.query_length * (spec.heads // spec.kv_heads)
        self.block_g = min(MAX_GROUP_BLOCK, max(MIN_DOT_SIZE, triton.next_power_of_2(group)))
        self.head_blocks = spec.kv_heads * triton.cdiv(group, self.block_g)
        programs = (
            self.tiling.programs * torch.cuda.get_device_properties(spec.device).multi_processor_count
            if spec.device.type == "cuda"
            else INTERPRETED_PARTS * self.head_blocks
        )
        self.parts = max(1, programs // self.head_blocks)
        self.launch_options = get_launch_options(spec.device)
        self.tables = PageTables(spec)
        heads = spec.query_length * spec.heads  # of a request
        self.partial = PartialOutputs(spec.requests, self.parts, heads, spec.head_dim, spec.device)

    def plan(self, shards: Shards) -> None:
        """Implement Backend.plan."""
        self.tables.copy_tables(shards)

    def plan_on_device(self) -> None:
        """Do nothing, see Backend: each run divides its own work."""

    def run(self, q_BHX: torch.Tensor, kv: torch.Tensor, o_BHX: torch.Tensor, lse_BH: torch.Tensor) -> None:
        """Implement Backend.run."""
        spec, tiling, tables = self.spec, self.tiling, self.tables
        decode_kernel[(self.parts * self.head_blocks,)](
            q_BHX,
            kv,
            tables.pages,
            tables.lengths,
            tables.row_lengths,
            self.partial.o,
            self.partial.lse,
            self.partial.of_request,
            o_BHX,
            lse_BH,
            spec.scale * spec.kv_scale * LOG2_E,
            spec.kv_scale,
            LN_2,
            tables.pages.stride(0),
            spec.kv_heads,
            spec.requests,
            self.parts,
            GROUP=spec.heads // spec.kv_heads,
            X=spec.head_dim,
            PAGE=spec.page_size,
            BLOCK_B=max(32, triton.next_power_of_2(spec.requests)),
            BLOCK_G=self.block_g,
            BLOCK_K=tiling.rows,
            LEAST=2,
            SLACK=2,
            PRECISION="ieee" if q_BHX.dtype == torch.float32 else "tf32",
            QUERY_LENGTH=spec.query_length,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            maxnreg=tiling.registers,
            **self.launch_options,
        )
        self.partial.merge(tables.lengths, o_BHX, lse_BH, **self.launch_options)
