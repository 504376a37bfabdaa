// The kernels of one instruction set in a table of function pointers, chosen once at import.
//
// All of them use one order of accumulation, which makes results independent of threads, batch shape and
// instruction set:
//
//   * Quantised weights. Activations are int8 with one scale per 32 (`Inputs`). The integer dot product of
//     a 32-block is exact. Block b belongs to lane b % 16; each lane adds its blocks in order:
//         acc = fma(weight_scale * input_scale, float(dot), acc)
//         acc = fma(weight_min, input_sum, acc)                    (types with a minimum)
//     The 16 lanes are summed by a fixed tree: (l, l+8), then (l, l+4), (l, l+2), (l, l+1).
//     K-quants are 32-blocks as well. Their weight scale is the sub-block's scale times the super-block's
//     or, if sub-blocks hold 16 weights, dot = sc0 * dot0 + sc1 * dot1 in integers.
//   * Float weights. Element k belongs to lane k % 16: acc = fma(w, x, acc); the same tree.
//
// A one-row kernel keeps the lanes in a register, a many-row kernel in 16 accumulators. The result is bitwise
// identical.
// result is bitwise identical.
#pragma once

#include <math.h>  // the C functions: no inline copies that a linker could mix up

#include <bit>
#include <cstdint>

#include "../types.h"

namespace hotset {

constexpr int kPadding = 512;      // int8 activations are padded with zeros to 16 blocks
constexpr int kKvBlockSize = 64;   // tokens per KV block
constexpr int kSplitKvBlocks = 8;  // KV blocks per partial softmax: fixed, so that threads do not matter
constexpr int kMaxHeadDim = 512;

static constexpr int64_t padded(int64_t k) {
    return (k + kPadding - 1) / kPadding * kPadding;
}

// Activations of n tokens as a matrix product reads them. `x` is for float weights, the rest for others.
//
// In `q` the halves of some blocks are interleaved, as the instruction set needs them (`half_at`). With four
// blocks
//     b0[0:16] b1[0:16] b2[0:16] b3[0:16] b0[16:32] b1[16:32] b2[16:32] b3[16:32]
// so that one 64-byte vector holds halves of four blocks, like nibble-packed weights. With eight blocks, for
// 32-byte vectors, the order is b0 b4 b1 b5 b2 b6 b3 b7, so that sums within the 16-byte lanes of four
// vectors come out in the order of the blocks.
//
// A straggler (threads.h) may read numbers of another operation here. Its result is dropped, but it must not
// be undefined behaviour: sums and products of `isum` use unsigned integers, which wrap.
struct Inputs {
    int n = 0;                       // tokens
    int64_t k = 0;                   // width
    const float* x = nullptr;        // [n][k]
    const int8_t* q = nullptr;       // [n][padded(k)]
    const float* scale = nullptr;    // [n][padded(k) / 32]
    const float* sum = nullptr;      // [n][padded(k) / 32], scale * sum of q
    const int32_t* isum = nullptr;   // [n][2][padded(k) / 32], sum of q over each half of a block
    const int32_t* isum8 = nullptr;  // [n][padded(k) / 32], eight times the sum of q over a block
    const uint8_t* tiles = nullptr;  // all tokens packed by Kernels::pack_token; null: not packed yet
};

// Where one quantised row is written.
struct QuantizedRow {
    int8_t* q;
    float* scale;
    float* sum;
    int32_t* isum;
    int32_t* isum8;
};

// Return where half `half` of block b begins in `q`, if `interleaved` blocks are interleaved.
static HOTSET_INLINE constexpr int64_t half_at(int interleaved, int64_t b, int half) {
    const int i = int(b % interleaved);
    return (b - i) * 32 + (half * interleaved + i % 4 * (interleaved / 4) + i / 4) * 16;
}

// out[(t - t0) * ld + r - row0] = dot(row r of w, token t) for rows row0..row1 and tokens t0..t1.
// `scratch`: kernel_scratch_bytes(k) bytes, 64-byte aligned, private to the thread.
using LinearKernel = void (*)(const Matrix& w, int64_t row0, int64_t row1, const Inputs& x, int t0, int t1,
                              float* out, int64_t ld, uint8_t* scratch);

// The input-major layout of a type, in bytes per output. No codes: the type has no such layout.
struct ChannelFormat {
    int group_head;  // per 8 blocks, before the first: factors of the blocks' scales
    int block_head;  // per block of 32 channels: scales and minimums
    int codes;       // per channel, for 32 outputs: bytes of four-bit or eight-bit codes
    int high_bits;   // bits per code above these; each takes 4 bytes for 32 outputs

