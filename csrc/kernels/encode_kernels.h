// Encoders from floats to blocks of every type that hotset writes. Included after float_kernels.h, inside the
// namespace of an instruction set. Layouts: blocks.h. All instruction sets give the same bytes.
//
// Round-to-nearest types give the bytes of GGML's reference quantisers. The reference finds the first largest
// value in one loop; here integer reductions do, which compilers vectorise. With an importance matrix, Q4_0,
// Q4_1, Q5_0 and Q5_1 are then fitted.
//
// K types are fitted: first the best of some trial scales per group of 16 or 32 by weighted least squares,
// then integer scales, then the codes for the scales as a reader will see them. A value's weight comes from
// an importance matrix; without it, it is the value's magnitude plus the group's root mean square, because
// errors of large weights cost more. Lanes are groups, so that no sum crosses lanes.

// Whether the first of the 32 values with the largest magnitude is negative; false if it is zero.
inline bool first_largest_is_negative(const float* x, uint32_t largest) {
    if (!largest) return false;
    uint32_t positive = 0, negative = 0;
    for (int i = 0; i < 32; i++) {
        const uint32_t bits = std::bit_cast<uint32_t>(x[i]);
        positive |= bits == largest;
        negative |= bits == (largest | ~kMagnitude);
    }
    if (!positive || !negative) return negative;
    for (int i = 0;; i++)
        if ((std::bit_cast<uint32_t>(x[i]) & kMagnitude) == largest)
            return std::bit_cast<uint32_t>(x[i]) > kMagnitude;
}

// Return 1 / d, or 0 if d is 0 or so small that 1 / d overflows (its f16 is then 0 as well).
inline float inverse_of(float d) {
    const float inverse = 1.0f / d;
    return (std::bit_cast<uint32_t>(inverse) & kMagnitude) < kInfinity ? inverse : 0.0f;
}

// Store a scale. Returns false if it is too large for f16.
inline bool store_half(float value, uint8_t* p) {
    const uint16_t half = f32_to_f16(value);
    std::memcpy(p, &half, 2);
    return (half & 0x7c00) != 0x7c00;
}

inline void pack_nibbles(const int32_t* q, uint8_t* p) {
    for (int i = 0; i < 16; i++) p[i] = uint8_t((q[i] & 15) | (q[i + 16] & 15) << 4);
}

inline void pack_fifth_bits(const int32_t* q, uint8_t* p) {
    uint32_t bits = 0;
    for (int i = 0; i < 32; i++) bits |= uint32_t(q[i] >> 4) << i;
    std::memcpy(p, &bits, 4);
}

// Q4_0 (kHalf = 8) and Q5_0 (16): the first value of the largest magnitude becomes -kHalf.
template <int kHalf>
inline bool encode_symmetric(const float* x, uint8_t* p) {
    const uint32_t largest = largest_bits(x, 32);
    if (largest >= kInfinity) return false;
    const float magnitude = std::bit_cast<float>(largest);
    const float d = (first_largest_is_negative(x, largest) ? -magnitude : magnitude) / -float(kHalf);
    const float inverse = inverse_of(d);
    int32_t q[32];
    for (int i = 0; i < 32; i++) {
        const int code = int(x[i] * inverse + (kHalf + 0.5f));
        q[i] = code < 2 * kHalf - 1 ? code : 2 * kHalf - 1;
    }
    if (kHalf == 16) pack_fifth_bits(q, p + 2);
    pack_nibbles(q, p + (kHalf == 16 ? 6 : 2));
    return store_half(d, p);
}

// Q4_1 (kLast = 15) and Q5_1 (31): the minimum becomes 0 and the maximum kLast.
template <int kLast>
inline bool encode_affine(const float* x, uint8_t* p) {
    if (largest_bits(x, 32) >= kInfinity) return false;
    const V first = V::load(x), second = V::load(x + 16);
    const float high = max_lane(max(first, second));
    float low = -max_lane(V::zero() - min(first, second));
    if (low == 0.0f)  // the reference keeps the sign of the first zero
        for (int i = 31; i >= 0; i--) {
            const uint32_t bits = std::bit_cast<uint32_t>(x[i]);
            if (!(bits & kMagnitude)) low = std::bit_cast<float>(bits);
        }
    const float d = (high - low) / float(kLast) + 0.0f;  // +0 if all values are zeros of either sign
    const float inverse = inverse_of(d);
    int32_t q[32];
    for (int i = 0; i < 32; i++) {
        const int code = int((x[i] - low) * inverse + 0.5f);
        q[i] = code < kLast ? code : kLast;
    }
    if (kLast == 31) pack_fifth_bits(q, p + 4);
    pack_nibbles(q, p + (kLast == 31 ? 8 : 4));
    return store_half(d, p) && store_half(low, p + 2);
}

