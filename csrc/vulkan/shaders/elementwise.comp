#version 450
// Sums, products and activations, value by value.
#include "common.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const uint KIND = 0;
layout(constant_id = 1) const uint ACTIVATION = 0;
layout(set = 0, binding = 0) readonly buffer Firsts { float firsts[]; };
layout(set = 0, binding = 1) readonly buffer Seconds { float seconds[]; };
layout(set = 0, binding = 2) writeonly buffer Outputs { float outputs[]; };
layout(push_constant) uniform Push {
    uint width, first_stride, second_stride, out_stride;  // second_stride 0: the same for all tokens
    uint second_width, first_neuron;
    float number;
};
const uint ADD = 0, MULTIPLY = 1, SCALE = 2, SOFT_CAP = 3, ACTIVATE = 4, GATED = 5, WEIGHTED = 6, MASK = 7,
           THRESHOLD = 8;
const uint SILU = 0, GELU_TANH = 1, RELU = 2, RELU2 = 3, FATRELU = 4, SIGMOID = 5, CLAMPED_SILU = 6,
           CLAMPED_PLUS_ONE = 7, EXP = 8;

float activated(float x) {
    precise float y = x;
    if (ACTIVATION == SILU) y = x / (1.0 + exp_of(-x));
    if (ACTIVATION == GELU_TANH) {
        precise float u = x * (x * x * 0.0713548162726 + 1.59576912161);
        y = x / (1.0 + exp_of(-u));
    }
    if (ACTIVATION == RELU) y = max(x, 0.0);
    if (ACTIVATION == RELU2) y = max(x, 0.0) * max(x, 0.0);
    if (ACTIVATION == FATRELU) y = x >= number ? x : 0.0;
    if (ACTIVATION == SIGMOID) y = 1.0 / (1.0 + exp_of(-x));
    if (ACTIVATION == CLAMPED_SILU) {
        const float m = min(x, number);
        precise float u = -1.702 * m;
        y = m / (1.0 + exp_of(u));
    }
    if (ACTIVATION == CLAMPED_PLUS_ONE) y = max(min(x, number), -number) + 1.0;
    if (ACTIVATION == EXP) y = exp_of(x);
    return y;
}

void main() {
    const uint i = gl_GlobalInvocationID.x, token = gl_GlobalInvocationID.y;
    if (i >= width) return;
    const float a = firsts[token * first_stride + i];
    precise float y = a;
    if (KIND == SCALE) y = a * number;
    if (KIND == SOFT_CAP) y = soft_capped(number, a);
    if (KIND == ACTIVATE) y = activated(a);
    if (KIND == THRESHOLD) y = seconds[token] != 0.0 && abs(a) < number ? 0.0 : a;
    if (KIND == MASK) {
        if (i >= first_neuron && seconds[token * second_stride + i - first_neuron] < number) y = 0.0;
    }
    if (KIND == ADD || KIND == MULTIPLY || KIND == GATED || KIND == WEIGHTED) {
        const float b = seconds[token * second_stride + (second_width == 1u ? 0u : i)];
        if (KIND == ADD) y = a + b;
        if (KIND == MULTIPLY) y = a * b;
        if (KIND == GATED) y = activated(a) * b;
        if (KIND == WEIGHTED) y = (a * number) * b;
    }
    outputs[token * out_stride + i] = y;
}
