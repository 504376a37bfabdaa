// Encoders of the IQ types, whose weights are codebook points times a scale. Included after encode_kernels.h,
// inside the namespace of an instruction set. Layouts: blocks.h.
//
// A sub-block of 16 or 32 weights has one scale e. Its error is the sum of w * (x - e * p)^2 with the best
// point p for each group, found by trying every point: only sum w x p and sum w p^2 of a group matter. An
// encoder first finds the best e of each sub-block among trials, then the unit d for which the stored scales
// (nearest or adjacent integers) give the least total error, and finally the points.

// Compute the weights of n values: their importance or, without it, magnitude plus root mean square.
inline void weigh_block(const float* x, const float* importance, int n, float* w) {
    if (importance && largest_bits(importance, n)) {
        std::memcpy(w, importance, size_t(n) * 4);
        return;
    }
    V squares = V::zero();
    for (int i = 0; i < n; i += 16) squares = fma(V::load(x + i), V::load(x + i), squares);
    const V rms = V::set(sqrtf(sum(squares) / float(n)));
    for (int i = 0; i < n; i += 16) (rms + abs(V::load(x + i))).store(w + i);
}

// Find the block's unit d, stored as f16, and the stored scales of n sub-blocks with the least error. best:
// the ideal scales. error(i, e): the error of sub-block i for scale e. Rule: kLast, the last of the stored
// scales 0, 1, ...; factor(s), a scale in units of d; nearest(e, d), the nearest s. Returns false if d is too
// large for f16.
template <class Rule, class Error>
inline bool choose_scales(const float* best, int n, const Error& error, uint8_t* d, int* scales) {
    constexpr int kUnits = 9;  // the largest scale is mapped to 0.8 to 1.2 times the largest factor
    float top = 0.0f, least = INFINITY;
    for (int i = 0; i < n; i++)
        if (fabsf(best[i]) > fabsf(top)) top = best[i];
    for (int trial = 0; trial < kUnits; trial++) {
        uint8_t half[2];
        if (!store_half(top / (Rule::kTop * (0.8f + 0.05f * float(trial))), half)) continue;
        const float unit = load_f16(half);
        float total = 0.0f;
        int chosen[16] = {};
        for (int i = 0; i < n; i++) {
            const int near = Rule::nearest(best[i] * inverse_of(unit));
            float lowest = INFINITY;
            for (int s = near - 1; s <= near + 1; s++) {
                if (s < 0 || s > Rule::kLast) continue;
                const float e = error(i, unit * Rule::factor(s));
                if (e < lowest) lowest = e, chosen[i] = s;
            }
            total += lowest;
        }
        if (!(total < least)) continue;
        least = total;
        std::memcpy(d, half, 2);
        std::memcpy(scales, chosen, size_t(n) * sizeof(int));
    }
    return least < INFINITY;
}

inline int to_range(float value, int last) {
    const float rounded = nearbyintf(value);
    return rounded < 0.0f ? 0 : rounded > float(last) ? last : int(rounded);
}

// ---- lattices

// kCount points of kSize coordinates; each coordinate is contiguous over all points.
template <int kSize, int kCount>
struct Points {
    alignas(64) float coordinate[kSize][kCount];

    template <class Word, int kBook>
    explicit Points(const Codebook<Word, kBook>& book, float offset, float unit, float delta) {
        for (int k = 0; k < kCount; k++)
            for (int i = 0; i < kSize; i++) {
                const float value = (float(book[k % kBook] >> (8 * i) & 255) - offset) * unit;
                coordinate[i][k] = value + (k < kBook ? delta : -delta);
            }
    }
};

template <const auto& kBook, int kSize, int kCount>
const Points<kSize, kCount>& points_of() {
    static const Points<kSize, kCount> found(kBook, 0.0f, 1.0f, 0.0f);
    return found;
}
// IQ1's points with a delta of 1/8, then of -1/8: one of the two for a sub-block or, in IQ1_M, for a group.
template <>
inline const Points<8, 4096>& points_of<kIq1, 8, 4096>() {
    static const Points<8, 4096> found(kIq1, float(kIq1Zero + 1), 0.125f, 0.125f);
    return found;
}

// For one group of weights and every point p: -2 sum w x p, and sum w p^2.
template <int kCount>
struct Products {
    alignas(64) float xp[kCount];
    alignas(64) float pp[kCount];