// Fits 32 values by d * q + m with integers q in [first, last]. w: the weight of each value's error.
struct Line {
    const float *x, *w;
    float first, last;
    bool has_minimum;  // if false, m is 0

    V codes(int i, float d, float m) const {
        const V q = (V::load(x + i) - V::set(m)) * V::set(inverse_of(d));
        return min(max(round(q), V::set(first)), V::set(last));
    }
    float error(float d, float m) const {
        V total = V::zero();
        for (int i = 0; i < 32; i += 16) {
            const V miss = V::load(x + i) - V::set(m) - V::set(d) * codes(i, d, m);
            total = fma(V::load(w + i) * miss, miss, total);
        }
        return sum(total);
    }
    // Move d and m to the least squares for their codes.
    void refine(float& d, float& m) const {
        V sums[5] = {V::zero(), V::zero(), V::zero(), V::zero(), V::zero()};
        for (int i = 0; i < 32; i += 16) {
            const V v = V::load(x + i), weight = V::load(w + i), q = codes(i, d, m);
            sums[0] = sums[0] + weight, sums[1] = fma(weight, v, sums[1]), sums[2] = fma(weight, q, sums[2]);
            sums[3] = fma(weight * q, q, sums[3]), sums[4] = fma(weight * q, v, sums[4]);
        }
        const float one = sum(sums[0]), v = sum(sums[1]), q = sum(sums[2]);
        const float qq = sum(sums[3]), qv = sum(sums[4]);
        const float determinant = one * qq - q * q;
        if (!has_minimum && qq > 0.0f) d = qv / qq;
        if (has_minimum && determinant > 0.0f)
            d = (one * qv - q * v) / determinant, m = (qq * v - q * qv) / determinant;
    }
};

// Reduce the weighted error of the block at p, which was rounded to nearest. Tries scales near its d, moves
// each to least squares, and keeps the stored header with the least error. kFirst, kLast: the range of the
// codes.
template <int kFirst, int kLast, bool kMinimum>
inline void refit(const float* x, const float* w, uint8_t* p) {
    constexpr int kTrials = 21, kTurns = 3, kHeader = kMinimum ? 4 : 2;
    constexpr bool kFiveBits = kLast - kFirst == 31;
    constexpr float kEnd = float(kMinimum ? kLast : -kFirst);  // the code of the largest value
    const Line line = {x, w, float(kFirst), float(kLast), kMinimum};
    const float nearest = load_f16(p), low = kMinimum ? load_f16(p + 2) : 0.0f;
    float least = line.error(nearest, low);
    for (int trial = 0; trial < kTrials; trial++) {
        float d = nearest * kEnd / (kEnd + 0.1f * float(trial - kTrials / 2)), m = low;
        uint8_t header[4];
        for (int turn = 0; turn < kTurns; turn++) {
            line.refine(d, m);
            if (!store_half(d, header) || !store_half(m, header + 2)) break;
            const float found = line.error(load_f16(header), load_f16(header + 2));
            if (found < least) least = found, std::memcpy(p, header, kHeader);
        }
    }
    alignas(64) int8_t codes[32];
    const float d = load_f16(p), m = kMinimum ? load_f16(p + 2) : 0.0f;
    for (int i = 0; i < 32; i += 16) line.codes(i, d, m).store_i8(codes + i);
    int32_t q[32];
    for (int i = 0; i < 32; i++) q[i] = codes[i] - kFirst;
    if (kFiveBits) pack_fifth_bits(q, p + kHeader);
    pack_nibbles(q, p + kHeader + (kFiveBits ? 4 : 0));
}

