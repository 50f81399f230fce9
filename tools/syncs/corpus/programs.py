"""List the programs of the corpus with their synchronisations.

The synchronisations were measured on an H200 with torch 2.11 and CUDA 13.0 behind queued GPU work: a program blocks if and only if it
returns late. `results/` has the record.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dcpbench.syncs.rules import ALLOCATION, DEVICE, EVENT, FROM_HOST, PAGEABLE, SCALAR, SHAPE, STREAM, TO_HOST
from tools.syncs.corpus import copies, reads, threads

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcpbench.syncs.rules import Rule
    from tools.syncs.corpus.inputs import Inputs


@dataclasses.dataclass(frozen=True)
class Program:
    """Hold one small program; `expected` has a rule for each of its blocking calls."""

    run: Callable[[Inputs], None]
    expected: tuple[Rule, ...] = ()
    hazards: tuple[Rule, ...] = ()  # rules of calls that may block, but do not at this size; totals leave them out

    @property
    def name(self) -> str:
        """Return the name of the function, which is that of its sites."""
        return self.run.__name__


PROGRAMS = (
    Program(reads.bool_all, (SCALAR,)),
    Program(reads.item, (SCALAR,)),
    Program(reads.if_tensor, (SCALAR,)),
    Program(reads.range_tensor, (SCALAR,)),
    Program(reads.slice_gpu_scalar, (SCALAR,)),
    Program(reads.arange_gpu_scalar, (SCALAR,)),
    Program(reads.full_gpu_fill, (SCALAR,)),
    Program(reads.equal),
    Program(reads.equal_other, (SCALAR,)),
    Program(reads.allclose, (SCALAR,)),
    Program(reads.isnan_any_assert),
    Program(reads.print_tensor, (SCALAR,) * 13 + (SHAPE, TO_HOST)),
    Program(reads.nonzero, (SHAPE,)),
    Program(reads.nonzero_static),
    Program(reads.argwhere, (SHAPE,)),
    Program(reads.where_one_argument, (SHAPE,)),
    Program(reads.getitem_boolmask, (SHAPE,)),
    Program(reads.masked_select, (SHAPE,)),
    Program(reads.setitem_boolmask_scalar),
    Program(reads.setitem_boolmask_tensor, (SHAPE,) * 2),
    Program(reads.index_put_bool_tensor, (SHAPE,)),
    Program(reads.masked_fill),
    Program(reads.unique, (SHAPE,)),
    Program(reads.repeat_interleave, (SHAPE,) * 2),
    Program(reads.repeat_interleave_output_size),
    Program(reads.bincount, (SHAPE,) * 2),
    Program(reads.bincount_minlength, (SHAPE,) * 2),
    Program(reads.histc, (SHAPE,) * 2),
    Program(reads.one_hot, (SHAPE,)),
    Program(reads.one_hot_num_classes),
    Program(reads.linalg_inv, (SCALAR,)),
    Program(reads.normal_std, (SCALAR,) * 2),
    Program(reads.sub_alpha, (SCALAR,)),
    Program(reads.in_a_thread, (SCALAR,)),
    Program(reads.topk),
    Program(reads.sort),
    Program(reads.cumsum),
    Program(reads.multinomial),
    Program(reads.randperm),
    Program(reads.searchsorted),
    Program(reads.scatter),
    Program(reads.index_select),
    Program(reads.index_put_accumulate),
    Program(reads.clip_grad),
    Program(reads.pad_sequence),
    Program(copies.cpu, (TO_HOST,)),
    Program(copies.numpy, (TO_HOST,)),
    Program(copies.tolist, (TO_HOST,)),
    Program(copies.split_gpu_sizes, (TO_HOST,)),
    Program(copies.d2h_nonblocking_pinned),
    Program(copies.d2h_pinned_blocking, (TO_HOST,)),
    Program(copies.d2h_pageable_nonblocking, (PAGEABLE,)),
    Program(copies.to_cpu_nonblocking),
    Program(copies.h2d_pageable, (FROM_HOST,)),
    Program(copies.h2d_pageable_nonblocking, hazards=(PAGEABLE,)),
    Program(copies.h2d_pageable_nonblocking_large, (PAGEABLE,)),
    Program(copies.h2d_pinned_nonblocking),
    Program(copies.tensor_from_list, (FROM_HOST,)),
    Program(copies.tensor_from_list_to, hazards=(PAGEABLE,)),
    Program(copies.tensor_from_list_pinned),
    Program(copies.index_int_list, (FROM_HOST,)),
    Program(copies.index_cpu_mask),
    Program(copies.setitem_number, (FROM_HOST,)),
    Program(copies.setitem_row),
    Program(copies.add_cpu_scalar),
    Program(copies.device_sync, (DEVICE,)),
    Program(copies.stream_sync, (STREAM,)),
    Program(copies.event_sync, (EVENT,)),
    Program(copies.event_query),
    Program(copies.stream_wait),
    Program(copies.malloc_new),
    Program(copies.empty_cache, (ALLOCATION,)),
    Program(copies.host_item),
    Program(copies.host_tolist),
    Program(copies.host_mask),
    Program(copies.host_made),
    Program(copies.slice_python_int),
    Program(threads.kv_write_check_all, (SCALAR, SHAPE, SHAPE)),
    Program(threads.kv_write_filter, (SHAPE,) * 2),
    Program(threads.kv_write_masked_kernel),
    Program(threads.dp_slice_cuda, (SCALAR,) * 2),
    Program(threads.dp_slice_host),
    Program(threads.dcp_filter_indices, (SHAPE,)),
    Program(threads.item_per_request, (SCALAR,) * 8),
    Program(threads.sentinel_per_request, (FROM_HOST,) * 3),
    Program(threads.sentinel_on_device),
    Program(threads.lengths_unpinned, hazards=(PAGEABLE,)),
    Program(threads.lengths_pinned),
    Program(threads.longest_request, (SCALAR,)),
    Program(threads.plan_from_gpu, (TO_HOST,) * 3),
    Program(threads.mirror_then_wait, (STREAM,)),
    Program(threads.copy_done_event, (EVENT,)),
    Program(threads.spec_metadata, (SHAPE,) * 3),
    Program(threads.rank_as_tensor, (FROM_HOST,)),
    Program(threads.strided_pinned, hazards=(PAGEABLE,)),
    Program(threads.strided_pinned_by_row),
    Program(threads.pin_in_hot_path, hazards=(ALLOCATION,)),
    Program(threads.debug_assert, (SCALAR,)),
    Program(threads.setitem_not_mask, (SHAPE,)),
    Program(threads.masked_fill_cuda_value, (SCALAR,)),
    Program(threads.masked_fill_cpu_value),
)
