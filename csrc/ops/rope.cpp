// Rotary position embedding of one head.
#include <algorithm>

#include "../plan.h"

namespace hotset {

namespace {

// kStep: distance between pairs. distance: between the two values of a pair. With a constant step, compilers
// vectorise the loop.
template <int kStep>
void rotate_pairs(const float* cos, const float* sin, int n, int distance, const float* x, float* out) {
    for (int i = 0; i < n; i++) {
        const float a = x[i * kStep], b = x[i * kStep + distance];
        out[i * kStep] = a * cos[i] - b * sin[i];
        out[i * kStep + distance] = a * sin[i] + b * cos[i];
    }
}

}  // namespace

void rotate_head(const Rope& rope, const float* cos, const float* sin, int head_dim, const float* x,
                 float* out) {
    const int half = rope.n_rot / 2;
    if (rope.neox)
        rotate_pairs<1>(cos, sin, half, half, x, out);
    else
        rotate_pairs<2>(cos, sin, half, 1, x, out);
    std::copy(x + rope.n_rot, x + head_dim, out + rope.n_rot);
}

}  // namespace hotset
