// Applies a LinearTail to the products of a chunk, before a residual is added.
#pragma once

#include <algorithm>
#include <cmath>

#include "../plan.h"

namespace hotset {

// values: activated gates on input, neurons on return. One loop without branches, which compilers vectorise,
// is the only cost of thresholds if nothing is skipped.
inline void multiply_thresholded(const LinearTail& tail, const float* up, int64_t rows, float* values) {
    for (int64_t i = 0; i < rows; i++) {
        const float gate = values[i], value = gate * up[i];
        const bool zero = (std::fabs(gate) < tail.gate_threshold) | (gate == 0.0f) |
                          (std::fabs(value) < tail.value_threshold);
        values[i] = zero ? 0.0f : value;
    }
}

// results: products of n tokens, [n][rows]; with a gate, the gate's, and `up` is [n][rows]. thresholded: per
// token. A neuron with a gate below the threshold is zero for any up, as if its row of up were not read.
// Counts neurons if there are thresholds.
inline void finish_products(const Kernels& kernels, const LinearTail& tail, const uint8_t* thresholded, int n,
                            int64_t rows, float* results, const float* up, FfnCounts& counts) {
    if (tail.kind == LinearTail::None) return;
    const bool gated = tail.kind == LinearTail::Gated;
    auto whole = [&](float* values, const float* its_up, int64_t count) {
        if (gated)
            kernels.gated(tail.activation, tail.threshold, values, its_up, count, values);
        else
            kernels.activate(tail.activation, tail.threshold, values, count, values);
    };
    if (!tail.has_thresholds()) return whole(results, up, n * rows);
    for (int t = 0; t < n; t++) {
        float* values = results + t * rows;
        const float* its_up = gated ? up + t * rows : nullptr;
        if (thresholded[t]) {
            kernels.activate(tail.activation, tail.threshold, values, rows, values);
            if (gated)
                multiply_thresholded(tail, its_up, rows, values);
            else
                zero_small(std::max(tail.gate_threshold, tail.value_threshold), values, rows, values);
        } else {
            whole(values, its_up, rows);
        }
        int active = 0;
        for (int64_t i = 0; i < rows; i++) active += values[i] != 0.0f;
        counts.active += active;
    }
    counts.selected += n * rows;
    counts.up_rows += rows;
    if (gated) counts.gate_rows += rows;
}

}  // namespace hotset
