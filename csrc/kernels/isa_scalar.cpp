// The readable reference: every other instruction set must give the same bits.
#include <bit>
#include <memory>
#include <utility>

#include "codebooks.h"
#include "kernels.h"

namespace hotset::scalar {

#include "blocks.h"
#include "simd_scalar.h"
#include "float_kernels.h"

// Multiply one row by one token, in the canonical order of kernels.h.
template <Type kType>
float dot(const uint8_t* row, const Inputs& x, int token) {
    const int64_t width = padded(x.k), blocks = x.k / 32;
    const int8_t* q = x.q + token * width;
    const float* scales = x.scale + token * (width / 32);
    const float* sums = x.sum + token * (width / 32);
    const int32_t* isums = x.isum + token * (width / 16);
    V acc = V::zero();
    for (int64_t b = 0; b < blocks; b++) {
        const Block32 block = decode_block(kType, row, b);
        const int8_t* halves[2] = {q + half_at(kInterleaved, b, 0), q + half_at(kInterleaved, b, 1)};
        int dots[2] = {0, 0};
        for (int i = 0; i < 32; i++) dots[i / 16] += block.q[i] * halves[i / 16][i % 16];
        const int product = block.sub_scale[0] * dots[0] + block.sub_scale[1] * dots[1];
        float& lane = acc.v[b % 16];
        lane = fmaf(block.scale * scales[b], float(product), lane);
        if (has_min(kType)) {
            if (has_sub_blocks(kType)) {
                const uint32_t mins = uint32_t(block.sub_min[0]) * uint32_t(isums[b]) +
                                      uint32_t(block.sub_min[1]) * uint32_t(isums[width / 32 + b]);
                lane = fmaf(block.min * scales[b], float(int32_t(mins)), lane);
            } else {
                lane = fmaf(block.min, sums[b], lane);
            }
        }
    }
    return sum(acc);
}

template <Type kOf>
struct Format {
    static constexpr Type kType = kOf;
};

template <class Format>
float one_row(const Matrix&, const uint8_t* row, const Inputs& x, int t, const uint8_t*) {
    return dot<Format::kType>(row, x, t);
}

template <class Format>
void linear(const Matrix& w, int64_t row0, int64_t row1, const Inputs& x, int t0, int t1, float* out,
            int64_t ld, uint8_t*) {
    for (int t = t0; t < t1; t++)
        for (int64_t r = row0; r < row1; r++)
            out[(t - t0) * ld + (r - row0)] = dot<Format::kType>(w.row(r), x, t);
}

template <int kStride>
void block_scales(const uint8_t* p, int n, const uint8_t*, float* out) {
    for (int i = 0; i < n; i++) out[i] = load_f16(p + i * kStride);
}

#include "sparse_kernels.h"
#include "channels_scalar.h"
#include "channel_kernels.h"
#include "format_table.h"
#include "encode_kernels.h"
#include "codebook_encoders.h"

}  // namespace hotset::scalar

namespace hotset {

const Kernels* scalar_kernels() {
    static const Kernels table = [] {
        Kernels t = scalar::float_kernel_table("scalar");
        scalar::add_formats(t);
        scalar::add_sparse_kernels(t);
        scalar::add_encoders(t);
        scalar::add_codebook_encoders(t);
        scalar::add_channel_kernels(t);
        return t;
    }();
    return &table;
}

void dequantize_row(Type type, const uint8_t* row, int64_t cols, float* out) {
    switch (type) {
        case Type::F32:
            std::memcpy(out, row, size_t(cols) * 4);
            return;
        case Type::F16:
            for (int64_t i = 0; i < cols; i++) out[i] = load_f16(row + 2 * i);
            return;
        case Type::BF16:
            for (int64_t i = 0; i < cols; i++) out[i] = bf16_to_f32(load_u16(row + 2 * i));
            return;
        default:
            for (int64_t b = 0; b < cols / 32; b++) {
                const scalar::Block32 block = scalar::decode_block(type, row, b);
                for (int i = 0; i < 32; i++) {
                    const float value = (block.scale * float(block.sub_scale[i / 16])) * float(block.q[i]);
                    out[b * 32 + i] = value + block.min * float(block.sub_min[i / 16]);
                }
            }
    }
}

}  // namespace hotset
