#version 450
// A causal convolution over the tokens of a sequence, per channel (operations.ShortConv). A state has the
// last inputs, oldest first: [(kernel - 1) * dilation][width].
#include "common.glsl"
#include "states.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const uint BIAS = 0;
layout(set = 0, binding = 0) readonly buffer Inputs { float inputs[]; };
layout(set = 0, binding = 1) readonly buffer Weights { float weights[]; };  // [width][kernel]
layout(set = 0, binding = 2) readonly buffer Biases { float biases[]; };
layout(set = 0, binding = 3) buffer States { float states[]; };
layout(set = 0, binding = 4) readonly buffer Steps { uint steps[]; };
layout(set = 0, binding = 5) writeonly buffer Outputs { float outputs[]; };
layout(push_constant) uniform Push { uint width, in_stride, out_stride, kernel, max_tokens, dilation; };

// Return the input of a channel `back` tokens before a token.
float input_at(uint i, uint token, uint back) {
    const uint in_step = token - first_of(token);
    if (back <= in_step) return inputs[(token - back) * in_stride + i];
    const uint slot = state_before(token), past = (kernel - 1u) * dilation;
    return slot == NO_STATE ? 0.0 : states[(slot * past + past - (back - in_step)) * width + i];
}

void main() {
    const uint i = gl_GlobalInvocationID.x, token = gl_GlobalInvocationID.y;
    if (i >= width) return;
    precise float sum = 0.0;
    for (uint j = 0; j < kernel; j++)
        sum = sum + weights[i * kernel + j] * input_at(i, token, (kernel - 1u - j) * dilation);
    if (BIAS != 0u) sum = sum + biases[i];
    outputs[token * out_stride + i] = sum;
    const uint slot = state_after(token);
    if (slot == NO_STATE) return;
    const uint past = (kernel - 1u) * dilation;
    for (uint j = 0; j < past; j++) states[(slot * past + j) * width + i] = input_at(i, token, past - 1u - j);
}
