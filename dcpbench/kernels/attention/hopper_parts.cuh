// What the kernels of hopper_*.cu share: barriers, copies and products of Hopper, the division of work,
// and what threads of a warpgroup hold of scores and sums. Put before the source of each (hopper_pairs.py).
//
// Defined from outside: ELEMENT (bf16 or f16), PAGE (a multiple of 16), LEAST and SLACK (partition.py), and QUERY_LENGTH, the number of
// query rows of a request. Their heads lie one behind the other and share the request's tiles; query row i sees its own number of KV rows,
// which differ by less than QUERY_LENGTH.

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap {
    u64 opaque[16];
};

static constexpr int HEADS = 64, TILE = 64, LATENT = 512, WIDTH = 576;
static constexpr int GROUP = 128;                     // threads of a warpgroup
static constexpr int BOX = PAGE < TILE ? PAGE : TILE; // rows that one copy takes
static constexpr int BOXES = TILE / BOX;
static constexpr int UNSEEN = QUERY_LENGTH - 1;       // most rows that a query row sees less than the last one of its request
static constexpr float MIN_TOP = -0x1p100f;           // largest score of a query row that sees no row of a tile: -inf has no differences

// Read again at each use: what follows from it is not kept in registers from tile to tile.
__device__ __forceinline__ u32 thread() {
    u32 x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void init_barrier(u64* bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(count));
}

__device__ __forceinline__ void expect(u64* bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait_for(u64* bar, u32 phase) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}\n" ::"r"(shared_address(bar)), "r"(phase) : "memory");
}

__device__ __forceinline__ void arrive_at(u64* bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}

// What is copied leaves L2 before the rest: it is read once, by neighbours at the same time.
__device__ __forceinline__ u64 first_to_go() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void copy_box(void* to, const TensorMap* map, int column, int row, u64* bar, u64 policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(shared_address(to)), "l"((u64)map), "r"(column), "r"(row), "r"(shared_address(bar)), "l"(policy) : "memory");
}

__device__ __forceinline__ void arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ __forceinline__ void named_barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void mma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void mma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

// Where an operand in shared memory is, in 16 bytes: the lower half of what describes it. It is counted from the beginning of all, so that
// in a loop it takes one addition a product, and not four that wait for each other.
__device__ __forceinline__ u32 place(const void* all, const void* p) {
    return (shared_address(all) >> 4) + (u32)(((const char*)p - (const char*)all) >> 4);
}

// In the same half, of operands that lie along the sum: how far it is to further columns, which swizzled ones do not have.
static constexpr u32 ALONG = 1u << 16;

#define R4(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define R16(x, i) R4(x, i), R4(x, i + 4), R4(x, i + 8), R4(x, i + 12)
#define R32(x, i) R16(x, i), R16(x, i + 16)

#define SOME                                                                                                                   \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                                  \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"