    HOTSET_INLINE constexpr int channel_bytes() const { return codes + 4 * high_bits; }  // for 32 outputs
    // Bytes of an output's channels. A format with groups has whole groups.
    HOTSET_INLINE constexpr int64_t output_bytes(int64_t n_in) const {
        return n_in / 32 * (block_head + channel_bytes()) + n_in / 256 * group_head;
    }
};

static constexpr ChannelFormat channel_format(Type type) {
    switch (type) {
        case Type::Q4_0:
            return {0, 2, 16, 0};
        case Type::Q4_1:
            return {0, 4, 16, 0};
        case Type::Q8_0:
            return {0, 2, 32, 0};
        case Type::Q4_K:
            return {4, 2, 16, 0};
        case Type::Q5_K:
            return {4, 2, 16, 1};
        case Type::Q6_K:
            return {2, 2, 16, 2};
        default:
            return {0, 0, 0, 0};
    }
}

// An input-major copy of a matrix (formats/channels.py), for reading only the channels whose input is not
// zero. Outputs are split into tiles, one after another; the last may be narrower. A tile consists of blocks
// of 32 channels. A block holds the scales of its outputs, their minimums if the type has them, and the
// codes, channel after channel, so that a chunk of outputs reads one stream of memory. Outputs from first_col
// on are the rows of the row-major matrix.
struct ChannelMatrix {
    Type type = Type::Q4_0;         // of the row-major matrix; has a ChannelFormat
    const uint8_t* data = nullptr;  // null: no copy
    int64_t rows = 0;               // inputs
    int64_t cols = 0;               // outputs, a multiple of 32
    int64_t tile = 0;               // outputs per tile, a multiple of 32
    int64_t first_col = 0;          // a multiple of 32
    float below = 0.0f;             // use the copy if a smaller share of the inputs is not zero

    // Return the bytes of a channel's codes for n outputs.
    HOTSET_INLINE int64_t code_bytes(int64_t n) const {
        return n * channel_format(type).channel_bytes() / 32;
    }
};

// The order in which the sixteen lanes of a sum are completed. It keeps few lanes open at a time and allows
// groups of lanes to be summed separately: 8 joins 0, 12 joins 4, then those two join, and so on, as the row
// kernels do at the end. A turn is a place in this order.
constexpr int kLaneOrder[16] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};
constexpr int kOpenLanes = 5;

// The non-zero channels of one quantised token, in quads, block by block. Each block is filled up to whole
// quads by repeating one of its channels with a value of zero.
struct ActiveChannels {
    struct Block {
        int32_t index;       // of the block of 32 channels
        int32_t first_quad;  // in quads; the first channel is four times this
        int32_t n_quads;
        int32_t n_first;  // channels in the first half of the block
    };
    Block* blocks;      // blocks with a scale other than zero, by lane, in kLaneOrder
    int32_t* channels;  // [4 * quads], indices in their block
    uint32_t* quads;    // codes of four channels, one byte each
    int32_t n_blocks;
    int32_t n_channels;    // without filling
    int32_t first_of[17];  // the first block of each turn

    static HOTSET_INLINE size_t bytes(int64_t k) {
        return size_t(k / 32 + 1) * (sizeof(Block) + 32 * 4 + 8 * 4);
    }

