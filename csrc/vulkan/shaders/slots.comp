#version 450
// Replaces a route's experts by slots of an expert cache, and writes the CPU's request: -1 - id for experts with a slot.
layout(local_size_x = 64) in;
layout(set = 0, binding = 0) readonly buffer Routes { float routes[]; };  // per token: ids, then weights
layout(set = 0, binding = 1) readonly buffer Table { int table[]; };  // slot of each expert; -1: none
layout(set = 0, binding = 2) writeonly buffer Outputs { float outputs[]; };
layout(set = 0, binding = 3) writeonly buffer Requests { int requests[]; };
layout(push_constant) uniform Push { uint n_used, route_stride, out_stride; };

void main() {
    const uint i = gl_GlobalInvocationID.x, token = gl_GlobalInvocationID.y;
    if (i >= 2u * n_used) return;
    float found = routes[token * route_stride + i];
    if (i < n_used) {
        const int id = int(found), slot = table[id];
        requests[token * n_used + i] = slot < 0 ? id : -1 - id;
        found = float(slot);
    }
    outputs[token * out_stride + i] = found;
}
