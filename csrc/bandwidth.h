// What the memory of this machine gives: the ceiling that every benchmark is held against.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"

namespace hotset {

// Reads `bytes` bytes with `n_threads` threads, each a contiguous part, as often as makes a gigabyte; bytes
// per second.
double read_bandwidth(const Kernels& kernels, const uint8_t* data, size_t bytes, int n_threads);

}  // namespace hotset