    // memory: bytes(k), aligned to 4. interleaved: of the kernels that quantised x. A straggler may read
    // another operation's codes and scales: for any values, listed channels are below k.
    ActiveChannels(uint8_t* memory, const Inputs& x, int interleaved) {
        blocks = reinterpret_cast<Block*>(memory);
        channels = reinterpret_cast<int32_t*>(blocks + x.k / 32);
        quads = reinterpret_cast<uint32_t*>(channels + x.k);
        n_blocks = n_channels = 0;
        static_assert(std::endian::native == std::endian::little);
        int8_t* const bytes = reinterpret_cast<int8_t*>(quads);  // of each listed channel
        int32_t* const places = channels;
        int32_t n = 0;  // channels listed so far, including filling
        for (int turn = 0; turn < 16; turn++) {
            first_of[turn] = n_blocks;
            for (int32_t b = kLaneOrder[turn]; b < x.k / 32; b += 16) {
                if (x.scale[b] == 0.0f) continue;
                const int32_t first = n;
                int32_t n_first = 0;
                for (int half = 0; half < 2; half++) {
                    n_first = n - first;  // before the second half
                    const int8_t* codes = x.q + half_at(interleaved, b, half);
                    for (int i = 0; i < 16; i++) {  // no branch, since it could not be predicted
                        places[n] = half * 16 + i;
                        bytes[n] = codes[i];
                        n += codes[i] != 0;
                    }
                }
                const int32_t listed = n - first;
                n_channels += listed;
                for (; n % 4 != 0; n++) {
                    places[n] = places[n - 1];
                    bytes[n] = 0;
                }
                blocks[n_blocks++] = {b, first / 4, (n - first) / 4, n_first};
            }
        }
        first_of[16] = n_blocks;
    }
};

// The listed channels of a block as a kernel reads them: each channel's codes from some output on, in quads.
// Their high bits are `high` bytes further: planes of 4 bytes for 32 outputs, `plane` bytes apart.
struct ChannelRows {
    const uint8_t* row[32];
    const uint32_t* quads;
    int n_quads;
    int64_t high, plane;
};

// out[c] = the sum of `n_turns` lanes from `turn` on of dot(row first_col + col0 + c, the token) for c <
// n_cols. All sixteen lanes give LinearKernel's result. col0 and n_cols are multiples of 32, n_turns is a
// power of two, turn a multiple of it. Sums of parts are added pair by pair, in order. scratch:
// channel_scratch_floats(n_cols), private to the thread. x: one token, whose channels `active` lists.
using ChannelKernel = void (*)(const ChannelMatrix& w, const ActiveChannels& active, const Inputs& x,
                               int64_t col0, int64_t n_cols, int turn, int n_turns, float* scratch,
                               float* out);
constexpr int64_t channel_scratch_floats(int64_t n_cols) {
    return kOpenLanes * ((n_cols + 127) / 128 * 128);
}
constexpr int kChannelColumns = 128;  // computed at a time

// out[j] = dot(rows[j], token t) for j < n, where rows[j] is any row of w. During each product a few lines of
// the row kGatherAhead further are prefetched. So the list has kGatherAhead more entries: the rows that the
// caller reads next, or any address.
using GatherKernel = void (*)(const Matrix& w, const uint8_t* const* rows, int n, const Inputs& x, int t,
                              float* out);
constexpr int kGatherAhead = 2;

// acc[c] = fma(values[j], weight(rows[j], col0 + c), acc[c]) for c < n_cols, for j = 0, 1, ... n - 1 in this
// order for all types, with weights decoded to float32. col0 is a multiple of 32. So is n_cols, unless the
// type is a float or the columns are the last.
using AxpyKernel = void (*)(const Matrix& w, const int32_t* rows, const float* values, int n, int64_t col0,
                            int64_t n_cols, float* acc);

// out[c] = weight(row, col0 + c) for c < n_cols, as dequantize_row decodes it.
using DecodeKernel = void (*)(const Matrix& w, int64_t row, int64_t col0, int64_t n_cols, float* out);

// Encode n floats (whole blocks). Returns false if one of them cannot be stored (quantize.h).
using EncodeKernel = bool (*)(const float* x, const float* importance, int64_t n, uint8_t* out);

// Up to this many tokens a linear kernel may read its rows as for one token, so chunks are split alike.
constexpr int kFewTokens = 16;

