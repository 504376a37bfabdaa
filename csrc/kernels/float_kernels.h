// All float computations, written once over the sixteen lanes `V` of an instruction set, and therefore
// bitwise equal on all of them. Included inside the namespace of an instruction set, after its simd_*.h.

inline int imin(int64_t a, int64_t b) {
    return int(a < b ? a : b);
}
inline int imax(int64_t a, int64_t b) {
    return int(a > b ? a : b);
}

// Compute e^x to about one unit in the last place; 0 below -88, exactly 1 at 0.
inline V exp(V x) {
    x = max(x, V::set(-88.5f));
    x = min(x, V::set(89.0f));
    V n = max(round(x * V::set(1.44269504f)), V::set(-127.0f));
    V r = fma(n, V::set(-0.693359375f), x);  // ln 2 in two parts, so that r is exact
    r = fma(n, V::set(2.12194440e-4f), r);
    V p = V::set(1.9875691500e-4f);  // minimax polynomial of (e^r - 1 - r) / r^2
    p = fma(p, r, V::set(1.3981999507e-3f));
    p = fma(p, r, V::set(8.3334519073e-3f));
    p = fma(p, r, V::set(4.1665795894e-2f));
    p = fma(p, r, V::set(1.6666665459e-1f));
    p = fma(p, r, V::set(5.0000001201e-1f));
    return fma(p * r, r, r + V::set(1.0f)) * pow2(n);
}

inline float exp1(float x) {
    float lanes[16];
    exp(V::set(x)).store(lanes);
    return lanes[0];
}

// Compute cap * tanh(x / cap) with an error below 2e-7 * cap.
inline V soft_cap(V cap, V x) {
    const V two = V::set(2.0f);
    return cap - two * cap / (exp(two * x / cap) + V::set(1.0f));
}

// Compute 1 + erf(x / sqrt(2)) as csrc/vulkan/shaders/activation.glsl does, bit for bit. Its error is below
// 2.2e-7. Below 2 a polynomial in x^2 approximates erf(x / sqrt(2)) / x; above, one approximates the
// logarithm of 1 - erf.
inline V one_and_erf(V x) {
    auto polynomial = [](V at, const auto& factors) {
        V total = V::set(factors[std::size(factors) - 1]);
        for (int i = int(std::size(factors)) - 2; i >= 0; i--) total = total * at + V::set(factors[i]);
        return total;
    };
    constexpr float kOfSquare[] = {0.7978845834732056f,     -0.13298076391220093f,   0.01994710974395275f,
                                   -0.0023746443912386894f, 0.0002308496186742559f,  -1.887041980808135e-05f,
                                   1.3208330074121477e-06f, -7.834236726012023e-08f, 3.5954033084095727e-09f,
                                   -9.369993669849919e-11f};
    constexpr float kOfRest[] = {-9.666954040527344f,     -4.225606918334961f,     -0.47666361927986145f,
                                 -0.0029761474579572678f, 0.0003961921320296824f,  -5.200348823564127e-05f,
                                 6.522220701299375e-06f,  -8.167075407072844e-07f, 9.017059454663467e-08f};
    const V one = V::set(1.0f), size = abs(x);
    const V near = polynomial(x * x, kOfSquare) * x;
    const V far = one - exp(polynomial(min(size, V::set(5.7f)) - V::set(4.0f), kOfRest));
    return one + at_least(size, V::set(2.0f), at_least(x, V::zero(), far, V::zero() - far), near);
}

inline V activate(Activation kind, V threshold, V x) {
    const V one = V::set(1.0f);
    switch (kind) {
        case Activation::Silu:
            return x / (one + exp(V::zero() - x));
        case Activation::GeluTanh: {  // x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3))
            const V u = x * fma(x * x, V::set(0.0713548162726f), V::set(1.59576912161f));
            return x / (one + exp(V::zero() - u));
        }
        case Activation::Gelu:
            return V::set(0.5f) * x * one_and_erf(x);
        case Activation::Relu:
            return max(x, V::zero());
        case Activation::Relu2: {
            const V r = max(x, V::zero());
            return r * r;
        }
        case Activation::FatRelu:
            return at_least(x, threshold, x, V::zero());
        case Activation::SoftCap:
            return soft_cap(threshold, x);
        case Activation::Scale:
            return threshold * x;
        case Activation::Sigmoid:
            return one / (one + exp(V::zero() - x));
        case Activation::ClampedSilu: {
            const V m = min(x, threshold);
            return m / (one + exp(V::set(-1.702f) * m));
        }
        case Activation::ClampedPlusOne:
            return max(min(x, threshold), V::zero() - threshold) + one;
        case Activation::CappedSilu: {
            const V m = min(x, threshold);
            return m / (one + exp(V::zero() - m));
        }
        case Activation::Clamp:
            return max(min(x, threshold), V::zero() - threshold);
        case Activation::Exp:
            return exp(x);
        case Activation::Softplus: {
            float lanes[16];
            x.store(lanes);
            for (float& lane : lanes) lane = lane > 20.0f ? lane : float(std::log1p(std::exp(double(lane))));
            return V::load(lanes);
        }
    }
    return x;
}

// Call f(offset, count) for each run of up to sixteen elements.
template <class F>
inline void for_lanes(int64_t n, F f) {
    for (int64_t i = 0; i < n; i += 16) f(i, imin(n - i, 16));
}

void activate_row(Activation kind, float threshold, const float* x, int64_t n, float* out) {
    const V bound = V::set(threshold);
    for_lanes(n, [&](int64_t i, int c) { activate(kind, bound, V::load_n(x + i, c)).store_n(out + i, c); });
}

void xielu(const Xielu& f, const float* x, int64_t n, float* out) {
    const V positive = V::set(f.positive), negative = V::set(f.negative), linear = V::set(f.linear);
    for_lanes(n, [&](int64_t i, int c) {
        const V value = V::load_n(x + i, c);
        float of[16], above[16], below[16];
        value.store(of);
        fma(positive * value, value, linear * value).store(above);
        const V bent = (exp(min(value, V::set(f.eps))) - V::set(1.0f)) - value;
        fma(negative, bent, linear * value).store(below);
        for (int lane = 0; lane < 16; lane++) above[lane] = of[lane] > 0.0f ? above[lane] : below[lane];
        V::load(above).store_n(out + i, c);
    });
}

void gated_row(Activation kind, float threshold, const float* gate, const float* up, int64_t n, float* out) {
    const V bound = V::set(threshold);
    for_lanes(n, [&](int64_t i, int c) {
        (activate(kind, bound, V::load_n(gate + i, c)) * V::load_n(up + i, c)).store_n(out + i, c);
    });
}

void add_row(const float* a, const float* b, int64_t n, float* out) {
    for_lanes(n, [&](int64_t i, int c) { (V::load_n(a + i, c) + V::load_n(b + i, c)).store_n(out + i, c); });
}

void multiply_row(const float* a, const float* b, int64_t n, float* out) {
    for_lanes(n, [&](int64_t i, int c) { (V::load_n(a + i, c) * V::load_n(b + i, c)).store_n(out + i, c); });
}

