// AVX2 with AVX-VNNI: products of several tokens with unsigned codes. All else is AVX2's.
#define HOTSET_AVX_VNNI
#include "isa_avx2.cpp"  // NOLINT(bugprone-suspicious-include): its formats and products once more
