#version 450
// Rotary position embedding of some channels of each head; other channels are copied.
#include "common.glsl"

layout(local_size_x = 64) in;
layout(set = 0, binding = 0) readonly buffer Inputs { float inputs[]; };
layout(set = 0, binding = 1) readonly buffer Angles { vec2 angles[]; };  // cosine and sine, [token][n_rot / 2]
layout(set = 0, binding = 2) writeonly buffer Outputs { float outputs[]; };
layout(push_constant) uniform Push {
    uint width, in_stride, out_stride;
    uint head_dim, first, n_rot, is_neox;
};

#include "rotate.glsl"

void main() {
    const uint i = gl_GlobalInvocationID.x, token = gl_GlobalInvocationID.y;
    if (i >= width) return;
    const uint channel = i % head_dim, head = token * in_stride + i - channel;
    float y = inputs[head + channel];
    if (is_rotated(channel)) {
        const Pair pair = pair_of(channel);
        y = rotated(pair, inputs[head + pair.one], inputs[head + pair.other], angles[token * (n_rot / 2u) + pair.angle]);
    }
    outputs[token * out_stride + i] = y;
}
