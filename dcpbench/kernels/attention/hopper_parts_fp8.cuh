// What both kernels over rows in e4m3 share beside hopper_parts.cuh: q rounded, rows copied, scores and weights. Put before either's
// source (hopper_pairs.py).

static constexpr int BLOCK = 64 * 128;                 // bytes of 64 rows and 128 columns, swizzled by 128 bytes
static constexpr int THIN = 64 * 64;                   // of 64 rows of 64 bytes, swizzled by 64
static constexpr int COLUMNS = 256;                    // of a half of the values
static constexpr float RAISED = 8;                     // weights are 2^8 times as large as of a softmax: the least of e4m3 is 2^-9
static constexpr float LARGEST = 448;                  // number of e4m3

struct Tile {
    char latent[4][BLOCK];
    char rope[THIN];
};

enum Half { LEFT, RIGHT };

// Operands of e4m3 along the sum, blocks of 8 rows one behind the other: the upper half of what describes those of rows of 128 bytes,
// and of 64, each swizzled by as many. The lower half is a place.
static constexpr u32 WIDE = (1024 >> 4) | (1u << 30), THINNER = (512 >> 4) | (2u << 30);
static constexpr int STEP = 32 >> 4; // from one product to the next: 32 numbers

// scores[64 heads, 64 rows] (+)= q[64, 32] . rows[64, 32]T
template <u32 KIND> __device__ __forceinline__ void mma_scores(float (&s)[32], u32 q, u32 rows, int add) {
    asm volatile("{\n.reg .pred p;\n.reg .b64 q, rows;\nsetp.ne.b32 p, %34, 0;\n"
                 "mov.b64 q, {%32, %35};\nmov.b64 rows, {%33, %35};\n"
                 "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
                 SOME ", q, rows, p, 1, 1;\n}\n"
                 : R32(s, 0)
                 : "r"(q), "r"(rows), "r"(add), "n"(KIND));
}

// Four numbers in e4m3, the first in the lowest byte.
__device__ __forceinline__ u32 rounded(float a, float b, float c, float d) {
    u32 out;
    asm("{\n.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}\n"
        : "=r"(out) : "f"(a), "f"(b), "f"(c), "f"(d));
    return out;
}

// Four numbers in e4m3 times a power of two.
__device__ __forceinline__ u32 shrunk(u32 x, float by) {
    u32 out;
    asm("{\n.reg .b16 low, high;\n.reg .b32 a, b, f;\n"
        "cvt.rn.f16x2.f32 f, %2, %2;\n"
        "mov.b32 {low, high}, %1;\n"
        "cvt.rn.f16x2.e4m3x2 a, low;\n"
        "cvt.rn.f16x2.e4m3x2 b, high;\n"
        "mul.rn.f16x2 a, a, f;\n"
        "mul.rn.f16x2 b, b, f;\n"
        "cvt.rn.satfinite.e4m3x2.f16x2 low, a;\n"
        "cvt.rn.satfinite.e4m3x2.f16x2 high, b;\n"
        "mov.b32 %0, {low, high};\n}\n"
        : "=r"(out) : "r"(x), "f"(by));
    return out;
}

__device__ __forceinline__ void let_go(u64* bar) {
    if (thread() % 32 == 0) arrive_at(bar);
}

// Which program of its cluster of two this is.
__device__ __forceinline__ u32 rank() {
    u32 x;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(x));
    return x;
}

// To the same place in both programs, whose barriers there are both told.
__device__ __forceinline__ void copy_box_to_both(void* to, const TensorMap* map, int column, int row, u64* bar, u64 policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
                 "[%0], [%1, {%2, %3}], [%4], %5, %6;"
                 ::"r"(shared_address(to)), "l"((u64)map), "r"(column), "r"(row), "r"(shared_address(bar)), "h"((unsigned short)3), "l"(policy) : "memory");
}

__device__ __forceinline__ void arrive_at_other(u64* bar) {
    asm volatile("{\n.reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n}\n" ::"r"(shared_address(bar)), "r"(rank() ^ 1) : "memory");
}

__device__ __forceinline__ void meet_other() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Which tile of the ring comes next, and how often the ring has come round.
template <int STAGES> struct Turn {
    u32 slot = 0, phase = 0;

    __device__ __forceinline__ void next() {
        if (++slot == STAGES) slot = 0, phase ^= 1;
    }
};

// The warp that has tiles copied, in order and across pieces. SHARED_BY: programs of a cluster that read the same rows; each then copies a
// part of a tile to all of them.
template <int STAGES, int SHARED_BY = 1> struct Filler {
    Turn<STAGES> turn;

    template <class Shared> __device__ __forceinline__ void take(Shared& sh, const TensorMap* kv, const TensorMap* rope, const Piece& piece, u64 policy) {
        const int lane = threadIdx.x % 32;
        int row = box_row(piece, piece.t0);
        for (int t = piece.t0; t < piece.t1; ++t, turn.next()) {
            const int next = box_row(piece, t + 1);
            Tile& tile = sh.kv[turn.slot];
            u64* full = sh.full[turn.slot];
            wait_for(&sh.empty[turn.slot], turn.phase ^ 1);
            if (lane == 0) {
                expect(&full[LEFT], 2 * BLOCK);
                expect(&full[RIGHT], 2 * BLOCK + THIN);
            }
            __syncwarp();
            if (lane < BOXES) {
                if constexpr (SHARED_BY == 1) {
#pragma unroll
                    for (int block = 0; block < 4; ++block)
                        copy_box(tile.latent[block] + lane * BOX * 128, kv, 128 * block, row, &full[block / 2], policy);
                    copy_box(tile.rope + lane * BOX * 64, rope, LATENT, row, &full[RIGHT], policy);
                } else {
                    const int half = rank();
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const int block = 2 * half + i;
                        copy_box_to_both(tile.latent[block] + lane * BOX * 128, kv, 128 * block, row, &full[half], policy);
                    }
                    if (half == RIGHT) copy_box_to_both(tile.rope + lane * BOX * 64, rope, LATENT, row, &full[RIGHT], policy);
                }
            }
            row = next;
        }
    }
};

