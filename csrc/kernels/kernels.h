// The kernels of one instruction set behind one table of function pointers, chosen once at import.
//
// One order of accumulation for all of them (this is what makes results independent of threads, batch
// shape and instruction set):
//
//   * Quantised weights. Activations are int8 with one scale per 32 (`Inputs`). The integer dot product
//     of a 32-block is exact. Block b belongs to lane b % 16; each lane adds its blocks in order:
//         acc = fma(weight_scale * input_scale, float(dot), acc)
//         acc = fma(weight_min, input_sum, acc)                    (types with a minimum)
//     and the 16 lanes are summed by a fixed tree: (l, l+8), then (l, l+4), (l, l+2), (l, l+1).
//     K-quants are 32-blocks as well: their sub-block scale times the super-block's is the weight scale,
//     or, where sub-blocks hold 16 weights, dot = sc0 * dot0 + sc1 * dot1 in integers.
//   * Float weights. Element k belongs to lane k % 16: acc = fma(w, x, acc); the same tree.
//
// A one-row kernel has the lanes in a register, a many-row kernel keeps them as 16 accumulators; the
// result is bitwise identical.
#pragma once

#include <math.h>  // the C functions: no inline copies that a linker could mix up

#include <bit>
#include <cstdint>

#include "../types.h"

namespace hotset {

constexpr int kPadding = 512;   // int8 activations are padded with zeros to 16 blocks
constexpr int kPageSize = 64;   // tokens per page of the KV cache
constexpr int kSplitPages = 8;  // pages per partial softmax: fixed, so that sums do not depend on threads
constexpr int kMaxHeadDim = 512;

static constexpr int64_t padded(int64_t k) {
    return (k + kPadding - 1) / kPadding * kPadding;
}

// Activations of n tokens as a matrix product reads them. Float weights read `x`; quantised weights the rest.
//
// In `q` the halves of some blocks lie together, as the instruction set wants them (`half_at`): of four
// blocks
//     b0[0:16] b1[0:16] b2[0:16] b3[0:16] b0[16:32] b1[16:32] b2[16:32] b3[16:32]
// so that one 64-byte vector holds a half of four blocks, as nibble-packed weights do; of eight, for 32-byte
// vectors, in the order b0 b4 b1 b5 b2 b6 b3 b7, so that what is added up within the 16-byte lanes of four
// vectors comes out in the order of the blocks.
//
// A late thread (threads.h) may read numbers here that belong to another operation by now. Its result is
// dropped, but it must not be undefined: sums and products of `isum` are made of unsigned integers, which
// wrap.
struct Inputs {
    int n = 0;                     // tokens
    int64_t k = 0;                 // width
    const float* x = nullptr;      // [n][k]
    const int8_t* q = nullptr;     // [n][padded(k)]
    const float* scale = nullptr;  // [n][padded(k) / 32]
    const float* sum = nullptr;    // [n][padded(k) / 32], scale * sum of q
    const int32_t* isum =
        nullptr;  // [n][2][padded(k) / 32], sum of q over the first and the second half of each block
    const int32_t* isum8 = nullptr;  // [n][padded(k) / 32], eight times the sum of q over each block
    int ahead = 0;  // of one token: how far ahead rows are fetched that lie one after the other, in bytes
    const uint8_t* tiles = nullptr;  // all tokens as Kernels::pack_token packs them, or null: not packed yet
};

// Where one row of them is written.
struct QuantizedRow {
    int8_t* q;
    float* scale;
    float* sum;
    int32_t* isum;
    int32_t* isum8;
};

// Where the first or second half of block b begins in `q`, of which `interleaved` blocks lie together.
static HOTSET_INLINE constexpr int64_t half_at(int interleaved, int64_t b, int half) {
    const int i = int(b % interleaved);
    return (b - i) * 32 + (half * interleaved + i % 4 * (interleaved / 4) + i / 4) * 16;
}

// out[(t - t0) * ld + r - row0] = dot(row r of w, token t) for rows row0..row1 and tokens t0..t1.
// `scratch`: kernel_scratch_bytes(k) bytes, 64-byte aligned, private to the thread.
using LinearKernel = void (*)(const Matrix& w, int64_t row0, int64_t row1, const Inputs& x, int t0, int t1,
                              float* out, int64_t ld, uint8_t* scratch);

// How the numbers of a type are laid out input-major, in bytes per output; no codes: they are not.
struct ChannelFormat {
    int group_head;  // of 8 blocks, before the first: scales that scales are multiplied with
    int block_head;  // of a block of 32 channels: scales and minimums
    int codes;       // of a channel, for 32 outputs: bytes of four bits each, or of eight
    int high_bits;   // that codes have above these; each bit takes 4 bytes for 32 outputs