void softmax(const float* x, int64_t n, float* out) {
    V highest = V::set(-INFINITY), total = V::zero();
    for_lanes(n, [&](int64_t i, int c) {
        highest = max(highest, blend_range(0, c, V::load_n(x + i, c), V::set(-INFINITY)));
    });
    const V top = V::set(max_lane(highest));
    for_lanes(n, [&](int64_t i, int c) {
        const V e = blend_range(0, c, exp(V::load_n(x + i, c) - top), V::zero());
        total = total + e;
        e.store_n(out + i, c);
    });
    const V sums = V::set(sum(total));
    for_lanes(n, [&](int64_t i, int c) { (V::load_n(out + i, c) / sums).store_n(out + i, c); });
}

// exp as NumPy computes it with AVX2 and AVX-512 (Cody and Waite's reduction, a quotient of two polynomials),
// bit for bit. Top-p's boundary depends on the sum, and so do the tokens of a seed.
void exponentials(const float* x, float less, int64_t n, float* out) {
    const V shift = V::set(less);
    for_lanes(n, [&](int64_t i, int c) {
        const V value = max(V::load_n(x + i, c) - shift, V::set(-110.0f));
        const V power = round(value * V::set(1.44269504f));
        V r = fma(power, V::set(-6.93145752e-1f), value);
        r = fma(power, V::set(-1.42860677e-6f), r);
        V above = fma(V::set(5.082762527590693718096e-04f), r, V::set(6.757896990527504603057e-03f));
        above = fma(above, r, V::set(5.114512081637298353406e-02f));
        above = fma(above, r, V::set(2.473615434895520810817e-01f));
        above = fma(above, r, V::set(7.257664613233124478488e-01f));
        above = fma(above, r, V::set(9.999999999980870924916e-01f));
        V below = fma(V::set(2.159509375685829852307e-02f), r, V::set(-2.742335390411667452936e-01f));
        below = fma(below, r, V::set(1.0f));
        const V normal = max(power, V::set(-125.0f));  // a denormal is rounded once, by the last factor
        (above / below * pow2(normal) * pow2(power - normal)).store_n(out + i, c);
    });
}

// A plain loop, which compilers vectorise: a series of twelve terms around the nearest power of two. A
// floating-point bound would be a branch; as integers, negative floats rise as their values fall.
void weights(const double* x, double divisor, int64_t n, double* out) {
    constexpr double kShift = 0x1.8p52;  // adding it puts the nearest integer into the low bits
    constexpr int64_t kSignBit = INT64_MIN;
    constexpr int64_t kLowest = std::bit_cast<int64_t>(-700.0);
    for (int64_t i = 0; i < n; i++) {
        const int64_t negative = std::bit_cast<int64_t>(x[i] / divisor) | kSignBit;
        const double value = std::bit_cast<double>(negative < kLowest ? negative : kLowest);
        const double shifted = value * 1.4426950408889634 + kShift, power = shifted - kShift;
        const double r = (value - power * 6.93147180369123816490e-01) - power * 1.90821492927058770002e-10;
        double series = 1.0 / 479001600.0;
        series = series * r + 1.0 / 39916800.0;
        series = series * r + 1.0 / 3628800.0;
        series = series * r + 1.0 / 362880.0;
        series = series * r + 1.0 / 40320.0;
        series = series * r + 1.0 / 5040.0;
        series = series * r + 1.0 / 720.0;
        series = series * r + 1.0 / 120.0;
        series = series * r + 1.0 / 24.0;
        series = series * r + 1.0 / 6.0;
        series = series * r + 0.5;
        series = (series * r + 1.0) * r + 1.0;
        out[i] =
            std::bit_cast<double>(std::bit_cast<uint64_t>(series) + (std::bit_cast<uint64_t>(shifted) << 52));
    }
}

void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* out) {
    V squares = V::zero();
    for_lanes(n, [&](int64_t i, int c) {
        const V v = V::load_n(x + i, c);
        squares = fma(v, v, squares);
    });
    const V scale = V::set(1.0f / sqrtf(sum(squares) / float(n) + eps));
    for_lanes(n, [&](int64_t i, int c) {
        (V::load_n(x + i, c) * scale * V::load_n(weight + i, c)).store_n(out + i, c);
    });
}

struct Moments {
    float mean, variance;
};

// Sum the lanes in order, then by the tree of `sum`. The variance divides by n and subtracts the mean first.
inline Moments moments(const float* x, int64_t n) {
    V total = V::zero();
    for_lanes(n, [&](int64_t i, int c) { total = total + V::load_n(x + i, c); });
    const float mean = sum(total) / float(n);
    V squares = V::zero();
    for_lanes(n, [&](int64_t i, int c) {
        const V centred = blend_range(0, c, V::load_n(x + i, c) - V::set(mean), V::zero());
        squares = fma(centred, centred, squares);
    });
    return {mean, sum(squares) / float(n)};
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, int64_t n, float* out) {
    const Moments of_row = moments(x, n);
    const V mean = V::set(of_row.mean), scale = V::set(1.0f / sqrtf(of_row.variance + eps));
    for_lanes(n, [&](int64_t i, int c) {
        const V normal = (V::load_n(x + i, c) - mean) * scale * V::load_n(weight + i, c);
        (bias ? normal + V::load_n(bias + i, c) : normal).store_n(out + i, c);
    });
}

void gaussian_top_k(const float* x, float multiplier, int64_t n, float* out) {
    const Moments of_row = moments(x, n);
    const float spread = multiplier * sqrtf(of_row.variance);  // rounded before it is added
    const V threshold = V::set(of_row.mean + spread);
    for_lanes(n,
              [&](int64_t i, int c) { max(V::zero(), V::load_n(x + i, c) - threshold).store_n(out + i, c); });
}

