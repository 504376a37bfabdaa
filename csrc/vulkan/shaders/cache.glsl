// The paged cache of a layer. Keys: [page][head][vector][place in the page], values: [page][head][place][vector];
// a vector is a uvec4. Scales of q8_0, as floats: [page][head][block of 32][place].
layout(constant_id = 0) const uint KV = 1;  // 0: f32, 1: f16, 2: q8_0
const uint PER = KV == 0u ? 4u : KV == 1u ? 8u : 16u;  // channels of a vector
const uint PAGE = 64;
