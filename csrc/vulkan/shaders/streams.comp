#version 450
// Adds the weighted streams of y to the streams of x, in the order of y (operations.AddStreams).
#include "common.glsl"

layout(local_size_x = 64) in;
layout(set = 0, binding = 0) readonly buffer Inputs { float inputs[]; };
layout(set = 0, binding = 1) readonly buffer Added { float added[]; };
layout(set = 0, binding = 2) readonly buffer Weights { float weights[]; };  // [stream of x][stream of y]
layout(set = 0, binding = 3) writeonly buffer Outputs { float outputs[]; };
layout(push_constant) uniform Push {
    uint width, in_stride, added_stride, weight_stride, out_stride;
    uint stream_width, n_added, first, weighted, has_own;
    float plus;
};

void main() {
    const uint i = gl_GlobalInvocationID.x, token = gl_GlobalInvocationID.y;
    if (i >= width) return;
    const uint stream = i / stream_width, channel = i % stream_width;
    precise float y = has_own != 0u ? inputs[token * in_stride + i] : 0.0;
    if (stream >= first) {
        precise float sum = 0.0;
        for (uint j = 0; j < n_added; j++) {
            precise float weight = plus;
            if (weighted != 0u) weight = weight + weights[token * weight_stride + stream * n_added + j];
            sum = sum + weight * added[token * added_stride + j * stream_width + channel];
        }
        y = y + sum;
    }
    outputs[token * out_stride + i] = y;
}
