#include "bandwidth.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

namespace hotset {
namespace {

constexpr size_t kStretch = 1 << 20;  // claimed at a time, as the chunks of a step are

// Sums are kept in sixteen lanes, which compilers turn into the widest registers they may use.
uint64_t sum_words(const uint8_t* data, size_t bytes) {
    uint64_t lanes[16] = {};
    for (size_t i = 0; i + 128 <= bytes; i += 128) {
        uint64_t words[16];
        std::memcpy(words, data + i, 128);
        for (int lane = 0; lane < 16; lane++) lanes[lane] += words[lane];
    }
    uint64_t total = 0;
    for (uint64_t lane : lanes) total += lane;
    return total;
}

}  // namespace

double read_bandwidth(const uint8_t* data, size_t bytes, int n_threads) {
    std::atomic<size_t> next{0};
    std::atomic<uint64_t> total{0};
    auto work = [&] {
        for (;;) {
            const size_t at = next.fetch_add(kStretch);
            if (at >= bytes) return;
            total += sum_words(data + at, bytes - at < kStretch ? bytes - at : kStretch);
        }
    };
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> threads;
    for (int i = 1; i < n_threads; i++) threads.emplace_back(work);
    work();
    for (std::thread& thread : threads) thread.join();
    return double(bytes) / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace hotset