    HOTSET_INLINE constexpr int channel_bytes() const { return codes + 4 * high_bits; }  // for 32 outputs
    // Of an output, all its channels; a format with groups has whole ones.
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

// An input-major copy of a matrix (formats/channels.py), to read those channels alone whose input is not
// zero. Outputs are split into tiles (the last may be narrower), one after the other; a tile holds blocks of
// 32 channels, and a block the scales of its outputs, their minimums where the type has them, and then the
// codes, channel after channel: so a chunk of outputs reads one stream of memory. Outputs from first_col on
// are the rows of the matrix by rows.
struct ChannelMatrix {
    Type type = Type::Q4_0;         // of the matrix by rows: one that has a ChannelFormat
    const uint8_t* data = nullptr;  // null: there is none
    int64_t rows = 0;               // inputs
    int64_t cols = 0;               // outputs, a multiple of 32
    int64_t tile = 0;               // outputs of a tile, a multiple of 32
    int64_t first_col = 0;          // a multiple of 32
    float below = 0.0f;             // where a smaller share of its inputs is not zero, it is the one to read

    // Bytes of a channel's codes, of n outputs.
    HOTSET_INLINE int64_t code_bytes(int64_t n) const {
        return n * channel_format(type).channel_bytes() / 32;
    }
};

// The order in which the sixteen lanes of a sum are done with, so that few are open at a time and some can be
// added up apart from the others: 8 to 0, 12 to 4, those two to each other, and so on, as kernels of rows do
// with all of them at the end. A turn is a place in this order.
constexpr int kLaneOrder[16] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};
constexpr int kOpenLanes = 5;

// Which channels of one quantised token are not zero: four by four, block by block. A block is filled up to
// whole quads with zeros of a channel that is there already.
struct ActiveChannels {
    struct Block {
        int32_t index;       // of 32 channels
        int32_t first_quad;  // in quads, and a quarter of that in channels
        int32_t n_quads;
        int32_t n_first;  // channels of the first half of the block
    };
    Block* blocks;      // those whose scale is not zero, lane by lane, as kLaneOrder has these
    int32_t* channels;  // [4 * quads], each as its place in its block
    uint32_t* quads;    // codes of four channels, a byte each
    int32_t n_blocks;
    int32_t n_channels;    // without those that fill up
    int32_t first_of[17];  // the first block of each turn

    static HOTSET_INLINE size_t bytes(int64_t k) {
        return size_t(k / 32 + 1) * (sizeof(Block) + 32 * 4 + 8 * 4);
    }

