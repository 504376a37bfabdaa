#version 450
// Attention of a token's heads over its KV blocks, in the CPU's order (csrc/kernels/float_kernels.h): a running softmax over the
// KV blocks of a split of 512 positions, then a merge of the splits in order. Splits begin at fixed positions, so that the order
// of every sum depends only on the token's position. A workgroup has HEADS heads with the same keys and values, which it reads
// once, into shared memory; a head without others reads them directly. A lane of a head has a position of a KV block, then words of
// values. With few tokens a workgroup has one split, and stores its parts; the last one to do so for its heads merges them.
#include "common.glsl"
#include "cache.glsl"

layout(constant_id = 8) const uint HEADS = 1;  // a divisor of the heads that share keys and values
layout(constant_id = 9) const uint TILE = 512;  // vectors of keys or values in shared memory, a multiple of 512
layout(local_size_x = 64, local_size_y_id = 8) in;
layout(constant_id = 1) const uint DIM = 64;  // channels of a key
layout(constant_id = 2) const uint DIM_V = 64;  // channels of a value
layout(constant_id = 3) const uint SINKS = 0;
layout(constant_id = 4) const uint APART = 0;  // 1: a workgroup computes one split
layout(constant_id = 5) const uint SLOPES = 0;      // ALiBi
layout(constant_id = 6) const uint CAPPED = 0;
layout(constant_id = 7) const uint FORMS = 1;  // of the result: FLOATS, ROUNDED (rounding.glsl) or both
layout(set = 0, binding = 0) readonly buffer Queries { float queries[]; };
layout(set = 0, binding = 1) readonly buffer Keys { uvec4 keys[]; };
layout(set = 0, binding = 2) readonly buffer Values { uvec4 values[]; };
layout(set = 0, binding = 2) readonly buffer ValueWords { uint value_words[]; };
layout(set = 0, binding = 3) readonly buffer KeyScales { float key_scales[]; };
layout(set = 0, binding = 4) readonly buffer ValueScales { float value_scales[]; };
layout(set = 0, binding = 5) readonly buffer Positions { uint positions[]; };  // visible.glsl
layout(set = 0, binding = 6) readonly buffer Tables { uint tables[]; };
layout(set = 0, binding = 7) readonly buffer Sinks { float sinks[]; };
layout(set = 0, binding = 8) writeonly buffer Outputs { float outputs[]; };
layout(set = 0, binding = 9) readonly buffer Slopes { float slopes[]; };
layout(set = 0, binding = 10) writeonly buffer Rounded { uint rounded[]; };
// The parts of splits: highest score, sum of weights, and sums of values; and how many are stored, by a workgroup's first head.
layout(set = 0, binding = 11) coherent buffer Parts { float parts[]; };
layout(set = 0, binding = 12) coherent buffer Stored { uint stored[]; };  // 0 before and after each run
layout(push_constant) uniform Push {
    uint n_head, n_head_kv, in_stride, out_stride, n_kv_blocks, max_tokens, behind, ahead, least, n_splits;
    float scale, cap;
};

const uint KV_BLOCKS = 8, LANES = 64;  // per split, per head
const uint VECTORS = (DIM + PER - 1u) / PER, VECTORS_V = (DIM_V + PER - 1u) / PER;
const uint IN_WORD = PER / 4u, WORDS = (DIM_V + IN_WORD - 1u) / IN_WORD, OWN = (WORDS + LANES - 1u) / LANES;
const uint CHANNELS = OWN * IN_WORD;  // of a value, per lane
const uint FLOATS = 1, ROUNDED = 2, ROUNDING = LANES * HEADS;
const uint LOADS = (TILE + ROUNDING - 1u) / ROUNDING;  // per lane
const bool FILLED = TILE % ROUNDING == 0u;  // each lane loads as many
const uint AHEAD = KV == 2u ? 4u : 16u;  // places whose values are read at a time
const uint AT_ONCE = TILE / KV_BLOCK;  // vectors of a KV block's keys
const uint MOST_PLACES = HEADS > 1u ? TILE / VECTORS_V : KV_BLOCK;  // of values in shared memory at a time
const uint PLACES = MOST_PLACES < KV_BLOCK ? MOST_PLACES : KV_BLOCK;
const uint QUERY = (VECTORS * PER > DIM_V ? VECTORS * PER : DIM_V) / 4u;
shared vec4 query[HEADS * QUERY];  // [head][four channels], and at the end the result
shared float weights[HEADS * KV_BLOCK];
shared uint tile[HEADS > 1u ? 4u * LOADS * ROUNDING : 1u];
shared uint n_before;