    template <int kSize>
    void set(const Points<kSize, kCount>& points, const float* x, const float* w) {
        for (int k = 0; k < kCount; k += 16) {
            V a = V::zero(), b = V::zero();
            for (int i = 0; i < kSize; i++) {
                const V p = V::load(points.coordinate[i] + k);
                a = fma(V::set(-2.0f * w[i] * x[i]), p, a);
                b = fma(V::set(w[i]), p * p, b);
            }
            a.store(xp + k), b.store(pp + k);
        }
    }
    // Return the error of the best of the points [first, last), divided by e and without sum w x^2.
    float least(float e, int first, int last) const {
        V lowest = V::set(INFINITY);
        for (int k = first; k < last; k += 16)
            lowest = min(lowest, fma(V::set(e), V::load(pp + k), V::load(xp + k)));
        return -max_lane(V::zero() - lowest);
    }
    // Return that point, the first among equals.
    int find(float e, int first, int last) const {
        const float lowest = least(e, first, last);
        alignas(64) float error[16];
        for (int k = first; k < last; k += 16) {
            fma(V::set(e), V::load(pp + k), V::load(xp + k)).store(error);
            for (int i = 0; i < 16; i++)
                if (error[i] == lowest) return k + i;
        }
        return first;
    }
};

// The differences between lattices. kSub: weights per scale. kSigns: signs stored per eight weights: 8, 7
// with an even number of negative ones, or none. kVariants: codebooks, one chosen per sub-block.
enum class Signs { kNone, kSeven, kEight };

template <const auto& kBook, int kSize_, int kCount_, int kSub_, Signs kSigns_, int kLast_, int kUnit,
          int kVariants_ = 1>
struct Lattice {
    static constexpr int kSize = kSize_, kCount = kCount_, kSub = kSub_, kLast = kLast_;
    static constexpr int kVariants = kVariants_;
    static constexpr Signs kSigns = kSigns_;
    static constexpr float kTop = float(2 * kLast_ + 1) / float(kUnit);

    static float factor(int s) { return float(2 * s + 1) / float(kUnit); }
    static int nearest(float e) { return to_range((e * float(kUnit) - 1.0f) * 0.5f, kLast); }
    static const Points<kSize, kCount>& points() { return points_of<kBook, kSize, kCount>(); }
};

using Iq2Xxs = Lattice<kIq2Xxs, 8, 256, 32, Signs::kSeven, 15, 8>;
using Iq2Xs = Lattice<kIq2Xs, 8, 512, 16, Signs::kSeven, 15, 8>;
using Iq2S = Lattice<kIq2S, 8, 1024, 16, Signs::kEight, 15, 8>;
using Iq3Xxs = Lattice<kIq3Xxs, 4, 256, 32, Signs::kSeven, 15, 4>;
using Iq3S = Lattice<kIq3S, 4, 512, 32, Signs::kEight, 15, 1>;
using Iq1S = Lattice<kIq1, 8, 4096, 32, Signs::kNone, 7, 1, 2>;
using Iq1M = Lattice<kIq1, 8, 4096, 16, Signs::kNone, 7, 1>;

// A block during encoding. The layouts need `index`, `signs` and `scale`.
template <class L>
struct LatticeBlock {
    static constexpr int kGroups = 256 / L::kSize, kSubs = 256 / L::kSub, kOfSub = L::kSub / L::kSize;
    static constexpr int kOfVariant = L::kCount / L::kVariants;

    Products<L::kCount> products[kGroups];
    int index[kGroups];
    uint8_t signs[32];  // one bit per weight
    int scale[kSubs];

    bool fit(const float* x, const float* importance, uint8_t* d) {
        alignas(64) float w[256], magnitude[256], best[kSubs];
        weigh_block(x, importance, 256, w);
        take_signs(x, w, magnitude);
        for (int g = 0; g < kGroups; g++)
            products[g].set(L::points(), magnitude + g * L::kSize, w + g * L::kSize);
        for (int i = 0; i < kSubs; i++) best[i] = best_scale(x + i * L::kSub, i);
        const auto error = [this](int i, float e) { return this->error(i, e); };
        if (!choose_scales<L>(best, kSubs, error, d, scale)) return false;
        refit(d);
        for (int i = 0; i < kSubs; i++) find(i, load_f16(d) * L::factor(scale[i]));
        return true;
    }

