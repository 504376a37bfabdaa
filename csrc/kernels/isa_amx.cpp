// AMX (TILE, INT8) with AVX-512: the integer products of many tokens. Everything else is in isa_avx512.cpp.
#include "tiles.h"

namespace hotset {
namespace {

// Tiles 0 to 3 hold dot products, 4 and 5 tokens, 6 and 7 rows.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    constexpr explicit TileShapes(int depth) {  // weights of a row per product
        for (int i = 0; i < 8; i++) {
            row_bytes[i] = uint16_t(i == 4 || i == 5 ? depth : 64);
            rows[i] = uint8_t(i < 6 ? 16 : depth / 4);
        }
    }
};

constexpr int kBatch = 4;
using Dots = int32_t[kBatch][16][16];  // [token][row]

// Multiply kBatch blocks, or both halves of half as many, and store the dot products of the previous batch:
// storing a tile immediately would stall the following products.
template <bool kSub>
HOTSET_INLINE void multiply_batch(const int8_t* q, const int8_t* codes, Dots& before) {
    constexpr int kRowBytes = kSub ? 256 : 512;
    auto tokens = [q](int i) { return q + (kSub ? i / 2 * 512 + i % 2 * 16 : i * 512); };
    auto rows = [codes](int i) { return codes + i * kRowBytes; };
    _tile_stored(0, before[0], 64);
    _tile_zero(0);
    _tile_loadd(4, tokens(0), 32);
    _tile_loadd(6, rows(0), 64);
    _tile_dpbssd(0, 4, 6);
    _tile_stored(1, before[1], 64);
    _tile_zero(1);
    _tile_loadd(5, tokens(1), 32);
    _tile_loadd(7, rows(1), 64);
    _tile_dpbssd(1, 5, 7);
    _tile_stored(2, before[2], 64);
    _tile_zero(2);
    _tile_loadd(4, tokens(2), 32);
    _tile_loadd(6, rows(2), 64);
    _tile_dpbssd(2, 4, 6);
    _tile_stored(3, before[3], 64);
    _tile_zero(3);
    _tile_loadd(5, tokens(3), 32);
    _tile_loadd(7, rows(3), 64);
    _tile_dpbssd(3, 5, 7);
}

HOTSET_INLINE __m512 floats(const int32_t* p) {
    return _mm512_cvtepi32_ps(_mm512_load_si512(p));
}

// Add block b to the sums of one lane, one vector per token. Sums of two halves times their scales are below
// 2^24, so floats are exact.
template <bool kMin, bool kSub, class Fetch>
HOTSET_INLINE void add_block(const Panel& panel, const TokenTile& x, int64_t b, const int32_t (*dots)[16][16],
                             const Fetch& fetch, __m512 (&acc)[16]) {
    const __m512 scale = _mm512_load_ps(panel.scale + b * 16);
    const float *const input = x.scale + b * 16, *const sum = kSub ? x.half_sum + b * 32 : x.sum + b * 16;
    __m512 min, sub[2], sub_min[2];
    if constexpr (kMin) min = _mm512_load_ps(panel.min + b * 16);
    for (int h = 0; kSub && h < 2; h++) {
        sub[h] = floats(panel.sub_scale + b * 32 + 16 * h);
        if constexpr (kMin) sub_min[h] = floats(panel.sub_min + b * 32 + 16 * h);
    }
#pragma GCC unroll 16  // keeps sums in registers
    for (int t = 0; t < 16; t++) {
        fetch(t);
        __m512 dot = floats(dots[0][t]);
        if constexpr (kSub) dot = _mm512_fmadd_ps(sub[1], floats(dots[1][t]), _mm512_mul_ps(sub[0], dot));
        acc[t] = _mm512_fmadd_ps(_mm512_mul_ps(scale, _mm512_set1_ps(input[t])), dot, acc[t]);
        if constexpr (kMin && kSub) {
            const __m512 mins = _mm512_fmadd_ps(sub_min[1], _mm512_set1_ps(sum[16 + t]),
                                                _mm512_mul_ps(sub_min[0], _mm512_set1_ps(sum[t])));
            acc[t] = _mm512_fmadd_ps(_mm512_mul_ps(min, _mm512_set1_ps(input[t])), mins, acc[t]);
        } else if constexpr (kMin) {
            acc[t] = _mm512_fmadd_ps(min, _mm512_set1_ps(sum[t]), acc[t]);
        }
    }
}

// Add the open sums that this turn completes, and leave the result open unless it is the last.
HOTSET_INLINE void close_turn(int turn, float (*open)[16][16], __m512 (&acc)[16]) {
    int n_open = (turn & 1) + (turn >> 1 & 1) + (turn >> 2 & 1) + (turn >> 3);
    for (int bit = 1; turn & bit; bit *= 2) {
        n_open--;
#pragma GCC unroll 16
        for (int t = 0; t < 16; t++) acc[t] = _mm512_add_ps(_mm512_load_ps(open[n_open][t]), acc[t]);
    }
    if (turn == 15) return;
#pragma GCC unroll 16
    for (int t = 0; t < 16; t++) _mm512_store_ps(open[n_open][t], acc[t]);
}