#include "softmax.glsl"
#include "visible.glsl"
#include "rounding.glsl"

struct State {
    float highest, total;
};

// Return the four channels of a word of the cache; two with f16.
vec4 channels_of(uint word) {
    if (KV == 0u) return vec4(uintBitsToFloat(word), 0.0, 0.0, 0.0);
    if (KV == 1u) return vec4(half_values(word), 0.0, 0.0);
    return vec4(ivec4(int(word << 24), int(word << 16), int(word << 8), int(word)) >> 24);
}

// Load n adjacent vectors of keys or values into shared memory, together with all lanes. whole: n is TILE; otherwise spare lanes
// load the last one again, so that no load waits for a condition. With few channels or q8_0, a KV block's keys do not fill the tile.
void bring(bool of_keys, uint from, uint n, bool whole) {
    uvec4 loaded[LOADS];
    [[unroll]] for (uint i = 0; i < LOADS; i++) {
        uint at = i * ROUNDING + gl_LocalInvocationIndex;
        if (!whole) at = min(at, n - 1u);
        loaded[i] = of_keys ? keys[from + at] : values[from + at];
    }
    barrier();  // until all lanes have read the old contents
    [[unroll]] for (uint i = 0; i < LOADS; i++) {
        const uint at = i * ROUNDING + gl_LocalInvocationIndex;
        [[unroll]] for (uint c = 0; c < 4u; c++) tile[4u * at + c] = loaded[i][c];
    }
    barrier();
}

// Return the product of the head's query with the key of this lane's place.
float key_score(uint base) {
    const uint place = gl_LocalInvocationID.x, own = gl_LocalInvocationIndex / LANES * QUERY;
    float score = 0.0, block = 0.0;
    for (uint from = 0; from < VECTORS; from += AT_ONCE) {
        const uint n = min(AT_ONCE, VECTORS - from) * KV_BLOCK;
        if (HEADS > 1u) bring(true, (base * VECTORS + from) * KV_BLOCK, n, FILLED && VECTORS % AT_ONCE == 0u);
        for (uint first = from; first < min(from + AT_ONCE, VECTORS); first += 8u) {
            uvec4 words[8];
            [[unroll]] for (uint v = 0; v < 8u; v++)
                if (HEADS == 1u && (VECTORS % 8u == 0u || first + v < VECTORS))
                    words[v] = keys[(base * VECTORS + first + v) * KV_BLOCK + place];
            [[unroll]] for (uint v = 0; v < 8u; v++) {
                if (VECTORS % 8u != 0u && first + v >= VECTORS) break;
                const uint vector = first + v, at = 4u * ((vector - from) * KV_BLOCK + place);
                [[unroll]] for (uint i = 0; i < 4u; i++) {
                    const vec4 key = channels_of(HEADS > 1u ? tile[at + i] : words[v][i]);
                    [[unroll]] for (uint c = 0; c < IN_WORD; c++) {
                        const uint channel = i * IN_WORD + c;
                        const float q = query[own + vector * (PER / 4u) + channel / 4u][channel & 3u];
                        block = fused(q, key[c], block);
                    }
                }
                if (KV == 2u && ((vector & 1u) == 1u || vector + 1u == VECTORS)) {
                    const uint n_blocks = (DIM + 31u) / 32u;
                    score = fused(key_scales[(base * n_blocks + vector / 2u) * KV_BLOCK + place], block, score);
                    block = 0.0;
                }
            }
        }
    }
    return KV == 2u ? score : block;
}

// Return the score of this lane's position p, or LOWEST if it is not visible. All lanes must call it.
float score_of(uint p, uint first, uint last, uint base, uint token, uint head) {
    precise float score = key_score(base);
    if (CAPPED != 0u) score = soft_capped(cap, score);
    if (SLOPES != 0u) score = fused(slopes[head], -abs(float(positions[token]) - float(p)), score);
    return p < first || p > last ? LOWEST : score;
}

