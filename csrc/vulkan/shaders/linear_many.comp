#version 450
// A matrix product of floats with many tokens: a tile of 32 rows and 32 tokens, of which each lane has four by four.
#include "linear.glsl"

layout(local_size_x = 8, local_size_y = 8) in;
shared float weights[32][32];  // [column][row]
shared float values[32][32];   // [column][token]

void main() {
    const uint lane = gl_LocalInvocationIndex;
    const uint row = gl_LocalInvocationID.x * 4u, token = gl_LocalInvocationID.y * 4u;
    const uint tile = gl_WorkGroupID.x, first = gl_WorkGroupID.y * 32u;
    const uint n_blocks = (n_cols + 31u) / 32u;
    precise float totals[16], sums[16];
    [[unroll]] for (uint i = 0; i < 16u; i++) totals[i] = sums[i] = 0.0;
    for (uint block = 0; block < n_blocks; block++) {
        if (lane < 32u) {
            float w[32];
            decode(tile, block, lane, n_blocks, tile, w);
            [[unroll]] for (uint k = 0; k < 32u; k++) weights[k][lane] = w[k];
        } else {
            const uint own = lane - 32u, start = min(first + own, n_tokens - 1u) * in_stride;
            [[unroll]] for (uint k = 0; k < 32u; k += 4u) {
                const vec4 x = inputs_at(start, block * 32u + k);
                [[unroll]] for (uint i = 0; i < 4u; i++) values[k + i][own] = x[i];
            }
        }
        barrier();
        precise float products[16];
        [[unroll]] for (uint i = 0; i < 16u; i++) products[i] = 0.0;
        for (uint k = 0; k < 32u; k++) {
            float w[4], x[4];
            [[unroll]] for (uint i = 0; i < 4u; i++) {
                w[i] = weights[k][row + i];
                x[i] = values[k][token + i];
            }
            [[unroll]] for (uint i = 0; i < 16u; i++) products[i] = fma(w[i & 3u], x[i / 4u], products[i]);
        }
        [[unroll]] for (uint i = 0; i < 16u; i++) sums[i] = sums[i] + products[i];
        if ((block & (CHUNK - 1u)) == CHUNK - 1u || block + 1u == n_blocks)
            [[unroll]] for (uint i = 0; i < 16u; i++) {
                totals[i] = totals[i] + sums[i];
                sums[i] = 0.0;
            }
        barrier();
    }
    const Place place = place_of(first + token, n_cols);
    [[unroll]] for (uint i = 0; i < 16u; i++) put(place, i / 4u, tile * 32u + row + (i & 3u), totals[i]);
}
