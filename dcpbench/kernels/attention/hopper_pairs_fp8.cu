// Paged MLA decode for Hopper over rows of 512 + 64 numbers in e4m3, in the schedule of hopper_pairs.cu: two warpgroups take the tiles
// of a pair in turn, and each adds up half of the columns of both.
//
// Products of e4m3 take both operands along the sum. For scores that is how rows lie. Values are turned over by three warps
// for each half, by matrices of 8 x 8 pairs of bytes: of 16 rows and 16 columns a thread gets, of two columns, the four rows whose weights
// a thread of the scores holds. So rows come in that order along the sum (`weights` and `turn_over`), and columns by those with even and
// with odd numbers (`store`); neither needs to be undone by anything but the place that a result is written to.

// Tensor cores keep some 13 bits of sums over e4m3, so each tile's products leave them and are added up outside.

static constexpr int STAGES = 3;                       // tiles that have landed or are under way
static constexpr int TURNERS = 3;                      // warps that turn over a half of the values

struct Shared {
    alignas(1024) Tile q;
    Tile kv[STAGES];
    char values[2][2][COLUMNS * 64]; // of the tiles of a pair, halves: a row a column, 64 rows of the tile in it
    char weights[2][THIN];           // of the tiles of a pair
    float top[2][HEADS];             // running largest score after the first and after the second tile, times log2(e), and next whole number
    float shrink[HEADS];             // of sums so far, by the first tile
    float total[2][HEADS];
    float q_scale[HEADS]; // what q was divided by
    u64 full[STAGES][2];  // of left and right half, the latter with the rope block
    u64 empty[STAGES];
    u64 turned[2][2], added[2][2]; // values of the tiles of a pair, by half: there, and let go
};

static_assert(sizeof(Shared) <= 227 * 1024, "more than a program may have");

enum Barrier { BOTH = 1, FIRST_SCORED, FIRST_READY, SECOND_READY };

// products[64 heads, 64 columns] (+)= weights[64, 32 rows] . values[64, 32 rows]T
__device__ __forceinline__ void mma_products(float (&x)[32], const u32* weights, u32 values, int add) {
    asm volatile("{\n.reg .pred p;\n.reg .b64 values;\nsetp.ne.b32 p, %37, 0;\nmov.b64 values, {%36, %38};\n"
                 "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " SOME ", {%32, %33, %34, %35}, values, p, 1, 1;\n}\n"
                 : R32(x, 0)
                 : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "r"(values), "r"(add), "n"(THINNER));
}

__device__ __forceinline__ void mma_products(float (&x)[32], u32 weights, u32 values, int add) {
    asm volatile("{\n.reg .pred p;\n.reg .b64 weights, values;\nsetp.ne.b32 p, %34, 0;\n"
                 "mov.b64 weights, {%32, %35};\nmov.b64 values, {%33, %35};\n"
                 "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " SOME ", weights, values, p, 1, 1;\n}\n"
                 : R32(x, 0)
                 : "r"(weights), "r"(values), "r"(add), "n"(THINNER));
}

// A third of half of a tile's values with rows and columns exchanged: stretches of 16 columns of which `third` has every third, three at
// once. Rows from `live` on become zeros unless WHOLE.
template <bool WHOLE> __device__ __forceinline__ void turn_over(const char (*latent)[BLOCK], char* values, int third, int live) {
    constexpr int STRETCHES = COLUMNS / 16, AT_ONCE = 2, ROUNDS = (STRETCHES + TURNERS * AT_ONCE - 1) / (TURNERS * AT_ONCE);
    const int lane = threadIdx.x % 32, at = lane % 8, matrix = lane / 8;
    const u32 from = shared_address(latent) + (8 * matrix + at) * 128 + (at << 4);
    const u32 to = shared_address(values) + (16 * third + 8 * (matrix % 2) + at) * 64;
    const u32 groups[2] = {to + ((matrix / 2 ^ at / 2) << 4), to + (((2 + matrix / 2) ^ at / 2) << 4)};
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        u32 x[AT_ONCE][2][4];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int first = (round * AT_ONCE + i) * TURNERS; // of three warps, whose stretches mostly lie in the same block of columns
            const u32 column = 16 * (first + third), block = first / 8 == (first + TURNERS - 1) / 8 ? first / 8 : column / 128;
            if (first + third < STRETCHES)
#pragma unroll
                for (int rows = 0; rows < 2; ++rows)
                    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                                 : "=r"(x[i][rows][0]), "=r"(x[i][rows][1]), "=r"(x[i][rows][2]), "=r"(x[i][rows][3])
                                 : "r"((from ^ (column & 0x70)) + block * BLOCK + rows * 32 * 128));
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int first = (round * AT_ONCE + i) * TURNERS;
            if (first + third < STRETCHES)