// Add AHEAD weighted values to a lane's sums, from a place on, or those before place `end`. at: of the place's word, in `tile` or
// in memory.
void add_some(bool whole, uint at, uint scales, uint place, uint end, uint o, inout float sums[CHANNELS]) {
    uint words[AHEAD];
    float own[AHEAD];
    [[unroll]] for (uint i = 0; i < AHEAD; i++) {
        const uint there = whole ? i : min(i, end - 1u - place);
        words[i] = HEADS > 1u ? tile[at + there * VECTORS_V * 4u] : value_words[at + there * VECTORS_V * 4u];
        if (KV == 2u) own[i] = value_scales[scales + place + there];
    }
    [[unroll]] for (uint i = 0; i < AHEAD; i++)
        if (whole || place + i < end) {
            precise vec4 value = channels_of(words[i]);
            if (KV == 2u) value = value * own[i];
            const float weight = weights[gl_LocalInvocationIndex / LANES * KV_BLOCK + place + i];
            [[unroll]] for (uint c = 0; c < IN_WORD; c++)
                sums[o * IN_WORD + c] = fused(weight, value[c], sums[o * IN_WORD + c]);
        }
}

// Add the weighted values of the places [low, high] of a KV block to a lane's sums. All lanes must call it.
void add_values(uint base, uint low, uint high, inout float sums[CHANNELS]) {
    for (uint from = low; from <= high; from += PLACES) {
        const uint n = min(PLACES, high + 1u - from), start = (base * KV_BLOCK + from) * VECTORS_V;
        if (HEADS > 1u) {
            if (FILLED && n * VECTORS_V == TILE)
                bring(false, start, TILE, true);
            else
                bring(false, start, n * VECTORS_V, false);
        }
        [[unroll]] for (uint o = 0; o < OWN; o++) {
            const uint word = o * LANES + gl_LocalInvocationID.x, step = VECTORS_V * 4u;
            if (word >= WORDS) break;
            const uint scales = (base * ((DIM_V + 31u) / 32u) + word / 8u) * KV_BLOCK;
            uint place = from, at = (HEADS > 1u ? 0u : 4u * start) + word;
            for (; place + AHEAD <= from + n; place += AHEAD, at += AHEAD * step)
                add_some(true, at, scales, place, from + n, o, sums);
            for (; place < from + n; place += AHEAD) add_some(false, at, scales, place, from + n, o, sums);
        }
    }
}

void store_part(uint part, State state, float sums[CHANNELS]) {
    const uint lane = gl_LocalInvocationID.x, at = part * (DIM_V + 2u);
    if (lane == 0u) {
        parts[at] = state.highest;
        parts[at + 1u] = state.total;
    }
    [[unroll]] for (uint o = 0; o < OWN; o++)
        [[unroll]] for (uint c = 0; c < IN_WORD; c++) {
            const uint channel = (o * LANES + lane) * IN_WORD + c;
            if (channel < DIM_V) parts[at + 2u + channel] = sums[o * IN_WORD + c];
        }
}

// Whether all other parts of the heads are stored. The workgroup that stores the last part waits for none.
bool is_last(uint head, uint n_others) {
    memoryBarrierBuffer();  // this workgroup's part is visible before it is counted
    barrier();
    if (gl_LocalInvocationIndex == 0u) {
        n_before = atomicAdd(stored[head], 1u);
        if (n_before == n_others) stored[head] = 0u;
    }
    barrier();
    memoryBarrierBuffer();
    return n_before == n_others;
}

// Add the parts of a head in order, relative to the highest score.
void merge(uint row, uint first, uint last, inout float top, inout float total, inout float outs[CHANNELS]) {
    const uint lane = gl_LocalInvocationID.x, stride = DIM_V + 2u;
    for (uint split = first; split <= last; split++) top = max(top, parts[(row + split) * stride]);
    for (uint split = first; split <= last; split++) {
        const uint at = (row + split) * stride;
        precise float below = parts[at] - top;
        const float weight = exp_of(below);
        total = fused(weight, parts[at + 1u], total);
        [[unroll]] for (uint o = 0; o < OWN; o++)
            [[unroll]] for (uint c = 0; c < IN_WORD; c++) {
                const uint channel = (o * LANES + lane) * IN_WORD + c, i = o * IN_WORD + c;
                if (channel >= DIM_V) break;
                precise float sum = outs[i] + parts[at + 2u + channel] * weight;
                outs[i] = sum;
            }
    }
}

