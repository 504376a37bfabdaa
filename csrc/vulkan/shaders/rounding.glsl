// Rounds inputs of products to eight bits with one scale per block of 32, as the CPU does
// (csrc/kernels/float_kernels.h). Eight adjacent lanes share a block. Needs the number ROUNDING of lanes, a
// multiple of 8, and the buffer `uint rounded[]` (layout: rounded.glsl).
shared uint largest[ROUNDING];
shared int sums_of_codes[ROUNDING];

// Round four values of a block and store them. All lanes must call it. `block` counts from the start of the
// buffer, `off` is for tests: units in the last place to add to a quotient.
void round_block(vec4 x, bool is_there, uint block, int off) {
    const uint lane = gl_LocalInvocationIndex, part = lane & 7u, first = lane - part;
    const uvec4 magnitudes = floatBitsToUint(x) & 0x7fffffffu;  // integers in the order of the floats
    largest[lane] = max(max(magnitudes.x, magnitudes.y), max(magnitudes.z, magnitudes.w));
    barrier();
    uint bits = 0;
    for (uint i = 0; i < 8u; i++) bits = max(bits, largest[first + i]);
    const bool is_finite = bits < 0x7f800000u;
    float inverse = 0.0, scale = uintBitsToFloat(0x7fc00000u);
    if (is_finite) {
        const float most = uintBitsToFloat(bits);
        precise float small = most / 127.0;  // for less than 127 times the smallest normal number
        scale = bits < 0x04000000u ? small : divided(most, 127.0, off);
        if (bits > 0x02fe0000u) inverse = divided(127.0, most, off);  // below, the inverse overflows: codes are 0
    }
    uint word = 0;
    int sum = 0;
    [[unroll]] for (uint i = 0; i < 4u; i++) {
        precise float code = roundEven(x[i] * inverse);
        const int whole = is_finite ? int(code) : 0;
        word |= (uint(whole) & 0xffu) << (8u * i);
        sum += whole;
    }
    sums_of_codes[lane] = sum;
    barrier();
    if (!is_there) return;
    const uint at = block * 12u;
    rounded[at + part] = word;
    if (part != 0u) return;
    ivec2 halves = ivec2(0);
    for (uint i = 0; i < 4u; i++) halves += ivec2(sums_of_codes[first + i], sums_of_codes[first + 4u + i]);
    precise float scaled = scale * float(halves.x + halves.y);
    rounded[at + 8u] = floatBitsToUint(scale);
    rounded[at + 9u] = floatBitsToUint(scaled);
    rounded[at + 10u] = uint(halves.x);
    rounded[at + 11u] = uint(halves.y);
}
