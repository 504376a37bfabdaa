// Products of many tokens by AMX: isa_avx512.cpp packs rows and tokens, isa_amx.cpp multiplies them.
//
// A tile product of one block, sixteen tokens and sixteen rows is 16 x 16 exact integers. What is added to
// sums, and in which order, is what every instruction set adds (kernels.h). Blocks are packed in the order of
// turns (kLaneOrder), so that the sums of a lane stay in registers until its last block.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels.h"

namespace hotset {

// Sixteen rows whose vector lanes are rows: per 32-block eight vectors of codes (four bytes a row), then its
// scales.
struct Panel {
    __m512i* codes;      // [blocks][8]
    float* scale;        // [blocks][16]
    float* min;          // [blocks][16]
    int32_t* sub_scale;  // [blocks][2][16]
    int32_t* sub_min;    // [blocks][2][16]
};

// Where blocks of a row of `blocks` are packed: turn after turn.
struct TurnOrder {
    int32_t first_of[17];  // the first place of each turn

    HOTSET_INLINE explicit TurnOrder(int64_t blocks) {
        first_of[0] = 0;
        for (int turn = 0; turn < 16; turn++)
            first_of[turn + 1] = first_of[turn] + int32_t((blocks + 15 - kLaneOrder[turn]) / 16);
    }
    // kLaneOrder is its own inverse.
    HOTSET_INLINE int64_t operator()(int64_t b) const { return first_of[kLaneOrder[b % 16]] + b / 16; }
};

// Sixteen tokens, blocks in the order of turns.
struct TokenTile {
    int8_t* q;        // [blocks][16][32]
    float* scale;     // [blocks][16]
    float* sum;       // [blocks][16], Inputs::sum
    float* half_sum;  // [blocks][2][16], Inputs::isum

    HOTSET_INLINE TokenTile() = default;
    HOTSET_INLINE TokenTile(uint8_t* memory, int64_t k) {  // of tile_bytes
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

// For types with minimums, and for those with a scale for each half of a block.
TileKernel tile_kernel(bool min, bool sub_blocks);

// Between these two a thread may call kernels for types with (or without) sub-blocks.
void begin_tiles(bool sub_blocks);
void end_tiles();

}  // namespace hotset