#pragma unroll
                for (int rows = 0; rows < 2; ++rows) {
                    u32 y[4];
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        y[j] = __byte_perm(x[i][rows][j / 2 * 2], x[i][rows][j / 2 * 2 + 1], j % 2 ? 0x7531 : 0x6420);
                        if (!WHOLE) y[j] &= kept(2 * rows + j / 2, live);
                    }
                    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(groups[rows] + first * 16 * 64),
                                 "r"(y[0]), "r"(y[1]), "r"(y[2]), "r"(y[3]) : "memory");
                }
        }
    }
    fence_async();
    __syncwarp();
}

// The warps that turn over one half of the values, tile by tile.
struct Turner {
    Turn<STAGES> turn;
    u32 phases = 3; // in which values of the tiles of a pair are let go, a bit each

    __device__ __forceinline__ void take(Shared& sh, const Piece& piece, Half half, int third) {
        for (int t = piece.t0; t < piece.t1; ++t, turn.next()) {
            const int tile = (t - piece.t0) % 2, live = piece.length - t * TILE;
            const auto& latent = sh.kv[turn.slot].latent;
            wait_for(&sh.full[turn.slot][half], turn.phase);
            wait_for(&sh.added[tile][half], phases >> tile & 1);
            if (live >= TILE)
                turn_over<true>(latent + 2 * half, sh.values[tile][half], third, live);
            else
                turn_over<false>(latent + 2 * half, sh.values[tile][half], third, live);
            let_go(&sh.turned[tile][half]);
            let_go(&sh.empty[turn.slot]);
            phases ^= 1 << tile;
        }
    }
};

// Adds half of a tile's values to sums that are shrunk first, and lets the values go. `weights(k)`: those of 32 rows, from registers or not.
template <class Weights>
__device__ __forceinline__ void add(Shared& sh, int tile, Half half, u32 phase, float (&o)[128], const float (&shrink)[2], Weights weights) {
    const u32 values = ALONG + place(&sh, sh.values[tile][half]);
    constexpr int PARTS = 4;
    float x[2][32];
    wait_for(&sh.turned[tile][half], phase);
#pragma unroll
    for (int part = 0; part <= PARTS; ++part) {
        if (part < PARTS) {
            mma_begin();
#pragma unroll
            for (int k = 0; k < 2; ++k) mma_products(x[part % 2], weights(k), values + part * (64 * 64 >> 4) + k * STEP, k);
            mma_commit();
        }
        if (part == 0) continue;
        if (part < PARTS)
            mma_wait<1>();
        else
            mma_wait<0>();
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            float& sum = o[32 * (part - 1) + i];
            sum = sum * shrink[i / 2 % 2] + x[(part - 1) % 2][i];
        }
    }
    let_go(&sh.added[tile][half]);
}

__device__ __forceinline__ u32 remote(Shared& sh, int tile, int k) { return ALONG + place(&sh, sh.weights[tile]) + k * STEP; }

__device__ __forceinline__ void score(Shared& sh, const Turn<STAGES>& turn, float (&s)[32]) {
    begin_scores(sh, turn, s);
    mma_wait<0>();
    let_go(&sh.empty[turn.slot]);
}

// How far a warpgroup is.
struct Taken {
    Turn<STAGES> turn;
    u32 phase[2] = {0, 0}; // in which values of the tiles of a pair are turned over next
};

