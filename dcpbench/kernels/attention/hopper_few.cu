// Paged MLA decode for Hopper over rows of 512 + 64 numbers, for up to 16 heads. There memory is what all wait for, and heads would fill
// a part of the 64 rows that a product has at least: so rows and columns of the cache are what products have 64 of, and heads what
// they have few of. One warpgroup does all of it, and a separate warp has the copy engine fill a ring of blocks of 64 rows and 64
// columns, each of which is let go by itself: of almost three tiles two are under way.

// Defined by the caller in addition to the names of hopper_parts.cuh: FEW, the number of heads per product (8 or 16).

static constexpr int BLOCKS = WIDTH / 64, ROPE = BLOCKS - 1;
static constexpr int BLOCK = 64 * 64 * 2;  // bytes of 64 rows and 64 columns, swizzled by 128 bytes
static constexpr int THIN = FEW * 128;     // of as many heads and 64 columns or rows
static constexpr int EACH = FEW / 2;       // numbers that a thread has of 64 x FEW
static constexpr int PAIRS = FEW / 8;      // of neighbouring heads, that a thread has
static constexpr int SLOTS = (227 * 1024 - (BLOCKS + 1) * THIN - 2048) / BLOCK;
static constexpr int WARPS = GROUP / 32;

struct Shared {
    alignas(1024) char kv[SLOTS][BLOCK];
    char q[BLOCKS][THIN];
    char weights[THIN];      // of a tile: 64 rows a head
    float top[WARPS][FEW];   // largest score of each warp's rows
    float total[WARPS][FEW];
    u64 full[SLOTS], empty[SLOTS];
    u64 q_full, q_empty;
};

static_assert(sizeof(Shared) <= 227 * 1024, "more than a program may have");

enum Barrier { BOTH = 1 };

// The upper half of what describes blocks of rows of 128 bytes, swizzled by as many. The lower half is a place.
static constexpr u32 SWIZZLED = (1024 >> 4) | (1u << 30);

#if FEW == 8
#define SHAPE "m64n8k16"
#define ALL(x) R4(x, 0)
#define A_ "%4"
#define B_ "%5"
#define ADD_ "%6"
#define KIND_ "%7"
#define SUM "{%0, %1, %2, %3}"
#else
#define SHAPE "m64n16k16"
#define ALL(x) R4(x, 0), R4(x, 4)
#define A_ "%8"
#define B_ "%9"
#define ADD_ "%10"
#define KIND_ "%11"
#define SUM "{%0, %1, %2, %3, %4, %5, %6, %7}"
#endif

#define MMA(COLUMNS_FIRST)                                                                                                     \
    asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, " ADD_ ", 0;\n"                                            \
                 "mov.b64 a, {" A_ ", " KIND_ "};\nmov.b64 b, {" B_ ", " KIND_ "};\n"                                         \
                 "wgmma.mma_async.sync.aligned." SHAPE ".f32." ELEMENT "." ELEMENT " " SUM ", a, b, p, 1, 1, " COLUMNS_FIRST ", 0;\n}\n" \
                 : ALL(d)                                                                                                      \
                 : "r"(a), "r"(b), "r"(add), "n"(SWIZZLED))

// d[64 rows, heads] (+)= rows[64, 16 columns] . q[heads, 16 columns]T
__device__ __forceinline__ void mma_scores(float (&d)[EACH], u32 a, u32 b, int add) { MMA("0"); }

// d[64 columns, heads] += values[16 rows, 64 columns]T . weights[heads, 16 rows]T
__device__ __forceinline__ void mma_values(float (&d)[EACH], u32 a, u32 b) {
    constexpr int add = 1;
    MMA("1");
}

// A place in the ring, and how often it has come round.
struct Turn {
    u32 slot = 0, phase = 0;

    __device__ __forceinline__ Turn after(u32 blocks) const {
        Turn turn = {slot + blocks, phase};
        if (turn.slot >= SLOTS) turn.slot -= SLOTS, turn.phase ^= 1;
        return turn;
    }
};

// The warp that fills blocks in the order in which they are read, and is ahead of that across pieces, too.
struct Filler {
    Turn turn;
    u32 queries = 1;

    __device__ __forceinline__ void take(Shared& sh, const TensorMap* q, const TensorMap* kv, const Piece& piece, int q_row, u64 policy) {
        const int lane = threadIdx.x % 32;
        int row = box_row(piece, piece.t0);
        wait_for(&sh.q_empty, queries);
        queries ^= 1;
        if (lane == 0) {
            expect(&sh.q_full, BLOCKS * THIN);
            for (int block = 0; block < BLOCKS; ++block) copy_box(sh.q[block], q, 64 * block, q_row, &sh.q_full, policy);
        }
        for (int t = piece.t0; t < piece.t1; ++t) {
            const int next = box_row(piece, t + 1);
#pragma unroll 1
            for (int block = 0; block < BLOCKS; ++block) {
                u64* full = &sh.full[turn.slot];
                wait_for(&sh.empty[turn.slot], turn.phase ^ 1);
                if (lane == 0) expect(full, BLOCK);
                __syncwarp();
                if (lane < BOXES) copy_box(sh.kv[turn.slot] + lane * BOX * 128, kv, 64 * block, row, full, policy);
                turn = turn.after(1);
            }
            row = next;
        }
    }
};

