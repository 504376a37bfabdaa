// Decodes the quantised block formats of GGUF, 32 weights at a time, in plain scalar code. Included inside a
// namespace: each instruction set compiles its own copy.
//
// Bit diagrams: lowest byte first. "16 x u8: hi|lo" means byte i holds weight i in its low nibble and weight
// i + 16 in its high nibble.

// Weight i of the block is (scale * sub_scale[i / 16]) * q[i] + min * sub_min[i / 16].
struct Block32 {
    int q[32];
    float scale;
    float min;
    int sub_scale[2];
    int sub_min[2];
};

constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Twice the values of MXFP4's four bits: a sign, two exponent bits, one mantissa bit.
constexpr int8_t kFp4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Q4_K and Q5_K: eight 6-bit scales and minimums in 12 bytes.
//   bytes 0..3: scale j = 0..3 in bits 0..5, top bits of scale j + 4 in bits 6..7
//   bytes 4..7: min   j = 0..3 in bits 0..5, top bits of min   j + 4 in bits 6..7
//   bytes 8..11: low nibble = low bits of scale j + 4, high nibble = low bits of min j + 4
inline void unpack_scale_min(const uint8_t* s, int j, int* scale, int* min) {
    if (j < 4) {
        *scale = s[j] & 63;
        *min = s[j + 4] & 63;
    } else {
        *scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
        *min = (s[j + 4] >> 4) | (s[j] >> 6) << 4;
    }
}

// Q3_K: sixteen 6-bit scales, offset by 32, in 12 bytes.
//   bytes 0..7: low nibble = low bits of scale j = 0..7, high nibble = low bits of scale j + 8
//   bytes 8..11: bits 2(j / 4) .. +1 of byte 8 + j % 4 = high bits of scale j
inline int unpack_scale_q3(const uint8_t* s, int j) {
    const int low = j < 8 ? s[j] & 15 : s[j - 8] >> 4;
    return (low | ((s[8 + j % 4] >> (2 * (j / 4))) & 3) << 4) - 32;
}

// Add the eighth sign to bytes of seven signs: the number of negative signs in a group is even.
inline uint64_t with_eighth_signs(uint64_t seven) {
    uint64_t odd = seven ^ seven >> 4;
    odd ^= odd >> 2;
    odd ^= odd >> 1;
    return seven | (odd & 0x0101010101010101) << 7;
}

// Spread 28 bits over four bytes, seven bits each.
inline uint32_t four_sevens(uint32_t bits) {
    return (bits & 0x7f) | (bits << 1 & 0x7f00) | (bits << 2 & 0x7f0000) | (bits << 3 & 0x7f000000);
}

// Decode the weights of a codebook group, negative where a bit of `signs` is set.
template <class Word>
inline void signed_group(Word group, uint32_t signs, int* q) {
    for (int i = 0; i < int(sizeof(Word)); i++) {
        const int value = int(group >> (8 * i) & 255);
        q[i] = signs >> i & 1 ? -value : value;
    }
}

// Decode eight weights of IQ1: eight times -1, 0 or 1, plus a delta of 1 or -1.
inline void delta_group(uint64_t group, bool negative, int* q) {
    for (int i = 0; i < 8; i++) q[i] = int(group >> (8 * i) & 255) - kIq1Zero - (negative ? 2 : 0);
}

// Return the scale of an IQ1_M super-block, whose bits are the high bits of four words.
inline float scale_iq1_m(const uint8_t* words) {
    return f16_to_f32(uint16_t(load_u16(words) >> 12 | (load_u16(words + 2) >> 8 & 0xf0) |
                               (load_u16(words + 4) >> 4 & 0xf00) | (load_u16(words + 6) & 0xf000)));
}