// The first tiles of a piece's pairs, and the left half of the values of all.
__device__ __forceinline__ void take_first(
    Shared& sh, const Piece& piece, const float (&scale)[2], Taken& taken, float (&o)[128], float (&top)[2], float (&total)[2]) {
    for (int t = piece.t0; t < piece.t1; t += 2) {
        const bool both = t + 1 < piece.t1;
        const int live = piece.length - t * TILE;
        float s[32], shrink[2], here[2];
        u32 p[8];
        score(sh, taken.turn, s);
        taken.turn.next();
        if (both) taken.turn.next();
        if (live < TILE) mask(s, live);
        largest(s, scale, here);
        const int row = row_of(thread());
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            here[i] = fmaxf(top[i], here[i]);
            shrink[i] = power(top[i] - here[i]);
            top[i] = here[i];
            total[i] *= shrink[i];
            if (thread() % 4 == 0) sh.top[0][row + 8 * i] = here[i], sh.shrink[row + 8 * i] = shrink[i];
        }
        arrive(FIRST_SCORED, 2 * GROUP);
        weigh(s, top, scale, total, p);
        add(sh, 0, LEFT, taken.phase[0], o, shrink, [&](int k) { return p + 4 * k; });
        taken.phase[0] ^= 1;
        if (!both) {
            meet(SECOND_READY, 2 * GROUP); // the other warpgroup has done with the weights before these
            store_weights(sh.weights[0], p);
            fence_async();
            arrive(FIRST_READY, 2 * GROUP);
            return;
        }
        meet(SECOND_READY, 2 * GROUP);
        const int place = row_of(thread());
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float later = sh.top[1][place + 8 * i];
            shrink[i] = power(top[i] - later);
            total[i] *= shrink[i];
            top[i] = later;
        }
        if (!__all_sync(~0u, shrink[0] == 1 && shrink[1] == 1)) {
#pragma unroll
            for (int i = 0; i < 8; ++i) p[i] = shrunk(p[i], shrink[i % 2]);
        }
        store_weights(sh.weights[0], p);
        fence_async();
        arrive(FIRST_READY, 2 * GROUP);
        add(sh, 1, LEFT, taken.phase[1], o, shrink, [&](int k) { return remote(sh, 1, k); });
        taken.phase[1] ^= 1;
    }
}

// The second tiles, and the right half of the values of all.
__device__ __forceinline__ void take_second(
    Shared& sh, const Piece& piece, const float (&scale)[2], Taken& taken, float (&o)[128], float (&total)[2]) {
    for (int t = piece.t0; t < piece.t1; t += 2) {
        const int live = piece.length - (t + 1) * TILE;
        float shrink[2];
        taken.turn.next();
        if (t + 1 == piece.t1) {
            arrive(SECOND_READY, 2 * GROUP);
            meet(FIRST_SCORED, 2 * GROUP);
#pragma unroll
            for (int i = 0; i < 2; ++i) shrink[i] = sh.shrink[row_of(thread()) + 8 * i], total[i] *= shrink[i];
            meet(FIRST_READY, 2 * GROUP);
            add(sh, 0, RIGHT, taken.phase[0], o, shrink, [&](int k) { return remote(sh, 0, k); });
            taken.phase[0] ^= 1;
            return;
        }
        float s[32], top[2];
        u32 p[8];
        score(sh, taken.turn, s);
        taken.turn.next();
        if (live < TILE) mask(s, live);
        largest(s, scale, top);
        meet(FIRST_SCORED, 2 * GROUP);
        const int row = row_of(thread());
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float before = sh.top[0][row + 8 * i];
            top[i] = fmaxf(before, top[i]);
            shrink[i] = sh.shrink[row + 8 * i] * power(before - top[i]);
            total[i] *= shrink[i];
            if (thread() % 4 == 0) sh.top[1][row + 8 * i] = top[i];
        }
        weigh(s, top, scale, total, p);
        store_weights(sh.weights[1], p);
        fence_async();
        arrive(SECOND_READY, 2 * GROUP);
        add(sh, 1, RIGHT, taken.phase[1], o, shrink, [&](int k) { return p + 4 * k; });
        taken.phase[1] ^= 1;
        meet(FIRST_READY, 2 * GROUP);
        const float as_it_is[2] = {1, 1};
        add(sh, 0, RIGHT, taken.phase[0], o, as_it_is, [&](int k) { return remote(sh, 0, k); });
        taken.phase[0] ^= 1;
    }
}

// Results of a head, which four threads hold: each four columns that lie side by side of any 16.
template <bool WHOLE> __device__ __forceinline__ void store(char* to, const float (&o)[128], int i, float by, bool live) {
    if (!live) return;
    to += thread() % 4 * 4 * (WHOLE ? 2 : 4);
#pragma unroll
    for (int m = 0; m < 16; ++m) {
        const int at = 8 * m + 2 * i;
        const float x0 = o[at] * by, x1 = o[at + 4] * by, x2 = o[at + 1] * by, x3 = o[at + 5] * by;
        if constexpr (WHOLE)
            *(uint2*)(to + 32 * m) = make_uint2(packed(x0, x1), packed(x2, x3));
        else
            *(float4*)(to + 64 * m) = make_float4(x0, x1, x2, x3);
    }
}