// Fit the block if there is importance, unless all of it is zero.
template <int kHalf>
inline bool encode_symmetric(const float* x, const float* importance, uint8_t* p) {
    if (!encode_symmetric<kHalf>(x, p)) return false;
    if (importance && largest_bits(importance, 32)) refit<-kHalf, kHalf - 1, false>(x, importance, p);
    return true;
}
template <int kLast>
inline bool encode_affine(const float* x, const float* importance, uint8_t* p) {
    if (!encode_affine<kLast>(x, p)) return false;
    if (importance && largest_bits(importance, 32)) refit<0, kLast, true>(x, importance, p);
    return true;
}

inline bool encode_q8_0(const float* x, uint8_t* p) {
    const uint32_t largest = largest_bits(x, 32);
    if (largest >= kInfinity) return false;
    const float d = std::bit_cast<float>(largest) / 127.0f;
    const float inverse = inverse_of(d);
    for (int i = 0; i < 32; i++) {  // halves away from zero, unlike int(v + 0.5f) for 0.49999997f
        const float scaled = x[i] * inverse;
        const int whole = int(scaled);
        p[2 + i] = uint8_t(whole + int(2.0f * (scaled - float(whole))));
    }
    return store_half(d, p);
}

// The largest magnitude gets the largest power of two, and each value the nearest number.
inline bool encode_mxfp4(const float* x, uint8_t* p) {
    const uint32_t largest = largest_bits(x, 32);
    if (largest >= kInfinity) return false;
    p[0] = uint8_t(largest >> 23 > 2 ? (largest >> 23) - 2 : 0);
    const float unit = half_of_e8m0(p[0]);
    float least[32];
    int32_t q[32] = {};
    for (int i = 0; i < 32; i++) least[i] = fabsf(x[i]);
    for (int k = 1; k < 16; k++) {
        const float value = float(kFp4Values[k]) * unit;
        for (int i = 0; i < 32; i++) {
            const float error = fabsf(value - x[i]);
            const bool nearer = error < least[i];
            q[i] = nearer ? k : q[i];
            least[i] = nearer ? error : least[i];
        }
    }
    pack_nibbles(q, p + 1);
    return true;
}

// Encode 256 values as 0, 1 or 2: minus the largest magnitude, zero, that magnitude.
inline bool ternary_digits(const float* x, uint8_t* d, uint8_t* digits) {
    const uint32_t largest = largest_bits(x, 256);
    if (largest >= kInfinity) return false;
    const float magnitude = std::bit_cast<float>(largest), inverse = inverse_of(magnitude);
    for (int i = 0; i < 256; i++) {  // round half away from zero
        const float scaled = x[i] * inverse;
        const int whole = int(scaled);
        digits[i] = uint8_t(whole + int(2.0f * (scaled - float(whole))) + 1);
    }
    return store_half(magnitude, d);
}

inline bool encode_tq1_0(const float* x, uint8_t* p) {
    uint8_t digits[256];
    if (!ternary_digits(x, p + 52, digits)) return false;
    // Pack `count` bytes, each a fraction of 256 that holds `places` digits, `count` apart.
    auto pack = [&p](const uint8_t* from, int count, int places) {
        for (int i = 0; i < count; i++) {
            int number = 0;
            for (int k = 0; k < 5; k++) number = 3 * number + (k < places ? from[count * k + i] : 0);
            *p++ = uint8_t((number * 256 + 242) / 243);
        }
    };
    pack(digits, 32, 5);
    pack(digits + 160, 16, 5);
    pack(digits + 240, 4, 4);
    return true;
}

inline bool encode_tq2_0(const float* x, uint8_t* p) {
    uint8_t digits[256];
    if (!ternary_digits(x, p + 64, digits)) return false;
    for (int h = 0; h < 2; h++)
        for (int j = 0; j < 32; j++) {
            const uint8_t* from = digits + 128 * h + j;
            p[32 * h + j] = uint8_t(from[0] | from[32] << 2 | from[64] << 4 | from[96] << 6);
        }
    return true;
}

// ---- K types

// 256 weights in lanes: lane l of step i is weight i of the l-th 16 weights.
struct Groups {
    alignas(64) float x[16][16];
    alignas(64) float w[16][16];          // importance
    alignas(64) float low[16], high[16];  // of the lane's group
    int lanes;                            // lanes per group: 1 or 2

