// Products of quantised weights with inputs that are rounded to eight bits (quantize.comp), in the CPU's order of sums
// (csrc/kernels/kernels.h): the products of a block are an exact integer; block b belongs to sum b % 16 of sixteen, which
// adds its blocks one after the other by fused multiply-add; and these are summed by a tree.
#include "common.glsl"
#include "weights.glsl"

layout(set = 0, binding = 2) readonly buffer Inputs { uvec4 inputs[]; };
#include "product.glsl"

const uint SUMS = 16;

// What a block of inputs has beside its codes: their scale, that times the sum of the codes, and this sum of each half.
struct Facts {
    float scale, sum;
    ivec2 codes;
};

Facts facts_of(uvec4 words) {
    return Facts(uintBitsToFloat(words.x), uintBitsToFloat(words.y), ivec2(words.zw));
}

// `sum` and what a block adds to it. dots: of the codes of its halves.
float added(float sum, ivec2 dots, float scale, float minimum, ivec2 parts, Facts x) {
    precise float both = scale * x.scale, whole;
    if (TYPE == Q6_K) {  // below 2^24: floats are exact, and faster
        const vec2 halves = vec2(dots - ZERO * x.codes);
        whole = float(parts.x) * halves.x + float(parts.y) * halves.y;
    } else {
        whole = float(dots.x + dots.y - ZERO * (x.codes.x + x.codes.y));
    }
    const float more = fused(both, whole, sum);
    return HAS_MINIMUM ? fused(minimum, x.sum, more) : more;
}
