"""Prototypes that may or may not go into the project."""
import triton, triton.language as tl
from dcpbench.kernels.peers.meeting import meet_blocks as _meet, meet_ranks

@triton.jit
def addresses(peers, n, N: tl.constexpr):
    found = tl.zeros_like(n).to(tl.int64)
    for i in tl.static_range(N):
        found = tl.where(n == i, peers[i], found)
    return found

@triton.jit
def meet(peers, counters, N: tl.constexpr, N_BLOCK: tl.constexpr):
    _meet(peers, counters, N, N_BLOCK, False)

@triton.jit
def meet_relaxed(peers, counters, N: tl.constexpr, N_BLOCK: tl.constexpr):
    block = tl.program_id(0)
    n = tl.arange(0, N_BLOCK)
    others = (n > 0) & (n < N)
    theirs = (addresses(peers, n, N) + counters).to(tl.pointer_type(tl.int32)) + block * N + N - n
    mine = (peers[0] + counters).to(tl.pointer_type(tl.int32)) + block * N
    met = tl.load(mine) + 1
    tl.atomic_add(theirs, 1, mask=others, sem="relaxed", scope="sys")
    tl.store(mine, met)
    behind = tl.full((), -1, tl.int32)
    while behind < 0:
        seen = tl.load(mine + n, mask=others, other=0, volatile=True)
        behind = tl.min(tl.where(others, seen - met, 0), 0)
    tl.debug_barrier()

