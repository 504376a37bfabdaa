#version 450
// Attention of one head of one token over its pages: a running softmax over splits of 512 positions, which begin
// at fixed positions, so that the order of every sum depends on the token's position alone.
#include "common.glsl"
#include "cache.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 1) const uint DIM = 64;        // of a key
layout(constant_id = 2) const uint DIM_V = 64;      // of a value
layout(constant_id = 3) const uint SINKS = 0;
layout(constant_id = 4) const uint APART = 0;       // 1: a workgroup has one split, and leaves its part
layout(constant_id = 5) const uint SLOPES = 0;      // ALiBi
layout(set = 0, binding = 0) readonly buffer Queries { float queries[]; };
layout(set = 0, binding = 1) readonly buffer Keys { uvec4 keys[]; };
layout(set = 0, binding = 2) readonly buffer Values { uint values[]; };
layout(set = 0, binding = 3) readonly buffer KeyScales { float key_scales[]; };
layout(set = 0, binding = 4) readonly buffer ValueScales { float value_scales[]; };
layout(set = 0, binding = 5) readonly buffer Positions { uint positions[]; };  // visible.glsl
layout(set = 0, binding = 6) readonly buffer Tables { uint tables[]; };
layout(set = 0, binding = 7) readonly buffer Sinks { float sinks[]; };
layout(set = 0, binding = 8) writeonly buffer Outputs { float outputs[]; };
layout(set = 0, binding = 9) readonly buffer Slopes { float slopes[]; };
layout(push_constant) uniform Push {
    uint n_head, n_head_kv, in_stride, out_stride, n_pages, max_tokens, behind, ahead, n_splits;
    float scale, cap;
};

const uint SPLIT = 512, LANES = 64, VECTORS = (DIM + PER - 1u) / PER, OWN = (DIM_V + LANES - 1u) / LANES;
const uint VECTORS_V = (DIM_V + PER - 1u) / PER;
shared float query[VECTORS * PER];
shared float scores[SPLIT];
shared float lanes[LANES];

#include "softmax.glsl"
#include "visible.glsl"

float key_score(uint base, uint place) {
    precise float score = 0.0;
    for (uint v = 0; v < VECTORS; v++) {
        const uvec4 words = keys[(base * VECTORS + v) * PAGE + place];
        if (KV == 2u) {
            const uint n_blocks = (DIM + 31u) / 32u;
            const float step = key_scales[(base * n_blocks + v / 2u) * PAGE + place];
            for (uint i = 0; i < 16u; i++) {
                precise float key = step * float(int(words[i / 4u] << (24u - 8u * (i & 3u))) >> 24);
                score = score + query[v * 16u + i] * key;
            }
        } else if (KV == 1u) {
            for (uint i = 0; i < 4u; i++) {
                score = score + query[v * 8u + 2u * i] * half_value(words[i] & 0xffffu);
                score = score + query[v * 8u + 2u * i + 1u] * half_value(words[i] >> 16);
            }
        } else {
            for (uint i = 0; i < 4u; i++) score = score + query[v * 4u + i] * uintBitsToFloat(words[i]);
        }
    }
    return score;
}

float value_at(uint base, uint place, uint channel) {
    const uint row = (base * PAGE + place) * VECTORS_V * 4u;
    if (KV == 0u) return uintBitsToFloat(values[row + channel]);
    if (KV == 1u) return half_value((values[row + channel / 2u] >> (16u * (channel & 1u))) & 0xffffu);
    const uint n_blocks = (DIM_V + 31u) / 32u;
    precise float value = value_scales[(base * n_blocks + channel / 32u) * PAGE + place] *
                          float(int(values[row + channel / 4u] << (24u - 8u * (channel & 3u))) >> 24);
    return value;
}

void main() {
    const uint lane = gl_LocalInvocationIndex, head = gl_WorkGroupID.x, token = gl_WorkGroupID.y;
    const uint position = positions[token], sequence = positions[max_tokens + token];
    const uint first = first_seen(token), last = last_seen(token);
    const uint head_kv = head / (n_head / n_head_kv);
    uint from = first / SPLIT, to = last / SPLIT;
    if (APART != 0u) {
        if (gl_WorkGroupID.z < from || gl_WorkGroupID.z > to) return;
        from = to = gl_WorkGroupID.z;
    }
    for (uint i = lane; i < VECTORS * PER; i += LANES) {
        precise float q = i < DIM ? queries[token * in_stride + head * DIM + i] * scale : 0.0;
        query[i] = q;
    }
    barrier();
    Running running = Running(LOWEST, 0.0);
    precise float sums[OWN];
    for (uint i = 0; i < OWN; i++) sums[i] = 0.0;
    vec2 factors;
    for (uint split = from; split <= to; split++) {
        const uint start = split * SPLIT, begin = max(start, first), end = min(start + SPLIT, last + 1u);
        float highest = LOWEST;
        for (uint p = start + lane; p < end; p += LANES) {
            if (p < begin) continue;
            const uint page = tables[sequence * n_pages + p / PAGE];
            precise float score = key_score(page * n_head_kv + head_kv, p % PAGE);
            if (cap > 0.0) score = soft_capped(cap, score);
            if (SLOPES != 0u) score = score - slopes[head] * abs(float(position) - float(p));
            scores[p - start] = score;
            highest = max(highest, score);
        }
        highest = largest_of(highest);
        precise float mine = 0.0;
        for (uint p = start + lane; p < end; p += LANES) {
            if (p < begin) continue;
            precise float weight = exp_of(scores[p - start] - highest);
            scores[p - start] = weight;
            mine = mine + weight;
        }
        running = joined(running, Running(highest, sum_of(mine)), factors);
        for (uint i = 0; i < OWN; i++) {
            const uint channel = i * LANES + lane;
            precise float sum = 0.0;
            if (channel < DIM_V)
                for (uint p = begin; p < end; p++) {
                    const uint page = tables[sequence * n_pages + p / PAGE];
                    sum = sum + scores[p - start] * value_at(page * n_head_kv + head_kv, p % PAGE, channel);
                }
            sums[i] = sums[i] * factors.x + sum * factors.y;
        }
        barrier();
    }
    if (APART != 0u) {
        const uint at = ((token * n_head + head) * n_splits + from) * (DIM_V + 2u);
        if (lane == 0u) {
            outputs[at] = running.highest;
            outputs[at + 1u] = running.total;
        }
        for (uint i = 0; i < OWN; i++)
            if (i * LANES + lane < DIM_V) outputs[at + 2u + i * LANES + lane] = sums[i];
        return;
    }
    factors.x = 1.0;
    if (SINKS != 0u) running = joined(running, Running(sinks[head], 1.0), factors);  // it has no value
    for (uint i = 0; i < OWN; i++) {
        const uint channel = i * LANES + lane;
        precise float result = sums[i] * factors.x / running.total;
        if (channel < DIM_V) outputs[token * out_stride + head * DIM_V + channel] = result;
    }
}
