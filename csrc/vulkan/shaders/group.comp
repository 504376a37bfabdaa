#version 450
// Groups the pairs of tokens and experts of a step by expert, in tiles of up to TOKENS pairs, so that a product reads an
// expert's matrix once per tile. The order of an expert's pairs is not defined, and no result depends on it. One workgroup.
layout(local_size_x = 256) in;
layout(constant_id = 0) const uint TOKENS = 32;
layout(set = 0, binding = 0) readonly buffer Routes { float routes[]; };  // an expert without a slot is -1, and left out
// For each tile its expert and its pairs, numbered token * n_used + rank; NONE if missing. Then a counter for each expert.
layout(set = 0, binding = 1) coherent buffer Groups { uint groups[]; };
layout(push_constant) uniform Push { uint n_tokens, n_used, route_stride, n_experts, n_tiles; };
const uint LANES = 256, NONE = 0xffffffffu, SIZE = TOKENS + 1u;
shared uint n_before[LANES];

void synchronise() {
    memoryBarrierBuffer();
    barrier();
}

// Count a pair. Returns the count before it, or NONE if no expert has the pair.
uint counted(uint pair) {
    const float expert = routes[pair / n_used * route_stride + pair % n_used];
    return expert < 0.0 ? NONE : atomicAdd(groups[n_tiles * SIZE + uint(expert)], 1u);
}

void main() {
    const uint lane = gl_LocalInvocationIndex, n_pairs = n_tokens * n_used, counts = n_tiles * SIZE;
    for (uint i = lane; i < counts + n_experts; i += LANES) groups[i] = i < counts ? NONE : 0u;
    synchronise();
    for (uint pair = lane; pair < n_pairs; pair += LANES) counted(pair);
    synchronise();
    // A lane places the tiles of some adjacent experts after the tiles of all earlier lanes.
    const uint each = (n_experts + LANES - 1u) / LANES, first = min(lane * each, n_experts);
    const uint end = min(first + each, n_experts);
    uint tile = 0;
    for (uint i = first; i < end; i++) tile += (groups[counts + i] + TOKENS - 1u) / TOKENS;
    n_before[lane] = tile;
    for (uint n = 1; n < LANES; n *= 2u) {
        barrier();
        const uint others = lane < n ? 0u : n_before[lane - n];
        barrier();
        n_before[lane] += others;
    }
    tile = n_before[lane] - tile;
    for (uint i = first; i < end; i++) {
        const uint n = groups[counts + i];
        groups[counts + i] = tile * TOKENS;
        for (uint k = 0; k < n; k += TOKENS) groups[tile++ * SIZE] = i;
    }
    synchronise();
    for (uint pair = lane; pair < n_pairs; pair += LANES) {
        const uint at = counted(pair);
        if (at != NONE) groups[at / TOKENS * SIZE + 1u + at % TOKENS] = pair;
    }
}