// Rows that one call of a many-token kernel should have: it packs them once for all tokens.
constexpr int kPanelRows = 64;

// Tokens that Kernels::pack_token packs together: one byte per input; a scale and three sums per 32-block.
constexpr int kTileTokens = 16;
static constexpr size_t tile_bytes(int64_t k) {
    return size_t(kTileTokens) * size_t(padded(k) + padded(k) / 32 * 16);
}
static constexpr size_t tiles_bytes(int64_t n, int64_t k) {
    return size_t((n + kTileTokens - 1) / kTileTokens) * tile_bytes(k);
}
constexpr int kTilesAtOnce = 2;

static constexpr size_t kernel_scratch_bytes(int64_t k) {
    // A packed panel: one byte per weight; per 32-block a float scale and minimum, two int32 scales and two
    // minimums.
    return size_t(kPanelRows) * size_t(padded(k) + padded(k) / 32 * 24) + kTilesAtOnce * tile_bytes(k) +
           65536;
}

// How keys or values are stored. Q8_0 and Q4_0 have one scale per 32 channels of a token. Q4_0 stores heads
// after `hadamard`.
enum class KvType : int { F32 = 0, F16 = 1, Q8_0 = 2, Q4_0 = 3 };

HOTSET_INLINE int bits_of(KvType type) {
    return type == KvType::F32 ? 32 : type == KvType::F16 ? 16 : type == KvType::Q8_0 ? 8 : 4;
}

// The KV cache of one layer. In a KV block, a head's keys are stored transposed, [head_dim][64 positions],
// and its values as [64][stride]. A byte of Q4_0 has the code of channel c of a 32-block in its low nibble
// and of channel c + 16 in its high nibble: keys are [head_dim / 32][16][64 positions], values
// [64][head_dim_v / 32][16].
struct KvLayer {
    KvType k_type = KvType::F16;
    KvType v_type = KvType::F16;
    int n_head_kv = 0;
    int head_dim = 0;    // of keys
    int head_dim_v = 0;  // of values
    uint8_t* k = nullptr;
    uint8_t* v = nullptr;
    uint16_t* k_scale = nullptr;  // [KV block][head][head_dim / 32][64]
    uint16_t* v_scale = nullptr;  // Q8_0: [KV block][head][64][head_dim_v / 32]; Q4_0: as for keys

    HOTSET_INLINE int value_stride() const { return (head_dim_v + 15) / 16 * 16; }
    // Bytes of one head.
    HOTSET_INLINE size_t k_slab_bytes() const {
        return size_t(head_dim) * kKvBlockSize * bits_of(k_type) / 8;
    }
    HOTSET_INLINE size_t v_slab_bytes() const {
        return size_t(value_stride()) * kKvBlockSize * bits_of(v_type) / 8;
    }
    HOTSET_INLINE size_t k_block_bytes() const { return n_head_kv * k_slab_bytes(); }
    HOTSET_INLINE size_t v_block_bytes() const { return n_head_kv * v_slab_bytes(); }
};

// The index keys of one layer (operations.Indexer). A KV block has room for `slots` keys, a multiple of 16.
// They are transposed like the keys of a KvLayer, with `slots` in place of 64 positions.
struct IndexKeys {
    KvType type = KvType::F16;
    int head_dim = 0;
    int slots = 0;
    uint8_t* keys = nullptr;
    uint16_t* scales = nullptr;  // [KV block][head_dim / 32][slots]

    HOTSET_INLINE size_t block_bytes() const { return size_t(head_dim) * slots * bits_of(type) / 8; }
    HOTSET_INLINE size_t block_scales() const { return size_t(head_dim / 32) * slots; }
};

// The running softmax of one query row: the maximum, and the sum of exp(score - max).
struct AttentionState {
    float max;
    float sum;
};

// The scores of the part of a key's bias that the cache does not hold, for one KV head. Position p adds to
// query row r: rows[r][0] + sum over pairs i of rows[r][1 + i] cos(p f_i) + rows[r][1 + n_pairs + i] sin(p
// f_i).
struct BiasScores {
    int n_pairs = 0;
    const float* slots = nullptr;   // [2 n_pairs][64]: cosines, then sines, at positions 0 to 63
    const float* starts = nullptr;  // [KV blocks][2 n_pairs]: the same at the first position of each KV block
    const float* const* rows = nullptr;  // null: the cache holds whole keys
};