  private:
    // Split off signs. For an even number of negative ones the least important sign may be wrong.
    void take_signs(const float* x, const float* w, float* magnitude) {
        for (int g = 0; g < 32; g++) {
            signs[g] = 0;
            int least = 0;
            for (int i = 8 * g; i < 8 * g + 8; i++) {
                const bool negative = L::kSigns != Signs::kNone && x[i] < 0.0f;
                signs[g] |= uint8_t(negative << (i % 8));
                magnitude[i] = negative ? -x[i] : x[i];
                if (w[i] * magnitude[i] < w[8 * g + least] * magnitude[8 * g + least]) least = i % 8;
            }
            if (L::kSigns == Signs::kSeven && std::popcount(signs[g]) % 2) {
                signs[g] ^= uint8_t(1 << least);
                magnitude[8 * g + least] = -magnitude[8 * g + least];
            }
        }
    }
    // Return the error of a sub-block for scale e, and the variant that gives it.
    float error(int sub, float e, int* variant = nullptr) const {
        float lowest = INFINITY;
        for (int v = 0; v < L::kVariants; v++) {
            float total = 0.0f;
            for (int g = sub * kOfSub; g < (sub + 1) * kOfSub; g++)
                total += products[g].least(e, v * kOfVariant, (v + 1) * kOfVariant);
            if (e * total < lowest) {
                lowest = e * total;
                if (variant) *variant = v;
            }
        }
        return lowest;
    }
    float best_scale(const float* x, int sub) const {
        constexpr int kSteps = 18;  // the largest magnitude is the largest coordinate / 0.3 to 1.15
        const float largest = std::bit_cast<float>(largest_bits(x, L::kSub));
        const auto& points = L::points();
        float best = 0.0f, lowest = 0.0f, reach = 0.0f;
        for (float c : points.coordinate[0]) reach = c > reach ? c : reach;
        for (int step = 0; step < kSteps; step++) {
            const float e = largest / reach * (0.3f + 0.05f * float(step)), found = error(sub, e);
            if (found < lowest) lowest = found, best = e;
        }
        return best;
    }
    void find(int sub, float e) {
        int variant = 0;
        error(sub, e, &variant);
        for (int g = sub * kOfSub; g < (sub + 1) * kOfSub; g++)
            index[g] = products[g].find(e, variant * kOfVariant, (variant + 1) * kOfVariant);
    }
    // Refit the unit for these scales and points, if the total error does not grow.
    void refit(uint8_t* d) {
        const float unit = load_f16(d);
        float xp = 0.0f, pp = 0.0f, before = 0.0f, after = 0.0f;
        for (int i = 0; i < kSubs; i++) {
            const float factor = L::factor(scale[i]);
            before += error(i, unit * factor);
            find(i, unit * factor);
            for (int g = i * kOfSub; g < (i + 1) * kOfSub; g++) {
                xp -= 0.5f * factor * products[g].xp[index[g]];
                pp += factor * factor * products[g].pp[index[g]];
            }
        }
        uint8_t half[2];
        if (!(pp > 0.0f) || !store_half(xp / pp, half)) return;
        for (int i = 0; i < kSubs; i++) after += error(i, load_f16(half) * L::factor(scale[i]));
        if (after < before) std::memcpy(d, half, 2);
    }
};

inline void store_u16(uint8_t* p, uint32_t value) {
    p[0] = uint8_t(value), p[1] = uint8_t(value >> 8);
}

// Store four times seven signs, and a scale of four bits.
inline void pack_signs_and_scale(const uint8_t* signs, int scale, uint8_t* p) {
    uint32_t bits = uint32_t(scale) << 28;
    for (int l = 0; l < 4; l++) bits |= uint32_t(signs[l] & 127) << (7 * l);
    store_u16(p, bits), store_u16(p + 2, bits >> 16);
}

inline void pack_scale_pairs(const int* scale, int n, uint8_t* p) {
    for (int i = 0; i < n; i++) p[i] = uint8_t(scale[2 * i] | scale[2 * i + 1] << 4);
}

