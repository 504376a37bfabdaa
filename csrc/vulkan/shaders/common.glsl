// Functions that all kernels share. Sums and products are `precise`: neither contracted nor reordered, so that they round as in
// IEEE 754. Operations that Vulkan leaves open (exp, half floats, rounding of quotients and roots) are built from these, in the
// CPU's order (csrc/kernels/float_kernels.h), so the results are bitwise the CPU's.
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require

#ifdef NATIVE  // the device has integer dot products and converts half floats exactly (probe.comp)
#extension GL_EXT_spirv_intrinsics : require
float half_value(uint h) {
    return unpackHalf2x16(h).x;
}
vec2 half_values(uint pair) {
    return unpackHalf2x16(pair);
}

spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6018, 6019], id = 4450)
int dot_of_bytes(uint a, uint b, spirv_literal int packed);  // OpSDot

// Add the products of four signed bytes to `sum`.
int with_dot(int sum, uint a, uint b) {
    return dot_of_bytes(a, b, 0) + sum;
}
#else
// Return the value of a half float, including denormals.
float half_value(uint h) {  // uses the low 16 bits
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

// Round to the nearest half float, ties to even.
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

// Whether the device's fma() rounds once, as measured by probe.comp.
layout(constant_id = 99) const uint FUSED = 0;

// Return a * b + c, rounded once. Without such an instruction it computes the product and the sums with their
// exact errors, and joins the low parts so that the last sum rounds correctly (Boldo and Melquiond, Emulation
// of FMA and correctly rounded sums, 2008).
float fused(float a, float b, float c) {
    if (FUSED != 0u) {
        precise float at_once = fma(a, b, c);
        return at_once;
    }
    precise float product = a * b, plain = product + c;
    if (!(abs(product) < 1e33 && abs(a) < 1e33 && abs(b) < 1e33)) return plain;
    precise float high_a = 4097.0 * a, high_b = 4097.0 * b;
    high_a = high_a - (high_a - a);
    high_b = high_b - (high_b - b);
    precise float low_a = a - high_a, low_b = b - high_b;
    precise float rest = ((high_a * high_b - product) + high_a * low_b + low_a * high_b) + low_a * low_b;
    precise float low = rest + c, shift = low - rest, low_rest = (rest - (low - shift)) + (c - shift);
    precise float high = low + product, moved = high - low, high_rest = (low - (high - moved)) + (product - moved);
    precise float odd = low_rest + high_rest, third = odd - low_rest;
    precise float lost = (low_rest - (odd - third)) + (high_rest - third);
    const uint bits = floatBitsToUint(odd);
    if (lost != 0.0 && (bits & 1u) == 0u) odd = uintBitsToFloat((lost > 0.0) == (odd > 0.0) ? bits + 1u : bits - 1u);
    precise float result = high + odd;
    return result;
}

// Compute e^x to about one unit in the last place; 0 below -88 (denormals may be flushed anyway), 1 at 0.
float exp_of(float x) {
    x = min(x > -88.5 ? x : -88.5, 89.0);
    precise float scaled = x * 1.44269504;
    const float n = max(roundEven(scaled), -127.0);
    const float r = fused(n, 2.12194440e-4, fused(n, -0.693359375, x));  // ln 2 in two parts: the first product is exact
    float p = fused(1.9875691500e-4, r, 1.3981999507e-3);
    p = fused(p, r, 8.3334519073e-3);
    p = fused(p, r, 4.1665795894e-2);
    p = fused(p, r, 1.6666665459e-1);
    p = fused(p, r, 5.0000001201e-1);
    precise float square = p * r, line = r + 1.0;
    precise float result = fused(square, r, line) * uintBitsToFloat(uint(int(n) + 127) << 23);
    return result;
}

// Return a / b rounded as in IEEE 754 if all three are normal; Vulkan's quotient may be 2.5 units off. off: for tests.
float divided(float a, float b, int off) {
    precise float near = a / b;
    const uint n = (floatBitsToUint(a) & 0x7fffffu) | 0x800000u, d = (floatBitsToUint(b) & 0x7fffffu) | 0x800000u;
    const uint exponent = (floatBitsToUint(a) >> 23) - (floatBitsToUint(b) >> 23) + (n < d ? 126u : 127u);
    uint code = uint(int(floatBitsToUint(near) - (exponent << 23)) + 0x800000 + off);  // 24 bits of the quotient
    // The remainder of the dividend, at most half of the divisor afterwards: it fits in 32 bits.
    int rest = int((n << (n < d ? 24u : 23u)) - code * d);
    for (uint i = 0; i < 8u; i++) {
        const int step = 2 * rest > int(d) ? 1 : 2 * rest < -int(d) ? -1 : 0;
        code += uint(step);
        rest -= step * int(d);
    }
    return uintBitsToFloat((exponent << 23) + code - 0x800000u);
}

// Return a / b rounded as in IEEE 754 if the quotient and both operands are normal.
float quotient(float a, float b) {
    const uvec2 bits = uvec2(floatBitsToUint(a), floatBitsToUint(b));
    const ivec2 exponents = ivec2((bits >> 23) & 0xffu);
    const int expected = exponents.x - exponents.y + 127;
    precise float plain = a / b;
    if (min(exponents.x, exponents.y) < 1 || max(exponents.x, exponents.y) > 253 || expected < 2 || expected > 253)
        return plain;
    const float magnitude = divided(abs(a), abs(b), 0);
    return ((bits.x ^ bits.y) & 0x80000000u) != 0u ? -magnitude : magnitude;
}

// Return the root of a normal number, rounded as in IEEE 754, by comparing the square of the candidate's 24 bits.
float root(float x) {
    precise float near = sqrt(x);
    const uint bits = floatBitsToUint(x), exponent = bits >> 23;
    if (!(x > 1e-37 && x < 1e38)) return near;
    const uint n = (bits & 0x7fffffu) | 0x800000u, odd = (exponent & 1u) ^ 1u;
    const uint own = (exponent + 127u - odd) / 2u;  // of the root, whose square has 47 or 48 bits
    uint code = floatBitsToUint(near) - (own << 23) + 0x800000u;
    int rest = int((n << (23u + odd)) - code * code);
    for (uint i = 0; i < 8u; i++) {
        const int step = rest > int(code) ? 1 : rest <= -int(code) ? -1 : 0;
        rest -= step * int(2u * code) + abs(step);
        code += uint(step);
    }
    return uintBitsToFloat((own << 23) + code - 0x800000u);
}

float soft_capped(float cap, float x) {
    precise float twice = 2.0 * x;
    precise float e = exp_of(quotient(twice, cap)) + 1.0;
    precise float both = 2.0 * cap;
    precise float capped = cap - quotient(both, e);
    return capped;
}
