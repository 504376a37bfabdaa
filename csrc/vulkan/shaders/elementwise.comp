#version 450
// Elementwise sums, products and activations.
#include "common.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const uint KIND = 0;
layout(constant_id = 1) const uint ACTIVATION = 0;
layout(set = 0, binding = 0) readonly buffer Firsts { float firsts[]; };
layout(set = 0, binding = 1) readonly buffer Seconds { float seconds[]; };
layout(set = 0, binding = 2) writeonly buffer Outputs { float outputs[]; };
layout(set = 0, binding = 3) readonly buffer Thirds { float thirds[]; };
layout(push_constant) uniform Push {
    uint width, first_stride, second_stride, out_stride;  // second_stride 0: the same for all tokens
    uint second_width, of_kind;  // of_kind: MASK: the first neuron; SUM: the stride of `thirds`
    float number, positive, negative, linear;
};
const uint ADD = 0, MULTIPLY = 1, SCALE = 2, SOFT_CAP = 3, ACTIVATE = 4, GATED = 5, WEIGHTED = 6, MASK = 7,
           THRESHOLD = 8, DECAY = 9, ADAPTED = 10, SUM = 11;

#include "activation.glsl"

void main() {
    const uint i = gl_GlobalInvocationID.x, token = gl_GlobalInvocationID.y;
    if (i >= width) return;
    const float a = firsts[token * first_stride + i];
    precise float y = a;
    if (KIND == SCALE) y = a * number;
    if (KIND == SOFT_CAP) y = soft_capped(number, a);
    if (KIND == ACTIVATE) y = activated(a, number, vec3(positive, negative, linear));
    if (KIND == DECAY) {  // of a recurrent state: `seconds` has the addends, then the rates
        precise float dt = softplus(a + seconds[i]);
        y = exp_of(seconds[width + i] * dt);
        outputs[token * out_stride + width + i] = dt;
    }
    if (KIND == THRESHOLD) y = seconds[token] != 0.0 && abs(a) < number ? 0.0 : a;
    if (KIND == MASK) {
        if (i >= of_kind && seconds[token * second_stride + i - of_kind] < number) y = 0.0;
    }
    if (KIND == ADD || KIND == MULTIPLY || KIND == GATED || KIND == WEIGHTED || KIND == ADAPTED || KIND == SUM) {
        const float b = seconds[token * second_stride + (second_width == 1u ? 0u : i)];
        if (KIND == ADD) y = a + b;
        if (KIND == SUM) y = (a + b) + thirds[token * of_kind + i];
        if (KIND == MULTIPLY) y = a * b;
        if (KIND == GATED) y = activated(a, number, vec3(positive, negative, linear)) * b;
        if (KIND == ADAPTED) y = b == 0.0 ? 0.0 : (a * number) * b;  // b is 0: the token has no adapter
        if (KIND == WEIGHTED) y = (a * number) * b;
    }
    outputs[token * out_stride + i] = y;
}
