#version 450
// Some channels of each head, followed by channels that all heads share.
layout(local_size_x = 64) in;
layout(set = 0, binding = 0) readonly buffer Inputs { float inputs[]; };
layout(set = 0, binding = 1) readonly buffer Common { float common_inputs[]; };
layout(set = 0, binding = 2) writeonly buffer Outputs { float outputs[]; };
layout(push_constant) uniform Push {
    uint width, in_stride, common_stride, out_stride;
    uint in_dim, first, count, out_dim;  // per head; count: the head's own channels
};

void main() {
    const uint i = gl_GlobalInvocationID.x, token = gl_GlobalInvocationID.y;
    if (i >= width) return;
    const uint head = i / out_dim, channel = i % out_dim;
    outputs[token * out_stride + i] = channel < count ? inputs[token * in_stride + head * in_dim + first + channel]
                                                      : common_inputs[token * common_stride + channel - count];
}
