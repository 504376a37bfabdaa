// Weights as they are uploaded (backends/vulkan/weights.py): tiles of 32 rows, in blocks of 32 columns.
// codes: [tile][block][vector][row]; what else a block has is in `more`.
layout(constant_id = 0) const uint TYPE = 0;  // GGML's number

layout(set = 0, binding = 0) readonly buffer Codes { uvec4 codes[]; };
layout(set = 0, binding = 1) readonly buffer More { uint more[]; };

const uint F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14,
           BF16 = 30, MXFP4 = 39, PLANES_Q4 = 102, PLANES_Q8 = 108;
const bool IS_Q8 = TYPE == Q8_0 || TYPE == PLANES_Q8, IN_PLANES = TYPE == PLANES_Q4 || TYPE == PLANES_Q8;
const uint VECTORS = TYPE == F32 ? 8u : TYPE == F16 || TYPE == BF16 ? 4u : IS_Q8 ? 2u : 1u;
const float FP4[16] = float[](0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0,
                              -12.0);

// The half of a word that is a row's, of two rows side by side; in planes, that is a column's.
float paired_half(uint base, uint row) {
    return half_value((more[base + row / 2u] >> (16u * (row & 1u))) & 0xffffu);
}

float half_of_e8m0(uint e) {
    return uintBitsToFloat(e < 2u ? 0x00200000u << e : (e - 1u) << 23);
}

// The 32 weights of a block, in order.
void decode(uint tile, uint block, uint row, uint n_blocks, out float w[32]) {
    const uint at = tile * n_blocks + block;
    if (TYPE == F32 || TYPE == F16 || TYPE == BF16 || IS_Q8) {
        precise float scale = TYPE == Q8_0 ? paired_half(at * 16u, row) : 1.0;
        [[unroll]] for (uint v = 0; v < VECTORS; v++) {
            const uvec4 words = codes[(at * VECTORS + v) * 32u + row];
            [[unroll]] for (uint i = 0; i < 4u; i++) {
                const uint word = words[i];
                if (TYPE == F32) {
                    w[4u * v + i] = uintBitsToFloat(word);
                } else if (TYPE == F16) {
                    w[8u * v + 2u * i] = half_value(word & 0xffffu);
                    w[8u * v + 2u * i + 1u] = half_value(word >> 16);
                } else if (TYPE == BF16) {
                    w[8u * v + 2u * i] = uintBitsToFloat(word << 16);
                    w[8u * v + 2u * i + 1u] = uintBitsToFloat(word & 0xffff0000u);
                } else {
                    [[unroll]] for (uint j = 0; j < 4u; j++) {
                        if (IN_PLANES) scale = paired_half(at * 16u, 16u * v + 4u * i + j);
                        w[16u * v + 4u * i + j] = scale * float(int(word << (24u - 8u * j)) >> 24);
                    }
                }
            }
        }
        return;
    }
    // Codes of four bits: of 32 columns the first 16 in low halves, the others in high ones. high: bits above.
    const uvec4 words = codes[at * 32u + row];
    const uint group = block & 7u, super = tile * (n_blocks / 8u) + block / 8u;  // of the K types
    uint high = 0, higher = 0;
    precise float scale = 1.0, other = 1.0, minimum = 0.0;  // other: of the second 16 columns
    float zero = 0.0;
    if (TYPE == Q4_0) {
        scale = paired_half(at * 16u, row);
        zero = 8.0;
    } else if (TYPE == PLANES_Q4) {
        zero = 8.0;
    } else if (TYPE == Q4_1) {
        const uint word = more[at * 32u + row];
        scale = half_value(word & 0xffffu);
        minimum = half_value(word >> 16);
    } else if (TYPE == Q5_0) {
        high = more[at * 48u + row];
        scale = paired_half(at * 48u + 32u, row);
        zero = 16.0;
    } else if (TYPE == Q5_1) {
        high = more[at * 64u + row];
        const uint word = more[at * 64u + 32u + row];
        scale = half_value(word & 0xffffu);
        minimum = half_value(word >> 16);
    } else if (TYPE == MXFP4) {
        scale = half_of_e8m0((more[at * 8u + row / 4u] >> (8u * (row & 3u))) & 0xffu);
    } else if (TYPE == Q4_K || TYPE == Q5_K) {
        const uint base = super * (TYPE == Q4_K ? 160u : 416u) + row;
        const uint both = more[base], own = more[base + 32u * (1u + group / 2u)] >> (16u * (group & 1u));
        scale = half_value(both & 0xffffu) * float(own & 0xffu);
        minimum = -(half_value(both >> 16) * float((own >> 8) & 0xffu));
        if (TYPE == Q5_K) high = more[base + 32u * (5u + group)];
    } else if (TYPE == Q6_K) {
        const uint base = super * 656u;
        const float whole = paired_half(base, row);
        const uint own = more[base + 16u + 32u * (group / 2u) + row] >> (16u * (group & 1u));
        scale = whole * float(int(own << 24) >> 24);
        other = whole * float(int(own << 16) >> 24);
        high = more[base + 144u + 64u * group + row];
        higher = more[base + 176u + 64u * group + row];
        zero = 32.0;
    }
    [[unroll]] for (uint k = 0; k < 32u; k++) {
        uint code = (words[(k & 15u) / 4u] >> (8u * (k & 3u) + 4u * (k / 16u))) & 15u;
        if (TYPE == MXFP4) {
            precise float value = scale * FP4[code];
            w[k] = value;
            continue;
        }
        if (TYPE == PLANES_Q4) scale = paired_half(at * 16u, k);
        if (TYPE == Q5_0 || TYPE == Q5_1 || TYPE == Q5_K) code |= ((high >> k) & 1u) << 4;
        if (TYPE == Q6_K) code |= (((k < 16u ? high : higher) >> (2u * (k & 15u))) & 3u) << 4;
        precise float value = (TYPE == Q6_K && k >= 16u ? other : scale) * (float(code) - zero);
        if (TYPE == Q4_1 || TYPE == Q5_1 || TYPE == Q4_K || TYPE == Q5_K) value = value + minimum;
        w[k] = value;
    }
}
