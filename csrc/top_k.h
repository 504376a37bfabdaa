// Partial selection: what sampling needs of a long row of logits.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"

namespace hotset {

// Indices of the k largest of n (1 <= k <= n) in falling order; of equals the lower index first. NaN counts as least.
void top_k(const Kernels& kernels, const float* x, int64_t n, int64_t k, int32_t* out);

}  // namespace hotset