HOTSET_INLINE void store_sums(const TileWork& work, int panel, int tile, const __m512 (&acc)[16]) {
    const int rows = work.n_rows - 16 * panel, tokens = work.n_tokens - 16 * tile;
    const __mmask16 there = rows < 16 ? __mmask16((1u << rows) - 1) : __mmask16(0xffff);
    float* const out = work.out + 16 * tile * work.ld + 16 * panel;
#pragma GCC unroll 16
    for (int t = 0; t < 16; t++)
        if (t < tokens) _mm512_mask_storeu_ps(out + t * work.ld, there, acc[t]);
}

// Blocks of a panel that are multiplied with all tiles before the next blocks, so that they are read from the
// first-level cache.
constexpr int kRunBlocks = 16;

// Return the turns of a run, a power of two.
inline int turns_of_run(const TurnOrder& order) {
    int turns = 16;
    while (turns > 1 && turns * order.first_of[16] > 16 * kRunBlocks) turns /= 2;
    return turns;
}

// Iterates over the batches of each panel, run and tile. The last batch of a run may extend past it: its
// extra products are computed but not read.
template <bool kSub>
class Batches {
  public:
    static constexpr int kBlocks = kSub ? kBatch / 2 : kBatch;

    HOTSET_INLINE Batches(const TileWork& work, const TurnOrder& order, int turns)
        : work_(work), order_(order), turns_(turns) {
        enter();
    }
    HOTSET_INLINE void multiply(Dots& before) {
        multiply_batch<kSub>(q_, codes_, before);
        q_ += kBlocks * 512, codes_ += kBlocks * 512, left_ -= kBlocks;
        if (left_ > 0) return;
        if (++tile_ == work_.n_tiles) tile_ = 0, turn_ += turns_;
        if (turn_ == 16) turn_ = 0, panel_ = panel_ + 1 < work_.n_panels ? panel_ + 1 : 0;
        enter();
    }
    // Prefetch one of the sixteen lines of block i of the next batch.
    HOTSET_INLINE void fetch(int i, int line) const {
        const int8_t* const from = line < 8 ? q_ : codes_;
        _mm_prefetch(reinterpret_cast<const char*>(from) + i * 512 + line % 8 * 64, _MM_HINT_T0);
    }

  private:
    HOTSET_INLINE void enter() {
        const int first = order_.first_of[turn_];
        q_ = work_.tiles[tile_].q + first * 512;
        codes_ = reinterpret_cast<const int8_t*>(work_.panels[panel_].codes) + first * 512;
        left_ = order_.first_of[turn_ + turns_] - first;
    }

    const TileWork& work_;
    const TurnOrder& order_;
    const int turns_;
    int panel_ = 0, turn_ = 0, tile_ = 0, left_ = 0;
    const int8_t *q_ = nullptr, *codes_ = nullptr;
};

// Computes the sums of one lane after another, one vector per token. Sums that wait for the other half of
// their tree are in `open`, as many as bits are set in the number of turns.
template <bool kMin, bool kSub>
void multiply_tiles(const TileWork& work, const TurnOrder& order) {
    constexpr int kTiles = kSub ? 2 : 1, kBlocks = Batches<kSub>::kBlocks;
    alignas(64) Dots dots;
    alignas(64) float open[kTilesAtOnce][4][16][16];  // [token][row]
    const int turns = turns_of_run(order);
    Batches<kSub> batches(work, order, turns);
    batches.multiply(dots);
    for (int i = 0; i < work.n_panels; i++)
        for (int turn0 = 0; turn0 < 16; turn0 += turns)
            for (int j = 0; j < work.n_tiles; j++) {
                int b = order.first_of[turn0], first = b - kBlocks;  // first: the first block in `dots`
                for (int turn = turn0; turn < turn0 + turns; turn++) {
                    __m512 acc[16];
#pragma GCC unroll 16
                    for (int t = 0; t < 16; t++) acc[t] = _mm512_setzero_ps();
                    for (; b < order.first_of[turn + 1]; b++) {
                        if (b == first + kBlocks) {
                            first = b;
                            batches.multiply(dots);
                        }
                        add_block<kMin, kSub>(
                            work.panels[i], work.tiles[j], b, dots + (b - first) * kTiles,
                            [&](int line) { batches.fetch(b - first, line); }, acc);
                    }
                    close_turn(turn, open[j], acc);
                    if (turn == 15) store_sums(work, i, j, acc);
                }
            }
}

}  // namespace

TileKernel tile_kernel(bool min, bool sub_blocks) {
    if (sub_blocks) return min ? multiply_tiles<true, true> : multiply_tiles<false, true>;
    return min ? multiply_tiles<true, false> : multiply_tiles<false, false>;
}

void begin_tiles(bool sub_blocks) {
    static constexpr TileShapes kWhole(32), kHalf(16);
    _tile_loadconfig(sub_blocks ? &kHalf : &kWhole);
}

void end_tiles() {
    _tile_release();  // a thread without tiles has less state to save
}

}  // namespace hotset
