// Kernels for selected rows of neurons, written once over the sixteen lanes `V`: the axpy of the down
// projection, and products with gathered rows. Included inside the namespace of an instruction set, after its
// formats.

constexpr int kAxpyRows = 4;       // rows that share one read and write of the sums
constexpr int kAxpyColumns = 512;  // columns whose scales are decoded at a time: sixteen 32-blocks

inline float float_weight(const Matrix& w, int64_t row, int64_t col) {
    const uint8_t* p = w.row(row) + col * type_facts(w.type).block_bytes;
    if (w.type == Type::F32) return f32_from_bits(load_u32(p));
    return w.type == Type::F16 ? load_f16(p) : bf16_to_f32(load_u16(p));
}

// Readers of each type's rows, 32 columns (one block) at a time. `Row(w, row, col0)` starts at a block.
// scales(n) decodes the scales of the next n <= 16 blocks; load(b, lo, hi) decodes block b of these; next(n)
// advances by n; fetch(b) prefetches block b.

template <class W>
struct FloatRow {
    const uint8_t* p;
    FloatRow(const Matrix& w, int64_t row, int64_t col0) : p(w.row(row) + col0 * W::kBytes) {}
    void scales(int) {}
    void load(int b, V& lo, V& hi) const {
        lo = W::load(p + b * 32 * W::kBytes);
        hi = W::load(p + b * 32 * W::kBytes + 16 * W::kBytes);
    }
    void next(int n) { p += n * 32 * W::kBytes; }
    HOTSET_INLINE void fetch(int b) const {
        for (int at = 0; at < 32 * W::kBytes; at += 64) V::fetch(p + b * 32 * W::kBytes + at);
    }
};

// Prefetch each line once, with the block in which it begins.
template <int kBytes>
HOTSET_INLINE void fetch_block(const uint8_t* p, int b) {
    if (b == 0 || b * kBytes % 64 < kBytes) V::fetch(p + b * kBytes);
}

struct RowQ4_0 {
    const uint8_t* p;
    const uint8_t* end;
    alignas(64) float scale[16];
    RowQ4_0(const Matrix& w, int64_t row, int64_t col0) : p(w.row(row) + col0 / 32 * 18), end(w.end()) {}
    void scales(int n) { block_scales<18>(p, n, end, scale); }
    void load(int b, V& lo, V& hi) const { V::load_q4(p + b * 18 + 2, scale[b], lo, hi); }
    void next(int n) { p += n * 18; }
    HOTSET_INLINE void fetch(int b) const { fetch_block<18>(p, b); }
};

struct RowQ8_0 {
    const uint8_t* p;
    const uint8_t* end;
    alignas(64) float scale[16];
    RowQ8_0(const Matrix& w, int64_t row, int64_t col0) : p(w.row(row) + col0 / 32 * 34), end(w.end()) {}
    void scales(int n) { block_scales<34>(p, n, end, scale); }
    void load(int b, V& lo, V& hi) const {
        const int8_t* codes = reinterpret_cast<const int8_t*>(p + b * 34 + 2);
        const V d = V::set(scale[b]);
        lo = d * V::load_i8(codes);
        hi = d * V::load_i8(codes + 16);
    }
    void next(int n) { p += n * 34; }
    HOTSET_INLINE void fetch(int b) const { fetch_block<34>(p, b); }
};

template <bool kFour>
struct RowPlanes {
    static constexpr int kBytes = kFour ? 16 : 32;
    const uint8_t* p;
    const uint16_t* d;
    RowPlanes(const Matrix& w, int64_t row, int64_t col0)
        : p(w.row(row) + col0 / 32 * kBytes), d(w.scales + row / kPlaneRows * w.cols + col0) {}
    void scales(int) {}
    void load(int b, V& lo, V& hi) const {
        if constexpr (kFour) {
            V::load_q4(p + b * 16, 1.0f, lo, hi);
        } else {
            lo = V::load_i8(reinterpret_cast<const int8_t*>(p + b * 32));
            hi = V::load_i8(reinterpret_cast<const int8_t*>(p + b * 32 + 16));
        }
        lo = lo * V::load_f16(d + b * 32);
        hi = hi * V::load_f16(d + b * 32 + 16);
    }
    void next(int n) { p += n * kBytes, d += n * 32; }
    HOTSET_INLINE void fetch(int b) const {
        fetch_block<kBytes>(p, b);
        V::fetch(d + b * 32);
    }
};

