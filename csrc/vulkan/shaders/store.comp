#version 450
// Stores keys and values of a step, 32 channels of a head of a token per invocation.
#include "common.glsl"
#include "cache.glsl"

layout(local_size_x = 64) in;
layout(set = 0, binding = 0) readonly buffer Rows { float rows[]; };
layout(set = 0, binding = 1) readonly buffer Slots { uint slots[]; };  // per token
layout(set = 0, binding = 2) buffer Cache { uvec4 cache[]; };
layout(set = 0, binding = 3) buffer Scales { float scales[]; };
layout(push_constant) uniform Push { uint n_tokens, stride, n_head, dim, is_value; };

void main() {
    const uint n_blocks = (dim + 31u) / 32u, n_vectors = (dim + PER - 1u) / PER;
    const uint i = gl_GlobalInvocationID.x;
    if (i >= n_tokens * n_head * n_blocks) return;
    const uint block = i % n_blocks, head = i / n_blocks % n_head, token = i / n_blocks / n_head;
    const uint kv_block = slots[token] / KV_BLOCK, place = slots[token] % KV_BLOCK, base = kv_block * n_head + head;
    float x[32];
    for (uint k = 0; k < 32u; k++) {
        const uint channel = block * 32u + k;
        x[k] = channel < dim ? rows[token * stride + head * dim + channel] : 0.0;
    }
    precise float scale = 0.0, inverse = 0.0;
    if (KV == 2u) {
        float largest = 0.0;
        for (uint k = 0; k < 32u; k++) largest = max(largest, abs(x[k]));
        const float step = quotient(largest, 127.0);
        scale = half_value(to_half(step));
        if (scale > 0.0) inverse = quotient(1.0, scale);
        scales[(base * n_blocks + block) * KV_BLOCK + place] = scale;
    }
    for (uint v = 0; v < 32u / PER; v++) {
        const uint vector = block * (32u / PER) + v;
        if (vector >= n_vectors) return;
        uvec4 words = uvec4(0u);
        for (uint k = 0; k < PER; k++) {
            const float value = x[v * PER + k];
            if (KV == 0u) words[k] = floatBitsToUint(value);
            if (KV == 1u) words[k / 2u] |= to_half(value) << (16u * (k & 1u));
            if (KV == 2u) {
                precise float code = clamp(roundEven(value * inverse), -127.0, 127.0);
                words[k / 4u] |= (uint(int(code)) & 0xffu) << (8u * (k & 3u));
            }
        }
        if (is_value != 0u)
            cache[(base * KV_BLOCK + place) * n_vectors + vector] = words;
        else
            cache[(base * n_vectors + vector) * KV_BLOCK + place] = words;
    }
}
