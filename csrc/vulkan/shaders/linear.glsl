// What both matrix products share. out[t, r] = sum over k of w[r, k] * x[t, k], and then the bias and a residual.
//
// The order of a sum is the same in both, whatever the number of tokens: 32 products one after the other, from 0;
// eight such sums one after the other; and these, one after the other.
#include "common.glsl"
#include "weights.glsl"

layout(constant_id = 1) const uint TOKENS = 1;  // of a workgroup
layout(constant_id = 2) const uint EXPERTS = 0;  // 1: of one input per token; 2: of one per expert

layout(set = 0, binding = 2) readonly buffer Inputs { vec4 inputs[]; };
layout(set = 0, binding = 3) writeonly buffer Outputs { float outputs[]; };
layout(set = 0, binding = 4) readonly buffer Biases { float biases[]; };
layout(set = 0, binding = 5) readonly buffer Residuals { float residuals[]; };
layout(set = 0, binding = 6) readonly buffer Routes { float routes[]; };

layout(push_constant) uniform Push {
    uint n_tokens, n_rows, n_cols, flags;
    uint in_stride, out_stride;  // in floats
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

const uint CHUNK = 8;  // blocks

// Four inputs of a row that starts at `row`, those past the last column as 0.
vec4 inputs_at(uint row, uint column) {
    if (column >= n_cols) return vec4(0.0);
    vec4 x = inputs[(row + column) / 4u];
    const uint left = n_cols - column;
    if (left < 4u) {
        if (left < 2u) x.y = 0.0;
        if (left < 3u) x.z = 0.0;
        x.w = 0.0;
    }
    return x;
}
