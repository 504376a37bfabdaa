// The layout of uploaded weights (backends/vulkan/weights.py): tiles of 32 rows, in blocks of 32 columns.
// codes: [tile][block][vector][row]. `more` has the scales and high bits.
layout(constant_id = 0) const uint TYPE = 0;  // GGML's type number

layout(set = 0, binding = 0) readonly buffer Codes { uvec4 codes[]; };
layout(set = 0, binding = 1) readonly buffer More { uint more[]; };

const uint F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14,
           BF16 = 30, MXFP4 = 39, PLANES_Q4 = 102, PLANES_Q8 = 108;
const bool IS_Q8 = TYPE == Q8_0 || TYPE == PLANES_Q8, IN_PLANES = TYPE == PLANES_Q4 || TYPE == PLANES_Q8;
const uint VECTORS = TYPE == F32 ? 8u : TYPE == F16 || TYPE == BF16 ? 4u : IS_Q8 ? 2u : 1u;
const bool IS_FLOAT = TYPE == F32 || TYPE == F16 || TYPE == BF16, IS_K = TYPE == Q4_K || TYPE == Q5_K || TYPE == Q6_K;
const bool HAS_MINIMUM = TYPE == Q4_1 || TYPE == Q5_1 || TYPE == Q4_K || TYPE == Q5_K;
const int ZERO = TYPE == Q4_0 || TYPE == PLANES_Q4 ? 8 : TYPE == Q5_0 ? 16 : TYPE == Q6_K ? 32 : 0;

// The loaded data of a quantised block of a row. more: scales, and code bits above the low four.
struct Raw {
    uvec4 first, second;
    uvec4 more;
};

// A quantised block. A weight is scale * parts * (q - ZERO) + minimum, with one part per 16 columns and the q
// of four columns in a word.
struct Block {
    uint q[8];
    float scale, minimum;
    vec2 parts;
};

Raw load(uint tile, uint block, uint row, uint n_blocks) {
    const uint at = tile * n_blocks + block;
    Raw raw;
    raw.first = codes[at * VECTORS * 32u + row];
    raw.second = IS_Q8 ? codes[(at * VECTORS + 1u) * 32u + row] : uvec4(0u);
    raw.more = uvec4(0u);
    if (TYPE == Q4_0 || TYPE == Q8_0) {  // two rows side by side
        raw.more.x = more[at * 16u + row / 2u];
    } else if (TYPE == Q4_1) {
        raw.more.x = more[at * 32u + row];
    } else if (TYPE == Q5_0) {
        raw.more.x = more[at * 48u + 32u + row / 2u];
        raw.more.z = more[at * 48u + row];
    } else if (TYPE == Q5_1) {
        raw.more.x = more[at * 64u + 32u + row];
        raw.more.z = more[at * 64u + row];
    } else if (TYPE == MXFP4) {
        raw.more.x = more[at * 8u + row / 4u];
    } else if (IS_K) {
        const uint group = block & 7u, super = tile * (n_blocks / 8u) + block / 8u;
        const uint base = super * (TYPE == Q4_K ? 160u : TYPE == Q5_K ? 416u : 656u);
        const uint own = base + (TYPE == Q6_K ? 16u : 32u) + 32u * (group / 2u) + row;
        raw.more.x = more[base + (TYPE == Q6_K ? row / 2u : row)];
        raw.more.y = more[own];
        if (TYPE == Q5_K) raw.more.z = more[base + 160u + 32u * group + row];
        if (TYPE == Q6_K) {
            raw.more.z = more[base + 144u + 64u * group + row];
            raw.more.w = more[base + 176u + 64u * group + row];
        }
    }
    return raw;
}

// Convert four 4-bit numbers to twice their values: a sign, two exponent bits, one mantissa bit.
uint fp4_values(uint four) {
    uint q = 0;
    [[unroll]] for (uint i = 0; i < 4u; i++) {
        const uint code = (four >> (8u * i)) & 15u;
        const int magnitude = int((0xc8643210u >> (4u * (code & 7u))) & 15u);
        q |= (uint(code < 8u ? magnitude : -magnitude) & 0xffu) << (8u * i);
    }
    return q;
}

