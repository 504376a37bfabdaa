// What all matrix products share, but for the inputs. out[t, r] = sum over k of w[r, k] * x[t, k], and then the bias and a
// residual.
layout(constant_id = 1) const uint TOKENS = 1;  // of a workgroup
layout(constant_id = 2) const uint EXPERTS = 0;  // 1: of one input per token; 2: of one per expert

layout(set = 0, binding = 3) writeonly buffer Outputs { float outputs[]; };
layout(set = 0, binding = 4) readonly buffer Biases { float biases[]; };
layout(set = 0, binding = 5) readonly buffer Residuals { float residuals[]; };
layout(set = 0, binding = 6) readonly buffer Routes { float routes[]; };

layout(push_constant) uniform Push {
    uint n_tokens, n_rows, n_cols, flags;
    uint in_stride, out_stride;  // in floats; of rounded inputs in blocks
    uint residual_stride;        // with experts from one expert's outputs to the next's
    uint route_stride;
    uint n_used, bias_rows;                                     // of experts; an expert's biases
    uint first_bias, first_out;                                 // of the first row
    uint first_score;
    float threshold;
};
// A row is wanted where its route is not 0 (FIRING), or not below a threshold (CHOSEN): a predictor's score, which the
// first rows do not have.
const uint BIAS = 1, RESIDUAL = 2, FIRING = 4, CHOSEN = 8;

// Which tokens, and of which expert, a workgroup computes.
struct Place {
    uint first;            // a token, or with experts one of a token's
    uint token, rank;      // of `first`
    uint expert, start;    // where the inputs of `first` begin, in units of in_stride
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

// Writes row r of a token from `first` on.
void put(Place place, uint t, uint r, float sum) {
    const uint token = place.token + t;
    if (r >= n_rows || (EXPERTS == 0u && token >= n_tokens)) return;
    precise float total = sum;
    if ((flags & BIAS) != 0u) total = total + biases[place.expert * bias_rows + first_bias + r];
    if (EXPERTS != 0u) {
        outputs[place.token * out_stride + place.rank * residual_stride + first_out + r] = total;
        return;
    }
    if ((flags & RESIDUAL) != 0u) total = total + residuals[token * residual_stride + first_out + r];
    outputs[token * out_stride + first_out + r] = total;
}
