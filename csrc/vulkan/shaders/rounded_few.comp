#version 450
// A product of quantised weights with few tokens. Each of ROWS rows has SIDE lanes, which take blocks SIDE
// apart, several at a time, so that enough reads are in flight. With gates, a workgroup computes rows of the
// gate and then the same rows of up.
#include "rounded.glsl"

layout(constant_id = 3) const uint ROWS = 16;
layout(constant_id = 4) const uint SIDE = 16;  // a lane has SUMS / SIDE of the sixteen sums
layout(constant_id = 6) const uint ACTIVATION = 0;
layout(constant_id = 7) const uint AHEAD = 4;  // blocks of a lane that are read at a time, a multiple of OWN
layout(local_size_x_id = 3, local_size_y_id = 4) in;
layout(set = 0, binding = 7) writeonly buffer Rounded { uint rounded[]; };

const uint OWN = SUMS / SIDE;
const uint ROUNDING = RESULT == GATED_ROUNDED ? ROWS * SIDE : 8u;
// A turn is ROWS rows of gate or up; a rounded block has 32 neurons.
const uint TURNS = RESULT == GATED_ROUNDED ? 2u * 32u / ROWS : 2u;
shared float parts[SUMS * TOKENS * ROWS];
shared float gates[RESULT >= GATED ? TOKENS * ROWS : 1u];
shared float neurons[RESULT == GATED_ROUNDED ? TOKENS * 32u : 1u];

#include "activation.glsl"
#include "rounding.glsl"

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

// Sum the products of a row with all tokens. Returns the sum of token `side` in the lanes that have one.
float sum_of_row(uint tile, uint row, bool wanted, uint starts[TOKENS]) {
    const uint x = gl_LocalInvocationID.x, side = gl_LocalInvocationID.y, n_blocks = n_cols / 32u;
    float sums[OWN * TOKENS];
    [[unroll]] for (uint i = 0; i < OWN * TOKENS; i++) sums[i] = 0.0;
    if (wanted) {
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
    if (side >= TOKENS) return 0.0;
    precise float lanes[SUMS];
    [[unroll]] for (uint i = 0; i < SUMS; i++) lanes[i] = parts[(i * TOKENS + side) * ROWS + x];
    [[unroll]] for (uint n = SUMS / 2u; n > 0u; n /= 2u)
        [[unroll]] for (uint i = 0; i < n; i++) lanes[i] = lanes[i] + lanes[i + n];
    return lanes[0];
}

// Compute neurons: the activated product with the gate's row, times the product with up's row.
void put_neurons(Place place, uint tiles, uint starts[TOKENS]) {
    const uint x = gl_LocalInvocationID.x, side = gl_LocalInvocationID.y;
    for (uint turn = 0; turn < TURNS; turn++) {
        const uint which = turn & 1u, first = (gl_WorkGroupID.x * (TURNS / 2u) + turn / 2u) * ROWS, neuron = first + x;
        const uint tile = first_tile + first / 32u + which * tiles;
        precise float total = sum_of_row(tile, first % 32u + x, neuron < n_rows, starts);
        if (side < TOKENS) {
            if ((flags & BIAS) != 0u) total = total + biases[which * bias_rows + first_bias + neuron];
            if (which == 0u) {
                gates[side * ROWS + x] = total;
            } else {
                precise float both = activated(gates[side * ROWS + x], threshold, vec3(0.0)) * total;
                if (RESULT == GATED_ROUNDED)
                    neurons[side * 32u + turn / 2u * ROWS + x] = both;
                else if (neuron < n_rows && place.first + side < n_tokens)
                    outputs[(place.first + side) * out_stride + first_out + neuron] = both;
            }
        }
        barrier();
    }
    if (RESULT != GATED_ROUNDED) return;
    const uint lane = gl_LocalInvocationIndex, token = lane / 8u;
    const bool is_there = token < TOKENS && place.first + token < n_tokens;
    vec4 of_lane = vec4(0.0);
    if (is_there)
        [[unroll]] for (uint c = 0; c < 4u; c++) of_lane[c] = neurons[4u * lane + c];
    round_block(of_lane, is_there, (place.first + token) * out_stride + first_out / 32u + gl_WorkGroupID.x, 0);
}

void main() {
    const uint x = gl_LocalInvocationID.x, side = gl_LocalInvocationID.y;
    const Place place = place_of(gl_WorkGroupID.y);
    if (EXPERTS != 0u && place.expert == NONE) return;
    const uint first = gl_WorkGroupID.x * ROWS, r = first + x, tiles = (n_rows + 31u) / 32u;
    uint starts[TOKENS];
    [[unroll]] for (uint t = 0; t < TOKENS; t++) starts[t] = start_of(place, t, n_cols / 32u);
    if (RESULT >= GATED) {
        put_neurons(place, tiles, starts);
        return;
    }
    const uint tile = first_tile + first / 32u + place.expert * tiles;
    const float sum = sum_of_row(tile, first % 32u + x, is_wanted(r, place.first), starts);
    if (side < TOKENS) put(place, side, r, sum);
}
