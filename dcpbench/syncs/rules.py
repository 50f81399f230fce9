"""Define the kinds of hidden synchronisation: stable ids, what happens, and the usual fix.

An id is never reused for another kind, because baselines, suppressions and code-scanning alerts refer to it.
"""

from __future__ import annotations

import dataclasses
import functools


@dataclasses.dataclass(frozen=True)
class Rule:
    """Describe one kind of synchronisation."""

    id: str
    kind: str  # short name, as in `--format json`
    title: str
    why: str  # sentence on what makes the host wait
    fix: str  # sentence on the usual fix


SCALAR = Rule(
    "SYNC001",
    "scalar-read",
    "A tensor's value is read into Python",
    "`.item()`, `int(t)`, `if t:`, `range(t)` or a slice with a CUDA scalar copies one value to the host and waits "
    "for all work queued before it.",
    "Read the value from a host-side copy (lengths and counts are known where the batch was made), or keep "
    "the decision on the GPU with torch.where or a masked kernel.",
)
SHAPE = Rule(
    "SYNC002",
    "data-dependent-shape",
    "The size of a result depends on values on the GPU",
    "Boolean indexing, nonzero, masked_select, unique, repeat_interleave, bincount and their like must know a count "
    "on the host before they can allocate their result.",
    "Keep the mask inside the kernel (a masked store, torch.where, masked_fill_ with a Python number), or say the "
    "size: repeat_interleave(output_size=…), one_hot(num_classes=…), nonzero_static(size=…).",
)
TO_HOST = Rule(
    "SYNC003",
    "copy-to-host",
    "A tensor is copied to the host and waited for",
    '`.cpu()`, `.tolist()`, `.numpy()` and `.to("cpu")` return only when the data has arrived.',
    "Copy into pinned memory with non_blocking=True, record an event, and look at the data one step later.",
)
FROM_HOST = Rule(
    "SYNC004",
    "copy-from-host",
    "Host data is copied to the GPU and waited for",
    '`torch.tensor(list, device="cuda")`, indexing with a Python list, `t[i] = number` and `.to("cuda")` copy from '
    "host memory and wait until the copy is done.",
    "Build it on the GPU (torch.full, arange, fill_), or fill a pinned tensor and copy it with non_blocking=True.",
)
PAGEABLE = Rule(
    "SYNC005",
    "pageable-copy",
    "non_blocking=True from or to pageable memory",
    "CUDA stages copies of pageable host memory, strided views of pinned tensors among them: to the host the call "
    "always waits, to the GPU it waits as soon as its staging memory, a few MiB, is full.",
    "Pin the host tensor once (pin_memory=True when it is made), keep it, and copy contiguous parts of it.",
)
"""Measured on an H200 (torch 2.11, CUDA 13.0) behind 20 ms of GPU work: device to host waits at 4 bytes; host to device
does not up to 2 MiB, does from 2.2 MiB, and at the 64th copy of 64 KiB or the third of 256 KiB in a row."""
MIN_PINNING_BYTES = 1 << 20  # minimum reported size: pinning it takes tenths of a millisecond
MAX_STAGING_BYTES = 2 << 20  # pageable copies to the GPU up to this size may not wait (`may_block`); others do
STREAM = Rule(
    "SYNC006",
    "stream-sync",
    "The host waits for a stream",
    "`Stream.synchronize()`, or a library that does the same, waits for everything queued on the stream.",
    "Let the other stream wait instead (wait_stream, wait_event), or wait once after the step.",
)
EVENT = Rule(
    "SYNC007",
    "event-sync",
    "The host waits for an event",
    "`Event.synchronize()` waits until the GPU has reached the event.",
    "Use wait_event where the GPU has to wait, and query() where the host may look again later.",
)
DEVICE = Rule(
    "SYNC008",
    "device-sync",
    "The host waits for the whole device",
    "`torch.cuda.synchronize()` waits for all streams.",
    "Remove it from the step; time with CUDA events; before reading data, wait for its own event.",
)
ALLOCATION = Rule(
    "SYNC009",
    "memory-allocation",
    "CUDA memory is freed or pinned",
    "cudaFree waits for all work on the device: empty_cache() and a caching allocator that runs out of memory call "
    "it. Pinning memory (cudaHostAlloc) does not wait for the GPU, but takes the host tenths of a millisecond per "
    "MiB.",
    "Allocate and pin before the first step and use it again; leave memory free for the caching allocator.",
)
DRIVER = Rule(
    "SYNC010",
    "library-sync",
    "A library waits through the driver API",
    "No operator of the framework is around the call: a library or an extension synchronises by itself.",
    "Look for a stream or handle option of that library, or move the call out of the step.",
)
COPY = Rule(
    "SYNC011",
    "blocking-copy",
    "A copy blocks the host",
    "A copy of unknown direction was made with a blocking call, or waited for.",
    "Use pinned memory and non_blocking=True, or cudaMemcpyAsync on a stream of your own.",
)
TIMING = Rule(
    "SYNC012",
    "timing",
    "The host waits to read a timer",
    "Right behind the wait `Event.elapsed_time()` is called, for which the GPU must have reached both events.",
    "Keep the events of several steps and read them once all steps are done, or read those of a step some steps "
    "later, when query() says that they have passed.",
)

RULES = (SCALAR, SHAPE, TO_HOST, FROM_HOST, PAGEABLE, STREAM, EVENT, DEVICE, ALLOCATION, DRIVER, COPY, TIMING)
BY_ID = {rule.id: rule for rule in RULES}

SCALAR_OPS = frozenset({"_local_scalar_dense", "item", "is_nonzero", "equal"})
_SHAPE_OPS = (
    "nonzero masked_select _unique2 _unique unique_dim unique_consecutive unique_dim_consecutive repeat_interleave "
    "bincount _bincount histc histogram one_hot argwhere combinations"
)
SHAPE_OPS = frozenset(_SHAPE_OPS.split())  # operators that read a count; hints only, never a reason to report a sync


def get_op_name(op: str) -> str:
    """Return `index` for `aten::index.Tensor`."""
    return op.rpartition("::")[2].partition(".")[0]


@functools.lru_cache(maxsize=1 << 12)
def find_op_rule(op_chain: tuple[str, ...]) -> Rule | None:
    """Return the rule implied by the operators around a blocking call, outermost first; None if they imply none."""
    names = [get_op_name(op) for op in op_chain]
    if any(name in SHAPE_OPS for name in names):
        return SHAPE
    return SCALAR if names and names[-1] in SCALAR_OPS else None


def find_copy_rule(op_chain: tuple[str, ...], direction: str, *, waited: bool) -> Rule:
    """Return the rule of a blocking copy.

    Args:
        op_chain: Operators around it, outermost first.
        direction: `DtoH …`, `HtoD …`, `DtoD …` or empty.
        waited: A synchronisation follows the copy; False if the copy itself blocked because of pageable memory.
    """
    known = find_op_rule(op_chain)
    if known:
        return known
    if not waited and "pageable" in direction:
        return PAGEABLE
    if direction.startswith("DtoH"):
        return TO_HOST
    if direction.startswith("HtoD"):
        return FROM_HOST
    return COPY
