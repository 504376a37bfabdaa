#version 450
// Merges the parts that attention stored separately, in order. The results equal a single workgroup's.
#include "common.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const uint DIM_V = 64;
layout(constant_id = 1) const uint SINKS = 0;
layout(set = 0, binding = 0) readonly buffer Parts { float parts[]; };
layout(set = 0, binding = 1) readonly buffer Positions { uint positions[]; };
layout(set = 0, binding = 2) readonly buffer Sinks { float sinks[]; };
layout(set = 0, binding = 3) writeonly buffer Outputs { float outputs[]; };
layout(push_constant) uniform Push { uint n_head, out_stride, max_tokens, behind, ahead, least, n_splits; };

const uint SPLIT = 512, LANES = 64, OWN = (DIM_V + LANES - 1u) / LANES;

#include "visible.glsl"

void main() {
    const uint lane = gl_LocalInvocationIndex, head = gl_WorkGroupID.x, token = gl_WorkGroupID.y;
    const uint from = first_seen(token) / SPLIT, to = last_seen(token) / SPLIT, stride = DIM_V + 2u;
    const uint row = (token * n_head + head) * n_splits * stride;
    float top = SINKS != 0u ? sinks[head] : parts[row + from * stride], total = 0.0;
    for (uint split = from; split <= to; split++) top = max(top, parts[row + split * stride]);
    precise float sums[OWN];
    [[unroll]] for (uint i = 0; i < OWN; i++) sums[i] = 0.0;
    for (uint split = from; split <= to; split++) {
        const uint at = row + split * stride;
        precise float below = parts[at] - top;
        const float weight = exp_of(below);
        total = fused(weight, parts[at + 1u], total);
        [[unroll]] for (uint i = 0; i < OWN; i++) {
            const uint channel = i * LANES + lane;
            if (channel < DIM_V) sums[i] = sums[i] + parts[at + 2u + channel] * weight;
        }
    }
    if (SINKS != 0u) {  // a sink has no value
        precise float below = sinks[head] - top;
        total = fused(exp_of(below), 1.0, total);
    }
    const float inverse = quotient(1.0, total);
    [[unroll]] for (uint i = 0; i < OWN; i++) {
        const uint channel = i * LANES + lane;
        precise float result = sums[i] * inverse;
        if (channel < DIM_V) outputs[token * out_stride + head * DIM_V + channel] = result;
    }
}