    Groups(const float* values, const float* importance, int group) : lanes(group / 16) {
        for (int l = 0; l < 16; l++)
            for (int i = 0; i < 16; i++) x[i][l] = values[16 * l + i];
        V lowest = V::load(x[0]), highest = lowest, squares = V::zero();
        for (int i = 0; i < 16; i++) {
            const V v = V::load(x[i]);
            lowest = min(lowest, v), highest = max(highest, v), squares = fma(v, v, squares);
        }
        alignas(64) float sum[16];
        lowest.store(low), highest.store(high), squares.store(sum);
        if (lanes == 2)
            for (int l = 0; l < 16; l += 2) {
                low[l] = low[l + 1] = low[l] < low[l + 1] ? low[l] : low[l + 1];
                high[l] = high[l + 1] = high[l] > high[l + 1] ? high[l] : high[l + 1];
                sum[l] = sum[l + 1] = sum[l] + sum[l + 1];
            }
        for (int l = 0; l < 16; l++) sum[l] = sqrtf(sum[l] / float(16 * lanes));
        const V rms = V::load(sum);
        for (int i = 0; i < 16; i++) (rms + abs(V::load(x[i]))).store(w[i]);
        if (importance) weigh(importance);
    }

    // Use importance as weights, except in groups whose importance is all zero.
    void weigh(const float* importance) {
        for (int l = 0; l < 16; l++) {
            const float* of_group = importance + 16 * (l / lanes * lanes);
            if (!largest_bits(of_group, 16 * lanes)) continue;
            for (int i = 0; i < 16; i++) w[i][l] = importance[16 * l + i];
        }
    }
};

inline V clamp(V v, float low, float high) {
    return min(max(v, V::set(low)), V::set(high));
}

constexpr int kTrials = 20;

// Find a scale for each of 16 groups: x is nearly scale * q with q in [-half, half).
inline void fit_scales(const Groups& groups, int half, float* scale) {
    alignas(64) float largest[16], inverse[16], xq[16], qq[16];
    float best[16] = {};
    for (int l = 0; l < 16; l++) {
        largest[l] = -groups.low[l] > groups.high[l] ? groups.low[l] : groups.high[l];
        scale[l] = 0.0f;
    }
    for (int trial = 0; trial < kTrials; trial++) {  // the largest becomes -(half - 1) to -(half + 0.9)
        const float to = -(float(half) - 1.0f + 0.1f * float(trial));
        for (int l = 0; l < 16; l++) inverse[l] = inverse_of(largest[l] / to);
        V sum_xq = V::zero(), sum_qq = V::zero();
        for (int i = 0; i < 16; i++) {
            const V x = V::load(groups.x[i]), w = V::load(groups.w[i]);
            const V q = clamp(round(x * V::load(inverse)), -float(half), float(half - 1));
            sum_xq = fma(w * x, q, sum_xq), sum_qq = fma(w * q, q, sum_qq);
        }
        sum_xq.store(xq), sum_qq.store(qq);
        for (int l = 0; l < 16; l++) {  // the error is sum w x x - xq^2 / qq
            const float gain = qq[l] > 0.0f ? xq[l] * (xq[l] / qq[l]) : 0.0f;
            if (gain > best[l]) best[l] = gain, scale[l] = xq[l] / qq[l];
        }
    }
}

