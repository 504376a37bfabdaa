#version 450
// Rounds inputs of products to eight bits with one scale per block of 32, as the CPU does
// (csrc/kernels/float_kernels.h). Eight lanes share a block.
#include "common.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const int OFF = 0;  // for tests: units in the last place to add to a quotient
layout(set = 0, binding = 0) readonly buffer Inputs { vec4 inputs[]; };
layout(set = 0, binding = 1) writeonly buffer Outputs { uint outputs[]; };  // layout: rounded.glsl
layout(push_constant) uniform Push { uint n_blocks, in_stride; };

shared uint largest[64];
shared int sums[64];

void main() {
    const uint lane = gl_LocalInvocationIndex, part = lane & 7u, first = lane & 56u;
    const uint block = gl_GlobalInvocationID.x / 8u, token = gl_WorkGroupID.y;
    const bool is_there = block < n_blocks;
    const vec4 x = is_there ? inputs[(token * in_stride + block * 32u) / 4u + part] : vec4(0.0);
    const uvec4 magnitudes = floatBitsToUint(x) & 0x7fffffffu;  // integers in the order of the floats
    largest[lane] = max(max(magnitudes.x, magnitudes.y), max(magnitudes.z, magnitudes.w));
    barrier();
    uint bits = 0;
    for (uint i = 0; i < 8u; i++) bits = max(bits, largest[first + i]);
    const bool is_finite = bits < 0x7f800000u;
    float inverse = 0.0, scale = uintBitsToFloat(0x7fc00000u);
    if (is_finite) {
        const float most = uintBitsToFloat(bits);
        precise float small = most / 127.0;  // for less than 127 times the smallest normal number
        scale = bits < 0x04000000u ? small : divided(most, 127.0, OFF);
        if (bits > 0x02fe0000u) inverse = divided(127.0, most, OFF);  // below, the inverse overflows: codes are 0
    }
    uint word = 0;
    int sum = 0;
    [[unroll]] for (uint i = 0; i < 4u; i++) {
        precise float code = roundEven(x[i] * inverse);
        const int whole = is_finite ? int(code) : 0;
        word |= (uint(whole) & 0xffu) << (8u * i);
        sum += whole;
    }
    sums[lane] = sum;
    barrier();
    if (!is_there) return;
    const uint at = (token * n_blocks + block) * 12u;
    outputs[at + part] = word;
    if (part != 0u) return;
    ivec2 halves = ivec2(0);
    for (uint i = 0; i < 4u; i++) halves += ivec2(sums[first + i], sums[first + 4u + i]);
    precise float scaled = scale * float(halves.x + halves.y);
    outputs[at + 8u] = floatBitsToUint(scale);
    outputs[at + 9u] = floatBitsToUint(scaled);
    outputs[at + 10u] = uint(halves.x);
    outputs[at + 11u] = uint(halves.y);
}
