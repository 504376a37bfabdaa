#version 450
// RMSNorm and LayerNorm of a part of a row (a head, or all): lanes sum every 64th value, then a tree the lanes.
#include "common.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const uint CENTRED = 0;  // LayerNorm
layout(constant_id = 1) const uint WEIGHT = 0;
layout(constant_id = 2) const uint BIAS = 0;
layout(set = 0, binding = 0) readonly buffer Inputs { float inputs[]; };
layout(set = 0, binding = 1) readonly buffer Weights { float weights[]; };
layout(set = 0, binding = 2) readonly buffer Biases { float biases[]; };
layout(set = 0, binding = 3) writeonly buffer Outputs { float outputs[]; };
layout(push_constant) uniform Push {
    uint width, in_stride, out_stride, weight_stride;  // of a part; weight_stride: 0 where parts share them
    float eps;
};
shared float lanes[64];

float summed(float mine) {
    const uint lane = gl_LocalInvocationIndex;
    barrier();
    lanes[lane] = mine;
    for (uint n = 32u; n > 0u; n /= 2u) {
        barrier();
        precise float sum = lane < n ? lanes[lane] + lanes[lane + n] : 0.0;
        if (lane < n) lanes[lane] = sum;
    }
    barrier();
    return lanes[0];
}

void main() {
    const uint lane = gl_LocalInvocationIndex, part = gl_WorkGroupID.x, token = gl_WorkGroupID.y;
    const uint from = token * in_stride + part * width, to = token * out_stride + part * width;
    precise float mean = 0.0;
    if (CENTRED != 0u) {
        precise float sum = 0.0;
        for (uint i = lane; i < width; i += 64u) sum = sum + inputs[from + i];
        mean = summed(sum) / float(width);
    }
    precise float squares = 0.0;
    for (uint i = lane; i < width; i += 64u) {
        precise float x = inputs[from + i] - mean;
        squares = squares + x * x;
    }
    precise float scale = 1.0 / sqrt(summed(squares) / float(width) + eps);
    for (uint i = lane; i < width; i += 64u) {
        precise float x = (inputs[from + i] - mean) * scale;
        if (WEIGHT != 0u) x = x * weights[part * weight_stride + i];
        if (BIAS != 0u) x = x + biases[part * weight_stride + i];
        outputs[to + i] = x;
    }
}