// Find a scale and a minimum for each group of one or two lanes: x is nearly scale * q - minimum with q in
// [0, last]; both are at least zero.
inline void fit_scales_and_minimums(const Groups& groups, int last, float* scale, float* minimum) {
    const int n = 16 / groups.lanes;
    alignas(64) float base[16], inverse[16], sums[5][16];
    V total_w = V::zero(), total_x = V::zero();
    for (int i = 0; i < 16; i++) {
        const V w = V::load(groups.w[i]);
        total_w = total_w + w, total_x = fma(w, V::load(groups.x[i]), total_x);
    }
    total_w.store(sums[0]), total_x.store(sums[1]);
    for (int l = 0; l < 16; l++) base[l] = groups.low[l] < 0.0f ? groups.low[l] : 0.0f;
    // A group without spread is its minimum.
    float best[16];
    for (int g = 0; g < n; g++) scale[g] = 0.0f, minimum[g] = -base[g * groups.lanes], best[g] = INFINITY;
    for (int trial = 0; trial < kTrials; trial++) {  // the maximum becomes last - 1 to last + 0.9
        const float to = float(last) - 1.0f + 0.1f * float(trial);
        for (int l = 0; l < 16; l++) inverse[l] = inverse_of((groups.high[l] - base[l]) / to);
        V sum_q = V::zero(), sum_qq = V::zero(), sum_xq = V::zero();
        const V b = V::load(base), inv = V::load(inverse);
        for (int i = 0; i < 16; i++) {
            const V x = V::load(groups.x[i]), w = V::load(groups.w[i]);
            const V q = clamp(round((x - b) * inv), 0.0f, float(last));
            const V wq = w * q;
            sum_q = sum_q + wq, sum_qq = fma(wq, q, sum_qq), sum_xq = fma(wq, x, sum_xq);
        }
        sum_q.store(sums[2]), sum_qq.store(sums[3]), sum_xq.store(sums[4]);
        for (int g = 0; g < n; g++) {
            float s[5];
            for (int k = 0; k < 5; k++)
                s[k] = groups.lanes == 2 ? sums[k][2 * g] + sums[k][2 * g + 1] : sums[k][g];
            const auto [w, x, q, qq, xq] = s;
            if (!(qq > 0.0f)) continue;
            const float determinant = w * qq - q * q;
            float slope = xq / qq, offset = 0.0f;
            if (determinant > 0.0f && (qq * x - q * xq) / determinant < 0.0f)
                slope = (w * xq - x * q) / determinant, offset = (qq * x - q * xq) / determinant;
            // Without sum w x x, which is the same for all trials.
            const float error =
                slope * (slope * qq - 2.0f * xq) + offset * (offset * w - 2.0f * x + 2.0f * slope * q);
            if (slope > 0.0f && error < best[g]) best[g] = error, scale[g] = slope, minimum[g] = -offset;
        }
    }
}

// Compute the codes of n values: round((x + minimum) / scale), clamped to [low, high].
inline void fill_codes(const float* x, int n, float scale, float minimum, int low, int high, int8_t* q) {
    const V inverse = V::set(inverse_of(scale)), m = V::set(minimum);
    for (int i = 0; i < n; i += 16)
        clamp(round((V::load(x + i) + m) * inverse), float(low), float(high)).store_i8(q + i);
}

inline int to_integer(float value, float unit, int low, int high) {
    const int i = int(nearbyintf(value * inverse_of(unit)));
    return i < low ? low : i > high ? high : i;
}

// Encode sixteen scales as integers in [-half, half) times one f16, and codes in [-codes, codes).
inline bool encode_signed_groups(const float* x, const float* importance, int half, int codes, uint8_t* d,
                                 int* integers, int8_t* q) {
    alignas(64) float scale[16];
    fit_scales(Groups(x, importance, 16), codes, scale);
    float largest = 0.0f;
    for (float s : scale)
        if (fabsf(s) > fabsf(largest)) largest = s;
    if (!store_half(largest / -float(half), d)) return false;
    const float unit = load_f16(d);
    for (int g = 0; g < 16; g++) {
        integers[g] = to_integer(scale[g], unit, -half, half - 1);
        fill_codes(x + 16 * g, 16, unit * float(integers[g]), 0.0f, -codes, codes - 1, q + 16 * g);
    }
    return true;
}

// Compute each group's error for its scale and minimum.
inline void affine_errors(const Groups& groups, int last, const float* scale, const float* minimum,
                          float* out) {
    alignas(64) float inverse[16], sums[16];
    for (int l = 0; l < 16; l++) inverse[l] = inverse_of(scale[l]);
    const V s = V::load(scale), m = V::load(minimum), inv = V::load(inverse);
    V total = V::zero();
    for (int i = 0; i < 16; i++) {
        const V x = V::load(groups.x[i]) + m;
        const V miss = x - s * clamp(round(x * inv), 0.0f, float(last));
        total = fma(V::load(groups.w[i]) * miss, miss, total);
    }
    total.store(sums);
    for (int g = 0; g < 16 / groups.lanes; g++)
        out[g] = groups.lanes == 2 ? sums[2 * g] + sums[2 * g + 1] : sums[g];
}

