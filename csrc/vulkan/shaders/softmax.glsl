// Reductions over the 64 lanes of each head of attention's workgroups.
shared float numbers[64 * HEADS];
shared vec4 lanes[4 * HEADS];

const float LOWEST = -3.4028234e38;

// Reduce 64 numbers to sixteen, joining every sixteenth: their sums or their maxima.
void gather(float mine, bool summed) {
    const uint lane = gl_LocalInvocationID.x, at = gl_LocalInvocationIndex;
    barrier();
    numbers[at] = mine;
    barrier();
    if (lane < 16u) {
        const float a = numbers[at], b = numbers[at + 16u], c = numbers[at + 32u], d = numbers[at + 48u];
        precise float sum = (a + b) + (c + d);
        lanes[gl_LocalInvocationID.y * 4u + lane / 4u][lane & 3u] = summed ? sum : max(max(a, b), max(c, d));
    }
    barrier();
}

float largest_of(float mine) {
    gather(mine, false);
    const uint at = gl_LocalInvocationID.y * 4u;
    const vec4 most = max(max(lanes[at], lanes[at + 1u]), max(lanes[at + 2u], lanes[at + 3u]));
    return max(max(most.x, most.y), max(most.z, most.w));
}

// Sum in the CPU's order for the positions of a KV block.
float sum_of(float mine) {
    gather(mine, true);
    const uint at = gl_LocalInvocationID.y * 4u;
    precise vec4 sums[2];
    sums[0] = lanes[at] + lanes[at + 2u];
    sums[1] = lanes[at + 1u] + lanes[at + 3u];
    sums[0] = sums[0] + sums[1];
    precise vec2 pair = sums[0].xy + sums[0].zw;
    precise float sum = pair.x + pair.y;
    return sum;
}
