#version 450
// A matrix product of floats with few tokens. Each of a tile's 32 rows has eight lanes, each with a chunk of columns.
#include "linear.glsl"

layout(local_size_x = 32, local_size_y = 8) in;
shared float parts[8 * 32 * TOKENS];

float block_sum(float w[32], uint start, uint block) {
    vec4 x[8];
    [[unroll]] for (uint i = 0; i < 8u; i++) x[i] = inputs_at(start / 4u, block * 8u + i);
    precise float sum = 0.0;
    [[unroll]] for (uint k = 0; k < 32u; k++) sum = fma(w[k], x[k / 4u][k & 3u], sum);
    return sum;
}

void main() {
    const uint row = gl_LocalInvocationID.x, lane = gl_LocalInvocationID.y, r = gl_WorkGroupID.x * 32u + row;
    const uint n_blocks = (n_cols + 31u) / 32u, n_chunks = (n_blocks + CHUNK - 1u) / CHUNK;
    const Place place = place_of(gl_WorkGroupID.y);
    if (EXPERTS != 0u && place.expert == NONE) return;
    uint starts[TOKENS];
    [[unroll]] for (uint t = 0; t < TOKENS; t++) starts[t] = start_of(place, t, n_cols);
    const uint tile = first_tile + gl_WorkGroupID.x + place.expert * gl_NumWorkGroups.x;
    const bool wanted = is_wanted(r, place.first);
    precise float total = 0.0;
    for (uint round = 0; round < n_chunks; round += 8u) {
        const uint chunk = round + lane;
        precise float sums[TOKENS];
        for (uint t = 0; t < TOKENS; t++) sums[t] = 0.0;
        if (chunk < n_chunks && wanted) {
            const uint end = min((chunk + 1u) * CHUNK, n_blocks);
            for (uint block = chunk * CHUNK; block < end; block++) {
                float w[32];
                decode(tile, block, row, n_blocks, tile, w);
                [[unroll]] for (uint t = 0; t < TOKENS; t++) sums[t] = sums[t] + block_sum(w, starts[t], block);
            }
        }
        for (uint t = 0; t < TOKENS; t++) parts[(lane * TOKENS + t) * 32u + row] = sums[t];
        barrier();
        if (lane < TOKENS) {
            const uint there = min(n_chunks - round, 8u);
            for (uint i = 0; i < there; i++) total = total + parts[(i * TOKENS + lane) * 32u + row];
        }
        barrier();
    }
    if (lane < TOKENS) put(place, lane, r, total);
}
