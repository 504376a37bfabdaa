#version 450
// Joins the parts that attention left apart, in order: the same numbers as of one workgroup.
#include "common.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const uint DIM_V = 64;
layout(constant_id = 1) const uint SINKS = 0;
layout(set = 0, binding = 0) readonly buffer Parts { float parts[]; };
layout(set = 0, binding = 1) readonly buffer Positions { uint positions[]; };
layout(set = 0, binding = 2) readonly buffer Sinks { float sinks[]; };
layout(set = 0, binding = 3) writeonly buffer Outputs { float outputs[]; };
layout(push_constant) uniform Push { uint n_head, out_stride, max_tokens, behind, ahead, n_splits; };

const uint SPLIT = 512, LANES = 64, OWN = (DIM_V + LANES - 1u) / LANES;
shared float lanes[LANES];

#include "softmax.glsl"
#include "visible.glsl"

void main() {
    const uint lane = gl_LocalInvocationIndex, head = gl_WorkGroupID.x, token = gl_WorkGroupID.y;
    Running running = Running(LOWEST, 0.0);
    precise float sums[OWN];
    for (uint i = 0; i < OWN; i++) sums[i] = 0.0;
    vec2 factors;
    for (uint split = first_seen(token) / SPLIT; split <= last_seen(token) / SPLIT; split++) {
        const uint at = ((token * n_head + head) * n_splits + split) * (DIM_V + 2u);
        running = joined(running, Running(parts[at], parts[at + 1u]), factors);
        for (uint i = 0; i < OWN; i++) {
            const uint channel = i * LANES + lane;
            const float sum = channel < DIM_V ? parts[at + 2u + channel] : 0.0;
            sums[i] = sums[i] * factors.x + sum * factors.y;
        }
    }
    factors.x = 1.0;
    if (SINKS != 0u) running = joined(running, Running(sinks[head], 1.0), factors);  // it has no value
    for (uint i = 0; i < OWN; i++) {
        const uint channel = i * LANES + lane;
        precise float result = sums[i] * factors.x / running.total;
        if (channel < DIM_V) outputs[token * out_stride + head * DIM_V + channel] = result;
    }
}