// Attend `n_rows` query rows of one KV head to positions [first, last) of one sequence. Row r sees positions
// [row_first[r], row_last[r]). Positions are absolute; entry i of `kv_blocks` holds positions from 64 * i on.
// Row r's query is q_rows[r], float [head_dim], already scaled. State and out ([n_rows][value_stride]) are
// overwritten or, with `more`, continued. softcap > 0: a score s becomes softcap * tanh(s / softcap). slopes:
// per row or null; slope times the distance from the row's own position row_at[r] is subtracted (ALiBi).
// bias: added to the scores before softcap.
using AttentionKernel = void (*)(const KvLayer& kv, int head, const int32_t* kv_blocks, int first, int last,
                                 int n_rows, float softcap, const float* slopes, const BiasScores& bias,
                                 const float* const* q_rows, const int32_t* row_first,
                                 const int32_t* row_last, const int32_t* row_at, AttentionState* state,
                                 float* out, bool more);

// SoftCap: threshold * tanh(x / threshold). Scale: threshold * x. Sigmoid: 1 / (1 + exp(-x)). ClampedSilu: m
// * sigmoid(1.702 m), m = min(x, threshold). ClampedPlusOne: 1 + x, with x clamped to +-threshold.
enum class Activation : int {
    Silu = 0,
    Gelu = 1,
    GeluTanh = 2,
    Relu = 3,
    Relu2 = 4,
    FatRelu = 5,
    SoftCap = 6,
    Scale = 7,
    Sigmoid = 8,
    ClampedSilu = 9,
    ClampedPlusOne = 10,
    Exp = 11,
    Softplus = 12,    // ln(1 + e^x)
    CappedSilu = 13,  // silu(min(x, threshold))
    Clamp = 14        // x, clamped to +-threshold
};

// positive * x^2 + linear * x above 0; otherwise negative * (e^min(x, eps) - 1 - x) + linear * x.
struct Xielu {
    float positive, negative, linear, eps;
};

