// Sums values in NumPy's order for a contiguous array (`pairwise_sum` in its umath loops): eight accumulators
// for up to 128 values, and two halves for more.
#pragma once

#include <cstddef>

namespace hotset {

template <class T>
T pairwise_sum(const T* values, size_t n) {
    if (n > 128) {
        const size_t half = n / 2 - n / 2 % 8;
        return pairwise_sum(values, half) + pairwise_sum(values + half, n - half);
    }
    size_t i = 0;
    T sum = T(0);
    if (n >= 8) {
        T lanes[8];
        for (; i < 8; i++) lanes[i] = values[i];
        for (; i + 8 <= n; i += 8)
            for (size_t lane = 0; lane < 8; lane++) lanes[lane] += values[i + lane];
        sum =
            ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
    }
    for (; i < n; i++) sum += values[i];
    return sum;
}

}  // namespace hotset
