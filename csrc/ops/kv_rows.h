// A KV cache that stores the keys of a KV block by position, for layers that attend to chosen positions.
//
// Kernels read transposed keys (KvLayer), of which a single position is spread over as many cache lines as it
// has channels. Here a position's key is contiguous: [KV block][64][head][channels], and so are its scales.
// Adjacent heads of a position share memory pages: chosen positions are too far apart to share any. Before a
// kernel runs, the wanted positions are gathered into a *slab*: one KV block of one head, as the kernel reads
// it.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#include "../kernels/kernels.h"
#include "../threads.h"

namespace hotset {

// out[i * out_stride] = in[i * in_stride] for n elements of `bytes` bytes: 1, 2 or 4.
inline void copy_elements(int64_t n, int bytes, const uint8_t* in, int64_t in_stride, uint8_t* out,
                          int64_t out_stride) {
    for (int64_t i = 0; i < n; i++)
        std::memcpy(out + i * out_stride * bytes, in + i * in_stride * bytes, size_t(bytes));
}

#if defined(__GNUC__)  // also Clang
// Transpose N rows of N elements, 16 bytes each, in place, by rounds that interleave the upper and the lower
// half of the rows.
template <class Lanes, int... I>
inline void transpose_square(Lanes* row, std::integer_sequence<int, I...>) {
    constexpr int N = sizeof...(I);
    for (int round = 1; round < N; round *= 2) {
        Lanes next[N];
        for (int r = 0; r < N / 2; r++) {
            const Lanes a = row[r], b = row[r + N / 2];
            next[2 * r] = __builtin_shufflevector(a, b, (I / 2 + I % 2 * N)...);
            next[2 * r + 1] = __builtin_shufflevector(a, b, (N / 2 + I / 2 + I % 2 * N)...);
        }
        std::copy_n(next, N, row);
    }
}
#endif

// Transpose n_rows rows of n elements: out[i * kKvBlockSize + r] = rows[r][i]. Up to 15 columns after the
// last row get copies of it.
template <class T>
void rows_to_columns(const uint8_t* const* rows, int n_rows, int64_t n, uint8_t* out) {
    constexpr int N = 16 / int(sizeof(T));
    for (int first = 0; first < n_rows; first += N) {
        const uint8_t* of[N];
        for (int r = 0; r < N; r++) of[r] = rows[std::min(first + r, n_rows - 1)];
        uint8_t* const to = out + first * sizeof(T);
        int64_t i = 0;
#if defined(__GNUC__)
        typedef T Lanes __attribute__((vector_size(16)));
        for (; i + N <= n; i += N) {
            Lanes row[N];
            for (int r = 0; r < N; r++) std::memcpy(&row[r], of[r] + i * sizeof(T), sizeof(Lanes));
            transpose_square(row, std::make_integer_sequence<int, N>());
            for (int j = 0; j < N; j++)
                std::memcpy(to + (i + j) * kKvBlockSize * sizeof(T), &row[j], sizeof(Lanes));
        }
#endif
        for (; i < n; i++)
            for (int r = 0; r < N; r++)
                std::memcpy(to + (i * kKvBlockSize + r) * sizeof(T), of[r] + i * sizeof(T), sizeof(T));
    }
}

class KvRows {
  public:
    KvRows() = default;
    explicit KvRows(const KvLayer& kv) : kv_(kv) {
        key_bytes_ = bits_of(kv.k_type) <= 8 ? 1 : bits_of(kv.k_type) / 8;
        n_key_ = int64_t(kv.k_slab_bytes()) / kKvBlockSize / key_bytes_;
        key_row_ = n_key_ * key_bytes_;
        value_row_ = int64_t(kv.v_slab_bytes()) / kKvBlockSize;
        if (bits_of(kv.k_type) <= 8) n_key_scales_ = kv.head_dim / 32;
        if (bits_of(kv.v_type) <= 8) n_value_scales_ = kv.head_dim_v / 32;
    }

    // Bytes of the memory of a slab, which is aligned to 64.
    size_t slab_bytes() const {
        return kv_.k_slab_bytes() + kv_.v_slab_bytes() +
               size_t(n_key_scales_ + n_value_scales_) * kKvBlockSize * sizeof(uint16_t);
    }