// Choose integers (nearest or adjacent) for scales and minimums; return the least total error.
inline float choose_integers(const Groups& groups, int largest, int last, const uint8_t* d,
                             const float* scale, const float* minimum, int* scales, int* mins) {
    const int n = 16 / groups.lanes;
    const float unit = load_f16(d), min_unit = load_f16(d + 2);
    float least[16], found[16], total = 0.0f;
    for (int g = 0; g < n; g++) least[g] = INFINITY;
    for (int step = 0; step < 9; step++) {
        alignas(64) float s[16], m[16];
        int ints[16], min_ints[16];
        for (int g = 0; g < n; g++) {
            ints[g] = to_integer(scale[g] + unit * float(step % 3 - 1), unit, 0, largest);
            min_ints[g] = to_integer(minimum[g] + min_unit * float(step / 3 - 1), min_unit, 0, largest);
            for (int l = g * groups.lanes; l < (g + 1) * groups.lanes; l++)
                s[l] = unit * float(ints[g]), m[l] = min_unit * float(min_ints[g]);
        }
        affine_errors(groups, last, s, m, found);
        for (int g = 0; g < n; g++)
            if (found[g] < least[g]) least[g] = found[g], scales[g] = ints[g], mins[g] = min_ints[g];
    }
    for (int g = 0; g < n; g++) total += least[g];
    return total;
}

// Refit the two units for these codes and integers, and keep them if the error decreases.
inline void refit_units(const Groups& groups, int largest, int last, uint8_t* d, const float* scale,
                        const float* minimum, int* scales, int* mins) {
    float error = choose_integers(groups, largest, last, d, scale, minimum, scales, mins);
    for (int turn = 0; turn < 3; turn++) {
        const float unit = load_f16(d), min_unit = load_f16(d + 2);
        float aa = 0.0f, ab = 0.0f, bb = 0.0f, ax = 0.0f, bx = 0.0f;
        for (int l = 0; l < 16; l++) {
            const int g = l / groups.lanes;
            const float s = float(scales[g]), m = float(mins[g]), inverse = inverse_of(unit * s);
            for (int i = 0; i < 16; i++) {
                const float x = groups.x[i][l], w = groups.w[i][l];
                const float code = nearbyintf((x + min_unit * m) * inverse);
                const float a = s * (code < 0.0f ? 0.0f : code > float(last) ? float(last) : code);
                aa += w * a * a, ab += w * a * m, bb += w * m * m, ax += w * a * x, bx += w * m * x;
            }
        }
        const float determinant = aa * bb - ab * ab;
        float a = aa > 0.0f ? ax / aa : 0.0f, b = 0.0f;
        if (determinant > 0.0f) a = (ax * bb - bx * ab) / determinant, b = (ax * ab - bx * aa) / determinant;
        uint8_t other[4];
        int ints[16], min_ints[16];
        if (!(a > 0.0f && b >= 0.0f) || !store_half(a, other) || !store_half(b, other + 2)) return;
        const float found = choose_integers(groups, largest, last, other, scale, minimum, ints, min_ints);
        if (!(found < error)) return;
        error = found;
        std::memcpy(d, other, 4);
        std::copy(ints, ints + 16 / groups.lanes, scales);
        std::copy(min_ints, min_ints + 16 / groups.lanes, mins);
    }
}

// Encode scales and minimums as integers in [0, largest] times two f16, and codes in [0, last].
inline bool encode_affine_groups(const float* x, const float* importance, int group, int largest, int last,
                                 uint8_t* d, int* scales, int* mins, int8_t* q) {
    alignas(64) float scale[16], minimum[16];
    const Groups groups(x, importance, group);
    fit_scales_and_minimums(groups, last, scale, minimum);
    float top_scale = 0.0f, top_min = 0.0f;
    for (int g = 0; g < 256 / group; g++) {
        top_scale = scale[g] > top_scale ? scale[g] : top_scale;
        top_min = minimum[g] > top_min ? minimum[g] : top_min;
    }
    if (!store_half(top_scale / float(largest), d) || !store_half(top_min / float(largest), d + 2))
        return false;
    const float unit = load_f16(d), min_unit = load_f16(d + 2);
    for (int g = 0; g < 256 / group; g++) {
        scales[g] = to_integer(scale[g], unit, 0, largest);
        mins[g] = to_integer(minimum[g], min_unit, 0, largest);
    }
    if (importance) refit_units(groups, largest, last, d, scale, minimum, scales, mins);
    for (int g = 0; g < 256 / group; g++)
        fill_codes(x + g * group, group, load_f16(d) * float(scales[g]), load_f16(d + 2) * float(mins[g]), 0,
                   last, q + g * group);
    return true;
}

