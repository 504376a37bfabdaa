// A softmax-weighted sum of values as it grows: the highest score and the sum of the weights; the sums of values
// are scaled with it. Needs LANES and `shared float lanes[LANES]`.
#include "sums.glsl"

const float LOWEST = -3.4028234e38;

struct Running {
    float highest, total;
};

// `a` with `b` joined to it. factors: of the values of a and of b.
Running joined(Running a, Running b, out vec2 factors) {
    Running r;
    r.highest = max(a.highest, b.highest);
    precise float of_a = exp_of(a.highest - r.highest), of_b = exp_of(b.highest - r.highest);
    precise float total = a.total * of_a + b.total * of_b;
    r.total = total;
    factors = vec2(of_a, of_b);
    return r;
}

float largest_of(float mine) {
    const uint lane = gl_LocalInvocationIndex;
    barrier();
    lanes[lane] = mine;
    for (uint n = LANES / 2u; n > 0u; n /= 2u) {
        barrier();
        if (lane < n) lanes[lane] = max(lanes[lane], lanes[lane + n]);
    }
    barrier();
    return lanes[0];
}
