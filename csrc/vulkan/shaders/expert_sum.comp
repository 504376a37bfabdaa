#version 450
// The sum of what a token's experts yield, each times its weight, in the order of the route.
#include "common.glsl"

layout(local_size_x = 64) in;
layout(set = 0, binding = 0) readonly buffer Parts { float parts[]; };  // [token][rank][width]
layout(set = 0, binding = 1) readonly buffer Routes { float routes[]; };
layout(set = 0, binding = 2) writeonly buffer Outputs { float outputs[]; };
layout(push_constant) uniform Push { uint width, n_used, parts_stride, route_stride, out_stride; };

void main() {
    const uint i = gl_GlobalInvocationID.x, token = gl_GlobalInvocationID.y;
    if (i >= width) return;
    precise float sum = 0.0;
    for (uint rank = 0; rank < n_used; rank++) {
        precise float part = routes[token * route_stride + n_used + rank] * parts[token * parts_stride + rank * width + i];
        sum = sum + part;
    }
    outputs[token * out_stride + i] = sum;
}
