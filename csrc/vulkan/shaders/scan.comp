#version 450
// A state matrix S per head, which each token decays, corrects, adds to and reads (operations.SelectiveScan, DeltaNet, Wkv,
// ChannelScan): S = w * S + b (S^T a)^T + k v^T, out = S^T r. A workgroup has 16 columns of a head of a sequence, and processes
// its tokens in order. Each column has four lanes, each with every fourth row.
#include "common.glsl"
#include "states.glsl"

layout(local_size_x = 16, local_size_y = 4) in;
layout(constant_id = 0) const uint KIND = 0;
layout(constant_id = 1) const uint DIM = 64;       // rows
layout(constant_id = 2) const uint BY_ROW = 0;  // 1: one decay per row; 0: one per head
layout(set = 0, binding = 0) readonly buffer Readers { float readers[]; };
layout(set = 0, binding = 1) readonly buffer Keys { float keys[]; };
layout(set = 0, binding = 2) readonly buffer Values { float values[]; };
layout(set = 0, binding = 3) readonly buffer Decays { float decays[]; };  // channels: rates [column][DIM]
layout(set = 0, binding = 4) readonly buffer Firsts { float firsts[]; };  // a; delta net: shares; channels: dt
layout(set = 0, binding = 5) readonly buffer Seconds { float seconds[]; };  // b; or the factor of the input that is added to the output
layout(set = 0, binding = 6) buffer States { float states[]; };             // [slot][head][row][column]
layout(set = 0, binding = 7) readonly buffer Steps { uint steps[]; };
layout(set = 0, binding = 8) writeonly buffer Outputs { float outputs[]; };
layout(push_constant) uniform Push {
    uint n_head, dim_v, n_tokens, max_tokens;
    uint reader_stride, key_stride, value_stride, decay_stride, first_stride, second_stride, out_stride;
    uint first_reader, first_key, first_value;  // offsets in their rows
    uint share, tiled;  // heads per key head: adjacent ones or, if tiled, every n-th
};
const uint SELECTIVE = 0, DELTA = 1, WKV6 = 2, WKV7 = 3, CHANNELS = 4;
const uint COLUMNS = 16, PARTS = 4, OWN = (DIM + PARTS - 1u) / PARTS;
shared float parts[PARTS * COLUMNS];

float column_sum(float mine) {
    barrier();
    parts[gl_LocalInvocationIndex] = mine;
    barrier();
    precise float sum = 0.0;
    [[unroll]] for (uint i = 0; i < PARTS; i++) sum = sum + parts[i * COLUMNS + gl_LocalInvocationID.x];
    return sum;
}

void main() {
    const uint n_tiles = (dim_v + COLUMNS - 1u) / COLUMNS, head = gl_WorkGroupID.x / n_tiles;
    const uint column = (gl_WorkGroupID.x % n_tiles) * COLUMNS + gl_LocalInvocationID.x;
    const uint part = gl_LocalInvocationID.y, first = first_of_sequence(gl_WorkGroupID.y);
    const uint key_head = (tiled != 0u ? head % tiled : head / share) * DIM, own = head * dim_v + column;
    const uint before = state_before(first), size = n_head * DIM * dim_v, start = head * DIM * dim_v + column;
    const bool is_there = column < dim_v;
    precise float s[OWN];
    [[unroll]] for (uint i = 0; i < OWN; i++) {
        const uint row = i * PARTS + part;
        s[i] = is_there && row < DIM && before != NO_STATE ? states[before * size + start + row * dim_v] : 0.0;
    }
    for (uint t = first; t < n_tokens && first_of(t) == first; t++) {
        const float x = is_there ? values[t * value_stride + first_value + own] : 0.0;
        float dt = 1.0;
        if (KIND == SELECTIVE) dt = decays[t * decay_stride + n_head + head];
        if (KIND == CHANNELS && is_there) dt = firsts[t * first_stride + column];
        precise float v = dt * x;
        precise float w = BY_ROW == 0u && KIND != CHANNELS ? decays[t * decay_stride + head] : 1.0;
        precise float sum = 0.0;
        [[unroll]] for (uint i = 0; i < OWN; i++) {
            const uint row = i * PARTS + part;
            if (row >= DIM) continue;
            if (KIND == WKV6) sum = sum + s[i] * readers[t * reader_stride + key_head + row];
            if (KIND == WKV7) sum = sum + s[i] * firsts[t * first_stride + key_head + row];
            if (BY_ROW != 0u) w = decays[t * decay_stride + head * DIM + row];
            if (KIND == CHANNELS && is_there) {
                precise float exponent = decays[column * DIM + row] * dt;
                w = exp_of(exponent);
            }
            s[i] = w * s[i];
            if (KIND == DELTA) sum = sum + s[i] * keys[t * key_stride + first_key + key_head + row];
        }
        if (KIND == DELTA || KIND == WKV6 || KIND == WKV7) sum = column_sum(sum);
        if (KIND == DELTA) {
            precise float share_of = 1.0 / (1.0 + exp_of(-firsts[t * first_stride + head]));
            v = (x - sum) * share_of;
        }
        precise float read = 0.0;
        [[unroll]] for (uint i = 0; i < OWN; i++) {
            const uint row = i * PARTS + part;
            if (row >= DIM) continue;
            if (KIND == WKV7) s[i] = s[i] + sum * seconds[t * second_stride + key_head + row];
            s[i] = s[i] + v * keys[t * key_stride + first_key + key_head + row];
            if (KIND != WKV6) read = read + s[i] * readers[t * reader_stride + first_reader + key_head + row];
        }
        read = KIND == WKV6 ? sum : column_sum(read);
        if (KIND == SELECTIVE || KIND == CHANNELS) {
            const float skip = is_there ? seconds[KIND == CHANNELS ? column : head] : 0.0;
            read = read + skip * x;
        }
        if (is_there && part == 0u) outputs[t * out_stride + own] = read;
        const uint after = state_after(t);
        if (is_there && after != NO_STATE)
            [[unroll]] for (uint i = 0; i < OWN; i++) {
                const uint row = i * PARTS + part;
                if (row < DIM) states[after * size + start + row * dim_v] = s[i];
            }
    }
}