@triton.jit
def empty_kernel(peers, counters, out, N: tl.constexpr, N_BLOCK: tl.constexpr, MODE: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
    if MODE == 1:
        meet(peers, counters, N, N_BLOCK)
    if MODE == 3:
        meet_ranks(peers, counters, N, N_BLOCK, False)
    if MODE == 2:
        meet_relaxed(peers, counters, N, N_BLOCK)
    tl.store(out + tl.program_id(0), 1.0)

@triton.jit(do_not_specialize=["batch", "rank"])
def gather_relaxed(
    peers, counters, q_at, out, batch, rank,
    N: tl.constexpr, N_BLOCK: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
    meet_relaxed(peers, counters, N, N_BLOCK)
    tiles: tl.constexpr = (ROW + BLOCK - 1) // BLOCK
    for tile in range(tl.program_id(0), batch * tiles, tl.num_programs(0)):
        b = (tile // tiles).to(tl.int64)
        x = (tile % tiles) * BLOCK + tl.arange(0, BLOCK)
        inside = x < ROW
        pulled = ()
        for n in tl.static_range(N):
            q = (peers[n] + q_at).to(tl.pointer_type(out.dtype.element_ty)) + b * ROW + x
            q = tl.max_contiguous(tl.multiple_of(q, 16), BLOCK)
            pulled = pulled + (tl.load(q, mask=inside),)
        for n in tl.static_range(N):
            tl.store(out + (b * N + (rank + n) % N) * ROW + x, pulled[n], mask=inside)

@triton.jit(do_not_specialize=["batch", "rank"])
def gather_push(
    peers, counters, q_at, all_at, out, batch, rank,
    N: tl.constexpr, N_BLOCK: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """Write this rank's q into all peers' gathered tensor, then meet."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    tiles: tl.constexpr = (ROW + BLOCK - 1) // BLOCK
    for tile in range(tl.program_id(0), batch * tiles, tl.num_programs(0)):
        b = (tile // tiles).to(tl.int64)
        x = (tile % tiles) * BLOCK + tl.arange(0, BLOCK)
        inside = x < ROW
        q = (peers[0] + q_at).to(tl.pointer_type(out.dtype.element_ty)) + b * ROW + x
        v = tl.load(tl.max_contiguous(tl.multiple_of(q, 16), BLOCK), mask=inside)
        for n in tl.static_range(N):
            o = (peers[(n + 1) % N] + all_at).to(tl.pointer_type(out.dtype.element_ty)) + (b * N + rank) * ROW + x
            tl.store(tl.max_contiguous(tl.multiple_of(o, 16), BLOCK), v, mask=inside)
    meet(peers, counters, N, N_BLOCK)

@triton.jit(do_not_specialize=["rank"])
def ll_gather(peers, calls, recv_at, q, out, size, rank,
    N: tl.constexpr, N_BLOCK: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr, CAP: tl.constexpr, PDL: tl.constexpr):
    """q, out: int32 words. Each word travels with the number of the call beside it."""
    tile = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    flag = tl.load(calls + tile) + 1
    w = tile * BLOCK + tl.arange(0, BLOCK)
    inside = w < size
    value = tl.load(q + w, mask=inside)
    tag = flag.to(tl.int64) << 32
    packed = (value.to(tl.int64) & 0xFFFFFFFF) | tag
    at = recv_at + (flag & 1) * (N * CAP * 8)
    for n in tl.static_range(1, N):
        p = (peers[n] + at).to(tl.pointer_type(tl.int64)) + (N - n) * CAP + w
        tl.store(tl.max_contiguous(tl.multiple_of(p, 16), BLOCK), packed, mask=inside)
    b = w // ROW
    c = w % ROW
    tl.store(out + (b * N + rank) * ROW + c, value, mask=inside)
    tl.store(calls + tile, flag)
    n = tl.arange(0, N_BLOCK)
    p = (peers[0] + at).to(tl.pointer_type(tl.int64)) + (n * CAP)[:, None] + w[None, :]
    p = tl.max_contiguous(tl.multiple_of(p, (16, 16)), (1, BLOCK))
    other = ((n > 0) & (n < N))[:, None] & inside[None, :]
    got = tl.load(p, mask=other, volatile=True)
    missing = tl.max(tl.max(tl.where(other & ((got >> 32) != flag), 1, 0), 1), 0)
    while missing > 0:
        got = tl.load(p, mask=other, volatile=True)
        missing = tl.max(tl.max(tl.where(other & ((got >> 32) != flag), 1, 0), 1), 0)
    o = out + (b * N * ROW + c)[None, :] + (((rank + n) % N) * ROW)[:, None]
    tl.store(o, got.to(tl.int32), mask=other)

@triton.jit(do_not_specialize=["batch", "rank"])
def ll_merge(peers, calls, recv_at, o, lse, out, batch, rank,
    N: tl.constexpr, HEADS: tl.constexpr, W: tl.constexpr, CAP: tl.constexpr, PDL: tl.constexpr):
    """o: int32 words of pairs of bf16, W = R/2 a row; out: fp32. One row (request, head) a program."""
    row = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    flag = tl.load(calls + row) + 1
    tag = flag.to(tl.int64) << 32
    h: tl.constexpr = HEADS // N
    STRIDE: tl.constexpr = W + 8
    at = recv_at + (flag & 1) * (N * CAP * STRIDE * 8)
    b = row // h
    j = row % h
    w = tl.arange(0, W)
    for n in tl.static_range(1, N):
        source = b * HEADS + ((rank + n) % N) * h + j
        v = tl.load(o + source * W + w)
        l = tl.load(lse + source).to(tl.int32, bitcast=True)
        p = (peers[n] + at).to(tl.pointer_type(tl.int64)) + ((N - n) * CAP + row) * STRIDE
        p = tl.multiple_of(p, 16)
        tl.store(p + w, (v.to(tl.int64) & 0xFFFFFFFF) | tag)
        tl.store(p + W, (l.to(tl.int64) & 0xFFFFFFFF) | tag)
    tl.store(calls + row, flag)
    mine = b * HEADS + rank * h + j
    v = tl.load(o + mine * W + w)
    words = (v,)
    top = tl.load(lse + mine)
    lses = (top,)
    for n in tl.static_range(1, N):
        p = (peers[0] + at).to(tl.pointer_type(tl.int64)) + (n * CAP + row) * STRIDE
        p = tl.multiple_of(p, 16)
        got = tl.load(p + w, volatile=True)
        gl = tl.load(p + W + w * 0, volatile=True)
        missing = tl.max(tl.where(((got >> 32) != flag) | ((gl >> 32) != flag), 1, 0), 0)
        while missing > 0:
            got = tl.load(p + w, volatile=True)
            gl = tl.load(p + W + w * 0, volatile=True)
            missing = tl.max(tl.where(((got >> 32) != flag) | ((gl >> 32) != flag), 1, 0), 0)
        words = words + (got.to(tl.int32),)
        l = tl.max(gl.to(tl.int32).to(tl.float32, bitcast=True), 0)
        lses = lses + (l,)
        top = tl.maximum(top, l)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = 0.0
    lo = tl.zeros((W,), tl.float32)
    hi = tl.zeros((W,), tl.float32)
    for n in tl.static_range(N):
        power = tl.exp(lses[n] - top)
        total += power
        lo += tl.where(power > 0.0, (words[n] << 16).to(tl.float32, bitcast=True) * power, 0.0)
        hi += tl.where(power > 0.0, (words[n] & -65536).to(tl.float32, bitcast=True) * power, 0.0)
    total = tl.where(total == 0.0, 1.0, total)
    both = tl.reshape(tl.join(lo / total, hi / total), (2 * W,))
    r = tl.arange(0, 2 * W)
    tl.store(out + (j * batch + b).to(tl.int64) * 2 * W + r, both)

@triton.jit
def one_shot(peers, counters, data_at, x, out, size, RANK: tl.constexpr, N: tl.constexpr, N_BLOCK: tl.constexpr, SLOT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Copy x into this call's slot, meet, add up all peers' slots. The grid is the same for all sizes."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    ty = tl.pointer_type(x.dtype.element_ty)
    met = tl.load((peers[0] + counters).to(tl.pointer_type(tl.int32)) + tl.program_id(0) * N)
    at = data_at + (met & 1).to(tl.int64) * SLOT
    e = tl.arange(0, BLOCK)
    step = tl.num_programs(0) * BLOCK
    for first in range(tl.program_id(0) * BLOCK, size, step):
        i = first + e
        p = (peers[0] + at).to(ty) + i
        tl.store(tl.max_contiguous(tl.multiple_of(p, 16), BLOCK), tl.load(x + i, mask=i < size), mask=i < size)
    meet(peers, counters, N, N_BLOCK)
    for first in range(tl.program_id(0) * BLOCK, size, step):
        i = first + e
        vs = ()
        for n in tl.static_range(N):
            p = (peers[n] + at).to(ty) + i
            vs = vs + (tl.load(tl.max_contiguous(tl.multiple_of(p, 16), BLOCK), mask=i < size),)
        total = vs[(N - RANK) % N].to(tl.float32)
        for k in tl.static_range(1, N):
            total += vs[(N - RANK + k) % N].to(tl.float32)
        tl.store(out + i, total.to(out.dtype.element_ty), mask=i < size)

@triton.jit(do_not_specialize=["rank"])
def two_shot(peers, counters, data_at, x, out, size, rank, N: tl.constexpr, N_BLOCK: tl.constexpr, SLOT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """size: numbers of one shard (a multiple of BLOCK here). Tile i of every shard belongs to the same block."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    ty = tl.pointer_type(x.dtype.element_ty)
    met = tl.load((peers[0] + counters).to(tl.pointer_type(tl.int32)) + tl.program_id(0) * N)
    at = data_at + (met // 2 & 1).to(tl.int64) * SLOT
    e = tl.arange(0, BLOCK)
    step = tl.num_programs(0) * BLOCK
    for first in range(tl.program_id(0) * BLOCK, size, step):
        i = first + e
        vs = ()
        for n in tl.static_range(N):
            vs = vs + (tl.load(x + n * size + i, mask=i < size),)
        for n in tl.static_range(N):
            p = (peers[0] + at).to(ty) + n * size + i
            tl.store(tl.max_contiguous(tl.multiple_of(p, 16), BLOCK), vs[n], mask=i < size)
    meet(peers, counters, N, N_BLOCK)
    for first in range(tl.program_id(0) * BLOCK, size, step):
        i = first + e
        vs = ()
        for n in tl.static_range(N):
            p = (peers[n] + at).to(ty) + rank * size + i
            vs = vs + (tl.load(tl.max_contiguous(tl.multiple_of(p, 16), BLOCK), mask=i < size),)
        total = vs[0].to(tl.float32)
        for n in tl.static_range(1, N):
            total += vs[n].to(tl.float32)
        p = (peers[0] + at).to(ty) + N * size + i
        tl.store(tl.max_contiguous(tl.multiple_of(p, 16), BLOCK), total.to(x.dtype.element_ty), mask=i < size)
    meet(peers, counters, N, N_BLOCK)
    for first in range(tl.program_id(0) * BLOCK, size, step):
        i = first + e
        vs = ()
        for n in tl.static_range(N):
            p = (peers[n] + at).to(ty) + N * size + i
            vs = vs + (tl.load(tl.max_contiguous(tl.multiple_of(p, 16), BLOCK), mask=i < size),)
        for n in tl.static_range(N):
            tl.store(out + ((rank + n) % N) * size + i, vs[n], mask=i < size)
