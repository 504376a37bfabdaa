#version 450
// out[t, c] = sum over rows r of x[t, r] * w[r, c], plus the bias and a residual. The matrix has a row per neuron; rows whose
// input is 0 are not read. A workgroup has 32 columns of a head; each lane sums every 64th row. Heads have their own matrices,
// one after another, and share the input; experts have their own inputs.
#include "common.glsl"
#include "weights.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 1) const uint EXPERTS = 0;
layout(constant_id = 2) const uint CHOSEN = 0;  // 1: selected rows of planes; `routes` has the tile of each row's scales
layout(set = 0, binding = 2) readonly buffer Inputs { float inputs[]; };
layout(set = 0, binding = 3) writeonly buffer Outputs { float outputs[]; };
layout(set = 0, binding = 4) readonly buffer Biases { float biases[]; };
layout(set = 0, binding = 5) readonly buffer Residuals { float residuals[]; };
layout(set = 0, binding = 6) readonly buffer Routes { float routes[]; };
layout(push_constant) uniform Push {
    uint n_rows, n_cols, flags, in_stride, out_stride, residual_stride;
    uint matrix_rows, part_stride, route_stride;  // strides between matrices, and between their inputs
};
const uint BIAS = 1, RESIDUAL = 2;

shared float parts[64 * 33];

void main() {
    const uint lane = gl_LocalInvocationIndex, block = gl_WorkGroupID.x, token = gl_WorkGroupID.y;
    const uint head = gl_WorkGroupID.z;
    const uint matrix = EXPERTS != 0u ? uint(routes[token * route_stride + head]) : head;
    const uint n_blocks = (n_cols + 31u) / 32u;
    precise float sums[32];
    [[unroll]] for (uint k = 0; k < 32u; k++) sums[k] = 0.0;
    for (uint row = lane; row < n_rows; row += 64u) {
        const float x = inputs[token * in_stride + head * part_stride + row];
        if (x == 0.0) continue;
        float w[32];
        const uint r = matrix * matrix_rows + row;
        decode(r / 32u, block, r & 31u, n_blocks, CHOSEN != 0u ? uint(routes[row]) : r / 32u, w);
        [[unroll]] for (uint k = 0; k < 32u; k++) sums[k] = fma(x, w[k], sums[k]);
    }
    [[unroll]] for (uint k = 0; k < 32u; k++) parts[lane * 33u + k] = sums[k];
    barrier();
    const uint column = block * 32u + lane;
    if (lane >= 32u || column >= n_cols) return;
    precise float total = 0.0;
    for (uint i = 0; i < 64u; i++) total = total + parts[i * 33u + lane];
    if ((flags & BIAS) != 0u) total = total + biases[matrix * n_cols + column];
    if ((flags & RESIDUAL) != 0u) total = total + residuals[token * residual_stride + column];
    outputs[token * out_stride + head * n_cols + column] = total;
}
