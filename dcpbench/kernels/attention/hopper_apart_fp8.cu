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

static constexpr int KEPT = 12;            // stretches of 32 columns of q, of 18, in registers: as many as are left
static constexpr int STAGES = 5;           // tiles that have landed or are under way
static constexpr int SLOTS = 4;            // tiles whose weights have been passed on
static constexpr int SCORER = 2, COPIER = 3; // warpgroups; the first two add up
static constexpr int BLOCK = 64 * 128;     // bytes of 64 rows and 128 columns, swizzled by 128 bytes
static constexpr int THIN = 64 * 64;       // of 64 rows of 64 bytes, swizzled by 64
static constexpr int COLUMNS = 256;        // of a half of the values
static constexpr float RAISED = 8;         // weights are 2^8 at `Scored::top`: scores may rise by 0.8 above it, and the least of e4m3 is 2^-9
static constexpr float LARGEST = 448;      // number of e4m3

struct Tile {
    char latent[4][BLOCK];
    char rope[THIN];
};

enum Half { LEFT, RIGHT };

struct Shared {
    union {
        alignas(1024) Tile q;
        char weights[SLOTS][THIN]; // where stretches of q were that are in registers
    };
    Tile kv[STAGES];
    float shrink[SLOTS][HEADS]; // of sums so far, where they do; behind a piece's last tile what makes them averages
    uint4 moved[SLOTS];         // whether those of each 16 heads do
    float q_scale[HEADS];       // what q was divided by
    u64 full[STAGES][2];        // of left and right half, the latter with the rope block
    u64 empty[STAGES];
    u64 weighed[SLOTS], added[SLOTS];
};

static_assert(sizeof(Shared) <= 227 * 1024, "more than a program may have");
static_assert(SLOTS * THIN <= KEPT / 4 * BLOCK, "weights lie where q is still read");

enum Barrier { Q_READY = 1, SCORERS, CLEARED };

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

__device__ __forceinline__ void let_go(u64* bar) {
    if (thread() % 32 == 0) arrive_at(bar);
}

__device__ __forceinline__ void largest(const float (&s)[32], const float (&scale)[2], float (&top)[2]) {
    largest(s, top);
#pragma unroll
    for (int i = 0; i < 2; ++i) top[i] = ceilf(top[i] * scale[i]);
}

// Weights of a thread's rows, four a register: of 16 * g + {2c, 2c + 1, 8 + 2c, 8 + 2c + 1}, for both of its heads, and their sums. Returns the
// largest.
__device__ __forceinline__ float weigh(const float (&s)[32], const float (&top)[2], const float (&scale)[2], float (&sum)[2], u32 (&p)[8]) {
    float most[2] = {0, 0};
    sum[0] = sum[1] = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int at = i / 2 * 8 + i % 2 * 2;
        float w[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) w[j] = power(s[at + j / 2 * 4 + j % 2] * scale[i % 2] - (top[i % 2] - RAISED));
        sum[i % 2] += (w[0] + w[1]) + (w[2] + w[3]);
        most[i % 2] = fmaxf(most[i % 2], fmaxf(fmaxf(w[0], w[1]), fmaxf(w[2], w[3])));
        p[i] = rounded(w[0], w[1], w[2], w[3]);
    }
    return fmaxf(most[0], most[1]);
}

// Where a lane's row of the first four matrices of weights is; those of the other 32 rows are exclusive or with 32 from there.
__device__ __forceinline__ u32 weights_of(Shared& sh) {
    const u32 lane = threadIdx.x % 32, head = threadIdx.x % GROUP / 32 * 16 + lane % 16;
    return shared_address(sh.weights[0]) + head * 64 + (((lane / 16) ^ (head / 2 % 4)) << 4);
}

__device__ __forceinline__ void store_matrices(u32 to, const u32* p) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]) : "memory");
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

