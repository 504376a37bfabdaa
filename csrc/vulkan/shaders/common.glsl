// What all kernels share. Sums and products are `precise`: neither contracted nor reordered, so that they round
// as IEEE says on every device. What Vulkan leaves open (exp, half floats) is written in such operations.
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require

// A half float's value, denormals included.
float half_value(uint h) {
    const uint exponent = (h >> 10) & 31u, mantissa = h & 0x3ffu;
    float magnitude = exponent == 0u    ? float(mantissa) * 5.9604644775390625e-8
                      : exponent == 31u ? uintBitsToFloat(0x7f800000u | (mantissa << 13))
                                        : uintBitsToFloat(((exponent + 112u) << 23) | (mantissa << 13));
    return (h & 0x8000u) != 0u ? -magnitude : magnitude;
}

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
