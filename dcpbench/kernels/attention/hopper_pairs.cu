// Paged MLA decode for Hopper over rows of 512 + 64 numbers: two warpgroups take the tiles of a pair in turn, and each
// adds up half of the columns of both, so that scores of one tile overlap with values of the other, the schedule that
// FlashMLA's authors describe as "seesaw". A warp of its own has the copy engine fill what was let go. Compiled for sm_90a by
// NVRTC (hopper_pairs.py).

static constexpr int TILES = WIDTH / 64;
static constexpr int BLOCK = 64 * 64 * 2;             // bytes of 64 rows and 64 columns, swizzled by 128 bytes
static constexpr int ROPE = TILES - 1;
static constexpr int FETCHED = 48; // tiles of a piece, every other one is prefetched into L2 if several blocks of heads read them
static constexpr float MOST = ELEMENT[0] == 'b' ? 0x1p64f : 0x1p15f; // that a thread's weights of a tile and head may come to: fp16 ends at 65504

struct Shared {
    alignas(1024) char q[TILES][BLOCK]; // the rope block, which is kept in registers, then holds weights of the second tile
    char kv[2][TILES][BLOCK];
    char weights[BLOCK]; // of the first tile
    float top[2][HEADS]; // what scores times log2(e) were last raised to in a first and in a second tile
    int raised[2][4];    // pairs in which that was, of the heads of each warp
    float total[2][HEADS];
    u64 full[2][TILES];
    u64 empty[4]; // by Stretch
    u64 q_full, q_empty;
};

// What is let go together: half of the values of a tile, with the rope block by whoever is done with it last.
enum Stretch { FIRST_LEFT, FIRST_RIGHT, SECOND_LEFT, SECOND_RIGHT };

enum Barrier { BOTH = 1, FIRST_READY, SECOND_READY, VOTED, CLEARED }; // and CLEARED + 1

// The upper half of what describes blocks of 64 rows of 128 bytes, swizzled by as many. The lower half is a place, and where columns lead
// how far it is from one block of 64 columns to the next.
static constexpr u32 SWIZZLED = (1024 >> 4) | (1u << 30), LEADING = (BLOCK >> 4) << 16;

#define SUMS                                                                                                                   \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                                  \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                                         \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                                         \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                                         \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                                         \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                                         \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "                             \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}"

// scores[64 heads, 64 rows] (+)= q[64, 16] . rows[64, 16]T
__device__ __forceinline__ void mma_scores(float (&s)[32], u32 q, u32 rows, int add) {
    asm volatile("{\n.reg .pred p;\n.reg .b64 q, rows;\nsetp.ne.b32 p, %34, 0;\n"
                 "mov.b64 q, {%32, %35};\nmov.b64 rows, {%33, %35};\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." ELEMENT "." ELEMENT " "
                 SOME ", q, rows, p, 1, 1, 0, 0;\n}\n"
                 : R32(s, 0)
                 : "r"(q), "r"(rows), "r"(add), "n"(SWIZZLED));
}

// The same with q from registers, added to what is there.
__device__ __forceinline__ void mma_scores(float (&s)[32], const u32* q, u32 rows) {
    asm volatile("{\n.reg .b64 rows;\nmov.b64 rows, {%36, %37};\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." ELEMENT "." ELEMENT " "
                 SOME ", {%32, %33, %34, %35}, rows, 1, 1, 1, 0;\n}\n"
                 : R32(s, 0)
                 : "r"(q[0]), "r"(q[1]), "r"(q[2]), "r"(q[3]), "r"(rows), "n"(SWIZZLED));
}

// sums[64 heads, 256 columns] += weights[64, 16 rows] . values[16 rows, 256]
__device__ __forceinline__ void mma_values(float (&o)[128], const u32* weights, u32 values) {
    asm volatile("{\n.reg .b64 values;\nmov.b64 values, {%132, %133};\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32." ELEMENT "." ELEMENT " " SUMS
                 ", {%128, %129, %130, %131}, values, 1, 1, 1, 1;\n}\n"
                 : R32(o, 0), R32(o, 32), R32(o, 64), R32(o, 96)
                 : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "r"(values), "n"(SWIZZLED));
}

