// The common part of all matrix products, except for the inputs. out[t, r] = sum over k of w[r, k] * x[t, k],
// plus the bias and a residual.
layout(constant_id = 1) const uint TOKENS = 1;  // per workgroup
// 1, 2: each token has experts of its own, with one input per token, or one per pair of a token and an expert. A workgroup has
// one pair or, if TOKENS is not 1, a tile of pairs of one expert (group.comp).
layout(constant_id = 2) const uint EXPERTS = 0;
// JOINED: two or three results, of matrices whose rows follow each other. GATED, GATED_ROUNDED: activated gates times up,
// whose matrices are side by side (rounded_few.comp), as floats or rounded.
layout(constant_id = 5) const uint RESULT = 0;
const uint PLAIN = 0, JOINED = 1, GATED = 2, GATED_ROUNDED = 3;

layout(set = 0, binding = 3) writeonly buffer Outputs { float outputs[]; };
layout(set = 0, binding = 4) readonly buffer Biases { float biases[]; };
layout(set = 0, binding = 5) readonly buffer Residuals { float residuals[]; };
layout(set = 0, binding = 6) readonly buffer Routes { float routes[]; };
layout(set = 0, binding = 6) readonly buffer Groups { uint groups[]; };  // tiles of pairs

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

const bool GROUPED = EXPERTS != 0u && TOKENS > 1u;
const uint NONE = 0xffffffffu;

// The tokens or pairs of a workgroup. first: the first of them, or its index in `groups`. expert: NONE for an empty workgroup.
struct Place {
    uint first, expert;
};

Place place_of(uint workgroup) {
    if (EXPERTS == 0u) return Place(workgroup * TOKENS, 0u);
    if (GROUPED) return Place(workgroup * (TOKENS + 1u) + 1u, groups[workgroup * (TOKENS + 1u)]);
    const float expert = routes[workgroup / n_used * route_stride + workgroup % n_used];
    return Place(workgroup, expert < 0.0 ? NONE : uint(expert));  // the CPU computes an expert without a slot
}

// Return token or pair t of a workgroup; n_tokens * n_used or more if it has fewer.
uint one_of(Place place, uint t) {
    return GROUPED ? groups[place.first + t] : place.first + t;
}

// Return where the inputs of token or pair t begin, in units of in_stride. width: of an expert's inputs.
uint start_of(Place place, uint t, uint width) {
    const uint own = one_of(place, t);
    if (EXPERTS == 0u) return min(own, n_tokens - 1u) * in_stride;
    const uint pair = min(own, n_tokens * n_used - 1u);
    return pair / n_used * in_stride + (EXPERTS == 2u ? pair % n_used * width : 0u);
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

// Write row r of token or pair t.
void put(Place place, uint t, uint r, float sum) {
    const uint own = one_of(place, t), row = first_out + r;
    if (r >= n_rows || own >= n_tokens * n_used) return;
    precise float total = sum;
    if ((flags & BIAS) != 0u) total = total + biases[place.expert * bias_rows + first_bias + r];
    if (EXPERTS != 0u) {
        outputs[own / n_used * out_stride + own % n_used * residual_stride + row] = total;
        return;
    }
    if ((flags & RESIDUAL) != 0u) total = total + residuals[own * residual_stride + row];
    uint at = own * out_stride + row;
    if (RESULT == JOINED && row >= third_row)
        at = third_out + own * third_stride + row - third_row;
    else if (RESULT == JOINED && row >= second_row)
        at = second_out + own * second_stride + row - second_row;
    outputs[at] = total;
}
