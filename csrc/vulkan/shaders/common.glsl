// What all kernels share. Sums and products are `precise`: neither contracted nor reordered, so that they round
// as IEEE says on every device. What Vulkan leaves open (exp, half floats) is written in such operations.
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require

#ifdef NATIVE  // the device has integer dot products, and was found to read half floats exactly (probe.comp)
#extension GL_EXT_spirv_intrinsics : require
float half_value(uint h) {
    return unpackHalf2x16(h).x;
}
vec2 half_values(uint pair) {
    return unpackHalf2x16(pair);
}

spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6018, 6019], id = 4450)
int dot_of_bytes(uint a, uint b, spirv_literal int packed);  // OpSDot

// `sum` and the products of four signed bytes of each.
int with_dot(int sum, uint a, uint b) {
    return dot_of_bytes(a, b, 0) + sum;
}
#else
// A half float's value, denormals included.
float half_value(uint h) {  // of the low 16 bits
    const uint exponent = (h >> 10) & 31u, mantissa = h & 0x3ffu;
    float magnitude = exponent == 0u    ? float(mantissa) * 5.9604644775390625e-8
                      : exponent == 31u ? uintBitsToFloat(0x7f800000u | (mantissa << 13))
                                        : uintBitsToFloat(((exponent + 112u) << 23) | (mantissa << 13));
    return (h & 0x8000u) != 0u ? -magnitude : magnitude;
}

vec2 half_values(uint pair) {
    return vec2(half_value(pair), half_value(pair >> 16));
}

int with_dot(int sum, uint a, uint b) {
    [[unroll]] for (uint i = 0; i < 4u; i++)
        sum += (int(a << (24u - 8u * i)) >> 24) * (int(b << (24u - 8u * i)) >> 24);
    return sum;
}
#endif

// The nearest half float, to even.
uint to_half(float f) {
    const uint bits = floatBitsToUint(f), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return sign | 0x7e00u;
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u;
    if (magnitude < 0x38800000u) {  // adding 0.5 leaves the rounded multiple of 2^-24 in the low bits
        precise float shifted = uintBitsToFloat(magnitude) + 0.5;
        return sign | (floatBitsToUint(shifted) - 0x3f000000u);
    }
    return sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13);
}

// e^x to about one unit in the last place; 0 below -87.3 (denormals may be flushed anyway), 1 at 0.
float exp_of(float x) {
    if (!(x > -87.3)) return x != x ? x : 0.0;
    x = min(x, 88.7);
    precise float n = floor(x * 1.44269504 + 0.5);
    precise float r = x - n * 0.693359375;  // ln 2 in two parts: the first product is exact
    precise float s = r + n * 2.12194440e-4;
    precise float p = 1.9875691500e-4;
    p = p * s + 1.3981999507e-3;
    p = p * s + 8.3334519073e-3;
    p = p * s + 4.1665795894e-2;
    p = p * s + 1.6666665459e-1;
    p = p * s + 5.0000001201e-1;
    precise float e = (p * s) * s + (s + 1.0);
    const int whole = int(n), first = min(whole, 127);  // 2^128 in two steps
    precise float scaled = e * uintBitsToFloat(uint(first + 127) << 23);
    precise float result = scaled * (whole > 127 ? 2.0 : 1.0);
    return result;
}

float soft_capped(float cap, float x) {
    precise float e = exp_of(2.0 * (x / cap));
    precise float capped = cap - 2.0 * cap / (e + 1.0);
    return capped;
}

// a / b rounded as IEEE says, where all three are normal; Vulkan's quotient may be 2.5 units off. off: of tests.
float divided(float a, float b, int off) {
    precise float near = a / b;
    const uint n = (floatBitsToUint(a) & 0x7fffffu) | 0x800000u, d = (floatBitsToUint(b) & 0x7fffffu) | 0x800000u;
    const uint exponent = (floatBitsToUint(a) >> 23) - (floatBitsToUint(b) >> 23) + (n < d ? 126u : 127u);
    uint code = uint(int(floatBitsToUint(near) - (exponent << 23)) + 0x800000 + off);  // 24 bits of the quotient
    // What is left of the dividend, and then half of the divisor at most: it fits in 32 bits.
    int rest = int((n << (n < d ? 24u : 23u)) - code * d);
    for (uint i = 0; i < 8u; i++) {
        const int step = 2 * rest > int(d) ? 1 : 2 * rest < -int(d) ? -1 : 0;
        code += uint(step);
        rest -= step * int(d);
    }
    return uintBitsToFloat((exponent << 23) + code - 0x800000u);
}