// Return the q of four columns of a block's half `side`, starting at its column 4 k.
uint word_of(Raw raw, uint side, uint k) {
    if (IS_Q8) return side == 0u ? raw.first[k] : raw.second[k];
    uint q = (raw.first[k] >> (4u * side)) & 0x0f0f0f0fu;  // the first half is in low nibbles, the second in high ones
    if (TYPE == Q5_0 || TYPE == Q5_1 || TYPE == Q5_K) q |= ((raw.more.z >> (4u * side + k)) << 4) & 0x10101010u;
    if (TYPE == Q6_K) {
        const uint high = side == 0u ? raw.more.z : raw.more.w;
        q |= (k < 2u ? high << (4u - 2u * k) : high >> (2u * k - 4u)) & 0x30303030u;
    }
    return TYPE == MXFP4 ? fp4_values(q) : q;
}

// Unpack a quantised block. Planes have no scales here, because their scales belong to columns.
Block unpacked(Raw raw, uint block, uint row) {
    Block b;
    b.parts = vec2(1.0);
    b.scale = 1.0;
    b.minimum = 0.0;
    [[unroll]] for (uint i = 0; i < 8u; i++) b.q[i] = word_of(raw, i / 4u, i & 3u);
    if (TYPE == Q4_0 || TYPE == Q8_0 || TYPE == Q5_0 || TYPE == Q6_K)
        b.scale = half_value((raw.more.x >> (16u * (row & 1u))) & 0xffffu);
    const uint own = raw.more.y >> (16u * (block & 1u));
    if (TYPE == Q6_K) b.parts = vec2(ivec2(int(own << 24), int(own << 16)) >> 24);
    if (HAS_MINIMUM) {
        precise vec2 both = half_values(raw.more.x);
        if (IS_K) both = both * vec2(float(own & 0xffu), -float((own >> 8) & 0xffu));
        b.scale = both.x;
        b.minimum = both.y;
    }
    if (TYPE == MXFP4) {
        const uint e = (raw.more.x >> (8u * (row & 3u))) & 0xffu;
        b.scale = uintBitsToFloat(e < 2u ? 0x00200000u << e : (e - 1u) << 23);  // half of 2^(e - 127)
    }
    return b;
}

const uint IN_VECTOR = 32u / VECTORS;  // float weights per vector

// Return one weight of a vector.
float float_of(uvec4 words, uint i) {
    if (TYPE == F32) return uintBitsToFloat(words[i & 3u]);
    const uint word = words[i / 2u & 3u];
    if (TYPE == F16) return half_values(word)[i & 1u];
    return uintBitsToFloat((i & 1u) == 0u ? word << 16 : word & 0xffff0000u);
}

// Decode the 32 weights of a block, in order. scales_tile: the tile with the scales of a row of planes.
void decode(uint tile, uint block, uint row, uint n_blocks, uint scales_tile, out float w[32]) {
    const uint at = tile * n_blocks + block;
    if (IS_FLOAT) {
        [[unroll]] for (uint v = 0; v < VECTORS; v++) {
            const uvec4 words = codes[(at * VECTORS + v) * 32u + row];
            [[unroll]] for (uint i = 0; i < IN_VECTOR; i++) w[v * IN_VECTOR + i] = float_of(words, i);
        }
        return;
    }
    const Block b = unpacked(load(tile, block, row, n_blocks), block, row);
    precise float scales[2] = float[](b.scale * b.parts.x, b.scale * b.parts.y);
    [[unroll]] for (uint k = 0; k < 32u; k++) {
        const float code = float((int(b.q[k / 4u] << (24u - 8u * (k & 3u))) >> 24) - ZERO);
        float scale = scales[k / 16u];
        if (IN_PLANES) scale = half_value((more[(scales_tile * n_blocks + block) * 16u + k / 2u] >> (16u * (k & 1u))) & 0xffffu);
        precise float value = scale * code;
        if (HAS_MINIMUM) value = value + b.minimum;
        w[k] = value;
    }
}
