// The common part of all matrix products, except for the inputs. out[t, r] = sum over k of w[r, k] * x[t, k],
// plus the bias and a residual.
layout(constant_id = 1) const uint TOKENS = 1;  // per workgroup
layout(constant_id = 2) const uint EXPERTS = 0;  // 1: one input per token; 2: one input per expert
// JOINED: two or three results, of matrices whose rows follow each other. GATED, GATED_ROUNDED: activated gates times up,
// whose matrices are side by side (rounded_few.comp), as floats or rounded.
layout(constant_id = 5) const uint RESULT = 0;
const uint PLAIN = 0, JOINED = 1, GATED = 2, GATED_ROUNDED = 3;

layout(set = 0, binding = 3) writeonly buffer Outputs { float outputs[]; };
layout(set = 0, binding = 4) readonly buffer Biases { float biases[]; };
layout(set = 0, binding = 5) readonly buffer Residuals { float residuals[]; };
layout(set = 0, binding = 6) readonly buffer Routes { float routes[]; };

layout(push_constant) uniform Push {
    uint n_tokens, n_rows, n_cols, flags;
    uint in_stride, out_stride;  // in floats; rounded inputs: in blocks
    uint residual_stride;  // with experts: from one expert's outputs to the next expert's
    uint route_stride;
    uint n_used, bias_rows;  // experts per token; biases per expert
    uint first_bias, first_out;  // for the first row
    uint first_score;
    float threshold;  // or the parameter of an activation
    uint first_tile;  // of the matrix in `codes` and `more`
    uint second_row, third_row;  // JOINED: the rows at which the second and the third result begin,
    uint second_out, third_out, second_stride, third_stride;  // their places in `outputs`, and their strides
};
// A row is wanted if its route is not 0 (FIRING), or its predictor score is not below a threshold (CHOSEN).
// The first rows have no score and are always wanted.
const uint BIAS = 1, RESIDUAL = 2, FIRING = 4, CHOSEN = 8;

// The tokens that a workgroup computes, and their expert.
struct Place {
    uint first;  // index of a token or, with experts, of a token's expert
    uint token, rank;      // of `first`
    uint expert, start;  // offset of the inputs of `first`, in units of in_stride
};

Place place_of(uint first, uint width) {
    if (EXPERTS == 0u) return Place(first, first, 0u, 0u, first * in_stride);
    const uint token = first / n_used, rank = first % n_used;
    const uint expert = uint(routes[token * route_stride + rank]);
    return Place(first, token, rank, expert, token * in_stride + (EXPERTS == 2u ? rank * width : 0u));
}

// Whether one of the tokens from `first` on needs row r.
bool is_wanted(uint r, uint first) {
    const uint own = first_out + r;
    if ((flags & (FIRING | CHOSEN)) == 0u || ((flags & CHOSEN) != 0u && own < first_score)) return true;
    for (uint t = 0; t < TOKENS && r < n_rows; t++) {
        const float score = routes[min(first + t, n_tokens - 1u) * route_stride + own - first_score];
        if ((flags & CHOSEN) != 0u ? !(score < threshold) : score != 0.0) return true;
    }
    return false;
}

// Write row r of token t, counted from `first`.
void put(Place place, uint t, uint r, float sum) {
    const uint token = place.token + t;
    if (r >= n_rows || (EXPERTS == 0u && token >= n_tokens)) return;
    precise float total = sum;
    if ((flags & BIAS) != 0u) total = total + biases[place.expert * bias_rows + first_bias + r];
    if (EXPERTS != 0u) {
        outputs[place.token * out_stride + place.rank * residual_stride + first_out + r] = total;
        return;
    }
    const uint own = first_out + r;
    if ((flags & RESIDUAL) != 0u) total = total + residuals[token * residual_stride + own];
    uint at = token * out_stride + own;
    if (RESULT == JOINED && own >= third_row)
        at = third_out + token * third_stride + own - third_row;
    else if (RESULT == JOINED && own >= second_row)
        at = second_out + token * second_stride + own - second_row;
    outputs[at] = total;
}
