// Chooses the kernels that this processor can run.
#include <cstring>
#include <initializer_list>

#include "kernels.h"

#if defined(_MSC_VER) && defined(_M_X64)
#include <intrin.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#ifdef HOTSET_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#endif

namespace hotset {
namespace {

#if defined(_M_X64) || defined(__x86_64__)
// Without compiler builtins: these need a library that not every compiler links.
enum Register { kEax, kEbx, kEcx, kEdx };

bool cpu_bit(int leaf, Register in, int bit, int subleaf = 0) {
#if defined(_MSC_VER)
    int info[4];
    __cpuidex(info, leaf, subleaf);
#else
    unsigned info[4];
    if (!__get_cpuid_count(leaf, subleaf, &info[kEax], &info[kEbx], &info[kEcx], &info[kEdx])) return false;
#endif
    return info[in] >> bit & 1;
}
// Whether the operating system saves these registers at thread switches.
bool os_saves(unsigned mask) {
    if (!cpu_bit(1, kEcx, 27)) return false;
#if defined(_MSC_VER)
    return (_xgetbv(0) & mask) == mask;
#else
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & mask) == mask;
#endif
}
bool has_avx2() {  // and BMI2, FMA, F16C
    return os_saves(0x6) && cpu_bit(7, kEbx, 5) && cpu_bit(7, kEbx, 8) && cpu_bit(1, kEcx, 12) &&
           cpu_bit(1, kEcx, 29);
}
bool has_avx_vnni() {
    return has_avx2() && cpu_bit(7, kEax, 4, 1);
}
bool has_avx512() {  // F, BW, DQ, VL, VNNI
    return has_avx2() && os_saves(0xe6) && cpu_bit(7, kEbx, 16) && cpu_bit(7, kEbx, 30) &&
           cpu_bit(7, kEbx, 17) && cpu_bit(7, kEbx, 31) && cpu_bit(7, kEcx, 11);
}
#else
bool has_avx2() {
    return false;
}
bool has_avx_vnni() {
    return false;
}
bool has_avx512() {
    return false;
}
#endif

// NEON belongs to every AArch64 processor. Dot product instructions need Armv8.2, i8mm needs Armv8.6.
#if defined(__aarch64__) && defined(__linux__)
bool has_neon() {
    // isa_neon.cpp needs both HWCAP_ASIMDDP, which older headers lack, and HWCAP_ASIMDHP.
    constexpr unsigned long kDotProduct = 1ul << 20, kHalfPrecision = 1ul << 10;
    return (~getauxval(AT_HWCAP) & (kDotProduct | kHalfPrecision)) == 0;
}
bool has_i8mm() {
    constexpr unsigned long kI8mm = 1ul << 13;  // HWCAP2_I8MM
    return has_neon() && getauxval(AT_HWCAP2) & kI8mm;
}
#elif defined(__aarch64__) && defined(__APPLE__)
bool has_neon() {
    return true;
}
bool has_i8mm() {  // from the M2 on
    int found = 0;
    size_t size = sizeof(found);
    return sysctlbyname("hw.optional.arm.FEAT_I8MM", &found, &size, nullptr, 0) == 0 && found;
}
#elif defined(_WIN32) && (defined(_M_ARM64) || defined(__aarch64__))
bool has_neon() {
    constexpr DWORD kDotProduct = 43;  // PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE, which older headers lack
    return IsProcessorFeaturePresent(kDotProduct);
}
bool has_i8mm() {
    constexpr DWORD kI8mm = 66;  // PF_ARM_V82_I8MM_INSTRUCTIONS_AVAILABLE
    return has_neon() && IsProcessorFeaturePresent(kI8mm);
}
#else
bool has_neon() {
    return false;
}
bool has_i8mm() {
    return false;
}
#endif

#ifdef HOTSET_AMX
// TILE, INT8. Linux saves tiles only for processes that request it.
bool has_amx() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // names that older headers lack
    return os_saves(3u << 17) && cpu_bit(7, kEdx, 24) && cpu_bit(7, kEdx, 25) &&
           syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#else
bool has_amx() {
    return false;
}
#endif

}  // namespace

#if !defined(HOTSET_X86) || defined(_MSC_VER)
const Kernels* avx_vnni_kernels() {
    return nullptr;
}
#endif
#ifndef HOTSET_X86
const Kernels* avx2_kernels() {
    return nullptr;
}
const Kernels* avx512_kernels() {
    return nullptr;
}
const Kernels* amx_kernels() {
    return nullptr;
}
#endif
#ifndef HOTSET_ARM64
const Kernels* neon_kernels() {
    return nullptr;
}
#endif
#if !defined(HOTSET_ARM64) || defined(_MSC_VER)
const Kernels* i8mm_kernels() {
    return nullptr;
}
#endif

namespace {

struct Choice {
    const char* isa;
    bool (*runs)();
    const Kernels* (*kernels)();  // null: not compiled
};

// Fastest first.
constexpr Choice kChoices[] = {
    {"amx", [] { return has_avx512() && has_amx(); }, amx_kernels},
    {"avx512", has_avx512, avx512_kernels},
    {"avxvnni", has_avx_vnni, avx_vnni_kernels},
    {"avx2", has_avx2, avx2_kernels},
    {"i8mm", has_i8mm, i8mm_kernels},
    {"neon", has_neon, neon_kernels},
    {"scalar", [] { return true; }, scalar_kernels},
};

}  // namespace

const char* isa_name(int i) {
    return i < int(sizeof(kChoices) / sizeof(*kChoices)) ? kChoices[i].isa : nullptr;
}

const Kernels* select_kernels(const char* forced, const char** error) {
#ifdef HOTSET_X86
    if (!has_avx2()) {  // the scalar kernels are compiled for AVX2 and FMA, too
        *error = "this processor lacks AVX2, which hotset needs";
        return nullptr;
    }
#endif
    for (const Choice& one : kChoices)
        if (!forced || !*forced || !std::strcmp(forced, one.isa))
            if (const Kernels* table = one.runs() ? one.kernels() : nullptr) return table;
    for (const Choice& one : kChoices)
        if (!std::strcmp(forced, one.isa)) {
            *error = "this processor cannot run these instructions";
            return nullptr;
        }
    *error = "it must be scalar, avx2, avxvnni, avx512, amx, neon or i8mm";
    return nullptr;
}

}  // namespace hotset
