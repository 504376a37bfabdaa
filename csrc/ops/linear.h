// What operations with matrix products share: the facts of a product, and the row-major and the input-major
// product.
#pragma once

#include "../facts.h"

namespace hotset {

// A record {weight, bias} with out.width rows.
LinearPart linear_part(Facts& facts, int x, int out);
// Its fact `channels`, a record {data, cols, tile, first, below}: an input-major copy of the same matrix.
// Without data where there is none.
ChannelMatrix channels_of(Facts& facts, const Matrix& by_row);
// Of a record that says what they are like, and their bytes.
ChannelMatrix channels_of(Facts& of, const Matrix& by_row, std::span<const uint8_t> data);

std::unique_ptr<Op> make_linear(const Plan& plan, int x, Norm norm, std::vector<LinearPart> parts,
                                int residual, LinearTail tail, float threshold);
std::unique_ptr<Op> make_channel_linear(const Plan& plan, int x, Norm norm, std::vector<LinearPart> parts,
                                        std::vector<ChannelMatrix> channels, int residual, LinearTail tail,
                                        float threshold);

}  // namespace hotset