inline void pack(const LatticeBlock<Iq2Xxs>& block, uint8_t* p) {
    for (int j = 0; j < 8; j++) {
        for (int l = 0; l < 4; l++) p[2 + 8 * j + l] = uint8_t(block.index[4 * j + l]);
        pack_signs_and_scale(block.signs + 4 * j, block.scale[j], p + 6 + 8 * j);
    }
}

inline void pack(const LatticeBlock<Iq2Xs>& block, uint8_t* p) {
    for (int g = 0; g < 32; g++)
        store_u16(p + 2 + 2 * g, uint32_t(block.index[g] | (block.signs[g] & 127) << 9));
    pack_scale_pairs(block.scale, 8, p + 66);
}

inline void pack(const LatticeBlock<Iq2S>& block, uint8_t* p) {
    std::memset(p + 66, 0, 8);
    for (int g = 0; g < 32; g++) {
        p[2 + g] = uint8_t(block.index[g]);
        p[34 + g] = block.signs[g];
        p[66 + g / 4] |= uint8_t(block.index[g] >> 8 << (2 * (g % 4)));
    }
    pack_scale_pairs(block.scale, 8, p + 74);
}

inline void pack(const LatticeBlock<Iq3Xxs>& block, uint8_t* p) {
    for (int g = 0; g < 64; g++) p[2 + g] = uint8_t(block.index[g]);
    for (int j = 0; j < 8; j++) pack_signs_and_scale(block.signs + 4 * j, block.scale[j], p + 66 + 4 * j);
}

inline void pack(const LatticeBlock<Iq3S>& block, uint8_t* p) {
    std::memset(p + 66, 0, 8);
    for (int g = 0; g < 64; g++) {
        p[2 + g] = uint8_t(block.index[g]);
        p[66 + g / 8] |= uint8_t(block.index[g] >> 8 << (g % 8));
    }
    std::memcpy(p + 74, block.signs, 32);
    pack_scale_pairs(block.scale, 4, p + 106);
}

inline void pack(const LatticeBlock<Iq1S>& block, uint8_t* p) {
    for (int j = 0; j < 8; j++) {
        uint32_t high = uint32_t(block.scale[j] << 12 | (block.index[4 * j] >> 11) << 15);
        for (int l = 0; l < 4; l++) {
            const int index = block.index[4 * j + l];
            p[2 + 4 * j + l] = uint8_t(index);
            high |= uint32_t(index >> 8 & 7) << (3 * l);
        }
        store_u16(p + 34 + 2 * j, high);
    }
}

inline void pack(const LatticeBlock<Iq1M>& block, const uint8_t* d, uint8_t* p) {
    for (int g = 0; g < 32; g++) p[g] = uint8_t(block.index[g]);
    for (int i = 0; i < 16; i++)  // a point's delta is bit 11 of its index
        p[32 + i] = uint8_t(block.index[2 * i] >> 8 | block.index[2 * i + 1] >> 8 << 4);
    const int unit = d[0] | d[1] << 8;
    for (int i = 0; i < 4; i++) {
        int bits = (unit >> (4 * i) & 15) << 12;
        for (int k = 0; k < 4; k++) bits |= block.scale[4 * i + k] << (3 * k);
        store_u16(p + 48 + 2 * i, uint32_t(bits));
    }
}

template <Type kType, class L>
bool encode_lattice(const float* x, const float* importance, int64_t n, uint8_t* out) {
    const auto block = std::make_unique<LatticeBlock<L>>();  // up to a megabyte
    for (int64_t i = 0; i < n; i += 256, out += type_facts(kType).block_bytes) {
        if (is_beyond_fitting(x + i, 256)) return false;
        uint8_t d[2];
        if (!block->fit(x + i, importance ? importance + i : nullptr, d)) return false;
        if constexpr (kType == Type::IQ1_M) {
            pack(*block, d, out);
        } else {
            std::memcpy(out, d, 2);
            pack(*block, out);
        }
    }
    return true;
}

// ---- four bits

// 32 weights and the 16 values of IQ4_NL and IQ4_XS.
struct FourBits {
    const float *x, *w;