// Four blocks at a time, whose maxima and sums are reduced together.
void quantize(const float* x, int64_t k, const QuantizedRow& out) {
    const int64_t blocks = padded(k) / 32;
    int64_t b = 0;
    for (; b * 32 < k || b % kInterleaved; b += 4) {  // whole groups, so that padding is zero as well
        const int count = int(imax(imin(k - b * 32, 128), 0));
        const float* at = x + (count ? b * 32 : 0);
        V half[2][4], highest[4];  // the first sixteen values of each block, then the others
        for (int j = 0; j < 4; j++) {
            for (int h = 0; h < 2; h++)
                half[h][j] = count == 128 ? V::load(at + j * 32 + h * 16)
                                          : V::load_n(at + j * 32 + h * 16,
                                                      imin(imax(count - j * 32 - h * 16, 0), 16));
            highest[j] = max(abs(half[0][j]), abs(half[1][j]));
        }
        float largest[4], inverse[4], own_scale[4], own_sum[4], total[2][4];
        max_lanes(highest, largest);
        for (int j = 0; j < 4; j++) {
            // Below 3.8e-37 (and for zeros) the inverse overflows: all codes are then 0.
            const float steps = 127.0f / largest[j];
            inverse[j] = steps < INFINITY ? steps : 0.0f;
            own_scale[j] = largest[j] / 127.0f;
        }
        for (int h = 0; h < 2; h++) {
            for (int j = 0; j < 4; j++) half[h][j] = round(half[h][j] * V::set(inverse[j]));
            integer_sums(half[h], total[h]);
        }
        for (int j = 0; j < 4; j++) own_sum[j] = total[0][j] + total[1][j];
        const float any = (own_sum[0] + own_sum[1]) + (own_sum[2] + own_sum[3]);
        for (int j = 0; any != any && j < 4; j++) {
            if (own_sum[j] == own_sum[j]) continue;
            // A value is not finite: make every product with this block NaN.
            half[0][j] = half[1][j] = V::zero();
            total[0][j] = total[1][j] = 0.0f;
            own_scale[j] = NAN;
        }
        for (int j = 0; j < 4; j++) {
            for (int h = 0; h < 2; h++) half[h][j].store_i8(out.q + half_at(kInterleaved, b + j, h));
            own_sum[j] = own_scale[j] * own_sum[j];
        }
        memcpy(out.scale + b, own_scale, sizeof(own_scale));
        memcpy(out.sum + b, own_sum, sizeof(own_sum));
        for (int j = 0; j < 4; j++) out.isum[b + j] = int32_t(total[0][j]);
        for (int j = 0; j < 4; j++) out.isum[blocks + b + j] = int32_t(total[1][j]);
        for (int j = 0; j < 4; j++) out.isum8[b + j] = int32_t(8.0f * (total[0][j] + total[1][j]));
    }
    memset(out.q + b * 32, 0, size_t(blocks - b) * 32);
    memset(out.scale + b, 0, size_t(blocks - b) * sizeof(float));
    memset(out.sum + b, 0, size_t(blocks - b) * sizeof(float));
    memset(out.isum + b, 0, size_t(blocks - b) * sizeof(int32_t));
    memset(out.isum + blocks + b, 0, size_t(blocks - b) * sizeof(int32_t));
    memset(out.isum8 + b, 0, size_t(blocks - b) * sizeof(int32_t));
}

// ---- Matrix products with float weights

struct F32Weights {
    static V load(const uint8_t* p) { return V::load(reinterpret_cast<const float*>(p)); }
    static constexpr int kBytes = 4;
};
struct F16Weights {
    static V load(const uint8_t* p) { return V::load_f16(reinterpret_cast<const uint16_t*>(p)); }
    static constexpr int kBytes = 2;
};
struct BF16Weights {
    static V load(const uint8_t* p) { return V::load_bf16(reinterpret_cast<const uint16_t*>(p)); }
    static constexpr int kBytes = 2;
};

// Multiply R rows by T tokens, each pair with its own sixteen lanes.
template <class W, int R, int T>
inline void float_tile(const Matrix& w, int64_t row, const Inputs& x, int token, float* out, int64_t ld) {
    V acc[R][T];
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) acc[r][t] = V::zero();
    const uint8_t* rows = w.row(row);
    const float* xs = x.x + token * x.k;
    const int64_t whole = x.k / 16 * 16;
    for (int64_t i = 0; i < whole; i += 16) {
        V weights[R];
        for (int r = 0; r < R; r++) {
            weights[r] = W::load(rows + r * w.row_bytes + i * W::kBytes);
            // With one token memory is the limit, and R streams are too many for the hardware prefetcher.
            if (T == 1 && i * W::kBytes % 64 == 0) V::fetch(rows + (R + r) * w.row_bytes + i * W::kBytes);
        }
        for (int t = 0; t < T; t++) {
            const V input = V::load(xs + t * x.k + i);
            for (int r = 0; r < R; r++) acc[r][t] = fma(weights[r], input, acc[r][t]);
        }
    }
    if (const int rest = int(x.k - whole)) {
        for (int r = 0; r < R; r++) {
            alignas(64) uint8_t padded_weights[64] = {};
            memcpy(padded_weights, rows + r * w.row_bytes + whole * W::kBytes, size_t(rest) * W::kBytes);
            const V weights = W::load(padded_weights);
            for (int t = 0; t < T; t++)
                acc[r][t] = fma(weights, V::load_n(xs + t * x.k + whole, rest), acc[r][t]);
        }
    }
    for (int t = 0; t < T; t++)
        for (int r = 0; r < R; r++) out[t * ld + r] = sum(acc[r][t]);
}

// Multiply R rows by tiles of T tokens, then the rest by a smaller tile.
template <class W, int R, int T>
inline void float_rows(const Matrix& w, int64_t row, const Inputs& x, int t0, int t1, float* out,
                       int64_t ld) {
    for (; t0 + T <= t1; t0 += T, out += T * ld) float_tile<W, R, T>(w, row, x, t0, out, ld);
    if constexpr (T > 1) float_rows<W, R, T - 1>(w, row, x, t0, t1, out, ld);
}

// Multiplies four rows of float32 by T tokens. `acc` has the lanes of each row's sums.
struct WholeTile {
    static constexpr int kTokens = 6;
    static constexpr int kDecodeFrom = 32;  // tokens from which decoding the rows first is faster

    // Add `count` columns, in whole vectors. x: of the first token; k: between tokens. first: acc is empty.
    template <int T>
    static void add(const float* rows, int64_t stride, const float* x, int64_t k, int64_t count, bool first,
                    V (*acc)[kTokens]) {
        V total[4][T];
        for (int r = 0; r < 4; r++)
            for (int t = 0; t < T; t++) total[r][t] = first ? V::zero() : acc[r][t];
        for (int64_t i = 0; i < count; i += 16) {
            V weights[4];
            for (int r = 0; r < 4; r++) weights[r] = V::load(rows + r * stride + i);
            for (int t = 0; t < T; t++) {
                const V input = V::load(x + t * k + i);
                for (int r = 0; r < 4; r++) total[r][t] = fma(weights[r], input, total[r][t]);
            }
        }
        for (int r = 0; r < 4; r++)
            for (int t = 0; t < T; t++) acc[r][t] = total[r][t];
    }
};

// Call Tile::add for n tokens.
template <class Tile, int T = Tile::kTokens, class... Args>
inline void add_tokens(int n, Args... args) {
    if (n == T) return Tile::template add<T>(args...);
    if constexpr (T > 1) add_tokens<Tile, T - 1>(n, args...);
}

// Decode n columns of a row to float32, and zeros up to a whole vector.
template <class W>
inline void decode_columns(const uint8_t* from, int64_t n, float* to) {
    for (; n >= 16; n -= 16, from += 16 * W::kBytes, to += 16) W::load(from).store(to);
    if (n == 0) return;
    uint8_t rest[64] = {};
    memcpy(rest, from, size_t(n) * W::kBytes);
    W::load(rest).store(to);
}

