// Rows of weights in the order in which a device's kernels read them (vulkan/shaders/weights.glsl decodes
// it).
//
// Tiles have 32 rows, blocks 32 columns. Each of the 32 rows has 16 to 128 bytes of codes per block. They are
// stored in vectors of 16 bytes: [tile][block][vector][row][16 bytes]. Adjacent lanes process adjacent rows,
// so they read adjacent memory. A second array has the high bits and scales of 32 rows for each block of the
// file (32 or 256 columns), also with adjacent rows side by side. The weights equal the file's bit for bit.
// Padding of the last block of a row and of the last tile is zero.
#pragma once

#include <vector>

#include "types.h"

namespace hotset {

constexpr size_t kTileRows = 32;

struct TileBytes {
    size_t codes = 0, more = 0;  // no codes: no kernel decodes the type
};
// Bytes of 32 rows of `cols` weights, which must be whole blocks of the file unless the type is a float.
TileBytes tile_bytes(Type type, int64_t cols);

// The addresses of rows, for whole tiles.
struct TileRows {
    Type type;
    int64_t cols;
    std::vector<const uint8_t*> places;

    size_t n_tiles() const { return places.size() / kTileRows; }
};

// Write tiles [first, last) at `codes` and `more`, in order, which suits uncached memory.
void put_tiles(const TileRows& rows, size_t first, size_t last, uint8_t* codes, uint8_t* more, int n_threads);

}  // namespace hotset
