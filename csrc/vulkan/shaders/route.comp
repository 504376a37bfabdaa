#version 450
// A token's experts and their weights, best first (operations.Route). One workgroup per token.
#include "common.glsl"

layout(local_size_x = 64) in;
layout(set = 0, binding = 0) readonly buffer Inputs { float inputs[]; };
layout(set = 0, binding = 1) readonly buffer Biases { float biases[]; };
layout(set = 0, binding = 2) readonly buffer Scales { float scales[]; };
layout(set = 0, binding = 3) writeonly buffer Outputs { float outputs[]; };
layout(push_constant) uniform Push {
    uint n_expert, in_stride, out_stride, n_used, flags, n_groups, n_groups_used, group_best;
    float scale;
};
const uint SOFTMAX = 0, SIGMOID = 1, SOFTMAX_CHOSEN = 2, SCORING = 3, NORMALISED = 4, BIASED = 8, SCALED = 16;
const uint MOST = 512, LANES = 64;
const float LOWEST = -3.4028234e38;
shared float shares[MOST];  // p of each expert
shared float wanted[MOST];
shared float lanes[LANES];
shared uint ids[LANES];
shared uint chosen[LANES];
shared bool is_lost;

// Whether expert a comes before expert b; NONE comes last.
const uint NONE = 0xffffffffu;
bool precedes(uint a, uint b) {
    if (a == NONE || b == NONE) return a != NONE;
    const float x = wanted[a], y = wanted[b];
    const bool no_x = isnan(x), no_y = isnan(y);
    if (no_x || no_y) return no_x == no_y ? a < b : no_y;
    return x > y || (x == y && a < b);
}

void score(uint lane, uint from) {
    float highest = LOWEST;
    for (uint i = lane; i < n_expert; i += LANES) highest = max(highest, inputs[from + i]);
    lanes[lane] = highest;
    for (uint n = LANES / 2u; n > 0u; n /= 2u) {
        barrier();
        if (lane < n) lanes[lane] = max(lanes[lane], lanes[lane + n]);
    }
    barrier();
    highest = lanes[0];
    barrier();
    const uint scoring = flags & SCORING;
    precise float total = 0.0;
    for (uint i = lane; i < n_expert; i += LANES) {
        const float x = inputs[from + i];
        precise float p = x;
        if (scoring == SOFTMAX) p = exp_of(x - highest);
        if (scoring == SIGMOID) p = 1.0 / (1.0 + exp_of(-x));
        total = total + p;
        shares[i] = p;
        if (isnan(x)) is_lost = true;
    }
    lanes[lane] = total;
    for (uint n = LANES / 2u; n > 0u; n /= 2u) {
        barrier();
        precise float sum = lane < n ? lanes[lane] + lanes[lane + n] : 0.0;
        if (lane < n) lanes[lane] = sum;
    }
    barrier();
    const bool by_input = (flags & BIASED) == 0u && n_groups == 1u;
    for (uint i = lane; i < n_expert; i += LANES) {
        precise float p = scoring == SOFTMAX ? shares[i] / lanes[0] : shares[i];
        shares[i] = p;
        precise float biased = (flags & BIASED) != 0u ? p + biases[i] : p;
        wanted[i] = by_input ? inputs[from + i] : biased;
    }
    barrier();
}

// Exclude all experts outside the best groups. A group's score is the sum of its best experts.
void keep_groups(uint lane) {
    const uint size = n_expert / n_groups;
    if (lane < n_groups) {
        precise float sum = 0.0;
        uint before = NONE;
        for (uint n = 0; n < group_best; n++) {
            uint best = NONE;
            for (uint i = lane * size; i < (lane + 1u) * size; i++)
                if (precedes(i, best) && (before == NONE || precedes(before, i))) best = i;
            if (best != NONE) sum = sum + wanted[best];
            before = best;
        }
        lanes[lane] = sum;
    }
    barrier();
    bool is_kept = false;
    if (lane < n_groups) {
        uint n_before = 0;
        for (uint g = 0; g < n_groups; g++)
            if (lanes[g] > lanes[lane] || (lanes[g] == lanes[lane] && g < lane)) n_before++;
        is_kept = n_before < n_groups_used;
    }
    barrier();
    if (lane < n_groups && !is_kept)
        for (uint i = lane * size; i < (lane + 1u) * size; i++) wanted[i] = uintBitsToFloat(0xff800000u);
    barrier();
}

void main() {
    const uint lane = gl_LocalInvocationIndex, token = gl_WorkGroupID.x;
    if (lane == 0u) is_lost = false;
    barrier();
    score(lane, token * in_stride);
    if (n_groups > 1u) keep_groups(lane);
    uint before = NONE;
    for (uint rank = 0; rank < n_used; rank++) {
        uint best = NONE;
        for (uint i = lane; i < n_expert; i += LANES)
            if (precedes(i, best) && (before == NONE || precedes(before, i))) best = i;
        ids[lane] = best;
        for (uint n = LANES / 2u; n > 0u; n /= 2u) {
            barrier();
            if (lane < n && precedes(ids[lane + n], ids[lane])) ids[lane] = ids[lane + n];
        }
        barrier();
        before = ids[0];
        if (lane == 0u) chosen[rank] = before;
        barrier();
    }
    if (lane != 0u) return;
    const uint to = token * out_stride;
    float highest = LOWEST;
    for (uint rank = 0; rank < n_used; rank++) highest = max(highest, shares[chosen[rank]]);
    precise float total = 0.0;
    for (uint rank = 0; rank < n_used; rank++) {
        precise float weight = shares[chosen[rank]];
        if ((flags & SCORING) == SOFTMAX_CHOSEN) weight = exp_of(weight - highest);
        lanes[rank] = weight;
        total = total + weight;
    }
    precise float normal = 0.0;
    for (uint rank = 0; rank < n_used; rank++) {
        precise float weight = (flags & SCORING) == SOFTMAX_CHOSEN ? lanes[rank] / total : lanes[rank];
        lanes[rank] = weight;
        normal = normal + weight;
    }
    normal = max(normal, 6.103515625e-5);
    for (uint rank = 0; rank < n_used; rank++) {
        precise float weight = (flags & NORMALISED) != 0u ? lanes[rank] / normal : lanes[rank];
        weight = weight * scale;
        if ((flags & SCALED) != 0u) weight = weight * scales[chosen[rank]];
        outputs[to + rank] = float(chosen[rank]);
        outputs[to + n_used + rank] = is_lost ? uintBitsToFloat(0x7fc00000u) : weight;
    }
}
