#version 450
// Measures how a device converts all 65,536 half floats, multiplies bytes, and computes fma(). The result
// decides which kernels are used (backends/vulkan/kernels.py).
#include "common.glsl"

layout(local_size_x = 64) in;
layout(set = 0, binding = 0) writeonly buffer Outputs { uint outputs[]; };  // 65,536 results of each kind

void main() {
    const uint i = gl_GlobalInvocationID.x;
    outputs[i] = floatBitsToUint(half_value(i));
    outputs[i + 65536u] = uint(with_dot(int(i), i * 0x9e3779b9u, i * 0x85ebca6bu));
    precise float x = 1.0 + float(i & 0xfffu) * 0.000244140625, square = x * x;
    outputs[i + 131072u] = floatBitsToUint(fused(x, x, -square));  // the rounding error of the square
}