    // memory: bytes(k), aligned to 4. interleaved: of the kernels that quantised x. A late thread may read
    // codes and scales of another operation: whatever they are, what is listed lies within k.
    ActiveChannels(uint8_t* memory, const Inputs& x, int interleaved) {
        blocks = reinterpret_cast<Block*>(memory);
        channels = reinterpret_cast<int32_t*>(blocks + x.k / 32);
        quads = reinterpret_cast<uint32_t*>(channels + x.k);
        n_blocks = n_channels = 0;
        static_assert(std::endian::native == std::endian::little);
        int8_t* const bytes = reinterpret_cast<int8_t*>(quads);  // of each listed channel
        int32_t* const places = channels;
        int32_t n = 0;  // channels listed so far, with those that fill up
        for (int turn = 0; turn < 16; turn++) {
            first_of[turn] = n_blocks;
            for (int32_t b = kLaneOrder[turn]; b < x.k / 32; b += 16) {
                if (x.scale[b] == 0.0f) continue;
                const int32_t first = n;
                int32_t n_first = 0;
                for (int half = 0; half < 2; half++) {
                    n_first = n - first;  // before the second half
                    const int8_t* codes = x.q + half_at(interleaved, b, half);
                    for (int i = 0; i < 16; i++) {  // without a branch, which could not be predicted
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

// The listed channels of a block, as a kernel reads them: the codes of some output in each, four by four.
// Their high bits lie `high` behind them: planes of 4 bytes for 32 outputs, `plane` apart.
struct ChannelRows {
    const uint8_t* row[32];
    const uint32_t* quads;
    int n_quads;
    int64_t high, plane;
};

// out[c] = what `n_turns` lanes from `turn` on add up to of dot(row first_col + col0 + c, the token), for
// c < n_cols; of all sixteen it is what LinearKernel gives. col0 and n_cols are multiples of 32, n_turns is a
// power of two and turn a multiple of it; sums of parts are added pair by pair, in order. scratch:
// channel_scratch_floats(n_cols), private to the thread. x: of one token, which `active` lists.
using ChannelKernel = void (*)(const ChannelMatrix& w, const ActiveChannels& active, const Inputs& x,
                               int64_t col0, int64_t n_cols, int turn, int n_turns, float* scratch,
                               float* out);
constexpr int64_t channel_scratch_floats(int64_t n_cols) {
    return kOpenLanes * ((n_cols + 127) / 128 * 128);
}
constexpr int kChannelColumns = 128;  // that are computed at a time

// out[j] = dot(rows[j], token t) for j < n, where rows[j] is a row of w. The rows may lie anywhere; while one
// is computed, the one kGatherAhead after it is fetched, a few lines at a time. So the list goes on behind
// its end, with what the caller will read next (any address will do).
using GatherKernel = void (*)(const Matrix& w, const uint8_t* const* rows, int n, const Inputs& x, int t,
                              float* out);
constexpr int kGatherAhead = 2;

// acc[c] = fma(values[j], weight(rows[j], col0 + c), acc[c]) for c < n_cols, for j = 0, 1, ... n - 1 in this
// order: one order for all types, with the decoded weight in float32. col0 is a multiple of 32, n_cols too
// unless the type is a float or the columns are the last.
using AxpyKernel = void (*)(const Matrix& w, const int32_t* rows, const float* values, int n, int64_t col0,
                            int64_t n_cols, float* acc);

// out[c] = weight(row, col0 + c) for c < n_cols, as dequantize_row gives it.
using DecodeKernel = void (*)(const Matrix& w, int64_t row, int64_t col0, int64_t n_cols, float* out);

// Writes n floats, whole blocks, as a type stores them; false: one of them cannot be stored (quantize.h).
using EncodeKernel = bool (*)(const float* x, const float* importance, int64_t n, uint8_t* out);

// Up to this many tokens a linear kernel may read its rows as for one token, so that chunks may be split
// alike.
constexpr int kFewTokens = 16;

// Rows that one call of a many-token kernel likes to have (it packs them once for all tokens).
constexpr int kPanelRows = 64;

// Tokens that Kernels::pack_token packs together. A byte an input, and per 32-block a scale and three sums.
constexpr int kTileTokens = 16;
static constexpr size_t tile_bytes(int64_t k) {
    return size_t(kTileTokens) * size_t(padded(k) + padded(k) / 32 * 16);
}
static constexpr size_t tiles_bytes(int64_t n, int64_t k) {
    return size_t((n + kTileTokens - 1) / kTileTokens) * tile_bytes(k);
}
constexpr int kTilesAtOnce = 2;

static constexpr size_t kernel_scratch_bytes(int64_t k) {
    // A packed panel: a byte a weight, and per 32-block a float scale, a float minimum, two int32 scales and
    // two mins.
    return size_t(kPanelRows) * size_t(padded(k) + padded(k) / 32 * 24) + kTilesAtOnce * tile_bytes(k) +
           65536;
}

// How keys or values are stored. Q8_0 and Q4_0 share a scale among 32 channels of a token; Q4_0 stores heads
// after `hadamard`.
enum class KvType : int { F32 = 0, F16 = 1, Q8_0 = 2, Q4_0 = 3 };

HOTSET_INLINE int bits_of(KvType type) {
    return type == KvType::F32 ? 32 : type == KvType::F16 ? 16 : type == KvType::Q8_0 ? 8 : 4;
}

// One layer's cache. Keys of a page and head are stored transposed, [head_dim][64 positions]; values
// [64][stride]. A byte of Q4_0 has the codes of channel c of a block in its low half and of channel c + 16 in
// its high one: keys are [head_dim / 32][16][64 positions], values [64][head_dim_v / 32][16].
struct KvLayer {
    KvType k_type = KvType::F16;
    KvType v_type = KvType::F16;
    int n_head_kv = 0;
    int head_dim = 0;    // of keys
    int head_dim_v = 0;  // of values
    uint8_t* k = nullptr;
    uint8_t* v = nullptr;
    uint16_t* k_scale = nullptr;  // [page][head][head_dim / 32][64]
    uint16_t* v_scale = nullptr;  // Q8_0: [page][head][64][head_dim_v / 32]; Q4_0: as of keys

    HOTSET_INLINE int value_stride() const { return (head_dim_v + 15) / 16 * 16; }
    // Of one head.
    HOTSET_INLINE size_t k_slab_bytes() const { return size_t(head_dim) * kPageSize * bits_of(k_type) / 8; }
    HOTSET_INLINE size_t v_slab_bytes() const {
        return size_t(value_stride()) * kPageSize * bits_of(v_type) / 8;
    }
    HOTSET_INLINE size_t k_page_bytes() const { return n_head_kv * k_slab_bytes(); }
    HOTSET_INLINE size_t v_page_bytes() const { return n_head_kv * v_slab_bytes(); }
};

// A running softmax of one query row: sum of exp(score - max) * value, their sum, and the max.
struct AttentionState {
    float max;
    float sum;
};

// Attends `n_rows` query rows of one KV head to positions [first, last) of one sequence.
// Row r sees positions [row_first[r], row_last[r]). Positions are absolute; page i of `pages` holds 64 * i.
// q: row r at q_rows[r], float [head_dim], already scaled. State and out ([n_rows][value_stride]) are
// overwritten, or with `more` gone on with. softcap > 0: a score s becomes softcap * tanh(s / softcap).
// slopes, of each row, or null: slope times the distance from the row's own position row_at[r] is then taken
// from it (ALiBi).
using AttentionKernel = void (*)(const KvLayer& kv, int head, const int32_t* pages, int first, int last,
                                 int n_rows, float softcap, const float* slopes, const float* const* q_rows,
                                 const int32_t* row_first, const int32_t* row_last, const int32_t* row_at,
                                 AttentionState* state, float* out, bool more);

// SoftCap: threshold * tanh(x / threshold); Scale: threshold * x; Sigmoid: 1 / (1 + exp(-x)).
// ClampedSilu: m * sigmoid(1.702 m), m = min(x, threshold); ClampedPlusOne: 1 + x, brought into +-threshold.
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
    Clamp = 14        // x, brought into +-threshold
};

// positive * x^2 + linear * x above 0; negative * (e^min(x, eps) - 1 - x) + linear * x elsewhere.
struct Xielu {
    float positive, negative, linear, eps;
};

struct Kernels {
    const char* isa;
    int interleaved;                  // blocks whose halves lie together in Inputs::q
    int ahead, ahead_alone;           // Inputs::ahead of one of several threads, and of one alone
    LinearKernel linear[kTypeCount];  // null for planes
    GatherKernel gather[kTypeCount];  // null for planes
    AxpyKernel axpy[kTypeCount];
    DecodeKernel decode[kTypeCount];
    EncodeKernel encode[kTypeCount];           // null for what is never written
    ChannelKernel channel_linear[kTypeCount];  // null for types without an input-major layout
    // What axpy does, with decoded rows that lie in cache: row r at tile + r * n_cols.
    void (*tile_axpy)(const float* tile, const int32_t* rows, const float* values, int n, int64_t n_cols,
                      float* sums);
    // Bit i % 64 of word i / 64 says whether x[i] is not zero, or not below the bound (as a NaN); spare bits
    // are zero.
    void (*nonzero_bits)(const float* x, int64_t n, uint64_t* bits);
    void (*not_below_bits)(const float* x, float bound, int64_t n, uint64_t* bits);
    // Quantises one row of k floats into the layout of Inputs (padding written as zeros). Of a block with a
    // value that is not finite the codes are 0 and scale and sum NaN, so that every product with it is NaN.
    void (*quantize)(const float* x, int64_t k, const QuantizedRow& out);
    // Packs token t of x as token `place` of `tiles`, 64-byte aligned, of tiles_bytes. Null where products
    // do not read it. What tokens hold that are not there does not matter.
    void (*pack_token)(const Inputs& x, int t, int place, uint8_t* tiles);
    void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* out);
    void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int64_t n,
                       float* out);
    // out = max(0, x - (mean + multiplier * deviation)), both of the row of n; what is not
    // a number stays.
    void (*gaussian_top_k)(const float* x, float multiplier, int64_t n, float* out);
    void (*activate)(Activation kind, float threshold, const float* x, int64_t n, float* out);
    void (*xielu)(const Xielu& f, const float* x, int64_t n, float* out);
    // out = activate(gate) * up
    void (*gated)(Activation kind, float threshold, const float* gate, const float* up, int64_t n,
                  float* out);
    void (*add)(const float* a, const float* b, int64_t n, float* out);
    void (*multiply)(const float* a, const float* b, int64_t n, float* out);
    // exp(x) over its sum; of no numbers anything.
    void (*softmax)(const float* x, int64_t n, float* out);
    // out = exp(x - less), x <= less, by NumPy's algorithm.
    void (*exponentials)(const float* x, float less, int64_t n, float* out);
    // out = exp(x / divisor), x <= 0, to a few units in the last place; what is below exp(-700) becomes that.
    void (*weights)(const double* x, double divisor, int64_t n, double* out);
    AttentionKernel attention;
    // Merges partial states in order: out[n] from n_parts states and rows of `stride` floats.
    void (*merge_attention)(int n_parts, const AttentionState* states, const float* parts, int64_t stride,
                            int64_t n, float* out);
    void (*store_key)(const KvLayer& kv, int page, int slot, int head, const float* k);
    void (*store_value)(const KvLayer& kv, int page, int slot, int head, const float* v);
    // The normalised Walsh-Hadamard transform of each `width` of n values, in place; it is its own inverse.
    // width: a power of two from 16 on, which divides n.
    void (*hadamard)(int64_t n, int width, float* x);
    // One token of the gated delta rule, on state [dim_k][dim_v]: it decays, and then k * d is added to its
    // rows, d = (v - its rows summed by k) * beta; out are its rows summed by q. Sums run over the rows in
    // order.
    void (*delta_rule)(int dim_k, int dim_v, const float* q, const float* k, const float* v, float decay,
                       float beta, float* state, float* out);
    // One token of a selective scan, on state [dim_k][dim_v]: it decays, b * x is added to its rows; out are
    // its rows summed by c, in order.
    void (*selective_scan)(int dim_k, int dim_v, const float* b, const float* c, const float* x, float decay,
                           float* state, float* out);
    // The same where each channel has a decay for each row, exp(rate * dt), rate being [dim_k][dim_v]; b * dt
    // * x is added.
    void (*channel_scan)(int dim_k, int dim_v, const float* b, const float* c, const float* x,
                         const float* dt, const float* rate, float* state, float* out);
    // One token of RWKV's attention, on state [dim_k][dim_v]: row i decays by w[i], and k[i] * v is added to
    // it; out are the rows summed by r, in order. a and b: b[i] times the rows as they were, summed by a, is
    // added as well, before k[i] * v. Without them (null) out is of the rows as they were.
    void (*wkv)(int dim_k, int dim_v, const float* r, const float* w, const float* k, const float* v,
                const float* a, const float* b, float* state, float* out);
    // Reads n floats (n a multiple of 64) with the widest loads there are, and does next to nothing with
    // them.
    float (*read)(const float* x, int64_t n);
};

// Each is defined where its instruction set can be compiled, else null.
const Kernels* scalar_kernels();
const Kernels* avx2_kernels();
const Kernels* avx_vnni_kernels();  // those of AVX2 with other products of several tokens
const Kernels* avx512_kernels();
const Kernels* amx_kernels();  // those of AVX-512 with other products of many tokens
const Kernels* neon_kernels();
const Kernels* i8mm_kernels();  // those of NEON with other products of many tokens

// The best table that this processor can run, or the one that `forced` names (as in `isa`). Null with a
// reason in `error` when that one is unknown or cannot run here, or when none can.
const Kernels* select_kernels(const char* forced, const char** error);

// The i-th name that it knows, the fastest first; null behind the last.
const char* isa_name(int i);

}  // namespace hotset