// Pack the two-bit planes of Q2_K and Q3_K.
inline void pack_two_bits(const int8_t* q, uint8_t* p) {
    for (int h = 0; h < 2; h++)
        for (int j = 0; j < 32; j++) {
            const int8_t* from = q + 128 * h + j;
            p[32 * h + j] =
                uint8_t((from[0] & 3) | (from[32] & 3) << 2 | (from[64] & 3) << 4 | (from[96] & 3) << 6);
        }
}

inline bool encode_q2_k(const float* x, const float* importance, uint8_t* p) {
    int scales[16], mins[16];
    int8_t q[256];
    if (!encode_affine_groups(x, importance, 16, 15, 3, p + 80, scales, mins, q)) return false;
    for (int g = 0; g < 16; g++) p[g] = uint8_t(scales[g] | mins[g] << 4);
    pack_two_bits(q, p + 16);
    return true;
}

inline bool encode_q3_k(const float* x, const float* importance, uint8_t* p) {
    int scales[16];
    int8_t q[256];
    if (!encode_signed_groups(x, importance, 32, 4, p + 108, scales, q)) return false;
    std::memset(p, 0, 32);
    for (int i = 0; i < 256; i++) {
        p[i % 32] |= uint8_t((q[i] >= 0) << (i / 32));
        q[i] = int8_t((q[i] + 4) & 3);
    }
    pack_two_bits(q, p + 32);
    std::memset(p + 96, 0, 12);
    for (int g = 0; g < 16; g++) {
        const int s = scales[g] + 32;
        p[96 + g % 8] |= uint8_t((s & 15) << (g / 8 * 4));
        p[104 + g % 4] |= uint8_t((s >> 4) << (g / 4 * 2));
    }
    return true;
}

// Q4_K and Q5_K: the inverse of unpack_scale_min.
inline void pack_scales_mins(const int* scales, const int* mins, uint8_t* p) {
    for (int i = 0; i < 4; i++) {
        p[i] = uint8_t(scales[i] | (scales[i + 4] >> 4) << 6);
        p[4 + i] = uint8_t(mins[i] | (mins[i + 4] >> 4) << 6);
        p[8 + i] = uint8_t((scales[i + 4] & 15) | (mins[i + 4] & 15) << 4);
    }
}

template <int kLast>  // 15: Q4_K, 31: Q5_K
inline bool encode_q45_k(const float* x, const float* importance, uint8_t* p) {
    int scales[8], mins[8];
    int8_t q[256];
    if (!encode_affine_groups(x, importance, 32, 63, kLast, p, scales, mins, q)) return false;
    pack_scales_mins(scales, mins, p + 4);
    if (kLast == 31)
        for (int j = 0; j < 32; j++) {
            int bits = 0;
            for (int g = 0; g < 8; g++) bits |= (q[32 * g + j] >> 4) << g;
            p[16 + j] = uint8_t(bits);
        }
    uint8_t* codes = p + (kLast == 31 ? 48 : 16);
    for (int pair = 0; pair < 4; pair++)
        for (int j = 0; j < 32; j++)
            codes[32 * pair + j] = uint8_t((q[64 * pair + j] & 15) | (q[64 * pair + 32 + j] & 15) << 4);
    return true;
}

inline bool encode_q6_k(const float* x, const float* importance, uint8_t* p) {
    int scales[16];
    int8_t q[256];
    if (!encode_signed_groups(x, importance, 128, 32, p + 208, scales, q)) return false;
    for (int g = 0; g < 16; g++) p[192 + g] = uint8_t(scales[g]);
    for (int i = 0; i < 256; i++) q[i] = int8_t(q[i] + 32);
    for (int h = 0; h < 2; h++) {
        const int8_t* from = q + 128 * h;
        for (int j = 0; j < 64; j++) p[64 * h + j] = uint8_t((from[j] & 15) | (from[64 + j] & 15) << 4);
        for (int j = 0; j < 32; j++)
            p[128 + 32 * h + j] = uint8_t(from[j] >> 4 | (from[32 + j] >> 4) << 2 | (from[64 + j] >> 4) << 4 |
                                          (from[96 + j] >> 4) << 6);
    }
    return true;
}

