#version 450
// Operations that need moments of a part of a row (a head, or all): RMSNorm, LayerNorm, GaussianTopK and MatchMagnitude.
// Sixteen lanes sum every sixteenth value, as the CPU does, while all lanes load the next values, and a tree adds these sums.
// The result of a whole row is also rounded for the products that read it.
#include "common.glsl"

layout(local_size_x = 64, local_size_x_id = 3) in;
layout(constant_id = 0) const uint KIND = 0;
layout(constant_id = 1) const uint WEIGHT = 0;
layout(constant_id = 2) const uint BIAS = 0;
layout(constant_id = 3) const uint LANES = 64;
layout(constant_id = 4) const uint FORMS = 1;  // FLOATS, ROUNDED or both
layout(set = 0, binding = 0) readonly buffer Inputs { float inputs[]; };
layout(set = 0, binding = 1) readonly buffer Weights { float weights[]; };  // or the values to match, per token
layout(set = 0, binding = 2) readonly buffer Biases { float biases[]; };
layout(set = 0, binding = 3) writeonly buffer Outputs { float outputs[]; };
layout(set = 0, binding = 4) writeonly buffer Rounded { uint rounded[]; };
layout(push_constant) uniform Push {
    uint width, in_stride, out_stride, weight_stride;  // of a part; weight_stride 0: parts share the weights
    float eps;  // or the multiplier of a deviation, or the least mean
};
const uint RMS = 0, LAYER = 1, TOP_K = 2, MATCH = 3, SUMS = 16, OWN = 8, CHUNK = OWN * LANES;
const uint FLOATS = 1, ROUNDED = 2, ROUNDING = (FORMS & ROUNDED) != 0u ? LANES : 8u;
shared float chunk[CHUNK];
shared float lanes[SUMS];

#include "rounding.glsl"

const uint PLAIN = 0, SQUARES = 1, OTHERS = 2;  // terms of the sum: values, squares, or squares of the values to match

// Sum `width` values, or the squares of their differences from a mean.
float sum_of(uint kind, uint from, float mean) {
    const uint lane = gl_LocalInvocationIndex;
    precise float sum = 0.0, own[OWN];
    for (uint first = 0; first < width + CHUNK; first += CHUNK) {  // loads a chunk, and adds the one before
        barrier();
        if (first > 0u) [[unroll]]
            for (uint i = 0; i < OWN; i++) chunk[i * LANES + lane] = own[i];
        [[unroll]] for (uint i = 0; i < OWN; i++) {
            const uint at = first + i * LANES + lane;
            own[i] = at >= width ? mean : kind == OTHERS ? weights[from + at] : inputs[from + at];
            if (kind == SQUARES) own[i] = own[i] - mean;
        }
        barrier();
        if (lane >= SUMS || first == 0u) continue;
        const uint n = min(width - (first - CHUNK), CHUNK);
        uint i = lane;
        for (; i + 7u * SUMS < n; i += 8u * SUMS) {
            float x[8];
            [[unroll]] for (uint k = 0; k < 8u; k++) x[k] = chunk[i + k * SUMS];
            [[unroll]] for (uint k = 0; k < 8u; k++) sum = kind == PLAIN ? sum + x[k] : fused(x[k], x[k], sum);
        }
        for (; i < n; i += SUMS) sum = kind == PLAIN ? sum + chunk[i] : fused(chunk[i], chunk[i], sum);
    }
    if (lane < SUMS) lanes[lane] = sum;
    barrier();
    precise float sums[SUMS];
    [[unroll]] for (uint i = 0; i < SUMS; i++) sums[i] = lanes[i];
    [[unroll]] for (uint n = SUMS / 2u; n > 0u; n /= 2u)
        [[unroll]] for (uint i = 0; i < n; i++) sums[i] = sums[i] + sums[i + n];
    return sums[0];
}

void main() {
    const uint lane = gl_LocalInvocationIndex, part = gl_WorkGroupID.x, token = gl_WorkGroupID.y;
    const uint from = token * in_stride + part * width, to = token * out_stride + part * width;
    const float n = float(width);
    float mean = 0.0;
    if (KIND == LAYER || KIND == TOP_K) mean = quotient(sum_of(PLAIN, from, 0.0), n);
    const float squares = quotient(sum_of(SQUARES, from, mean), n);
    precise float cutoff = 0.0, scale = 0.0;
    if (KIND == TOP_K) {
        precise float spread = eps * root(squares);
        cutoff = mean + spread;
    } else if (KIND == MATCH) {
        const float wanted = quotient(sum_of(OTHERS, token * weight_stride, 0.0), n);
        scale = quotient(root(wanted), root(max(squares, eps)));
    } else {
        precise float above = squares + eps;
        scale = quotient(1.0, root(above));
    }
    for (uint first = 0; first < width; first += 4u * LANES) {
        vec4 result = vec4(0.0);
        [[unroll]] for (uint c = 0; c < 4u; c++) {
            const uint i = first + 4u * lane + c;
            if (i >= width) break;
            precise float x = inputs[from + i];
            if (KIND == TOP_K)
                x = max(x - cutoff, 0.0);
            else
                x = (x - mean) * scale;
            if (WEIGHT != 0u) x = x * weights[part * weight_stride + i];
            if (BIAS != 0u) x = x + biases[part * weight_stride + i];
            result[c] = x;
            if ((FORMS & FLOATS) != 0u) outputs[to + i] = x;
        }
        if ((FORMS & ROUNDED) != 0u) {
            const uint block = (first + 4u * lane) / 32u;
            round_block(result, 32u * block < width, token * (width / 32u) + block, 0);
        }
    }
}