// Decode block `b` (32 weights) of a row.
inline Block32 decode_block(Type type, const uint8_t* row, int64_t b) {
    Block32 out = {{}, 0.0f, 0.0f, {1, 1}, {1, 1}};
    const TypeFacts facts = type_facts(type);
    const uint8_t* p = row + b / (facts.block_size / 32) * facts.block_bytes;
    const int j = int(b % (facts.block_size / 32));  // index of the 32 weights in a super-block
    switch (type) {
        case Type::Q4_0:  // f16 d | 16 x u8: hi|lo
            out.scale = load_f16(p);
            for (int i = 0; i < 32; i++) out.q[i] = (i < 16 ? p[2 + i] & 15 : p[2 + i - 16] >> 4) - 8;
            break;
        case Type::Q4_1:  // f16 d | f16 m | 16 x u8: hi|lo
            out.scale = load_f16(p);
            out.min = load_f16(p + 2);
            for (int i = 0; i < 32; i++) out.q[i] = i < 16 ? p[4 + i] & 15 : p[4 + i - 16] >> 4;
            break;
        case Type::Q5_0:    // f16 d | u32 fifth bits | 16 x u8: hi|lo
        case Type::Q5_1: {  // f16 d | f16 m | u32 fifth bits | 16 x u8: hi|lo
            const int at = type == Type::Q5_0 ? 2 : 4;
            const uint32_t high = load_u32(p + at);
            out.scale = load_f16(p);
            if (type == Type::Q5_1) out.min = load_f16(p + 2);
            for (int i = 0; i < 32; i++) {
                const int low = i < 16 ? p[at + 4 + i] & 15 : p[at + 4 + i - 16] >> 4;
                out.q[i] = (low | int(high >> i & 1) << 4) - (type == Type::Q5_0 ? 16 : 0);
            }
            break;
        }
        case Type::Q8_0:  // f16 d | 32 x i8
            out.scale = load_f16(p);
            for (int i = 0; i < 32; i++) out.q[i] = int8_t(p[2 + i]);
            break;
        case Type::IQ4_NL:  // f16 d | 16 x u8: hi|lo, indices into kIq4Values
            out.scale = load_f16(p);
            for (int i = 0; i < 32; i++) out.q[i] = kIq4Values[i < 16 ? p[2 + i] & 15 : p[2 + i - 16] >> 4];
            break;
        case Type::MXFP4:  // u8 exponent | 16 x u8: hi|lo, indices into kFp4Values
            out.scale = half_of_e8m0(p[0]);
            for (int i = 0; i < 32; i++) out.q[i] = kFp4Values[i < 16 ? p[1 + i] & 15 : p[1 + i - 16] >> 4];
            break;
        case Type::IQ4_XS: {  // f16 d | u16 high scale bits | 4 x u8 low scale bits | 8 x (16 x u8: hi|lo)
            const int low = p[4 + j / 2] >> (4 * (j % 2)) & 15, high = load_u16(p + 2) >> (2 * j) & 3;
            out.scale = load_f16(p) * float((low | high << 4) - 32);
            const uint8_t* codes = p + 8 + 16 * j;
            for (int i = 0; i < 32; i++) out.q[i] = kIq4Values[i < 16 ? codes[i] & 15 : codes[i - 16] >> 4];
            break;
        }
        case Type::Q2_K: {  // 16 x u8: min|scale | 64 x u8: 2 bits of weights i, i + 32, i + 64, i + 96 | f16
                            // d | f16 dmin
            const uint8_t* codes = p + 16 + 32 * (j / 4);
            out.scale = load_f16(p + 80);
            out.min = -load_f16(p + 82);
            for (int h = 0; h < 2; h++) {
                out.sub_scale[h] = p[2 * j + h] & 15;
                out.sub_min[h] = p[2 * j + h] >> 4;
            }
            for (int i = 0; i < 32; i++) out.q[i] = codes[i] >> (2 * (j % 4)) & 3;
            break;
        }
        case Type::Q3_K: {  // 32 x u8 third bits | 64 x u8: 2 bits as in Q2_K | 12 x u8 scales | f16 d
            const uint8_t* codes = p + 32 + 32 * (j / 4);
            out.scale = load_f16(p + 108);
            for (int h = 0; h < 2; h++) out.sub_scale[h] = unpack_scale_q3(p + 96, 2 * j + h);
            for (int i = 0; i < 32; i++)
                out.q[i] = ((codes[i] >> (2 * (j % 4)) & 3) | (p[i] >> j & 1) << 2) - 4;
            break;
        }
        case Type::Q4_K:    // f16 d | f16 dmin | 12 x u8 scales | 4 x (32 x u8: block 2j + 1 | block 2j)
        case Type::Q5_K: {  // f16 d | f16 dmin | 12 x u8 scales | 32 x u8: bit j = fifth bit of block j | as
                            // Q4_K
            const uint8_t* codes = p + (type == Type::Q4_K ? 16 : 48) + 32 * (j / 2);
            int scale, min;
            unpack_scale_min(p + 4, j, &scale, &min);
            out.scale = load_f16(p) * float(scale);
            out.min = -(load_f16(p + 2) * float(min));
            for (int i = 0; i < 32; i++) {
                out.q[i] = codes[i] >> (4 * (j % 2)) & 15;
                if (type == Type::Q5_K) out.q[i] |= (p[16 + i] >> j & 1) << 4;
            }
            break;
        }
        case Type::Q6_K: {  // 128 x u8 low nibbles | 64 x u8 high 2 bits | 16 x i8 scales | f16 d
            // In each 128 weights, low nibbles of bytes 0..63 are weights 0..63, high ones 64..127.
            const uint8_t* low = p + 64 * (j / 4) + 32 * (j % 2);
            const uint8_t* high = p + 128 + 32 * (j / 4);
            out.scale = load_f16(p + 208);
            for (int h = 0; h < 2; h++) out.sub_scale[h] = int8_t(p[192 + 2 * j + h]);
            for (int i = 0; i < 32; i++)
                out.q[i] = ((low[i] >> (j % 4 / 2 * 4) & 15) | (high[i] >> (2 * (j % 4)) & 3) << 4) - 32;
            break;
        }
        case Type::Q1_0: {  // f16 d | 16 x u8: bit i % 8 of byte i / 8 is set if weight i is d, not -d
            const uint32_t bits = load_u32(p + 2 + 4 * j);
            out.scale = load_f16(p);
            for (int i = 0; i < 32; i++) out.q[i] = 2 * int(bits >> i & 1) - 1;
            break;
        }
        // A byte x of TQ1_0 holds base-3 digits as a fraction x / 256. Multiplying by 3^k modulo 256 moves
        // digit k to the front; the integer part of three times the result is that digit.
        case Type::TQ1_0:  // 48 x u8: five digits | 4 x u8: four digits | f16 d
            // The digits of bytes 0..31 are 160 weights in runs of 32, of bytes 32..47 80 weights in runs of
            // 16, of the last four bytes 16 weights in runs of 4.
            out.scale = load_f16(p + 52);
            for (int i = 0; i < 32; i++) {
                constexpr uint8_t kPower[5] = {1, 3, 9, 27, 81};
                const int k = 32 * j + i, l = k - 240;
                const uint8_t x = k < 160   ? uint8_t(p[i] * kPower[j])
                                  : k < 240 ? uint8_t(p[32 + k % 16] * kPower[(k - 160) / 16])
                                            : uint8_t(p[48 + l % 4] * kPower[l / 4]);
                out.q[i] = (x * 3 >> 8) - 1;
            }
            break;
        case Type::TQ2_0: {  // 64 x u8: 2 bits as in Q2_K | f16 d
            const uint8_t* codes = p + 32 * (j / 4);
            out.scale = load_f16(p + 64);
            for (int i = 0; i < 32; i++) out.q[i] = (codes[i] >> (2 * (j % 4)) & 3) - 1;
            break;
        }
        // Indices into a codebook, signs, and scales with half a step added, in units of d / 8, d / 4 or d.
        // All products of these are exact.
        case Type::IQ2_XXS: {  // f16 d | 8 x (4 x u8 indices | u32: four times seven signs, 4 bits scale)
            const uint8_t* index = p + 2 + 8 * j;
            const uint32_t signs = load_u32(index + 4);
            const uint32_t all = uint32_t(with_eighth_signs(four_sevens(signs)));
            out.scale = load_f16(p) * 0.125f * float(2 * (signs >> 28) + 1);
            for (int l = 0; l < 4; l++) signed_group(kIq2Xxs[index[l]], all >> (8 * l), out.q + 8 * l);
            break;
        }
        case Type::IQ2_XS: {  // f16 d | 32 x u16: seven signs | 9 bits index | 8 x u8 scales: second|first
                              // half
            out.scale = load_f16(p) * 0.125f;
            for (int h = 0; h < 2; h++) out.sub_scale[h] = 2 * (p[66 + j] >> (4 * h) & 15) + 1;
            for (int l = 0; l < 4; l++) {
                const uint32_t code = load_u16(p + 2 + 8 * j + 2 * l);
                signed_group(kIq2Xs[code & 511], uint32_t(with_eighth_signs(code >> 9)), out.q + 8 * l);
            }
            break;
        }
        case Type::IQ2_S:  // f16 d | 32 x u8 indices | 32 x u8 signs | 8 x u8: four times their high 2 bits |
                           // scales as in IQ2_XS
            out.scale = load_f16(p) * 0.125f;
            for (int h = 0; h < 2; h++) out.sub_scale[h] = 2 * (p[74 + j] >> (4 * h) & 15) + 1;
            for (int l = 0; l < 4; l++) {
                const int index = p[2 + 4 * j + l] | (p[66 + j] >> (2 * l) & 3) << 8;
                signed_group(kIq2S[index], p[34 + 4 * j + l], out.q + 8 * l);
            }
            break;
        case Type::IQ3_XXS: {  // f16 d | 64 x u8 indices | 8 x u32 as in IQ2_XXS
            const uint32_t signs = load_u32(p + 66 + 4 * j);
            const uint32_t all = uint32_t(with_eighth_signs(four_sevens(signs)));
            out.scale = load_f16(p) * 0.25f * float(2 * (signs >> 28) + 1);
            for (int l = 0; l < 8; l++)
                signed_group(kIq3Xxs[p[2 + 8 * j + l]], all >> (4 * l), out.q + 4 * l);
            break;
        }
        case Type::IQ3_S:  // f16 d | 64 x u8 indices | 8 x u8: their high bits | 32 x u8 signs | 4 x u8
                           // scales
            out.scale = load_f16(p) * float(2 * (p[106 + j / 2] >> (4 * (j % 2)) & 15) + 1);
            for (int l = 0; l < 8; l++) {
                const int index = p[2 + 8 * j + l] | (p[66 + j] >> l & 1) << 8;
                signed_group(kIq3S[index], uint32_t(p[74 + 4 * j + l / 2]) >> (4 * (l % 2)), out.q + 4 * l);
            }
            break;
        case Type::IQ1_S: {  // f16 d | 32 x u8 indices | 8 x u16: negative delta | 3 bits scale | four times
                             // their high 3 bits
            const uint32_t high = load_u16(p + 34 + 2 * j);
            out.scale = load_f16(p) * 0.125f * float(2 * (high >> 12 & 7) + 1);
            for (int l = 0; l < 4; l++) {
                const int index = p[2 + 4 * j + l] | int(high >> (3 * l) & 7) << 8;
                delta_group(kIq1[index], high >> 15, out.q + 8 * l);
            }
            break;
        }
        case Type::IQ1_M: {  // 32 x u8 indices | 16 x u8: twice a negative delta and the high 3 bits of an
                             // index | 4 x u16: 4 bits of d, four scales of 3 bits
            const int scales = load_u16(p + 48 + j / 2 * 2) >> (6 * (j % 2));
            out.scale = scale_iq1_m(p + 48) * 0.125f;
            for (int h = 0; h < 2; h++) out.sub_scale[h] = 2 * (scales >> (3 * h) & 7) + 1;
            for (int l = 0; l < 4; l++) {
                const int high = p[32 + 2 * j + l / 2] >> (4 * (l % 2)) & 15;
                delta_group(kIq1[p[4 * j + l] | (high & 7) << 8], high & 8, out.q + 8 * l);
            }
            break;
        }
        case Type::F32:
        case Type::F16:
        case Type::BF16:
        case Type::Planes4:
        case Type::Planes8:
            break;  // not blocks
    }
    return out;
}

constexpr bool has_min(Type type) {
    return type == Type::Q4_1 || type == Type::Q5_1 || type == Type::Q2_K || type == Type::Q4_K ||
           type == Type::Q5_K;
}

// Return the logarithm of a power of two.
constexpr int log2_of(int n) {
    return n <= 1 ? 0 : 1 + log2_of(n / 2);
}

// Sub-blocks of 16 weights with integer scales. Their products are summed as integers.
constexpr bool has_sub_blocks(Type type) {
    return type == Type::Q2_K || type == Type::Q3_K || type == Type::Q6_K || type == Type::IQ2_XS ||
           type == Type::IQ2_S || type == Type::IQ1_M;
}