// For several tokens, a few rows are decoded to float32 at a time, a span of columns that stays in the
// first-level cache while it is multiplied by tokens whose inputs stay in the second-level cache.
template <class W, class Tile>
void float_linear(const Matrix& w, int64_t row0, int64_t row1, const Inputs& x, int t0, int t1, float* out,
                  int64_t ld, uint8_t* scratch) {
    if (t1 - t0 < Tile::kDecodeFrom) {
        int64_t r = row0;
        for (; r + 4 <= row1; r += 4) float_rows<W, 4, Tile::kTokens>(w, r, x, t0, t1, out + (r - row0), ld);
        for (; r < row1; r++) float_rows<W, 1, Tile::kTokens>(w, r, x, t0, t1, out + (r - row0), ld);
        return;
    }
    constexpr int kRows = 8, kTokens = Tile::kTokens, kMostTiles = 84 / kTokens;
    constexpr int64_t kTokenBytes = 384 * 1024, kSpan = 512;
    constexpr int64_t kStride = kSpan + 32;  // if it were a power of two, rows would share lines of the cache
    using Sums = V[kRows][kTokens];
    static_assert(kRows * kStride * sizeof(float) + kMostTiles * sizeof(Sums) <= kernel_scratch_bytes(0));
    float* const decoded = reinterpret_cast<float*>(scratch);
    Sums* const acc = reinterpret_cast<Sums*>(scratch + kRows * kStride * sizeof(float));
    const int64_t k = x.k, whole = k / 16 * 16;
    const int64_t tiles = imax(imin(kTokenBytes / (4 * k * kTokens), kMostTiles), 1);
    for (int64_t first = t0; first < t1; first += tiles * kTokens) {
        const int64_t last = imin(first + tiles * kTokens, t1);
        for (int64_t row = row0; row < row1; row += kRows) {
            const int n_rows = imin(row1 - row, kRows), all = (n_rows + 3) / 4 * 4;
            for (int64_t i = 0, count; i < k; i += count) {
                const bool is_rest = i == whole;  // less than a vector, whose inputs are padded with zeros
                count = is_rest ? k - whole : imin(whole - i, kSpan);
                for (int r = 0; r < all; r++)
                    decode_columns<W>(w.row(row + imin(r, n_rows - 1)) + i * W::kBytes, count,
                                      decoded + r * kStride);
                for (int64_t t = first, tile = 0; t < last; t += kTokens, tile++) {
                    const int n = imin(last - t, kTokens);
                    const float* inputs = x.x + t * k + i;
                    int64_t between = k;
                    float rest[kTokens][16];
                    if (is_rest) {
                        memset(rest, 0, sizeof(rest));
                        for (int j = 0; j < n; j++)
                            memcpy(rest[j], inputs + j * k, size_t(count) * sizeof(float));
                        inputs = rest[0];
                        between = 16;
                    }
                    V(*const of)[kTokens] = acc[tile];
                    for (int r = 0; r < all; r += 4)
                        add_tokens<Tile>(n, decoded + r * kStride, kStride, inputs, between, count, i == 0,
                                         of + r);
                    if (i + count < k) continue;
                    for (int j = 0; j < n; j++) {
                        float* to = out + (t + j - t0) * ld + (row - row0);
                        for (int r = 0; r < all; r += 4) {
                            const V four[4] = {of[r][j], of[r + 1][j], of[r + 2][j], of[r + 3][j]};
                            float dots[4];
                            sums(four, dots);
                            memcpy(to + r, dots, size_t(imin(n_rows - r, 4)) * sizeof(float));
                        }
                    }
                }
            }
        }
    }
}

// ---- Attention over KV blocks

constexpr int kRowTile = V::kRegisters == 1 ? 8 : 6;  // most query rows that share one read of the keys
constexpr int kRowTileOfMany = 6;  // if one pass is not enough: these use twice the columns

// Vectors of positions or channels at once for R query rows, limited by registers for their sums.
template <int R>
constexpr int kColumns = V::kRegisters == 1 ? (R <= 6 ? 4 : 2)
                         : R == 1           ? 4
                         : R <= 3           ? 2
                                            : 1;

// The next data to read, prefetched one piece at a time during other computation. Slabs are too short, and
// the slabs of a head too far apart, for the hardware prefetcher.
struct Upcoming {
    const uint8_t* bytes = nullptr;
    int64_t piece = 0;  // bytes; 0: nothing to prefetch

    HOTSET_INLINE void fetch(int64_t i) const {
        for (int64_t at = 0; at < piece; at += 64) V::fetch(bytes + i * piece + at);
    }
};

template <KvType kType>
inline V load_kv(const uint8_t* p, int64_t i) {
    if constexpr (kType == KvType::F32) return V::load(reinterpret_cast<const float*>(p) + i);
    if constexpr (kType == KvType::F16) return V::load_f16(reinterpret_cast<const uint16_t*>(p) + i);
    if constexpr (kType == KvType::Q8_0) return V::load_i8(reinterpret_cast<const int8_t*>(p) + i);
}

// Call f with the type as a template argument.
template <class F>
inline void with_type(KvType type, F f) {
    switch (type) {
        case KvType::F32:
            return f.template operator()<KvType::F32>();
        case KvType::F16:
            return f.template operator()<KvType::F16>();
        case KvType::Q8_0:
            return f.template operator()<KvType::Q8_0>();
        case KvType::Q4_0:
            return f.template operator()<KvType::Q4_0>();
    }
}

// scores[r][0:64] = q_r · k for the 64 positions of a KV block. Lanes are positions. Channels are added in
// order; for Q4_0 in pairs from the two halves of a block.
template <KvType kType, int R, int C>
inline void kv_block_scores(const KvLayer& kv, const uint8_t* keys, const uint16_t* scales,
                            const float* const* q, const Upcoming& upcoming, float (*scores)[kKvBlockSize]) {
    int64_t n_done = 0;
    for (int position = 0; position < kKvBlockSize; position += 16 * C) {
        V acc[R][C];
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) acc[r][c] = V::zero();
        auto add_channel = [&](int d, auto load) {
            upcoming.fetch(n_done++);
            for (int c = 0; c < C; c++) {
                const V key = load(position + c * 16);
                for (int r = 0; r < R; r++) acc[r][c] = fma(V::set(q[r][d]), key, acc[r][c]);
            }
        };
        auto add = [&](int first, int last) {
            for (int d = first; d < last; d++)
                if constexpr (kType == KvType::Q4_0) {
                    const int pair = (d - first) / 2, high = (d - first) % 2;
                    const uint8_t* codes = keys + (first / 2 + pair) * kKvBlockSize;
                    add_channel(first + pair + high * 16,
                                [&](int at) { return V::load_nibbles(codes + at, high * 4); });
                } else {
                    add_channel(d,
                                [&](int at) { return load_kv<kType>(keys, int64_t(d) * kKvBlockSize + at); });
                }
        };
        if constexpr (kType == KvType::Q8_0 || kType == KvType::Q4_0) {
            V total[R][C];
            for (int r = 0; r < R; r++)
                for (int c = 0; c < C; c++) total[r][c] = V::zero();
            for (int block = 0; block < kv.head_dim / 32; block++) {
                for (int r = 0; r < R; r++)
                    for (int c = 0; c < C; c++) acc[r][c] = V::zero();
                add(block * 32, block * 32 + 32);
                for (int c = 0; c < C; c++) {
                    const V scale = V::load_f16(scales + block * kKvBlockSize + position + c * 16);
                    for (int r = 0; r < R; r++) total[r][c] = fma(scale, acc[r][c], total[r][c]);
                }
            }
            for (int r = 0; r < R; r++)
                for (int c = 0; c < C; c++) acc[r][c] = total[r][c];
        } else {
            add(0, kv.head_dim);
        }
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) acc[r][c].store(scores[r] + position + c * 16);
    }
}

