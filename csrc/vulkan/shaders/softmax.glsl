// Reductions over the 64 lanes of attention's workgroups.
shared float numbers[64];
shared vec4 lanes[4];

const float LOWEST = -3.4028234e38;

// Reduce 64 numbers to sixteen, joining every sixteenth: their sums or their maxima.
void gather(float mine, bool summed) {
    const uint lane = gl_LocalInvocationIndex;
    barrier();
    numbers[lane] = mine;
    barrier();
    if (lane < 16u) {
        const float a = numbers[lane], b = numbers[lane + 16u], c = numbers[lane + 32u], d = numbers[lane + 48u];
        precise float sum = (a + b) + (c + d);
        lanes[lane / 4u][lane & 3u] = summed ? sum : max(max(a, b), max(c, d));
    }
    barrier();
}

float largest_of(float mine) {
    gather(mine, false);
    const vec4 most = max(max(lanes[0], lanes[1]), max(lanes[2], lanes[3]));
    return max(max(most.x, most.y), max(most.z, most.w));
}

// Sum in the CPU's order for the positions of a KV block.
float sum_of(float mine) {
    gather(mine, true);
    precise vec4 sums[2];
    sums[0] = lanes[0] + lanes[2];
    sums[1] = lanes[1] + lanes[3];
    sums[0] = sums[0] + sums[1];
    precise vec2 pair = sums[0].xy + sums[0].zw;
    precise float sum = pair.x + pair.y;
    return sum;
}