// q of a head of a piece in e4m3, by four threads: its largest number becomes 448. It has 72 registers for q, which is widened twice.
__device__ __forceinline__ void round_q(Tile& q, float* q_scale, const Arguments8& a, int b, int head_block, int head) {
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

// Which tile of the ring comes next, and how often the ring has come round.
struct Turn {
    u32 slot = 0, phase = 0;

    __device__ __forceinline__ void next() {
        if (++slot == STAGES) slot = 0, phase ^= 1;
    }
};

// The warp that has tiles copied, in order and across pieces.
__device__ __forceinline__ void fill(
    Shared& sh, Turn& turn, const TensorMap* kv, const TensorMap* rope, const Piece& piece, u64 policy) {
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
#pragma unroll
            for (int block = 0; block < 4; ++block)
                copy_box(tile.latent[block] + lane * BOX * 128, kv, 128 * block, row, &full[block / 2], policy);
            copy_box(tile.rope + lane * BOX * 64, rope, LATENT, row, &full[RIGHT], policy);
        }
        row = next;
    }
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
__device__ __forceinline__ void begin_scores(Shared& sh, const Turn& turn, const u32 (&kept)[4 * KEPT + 1], float (&s)[32]) {
    const u32 q = ALONG + place(&sh, &sh.q), rows = ALONG + place(&sh, sh.kv) + turn.slot * (u32)(sizeof(Tile) >> 4);
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
    Turn turn;
    Hand hand;
    // Of a thread's two heads: a whole number to which scores times log2(e) are held, near the largest, and the sum of weights.
    float top[2], total[2];
};

// Waits for a tile's scores, and stores its weights and by what sums so far shrink. Only of a piece's first tile, and where a weight is more
// than e4m3 holds, is the largest score sought.
__device__ __forceinline__ void store_tile(
    Shared& sh, Scored& scored, float (&s)[32], const Arguments8& a, const Piece& piece, int t, const float (&scale)[2], u32 to, bool last) {
    bool moved = t == piece.t0;
    mma_wait<0>();
    scored.turn.next();
    if ((last || UNSEEN) && piece.length - t * TILE < TILE + UNSEEN) mask(s, a, piece, t);
    float by[2] = {1, 1}, sum[2];
    u32 p[8];
    if (!moved) {
        moved = __any_sync(~0u, weigh(s, scored.top, scale, sum, p) > LARGEST);
    }
    if (moved) {
        float here[2];
#pragma unroll
        for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(s[i])); // or what both ways have in common takes registers
        largest(s, scale, here);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            here[i] = finite(fmaxf(scored.top[i], here[i]));
            by[i] = power(scored.top[i] - here[i]);
            scored.top[i] = here[i];
        }
        weigh(s, scored.top, scale, sum, p);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) scored.total[i] = scored.total[i] * by[i] + sum[i];
    const int slot = scored.hand.slot();
    wait_for(&sh.added[slot], scored.hand.phase() ^ 1);
    store_matrices(to + slot * THIN, p);
    store_matrices((to + slot * THIN) ^ 32, p + 4);
    if (moved && thread() % 4 == 0) {
        const int row = row_of(thread());
        sh.shrink[slot][row] = by[0], sh.shrink[slot][row + 8] = by[1];
    }
    if (thread() % 32 == 0) ((u32*)&sh.moved[slot])[thread() % GROUP / 32] = moved;
}

// Hands over what has been stored.
__device__ __forceinline__ void hand_over(Shared& sh, Scored& scored) {
    fence_async();
    __syncwarp();
    let_go(&sh.weighed[scored.hand.slot()]);
    ++scored.hand.count;
}

// A piece's tiles, each begun before weights of the one before are passed on. The last is by itself, as products that a branch may begin
// are serialised.
__device__ __forceinline__ void take_tiles(
    Shared& sh, const Arguments8& a, const Piece& piece, const u32 (&kept)[4 * KEPT + 1], const float (&scale)[2], Scored& scored) {
    const u32 to = weights_of(sh);
    float s[32];
    begin_scores(sh, scored.turn, kept, s);
    int t = piece.t0;
    for (; t + 1 < piece.t1; ++t) {
        store_tile(sh, scored, s, a, piece, t, scale, to, false);
        begin_scores(sh, scored.turn, kept, s);
        hand_over(sh, scored);
    }
    store_tile(sh, scored, s, a, piece, t, scale, to, true);
    hand_over(sh, scored);
}