// All other types, with the scalar decoder.
template <Type kType>
struct DecodedRow {
    const uint8_t* row;
    int64_t block;
    DecodedRow(const Matrix& w, int64_t r, int64_t col0) : row(w.row(r)), block(col0 / 32) {}
    void scales(int) {}
    void load(int b, V& lo, V& hi) const {
        const Block32 decoded = decode_block(kType, row, block + b);
        float x[32];
        for (int i = 0; i < 32; i++) {
            const float value = (decoded.scale * float(decoded.sub_scale[i / 16])) * float(decoded.q[i]);
            x[i] = value + decoded.min * float(decoded.sub_min[i / 16]);
        }
        lo = V::load(x);
        hi = V::load(x + 16);
    }
    void next(int n) { block += n; }
    HOTSET_INLINE void fetch(int) const {}
};

template <Type kType>
using BlockRow = std::conditional_t<kType == Type::Q4_0, RowQ4_0,
                                    std::conditional_t<kType == Type::Q8_0, RowQ8_0, DecodedRow<kType>>>;

// Add `kRows` rows to the sums, and prefetch the rows `coming`.
template <class Row, int kRows>
inline void axpy_rows(const Matrix& w, const int32_t* rows, const float* values, const int32_t* coming,
                      int64_t col0, int64_t n_cols, float* acc) {
    auto group = [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
        Row row[kRows] = {Row(w, rows[kIndex], col0)...};
        Row ahead[kRows] = {Row(w, coming[kIndex], col0)...};
        V value[kRows];
        for (int r = 0; r < kRows; r++) value[r] = V::set(values[r]);
        for (int64_t c = 0; c + 32 <= n_cols; c += kAxpyColumns) {
            const int blocks = imin((n_cols - c) / 32, kAxpyColumns / 32);
            for (int r = 0; r < kRows; r++) row[r].scales(blocks);
            for (int b = 0; b < blocks; b++) {
                float* sums = acc + c + b * 32;
                V lo = V::load(sums), hi = V::load(sums + 16);
                for (int r = 0; r < kRows; r++) {
                    V a, z;
                    row[r].load(b, a, z);
                    lo = fma(value[r], a, lo);
                    hi = fma(value[r], z, hi);
                    ahead[r].fetch(b);
                }
                lo.store(sums);
                hi.store(sums + 16);
            }
            for (int r = 0; r < kRows; r++) row[r].next(blocks), ahead[r].next(blocks);
        }
    };
    group(std::make_index_sequence<kRows>());
}

// Add the last columns of a float matrix whose width is not a multiple of 32.
inline void axpy_rest(const Matrix& w, const int32_t* rows, const float* values, int n, int64_t col0,
                      int64_t n_cols, float* acc) {
    for (int j = 0; j < n; j++)
        for (int64_t c = n_cols / 32 * 32; c < n_cols; c++)
            acc[c] = fmaf(values[j], float_weight(w, rows[j], col0 + c), acc[c]);
}

template <class Row>
void axpy(const Matrix& w, const int32_t* rows, const float* values, int n, int64_t col0, int64_t n_cols,
          float* acc) {
    int j = 0;
    for (; j + kAxpyRows <= n; j += kAxpyRows) {
        int32_t coming[kAxpyRows];
        for (int r = 0; r < kAxpyRows; r++) coming[r] = rows[imin(j + kAxpyRows + r, n - 1)];
        axpy_rows<Row, kAxpyRows>(w, rows + j, values + j, coming, col0, n_cols, acc);
    }
    for (; j < n; j++)
        axpy_rows<Row, 1>(w, rows + j, values + j, rows + imin(j + 1, n - 1), col0, n_cols, acc);
    if (n_cols % 32) axpy_rest(w, rows, values, n, col0, n_cols, acc);
}

template <class Row>
void decode(const Matrix& w, int64_t row_index, int64_t col0, int64_t n_cols, float* out) {
    Row row(w, row_index, col0);
    for (int64_t c = 0; c + 32 <= n_cols; c += kAxpyColumns) {
        const int blocks = imin((n_cols - c) / 32, kAxpyColumns / 32);
        row.scales(blocks);
        for (int b = 0; b < blocks; b++) {
            V lo, hi;
            row.load(b, lo, hi);
            lo.store(out + c + b * 32);
            hi.store(out + c + b * 32 + 16);
        }
        row.next(blocks);
    }
    for (int64_t c = n_cols / 32 * 32; c < n_cols; c++) out[c] = float_weight(w, row_index, col0 + c);
}

// Sums that stay in registers while the rows of a tile are added.
constexpr int kTileSums = V::kRegisters == 1 ? 8 : 4;

template <int kSums>
inline void tile_columns(const float* tile, const int32_t* rows, const float* values, int n, int64_t stride,
                         float* sums) {
    V acc[kSums];
    for (int c = 0; c < kSums; c++) acc[c] = V::load(sums + 16 * c);
    for (int j = 0; j < n; j++) {
        const V value = V::set(values[j]);
        const float* row = tile + rows[j] * stride;
        for (int c = 0; c < kSums; c++) acc[c] = fma(value, V::load(row + 16 * c), acc[c]);
    }
    for (int c = 0; c < kSums; c++) acc[c].store(sums + 16 * c);
}

