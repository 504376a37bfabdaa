#version 450
// A product of quantised weights with many tokens: a tile of 32 rows and 32 tokens, shared by four groups of 64 lanes. A lane
// of each group has the same four by four outputs; a group has every fourth of the sixteen sums, and computes them in the order
// of their tree, so that at most two wait. Finally the groups' sums are added.
#include "rounded.glsl"

layout(local_size_x = 8, local_size_y = 8, local_size_z = 4) in;

// A group's part of shared memory for a block: vectors of four rows or tokens, first their codes of four
// columns, then, from these offsets on, their other data.
const uint GROUPS = 4, VALUES = 64, SCALES = 128, INPUT_SCALES = 136, MINIMUMS = 144, INPUT_SUMS = 152, ZEROS = 160,
           PARTS = 176, SIZE = 192;
shared uvec4 words[GROUPS * SIZE];

// Registers are scarce. With minimums, and for Q6_K, whose halves have dot products of their own, half of the
// outputs are computed at a time.
const uint PASSES = TYPE == Q6_K || HAS_MINIMUM ? 2u : 1u, AT_ONCE = 16u / PASSES;

// Load a block of 32 rows and 32 tokens into shared memory. A lane loads half of the codes of a row and of a token.
void bring(uint tile, uint block, uint n_blocks, uint start) {
    const uint lane = gl_LocalInvocationIndex & 63u, row = lane & 31u, side = lane / 32u, place = lane & 3u;
    Raw raw = load(tile, block, row, n_blocks);
    if (IS_Q8) raw.first = raw.second = codes[((tile * n_blocks + block) * VECTORS + side) * 32u + row];
    const Block b = unpacked(raw, block, row);
    const uvec4 x = inputs[(start + block) * 3u + side];
    const Facts facts = facts_of(inputs[(start + block) * 3u + 2u]);
    const uint at = gl_LocalInvocationID.z * SIZE + row / 4u, from = at + side * 32u;
    [[unroll]] for (uint k = 0; k < 4u; k++) {
        words[from + k * 8u][place] = word_of(raw, side, k);
        words[from + k * 8u + VALUES][place] = x[k];
    }
    words[at + SCALES][place] = floatBitsToUint(b.scale);
    words[at + INPUT_SCALES][place] = floatBitsToUint(facts.scale);
    if (HAS_MINIMUM) {
        words[at + MINIMUMS][place] = floatBitsToUint(b.minimum);
        words[at + INPUT_SUMS][place] = floatBitsToUint(facts.sum);
    }
    [[unroll]] for (uint h = 0; h < DOTS; h++) {
        if (TYPE == Q6_K) words[at + PARTS + h * 8u][place] = floatBitsToUint(b.parts[h]);
        if (ZERO != 0) words[at + ZEROS + h * 8u][place] = uint(facts.zeros[h]);
    }
}

void join(inout float sums[16], float others[16]) {
    [[unroll]] for (uint i = 0; i < 16u; i++) {
        precise float both = sums[i] + others[i];
        sums[i] = both;
    }
}

void main() {
    const uint rows = gl_LocalInvocationID.x, tokens = gl_LocalInvocationID.y, group = gl_LocalInvocationID.z;
    const Place place = place_of(gl_WorkGroupID.y);
    if (EXPERTS != 0u && place.expert == NONE) return;
    const uint n_blocks = n_cols / 32u, start = start_of(place, gl_LocalInvocationIndex & 31u, n_blocks);
    const uint tile = first_tile + gl_WorkGroupID.x + place.expert * ((n_rows + 31u) / 32u);
    const uint of_rows = group * SIZE + rows, of_tokens = group * SIZE + tokens;
    float sums[16], waiting[2][16];
    for (uint turn = 0; turn < SUMS / GROUPS; turn++) {
        [[unroll]] for (uint i = 0; i < 16u; i++) sums[i] = 0.0;
        for (uint from = (bitfieldReverse(turn) >> 30) * GROUPS; from < n_blocks; from += SUMS) {
            bring(tile, min(from + group, n_blocks - 1u), n_blocks, start);
            barrier();
            if (from + group < n_blocks)
                [[unroll]] for (uint pass = 0; pass < PASSES; pass++) {
                    memoryBarrierShared();  // otherwise the compiler would keep a pass's reads for the next pass
                    ivec2 dots[AT_ONCE];
                    [[unroll]] for (uint i = 0; i < AT_ONCE; i++) {
                        const uint t = pass * AT_ONCE / 4u + i / 4u;
                        [[unroll]] for (uint h = 0; h < 2u; h++)
                            dots[i][h] = ZERO != 0 && h < DOTS ? int(words[of_tokens + ZEROS + h * 8u][t]) : 0;
                    }
                    [[unroll]] for (uint k = 0; k < 8u; k++) {
                        const uvec4 w = words[of_rows + k * 8u], x = words[of_tokens + k * 8u + VALUES];
                        const uint h = k / 4u % DOTS;
                        [[unroll]] for (uint i = 0; i < AT_ONCE; i++)
                            dots[i][h] = with_dot(dots[i][h], w[i & 3u], x[pass * AT_ONCE / 4u + i / 4u]);
                    }
                    const vec4 scales = uintBitsToFloat(words[of_rows + SCALES]);
                    const vec4 minimums = uintBitsToFloat(words[of_rows + MINIMUMS]);
                    const vec4 input_scales = uintBitsToFloat(words[of_tokens + INPUT_SCALES]);
                    const vec4 input_sums = uintBitsToFloat(words[of_tokens + INPUT_SUMS]);
                    const vec4 first_parts = uintBitsToFloat(words[of_rows + PARTS]);
                    const vec4 second_parts = uintBitsToFloat(words[of_rows + PARTS + 8u]);
                    [[unroll]] for (uint i = 0; i < AT_ONCE; i++) {
                        const uint r = i & 3u, t = pass * AT_ONCE / 4u + i / 4u, at = 4u * t + r;
                        sums[at] = added(sums[at], dots[i], scales[r], minimums[r], vec2(first_parts[r], second_parts[r]),
                                         input_scales[t], input_sums[t]);
                    }
                }
            barrier();
        }
        // Like counting in binary: sum 0 joins 1, then 2 joins 3, then both results join.
        [[dont_flatten]] if ((turn & 1u) == 0u) {
            waiting[0] = sums;
        } else {
            join(sums, waiting[0]);
            [[dont_flatten]] if (turn == 1u) waiting[1] = sums;
        }
    }
    join(sums, waiting[1]);
    // Two groups pass their sums to two others; then one of these passes its sums to the first group.
    const uint of_lane = tokens * 8u + rows;
    [[unroll]] for (uint n = 2; n > 0u; n /= 2u) {
        if (group >= n && group < 2u * n)
            [[unroll]] for (uint i = 0; i < 16u; i++)
                words[(group & 1u) * 2u * SIZE + i / 4u * 64u + of_lane][i & 3u] = floatBitsToUint(sums[i]);
        barrier();
        if (group < n) {
            float others[16];
            [[unroll]] for (uint i = 0; i < 16u; i++)
                others[i] = uintBitsToFloat(words[((group + n) & 1u) * 2u * SIZE + i / 4u * 64u + of_lane][i & 3u]);
            join(sums, others);
        }
    }
    if (group != 0u) return;
    [[unroll]] for (uint i = 0; i < 16u; i++)
        put(place, tokens * 4u + i / 4u, gl_WorkGroupID.x * 32u + rows * 4u + (i & 3u), sums[i]);
}