// Scores and the running softmax of each piece; also the log-sum-exps.
__device__ __forceinline__ void score(Shared& sh, const Arguments8& a, const Share& own, int part, int head_block) {
    Scored scored;
    bool first = true;
    for_each_piece(a, own, [&](int b, int tiles, const Piece& piece) {
        if (first) {
            named_barrier_sync(Q_READY, 3 * GROUP);
        } else {
            const u32 last = scored.hand.count - 1;
            wait_for(&sh.added[last % SLOTS], last / SLOTS % 2); // weights lie where q comes
            named_barrier_sync(SCORERS, GROUP);                                // all have done with q before this
#pragma unroll 1
            for (int head = threadIdx.x % GROUP / 4; head < HEADS; head += GROUP / 4) round_q(sh.q, sh.q_scale, a, b, head_block, head);
            named_barrier_sync(SCORERS, GROUP);
        }
        first = false;
        const int row = row_of(threadIdx.x);
        const float scale[2] = {a.scale_log2 * sh.q_scale[row], a.scale_log2 * sh.q_scale[row + 8]};
        scored.top[0] = scored.top[1] = -INFINITY, scored.total[0] = scored.total[1] = 0;
        u32 kept[4 * KEPT + 1];
        keep(sh.q, kept);
        named_barrier_sync(SCORERS, GROUP); // before weights come there
        take_tiles(sh, a, piece, kept, scale, scored);

        const int slot = scored.hand.slot();
        wait_for(&sh.added[slot], scored.hand.phase() ^ 1);
        const bool whole = piece.t0 == 0 && piece.t1 == tiles;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float sum = quad_sum(scored.total[i]);
            const int head = row + 8 * i, h = head_block * HEADS + head;
            if (threadIdx.x % 4) continue;
            sh.shrink[slot][head] = a.value_scale * inverse(sum);
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

// The first operand of a product, of what `load_values` gave.
__device__ __forceinline__ void turn_over(const u32 (&x)[4], u32* v) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        v[i] = __byte_perm(x[i / 2 * 2], x[i / 2 * 2 + 1], i % 2 ? 0x7531 : 0x6420);
        asm volatile("" : "+r"(v[i])); // before products are begun, among which it would split them
    }
}

// Zeros from row `live` on: whatever there is would reach products.
__device__ __forceinline__ void clear(Tile& tile, int half, int live) {
    for (int i = live * 8 + threadIdx.x % GROUP; i < TILE * 8; i += GROUP)
#pragma unroll
        for (int block = 0; block < 2; ++block) ((uint4*)tile.latent[2 * half + block])[i] = make_uint4(0, 0, 0, 0);
    fence_async(); // before the next tile is copied there
    named_barrier_sync(CLEARED + half, GROUP);
}

// Factors of the heads that a thread has sums of: 8 * j + {2 * c, 2 * c + 1}.
__device__ __forceinline__ void load_factors(const float* from, float (&by)[16]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float2 two = *(const float2*)(from + 8 * j + thread() % 4 * 2);
        by[2 * j] = two.x, by[2 * j + 1] = two.y;
    }
}

// Scale the running sums down if the maximum has risen, while products are in flight.
__device__ __forceinline__ void shrink_sums(Shared& sh, const Hand& hand, float (&o)[128]) {
    const uint4 moved = sh.moved[hand.slot()];
    if (!__any_sync(~0u, moved.x | moved.y | moved.z | moved.w)) return;
    const u32 of[4] = {moved.x, moved.y, moved.z, moved.w};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        float2 by = make_float2(1, 1);
        if (of[j / 2]) by = *(const float2*)(sh.shrink[hand.slot()] + 8 * j + thread() % 4 * 2);
#pragma unroll
        for (int i = 4 * j; i < 128; i += 32) o[i] *= by.x, o[i + 1] *= by.y, o[i + 2] *= by.x, o[i + 3] *= by.y;
    }
}

// A lane's row of the first 16 columns of a warp, whose 64 lie side by side: further ones are exclusive or with 16 times their number.
__device__ __forceinline__ u32 values_of(Shared& sh, const Turn& turn, int half) {
    const u32 lane = thread() % 32, warp = thread() % GROUP / 32, at = lane % 8;
    return shared_address(sh.kv[turn.slot].latent[2 * half]) + warp / 2 * BLOCK + lane * 128 + ((at ^ (warp % 2 * 4)) << 4);
}