    KvLayer slab(uint8_t* memory) const {
        KvLayer slab = kv_;
        slab.n_head_kv = 1;
        slab.k = memory;
        slab.v = slab.k + kv_.k_slab_bytes();
        slab.k_scale = reinterpret_cast<uint16_t*>(slab.v + kv_.v_slab_bytes());
        slab.v_scale = slab.k_scale + n_key_scales_ * kKvBlockSize;
        return slab;
    }

    // A position's key and value: `slot` of a KV block.
    struct Place {
        int kv_block = 0, slot = 0;
    };

    // Store a key and a value, by way of slot 0 of a slab.
    void store(const Kernels& kernels, const KvLayer& slab, Place place, int head, const float* k,
               const float* v) const {
        kernels.store_key(slab, 0, 0, 0, k);
        kernels.store_value(slab, 0, 0, 0, v);
        copy_elements(n_key_, key_bytes_, slab.k, kKvBlockSize, key(place, head), 1);
        copy_elements(n_key_scales_, 2, bytes(slab.k_scale), kKvBlockSize, bytes(key_scales(place, head)), 1);
        std::memcpy(value(place, head), slab.v, size_t(value_row_));
        copy_elements(n_value_scales_, 2, bytes(slab.v_scale), value_scale_stride(),
                      bytes(value_scales(place, head)), 1);
    }

    // Copy the keys and values at n <= kKvBlockSize places, place(0), place(1), ..., to slots 0 to n of a
    // slab.
    template <class F>
    void gather(const KvLayer& slab, int head, int n, F place) const {
        const uint8_t *keys[kKvBlockSize] = {}, *scales[kKvBlockSize] = {};
        for (int i = 0; i < n; i++) {
            const Place at = place(i);
            keys[i] = key(at, head);
            for (int64_t line = 0; line < key_row_; line += 64) prefetch_line(keys[i] + line);
            scales[i] = bytes(key_scales(at, head));
            for (int64_t line = 0; line < value_row_; line += 64) prefetch_line(value(at, head) + line);
        }
        if (key_bytes_ == 4) rows_to_columns<uint32_t>(keys, n, n_key_, slab.k);
        if (key_bytes_ == 2) rows_to_columns<uint16_t>(keys, n, n_key_, slab.k);
        if (key_bytes_ == 1) rows_to_columns<uint8_t>(keys, n, n_key_, slab.k);
        rows_to_columns<uint16_t>(scales, n, n_key_scales_, bytes(slab.k_scale));
        for (int i = 0; i < n; i++) {
            const Place at = place(i);
            std::memcpy(slab.v + i * value_row_, value(at, head), size_t(value_row_));
            const int64_t first = kv_.v_type == KvType::Q8_0 ? i * n_value_scales_ : i;
            copy_elements(n_value_scales_, 2, bytes(value_scales(at, head)), 1, bytes(slab.v_scale + first),
                          value_scale_stride());
        }
    }

  private:
    static uint8_t* bytes(uint16_t* p) { return reinterpret_cast<uint8_t*>(p); }
    int64_t row(Place at, int head) const {
        return (int64_t(at.kv_block) * kKvBlockSize + at.slot) * kv_.n_head_kv + head;
    }
    uint8_t* key(Place at, int head) const { return kv_.k + row(at, head) * key_row_; }
    uint8_t* value(Place at, int head) const { return kv_.v + row(at, head) * value_row_; }
    uint16_t* key_scales(Place at, int head) const {
        return n_key_scales_ ? kv_.k_scale + row(at, head) * n_key_scales_ : nullptr;
    }
    uint16_t* value_scales(Place at, int head) const {
        return n_value_scales_ ? kv_.v_scale + row(at, head) * n_value_scales_ : nullptr;
    }
    // The distance between the scales of one position in a slab.
    int64_t value_scale_stride() const { return kv_.v_type == KvType::Q8_0 ? 1 : kKvBlockSize; }

    KvLayer kv_;
    int key_bytes_ = 1;  // of an element of a key
    int64_t n_key_ = 0, key_row_ = 0, value_row_ = 0;
    int64_t n_key_scales_ = 0, n_value_scales_ = 0;  // of a position
};

}  // namespace hotset
