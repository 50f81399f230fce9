// Paged MLA decode for Hopper over rows of 512 + 64 numbers in e4m3, with scores and values apart: one warpgroup scores tiles and hands
// over weights, two add up half of the columns each, and a warp has the copy engine fill a ring of tiles.
//
// Products of e4m3 take both operands along the sum. For scores that is how rows lie. Values are the first operand here, which may come
// from registers: sumsT[columns, heads] += valuesT[columns, rows] . weightsT[rows, heads]. A warp reads 16 columns of 32 rows by
// `ldmatrix.trans`, which exchanges pairs of bytes, and sorts bytes by `prmt`; so nothing is written back, and no value is read twice.
// Of any 16 rows a thread then has, of two columns that lie side by side, the four whose weights a thread of the scores holds: rows come in
// that order along the sum, and columns by those with even and with odd numbers, which only matters where results are stored.
//
// Tensor cores keep some 13 bits of sums over e4m3, so each tile's products leave them and are added up outside.
//
// Defined from outside: PROGRAMS, how many programs of a cluster (1 or 2) read the same rows, for other heads. Of two each has half of the
// columns copied to both, so that they cross from L2 once.

static constexpr bool AHEAD = true;         // scores of the next tile are begun before weights of this one
static constexpr int KEPT = AHEAD ? 0 : 14; // stretches of 32 columns of q, of 18, in registers: as many as are left
static constexpr int STAGES = 5;            // tiles that have landed or are under way
static constexpr int SLOTS = 2;             // tiles whose weights have been handed over
static constexpr int SCORER = 2, COPIER = 3; // warpgroups; the first two add up

struct Shared {
    alignas(1024) Tile q;
    Tile kv[STAGES];
    char weights[SLOTS][THIN];
    float shrink[SLOTS][HEADS]; // of sums so far; behind a piece's last tile what makes them averages
    uint4 moved[SLOTS];         // whether any of those of 16 heads is not 1
    float q_scale[HEADS];       // what q was divided by
    u64 full[STAGES][2];        // of left and right half, the latter with the rope block
    u64 empty[STAGES];
    u64 weighed[SLOTS], added[SLOTS];
};

static_assert(sizeof(Shared) <= 227 * 1024, "more than a program may have");

enum Barrier { Q_READY = 1, SCORERS };

__device__ __forceinline__ void let_go_of_tile(Shared& sh, int slot) {
    if (thread() % 32) return;
    arrive_at(&sh.empty[slot]);
    if constexpr (PROGRAMS == 2) arrive_at_other(&sh.empty[slot]);
}

// scores[64 heads, 64 rows] (+)= q[64, 32] . rows[64, 32]T, q from registers
__device__ __forceinline__ void mma_scores(float (&s)[32], const u32* q, u32 rows, int add) {
    asm volatile("{\n.reg .pred p;\n.reg .b64 rows;\nsetp.ne.b32 p, %37, 0;\nmov.b64 rows, {%36, %38};\n"
                 "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " SOME ", {%32, %33, %34, %35}, rows, p, 1, 1;\n}\n"
                 : R32(s, 0)
                 : "r"(q[0]), "r"(q[1]), "r"(q[2]), "r"(q[3]), "r"(rows), "r"(add), "n"(WIDE));
}

// products[64 columns, 64 heads] (+)= values[64, 32 rows] . weights[64, 32 rows]T
__device__ __forceinline__ void mma_products(float (&x)[32], const u32* values, u32 weights, int add) {
    asm volatile("{\n.reg .pred p;\n.reg .b64 weights;\nsetp.ne.b32 p, %37, 0;\nmov.b64 weights, {%36, %38};\n"
                 "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " SOME ", {%32, %33, %34, %35}, weights, p, 1, 1;\n}\n"
                 : R32(x, 0)
                 : "r"(values[0]), "r"(values[1]), "r"(values[2]), "r"(values[3]), "r"(weights), "r"(add), "n"(THINNER));
}

// Stretches of q as products take them from registers.
__device__ __forceinline__ void keep(const Tile& q, u32 (&kept)[4 * KEPT + 1]) {
    const u32 x = thread(), lane = x % 32, row = x % GROUP / 32 * 16 + lane % 16;
    const u32 at = shared_address(q.latent) + row * 128 + (((lane / 16) ^ (lane % 8)) << 4);
#pragma unroll
    for (int k = 0; k < KEPT; ++k)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(kept[4 * k]), "=r"(kept[4 * k + 1]), "=r"(kept[4 * k + 2]), "=r"(kept[4 * k + 3])
                     : "r"((at ^ (32 * (k % 4))) + k / 4 * BLOCK) : "memory");
}