__device__ __forceinline__ void let_go(Shared& sh, u32 slot) {
    if (threadIdx.x % 32 == 0) arrive_at(&sh.empty[slot]);
}

// The largest of a head's numbers in a warp, and their sum: threads that are 4 apart have the same heads.
__device__ __forceinline__ float largest_of_warp(float x) {
#pragma unroll
    for (int i = 4; i < 32; i *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, i));
    return x;
}

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
    for (int i = 4; i < 32; i *= 2) x += __shfl_xor_sync(~0u, x, i);
    return x;
}

// Weights of a thread's rows: 64 rows a head, as products read them.
__device__ __forceinline__ void store_weights(char* to, const float (&s)[EACH]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, matrix = lane / 8, at = lane % 8;
    const u32 chunk = ((2 * warp + matrix % 2) ^ at) << 4, row = shared_address(to) + at * 128 + chunk;
#if FEW == 8
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(packed(s[0], s[1])), "r"(packed(s[2], s[3])) : "memory");
#else
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row + matrix / 2 * 8 * 128), "r"(packed(s[0], s[1])),
                 "r"(packed(s[2], s[3])), "r"(packed(s[4], s[5])), "r"(packed(s[6], s[7])) : "memory");
#endif
}

// What a thread has of sums: 16 numbers a head of each block of 64 columns, of heads 8 * j + {2c, 2c + 1}.
struct Sums {
    float o[ROPE][EACH];
    float top[PAIRS][2], total[PAIRS][2]; // running largest score, times log2(e), and next whole number; sum of its own rows' weights
};

template <int N> __device__ __forceinline__ void let_go_from(Shared& sh, const Turn& turn) {
    mma_wait<N>();
    let_go(sh, turn.after(ROPE - 1 - N).slot);
    if constexpr (N > 0) let_go_from<N - 1>(sh, turn);
}

__device__ __forceinline__ void take_tile(Shared& sh, const Turn& turn, const Arguments& a, const Piece& piece, int t, Sums& sums) {
    const int live = piece.length - t * TILE;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = 16 * warp + lane / 4;
    float s[EACH];
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
        const Turn here = turn.after(block);
        const u32 rows = ALONG + place(&sh, sh.kv[0]) + here.slot * (BLOCK >> 4), q = ALONG + place(&sh, sh.q[block]);
        wait_for(&sh.full[here.slot], here.phase);
        mma_begin();
#pragma unroll
        for (int k = 0; k < 4; ++k) mma_scores(s, rows + 2 * k, q + 2 * k, block || k);
    }
    mma_commit();
    mma_wait<0>();
    let_go(sh, turn.after(ROPE).slot);
    if (live < TILE + UNSEEN) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int seen = QUERY_LENGTH == 1 ? live : seen_by(piece, 8 * (i / 4) + lane % 4 * 2 + i % 2, a.heads) - t * TILE;
            if (row + i / 2 % 2 * 8 >= seen) s[i] = -INFINITY;
        }
    }
    float largest[PAIRS][2], shrink[PAIRS][2];
#pragma unroll
    for (int j = 0; j < PAIRS; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) largest[j][e] = largest_of_warp(fmaxf(s[4 * j + e], s[4 * j + 2 + e]));
    if (lane < 4) {
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) *(float2*)&sh.top[warp][8 * j + 2 * lane] = make_float2(largest[j][0], largest[j][1]);
    }
    named_barrier_sync(BOTH, GROUP);
    bool same = true;
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float2 other = *(const float2*)&sh.top[w][8 * j + lane % 4 * 2];
            largest[j][0] = fmaxf(largest[j][0], other.x), largest[j][1] = fmaxf(largest[j][1], other.y);
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float& top = sums.top[j][e];
            const float here = finite(fmaxf(top, ceilf(largest[j][e] * a.scale_log2)));
            shrink[j][e] = power(top - here);
            same = same && top == here;
            top = here;
            sums.total[j][e] *= shrink[j][e];
            s[4 * j + e] = power(s[4 * j + e] * a.scale_log2 - here);
            s[4 * j + 2 + e] = power(s[4 * j + 2 + e] * a.scale_log2 - here);
            sums.total[j][e] += s[4 * j + e] + s[4 * j + 2 + e];
        }
    }
    store_weights(sh.weights, s);
    if (live < TILE)
        for (int i = threadIdx.x; i < ROPE * (TILE - live) * 8; i += GROUP) {
            const int block = i / ((TILE - live) * 8), rest = i % ((TILE - live) * 8);
            *(uint4*)(sh.kv[turn.after(block).slot] + live * 128 + rest * 16) = make_uint4(0, 0, 0, 0);
        }
    fence_async();
    named_barrier_sync(BOTH, GROUP);
    if (!__all_sync(~0u, same)) {
#pragma unroll
        for (int block = 0; block < ROPE; ++block)
#pragma unroll
            for (int i = 0; i < EACH; ++i) sums.o[block][i] *= shrink[i / 4][i % 2];
    }
    mma_begin();
