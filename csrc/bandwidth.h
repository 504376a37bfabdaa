// The memory bandwidth of this machine: the ceiling of every benchmark.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"

namespace hotset {

// Read `bytes` bytes with `n_threads` threads, a contiguous part each, repeatedly up to a gigabyte. Returns
// bytes per second.
double read_bandwidth(const Kernels& kernels, const uint8_t* data, size_t bytes, int n_threads);

// The same for pieces of piece_bytes bytes at the offsets `pieces`, which are prefetched a little ahead like
// the channels of input-major matrices. piece_bytes is a multiple of 256.
double gather_bandwidth(const Kernels& kernels, const uint8_t* data, const int64_t* pieces, size_t n_pieces,
                        size_t piece_bytes, int n_threads);

}  // namespace hotset