// Begins the scores of a tile, once it has landed.
__device__ __forceinline__ void begin_scores(Shared& sh, const Turn<STAGES>& turn, const u32 (&kept)[4 * KEPT + 1], float (&s)[32]) {
    const u32 q = ALONG + place(&sh, &sh.q), rows = ALONG + place(&sh, &sh.kv[turn.slot]);
#pragma unroll
    for (int k = 0; k < WIDTH / 32; ++k) {
        if (k == 0 || k == 8) {
            wait_for(&sh.full[turn.slot][k / 8], turn.phase);
            mma_begin();
        }
        const u32 from = k / 4 * (BLOCK >> 4) + k % 4 * STEP;
        if (k < KEPT)
            mma_scores(s, kept + 4 * k, rows + from, k);
        else if (k < LATENT / 32)
            mma_scores<WIDE>(s, q + from, rows + from, k);
        else
            mma_scores<THINNER>(s, q + from, rows + from, k);
    }
    mma_commit();
}

// Which weights come next: counted, as two registers a number are one too many.
struct Hand {
    u32 count = 0;

    __device__ __forceinline__ u32 slot() const { return count % SLOTS; }
    __device__ __forceinline__ u32 phase() const { return count / SLOTS % 2; }
};

// How far scores are.
struct Scored {
    Turn<STAGES> turn;
    Hand hand;
    float top[2], total[2]; // of a thread's two heads: the next whole number above the largest score times log2(e), and the sum of its weights
};

// Hands over the weights of a tile and by what sums so far shrink.
__device__ __forceinline__ void hand_over(Shared& sh, Scored& scored, float (&s)[32], const float (&scale)[2], int live) {
    if (live < TILE) mask(s, live);
    float here[2], by[2];
    u32 p[8];
    largest(s, scale, here);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        here[i] = fmaxf(scored.top[i], here[i]);
        by[i] = power(scored.top[i] - here[i]);
        scored.top[i] = here[i];
        scored.total[i] *= by[i];
    }
    weigh(s, scored.top, scale, scored.total, p);
    const int slot = scored.hand.slot(), row = row_of(thread());
    wait_for(&sh.added[slot], scored.hand.phase() ^ 1);
    store_weights(sh.weights[slot], p);
    if (thread() % 4 == 0) sh.shrink[slot][row] = by[0], sh.shrink[slot][row + 8] = by[1];
    const bool moved = __any_sync(~0u, by[0] != 1 || by[1] != 1);
    if (thread() % 32 == 0) ((u32*)&sh.moved[slot])[thread() % GROUP / 32] = moved;
    fence_async();
    __syncwarp();
    let_go(&sh.weighed[slot]);
    ++scored.hand.count;
}

// Weights of a tile whose scores were begun before `later` others.
template <int later>
__device__ __forceinline__ void end_tile(Shared& sh, Turn<STAGES>& turn, Scored& scored, const float (&scale)[2], float (&s)[32], int live) {
    mma_wait<later>();
    let_go_of_tile(sh, turn.slot);
    turn.next();
    hand_over(sh, scored, s, scale, live);
}

// A piece's tiles. The last are by themselves, as products that a branch may begin are serialised.
__device__ __forceinline__ void take_tiles(
    Shared& sh, const Piece& piece, const u32 (&kept)[4 * KEPT + 1], const float (&scale)[2], Scored& scored) {
    Turn<STAGES> turn = scored.turn;
    const auto begin = [&](float (&s)[32]) {
        begin_scores(sh, scored.turn, kept, s);
        scored.turn.next();
    };
    float even[32], odd[32];
    int t = piece.t0;
    if constexpr (!AHEAD) {
        for (; t < piece.t1; ++t) {
            begin(even);
            end_tile<0>(sh, turn, scored, scale, even, piece.length - t * TILE);
        }
        return;
    }
    begin(even);
    for (; t + 2 < piece.t1; t += 2) {
        begin(odd);
        end_tile<1>(sh, turn, scored, scale, even, TILE);
        begin(even);
        end_tile<1>(sh, turn, scored, scale, odd, TILE);
    }
    if (t + 1 < piece.t1) {
        begin(odd);
        end_tile<1>(sh, turn, scored, scale, even, TILE);
        end_tile<0>(sh, turn, scored, scale, odd, piece.length - (t + 1) * TILE);
    } else {
        end_tile<0>(sh, turn, scored, scale, even, piece.length - t * TILE);
    }
}

