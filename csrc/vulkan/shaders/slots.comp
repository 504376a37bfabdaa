#version 450
// A route with slots of an expert cache in place of experts, and what the CPU is asked for: -1 - id for an expert that has one.
layout(local_size_x = 64) in;
layout(set = 0, binding = 0) readonly buffer Routes { float routes[]; };  // of a token ids, and then weights
layout(set = 0, binding = 1) readonly buffer Table { int table[]; };      // the slot of each expert; -1: none
layout(set = 0, binding = 2) writeonly buffer Outputs { float outputs[]; };
layout(set = 0, binding = 3) writeonly buffer Asked { int asked[]; };
layout(push_constant) uniform Push { uint n_used, route_stride, out_stride; };

void main() {
    const uint i = gl_GlobalInvocationID.x, token = gl_GlobalInvocationID.y;
    if (i >= 2u * n_used) return;
    float found = routes[token * route_stride + i];
    if (i < n_used) {
        const int id = int(found), slot = table[id];
        asked[token * n_used + i] = slot < 0 ? id : -1 - id;
        found = float(slot);
    }
    outputs[token * out_stride + i] = found;
}