void main() {
    const uint lane = gl_LocalInvocationID.x, row = gl_LocalInvocationIndex / LANES, token = gl_WorkGroupID.y;
    const uint first_head = gl_WorkGroupID.x * HEADS, head = first_head + row;
    const uint table = positions[max_tokens + token] * n_kv_blocks, head_kv = head / (n_head / n_head_kv);
    const uint first = first_seen(token), last = last_seen(token);
    const uint first_split = first / (KV_BLOCKS * KV_BLOCK), last_split = last / (KV_BLOCKS * KV_BLOCK);
    uint from = first_split, to = last_split;
    if (APART != 0u) {
        if (gl_WorkGroupID.z < from || gl_WorkGroupID.z > to) return;
        from = to = gl_WorkGroupID.z;
    }
    for (uint i = lane; i < VECTORS * PER; i += LANES) {
        precise float q = i < DIM ? queries[token * in_stride + head * DIM + i] * scale : 0.0;
        query[row * QUERY + i / 4u][i & 3u] = q;
    }
    barrier();
    // Splits are merged relative to their highest score, which must be known before the first one ends.
    float top = SINKS != 0u ? sinks[head] : LOWEST;
    if (APART == 0u && from != to)
        for (uint kv_block = first / KV_BLOCK; kv_block <= last / KV_BLOCK; kv_block++) {
            const uint base = tables[table + kv_block] * n_head_kv + head_kv;
            top = max(top, largest_of(score_of(kv_block * KV_BLOCK + lane, first, last, base, token, head)));
        }
    float total = 0.0;
    precise float outs[CHANNELS];
    [[unroll]] for (uint i = 0; i < CHANNELS; i++) outs[i] = 0.0;
    for (uint split = from; split <= to; split++) {
        State state = State(LOWEST, 0.0);
        precise float sums[CHANNELS];
        [[unroll]] for (uint i = 0; i < CHANNELS; i++) sums[i] = 0.0;
        const uint start = max(split * KV_BLOCKS, first / KV_BLOCK);
        const uint end = min(split * KV_BLOCKS + KV_BLOCKS - 1u, last / KV_BLOCK);
        for (uint kv_block = start; kv_block <= end; kv_block++) {
            const uint base = tables[table + kv_block] * n_head_kv + head_kv, p = kv_block * KV_BLOCK + lane;
            const float score = score_of(p, first, last, base, token, head);
            const float highest = max(state.highest, largest_of(score));
            precise float below = score - highest, before = state.highest - highest;
            const float weight = p < first || p > last ? 0.0 : exp_of(below);
            weights[gl_LocalInvocationIndex] = weight;
            const float rescale = exp_of(before);
            state = State(highest, fused(state.total, rescale, sum_of(weight)));
            const uint low = kv_block * KV_BLOCK < first ? first % KV_BLOCK : 0u;
            const uint high = min(last - kv_block * KV_BLOCK, KV_BLOCK - 1u);
            [[unroll]] for (uint i = 0; i < CHANNELS; i++) sums[i] = sums[i] * rescale;
            add_values(base, low, high, sums);
        }
        if (APART != 0u && first_split != last_split) {
            const uint part = (token * n_head + head) * n_splits;
            store_part(part + split, state, sums);
            if (!is_last(token * n_head + first_head, last_split - first_split)) return;
            merge(part, first_split, last_split, top, total, outs);
            break;
        }
        if (from == to) top = max(top, state.highest);
        precise float below = state.highest - top;
        const float weight = exp_of(below);
        total = fused(weight, state.total, total);
        [[unroll]] for (uint i = 0; i < CHANNELS; i++) outs[i] = outs[i] + sums[i] * weight;
        if (APART != 0u) break;
    }
    if (SINKS != 0u) {  // a sink has no value
        precise float below = sinks[head] - top;
        total = fused(exp_of(below), 1.0, total);
    }
    const float inverse = quotient(1.0, total);
    [[unroll]] for (uint o = 0; o < OWN; o++)
        [[unroll]] for (uint c = 0; c < IN_WORD; c++) {
            const uint channel = (o * LANES + lane) * IN_WORD + c;
            precise float own = outs[o * IN_WORD + c] * inverse;
            if (channel >= DIM_V) break;
            if ((FORMS & FLOATS) != 0u) outputs[token * out_stride + head * DIM_V + channel] = own;
            if ((FORMS & ROUNDED) != 0u) query[(row * DIM_V + channel) / 4u][channel & 3u] = own;
        }
    if ((FORMS & ROUNDED) == 0u) return;
    barrier();
    for (uint at = 0; at < HEADS * DIM_V; at += 4u * ROUNDING) {
        const uint channel = at + 4u * gl_LocalInvocationIndex;
        const vec4 x = channel < HEADS * DIM_V ? query[channel / 4u] : vec4(0.0);
        round_block(x, channel < HEADS * DIM_V, ((token * n_head + first_head) * DIM_V + channel) / 32u, 0);
    }
}
