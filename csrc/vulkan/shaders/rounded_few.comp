#version 450
// A product of quantised weights with few tokens. Each of ROWS rows has SIDE lanes, which take blocks SIDE
// apart, several at a time, so that enough reads are in flight.
#include "rounded.glsl"

layout(constant_id = 3) const uint ROWS = 16;
layout(constant_id = 4) const uint SIDE = 16;  // a lane has SUMS / SIDE of the sixteen sums
layout(local_size_x_id = 3, local_size_y_id = 4) in;

const uint OWN = SUMS / SIDE, AHEAD = TOKENS == 1u ? 4u : 2u;
shared float parts[SUMS * TOKENS * ROWS];

// Add a block's products with a token's inputs, which begin at `start`, to `sum`.
float with_block(float sum, Raw raw, uint block, uint row, uint start) {
    const uvec4 first = inputs[(start + block) * 3u], second = inputs[(start + block) * 3u + 1u];
    const Block b = unpacked(raw, block, row);
    ivec2 dots = ivec2(0);
    [[unroll]] for (uint k = 0; k < 4u; k++) {
        dots.x = with_dot(dots.x, b.q[k], first[k]);
        dots[DOTS - 1u] = with_dot(dots[DOTS - 1u], b.q[k + 4u], second[k]);
    }
    const Facts facts = facts_of(inputs[(start + block) * 3u + 2u]);
    return added(sum, dots + facts.zeros, b.scale, b.minimum, b.parts, facts.scale, facts.sum);
}

void main() {
    const uint x = gl_LocalInvocationID.x, side = gl_LocalInvocationID.y;
    // An expert without a slot: the CPU computes it.
    if (EXPERTS != 0u && routes[gl_WorkGroupID.y / n_used * route_stride + gl_WorkGroupID.y % n_used] < 0.0) return;
    const uint r = gl_WorkGroupID.x * ROWS + x, row = r % 32u, n_blocks = n_cols / 32u;
    const Place place = place_of(gl_WorkGroupID.y * TOKENS, n_blocks);
    const uint tile = r / 32u + place.expert * ((n_rows + 31u) / 32u);
    uint starts[TOKENS];
    [[unroll]] for (uint t = 0; t < TOKENS; t++)
        starts[t] = EXPERTS != 0u ? place.start : min(place.first + t, n_tokens - 1u) * in_stride;
    float sums[OWN * TOKENS];
    [[unroll]] for (uint i = 0; i < OWN * TOKENS; i++) sums[i] = 0.0;
    if (is_wanted(r, place.first)) {
        uint from = side;
        for (; from + SIDE * (AHEAD - 1u) < n_blocks; from += SIDE * AHEAD) {
            Raw raw[AHEAD];
            [[unroll]] for (uint i = 0; i < AHEAD; i++) raw[i] = load(tile, from + i * SIDE, row, n_blocks);
            [[unroll]] for (uint i = 0; i < AHEAD; i++)
                [[unroll]] for (uint t = 0; t < TOKENS; t++) {
                    const uint own = (i % OWN) * TOKENS + t;
                    sums[own] = with_block(sums[own], raw[i], from + i * SIDE, row, starts[t]);
                }
        }
        [[unroll]] for (uint i = 0; i < AHEAD - 1u; i++) {
            const uint block = from + i * SIDE;
            if (block < n_blocks) {
                const Raw raw = load(tile, block, row, n_blocks);
                [[unroll]] for (uint t = 0; t < TOKENS; t++) {
                    const uint own = (i % OWN) * TOKENS + t;
                    sums[own] = with_block(sums[own], raw, block, row, starts[t]);
                }
            }
        }
    }
    [[unroll]] for (uint i = 0; i < OWN; i++)
        [[unroll]] for (uint t = 0; t < TOKENS; t++)
            parts[((side + i * SIDE) * TOKENS + t) * ROWS + x] = sums[i * TOKENS + t];
    barrier();
    if (side >= TOKENS) return;
    precise float lanes[SUMS];
    [[unroll]] for (uint i = 0; i < SUMS; i++) lanes[i] = parts[(i * TOKENS + side) * ROWS + x];
    [[unroll]] for (uint n = SUMS / 2u; n > 0u; n /= 2u)
        [[unroll]] for (uint i = 0; i < n; i++) lanes[i] = lanes[i] + lanes[i + n];
    put(place, side, r, lanes[0]);
}