__device__ __forceinline__ void mma_values(float (&o)[128], u32 weights, u32 values) {
    asm volatile("{\n.reg .b64 weights, values;\nmov.b64 weights, {%128, %130};\nmov.b64 values, {%129, %130};\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32." ELEMENT "." ELEMENT " " SUMS ", weights, values, 1, 1, 1, 0, 1;\n}\n"
                 : R32(o, 0), R32(o, 32), R32(o, 64), R32(o, 96)
                 : "r"(weights), "r"(values), "n"(SWIZZLED));
}

// Has L2 fetch a tile, of whose boxes each lane knows the first row in the pool.
__device__ __forceinline__ void prefetch(const char* pool, int row) {
    constexpr int ROW = 2 * WIDTH, LINE = 128, LINES = BOX * ROW / LINE; // of a box
    static_assert(ROW % LINE == 0, "rows are whole lines");
#pragma unroll
    for (int box = 0; box < BOXES; ++box) {
        const char* from = pool + (long long)__shfl_sync(~0u, row, box) * ROW;
#pragma unroll 2
        for (int i = 0; i < LINES; i += 32)
            if (LINES % 32 == 0 || i + threadIdx.x % 32 < LINES) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + (i + threadIdx.x % 32) * LINE));
    }
}

// Mostly no row of the warp has seen a larger score.
__device__ __forceinline__ void shrink_sums(float (&o)[128], const float (&by)[2]) {
    if (__all_sync(~0u, by[0] == 1 && by[1] == 1)) return;
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] *= by[i / 2 % 2];
}

// Columns [64 * A, 64 * B) and, if asked for, rope of a tile's rows.
template <int A, int B> __device__ __forceinline__ void fill(Shared& sh, const TensorMap* kv, int tile, bool rope, int row, u64 policy) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = A; i <= B; ++i) {
        const int block = i == B ? ROPE : i;
        if (i == B && !rope) break;
        if (lane == 0) expect(&sh.full[tile][block], BLOCK);
        if (lane < BOXES) copy_box(sh.kv[tile][block] + lane * BOX * 128, kv, 64 * block, row, &sh.full[tile][block], policy);
    }
}

// The warp that fills tiles, in the order in which they are let go; it is ahead of the scores across pieces, too.
struct Filler {
    u32 first = 1, second = 1; // phases of their next fills
    u32 queries = 1;

    __device__ __forceinline__ void take(Shared& sh, const TensorMap* q, const TensorMap* kv, const Piece& piece, int q_row, const char* pool) {
        const u64 policy = first_to_go();
        int row0 = box_row(piece, piece.t0), row1 = box_row(piece, piece.t0 + 1);
        wait_for(&sh.q_empty, queries);
        queries ^= 1;
        if (threadIdx.x % 32 == 0) {
            expect(&sh.q_full, TILES * BLOCK);
            for (int block = 0; block < TILES; ++block) copy_box(sh.q[block], q, 64 * block, q_row, &sh.q_full, policy);
        }
        for (int t = piece.t0; t < piece.t1; t += 2) {
            const int next0 = box_row(piece, t + 2), next1 = box_row(piece, t + 3);
            const bool both = t + 1 < piece.t1;
            wait_for(&sh.empty[FIRST_LEFT], first);
            fill<0, 4>(sh, kv, 0, false, row0, policy);
            wait_for(&sh.empty[FIRST_RIGHT], first);
            fill<4, 8>(sh, kv, 0, true, row0, policy);
            if (both) {
                wait_for(&sh.empty[SECOND_RIGHT], second);
                fill<4, 8>(sh, kv, 1, false, row1, policy);
                wait_for(&sh.empty[SECOND_LEFT], second);
                fill<0, 4>(sh, kv, 1, true, row1, policy);
            }
            first ^= 1;
            if (both) second ^= 1;
            if (pool && t < piece.t0 + FETCHED && t + 2 < piece.t1) prefetch(pool, next0);
            row0 = next0, row1 = next1;
        }
    }
};

