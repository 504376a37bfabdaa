#version 450
// Operations that need moments of a part of a row (a head, or all): RMSNorm, LayerNorm, GaussianTopK and MatchMagnitude. All
// lanes read a thousand values, sixteen lanes sum every sixteenth one, as the CPU does, and a tree adds these sums.
#include "common.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const uint KIND = 0;
layout(constant_id = 1) const uint WEIGHT = 0;
layout(constant_id = 2) const uint BIAS = 0;
layout(set = 0, binding = 0) readonly buffer Inputs { float inputs[]; };
layout(set = 0, binding = 1) readonly buffer Weights { float weights[]; };  // or the values to match, per token
layout(set = 0, binding = 2) readonly buffer Biases { float biases[]; };
layout(set = 0, binding = 3) writeonly buffer Outputs { float outputs[]; };
layout(push_constant) uniform Push {
    uint width, in_stride, out_stride, weight_stride;  // of a part; weight_stride 0: parts share the weights
    float eps;  // or the multiplier of a deviation, or the least mean
};
const uint RMS = 0, LAYER = 1, TOP_K = 2, MATCH = 3, LANES = 64, SUMS = 16, CHUNK = 1024;
shared float chunk[CHUNK];
shared float lanes[SUMS];

const uint PLAIN = 0, SQUARES = 1, OTHERS = 2;  // terms of the sum: values, squares, or squares of the values to match

// Sum `width` values, or the squares of their differences from a mean.
float sum_of(uint kind, uint from, float mean) {
    const uint lane = gl_LocalInvocationIndex;
    precise float sum = 0.0;
    for (uint first = 0; first < width; first += CHUNK) {
        const uint n = min(width - first, CHUNK);
        barrier();
        for (uint i = lane; i < n; i += LANES) {
            precise float x = kind == OTHERS ? weights[from + first + i] : inputs[from + first + i];
            if (kind == SQUARES) x = x - mean;
            chunk[i] = x;
        }
        barrier();
        if (lane < SUMS)
            for (uint i = lane; i < n; i += SUMS) sum = kind == PLAIN ? sum + chunk[i] : fused(chunk[i], chunk[i], sum);
    }
    if (lane < SUMS) lanes[lane] = sum;
    barrier();
    precise float sums[SUMS];
    [[unroll]] for (uint i = 0; i < SUMS; i++) sums[i] = lanes[i];
    [[unroll]] for (uint n = SUMS / 2u; n > 0u; n /= 2u)
        [[unroll]] for (uint i = 0; i < n; i++) sums[i] = sums[i] + sums[i + n];
    return sums[0];
}

void main() {
    const uint lane = gl_LocalInvocationIndex, part = gl_WorkGroupID.x, token = gl_WorkGroupID.y;
    const uint from = token * in_stride + part * width, to = token * out_stride + part * width;
    const float n = float(width);
    float mean = 0.0;
    if (KIND == LAYER || KIND == TOP_K) mean = quotient(sum_of(PLAIN, from, 0.0), n);
    const float squares = quotient(sum_of(SQUARES, from, mean), n);
    precise float cutoff = 0.0, scale = 0.0;
    if (KIND == TOP_K) {
        precise float spread = eps * root(squares);
        cutoff = mean + spread;
    } else if (KIND == MATCH) {
        const float wanted = quotient(sum_of(OTHERS, token * weight_stride, 0.0), n);
        scale = quotient(root(wanted), root(max(squares, eps)));
    } else {
        precise float above = squares + eps;
        scale = quotient(1.0, root(above));
    }
    for (uint i = lane; i < width; i += LANES) {
        precise float x = inputs[from + i];
        if (KIND == TOP_K)
            x = max(x - cutoff, 0.0);
        else
            x = (x - mean) * scale;
        if (WEIGHT != 0u) x = x * weights[part * weight_stride + i];
        if (BIAS != 0u) x = x + biases[part * weight_stride + i];
        outputs[to + i] = x;
    }
}
