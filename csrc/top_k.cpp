#include "top_k.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

namespace hotset {

void top_k(const Kernels& kernels, const float* x, int64_t n, int64_t k, int32_t* out) {
    auto value = [x](int32_t i) { return x[i] == x[i] ? x[i] : -std::numeric_limits<float>::infinity(); };
    auto before = [&](int32_t a, int32_t b) { return value(a) > value(b) || (value(a) == value(b) && a < b); };
    // Cut into at least k stretches, the k-th largest of their maxima is a lower bound of the k-th largest element.
    std::vector<float> maxima;
    const int64_t length = std::max<int64_t>(1, n / (4 * k));
    for (int64_t at = 0; at < n; at += length)
        maxima.push_back(value(int32_t(at + kernels.argmax(x + at, std::min(length, n - at)))));
    std::nth_element(maxima.begin(), maxima.begin() + (k - 1), maxima.end(), std::greater<float>());
    const float bound = maxima[k - 1];
    std::vector<int32_t> candidates;
    for (int64_t i = 0; i < n; i++)
        if (!(x[i] < bound)) candidates.push_back(int32_t(i));
    std::partial_sort(candidates.begin(), candidates.begin() + k, candidates.end(), before);
    std::copy_n(candidates.begin(), k, out);
}

}  // namespace hotset