struct Kernels {
    const char* isa;
    int interleaved;                  // blocks whose halves are interleaved in Inputs::q
    LinearKernel linear[kTypeCount];  // null for planes
    GatherKernel gather[kTypeCount];  // null for planes
    AxpyKernel axpy[kTypeCount];
    DecodeKernel decode[kTypeCount];
    EncodeKernel encode[kTypeCount];           // null: the type is never written
    ChannelKernel channel_linear[kTypeCount];  // null for types without an input-major layout
    // Like axpy, with decoded rows in cache: row r is at tile + r * n_cols.
    void (*tile_axpy)(const float* tile, const int32_t* rows, const float* values, int n, int64_t n_cols,
                      float* sums);
    // Bit i % 64 of word i / 64: whether x[i] is not zero, or not below the bound (true for NaN). Spare bits
    // are zero.
    void (*nonzero_bits)(const float* x, int64_t n, uint64_t* bits);
    void (*not_below_bits)(const float* x, float bound, int64_t n, uint64_t* bits);
    // Quantise one row of k floats into the layout of Inputs; padding is zero. If a value of a block is not
    // finite, the block's codes are 0 and its scale and sum NaN, so that every product with it is NaN.
    void (*quantize)(const float* x, int64_t k, const QuantizedRow& out);
    // Pack token t of x as token `place` of `tiles`, which is 64-byte aligned and has tiles_bytes. Null: the
    // products do not use packed tokens. Missing tokens may have any contents.
    void (*pack_token)(const Inputs& x, int t, int place, uint8_t* tiles);
    void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* out);
    void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int64_t n,
                       float* out);
    // out = max(0, x - (mean + multiplier * deviation)) over the row of n; NaN is kept.
    void (*gaussian_top_k)(const float* x, float multiplier, int64_t n, float* out);
    void (*activate)(Activation kind, float threshold, const float* x, int64_t n, float* out);
    void (*xielu)(const Xielu& f, const float* x, int64_t n, float* out);
    // out = activate(gate) * up
    void (*gated)(Activation kind, float threshold, const float* gate, const float* up, int64_t n,
                  float* out);
    void (*add)(const float* a, const float* b, int64_t n, float* out);
    void (*multiply)(const float* a, const float* b, int64_t n, float* out);
    // exp(x) divided by its sum; undefined if x has NaN.
    void (*softmax)(const float* x, int64_t n, float* out);
    // out = exp(x - less) for x <= less, by NumPy's algorithm.
    void (*exponentials)(const float* x, float less, int64_t n, float* out);
    // out = exp(x / divisor) for x <= 0, to a few units in the last place, at least exp(-700).
    void (*weights)(const double* x, double divisor, int64_t n, double* out);
    AttentionKernel attention;
    // Merge partial states in order: out[n] from n_parts states and rows of `stride` floats.
    void (*merge_attention)(int n_parts, const AttentionState* states, const float* parts, int64_t stride,
                            int64_t n, float* out);
    // out[i] = the sum over heads h, in order, of weights[h] * max(0, q_h · key i) for the first n keys of a
    // KV block. q: [n_head][head_dim]. Channels are added in order.
    void (*index_scores)(const IndexKeys& keys, int kv_block, int n, int n_head, const float* q,
                         const float* weights, float* out);
    void (*store_key)(const KvLayer& kv, int kv_block, int slot, int head, const float* k);
    void (*store_value)(const KvLayer& kv, int kv_block, int slot, int head, const float* v);
    // The normalised Walsh-Hadamard transform of each `width` of n values, in place. It is its own inverse.
    // width: a power of two of at least 16 that divides n.
    void (*hadamard)(int64_t n, int width, float* x);
    // Apply the gated delta rule for one token to state [dim_k][dim_v]: decay it, then add k * d to its rows,
    // with d = (v - sum of rows times k) * beta. out: the sum of rows times q. Sums add the rows in order.
    void (*delta_rule)(int dim_k, int dim_v, const float* q, const float* k, const float* v, float decay,
                       float beta, float* state, float* out);
    // Apply a selective scan for one token to state [dim_k][dim_v]: decay it, then add b * x to its rows.
    // out: the sum of rows times c, in order.
    void (*selective_scan)(int dim_k, int dim_v, const float* b, const float* c, const float* x, float decay,
                           float* state, float* out);
    // The same with a decay per row and channel, exp(rate * dt), with rate [dim_k][dim_v]; b * dt * x is
    // added.
    void (*channel_scan)(int dim_k, int dim_v, const float* b, const float* c, const float* x,
                         const float* dt, const float* rate, float* state, float* out);
    // Apply RWKV's attention for one token to state [dim_k][dim_v]: row i decays by w[i], then k[i] * v is
    // added. out: the sum of rows times r, in order. With a and b, first b[i] times the sum of the old rows
    // times a is added. Without them (null), out uses the old rows.
    void (*wkv)(int dim_k, int dim_v, const float* r, const float* w, const float* k, const float* v,
                const float* a, const float* b, float* state, float* out);
    // Read n floats (a multiple of 64) with the widest loads, for measuring bandwidth.
    float (*read)(const float* x, int64_t n);
};

// Each returns null if its instruction set was not compiled.
const Kernels* scalar_kernels();
const Kernels* avx2_kernels();
const Kernels* avx_vnni_kernels();  // AVX2's, with other products of several tokens
const Kernels* avx512_kernels();
const Kernels* amx_kernels();  // AVX-512's, with other products of many tokens
const Kernels* neon_kernels();
const Kernels* i8mm_kernels();  // NEON's, with other products of many tokens

// Return the best table that this processor can run, or the one named by `forced` (as in `isa`). Returns
// null, with a reason in `error`, if that one is unknown or cannot run, or if none can.
const Kernels* select_kernels(const char* forced, const char** error);

// Return the i-th known name, fastest first; null after the last.
const char* isa_name(int i);

}  // namespace hotset
