// NEON with I8MM (Armv8.6): products of many tokens. Everything else is in isa_neon.cpp.
#define HOTSET_I8MM
#include "isa_neon.cpp"  // NOLINT(bugprone-suspicious-include): compiles its formats and panels again
