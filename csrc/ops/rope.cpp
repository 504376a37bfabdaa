// Rotary position embedding of one head.
#include <algorithm>

#include "../plan.h"

namespace hotset {

void rotate_head(const Rope& rope, const float* cos, const float* sin, int head_dim, const float* x,
                 float* out) {
    const int half = rope.n_rot / 2;
    const int step = rope.neox ? 1 : 2, distance = rope.neox ? half : 1;
    for (int i = 0; i < half; i++) {
        const float a = x[i * step], b = x[i * step + distance];
        out[i * step] = a * cos[i] - b * sin[i];
        out[i * step + distance] = a * sin[i] + b * cos[i];
    }
    std::copy(x + rope.n_rot, x + head_dim, out + rope.n_rot);
}

}  // namespace hotset
