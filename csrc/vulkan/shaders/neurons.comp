#version 450
// A predictor's scores for a layer whose neurons the device and the CPU share: the scores of the device's
// neurons side by side, or one bit per neuron that says whether it is wanted.
layout(local_size_x = 64) in;
layout(constant_id = 0) const uint BITS = 0;
layout(set = 0, binding = 0) readonly buffer Scores { float scores[]; };
layout(set = 0, binding = 1) readonly buffer Neurons { float neurons[]; };  // indices of the device's neurons
layout(set = 0, binding = 2) writeonly buffer Outputs { uint outputs[]; };  // floats, or words of 32 bits
layout(push_constant) uniform Push {
    uint width, in_stride, out_stride;  // width: of the output
    uint n_neurons, first_score;  // earlier neurons have no score and are always wanted
    float threshold;
};

// Return a neuron's score; wanted neurons without a score get the threshold.
float score_of(uint token, uint neuron) {
    return neuron < first_score ? threshold : scores[token * in_stride + neuron - first_score];
}

void main() {
    const uint i = gl_GlobalInvocationID.x, token = gl_GlobalInvocationID.y;
    if (i >= width) return;
    uint found = 0;
    if (BITS == 0u) {
        found = floatBitsToUint(score_of(token, uint(neurons[i])));
    } else {
        for (uint k = 0; k < 32u; k++) {
            const uint neuron = 32u * i + k;
            if (neuron < n_neurons && !(score_of(token, neuron) < threshold)) found |= 1u << k;
        }
    }
    outputs[token * out_stride + i] = found;
}
