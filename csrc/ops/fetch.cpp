// Rows of a store that the operations behind this one read: they are there when it is done, or, where it does
// not wait, when FinishFetch is.
#include <algorithm>
#include <bit>

#if __has_include(<unistd.h>)
#include <unistd.h>
#endif

#include "alone.h"

namespace hotset {
namespace {

constexpr size_t kLine = 64, kLookBytes = 16 << 10;  // of what is fetched between two looks at the disk
constexpr int kLearnTokens = 8;  // a step of more is a prompt's: it does not say what is needed often

// Of the cache that cores share, as far as the system tells.
size_t shared_cache_bytes() {
#if defined(_SC_LEVEL3_CACHE_SIZE)
    static const long bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
    return size_t(std::max(bytes, 0L));
#else
    return 0;
#endif
}

class Fetch : public Op {
  public:
    Fetch(const Plan& plan, FetchFacts facts) : plan_(plan), f_(facts), by_(plan.buffer(f_.by)) {
        wanted_.resize(size_t(ceil_div(n_rows(), 64)));
        own_.resize(wanted_.size());
        rows_.resize(size_t(n_rows()));
    }

    int n_phases(const StepTokens&) const override { return 1; }
    int n_chunks(int, const StepTokens& step) const override { return n_tokens(step) > 0; }
    bool alone(int) const override { return true; }

    void run(int, int, const StepTokens& step, Worker& worker) const override {
        run_alone(plan_, worker, [&] {
            const int n = n_tokens(step);
            mark(step, n);
            f_.store->begin(f_.group, rows_.data(), list(), n <= kLearnTokens * f_.rows_per_token);
            return !f_.waits || f_.store->finish([&] { return worker.cancelled(); });
        });
    }
    Needs needs() const override { return {}; }

  private:
    int64_t n_rows() const { return f_.store->n_rows(f_.group); }
    int n_tokens(const StepTokens& step) const { return step.rows(by_); }

    // A bit for each row that any token wants.
    void mark(const StepTokens& step, int n) const {
        if (f_.which == FetchFacts::All) return std::fill(wanted_.begin(), wanted_.end(), ~uint64_t(0));
        std::fill(wanted_.begin(), wanted_.end(), 0);
        const auto set = [&](int64_t row) { wanted_[row / 64] |= uint64_t(1) << row % 64; };
        for (int t = 0; t < n; t++) {
            const float* x = by_.row(t);
            switch (f_.which) {
                case FetchFacts::NonZero:
                    plan_.kernels().nonzero_bits(x, n_rows(), own_.data());
                    for (size_t i = 0; i < own_.size(); i++) wanted_[i] |= own_[i];
                    break;
                case FetchFacts::Selected:
                    plan_.kernels().not_below_bits(x, f_.threshold, n_rows() - f_.first, own_.data());
                    add_shifted();
                    break;
                case FetchFacts::Tokens:
                    set(step.tokens[t]);
                    break;
                default:
                    for (int i = 0; i < f_.n_used; i++)
                        set(std::clamp<int64_t>(int64_t(x[i]), 0, n_rows() - 1));
            }
        }
        if (f_.which == FetchFacts::Selected)
            for (int64_t i = 0; i < f_.first; i++) set(i);
    }

    // The bits of neurons from `first` on, to the place where they belong.
    void add_shifted() const {
        const int shift = int(f_.first % 64);
        const size_t at = size_t(f_.first / 64);
        for (size_t i = 0; i + at < wanted_.size() && i < size_t(ceil_div(n_rows() - f_.first, 64)); i++) {
            wanted_[i + at] |= own_[i] << shift;
            if (shift && i + at + 1 < wanted_.size()) wanted_[i + at + 1] |= own_[i] >> (64 - shift);
        }
    }

    int64_t list() const {
        int64_t n = 0;
        for (size_t word = 0; word < wanted_.size(); word++)
            for (uint64_t rest = wanted_[word]; rest; rest &= rest - 1) {
                const int64_t row = int64_t(word) * 64 + std::countr_zero(rest);
                if (row < n_rows()) rows_[n++] = int32_t(row);
            }
        return n;
    }

    const Plan& plan_;
    const FetchFacts f_;
    const Buffer& by_;
    // Only one thread is ever here.
    mutable std::vector<uint64_t> wanted_, own_;
    mutable std::vector<int32_t> rows_;
};

class FinishFetch : public Op {
  public:
    FinishFetch(const Plan& plan, RowStore& store, std::vector<std::pair<const uint8_t*, size_t>> next)
        : plan_(plan), store_(store), next_(std::move(next)) {}

    int n_phases(const StepTokens&) const override { return 1; }
    int n_chunks(int, const StepTokens&) const override { return 1; }
    bool alone(int) const override { return true; }
    void run(int, int, const StepTokens&, Worker& worker) const override {
        run_alone(plan_, worker, [&] {
            fetch_next();
            return store_.finish([&] { return worker.cancelled(); });
        });
    }
    Needs needs() const override { return {}; }

  private:
    // Brings what is read next into the cache while there is nothing else to do.
    void fetch_next() const {
        if (plan_.n_threads() == 1) return;  // whoever reads has no core of its own
        size_t left = shared_cache_bytes() / 4 * 3;
        for (const auto& [data, bytes] : next_)
            for (size_t at = 0; at < bytes && left >= kLine; at += kLine, left -= kLine) {
                if (at % kLookBytes == 0 && !store_.is_coming()) return;
                prefetch_line(data + at);
            }
    }

    const Plan& plan_;
    RowStore& store_;
    const std::vector<std::pair<const uint8_t*, size_t>> next_;
};

}  // namespace

std::unique_ptr<Op> make_finish_fetch(const Plan& plan, RowStore& store,
                                      std::vector<std::pair<const uint8_t*, size_t>> next) {
    return std::make_unique<FinishFetch>(plan, store, std::move(next));
}

std::unique_ptr<Op> make_fetch(const Plan& plan, FetchFacts facts) {
    return std::make_unique<Fetch>(plan, facts);
}

}  // namespace hotset