__device__ __forceinline__ void let_go(Shared& sh, Stretch stretch) {
    if (thread() % 32 == 0) arrive_at(&sh.empty[stretch]);
}

// Scores of a tile, in the order in which its blocks were asked for; q of the rope block is in registers.
template <int A, int B>
__device__ __forceinline__ void score_blocks(Shared& sh, const u32 (&q_rope)[16], int tile, u32 phase, float (&s)[32], bool first) {
#pragma unroll
    for (int block = A; block < B; ++block) {
        wait_for(&sh.full[tile][block], phase);
        mma_begin();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const u32 rows = ALONG + place(&sh, sh.kv[tile][block] + 32 * k);
            if (block == ROPE)
                mma_scores(s, q_rope + 4 * k, rows);
            else
                mma_scores(s, ALONG + place(&sh, sh.q[block] + 32 * k), rows, !(first && block == A && k == 0));
        }
    }
}

// Weights of a tile, and their sums.
__device__ __forceinline__ void weigh(const float (&s)[32], const float (&top)[2], float scale, float (&sum)[2], u32 (&p)[16]) {
    sum[0] = sum[1] = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const float a = power(s[2 * i] * scale - top[i % 2]), b = power(s[2 * i + 1] * scale - top[i % 2]);
        sum[i % 2] += a + b;
        p[i] = packed(a, b);
    }
}

// Flag between warps: the maximum of the scores of their heads rises from a tile on.
__device__ __forceinline__ int& raised(Shared& sh, int tile) { return sh.raised[tile][thread() % GROUP / 32]; }

// Whether a thread of the warpgroup says so. Products are waited for by all of its warps or by none.
__device__ __forceinline__ bool any_of_group(bool mine) {
    u32 found;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbarrier.cta.red.or.aligned.pred q, %2, %3, p;\nselp.u32 %0, 1, 0, q;\n}"
                 : "=r"(found)
                 : "r"((u32)mine), "n"(int(VOTED)), "n"(int(GROUP))
                 : "memory");
    return found;
}

// Weights of a tile of a pair. Only of a piece's first tile, and where weights come to more than MOST, is the largest score sought, and held to.
template <int tile>
__device__ __forceinline__ void weigh_tile(
    Shared& sh, int pair, bool first, float (&s)[32], float scale, float (&o)[128], float (&top)[2], float (&total)[2], u32 (&p)[16]) {
    float sum[2];
    bool raise = first;
    if (!first) {
        weigh(s, top, scale, sum, p);
        const bool more = fmaxf(sum[0], sum[1]) > MOST;
        raise = tile ? any_of_group(more) : __any_sync(~0u, more);
    }
    if (raise) {
        float here[2], by[2];
#pragma unroll
        for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(s[i])); // or what both ways have in common takes registers
        largest(s, here);
        const int row = row_of(thread());
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            here[i] = finite(fmaxf(top[i], ceilf(here[i] * scale)));
            by[i] = power(top[i] - here[i]);
            total[i] *= by[i];
            top[i] = here[i];
            if (thread() % 4 == 0) sh.top[tile][row + 8 * i] = here[i];
        }
        raised(sh, tile) = pair;
        if (tile) mma_wait<0>();
        if (!first) shrink_sums(o, by);
        weigh(s, top, scale, sum, p);
    }
    total[0] += sum[0], total[1] += sum[1];
}

// Where in a swizzled block of heads a thread's matrices of the first 16 columns begin; those of the k-th are at 32 * k, xor.
__device__ __forceinline__ u32 matrices(const char* block) {
    const u32 x = thread(), lane = x % 32, row = x % GROUP / 32 * 16 + lane % 16;
    return shared_address(block) + row * 128 + (((lane / 16) ^ (lane % 8)) << 4);
}

