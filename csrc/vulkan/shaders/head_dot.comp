#version 450
// x times the sum of a * b * weight of its head (operations.HeadDot); or x, shared by all heads, times a gate of the sum of a *
// b (operations.SimilarityGate). Each lane sums every 64th product, then a tree adds the lanes.
#include "common.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const uint GATE = 0;
layout(set = 0, binding = 0) readonly buffer Inputs { float inputs[]; };
layout(set = 0, binding = 1) readonly buffer Firsts { float firsts[]; };
layout(set = 0, binding = 2) readonly buffer Seconds { float seconds[]; };
layout(set = 0, binding = 3) readonly buffer Weights { float weights[]; };
layout(set = 0, binding = 4) writeonly buffer Outputs { float outputs[]; };
layout(push_constant) uniform Push { uint dim, dim_v, in_stride, first_stride, second_stride, out_stride; };
const uint LANES = 64;
shared float lanes[LANES];
#include "sums.glsl"

void main() {
    const uint lane = gl_LocalInvocationIndex, head = gl_WorkGroupID.x, token = gl_WorkGroupID.y;
    precise float mine = 0.0;
    for (uint i = head * dim + lane; i < (head + 1u) * dim; i += LANES) {
        precise float product = firsts[token * first_stride + i] * seconds[token * second_stride + i];
        mine = mine + (GATE != 0u ? product : product * weights[i]);
    }
    precise float sum = sum_of(mine);
    if (GATE != 0u) {
        sum /= sqrt(float(dim));
        sum = 1.0 / (1.0 + exp_of(-sign(sum) * sqrt(max(abs(sum), 1e-6))));
    }
    const uint shared_x = GATE != 0u ? head * dim_v : 0u;
    for (uint i = head * dim_v + lane; i < (head + 1u) * dim_v; i += LANES) {
        precise float y = inputs[token * in_stride + i - shared_x] * sum;
        outputs[token * out_stride + i] = y;
    }
}
