#version 450
// Copies the rows of some tokens.
layout(local_size_x = 64) in;
layout(set = 0, binding = 0) readonly buffer Inputs { float inputs[]; };
layout(set = 0, binding = 1) readonly buffer Chosen { uint chosen[]; };
layout(set = 0, binding = 2) writeonly buffer Outputs { float outputs[]; };
layout(push_constant) uniform Push { uint width, in_stride, out_stride; };

void main() {
    const uint i = gl_GlobalInvocationID.x, row = gl_GlobalInvocationID.y;
    if (i < width) outputs[row * out_stride + i] = inputs[chosen[row] * in_stride + i];
}
