#version 450
// A matrix product with few tokens: 32 rows of a tile, of which each has eight lanes, a chunk of columns each.
#include "linear.glsl"

layout(local_size_x = 32, local_size_y = 8) in;
shared float parts[8 * 32 * TOKENS];

void main() {
    const uint row = gl_LocalInvocationID.x, lane = gl_LocalInvocationID.y;
    const uint n_blocks = (n_cols + 31u) / 32u, n_chunks = (n_blocks + CHUNK - 1u) / CHUNK;
    const uint first = gl_WorkGroupID.y * TOKENS;  // a token, or with experts one of a token's
    uint tile = gl_WorkGroupID.x, expert = 0;
    uint rows[TOKENS];
    for (uint t = 0; t < TOKENS; t++) rows[t] = min(first + t, n_tokens - 1u) * in_stride;
    if (EXPERTS != 0u) {
        const uint token = first / n_used, rank = first % n_used;
        expert = uint(routes[token * route_stride + rank]);
        tile += expert * gl_NumWorkGroups.x;
        rows[0] = token * in_stride + (EXPERTS == 2u ? rank * n_cols : 0u);
    }
    const uint own = first_out + gl_WorkGroupID.x * 32u + row;
    bool is_wanted = (flags & (FIRING | CHOSEN)) == 0u || ((flags & CHOSEN) != 0u && own < first_score);
    if (!is_wanted && gl_WorkGroupID.x * 32u + row < n_rows)
        for (uint t = 0; t < TOKENS; t++) {
            const float score = routes[min(first + t, n_tokens - 1u) * route_stride + own - first_score];
            if ((flags & CHOSEN) != 0u ? !(score < threshold) : score != 0.0) is_wanted = true;
        }
    precise float total = 0.0;
    for (uint round = 0; round < n_chunks; round += 8u) {
        const uint chunk = round + lane;
        precise float sums[TOKENS];
        for (uint t = 0; t < TOKENS; t++) sums[t] = 0.0;
        if (chunk < n_chunks && is_wanted) {
            const uint end = min((chunk + 1u) * CHUNK, n_blocks);
            for (uint block = chunk * CHUNK; block < end; block++) {
                float w[32];
                decode(tile, block, row, n_blocks, w);
                for (uint t = 0; t < TOKENS; t++) {
                    precise float sum = 0.0;
                    [[unroll]] for (uint k = 0; k < 32u; k += 4u) {
                        const vec4 x = inputs_at(rows[t], block * 32u + k);
                        sum = sum + w[k] * x.x;
                        sum = sum + w[k + 1u] * x.y;
                        sum = sum + w[k + 2u] * x.z;
                        sum = sum + w[k + 3u] * x.w;
                    }
                    sums[t] = sums[t] + sum;
                }
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
    const uint r = gl_WorkGroupID.x * 32u + row, token = first + lane;
    if (lane >= TOKENS || r >= n_rows || (EXPERTS == 0u && token >= n_tokens)) return;
    if ((flags & BIAS) != 0u) total = total + biases[expert * bias_rows + first_bias + r];
    if (EXPERTS != 0u) {
        outputs[(first / n_used) * out_stride + (first % n_used) * residual_stride + first_out + r] = total;
        return;
    }
    if ((flags & RESIDUAL) != 0u) total = total + residuals[token * residual_stride + first_out + r];
    outputs[token * out_stride + first_out + r] = total;
}