// Scores and the running softmax of each piece; also the log-sum-exps.
__device__ __forceinline__ void score(Shared& sh, const Arguments8& a, const Share& own, int part, int head_block) {
    Scored scored;
    bool first = true;
    for_each_piece(a, own, [&](int b, int tiles, const Piece& piece) {
        if (first) {
            meet(Q_READY, 3 * GROUP);
        } else {
            meet(SCORERS, GROUP); // all have done with q before this
#pragma unroll 1
            for (int head = threadIdx.x % GROUP / 4; head < HEADS; head += GROUP / 4) round_q<true>(sh.q, sh.q_scale, a, b, head_block, head);
            meet(SCORERS, GROUP);
        }
        first = false;
        const int row = row_of(threadIdx.x);
        const float scale[2] = {a.scale_log2 * sh.q_scale[row], a.scale_log2 * sh.q_scale[row + 8]};
        scored.top[0] = scored.top[1] = -INFINITY, scored.total[0] = scored.total[1] = 0;
        u32 kept[4 * KEPT + 1];
        keep(sh.q, kept);
        take_tiles(sh, piece, kept, scale, scored);

        const int slot = scored.hand.slot();
        wait_for(&sh.added[slot], scored.hand.phase() ^ 1);
        const bool whole = piece.t0 == 0 && piece.t1 == tiles;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float sum = quad_sum(scored.total[i]);
            const int head = row + 8 * i, h = head_block * HEADS + head;
            if (threadIdx.x % 4) continue;
            sh.shrink[slot][head] = a.value_scale / sum;
            if (h < a.heads) store_lse(a, whole, b, 2 * part + (piece.t1 < tiles), h, scored.top[i] - RAISED + log2f(sum));
        }
        __syncwarp();
        let_go(&sh.weighed[slot]);
        ++scored.hand.count;
    });
}

// Of 32 rows and 16 columns of the values: pairs of columns of 8 rows each, by matrices of which `from` is a lane's row.
__device__ __forceinline__ void load_values(u32 from, u32 (&x)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from));
}

// The first operand of a product: rows 32 * k to 31 further of 16 columns. Rows from `live` on become zeros unless WHOLE.
template <bool WHOLE> __device__ __forceinline__ void turn_over(const u32 (&x)[4], int k, int live, u32* v) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        v[i] = __byte_perm(x[i / 2 * 2], x[i / 2 * 2 + 1], i % 2 ? 0x7531 : 0x6420);
        if (!WHOLE) v[i] &= kept(2 * k + i / 2, live);
    }
}

// Factors of the heads that a thread has sums of: 8 * j + {2 * c, 2 * c + 1}.
__device__ __forceinline__ void load_factors(const float* from, float (&by)[16]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float2 two = *(const float2*)(from + 8 * j + thread() % 4 * 2);
        by[2 * j] = two.x, by[2 * j + 1] = two.y;
    }
}

// Adds half of a tile's values to sums, 64 columns at a time, of which a warp has 16 that lie side by side: 16 * (4 * warp + block).
template <bool WHOLE>
__device__ __forceinline__ void add(Shared& sh, const Turn<STAGES>& turn, const Hand& hand, int half, int live, float (&o)[128]) {
    const u32 lane = thread() % 32, warp = thread() % GROUP / 32, at = lane % 8;
    const u32 from = shared_address(sh.kv[turn.slot].latent[2 * half]) + warp / 2 * BLOCK + lane * 128 + ((at ^ (warp % 2 * 4)) << 4);
    const u32 weights = ALONG + place(&sh, sh.weights[hand.slot()]);
    u32 first[4], second[4], v[8];
    float x[32];
    load_values(from, first);
    load_values(from + 32 * 128, second);
    turn_over<WHOLE>(first, 0, live, v);
    turn_over<WHOLE>(second, 1, live, v + 4);
    wait_for(&sh.weighed[hand.slot()], hand.phase());
    const uint4 moved = sh.moved[hand.slot()];
    if (__any_sync(~0u, moved.x | moved.y | moved.z | moved.w)) {
        float by[16];
        load_factors(sh.shrink[hand.slot()], by);
#pragma unroll
        for (int i = 0; i < 128; ++i) o[i] *= by[i % 32 / 4 * 2 + i % 2];
    }
#pragma unroll
    for (int block = 0; block < 4; ++block) {
        mma_begin();
#pragma unroll
        for (int k = 0; k < 2; ++k) mma_products(x, v + 4 * k, weights + k * STEP, k);
        mma_commit();
        const u32 next = from ^ ((block + 1) << 4); // half of it is loaded ahead, as registers are short
        if (block < 3) load_values(next, first);
        mma_wait<0>();
        if (block < 3) load_values(next + 32 * 128, second);
#pragma unroll
        for (int i = 0; i < 32; ++i) o[32 * block + i] += x[i];
        if (block < 3) {
            turn_over<WHOLE>(first, 0, live, v);
            turn_over<WHOLE>(second, 1, live, v + 4);
        }
    }
    __syncwarp();
    let_go(&sh.added[hand.slot()]);
    let_go_of_tile(sh, turn.slot);
}

