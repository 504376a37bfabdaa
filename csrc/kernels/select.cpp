// Chooses the kernels that this processor can run.
#include <cstring>
#include <initializer_list>

#include "kernels.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#define HOTSET_CPU_HAS(feature) (__builtin_cpu_supports(feature) != 0)
#elif defined(_M_X64)
#include <intrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(_M_ARM64)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#endif

namespace hotset {
namespace {

#if defined(__x86_64__) && defined(__GNUC__)
bool has_f16c() {  // by hand: older compilers do not know its name
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
bool has_avx2() {
    return HOTSET_CPU_HAS("avx2") && HOTSET_CPU_HAS("fma") && HOTSET_CPU_HAS("bmi2") && has_f16c();
}
bool has_avx512() {
    return has_avx2() && HOTSET_CPU_HAS("avx512f") && HOTSET_CPU_HAS("avx512bw") &&
           HOTSET_CPU_HAS("avx512dq") && HOTSET_CPU_HAS("avx512vl") && HOTSET_CPU_HAS("avx512vnni");
}
#elif defined(_M_X64)
bool cpu_bit(int leaf, int reg, int bit) {
    int info[4];
    __cpuidex(info, leaf, 0);
    return info[reg] >> bit & 1;
}
bool os_saves(unsigned mask) {
    return cpu_bit(1, 2, 27) && (_xgetbv(0) & mask) == mask;
}
bool has_avx2() {
    return os_saves(0x6) && cpu_bit(7, 1, 5) && cpu_bit(7, 1, 8) && cpu_bit(1, 2, 12) && cpu_bit(1, 2, 29);
}
bool has_avx512() {
    return has_avx2() && os_saves(0xe6) && cpu_bit(7, 1, 16) && cpu_bit(7, 1, 30) && cpu_bit(7, 1, 17) &&
           cpu_bit(7, 1, 31) && cpu_bit(7, 2, 11);
}
#else
bool has_avx2() {
    return false;
}
bool has_avx512() {
    return false;
}
#endif

// NEON belongs to every AArch64 processor; the dot product instructions came with Armv8.2.
#if defined(__aarch64__) && defined(__linux__)
bool has_neon() {
    constexpr unsigned long kDotProduct = 1ul << 20;  // HWCAP_ASIMDDP, which older headers lack
    return getauxval(AT_HWCAP) & kDotProduct;
}
#elif defined(__aarch64__) && defined(__APPLE__)
bool has_neon() {
    return true;
}
#elif defined(_M_ARM64)
bool has_neon() {
    constexpr DWORD kDotProduct = 43;  // PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE, which older headers lack
    return IsProcessorFeaturePresent(kDotProduct);
}
#else
bool has_neon() {
    return false;
}
#endif

}  // namespace

#ifndef HOTSET_X86
const Kernels* avx2_kernels() {
    return nullptr;
}
const Kernels* avx512_kernels() {
    return nullptr;
}
#endif
#ifndef HOTSET_ARM64
const Kernels* neon_kernels() {
    return nullptr;
}
#endif

const Kernels* select_kernels(const char* forced, const char** error) {
#ifdef HOTSET_X86
    if (!has_avx2()) {  // the scalar kernels are compiled for AVX2 and FMA as well
        *error = "this processor lacks AVX2, which hotset needs";
        return nullptr;
    }
#endif
    const Kernels* avx512 = has_avx512() ? avx512_kernels() : nullptr;
    const Kernels* avx2 = has_avx2() ? avx2_kernels() : nullptr;
    const Kernels* neon = has_neon() ? neon_kernels() : nullptr;
    const Kernels* choices[] = {avx512, avx2, neon, scalar_kernels()};
    for (const Kernels* table : choices)
        if (table && (!forced || !*forced || !std::strcmp(forced, table->isa))) return table;
    for (const char* name : {"avx512", "avx2", "neon"})
        if (!std::strcmp(forced, name)) {
            *error = "this processor cannot run these instructions";
            return nullptr;
        }
    *error = "it must be scalar, avx2, avx512 or neon";
    return nullptr;
}

}  // namespace hotset
