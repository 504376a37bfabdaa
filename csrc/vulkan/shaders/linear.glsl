// Matrix products with float weights and float inputs.
//
// The order of a sum is the same in both kernels, for any number of tokens: 32 products in order, starting at
// 0; then eight such sums in order; then these in order.
#include "common.glsl"
#include "weights.glsl"

layout(set = 0, binding = 2) readonly buffer Inputs { vec4 inputs[]; };
#include "product.glsl"

layout(constant_id = 3) const uint WHOLE = 0;  // 1: no block has columns past the last one

const uint CHUNK = 8;  // blocks

// Load four inputs of a row. `row` and `place` are in vectors. Inputs past the last column are 0.
vec4 inputs_at(uint row, uint place) {
    if (WHOLE != 0u) return inputs[row + place];
    if (place * 4u >= n_cols) return vec4(0.0);
    vec4 x = inputs[row + place];
    const uint left = n_cols - place * 4u;
    if (left < 4u) {
        if (left < 2u) x.y = 0.0;
        if (left < 3u) x.z = 0.0;
        x.w = 0.0;
    }
    return x;
}
