#version 450
// A product of quantised weights with many tokens: a tile of 32 rows and 32 tokens, of which each lane has four by four. The
// sixteen sums are taken one after the other, in the order in which their tree is done with them: four wait at most.
#include "rounded.glsl"

layout(local_size_x = 8, local_size_y = 8) in;
shared uvec4 weights[8][8];  // [four columns][four rows]
shared uvec4 values[8][8];   // [four columns][four tokens]
shared vec4 scales[8], minimums[8];
shared ivec4 parts[2][8];
shared uvec4 facts[32];

// Registers are scarce: of Q6_K half of the outputs are computed at a time, and sums wait in shared memory.
const uint PASSES = TYPE == Q6_K ? 2u : 1u, AT_ONCE = 16u / PASSES, HEIGHTS = TYPE == Q6_K ? 1u : 4u;
shared float stored[TYPE == Q6_K ? 3072 : 1];

void main() {
    const uint lane = gl_LocalInvocationIndex, rows = gl_LocalInvocationID.x, tokens = gl_LocalInvocationID.y;
    const uint tile = gl_WorkGroupID.x, first = gl_WorkGroupID.y * 32u, n_blocks = n_cols / 32u;
    const uint own = lane & 31u, group = own / 4u, place = own & 3u;
    const uint start = min(first + own, n_tokens - 1u) * in_stride;
    float sums[16], waiting[HEIGHTS][16];
    for (uint turn = 0; turn < SUMS; turn++) {
        [[unroll]] for (uint i = 0; i < 16u; i++) sums[i] = 0.0;
        for (uint block = bitfieldReverse(turn) >> 28; block < n_blocks; block += SUMS) {
            if (lane < 32u) {
                const Block b = unpacked(load(tile, block, own, n_blocks), block, own);
                [[unroll]] for (uint k = 0; k < 8u; k++) weights[k][group][place] = b.q[k];
                scales[group][place] = b.scale;
                if (HAS_MINIMUM) minimums[group][place] = b.minimum;
                if (TYPE == Q6_K) [[unroll]] for (uint h = 0; h < 2u; h++) parts[h][group][place] = b.parts[h];
            } else {
                const uint at = (start + block) * 3u;
                const uvec4 one = inputs[at], other = inputs[at + 1u];
                [[unroll]] for (uint k = 0; k < 4u; k++) {
                    values[k][group][place] = one[k];
                    values[k + 4u][group][place] = other[k];
                }
                facts[own] = inputs[at + 2u];
            }
            barrier();
            [[unroll]] for (uint pass = 0; pass < PASSES; pass++) {
                ivec2 dots[AT_ONCE];
                [[unroll]] for (uint i = 0; i < AT_ONCE; i++) dots[i] = ivec2(0);
                [[unroll]] for (uint k = 0; k < 8u; k++) {
                    const uvec4 w = weights[k][rows], x = values[k][tokens];
                    const uint part = TYPE == Q6_K ? k / 4u : 0u;
                    [[unroll]] for (uint i = 0; i < AT_ONCE; i++)
                        dots[i][part] = with_dot(dots[i][part], w[i & 3u], x[pass * AT_ONCE / 4u + i / 4u]);
                }
                [[unroll]] for (uint i = 0; i < AT_ONCE; i++) {
                    const uint r = i & 3u, t = pass * AT_ONCE / 4u + i / 4u, at = 4u * t + r;
                    const ivec2 own_parts = TYPE == Q6_K ? ivec2(parts[0][rows][r], parts[1][rows][r]) : ivec2(1);
                    sums[at] = added(sums[at], dots[i], scales[rows][r], HAS_MINIMUM ? minimums[rows][r] : 0.0,
                                     own_parts, facts_of(facts[tokens * 4u + t]));
                }
            }
            barrier();
        }
        // As a binary number is counted up: a sum joins that which waits at its height, and goes on with it.
        bool goes_on = true;
        [[unroll]] for (uint height = 0; height < 4u; height++) {
            const bool joins = goes_on && ((turn >> height) & 1u) != 0u, waits = goes_on && !joins;
            [[unroll]] for (uint i = 0; i < 16u; i++) {
                if (height < HEIGHTS) {
                    precise float both = waiting[height % HEIGHTS][i] + sums[i];
                    if (joins) sums[i] = both;
                    if (waits) waiting[height % HEIGHTS][i] = sums[i];
                } else {
                    const uint at = ((height - HEIGHTS) * 16u + i) * 64u + lane;
                    precise float both = stored[at] + sums[i];
                    if (joins) sums[i] = both;
                    if (waits) stored[at] = sums[i];
                }
            }
            goes_on = joins;
        }
    }
    const Place to = place_of(first + tokens * 4u, n_blocks);
    [[unroll]] for (uint i = 0; i < 16u; i++) put(to, i / 4u, tile * 32u + rows * 4u + (i & 3u), sums[i]);
}