void tile_axpy(const float* tile, const int32_t* rows, const float* values, int n, int64_t n_cols,
               float* sums) {
    int64_t c = 0;
    for (; c + 16 * kTileSums <= n_cols; c += 16 * kTileSums)
        tile_columns<kTileSums>(tile + c, rows, values, n, n_cols, sums + c);
    for (; c + 16 <= n_cols; c += 16) tile_columns<1>(tile + c, rows, values, n, n_cols, sums + c);
    for (; c < n_cols; c++)
        for (int j = 0; j < n; j++) sums[c] = fmaf(values[j], tile[rows[j] * n_cols + c], sums[c]);
}

// ---- Products with gathered rows

// Multiply R rows by one token, in the order of float_tile, and prefetch the rows `ahead`.
template <class W, int R>
inline void float_dots(const uint8_t* const* rows, const uint8_t* const* ahead, const float* x, int64_t k,
                       float* out) {
    V acc[R];
    for (int r = 0; r < R; r++) acc[r] = V::zero();
    const int64_t whole = k / 16 * 16;
    for (int64_t i = 0; i < whole; i += 16) {
        const V input = V::load(x + i);
        for (int r = 0; r < R; r++) {
            acc[r] = fma(W::load(rows[r] + i * W::kBytes), input, acc[r]);
            if (i * W::kBytes % 64 == 0) V::fetch(ahead[r] + i * W::kBytes);
        }
    }
    if (const int rest = int(k - whole)) {
        for (int r = 0; r < R; r++) {
            alignas(64) uint8_t padded_weights[64] = {};
            memcpy(padded_weights, rows[r] + whole * W::kBytes, size_t(rest) * W::kBytes);
            acc[r] = fma(W::load(padded_weights), V::load_n(x + whole, rest), acc[r]);
        }
    }
    for (int r = 0; r < R; r++) out[r] = sum(acc[r]);
}

template <class W>
void float_gather(const Matrix&, const uint8_t* const* rows, int n, const Inputs& x, int t, float* out) {
    const float* input = x.x + t * x.k;
    int j = 0;
    for (; j + 2 <= n; j += 2) float_dots<W, 2>(rows + j, rows + j + kGatherAhead, input, x.k, out + j);
    if (j < n) float_dots<W, 1>(rows + j, rows + j + kGatherAhead, input, x.k, out + j);
}

template <class Format>
void gather(const Matrix& w, const uint8_t* const* rows, int n, const Inputs& x, int t, float* out) {
    for (int j = 0; j < n; j++) out[j] = one_row<Format>(w, rows[j], x, t, rows[j + kGatherAhead]);
}

// Store the bits that `lanes` returns for n floats, in whole 64-bit words.
template <class F>
inline void lanes_to_bits(const float* x, int64_t n, uint64_t* bits, F lanes) {
    for (int64_t i = 0; i < n; i += 64) {
        uint64_t word = 0;
        for (int64_t j = i; j < n && j < i + 64; j += 16) {
            const int count = imin(n - j, 16);
            word |= (uint64_t(lanes(V::load_n(x + j, count))) & ((1u << count) - 1)) << (j - i);
        }
        bits[i / 64] = word;
    }
}

void nonzero_bits(const float* x, int64_t n, uint64_t* bits) {
    lanes_to_bits(x, n, bits, [](V v) { return nonzero_lanes(v); });
}

void not_below_bits(const float* x, float bound, int64_t n, uint64_t* bits) {
    lanes_to_bits(x, n, bits, [limit = V::set(bound)](V v) { return not_below_lanes(v, limit); });
}

inline void add_sparse_kernels(Kernels& table) {
    auto rows = [&]<class Row>(Type type) {
        table.axpy[int(type)] = axpy<Row>;
        table.decode[int(type)] = decode<Row>;
    };
    rows.template operator()<FloatRow<F32Weights>>(Type::F32);
    rows.template operator()<FloatRow<F16Weights>>(Type::F16);
    rows.template operator()<FloatRow<BF16Weights>>(Type::BF16);
#define HOTSET_TYPE(name, id, block_size, block_bytes) \
    rows.template operator()<BlockRow<Type::name>>(Type::name);
    HOTSET_BLOCK_TYPES(HOTSET_TYPE)
#undef HOTSET_TYPE
    rows.template operator()<RowPlanes<true>>(Type::Planes4);
    rows.template operator()<RowPlanes<false>>(Type::Planes8);
    table.gather[int(Type::F32)] = float_gather<F32Weights>;
    table.gather[int(Type::F16)] = float_gather<F16Weights>;
    table.gather[int(Type::BF16)] = float_gather<BF16Weights>;
    table.tile_axpy = tile_axpy;
    table.nonzero_bits = nonzero_bits;
    table.not_below_bits = not_below_bits;
}
