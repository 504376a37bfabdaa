// The KV cache of a layer. Keys: [KV block][head][vector][place in the block]. Values: [KV block][head][place][vector]. A
// vector is a uvec4. Scales of Q8_0 are floats: [KV block][head][block of 32][place].
layout(constant_id = 0) const uint KV = 1;  // 0: f32, 1: f16, 2: q8_0
const uint PER = KV == 0u ? 4u : KV == 1u ? 8u : 16u;  // channels per vector
const uint KV_BLOCK = 64;
