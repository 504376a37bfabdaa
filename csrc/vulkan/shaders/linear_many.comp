#version 450
// A matrix product of floats with many tokens: a tile of 32 rows and 32 tokens. Each lane has every eighth of both.
#include "linear.glsl"

layout(local_size_x = 8, local_size_y = 8) in;
shared uvec4 weights[VECTORS][32];  // [vector][row]
shared vec4 values[8][32];          // [four columns][token]

void main() {
    const uint lane = gl_LocalInvocationIndex, own = lane & 31u, side = lane / 32u;
    const uint rows = gl_LocalInvocationID.x, tokens = gl_LocalInvocationID.y;  // every eighth, starting here
    const Place place = place_of(gl_WorkGroupID.y);
    if (EXPERTS != 0u && place.expert == NONE) return;
    const uint n_blocks = (n_cols + 31u) / 32u, start = start_of(place, own, n_cols) / 4u;
    const uint tile = first_tile + gl_WorkGroupID.x + place.expert * gl_NumWorkGroups.x;
    precise float totals[16], sums[16];
    [[unroll]] for (uint i = 0; i < 16u; i++) totals[i] = 0.0;
    for (uint chunk = 0; chunk < n_blocks; chunk += CHUNK) {
        [[unroll]] for (uint i = 0; i < 16u; i++) sums[i] = 0.0;
        for (uint block = chunk; block < min(chunk + CHUNK, n_blocks); block++) {
            [[unroll]] for (uint i = 0; i < VECTORS / 2u; i++) {
                const uint v = side * (VECTORS / 2u) + i;
                weights[v][own] = codes[((tile * n_blocks + block) * VECTORS + v) * 32u + own];
            }
            [[unroll]] for (uint i = 0; i < 4u; i++)
                values[side * 4u + i][own] = inputs_at(start, block * 8u + side * 4u + i);
            barrier();
            precise float products[16];
            [[unroll]] for (uint i = 0; i < 16u; i++) products[i] = 0.0;
            [[unroll]] for (uint k = 0; k < 8u; k++) {
                uvec4 w[4];
                [[unroll]] for (uint r = 0; r < 4u; r++) w[r] = weights[k * 4u / IN_VECTOR][rows + r * 8u];
                [[unroll]] for (uint i = 0; i < 16u; i++) {
                    const vec4 x = values[k][tokens + i / 4u * 8u];
                    [[unroll]] for (uint c = 0; c < 4u; c++)
                        products[i] = fma(float_of(w[i & 3u], (k * 4u + c) % IN_VECTOR), x[c], products[i]);
                }
            }
            [[unroll]] for (uint i = 0; i < 16u; i++) sums[i] = sums[i] + products[i];
            barrier();
        }
        [[unroll]] for (uint i = 0; i < 16u; i++) totals[i] = totals[i] + sums[i];
    }
    [[unroll]] for (uint i = 0; i < 16u; i++)
        put(place, tokens + i / 4u * 8u, gl_WorkGroupID.x * 32u + rows + (i & 3u) * 8u, totals[i]);
}