// out_r += sum over slots [first, last) of p[r][slot] * value, in the order of the slots, for C vectors of
// sixteen channels.
template <KvType kType, int R, int C>
inline void kv_block_values(const KvLayer& kv, const uint8_t* values, const uint16_t* scales, int channel,
                            int first, int last, const float (*p)[kKvBlockSize], const Upcoming& upcoming,
                            float* out) {
    const int stride = kv.value_stride();
    V acc[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) acc[r][c] = V::load(out + r * stride + channel + c * 16);
    if constexpr (kType == KvType::Q4_0) {
        const int block = channel / 32, half = channel % 32 / 16;  // half: 0 if C is even
        alignas(64) float weights[(C + 1) / 2][R][kKvBlockSize];   // p times the scales
        for (int b = 0; b < (C + 1) / 2; b++)
            for (int slot = 0; slot < kKvBlockSize; slot += 16) {
                const V scale = V::load_f16(scales + (block + b) * kKvBlockSize + slot);
                for (int r = 0; r < R; r++) (V::load(p[r] + slot) * scale).store(weights[b][r] + slot);
            }
        for (int slot = first; slot < last; slot++) {
            upcoming.fetch(slot);
            const uint8_t* codes = values + (slot * (stride / 32) + block) * 16;
            for (int c = 0; c < C; c++) {
                const V value = V::load_nibbles(codes + c / 2 * 16, (C == 1 ? half : c % 2) * 4);
                for (int r = 0; r < R; r++)
                    acc[r][c] = fma(V::set(weights[c / 2][r][slot]), value, acc[r][c]);
            }
        }
    } else {
        for (int slot = first; slot < last; slot++) {
            upcoming.fetch(slot);
            V value[C];
            for (int c = 0; c < C; c++) {
                value[c] = load_kv<kType>(values, int64_t(slot) * stride + channel + c * 16);
                if constexpr (kType == KvType::Q8_0)
                    value[c] =
                        value[c] *
                        V::set(f16_to_f32(scales[slot * (kv.head_dim_v / 32) + (channel + c * 16) / 32]));
            }
            for (int r = 0; r < R; r++) {
                const V weight = V::set(p[r][slot]);
                for (int c = 0; c < C; c++) acc[r][c] = fma(weight, value[c], acc[r][c]);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) acc[r][c].store(out + r * stride + channel + c * 16);
}

alignas(64) constexpr float kLaneNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Add the scores of the bias in KV block `index` to the scores of query rows `row` to `row` + R.
template <int R>
inline void add_bias_scores(const BiasScores& bias, int row, int index, float (*scores)[kKvBlockSize]) {
    const int n = bias.n_pairs;
    const float *cos = bias.starts + int64_t(index) * 2 * n, *sin = cos + n;
    alignas(64) float turned[R][kMaxHeadDim], added[R][kKvBlockSize];
    const float* of_row[R];
    for (int r = 0; r < R; r++) {
        const float *a = bias.rows[row + r] + 1, *b = a + n;
        for_lanes(n, [&](int64_t i, int c) {
            const V first = V::load_n(a + i, c), second = V::load_n(b + i, c);
            const V turn = V::load_n(cos + i, c), across = V::load_n(sin + i, c);
            fma(first, turn, second * across).store_n(turned[r] + i, c);
            fma(second, turn, V::zero() - first * across).store_n(turned[r] + n + i, c);
        });
        of_row[r] = turned[r];
    }
    KvLayer slots;
    slots.head_dim = 2 * n;
    kv_block_scores<KvType::F32, R, kColumns<R>>(slots, reinterpret_cast<const uint8_t*>(bias.slots), nullptr,
                                                 of_row, {}, added);
    for (int r = 0; r < R; r++)
        for (int c = 0; c < kKvBlockSize; c += 16)
            (V::load(scores[r] + c) + (V::load(added[r] + c) + V::set(bias.rows[row + r][0])))
                .store(scores[r] + c);
}

// fetches: whether the KV block's values and the keys of the next one (-1: none) still need to be prefetched.
template <int R>
inline void attend_kv_block(const KvLayer& kv, int head, int kv_block, int base, bool fetches,
                            int next_kv_block, float softcap, const float* slopes, const BiasScores& bias,
                            int row, const float* const* q, const int32_t* row_first, const int32_t* row_last,
                            const int32_t* row_at, AttentionState* state, float* out) {
    const int stride = kv.value_stride();
    int lowest = kKvBlockSize, highest = 0;
    for (int r = 0; r < R; r++) {
        const int first = imax(row_first[r] - base, 0), last = imin(row_last[r] - base, kKvBlockSize);
        if (first >= last) continue;
        lowest = imin(lowest, first);
        highest = imax(highest, last);
    }
    if (lowest >= highest) return;

    const int64_t slab = int64_t(kv_block) * kv.n_head_kv + head;
    alignas(64) float p[R][kKvBlockSize];
    with_type(kv.k_type, [&]<KvType kType>() {
        constexpr int C = kColumns<R>;
        const Upcoming values{kv.v + slab * kv.v_slab_bytes(),
                              fetches ? int64_t(kv.v_slab_bytes()) / kv.head_dim * C * 16 / kKvBlockSize : 0};
        kv_block_scores<kType, R, C>(kv, kv.k + slab * kv.k_slab_bytes(),
                                     kv.k_scale + slab * (kv.head_dim / 32) * kKvBlockSize, q, values, p);
    });
    if (bias.rows) add_bias_scores<R>(bias, row, base / kKvBlockSize, p);
    for (int r = 0; r < R; r++) {
        const int first = imax(row_first[r] - base, 0), last = imin(row_last[r] - base, kKvBlockSize);
        if (first >= last) {
            for (int c = 0; c < 4; c++) V::zero().store(p[r] + c * 16);
            continue;
        }
        const V hidden = V::set(-INFINITY);
        V score[4];
        for (int c = 0; c < 4; c++) score[c] = V::load(p[r] + c * 16);
        if (softcap > 0.0f)
            for (int c = 0; c < 4; c++) score[c] = soft_cap(V::set(softcap), score[c]);
        if (slopes)
            for (int c = 0; c < 4; c++) {
                const V after = V::load(kLaneNumbers) + V::set(float(base + c * 16 - row_at[r]));
                const V before = V::zero() - after;
                score[c] = fma(V::set(slopes[r]), V::zero() - max(after, before), score[c]);
            }
        for (int c = 0; c < 4; c++)
            score[c] = blend_range(imin(imax(first - c * 16, 0), 16), imin(imax(last - c * 16, 0), 16),
                                   score[c], hidden);
        const float top = max_lane(max(max(score[0], score[1]), max(score[2], score[3])));
        const float new_max = top > state[r].max ? top : state[r].max;
        const V shift = V::set(new_max);
        for (int c = 0; c < 4; c++) {  // exp of -inf is 0
            score[c] = exp(score[c] - shift);
            score[c].store(p[r] + c * 16);
        }
        const float block_sum = sum((score[0] + score[1]) + (score[2] + score[3]));
        const float rescale = exp1(state[r].max - new_max);
        state[r].sum = fmaf(state[r].sum, rescale, block_sum);
        state[r].max = new_max;
        if (rescale != 1.0f)
            for (int c = 0; c < stride; c += 16)
                (V::load(out + r * stride + c) * V::set(rescale)).store(out + r * stride + c);
    }
    const uint8_t* values = kv.v + slab * kv.v_slab_bytes();
    const uint16_t* value_scales = kv.v_scale + slab * (kv.head_dim_v / 32) * kKvBlockSize;
    with_type(kv.v_type, [&]<KvType kType>() {
        constexpr int C = kColumns<R>;
        const int64_t piece =
            fetches && next_kv_block >= 0 ? int64_t(kv.k_slab_bytes()) / kKvBlockSize * C * 16 / stride : 0;
        const int64_t next_slab = int64_t(imax(next_kv_block, 0)) * kv.n_head_kv + head;
        Upcoming keys{kv.k + next_slab * kv.k_slab_bytes(), piece};
        int channel = 0;
        for (; channel + 16 * C <= stride; channel += 16 * C) {
            kv_block_values<kType, R, C>(kv, values, value_scales, channel, lowest, highest, p, keys, out);
            keys.bytes += piece * kKvBlockSize;
        }
        for (; channel < stride; channel += 16)
            kv_block_values<kType, R, 1>(kv, values, value_scales, channel, lowest, highest, p, {}, out);
    });
}

void attention(const KvLayer& kv, int head, const int32_t* kv_blocks, int first, int last, int n_rows,
               float softcap, const float* slopes, const BiasScores& bias, const float* const* q,
               const int32_t* row_first, const int32_t* row_last, const int32_t* row_at,
               AttentionState* state, float* out, bool more) {
    const int stride = kv.value_stride();
    for (int r = 0; r < n_rows && !more; r++) {
        state[r] = {-INFINITY, 0.0f};
        for (int c = 0; c < stride; c += 16) V::zero().store(out + r * stride + c);
    }
    for (int index = first / kKvBlockSize; index * kKvBlockSize < last; index++) {
        const int next = (index + 1) * kKvBlockSize < last ? kv_blocks[index + 1] : -1;
        int r = 0;
        auto rows = [&]<int R>() {
            attend_kv_block<R>(kv, head, kv_blocks[index], index * kKvBlockSize, r == 0, next, softcap,
                               slopes ? slopes + r : nullptr, bias, r, q + r, row_first + r, row_last + r,
                               row_at + r, state + r, out + r * stride);
            r += R;
        };
        while (r < n_rows) {
            const int most = n_rows - r <= kRowTile ? kRowTile : kRowTileOfMany;
            const int passes = (n_rows - r + most - 1) / most;
            const int alike = (n_rows - r + passes - 1) / passes;  // for example, 9 rows are 5 and 4
            [&]<int... R>(std::integer_sequence<int, R...>) {
                ((R + 1 == alike && (rows.template operator()<R + 1>(), true)) || ...);
            }(std::make_integer_sequence<int, kRowTile>());
        }
    }
}

// Decode the keys at slots `at` to at + 16 of a KV block: decoded[d] has channel d of all of them.
template <KvType kType>
inline void decode_index_keys(const IndexKeys& of, const uint8_t* keys, const uint16_t* scales, int at,
                              float (*decoded)[16]) {
    for (int d = 0; d < of.head_dim; d++) {
        V key;
        if constexpr (kType == KvType::Q4_0) {
            const int64_t row = d / 32 * 16 + d % 16;
            key = V::load_nibbles(keys + row * of.slots + at, d % 32 / 16 * 4);
        } else {
            key = load_kv<kType>(keys, int64_t(d) * of.slots + at);
        }
        if constexpr (kType == KvType::Q4_0 || kType == KvType::Q8_0)
            key = key * V::load_f16(scales + int64_t(d / 32) * of.slots + at);
        key.store(decoded[d]);
    }
}

void index_scores(const IndexKeys& of, int kv_block, int n, int n_head, const float* q, const float* weights,
                  float* out) {
    constexpr int kHeads = V::kRegisters == 1 ? 12 : 6;  // as many sums as fit in registers
    const uint8_t* keys = of.keys + kv_block * of.block_bytes();
    const uint16_t* scales = of.scales ? of.scales + kv_block * of.block_scales() : nullptr;
    alignas(64) float decoded[kMaxHeadDim][16];
    for (int at = 0; at < n; at += 16) {
        with_type(of.type, [&]<KvType kType>() { decode_index_keys<kType>(of, keys, scales, at, decoded); });
        V total = V::zero();
        int head = 0;
        auto heads = [&]<int R>() {
            V acc[R];
            for (int r = 0; r < R; r++) acc[r] = V::zero();
            const float* of_heads = q + int64_t(head) * of.head_dim;
            for (int d = 0; d < of.head_dim; d++) {
                const V key = V::load(decoded[d]);
                for (int r = 0; r < R; r++)
                    acc[r] = fma(V::set(of_heads[int64_t(r) * of.head_dim + d]), key, acc[r]);
            }
            for (int r = 0; r < R; r++) total = fma(V::set(weights[head + r]), max(acc[r], V::zero()), total);
            head += R;
        };
        while (head + kHeads <= n_head) heads.template operator()<kHeads>();
        [&]<int... R>(std::integer_sequence<int, R...>) {
            ((R + 1 == n_head - head && (heads.template operator()<R + 1>(), true)) || ...);
        }(std::make_integer_sequence<int, kHeads - 1>());
        total.store_n(out + at, imin(n - at, 16));
    }
}

void merge_attention(int n_parts, const AttentionState* states, const float* parts, int64_t stride, int64_t n,
                     float* out) {
    float top = states[0].max;
    for (int i = 1; i < n_parts; i++) top = states[i].max > top ? states[i].max : top;
    float total = 0.0f;
    for (int i = 0; i < n_parts; i++) {  // a part without visible positions has max -inf and weight 0
        const float weight = exp1(states[i].max - top);
        total = fmaf(weight, states[i].sum, total);
        for_lanes(n, [&](int64_t c, int count) {
            const V part = V::load_n(parts + i * stride + c, count) * V::set(weight);
            (i ? V::load_n(out + c, count) + part : part).store_n(out + c, count);
        });
    }
    const V inverse = V::set(1.0f / total);
    for_lanes(n,
              [&](int64_t c, int count) { (V::load_n(out + c, count) * inverse).store_n(out + c, count); });
}

inline uint16_t to_f16(float x) {
    return f32_to_f16(x);
}

constexpr uint32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;

// Return the largest magnitude as bits; at least kInfinity if a value is not finite.
inline uint32_t largest_bits(const float* x, int n) {
    uint32_t largest = 0;
    for (int i = 0; i < n; i++) {
        const uint32_t magnitude = std::bit_cast<uint32_t>(x[i]) & kMagnitude;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

// Quantise 32 values as a Q8_0 cache stores them. A value that is not finite makes all of them NaN.
inline uint16_t quantize_q8_0(const float* x, int8_t* q) {
    if (largest_bits(x, 32) >= kInfinity) {
        memset(q, 0, 32);
        return 0x7e00;
    }
    const V lo = V::load(x), hi = V::load(x + 16);
    const float largest = max_lane(max(abs(lo), abs(hi)));
    const uint16_t half = to_f16(largest / 127.0f);
    const float scale = f16_to_f32(half);
    const V inverse = V::set(scale > 0.0f ? 1.0f / scale : 0.0f);
    const V bound = V::set(127.0f);  // the rounded scale may be slightly too small
    max(min(round(lo * inverse), bound), V::zero() - bound).store_i8(q);
    max(min(round(hi * inverse), bound), V::zero() - bound).store_i8(q + 16);
    return half;
}

template <int kHalf>
bool encode_symmetric(const float* x, uint8_t* p);  // encode_kernels.h

// Quantise 32 values to 16 bytes of codes and a scale, as Q4_0 stores them. A value that is not finite makes
// all of them NaN.
inline uint16_t quantize_q4_0(const float* x, uint8_t* q) {
    uint8_t block[18] = {0xff, 0x7f};
    encode_symmetric<8>(x, block);
    memcpy(q, block + 2, 16);
    return uint16_t(block[0] | block[1] << 8);
}

void store_key(const KvLayer& kv, int kv_block, int slot, int head, const float* k) {
    const int64_t slab = int64_t(kv_block) * kv.n_head_kv + head, blocks = kv.head_dim / 32;
    uint8_t* const keys = kv.k + slab * kv.k_slab_bytes();
    uint16_t* const scales = kv.k_scale + slab * blocks * kKvBlockSize + slot;
    switch (kv.k_type) {
        case KvType::F32:
            for (int64_t d = 0; d < kv.head_dim; d++)
                reinterpret_cast<float*>(keys)[d * kKvBlockSize + slot] = k[d];
            break;
        case KvType::F16:
            for_lanes(kv.head_dim, [&](int64_t d, int c) {
                uint16_t halves[16];
                V::load_n(k + d, c).store_f16(halves);
                for (int i = 0; i < c; i++)
                    reinterpret_cast<uint16_t*>(keys)[(d + i) * kKvBlockSize + slot] = halves[i];
            });
            break;
        case KvType::Q8_0:
            for (int64_t block = 0; block < blocks; block++) {
                int8_t q[32];
                scales[block * kKvBlockSize] = quantize_q8_0(k + block * 32, q);
                for (int i = 0; i < 32; i++) keys[(block * 32 + i) * kKvBlockSize + slot] = uint8_t(q[i]);
            }
            break;
        case KvType::Q4_0:
            for (int64_t block = 0; block < blocks; block++) {
                uint8_t q[16];
                scales[block * kKvBlockSize] = quantize_q4_0(k + block * 32, q);
                for (int i = 0; i < 16; i++) keys[(block * 16 + i) * kKvBlockSize + slot] = q[i];
            }
            break;
    }
}

void store_value(const KvLayer& kv, int kv_block, int slot, int head, const float* v) {
    const int64_t slab = int64_t(kv_block) * kv.n_head_kv + head, blocks = kv.head_dim_v / 32;
    const int stride = kv.value_stride();
    uint8_t* const row = kv.v + slab * kv.v_slab_bytes() + slot * (kv.v_slab_bytes() / kKvBlockSize);
    uint16_t* const scales = kv.v_scale + slab * blocks * kKvBlockSize;
    switch (kv.v_type) {
        case KvType::F32:
            for (int c = 0; c < stride; c++)
                reinterpret_cast<float*>(row)[c] = c < kv.head_dim_v ? v[c] : 0.0f;
            break;
        case KvType::F16:
            for (int c = 0; c < stride; c += 16)
                V::load_n(v + c, imin(kv.head_dim_v - c, 16)).store_f16(reinterpret_cast<uint16_t*>(row) + c);
            break;
        case KvType::Q8_0:
            for (int64_t block = 0; block < blocks; block++)
                scales[slot * blocks + block] =
                    quantize_q8_0(v + block * 32, reinterpret_cast<int8_t*>(row) + block * 32);
            break;
        case KvType::Q4_0:
            for (int64_t block = 0; block < blocks; block++)
                scales[block * kKvBlockSize + slot] = quantize_q4_0(v + block * 32, row + block * 16);
            break;
    }
}

// Butterflies of increasing distance; the short distances are within lanes.
void hadamard(int64_t n, int width, float* x) {
    const V scale = V::set(1.0f / sqrtf(float(width)));
    for (int64_t block = 0; block < n; block += width) {
        float* const of = x + block;
        for (int apart = 1; apart < 16; apart *= 2)
            for (int i = 0; i < width; i += 2 * apart)
                for (int j = i; j < i + apart; j++) {
                    const float a = of[j], b = of[j + apart];
                    of[j] = a + b, of[j + apart] = a - b;
                }
        for (int apart = 16; apart < width; apart *= 2)
            for (int i = 0; i < width; i += 2 * apart)
                for (int j = i; j < i + apart; j += 16) {
                    const V a = V::load(of + j), b = V::load(of + j + apart);
                    (a + b).store(of + j), (a - b).store(of + j + apart);
                }
        for (int i = 0; i < width; i += 16) (V::load(of + i) * scale).store(of + i);
    }
}

// C vectors of columns; the last has only `rest` lanes.
template <int C>
inline void delta_columns(int dim_k, int dim_v, const float* q, const float* k, const float* v, V decay,
                          V beta, int rest, float* state, float* out) {
    auto load = [&](const float* p, int c) {
        return c + 1 < C || rest == 16 ? V::load(p + c * 16) : V::load_n(p + c * 16, rest);
    };
    auto store = [&](V value, float* p, int c) {
        c + 1 < C || rest == 16 ? value.store(p + c * 16) : value.store_n(p + c * 16, rest);
    };
    V sums[C], d[C];
    for (int c = 0; c < C; c++) sums[c] = V::zero();
    for (int i = 0; i < dim_k; i++)
        for (int c = 0; c < C; c++)
            sums[c] = fma(V::set(k[i]), load(state + int64_t(i) * dim_v, c) * decay, sums[c]);
    for (int c = 0; c < C; c++) {
        d[c] = (load(v, c) - sums[c]) * beta;
        sums[c] = V::zero();
    }
    for (int i = 0; i < dim_k; i++)
        for (int c = 0; c < C; c++) {
            float* row = state + int64_t(i) * dim_v;
            const V value = fma(V::set(k[i]), d[c], load(row, c) * decay);
            store(value, row, c);
            sums[c] = fma(V::set(q[i]), value, sums[c]);
        }
    for (int c = 0; c < C; c++) store(sums[c], out, c);
}

void delta_rule(int dim_k, int dim_v, const float* q, const float* k, const float* v, float decay, float beta,
                float* state, float* out) {
    const V g = V::set(decay), b = V::set(beta);
    int c = 0;
    for (; c + 64 <= dim_v; c += 64)
        delta_columns<4>(dim_k, dim_v, q, k, v + c, g, b, 16, state + c, out + c);
    for (; c < dim_v; c += 16)
        delta_columns<1>(dim_k, dim_v, q, k, v + c, g, b, imin(dim_v - c, 16), state + c, out + c);
}

// C vectors of columns; the last has only `rest` lanes.
template <int C>
inline void scan_columns(int dim_k, int dim_v, const float* b, const float* c, const float* x, V decay,
                         int rest, float* state, float* out) {
    auto load = [&](const float* p, int i) {
        return i + 1 < C || rest == 16 ? V::load(p + i * 16) : V::load_n(p + i * 16, rest);
    };
    auto store = [&](V value, float* p, int i) {
        i + 1 < C || rest == 16 ? value.store(p + i * 16) : value.store_n(p + i * 16, rest);
    };
    V sums[C], added[C];
    for (int i = 0; i < C; i++) sums[i] = V::zero(), added[i] = load(x, i);
    for (int row = 0; row < dim_k; row++)
        for (int i = 0; i < C; i++) {
            float* at = state + int64_t(row) * dim_v;
            const V value = fma(V::set(b[row]), added[i], load(at, i) * decay);
            store(value, at, i);
            sums[i] = fma(V::set(c[row]), value, sums[i]);
        }
    for (int i = 0; i < C; i++) store(sums[i], out, i);
}

void selective_scan(int dim_k, int dim_v, const float* b, const float* c, const float* x, float decay,
                    float* state, float* out) {
    const V by = V::set(decay);
    int i = 0;
    for (; i + 64 <= dim_v; i += 64) scan_columns<4>(dim_k, dim_v, b, c, x + i, by, 16, state + i, out + i);
    for (; i < dim_v; i += 16)
        scan_columns<1>(dim_k, dim_v, b, c, x + i, by, imin(dim_v - i, 16), state + i, out + i);
}

void channel_scan(int dim_k, int dim_v, const float* b, const float* c, const float* x, const float* dt,
                  const float* rate, float* state, float* out) {
    for_lanes(dim_v, [&](int64_t i, int n) {
        const V step = V::load_n(dt + i, n), added = step * V::load_n(x + i, n);
        V total = V::zero();
        for (int row = 0; row < dim_k; row++) {
            const int64_t at = int64_t(row) * dim_v + i;
            const V decay = exp(V::load_n(rate + at, n) * step);
            const V value = fma(V::set(b[row]), added, V::load_n(state + at, n) * decay);
            value.store_n(state + at, n);
            total = fma(V::set(c[row]), value, total);
        }
        total.store_n(out + i, n);
    });
}

// C vectors of columns; the last has only `rest` lanes.
template <int C>
inline void wkv_columns(int dim_k, int dim_v, const float* r, const float* w, const float* k, const float* v,
                        const float* a, const float* b, int rest, float* state, float* out) {
    auto load = [&](const float* p, int c) {
        return c + 1 < C || rest == 16 ? V::load(p + c * 16) : V::load_n(p + c * 16, rest);
    };
    auto store = [&](V value, float* p, int c) {
        c + 1 < C || rest == 16 ? value.store(p + c * 16) : value.store_n(p + c * 16, rest);
    };
    V sums[C], added[C], corrected[C];
    for (int c = 0; c < C; c++) sums[c] = corrected[c] = V::zero(), added[c] = load(v, c);
    if (a)
        for (int i = 0; i < dim_k; i++)
            for (int c = 0; c < C; c++)
                corrected[c] = fma(V::set(a[i]), load(state + int64_t(i) * dim_v, c), corrected[c]);
    for (int i = 0; i < dim_k; i++)
        for (int c = 0; c < C; c++) {
            float* at = state + int64_t(i) * dim_v;
            const V before = load(at, c);
            V value = before * V::set(w[i]);
            if (b) value = fma(V::set(b[i]), corrected[c], value);
            value = fma(V::set(k[i]), added[c], value);
            store(value, at, c);
            sums[c] = fma(V::set(r[i]), a ? value : before, sums[c]);
        }
    for (int c = 0; c < C; c++) store(sums[c], out, c);
}

void wkv(int dim_k, int dim_v, const float* r, const float* w, const float* k, const float* v, const float* a,
         const float* b, float* state, float* out) {
    int i = 0;
    for (; i + 64 <= dim_v; i += 64)
        wkv_columns<4>(dim_k, dim_v, r, w, k, v + i, a, b, 16, state + i, out + i);
    for (; i < dim_v; i += 16)
        wkv_columns<1>(dim_k, dim_v, r, w, k, v + i, a, b, imin(dim_v - i, 16), state + i, out + i);
}

float read(const float* x, int64_t n) {
    V top[4] = {V::zero(), V::zero(), V::zero(), V::zero()};
    for (int64_t i = 0; i < n; i += 64)
        for (int lane = 0; lane < 4; lane++) top[lane] = max(top[lane], V::load(x + i + 16 * lane));
    return max_lane(max(max(top[0], top[1]), max(top[2], top[3])));
}

inline Kernels float_kernel_table(const char* isa) {
    Kernels table = {};
    table.isa = isa;
    table.interleaved = kInterleaved;
    table.linear[int(Type::F32)] = float_linear<F32Weights, WholeTile>;
    table.linear[int(Type::F16)] = float_linear<F16Weights, WholeTile>;
    table.linear[int(Type::BF16)] = float_linear<BF16Weights, WholeTile>;
    table.quantize = quantize;
    table.rms_norm = rms_norm;
    table.layer_norm = layer_norm;
    table.gaussian_top_k = gaussian_top_k;
    table.softmax = softmax;
    table.exponentials = exponentials;
    table.weights = weights;
    table.activate = activate_row;
    table.xielu = xielu;
    table.gated = gated_row;
    table.add = add_row;
    table.multiply = multiply_row;
    table.attention = attention;
    table.merge_attention = merge_attention;
    table.index_scores = index_scores;
    table.store_key = store_key;
    table.store_value = store_value;
    table.hadamard = hadamard;
    table.delta_rule = delta_rule;
    table.selective_scan = selective_scan;
    table.channel_scan = channel_scan;
    table.wkv = wkv;
    table.read = read;
    return table;
}
