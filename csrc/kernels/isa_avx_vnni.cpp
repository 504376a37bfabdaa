// AVX2 with AVX-VNNI: products of several tokens with unsigned codes. Everything else is AVX2's.
#define HOTSET_AVX_VNNI
#include "isa_avx2.cpp"  // NOLINT(bugprone-suspicious-include): compiles its formats and products again
