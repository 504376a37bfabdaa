#include "bandwidth.h"

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "threads.h"

namespace hotset {
namespace {

constexpr size_t kUnit = 256;                 // bytes: Kernels::read reads a multiple of this
constexpr size_t kStretch = 1 << 20;          // bytes of a read, so that an early thread can help with others
constexpr size_t kAtLeast = size_t(1) << 30;  // bytes to read, so that the start of threads is negligible

}  // namespace

double read_bandwidth(const Kernels& kernels, const uint8_t* data, size_t bytes, int n_threads) {
    bytes = bytes / kUnit * kUnit;
    if (bytes == 0) return 0.0;
    const size_t passes = (kAtLeast + bytes - 1) / bytes;
    const size_t part = (bytes / n_threads + kStretch - 1) / kStretch * kStretch;
    std::vector<std::atomic<size_t>> next(n_threads);
    std::atomic<float> sink{0.0f};  // prevents the compiler from removing the reads
    auto work = [&](int self) {
        for (int i = 0; i < n_threads; i++) {
            const size_t begin = size_t((self + i) % n_threads) * part;
            const size_t end = begin + part < bytes ? begin + part : bytes;
            const size_t stretches = end > begin ? (end - begin + kStretch - 1) / kStretch : 0;
            for (;;) {
                const size_t claimed = next[(self + i) % n_threads].fetch_add(1);
                if (claimed >= stretches * passes) break;
                const size_t at = begin + claimed % stretches * kStretch;
                const size_t n = end - at < kStretch ? end - at : kStretch;
                sink = kernels.read(reinterpret_cast<const float*>(data + at), int64_t(n / sizeof(float)));
            }
        }
    };
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> threads;
    try {
        for (int i = 1; i < n_threads; i++)
            threads.push_back(start_thread("only " + std::to_string(i) + " of " + std::to_string(n_threads) +
                                               " threads could be started",
                                           [&work, i] { work(i); }));
    } catch (...) {  // with fewer threads the measurement would be wrong
        for (std::thread& thread : threads) thread.join();
        throw;
    }
    work(0);
    for (std::thread& thread : threads) thread.join();
    return double(bytes * passes) /
           std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace hotset
