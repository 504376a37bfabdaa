#version 450
// What needs moments of a part of a row (a head, or all): RMSNorm, LayerNorm, GaussianTopK and MatchMagnitude. Lanes sum
// every 64th value, then a tree the lanes.
#include "common.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const uint KIND = 0;
layout(constant_id = 1) const uint WEIGHT = 0;
layout(constant_id = 2) const uint BIAS = 0;
layout(set = 0, binding = 0) readonly buffer Inputs { float inputs[]; };
layout(set = 0, binding = 1) readonly buffer Weights { float weights[]; };  // or what is matched, of each token
layout(set = 0, binding = 2) readonly buffer Biases { float biases[]; };
layout(set = 0, binding = 3) writeonly buffer Outputs { float outputs[]; };
layout(push_constant) uniform Push {
    uint width, in_stride, out_stride, weight_stride;  // of a part; weight_stride: 0 where parts share them
    float eps;                                         // or the multiplier of a deviation, or the least mean
};
const uint RMS = 0, LAYER = 1, TOP_K = 2, MATCH = 3, LANES = 64;
shared float lanes[LANES];
#include "sums.glsl"

void main() {
    const uint lane = gl_LocalInvocationIndex, part = gl_WorkGroupID.x, token = gl_WorkGroupID.y;
    const uint from = token * in_stride + part * width, to = token * out_stride + part * width;
    precise float mean = 0.0;
    if (KIND == LAYER || KIND == TOP_K) {
        precise float sum = 0.0;
        for (uint i = lane; i < width; i += LANES) sum = sum + inputs[from + i];
        mean = sum_of(sum) / float(width);
    }
    precise float squares = 0.0;
    for (uint i = lane; i < width; i += LANES) {
        precise float x = inputs[from + i] - mean;
        squares = squares + x * x;
    }
    squares = sum_of(squares) / float(width);
    precise float cutoff = 0.0, scale = 0.0;
    if (KIND == TOP_K) {
        cutoff = mean + eps * sqrt(squares);
    } else if (KIND == MATCH) {
        precise float wanted = 0.0;
        for (uint i = lane; i < width; i += LANES) {
            const float x = weights[token * weight_stride + i];
            wanted = wanted + x * x;
        }
        scale = sqrt(sum_of(wanted) / float(width)) / sqrt(max(squares, eps));
    } else {
        scale = 1.0 / sqrt(squares + eps);
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