// Weights as rows of heads, as products read them.
__device__ __forceinline__ void store_weights(char* to, const u32 (&p)[16]) {
    const u32 at = matrices(to);
#pragma unroll
    for (int k = 0; k < 4; ++k)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at ^ (32 * k)), "r"(p[4 * k]),
                     "r"(p[4 * k + 1]), "r"(p[4 * k + 2]), "r"(p[4 * k + 3])
                     : "memory");
}

// Rows of q as products take them from registers.
__device__ __forceinline__ void load_rows(const char* from, u32 (&p)[16]) {
    const u32 at = matrices(from);
#pragma unroll
    for (int k = 0; k < 4; ++k)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(p[4 * k]), "=r"(p[4 * k + 1]), "=r"(p[4 * k + 2]), "=r"(p[4 * k + 3]) : "r"(at ^ (32 * k)) : "memory");
}

// Makes rows from `live` on of four blocks zeros, after all of the warpgroup are done reading them.
__device__ __forceinline__ void clear(char* blocks, int live, int id) {
    named_barrier_sync(id, GROUP);
    for (int i = thread() % GROUP; i < 4 * (TILE - live) * 8; i += GROUP) {
        const int block = i / ((TILE - live) * 8), rest = i % ((TILE - live) * 8);
        *(uint4*)(blocks + block * BLOCK + live * 128 + rest * 16) = make_uint4(0, 0, 0, 0);
    }
    fence_async();
    named_barrier_sync(id, GROUP);
}

__device__ __forceinline__ void add_local(Shared& sh, int tile, int column_block, float (&o)[128], const u32 (&p)[16]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) mma_values(o, p + 4 * k, LEADING + place(&sh, sh.kv[tile][column_block] + 2048 * k));
}

__device__ __forceinline__ void add_remote(Shared& sh, const char* weights, int tile, int column_block, float (&o)[128]) {
#pragma unroll
    for (int k = 0; k < 4; ++k)
        mma_values(o, ALONG + place(&sh, weights + 32 * k), LEADING + place(&sh, sh.kv[tile][column_block] + 2048 * k));
}

struct Fills {
    u32 phase[2]; // of the next fill of each tile
};

// Mostly the other warpgroup's tile has not raised what scores are held to.
__device__ __forceinline__ void follow(Shared& sh, int tile, int pair, bool first, float (&o)[128], float (&top)[2], float (&total)[2]) {
    if (!__any_sync(~0u, raised(sh, tile) == pair)) return;
    const int row = row_of(thread());
    float by[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float later = sh.top[tile][row + 8 * i];
        by[i] = power(top[i] - later);
        top[i] = later;
        total[i] *= by[i];
    }
    if (!first) shrink_sums(o, by);
}

// The first tiles of a piece's pairs, and the left half of the values of all.
__device__ __forceinline__ void take_first(
    Shared& sh, const u32 (&q_rope)[16], const Arguments& a, const Piece& piece, Fills& fills, float (&o)[128], float (&top)[2], float (&total)[2]) {
    const float scale = a.scale_log2;
    float s[32];
    u32 p[16];
    for (int t = piece.t0; t < piece.t1; t += 2) {
        const bool both = t + 1 < piece.t1;
        const int live = piece.length - t * TILE;
        score_blocks<0, TILES>(sh, q_rope, 0, fills.phase[0], s, true);
        mma_commit();
        mma_wait<0>();
        fills.phase[0] ^= 1;
        if (live < TILE + UNSEEN) {
            mask(s, a, piece, t);
            if (live < TILE) clear(sh.kv[0][0], live, CLEARED);
        }
        weigh_tile<0>(sh, t, t == piece.t0, s, scale, o, top, total, p);
        store_weights(sh.weights, p);
        fence_async();
        arrive(FIRST_READY, 2 * GROUP);
        mma_begin();
        add_local(sh, 0, 0, o, p);
        mma_commit();
        mma_wait<0>();
        let_go(sh, FIRST_LEFT);
        if (!both) return;
        named_barrier_sync(SECOND_READY, 2 * GROUP);
        if (live < 2 * TILE) clear(sh.kv[1][0], live - TILE, CLEARED);
        follow(sh, 1, t, false, o, top, total);
        mma_begin();
        add_remote(sh, sh.q[ROPE], 1, 0, o);
        mma_commit();
        mma_wait<0>();
        let_go(sh, SECOND_LEFT);
    }
}

