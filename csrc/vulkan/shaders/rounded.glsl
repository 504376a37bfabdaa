// Products of quantised weights with inputs that are rounded to eight bits (quantize.comp), in the CPU's order of sums
// (csrc/kernels/kernels.h): the products of a block are an exact integer; block b belongs to sum b % 16 of sixteen, which
// adds its blocks one after the other by fused multiply-add; and these are summed by a tree.
#include "common.glsl"
#include "weights.glsl"

layout(set = 0, binding = 2) readonly buffer Inputs { uvec4 inputs[]; };
#include "product.glsl"

const uint SUMS = 16;
const uint DOTS = TYPE == Q6_K ? 2 : 1;  // of a block: of its halves, where these have scales of their own

// What a block of inputs has beside its codes: their scale, that times the sum of the codes, and what dots with the codes of
// weights begin with, since a weight is its code less ZERO.
struct Facts {
    float scale, sum;
    ivec2 zeros;
};

Facts facts_of(uvec4 words) {
    const ivec2 codes = DOTS == 2u ? ivec2(words.zw) : ivec2(words.z + words.w, 0);
    return Facts(uintBitsToFloat(words.x), uintBitsToFloat(words.y), -ZERO * codes);
}

// `sum` and what a block adds to it.
float added(float sum, ivec2 dots, float scale, float minimum, vec2 parts, float input_scale, float input_sum) {
    precise float both = scale * input_scale, whole = float(dots.x);
    if (DOTS == 2u) whole = fma(parts.x, whole, parts.y * float(dots.y));  // below 2^24: exact
    const float more = fused(both, whole, sum);
    return HAS_MINIMUM ? fused(minimum, input_sum, more) : more;
}
