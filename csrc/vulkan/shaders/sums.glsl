// Sum a number per lane of a workgroup by a tree, in a fixed order. Needs LANES and `shared float lanes[LANES]`.
float sum_of(float mine) {
    const uint lane = gl_LocalInvocationIndex;
    barrier();
    lanes[lane] = mine;
    for (uint n = LANES / 2u; n > 0u; n /= 2u) {
        barrier();
        precise float sum = lane < n ? lanes[lane] + lanes[lane + n] : 0.0;
        if (lane < n) lanes[lane] = sum;
    }
    barrier();
    return lanes[0];
}