// The first operand for the first columns of a tile, once it has landed; of its rows and those of later tiles `live` are left.
__device__ __forceinline__ void begin_values(Shared& sh, const Turn& turn, int half, int live, u32 (&v)[8]) {
    wait_for(&sh.full[turn.slot][half], turn.phase);
    if (live < TILE) clear(sh.kv[turn.slot], half, live);
    const u32 from = values_of(sh, turn, half);
    u32 first[4], second[4];
    load_values(from, first);
    load_values(from + 32 * 128, second);
    turn_over(first, v);
    turn_over(second, v + 4);
}

// Adds half of a tile's values to sums, 64 columns at a time, of which `v` has the first and then the first of the next tile. Of the latter's and
// later rows `live` are left. It has landed, as its scores are begun before weights of this one are passed on.
__device__ __forceinline__ void add(Shared& sh, Turn& turn, Hand& hand, int half, int live, u32 (&v)[8], float (&o)[128]) {
    const u32 weights = ALONG + place(&sh, sh.weights) + hand.slot() * (THIN >> 4);
    const Turn own = turn;
    turn.next();
    u32 from, first[4], second[4];
    float x[32];
    wait_for(&sh.weighed[hand.slot()], hand.phase());
#pragma unroll
    for (int block = 0; block < 4; ++block) {
        mma_begin();
#pragma unroll
        for (int k = 0; k < 2; ++k) mma_products(x, v + 4 * k, weights + k * STEP, k);
        mma_commit();
        if (block == 0) from = values_of(sh, own, half);
        if (block == 3 && live >= TILE) wait_for(&sh.full[turn.slot][half], turn.phase);
        const u32 next = block < 3 ? from ^ ((block + 1) << 4) : from + (turn.slot - own.slot) * (u32)sizeof(Tile);
        load_values(next, first); // half of it is loaded ahead, as registers are short
        if (block == 0) shrink_sums(sh, hand, o);
        mma_wait<0>();
        load_values(next + 32 * 128, second);
#pragma unroll
        for (int i = 0; i < 32; ++i) o[32 * block + i] += x[i];
        turn_over(first, v);
        turn_over(second, v + 4);
    }
    __syncwarp();
    let_go(&sh.added[hand.slot()]);
    let_go(&sh.empty[own.slot]);
    ++hand.count;
    if (live > 0 && live < TILE) begin_values(sh, turn, half, live, v);
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
    Turn turn;
    Hand hand;
    bool first = true;
    for_each_piece(a, own, [&](int b, int tiles, const Piece& piece) {
        if (first) {
            round_q(sh.q, sh.q_scale, a, b, head_block, threadIdx.x / 4);
            arrive(Q_READY, 3 * GROUP);
        }
        first = false;
        float o[128];
#pragma unroll
        for (int i = 0; i < 128; ++i) o[i] = 0;
        u32 v[8];
        begin_values(sh, turn, half, piece.length - piece.t0 * TILE, v);
        for (int t = piece.t0 + 1; t <= piece.t1; ++t) add(sh, turn, hand, half, t < piece.t1 ? piece.length - t * TILE : 0, v, o);
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

extern "C" __global__ void __launch_bounds__(4 * GROUP, 1)
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
        for (int i = 0; i < STAGES; ++i) init_barrier(&sh.empty[i], 8);
        for (int i = 0; i < SLOTS; ++i) init_barrier(&sh.weighed[i], 4), init_barrier(&sh.added[i], 8);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"((u64)&kv_map) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"((u64)&rope_map) : "memory");
    }
    const Share own = share(a.lengths, first_tiles, part, a.parts, a.batch);
    __syncthreads();
    if (group < SCORER) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 184;");
        add_up(sh, a, own, part, head_block, group);
    } else if (group == SCORER) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 120;");
        score(sh, a, own, part, head_block);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x < COPIER * GROUP + 32) {
            Turn turn;
            const u64 policy = first_to_go();
            for_each_piece(a, own, [&](int, int, const Piece& piece) { fill(sh, turn, &kv_map, &rope_map, piece, policy); });
        }
    }
}
