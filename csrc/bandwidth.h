// The memory bandwidth of this machine: the ceiling of every benchmark.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"

namespace hotset {

// Read `bytes` bytes with `n_threads` threads, a contiguous part each, repeatedly up to a gigabyte. Returns
// bytes per second.
double read_bandwidth(const Kernels& kernels, const uint8_t* data, size_t bytes, int n_threads);

}  // namespace hotset