// What is added up: of a whole request to its output, of a piece in fp32 to its slot.
template <int group> __device__ __forceinline__ void add_up(Shared& sh, const Arguments8& a, const Share& own, int part, int head_block) {
    const int lane = threadIdx.x % 32;
    Taken taken;
    for_each_piece(a, own, [&](int b, int tiles, const Piece& piece) {
        round_q<false>(sh.q, sh.q_scale, a, b, head_block, threadIdx.x / 4);
        meet(BOTH, 2 * GROUP);
        const int row = row_of(threadIdx.x);
        float o[128];
#pragma unroll
        for (int i = 0; i < 128; ++i) o[i] = 0;
        float top[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0};
        const float scale[2] = {a.scale_log2 * sh.q_scale[row], a.scale_log2 * sh.q_scale[row + 8]};
        if (group == 0)
            take_first(sh, piece, scale, taken, o, top, total);
        else
            take_second(sh, piece, scale, taken, o, total);

        total[0] = quad_sum(total[0]), total[1] = quad_sum(total[1]);
        if (lane % 4 == 0)
            for (int i = 0; i < 2; ++i) {
                sh.total[group][row + 8 * i] = total[i];
                if (group == 0) sh.top[1][row + 8 * i] = top[i];
            }
        meet(BOTH, 2 * GROUP);
        const bool whole = piece.t0 == 0 && piece.t1 == tiles;
        const int slot = 2 * part + (piece.t1 < tiles);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int h = head_block * HEADS + row + 8 * i;
            const float sum = sh.total[0][row + 8 * i] + sh.total[1][row + 8 * i], by = a.value_scale / sum;
            const bool live = h < a.heads;
            if (whole)
                store<true>((char*)a.o + (((long long)b * a.heads + h) * LATENT + COLUMNS * group) * 2, o, i, by, live);
            else
                store<false>((char*)a.part_o + (((long long)slot * a.heads + h) * LATENT + COLUMNS * group) * 4, o, i, by, live);
            if (live && group == 0 && lane % 4 == 0) store_lse(a, whole, b, slot, h, sh.top[1][row + 8 * i] - RAISED + log2f(sum));
        }
        count_pieces(a, own, piece, b, tiles, part);
        meet(BOTH, 2 * GROUP);
    });
}

extern "C" __global__ void __launch_bounds__(4 * GROUP, 1)
hopper_pairs_fp8(const __grid_constant__ TensorMap kv_map, const __grid_constant__ TensorMap rope_map, const __grid_constant__ Arguments8 a) {
    extern __shared__ __align__(1024) char raw[];
    Shared& sh = *(Shared*)raw;
    if (shared_address(raw) % 1024) __trap(); // where swizzled blocks must begin
    const int head_blocks = (a.heads + HEADS - 1) / HEADS;
    const int part = blockIdx.x / head_blocks, head_block = blockIdx.x % head_blocks;
    const int group = __shfl_sync(~0u, threadIdx.x / GROUP, 0);
    const int first_tiles = tiles_of_request(a.lengths, threadIdx.x % 32, a.batch);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * STAGES; ++i) init_barrier(&sh.full[0][0] + i, 1);
        for (int i = 0; i < STAGES; ++i) init_barrier(&sh.empty[i], 4 + 2 * TURNERS);
        for (int i = 0; i < 4; ++i) init_barrier(&sh.turned[0][0] + i, TURNERS), init_barrier(&sh.added[0][0] + i, 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"((u64)&kv_map) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"((u64)&rope_map) : "memory");
    }
    const Share own = share(a.lengths, first_tiles, part, a.parts, a.batch);
    __syncthreads();
    if (group == 0) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
        add_up<0>(sh, a, own, part, head_block);
    } else if (group == 1) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
        add_up<1>(sh, a, own, part, head_block);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const int warp = threadIdx.x / 32 % 4;
        if (warp < TURNERS) {
            Turner turner;
            const Half half = group == 2 ? LEFT : RIGHT;
            for_each_piece(a, own, [&](int, int, const Piece& piece) { turner.take(sh, piece, half, warp); });
        } else if (group == 2) {
                Filler<STAGES> filler;
            const u64 policy = first_to_go();
            for_each_piece(a, own, [&](int, int, const Piece& piece) { filler.take(sh, &kv_map, &rope_map, piece, policy); });
        }
    }
}
