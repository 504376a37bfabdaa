// Rows of weights in the order in which the kernels of a device read them (vulkan/shaders/weights.glsl
// decodes it).
//
// Rows are in tiles of 32, columns in blocks of 32. The codes of a block are 16 bytes, or 32 to 128, for each
// of the 32 rows, side by side, so that neighbouring lanes, which have neighbouring rows, read neighbouring
// memory: [tile][block][16 bytes][row]. What else a block has is in a second array: for each block of the
// file, of 32 or 256 columns, the high bits and the scales of 32 rows, again side by side. The weights are
// the file's, bit for bit; what fills the last block of a row and the last tile is zeros.
#pragma once

#include <vector>

#include "types.h"

namespace hotset {

constexpr size_t kTileRows = 32;

struct TileBytes {
    size_t codes = 0, more = 0;  // no codes: no kernel decodes the type
};
// Of 32 rows of `cols` weights: whole blocks of the file, unless the type is a float.
TileBytes tile_bytes(Type type, int64_t cols);

// Rows wherever they are, of whole tiles.
struct TileRows {
    Type type;
    int64_t cols;
    std::vector<const uint8_t*> places;

    size_t n_tiles() const { return places.size() / kTileRows; }
};

// Writes tiles [first, last) at `codes` and `more`, in order, which memory that is not cached likes.
void put_tiles(const TileRows& rows, size_t first, size_t last, uint8_t* codes, uint8_t* more, int n_threads);

}  // namespace hotset
