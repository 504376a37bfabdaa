// Measures how many threads of a pool compute a piece of work fastest, for each size of work.
//
// Synchronising threads costs from a few microseconds on a desktop to a hundred for fifteen threads of a
// virtual machine. Pieces of work that are shorter than that run faster on fewer threads. Results do not
// depend on the choice.
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

    // Choose the threads for work that reads `bytes` bytes. Tries all threads first, then half as many, and
    // so on, until fewer are much slower. Then returns the fastest count.
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

    // Record the duration of a piece of work that `choose` was called for. After kAgain pieces of a size the
    // trials begin again, since other processes come and go.
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

    static constexpr int kTrials = 4;  // per number of threads; the fastest counts
    static constexpr int64_t kAgain = 4096;

  private:
    static constexpr double kMuchSlower = 1.5;
    struct Tried {
        int n_threads;
        int64_t n_trials = 0;
        double ns_per_byte = std::numeric_limits<double>::infinity();
    };

    // One entry per power of two of bytes.
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