__device__ __forceinline__ u32 packed(float low, float high) {
    u32 out;
    asm("cvt.rn." ELEMENT "x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

__device__ __forceinline__ float power(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

__device__ __forceinline__ int warp_sum(int x) { return __reduce_add_sync(~0u, x); }

struct Share {
    int first, start, begin, end, size;
};

__device__ __forceinline__ int tiles_of_request(const int* lengths, int b, int batch) {
    return b < batch ? (u32)(lengths[b] + TILE - 1) / TILE : 0;
}

// partition.py's `share`; every warp computes it. `first_tiles`: of the request that has this lane's number.
__device__ __forceinline__ Share share(const int* lengths, int first_tiles, int part, int parts, int batch) {
    const int lane = threadIdx.x % 32;
    const auto tiles_of = [&](int b0) { return b0 ? tiles_of_request(lengths, b0 + lane, batch) : first_tiles; };
    int sum = 0, longest = 0;
    for (int b0 = 0; b0 < batch; b0 += 32) {
        const int tiles = tiles_of(b0);
        sum += tiles;
        longest = max(longest, tiles);
    }
    const int total = warp_sum(sum);
    longest = __reduce_max_sync(~0u, longest);
    const int size = max((u32)(total + parts - 1) / parts, LEAST);
    const int per_request = max((u32)parts / batch, 1), requests = (u32)(batch + parts - 1) / parts;
    const int aligned_size = max((u32)(longest + per_request - 1) / per_request, LEAST);
    const bool aligned = requests * aligned_size <= size + size / 16 + SLACK;
    Share s;
    if (aligned) {
        const int b = (u32)part / per_request * requests;
        int before = 0, own = 0;
        for (int b0 = 0; b0 < min(b + requests, batch); b0 += 32) {
            const int tiles = tiles_of(b0);
            if (b0 + lane < b) before += tiles;
            else if (b0 + lane < b + requests) own += tiles;
        }
        before = warp_sum(before);
        const int after = before + warp_sum(own);
        s.begin = min(min(before + part % per_request * aligned_size, after), total);
        s.end = min(s.begin + requests * aligned_size, after);
    } else {
        s.begin = min(part * size, total);
        s.end = min(s.begin + size, total);
    }
    s.size = aligned ? aligned_size : size;
    s.first = 0, s.start = 0;
    int passed = 0;
    for (int b0 = 0; b0 < batch; b0 += 32) {
        const int tiles = tiles_of(b0);
        int upto = tiles;
        for (int i = 1; i < 32; i *= 2) {
            const int other = __shfl_up_sync(~0u, upto, i);
            if (lane >= i) upto += other;
        }
        const bool past = b0 + lane < batch && passed + upto <= s.begin;
        s.first += __popc(__ballot_sync(~0u, past));
        s.start += warp_sum(past ? tiles : 0);
        passed += __shfl_sync(~0u, upto, 31);
    }
    return s;
}

struct Piece {
    const int* pages;
    const int* row_lengths; // KV rows that each query row sees
    int length, t0, t1;     // the last query row's, and the tiles of the piece
};

// First row in the pool of this lane's box of tile t. Boxes past the end are read from page 0, and made zeros later.
__device__ __forceinline__ int box_row(const Piece& piece, int t) {
    const int lane = threadIdx.x % 32, k = t * TILE + lane * BOX;
    const bool live = t < piece.t1 && lane < BOXES && k < piece.length;
    return live ? __ldg(piece.pages + k / PAGE) * PAGE + k % PAGE : 0;
}

__device__ __forceinline__ void mask(float (&s)[32], int live) {
    const int column = thread() % 4 * 2;
#pragma unroll
    for (int i = 0; i < 32; ++i)
        if (i / 4 * 8 + column + i % 2 >= live) s[i] = -INFINITY;
}

// The number of KV rows that head h of a request sees, of all heads of its query rows; heads past the last see as many as the last row.
__device__ __forceinline__ int seen_by(const Piece& piece, int h, int heads) {
    return __ldg(piece.row_lengths + min(h / (heads / QUERY_LENGTH), QUERY_LENGTH - 1));
}

// A score to which others are held, of a query row that may see nothing.
__device__ __forceinline__ float finite(float top) { return QUERY_LENGTH > 1 ? fmaxf(top, MIN_TOP) : top; }

// What makes sums of weights averages.
__device__ __forceinline__ float inverse(float sum) { return QUERY_LENGTH > 1 && sum == 0 ? 0 : 1 / sum; }

__device__ __forceinline__ void largest(const float (&s)[32], float (&top)[2]) {
    top[0] = s[0], top[1] = s[2];
#pragma unroll
    for (int i = 0; i < 32; ++i) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i]);
    top[0] = quad_max(top[0]), top[1] = quad_max(top[1]);
}

// The first of a thread's two heads in a block; the other is 8 further.
__device__ __forceinline__ int row_of(u32 x) { return x % GROUP / 32 * 16 + x % 32 / 4; }

struct Arguments {
    const int* tables;
    const int* lengths;
    const int* row_lengths;
    float* part_o;
    float* part_lse;
    int* pieces_of;
    void* o;
    float* lse;
    float scale_log2, ln2;
    int table_stride, heads, batch, parts;
    const char* pool;
};

// Sets scores of tile t that a thread's two heads do not see to -inf.
__device__ __forceinline__ void mask(float (&s)[32], const Arguments& a, const Piece& piece, int t) {
    if constexpr (QUERY_LENGTH == 1) {
        mask(s, piece.length - t * TILE);
    } else {
        const int head_blocks = (a.heads + HEADS - 1) / HEADS, h = blockIdx.x % head_blocks * HEADS + row_of(thread());
        const int live[2] = {seen_by(piece, h, a.heads) - t * TILE, seen_by(piece, h + 8, a.heads) - t * TILE};
        const int column = thread() % 4 * 2;
#pragma unroll
        for (int i = 0; i < 32; ++i)
            if (i / 4 * 8 + column + i % 2 >= live[i / 2 % 2]) s[i] = -INFINITY;
    }
}

// Calls `work` with each request of which this program has tiles, and which those are.
template <class Work> __device__ __forceinline__ void for_each_piece(const Arguments& a, const Share& own, Work work) {
    for (int b = own.first, start = own.start; start < own.end; ++b) {
        const int length = a.lengths[b], tiles = (length + TILE - 1) / TILE;
        const Piece piece = {a.tables + (long long)b * a.table_stride, a.row_lengths + b * QUERY_LENGTH, length, max(own.begin - start, 0), min(tiles, own.end - start)};
        if (piece.t0 < piece.t1) work(b, tiles, piece);
        start += tiles;
    }
}

// Log-sum-exp of a head, of a whole request to its output, of a piece to base 2 and to its slot.
__device__ __forceinline__ void store_lse(const Arguments& a, bool whole, int b, int slot, int h, float log2_sum) {
    if (whole)
        a.lse[(long long)b * a.heads + h] = log2_sum * a.ln2;
    else
        a.part_lse[(long long)slot * a.heads + h] = log2_sum;
}

// Says of a request's first piece whose it is, and how many pieces there are.
__device__ __forceinline__ void count_pieces(const Arguments& a, const Share& own, const Piece& piece, int b, int tiles, int part) {
    if (piece.t0 == 0 && threadIdx.x == 0) {
        a.pieces_of[2 * b] = part;
        a.pieces_of[2 * b + 1] = 1 + (tiles - piece.t1 + own.size - 1) / own.size;
    }
}
