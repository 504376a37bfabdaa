// The facts of a matrix product, and its row-major and input-major implementations.
#pragma once

#include "../facts.h"

namespace hotset {

// Read a record {weight, bias} with out.width rows.
LinearPart linear_part(Facts& facts, int x, int out);
// Read the fact `channels`, a record {data, cols, tile, first, below}: an input-major copy of the same
// matrix. Without the fact, the copy has no data.
ChannelMatrix channels_of(Facts& facts, const Matrix& by_row);
// Read the copy's description from `of`; its bytes are `data`.
ChannelMatrix channels_of(Facts& of, const Matrix& by_row, std::span<const uint8_t> data);

std::unique_ptr<Op> make_linear(const Plan& plan, int x, Norm norm, std::vector<LinearPart> parts,
                                int residual, LinearTail tail, float threshold);
std::unique_ptr<Op> make_channel_linear(const Plan& plan, int x, Norm norm, std::vector<LinearPart> parts,
                                        std::vector<ChannelMatrix> channels, int residual, LinearTail tail,
                                        float threshold);

}  // namespace hotset
