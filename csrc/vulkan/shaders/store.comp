#version 450
// Stores keys and values of a step in the cache. Keys are rotated before, and so are queries, which go to a buffer of their
// own. An invocation has some adjacent channels of a head of a token: a vector of the cache, or a block with a scale.
#include "common.glsl"
#include "cache.glsl"

layout(local_size_x = 64) in;
layout(set = 0, binding = 0) readonly buffer KeyRows { float key_rows[]; };
layout(set = 0, binding = 1) readonly buffer Slots { uint slots[]; };  // per token
layout(set = 0, binding = 2) readonly buffer ValueRows { float value_rows[]; };
layout(set = 0, binding = 3) readonly buffer QueryRows { float query_rows[]; };
layout(set = 0, binding = 4) readonly buffer Angles { vec2 angles[]; };  // cosine and sine, [token][n_rot / 2]
layout(set = 0, binding = 5) writeonly buffer Keys { uvec4 keys[]; };
layout(set = 0, binding = 6) writeonly buffer Values { uvec4 values[]; };
layout(set = 0, binding = 7) writeonly buffer KeyScales { float key_scales[]; };
layout(set = 0, binding = 8) writeonly buffer ValueScales { float value_scales[]; };
layout(set = 0, binding = 9) writeonly buffer Queries { float queries[]; };
layout(push_constant) uniform Push {
    uint n_head, n_head_kv, dim, dim_v;  // n_head: of the rotated queries, or 0
    uint key_stride, value_stride, query_stride, out_stride;
    uint first, n_rot, is_neox;  // n_rot 0: keys are not rotated
};

#include "rotate.glsl"

const uint OWN = KV == 2u ? 32u : PER, KEY = 0, VALUE = 1, QUERY = 2;

float channel_of(uint kind, uint row, uint channel) {
    return kind == KEY ? key_rows[row + channel] : kind == VALUE ? value_rows[row + channel] : query_rows[row + channel];
}

void main() {
    const uint units = (dim + OWN - 1u) / OWN, units_v = (dim_v + OWN - 1u) / OWN, token = gl_WorkGroupID.y;
    uint i = gl_GlobalInvocationID.x, kind = KEY;
    if (i >= n_head_kv * units) {
        i -= n_head_kv * units;
        kind = VALUE;
        if (i >= n_head_kv * units_v) {
            i -= n_head_kv * units_v;
            kind = QUERY;
            if (i >= n_head * units) return;
        }
    }
    const uint n_units = kind == VALUE ? units_v : units, n_channels = kind == VALUE ? dim_v : dim;
    const uint head = i / n_units, from = i % n_units * OWN;
    const uint row = token * (kind == KEY ? key_stride : kind == VALUE ? value_stride : query_stride) + head * n_channels;
    float x[OWN];
    for (uint k = 0; k < OWN; k++) {
        const uint channel = from + k;
        x[k] = 0.0;
        if (channel >= n_channels) continue;
        if (kind != VALUE && is_rotated(channel)) {
            const Pair pair = pair_of(channel);
            const vec2 angle = angles[token * (n_rot / 2u) + pair.angle];
            x[k] = rotated(pair, channel_of(kind, row, pair.one), channel_of(kind, row, pair.other), angle);
        } else {
            x[k] = channel_of(kind, row, channel);
        }
        if (kind == QUERY) queries[token * out_stride + head * dim + channel] = x[k];
    }
    if (kind == QUERY) return;
    const uint base = slots[token] / KV_BLOCK * n_head_kv + head, place = slots[token] % KV_BLOCK;
    precise float scale = 0.0, inverse = 0.0;
    if (KV == 2u) {
        float largest = 0.0;
        for (uint k = 0; k < OWN; k++) largest = max(largest, abs(x[k]));
        const float step = quotient(largest, 127.0);
        scale = half_value(to_half(step));
        if (scale > 0.0) inverse = quotient(1.0, scale);
        const uint at = (base * ((n_channels + 31u) / 32u) + from / 32u) * KV_BLOCK + place;
        if (kind == KEY)
            key_scales[at] = scale;
        else
            value_scales[at] = scale;
    }
    const uint n_vectors = (n_channels + PER - 1u) / PER;
    for (uint v = 0; v < OWN / PER; v++) {
        const uint vector = from / PER + v;
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
        if (kind == KEY)
            keys[(base * n_vectors + vector) * KV_BLOCK + place] = words;
        else
            values[(base * KV_BLOCK + place) * n_vectors + vector] = words;
    }
}
