#include "bandwidth.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "threads.h"

namespace hotset {
namespace {

constexpr size_t kUnit = 256;                 // bytes: Kernels::read reads a multiple of this
constexpr size_t kStretch = 1 << 20;          // bytes of a read, so that an early thread can help with others
constexpr size_t kAtLeast = size_t(1) << 30;  // bytes to read, so that the start of threads is negligible
constexpr size_t kBytesAhead = 6144;          // prefetched ahead among pieces, like channels of a matrix
constexpr size_t kPrefetched = 1024;          // at a time, at most

// Read `stretches` stretches repeatedly with `n_threads` threads, a contiguous part each. read: reads a
// stretch and returns a number that depends on it. Returns the seconds of a pass.
template <class Read>
double seconds_of_pass(size_t stretches, size_t bytes, int n_threads, const Read& read) {
    const size_t passes = (kAtLeast + bytes - 1) / bytes;
    const size_t part = (stretches + n_threads - 1) / n_threads;
    std::vector<std::atomic<size_t>> next(n_threads);
    std::atomic<float> sink{0.0f};  // prevents the compiler from removing the reads
    auto work = [&](int self) {
        for (int i = 0; i < n_threads; i++) {
            const size_t begin = size_t((self + i) % n_threads) * part;
            const size_t own = begin >= stretches ? 0 : std::min(part, stretches - begin);
            for (;;) {
                const size_t claimed = next[(self + i) % n_threads].fetch_add(1);
                if (claimed >= own * passes) break;
                sink = read(begin + claimed % own);
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
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / double(passes);
}

}  // namespace

double read_bandwidth(const Kernels& kernels, const uint8_t* data, size_t bytes, int n_threads) {
    bytes = bytes / kUnit * kUnit;
    if (bytes == 0) return 0.0;
    const auto read = [&](size_t stretch) {
        const size_t at = stretch * kStretch, n = std::min(kStretch, bytes - at);
        return kernels.read(reinterpret_cast<const float*>(data + at), int64_t(n / sizeof(float)));
    };
    return double(bytes) / seconds_of_pass((bytes + kStretch - 1) / kStretch, bytes, n_threads, read);
}

double gather_bandwidth(const Kernels& kernels, const uint8_t* data, const int64_t* pieces, size_t n_pieces,
                        size_t piece_bytes, int n_threads) {
    if (n_pieces == 0 || piece_bytes == 0) return 0.0;
    const size_t unit = std::gcd(piece_bytes, kPrefetched), per_piece = piece_bytes / unit;
    const size_t units = n_pieces * per_piece, per_stretch = kStretch / unit, ahead = kBytesAhead / unit;
    const auto at = [&](size_t i) { return data + pieces[i / per_piece] + i % per_piece * unit; };
    const auto read = [&](size_t stretch) {
        const size_t first = stretch * per_stretch, last = std::min(first + per_stretch, units);
        float sum = 0.0f;
        for (size_t i = first; i < last; i++) {
            const uint8_t* later = at(std::min(i + ahead, units - 1));
            for (size_t line = 0; line < unit; line += 64) prefetch_line(later + line);
            sum += kernels.read(reinterpret_cast<const float*>(at(i)), int64_t(unit / sizeof(float)));
        }
        return sum;
    };
    const size_t bytes = n_pieces * piece_bytes;
    return double(bytes) / seconds_of_pass((units + per_stretch - 1) / per_stretch, bytes, n_threads, read);
}

}  // namespace hotset
