// Products of many tokens with AMX: isa_avx512.cpp packs rows and tokens, isa_amx.cpp multiplies them.
//
// The product of one block, sixteen tokens and sixteen rows is a tile of 16 x 16 exact integers. Its terms
// are added in the order of all instruction sets (kernels.h). Blocks are packed by turn (kLaneOrder), so that
// the sums of a lane stay in registers until its last block.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels.h"

namespace hotset {

// Sixteen rows, one per vector lane. Per 32-block: eight vectors of codes (four bytes per row), then the
// scales.
struct Panel {
    __m512i* codes;      // [blocks][8]
    float* scale;        // [blocks][16]
    float* min;          // [blocks][16]
    int32_t* sub_scale;  // [blocks][2][16]
    int32_t* sub_min;    // [blocks][2][16]
};

// The packed position of each of `blocks` blocks of a row: turn after turn.
struct TurnOrder {
    int32_t first_of[17];  // the first position of each turn

    HOTSET_INLINE explicit TurnOrder(int64_t blocks) {
        first_of[0] = 0;
        for (int turn = 0; turn < 16; turn++)
            first_of[turn + 1] = first_of[turn] + int32_t((blocks + 15 - kLaneOrder[turn]) / 16);
    }
    // kLaneOrder is its own inverse.
    HOTSET_INLINE int64_t operator()(int64_t b) const { return first_of[kLaneOrder[b % 16]] + b / 16; }
};

// Sixteen tokens, with blocks in the order of turns.
struct TokenTile {
    int8_t* q;        // [blocks][16][32]
    float* scale;     // [blocks][16]
    float* sum;       // [blocks][16], Inputs::sum
    float* half_sum;  // [blocks][2][16], Inputs::isum

    HOTSET_INLINE TokenTile() = default;
    HOTSET_INLINE TokenTile(uint8_t* memory, int64_t k) {  // tile_bytes of memory
        q = reinterpret_cast<int8_t*>(memory);
        scale = reinterpret_cast<float*>(memory + padded(k) * kTileTokens);
        sum = scale + padded(k) / 32 * kTileTokens;
        half_sum = sum + padded(k) / 32 * kTileTokens;
    }
};

// Panels times tokens: out[t * ld + r].
struct TileWork {
    const Panel* panels;
    const TokenTile* tiles;
    int n_panels, n_tiles, n_rows, n_tokens;
    float* out;
    int64_t ld;
};
using TileKernel = void (*)(const TileWork& work, const TurnOrder& order);

// Return the kernel for types with or without minimums, and with or without a scale per half block.
TileKernel tile_kernel(bool min, bool sub_blocks);

// Between these two calls a thread may use kernels for types with (or without) sub-blocks.
void begin_tiles(bool sub_blocks);
void end_tiles();

}  // namespace hotset
