#version 450
// The weighted sum of the results of a token's experts, in the order of the route.
#include "common.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const uint SHARED = 0;  // 1: experts without a slot, -1 in the route, are in `answers`
layout(set = 0, binding = 0) readonly buffer Parts { float parts[]; };  // [token][rank][width]
layout(set = 0, binding = 1) readonly buffer Routes { float routes[]; };
layout(set = 0, binding = 2) writeonly buffer Outputs { float outputs[]; };
layout(set = 0, binding = 3) readonly buffer Answers { float answers[]; };  // as `parts`, from the CPU
layout(push_constant) uniform Push { uint width, n_used, parts_stride, route_stride, out_stride; };

void main() {
    const uint i = gl_GlobalInvocationID.x, token = gl_GlobalInvocationID.y;
    if (i >= width) return;
    precise float sum = 0.0;
    for (uint rank = 0; rank < n_used; rank++) {
        const uint at = token * parts_stride + rank * width + i, route = token * route_stride + rank;
        const float own = SHARED != 0u && routes[route] < 0.0 ? answers[at] : parts[at];
        precise float part = routes[route + n_used] * own;
        sum = sum + part;
    }
    outputs[token * out_stride + i] = sum;
}
