// How many threads of a pool compute a piece of work quickest: tried, for each size of the work.
//
// Threads that meet cost time, which no count of bytes tells: a few microseconds on a desktop, a hundred for
// fifteen threads of a virtual machine. Work that takes less is quicker with fewer of them. Results never
// depend on it.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <limits>
#include <vector>

namespace hotset {

class ThreadChoice {
  public:
    explicit ThreadChoice(int most) : most_(most) {}

    // For work that reads so many bytes. All threads at first, then half as many, and so on, as long as fewer
    // are not much slower; then the quickest of these.
    int choose(int64_t bytes) {
        const auto& tried = of(bytes);
        const Tried* best = &tried.front();
        for (const Tried& each : tried) {
            if (each.n_trials < kTrials) return each.n_threads;
            if (each.ns_per_byte < best->ns_per_byte) best = &each;
            if (each.ns_per_byte > kMuchSlower * best->ns_per_byte) break;
        }
        return best->n_threads;
    }

    // What work took that `choose` was asked about. After kAgain pieces of a size all is tried anew, since
    // other processes come and go.
    void note(int64_t bytes, int n_threads, int64_t ns) {
        auto& tried = of(bytes);
        int64_t n_pieces = 0;
        for (Tried& each : tried) {
            if (each.n_threads == n_threads) {
                each.ns_per_byte =
                    std::min(each.ns_per_byte, double(ns) / double(std::max<int64_t>(bytes, 1)));
                each.n_trials++;
            }
            n_pieces += each.n_trials;
        }
        if (n_pieces >= kAgain) tried.clear();
    }

    static constexpr int kTrials = 4;  // of a number of threads; the quickest counts
    static constexpr int64_t kAgain = 4096;

  private:
    static constexpr double kMuchSlower = 1.5;
    struct Tried {
        int n_threads;
        int64_t n_trials = 0;
        double ns_per_byte = std::numeric_limits<double>::infinity();
    };

    // Of sizes between two powers of two.
    std::vector<Tried>& of(int64_t bytes) {
        auto& tried = sizes_[std::bit_width(uint64_t(std::max<int64_t>(bytes, 0)))];
        if (tried.empty())
            for (int n = most_; n > 0; n /= 2) tried.push_back({n});
        return tried;
    }

    const int most_;
    std::array<std::vector<Tried>, 65> sizes_;
};

}  // namespace hotset