// Results of a thread: of each of its heads two columns that lie side by side of any 16.
template <bool WHOLE> __device__ __forceinline__ void store(char* to, const float (&o)[128], const float (&by)[16], int heads) {
    constexpr int SIZE = WHOLE ? 2 : 4;
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int d = 0; d < 2; ++d) {
            const int head = 8 * j + thread() % 4 * 2 + d;
            if (head >= heads) continue;
#pragma unroll
            for (int block = 0; block < 4; ++block) {
                const int i = 32 * block + 4 * j + d;
                const float even = o[i] * by[2 * j + d], odd = o[i + 2] * by[2 * j + d];
                char* place = to + (head * LATENT + 16 * block) * SIZE;
                if constexpr (WHOLE)
                    *(u32*)place = packed(even, odd);
                else
                    *(float2*)place = make_float2(even, odd);
            }
        }
}

// What is added up: of a whole request to its output, of a piece in fp32 to its slot.
__device__ __forceinline__ void add_up(Shared& sh, const Arguments8& a, const Share& own, int part, int head_block, int half) {
    Turn<STAGES> turn;
    Hand hand;
    bool first = true;
    for_each_piece(a, own, [&](int b, int tiles, const Piece& piece) {
        if (first) {
            round_q<true>(sh.q, sh.q_scale, a, b, head_block, threadIdx.x / 4);
            arrive(Q_READY, 3 * GROUP);
        }
        first = false;
        float o[128];
#pragma unroll
        for (int i = 0; i < 128; ++i) o[i] = 0;
        for (int t = piece.t0; t < piece.t1; ++t, turn.next(), ++hand.count) {
            const int live = piece.length - t * TILE;
            wait_for(&sh.full[turn.slot][half], turn.phase);
            if (live >= TILE)
                add<true>(sh, turn, hand, half, live, o);
            else
                add<false>(sh, turn, hand, half, live, o);
        }
        float by[16];
        wait_for(&sh.weighed[hand.slot()], hand.phase());
        load_factors(sh.shrink[hand.slot()], by);
        __syncwarp();
        let_go(&sh.added[hand.slot()]);
        ++hand.count;
        const int h = head_block * HEADS, live = a.heads - h;
        const int column = COLUMNS * half + threadIdx.x % GROUP / 32 * 64 + threadIdx.x % 32 / 4 * 2;
        if (piece.t0 == 0 && piece.t1 == tiles)
            store<true>((char*)a.o + (((long long)b * a.heads + h) * LATENT + column) * 2, o, by, live);
        else
            store<false>((char*)a.part_o + (((2 * part + (piece.t1 < tiles)) * (long long)a.heads + h) * LATENT + column) * 4, o, by, live);
        count_pieces(a, own, piece, b, tiles, part);
    });
}

#if PROGRAMS == 2
#define TOGETHER __cluster_dims__(2, 1, 1)
#else
#define TOGETHER
#endif

extern "C" __global__ void TOGETHER __launch_bounds__(4 * GROUP, 1)
hopper_apart_fp8(const __grid_constant__ TensorMap kv_map, const __grid_constant__ TensorMap rope_map, const __grid_constant__ Arguments8 a) {
    extern __shared__ __align__(1024) char raw[];
    Shared& sh = *(Shared*)raw;
    if (shared_address(raw) % 1024) __trap(); // where swizzled blocks must begin
    const int head_blocks = (a.heads + HEADS - 1) / HEADS;
    const int part = blockIdx.x / head_blocks, head_block = blockIdx.x % head_blocks;
    const int group = __shfl_sync(~0u, threadIdx.x / GROUP, 0);
    const int first_tiles = tiles_of_request(a.lengths, threadIdx.x % 32, a.batch);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * STAGES; ++i) init_barrier(&sh.full[0][0] + i, 1);
        for (int i = 0; i < STAGES; ++i) init_barrier(&sh.empty[i], 12 * PROGRAMS);
        for (int i = 0; i < SLOTS; ++i) init_barrier(&sh.weighed[i], 4), init_barrier(&sh.added[i], 8);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"((u64)&kv_map) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"((u64)&rope_map) : "memory");
    }
    const Share own = share(a.lengths, first_tiles, part, a.parts, a.batch);
    __syncthreads();
    if constexpr (PROGRAMS == 2) meet_other(); // its barriers are there
    if (group < SCORER) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 184;");
        add_up(sh, a, own, part, head_block, group);
    } else if (group == SCORER) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 120;");
        score(sh, a, own, part, head_block);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x < COPIER * GROUP + 32) {
            Filler<STAGES, PROGRAMS> filler;
            const u64 policy = first_to_go();
            for_each_piece(a, own, [&](int, int, const Piece& piece) { filler.take(sh, &kv_map, &rope_map, piece, policy); });
        }
    }
    if constexpr (PROGRAMS == 2) meet_other(); // it may still copy to here
}
