#version 450
// Rounds rows whose own kernel does not round them.
#include "common.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const int OFF = 0;  // for tests
layout(set = 0, binding = 0) readonly buffer Inputs { vec4 inputs[]; };
layout(set = 0, binding = 1) writeonly buffer Rounded { uint rounded[]; };
layout(push_constant) uniform Push { uint n_blocks, in_stride; };

const uint ROUNDING = 64;
#include "rounding.glsl"

void main() {
    const uint block = gl_GlobalInvocationID.x / 8u, token = gl_WorkGroupID.y;
    const bool is_there = block < n_blocks;
    const uint from = (token * in_stride + block * 32u) / 4u + (gl_LocalInvocationIndex & 7u);
    round_block(is_there ? inputs[from] : vec4(0.0), is_there, token * n_blocks + block, OFF);
}
