// NEON with I8MM (Armv8.6): products of many tokens. All else is isa_neon.cpp's.
#define HOTSET_I8MM
#include "isa_neon.cpp"  // NOLINT(bugprone-suspicious-include): its formats and panels once more