#pragma unroll
    for (int block = 0; block < ROPE; ++block) {
        const u32 values = ALONG + place(&sh, sh.kv[0]) + turn.after(block).slot * (BLOCK >> 4);
#pragma unroll
        for (int k = 0; k < 4; ++k) mma_values(sums.o[block], values + k * (16 * 128 >> 4), ALONG + place(&sh, sh.weights) + 2 * k);
        mma_commit();
    }
    let_go_from<ROPE - 1>(sh, turn);
}

// What is added up: of a whole request to its output, of a piece in fp32 to its slot.
__device__ __forceinline__ void add_up(Shared& sh, const Arguments& a, const Share& own, int part) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Turn turn;
    u32 q_phase = 0;
    for_each_piece(a, own, [&](int b, int tiles, const Piece& piece) {
        Sums sums;
#pragma unroll
        for (int block = 0; block < ROPE; ++block)
#pragma unroll
            for (int i = 0; i < EACH; ++i) sums.o[block][i] = 0;
#pragma unroll
        for (int j = 0; j < PAIRS; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) sums.top[j][e] = -INFINITY, sums.total[j][e] = 0;
        wait_for(&sh.q_full, q_phase);
        q_phase ^= 1;
        for (int t = piece.t0; t < piece.t1; ++t, turn = turn.after(BLOCKS)) take_tile(sh, turn, a, piece, t, sums);
        if (lane == 0) arrive_at(&sh.q_empty);

#pragma unroll
        for (int j = 0; j < PAIRS; ++j) {
            const float2 total = make_float2(sum_of_warp(sums.total[j][0]), sum_of_warp(sums.total[j][1]));
            if (lane < 4) *(float2*)&sh.total[warp][8 * j + 2 * lane] = total;
        }
        named_barrier_sync(BOTH, GROUP);
        const bool whole = piece.t0 == 0 && piece.t1 == tiles;
        const int slot = 2 * part + (piece.t1 < tiles), column = 16 * warp + lane / 4;
#pragma unroll
        for (int j = 0; j < PAIRS; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int h = 8 * j + lane % 4 * 2 + e;
                if (h >= a.heads) continue;
                float sum = 0;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) sum += sh.total[w][h];
                const float by = inverse(sum);
                const long long at = ((long long)(whole ? b : slot) * a.heads + h) * LATENT + column;
#pragma unroll
                for (int i = 0; i < 2 * ROPE; ++i) {
                    const float x = sums.o[i / 2][4 * j + i % 2 * 2 + e] * by;
                    const long long to = at + i / 2 * 64 + i % 2 * 8;
                    if (whole)
                        ((unsigned short*)a.o)[to] = packed(x, x);
                    else
                        a.part_o[to] = x;
                }
                if (warp == 0 && lane < 4) store_lse(a, whole, b, slot, h, sums.top[j][e] + log2f(sum));
            }
        count_pieces(a, own, piece, b, tiles, part);
    });
}

extern "C" __global__ void __launch_bounds__(GROUP + 32, 1)
hopper_few(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap kv_map, const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) char raw[];
    Shared& sh = *(Shared*)raw;
    if (shared_address(raw) % 1024) __trap(); // where swizzled blocks must begin
    const int part = blockIdx.x;
    const int first_tiles = tiles_of_request(a.lengths, threadIdx.x % 32, a.batch);
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; ++i) init_barrier(&sh.full[i], 1), init_barrier(&sh.empty[i], WARPS);
        init_barrier(&sh.q_full, 1);
        init_barrier(&sh.q_empty, WARPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"((u64)&q_map) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"((u64)&kv_map) : "memory");
    }
    const Share own = share(a.lengths, first_tiles, part, a.parts, a.batch);
    __syncthreads();
    if (threadIdx.x < GROUP) {
        add_up(sh, a, own, part);
    } else {
        Filler filler;
        const u64 policy = first_to_go();
        for_each_piece(a, own, [&](int b, int, const Piece& piece) { filler.take(sh, &q_map, &kv_map, piece, b * a.heads, policy); });
    }
}