// The second tile of a pair, and the right half of the values of both.
__device__ __forceinline__ void second_of_pair(
    Shared& sh, const u32 (&q_rope)[16], const Arguments& a, const Piece& piece, int t, Fills& fills, float (&o)[128], float (&top)[2], float (&total)[2]) {
    const int live = piece.length - t * TILE;
    const float scale = a.scale_log2;
    float s[32];
    u32 p[16];
    const bool both = t + 1 < piece.t1, first = t == piece.t0;
    if (!both) {
        named_barrier_sync(FIRST_READY, 2 * GROUP);
        if (live < TILE) clear(sh.kv[0][4], live, CLEARED + 1);
        follow(sh, 0, t, first, o, top, total);
        mma_begin();
        add_remote(sh, sh.weights, 0, 4, o);
        mma_commit();
        mma_wait<0>();
        let_go(sh, FIRST_RIGHT);
        return;
    }
    score_blocks<4, 8>(sh, q_rope, 1, fills.phase[1], s, true);
    score_blocks<0, 4>(sh, q_rope, 1, fills.phase[1], s, false);
    score_blocks<ROPE, TILES>(sh, q_rope, 1, fills.phase[1], s, false);
    mma_commit();
    mma_wait<0>();
    fills.phase[1] ^= 1;
    if (live < 2 * TILE + UNSEEN) {
        mask(s, a, piece, t + 1);
        if (live < 2 * TILE) clear(sh.kv[1][4], live - TILE, CLEARED + 1);
    }
    named_barrier_sync(FIRST_READY, 2 * GROUP); // all have read the rope block of q, too
    follow(sh, 0, t, first, o, top, total);
    mma_begin();
    add_remote(sh, sh.weights, 0, 4, o);
    mma_commit();
    weigh_tile<1>(sh, t, false, s, scale, o, top, total, p);
    store_weights(sh.q[ROPE], p);
    fence_async();
    arrive(SECOND_READY, 2 * GROUP);
    mma_begin();
    add_local(sh, 1, 4, o, p);
    mma_commit();
    mma_wait<1>();
    let_go(sh, FIRST_RIGHT);
    mma_wait<0>();
    let_go(sh, SECOND_RIGHT);
}

// Results of a head, which four threads hold: of two blocks of 8 columns, threads with even numbers write the first
// and their neighbours the second, together lines of 64 or 32 bytes.
template <bool WHOLE> __device__ __forceinline__ void store(char* to, const float (&o)[128], int i, float by, bool live) {
    const bool odd = thread() % 2;
    to += (odd * 8 + thread() % 4 / 2 * 4) * (WHOLE ? 2 : 4);
#pragma unroll
    for (int j = 2 * i; j < 128; j += 8) {
        const float a0 = o[j] * by, a1 = o[j + 1] * by, b0 = o[j + 4] * by, b1 = o[j + 5] * by;
        if constexpr (WHOLE) {
            const u32 a = packed(a0, a1), b = packed(b0, b1), other = __shfl_xor_sync(~0u, odd ? a : b, 1);
            if (live) *(uint2*)(to + 4 * (j - 2 * i)) = odd ? make_uint2(other, b) : make_uint2(a, other);
        } else {
            const float x = __shfl_xor_sync(~0u, odd ? a0 : b0, 1), y = __shfl_xor_sync(~0u, odd ? a1 : b1, 1);
            if (live) *(float4*)(to + 8 * (j - 2 * i)) = odd ? make_float4(x, y, b0, b1) : make_float4(a0, a1, x, y);
        }
    }
}

