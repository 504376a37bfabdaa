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

void main() {
    const uint i = gl_GlobalInvocationID.x, token = gl_GlobalInvocationID.y;
    if (i >= width) return;
    const uint from = token * in_stride, channel = i % head_dim, head = i - channel;
    precise float y = inputs[from + i];
    if (channel >= first && channel < first + n_rot) {
        const uint at = channel - first, half_rot = n_rot / 2u;
        const uint pair = is_neox != 0u ? at % half_rot : at / 2u;
        const bool is_second = is_neox != 0u ? at >= half_rot : (at & 1u) != 0u;
        const uint start = from + head + first;
        const float a = inputs[start + (is_neox != 0u ? pair : 2u * pair)];
        const float b = inputs[start + (is_neox != 0u ? pair + half_rot : 2u * pair + 1u)];
        const vec2 angle = angles[token * half_rot + pair];
        if (is_second)
            y = a * angle.y + b * angle.x;
        else
            y = a * angle.x - b * angle.y;
    }
    outputs[token * out_stride + i] = y;
}