// ---- rows

template <Type kType, bool (*kBlock)(const float*, uint8_t*)>
bool encode_blocks(const float* x, const float*, int64_t n, uint8_t* out) {
    constexpr TypeFacts facts = type_facts(kType);
    for (int64_t i = 0; i < n; i += facts.block_size, out += facts.block_bytes)
        if (!kBlock(x + i, out)) return false;
    return true;
}

// No fitted type reaches 1e9, and squares of smaller values do not overflow.
inline bool is_beyond_fitting(const float* x, int n) {
    return largest_bits(x, n) > std::bit_cast<uint32_t>(1e9f);
}

// Encode blocks of a fitted type.
template <Type kType, bool (*kBlock)(const float*, const float*, uint8_t*)>
bool encode_fitted(const float* x, const float* importance, int64_t n, uint8_t* out) {
    constexpr TypeFacts facts = type_facts(kType);
    for (int64_t i = 0; i < n; i += facts.block_size, out += facts.block_bytes) {
        if (is_beyond_fitting(x + i, facts.block_size)) return false;
        if (!kBlock(x + i, importance ? importance + i : nullptr, out)) return false;
    }
    return true;
}

inline bool encode_f32(const float* x, const float*, int64_t n, uint8_t* out) {
    std::memcpy(out, x, size_t(n) * 4);
    return true;
}

inline bool encode_f16(const float* x, const float*, int64_t n, uint8_t* out) {
    uint32_t infinite = 0;
    for (int64_t i = 0; i < n; i += 16) {
        uint16_t half[16];
        const int m = n - i < 16 ? int(n - i) : 16;
        V::load_n(x + i, m).store_f16(half);
        for (uint16_t h : half) infinite |= (h & 0x7c00) == 0x7c00;
        std::memcpy(out + 2 * i, half, 2 * size_t(m));
    }
    return !infinite;
}

inline bool encode_bf16(const float* x, const float*, int64_t n, uint8_t* out) {
    for (int64_t i = 0; i < n; i++) {
        const uint32_t bits = std::bit_cast<uint32_t>(x[i]);
        const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        // Rounding a NaN could turn it into an infinity.
        const uint16_t half = uint16_t((bits & kMagnitude) > kInfinity ? bits >> 16 | 0x40 : rounded);
        std::memcpy(out + 2 * i, &half, 2);
    }
    return true;
}

inline void add_encoders(Kernels& table) {
    table.encode[int(Type::F32)] = encode_f32;
    table.encode[int(Type::F16)] = encode_f16;
    table.encode[int(Type::BF16)] = encode_bf16;
    table.encode[int(Type::Q4_0)] = encode_fitted<Type::Q4_0, encode_symmetric<8>>;
    table.encode[int(Type::Q5_0)] = encode_fitted<Type::Q5_0, encode_symmetric<16>>;
    table.encode[int(Type::Q4_1)] = encode_fitted<Type::Q4_1, encode_affine<15>>;
    table.encode[int(Type::Q5_1)] = encode_fitted<Type::Q5_1, encode_affine<31>>;
    table.encode[int(Type::Q8_0)] = encode_blocks<Type::Q8_0, encode_q8_0>;
    table.encode[int(Type::MXFP4)] = encode_blocks<Type::MXFP4, encode_mxfp4>;
    table.encode[int(Type::TQ1_0)] = encode_blocks<Type::TQ1_0, encode_tq1_0>;
    table.encode[int(Type::TQ2_0)] = encode_blocks<Type::TQ2_0, encode_tq2_0>;
    table.encode[int(Type::Q2_K)] = encode_fitted<Type::Q2_K, encode_q2_k>;
    table.encode[int(Type::Q3_K)] = encode_fitted<Type::Q3_K, encode_q3_k>;
    table.encode[int(Type::Q4_K)] = encode_fitted<Type::Q4_K, encode_q45_k<15>>;
    table.encode[int(Type::Q5_K)] = encode_fitted<Type::Q5_K, encode_q45_k<31>>;
    table.encode[int(Type::Q6_K)] = encode_fitted<Type::Q6_K, encode_q6_k>;
}