// What is added up: of a whole request to its output, of a piece in fp32 to its slot.
template <int group> __device__ __forceinline__ void add_up(Shared& sh, const Arguments& a, const Share& own, int part, int head_block) {
    const int lane = threadIdx.x % 32;
    Fills fills = {{0, 0}};
    u32 q_phase = 0;
    for_each_piece(a, own, [&](int b, int tiles, const Piece& piece) {
        float o[128];
#pragma unroll
        for (int i = 0; i < 128; ++i) o[i] = 0;
        float top[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0};
        wait_for(&sh.q_full, q_phase);
        q_phase ^= 1;
        u32 q_rope[16];
        load_rows(sh.q[ROPE], q_rope);
        if (group == 0)
            take_first(sh, q_rope, a, piece, fills, o, top, total);
        else
            for (int t = piece.t0; t < piece.t1; t += 2) second_of_pair(sh, q_rope, a, piece, t, fills, o, top, total);
        if (lane == 0) arrive_at(&sh.q_empty);

        const int row = row_of(threadIdx.x);
        total[0] = quad_sum(total[0]), total[1] = quad_sum(total[1]);
        if (lane % 4 == 0)
            for (int i = 0; i < 2; ++i) {
                sh.total[group][row + 8 * i] = total[i];
                if (group == 0) sh.top[1][row + 8 * i] = top[i];
            }
        named_barrier_sync(BOTH, 2 * GROUP);
        const bool whole = piece.t0 == 0 && piece.t1 == tiles;
        const int slot = 2 * part + (piece.t1 < tiles);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int h = head_block * HEADS + row + 8 * i;
            const float sum = sh.total[0][row + 8 * i] + sh.total[1][row + 8 * i], by = inverse(sum);
            const bool live = h < a.heads;
            if (whole)
                store<true>((char*)a.o + (((long long)b * a.heads + h) * LATENT + 256 * group) * 2, o, i, by, live);
            else
                store<false>((char*)a.part_o + (((long long)slot * a.heads + h) * LATENT + 256 * group) * 4, o, i, by, live);
            if (live && group == 0 && lane % 4 == 0) store_lse(a, whole, b, slot, h, sh.top[1][row + 8 * i] + log2f(sum));
        }
        count_pieces(a, own, piece, b, tiles, part);
        raised(sh, group) = -1;
        named_barrier_sync(BOTH, 2 * GROUP);
    });
}

extern "C" __global__ void __launch_bounds__(3 * GROUP, 1)
hopper_pairs(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap kv_map, const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) char raw[];
    Shared& sh = *(Shared*)raw;
    if (shared_address(raw) % 1024) __trap(); // where swizzled blocks must begin
    const int head_blocks = (a.heads + HEADS - 1) / HEADS;
    const int part = blockIdx.x / head_blocks, head_block = blockIdx.x % head_blocks;
    const int group = __shfl_sync(~0u, threadIdx.x / GROUP, 0);
    const int first_tiles = tiles_of_request(a.lengths, threadIdx.x % 32, a.batch);
    if (threadIdx.x < 2 * GROUP) raised(sh, threadIdx.x / GROUP) = -1;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * TILES; ++i) init_barrier(&sh.full[0][0] + i, 1);
        for (int i = 0; i < 4; ++i) init_barrier(&sh.empty[i], 4);
        init_barrier(&sh.q_full, 1);
        init_barrier(&sh.q_empty, 8);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"((u64)&q_map) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"((u64)&kv_map) : "memory");
    }
    const Share own = share(a.lengths, first_tiles, part, a.parts, a.batch);
    __syncthreads();
    if (group == 0) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        add_up<0>(sh, a, own, part, head_block);
    } else if (group == 1) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        add_up<1>(sh, a, own, part, head_block);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x < 2 * GROUP + 32) {
            Filler filler;
            for_each_piece(a, own, [&](int b, int, const Piece& piece) { filler.take(sh, &q_map, &kv_map, piece, b * a.heads + head_block * HEADS, head_blocks > 1 ? a.pool : nullptr); });
        }
    }
}
