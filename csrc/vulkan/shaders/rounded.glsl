// Products of quantised weights with inputs rounded to eight bits (rounding.glsl), summed in the CPU's order
// (csrc/kernels/kernels.h). The products of a block are an exact integer. Block b belongs to sum b % 16 of
// sixteen, which adds its blocks in order by fused multiply-add. A tree adds these sums.
#include "common.glsl"
#include "weights.glsl"

layout(set = 0, binding = 2) readonly buffer Inputs { uvec4 inputs[]; };
#include "product.glsl"

const uint SUMS = 16;
const uint DOTS = TYPE == Q6_K ? 2 : 1;  // per block: one per half, if halves have scales of their own

// A block of inputs without its codes: their scale, the scale times the sum of the codes, and the start of
// dot products with weight codes, which corrects for their offset ZERO.
struct Facts {
    float scale, sum;
    ivec2 zeros;
};

Facts facts_of(uvec4 words) {
    const ivec2 codes = DOTS == 2u ? ivec2(words.zw) : ivec2(words.z + words.w, 0);
    return Facts(uintBitsToFloat(words.x), uintBitsToFloat(words.y), -ZERO * codes);
}

// Add a block's products to `sum`.
float added(float sum, ivec2 dots, float scale, float minimum, vec2 parts, float input_scale, float input_sum) {
    precise float both = scale * input_scale, whole = float(dots.x);
    if (DOTS == 2u) whole = fma(parts.x, whole, parts.y * float(dots.y));  // below 2^24: exact
    const float more = fused(both, whole, sum);
    return HAS_MINIMUM ? fused(minimum, input_sum, more) : more;
}
