#version 450
// Find the KEPT largest of each CHUNK numbers of a row, equal ones by rising index, as pairs of key and
// index. It is applied first to logits, then to its own results until one chunk is left. A bitonic sort that
// does not compare floats, so that NaN sorts before all other numbers.
layout(local_size_x = 256) in;
layout(constant_id = 0) const uint OF_LOGITS = 0;
layout(set = 0, binding = 0) readonly buffer Inputs { uint inputs[]; };  // bits of floats, or pairs
layout(set = 0, binding = 1) writeonly buffer Outputs { uint outputs[]; };
layout(push_constant) uniform Push { uint n, in_stride, out_stride; };  // n: numbers per row; strides: words
const uint CHUNK = 1024, KEPT = 128, LANES = 256;
shared uvec2 chunk[CHUNK];

// Return a key that rises with the number whose bits are given; both zeros have the same key.
uint key_of(uint bits) {
    const uint magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0xffffffffu;
    if (magnitude == 0u) return 0x80000000u;
    return bits == magnitude ? bits | 0x80000000u : ~bits;
}

bool is_ahead(uvec2 a, uvec2 b) {
    return a.x > b.x || (a.x == b.x && a.y < b.y);
}

void main() {
    const uint lane = gl_LocalInvocationIndex, row = gl_WorkGroupID.y, first = gl_WorkGroupID.x * CHUNK;
    for (uint i = lane; i < CHUNK; i += LANES) {
        const uint at = first + i;
        uvec2 one = uvec2(0u, 0xffffffffu);  // sorts after every number
        if (at < n && OF_LOGITS != 0u) one = uvec2(key_of(inputs[row * in_stride + at]), at);
        if (at < n && OF_LOGITS == 0u)
            one = uvec2(inputs[row * in_stride + 2u * at], inputs[row * in_stride + 2u * at + 1u]);
        chunk[i] = one;
    }
    for (uint size = 2; size <= CHUNK; size *= 2u) {
        for (uint step = size / 2u; step > 0u; step /= 2u) {
            barrier();
            for (uint i = lane; i < CHUNK / 2u; i += LANES) {
                const uint low = 2u * i - (i & (step - 1u)), high = low + step;
                const uvec2 a = chunk[low], b = chunk[high];
                if (is_ahead(b, a) == ((low & size) == 0u)) {
                    chunk[low] = b;
                    chunk[high] = a;
                }
            }
        }
    }
    barrier();
    const uint to = row * out_stride + gl_WorkGroupID.x * 2u * KEPT;
    if (lane < KEPT) {
        outputs[to + 2u * lane] = chunk[lane].x;
        outputs[to + 2u * lane + 1u] = chunk[lane].y;
    }
}