// Rows 16 * g + {2c, 2c + 1, 8 + 2c, 8 + 2c + 1}, of which a thread has the numbers of one column, that are below `live`.
__device__ __forceinline__ u32 kept(int g, int live) {
    const int k = 16 * g + threadIdx.x % 4 * 2;
    return (k < live ? 0xFFu : 0) | (k + 1 < live ? 0xFF00u : 0) | (k + 8 < live ? 0xFF0000u : 0) | (k + 9 < live ? 0xFF000000u : 0);
}

// Scores of a tile, whose products are under way when this returns.
template <class Shared, int STAGES> __device__ __forceinline__ void begin_scores(Shared& sh, const Turn<STAGES>& turn, float (&s)[32]) {
    constexpr int NEXT = BLOCK >> 4; // from one block of columns to the next
    const u32 q = ALONG + place(&sh, &sh.q), rows = ALONG + place(&sh, &sh.kv[turn.slot]);
#pragma unroll
    for (int block = 0; block < 4; ++block) {
        if (block % 2 == 0) {
            wait_for(&sh.full[turn.slot][block / 2], turn.phase);
            mma_begin();
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) mma_scores<WIDE>(s, q + block * NEXT + k * STEP, rows + block * NEXT + k * STEP, block || k);
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) mma_scores<THINNER>(s, q + 4 * NEXT + k * STEP, rows + 4 * NEXT + k * STEP, 1);
    mma_commit();
}

__device__ __forceinline__ void largest(const float (&s)[32], const float (&scale)[2], float (&top)[2]) {
    largest(s, top);
#pragma unroll
    for (int i = 0; i < 2; ++i) top[i] = ceilf(top[i] * scale[i]);
}

// Weights of a thread's rows, four a register: of 16 * g + {2c, 2c + 1, 8 + 2c, 8 + 2c + 1}, for both of its heads.
__device__ __forceinline__ void weigh(float (&s)[32], const float (&top)[2], const float (&scale)[2], float (&total)[2], u32 (&p)[8]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        s[i] = power(s[i] * scale[i / 2 % 2] - (top[i / 2 % 2] - RAISED));
        total[i / 2 % 2] += s[i];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int at = i / 2 * 8 + i % 2 * 2;
        p[i] = rounded(s[at], s[at + 1], s[at + 4], s[at + 5]);
    }
}

__device__ __forceinline__ void store_weights(char* to, const u32 (&p)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int row = row_of(thread()) + i % 2 * 8, group = i / 2;
        *(u32*)(to + row * 64 + ((group ^ (row / 2 % 4)) << 4) + thread() % 4 * 4) = p[i];
    }
}

struct Arguments8 : Arguments {
    const void* q;
    float value_scale; // that rows were divided by
};

__device__ __forceinline__ void widened(u32 pair, float& a, float& b) {
    if constexpr (ELEMENT[0] == 'b') {
        a = __uint_as_float(pair << 16);
        b = __uint_as_float(pair & 0xFFFF0000u);
    } else {
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}\n" : "=f"(a), "=f"(b) : "r"(pair));
    }
}

// q of a head of a piece in e4m3, by four threads: its largest number becomes 448. LEAN: with 72 registers for q, widened twice.
template <bool LEAN> __device__ __forceinline__ void round_q(Tile& q, float* q_scale, const Arguments8& a, int b, int head_block, int head) {
    const int quarter = threadIdx.x % 4, h = head_block * HEADS + head;
    uint4 x[18];
#pragma unroll
    for (int i = 0; i < 18; ++i) {
        x[i] = make_uint4(0, 0, 0, 0);
        if (h < a.heads) x[i] = ((const uint4*)a.q)[((long long)b * a.heads + h) * (WIDTH / 8) + 4 * i + quarter];
    }
    float most = 0;
#pragma unroll
    for (int i = 0; i < 18; ++i) {
        const u32 pairs[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float low, high;
            widened(pairs[j], low, high);
            most = fmaxf(most, fmaxf(fabsf(low), fabsf(high)));
        }
    }
    if constexpr (LEAN)
#pragma unroll
        for (int i = 0; i < 18; ++i) asm volatile("" : "+r"(x[i].x), "+r"(x[i].y), "+r"(x[i].z), "+r"(x[i].w));
    most = quad_max(most);
    const float scale = most > 0 ? fmaxf(most / LARGEST, 1e-30f) : 1, by = 1 / scale;
    if (quarter == 0) q_scale[head] = scale;
#pragma unroll
    for (int i = 0; i < 18; ++i) {
        float n[8];
        widened(x[i].x, n[0], n[1]), widened(x[i].y, n[2], n[3]), widened(x[i].z, n[4], n[5]), widened(x[i].w, n[6], n[7]);
        const uint2 both = make_uint2(rounded(n[0] * by, n[1] * by, n[2] * by, n[3] * by), rounded(n[4] * by, n[5] * by, n[6] * by, n[7] * by));
        const int chunk = 2 * i + quarter / 2; // of 16 columns
        char* row = chunk < 32 ? q.latent[chunk / 8] + head * 128 + (((chunk % 8) ^ (head % 8)) << 4)
                               : q.rope + head * 64 + (((chunk % 4) ^ (head / 2 % 4)) << 4);
        *(uint2*)(row + quarter % 2 * 8) = both;
    }
    fence_async();
}