    // Return the error for scale e, without sum w x^2.
    float error(float e) const {
        V total = V::zero();
        for (int i = 0; i < 32; i += 16) {
            const V we = V::load(w + i) * V::set(e), xe = V::set(-2.0f) * we * V::load(x + i);
            V lowest = V::set(INFINITY);
            for (int k = 0; k < 16; k++) {
                const V v = V::set(float(kIq4Values[k]));
                lowest = min(lowest, fma(we * V::set(e), v, xe) * v);
            }
            total = total + lowest;
        }
        return sum(total);
    }
    // Return the best scale of either sign: the values are not symmetric.
    float best_scale() const {
        constexpr int kSteps = 16;  // the largest magnitude is mapped to 120 divided by 0.6 to 1.35
        const float largest = std::bit_cast<float>(largest_bits(x, 32));
        float best = 0.0f, lowest = INFINITY;
        for (int step = 0; step < 2 * kSteps; step++) {
            const float e = largest / (step % 2 ? -120.0f : 120.0f) * (0.6f + 0.05f * float(step / 2));
            const float found = error(e);
            if (found < lowest) lowest = found, best = e;
        }
        return best;
    }
    void codes(float e, int32_t* q) const {
        for (int i = 0; i < 32; i++) {
            float nearest = INFINITY;
            for (int k = 0; k < 16; k++) {
                const float distance = fabsf(x[i] - e * float(kIq4Values[k]));
                if (distance < nearest) nearest = distance, q[i] = k;
            }
        }
    }
};

struct Iq4Nl {
    static constexpr int kLast = 0;
    static constexpr float kTop = 1.0f;
    static float factor(int) { return 1.0f; }
    static int nearest(float) { return 0; }
};
struct Iq4Xs {
    static constexpr int kLast = 63;
    static constexpr float kTop = -32.0f;
    static float factor(int s) { return float(s - 32); }
    static int nearest(float e) { return to_range(e + 32.0f, kLast); }
};

inline bool encode_iq4_nl(const float* x, const float* importance, uint8_t* p) {
    alignas(64) float w[32];
    weigh_block(x, importance, 32, w);
    const FourBits block = {x, w};
    const float best = block.best_scale();
    int scale = 0;
    if (!choose_scales<Iq4Nl>(&best, 1, [&](int, float e) { return block.error(e); }, p, &scale))
        return false;
    int32_t q[32];
    block.codes(load_f16(p), q);
    pack_nibbles(q, p + 2);
    return true;
}

inline bool encode_iq4_xs(const float* x, const float* importance, uint8_t* p) {
    alignas(64) float w[256];
    weigh_block(x, importance, 256, w);
    float best[8];
    int scale[8] = {};
    const auto sub = [&](int i) { return FourBits{x + 32 * i, w + 32 * i}; };
    for (int i = 0; i < 8; i++) best[i] = sub(i).best_scale();
    const auto error = [&](int i, float e) { return sub(i).error(e); };
    if (!choose_scales<Iq4Xs>(best, 8, error, p, scale)) return false;
    std::memset(p + 2, 0, 6);
    for (int i = 0; i < 8; i++) {
        int32_t q[32];
        sub(i).codes(load_f16(p) * Iq4Xs::factor(scale[i]), q);
        pack_nibbles(q, p + 8 + 16 * i);
        p[4 + i / 2] |= uint8_t((scale[i] & 15) << (4 * (i % 2)));
        p[2 + i / 4] |= uint8_t((scale[i] >> 4) << (2 * (i % 4)));
    }
    return true;
}

inline void add_codebook_encoders(Kernels& table) {
    table.encode[int(Type::IQ4_NL)] = encode_fitted<Type::IQ4_NL, encode_iq4_nl>;
    table.encode[int(Type::IQ4_XS)] = encode_fitted<Type::IQ4_XS, encode_iq4_xs>;
    table.encode[int(Type::IQ3_S)] = encode_lattice<Type::IQ3_S, Iq3S>;
    table.encode[int(Type::IQ3_XXS)] = encode_lattice<Type::IQ3_XXS, Iq3Xxs>;
    table.encode[int(Type::IQ2_S)] = encode_lattice<Type::IQ2_S, Iq2S>;
    table.encode[int(Type::IQ2_XS)] = encode_lattice<Type::IQ2_XS, Iq2Xs>;
    table.encode[int(Type::IQ2_XXS)] = encode_lattice<Type::IQ2_XXS, Iq2Xxs>;
    table.encode[int(Type::IQ1_S)] = encode_lattice<Type::IQ1_S, Iq1S>;
    table.encode[int(Type::IQ1_M)] = encode_lattice<Type::IQ1_M, Iq1M>;
}
