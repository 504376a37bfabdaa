// Fetches rows of a store that later operations read. They are loaded when this operation completes or, if it
// does not wait, when FinishFetch completes.
#include <algorithm>
#include <bit>

#if __has_include(<unistd.h>)
#include <unistd.h>
#endif

#include "../facts.h"
#include "alone.h"

namespace hotset {
namespace {

// Which rows of a store's group the later operations read for any token.
struct FetchFacts {
    enum Which { All, Selected, NonZero, Routed, Tokens };
    RowStore* store = nullptr;
    int group = -1;
    Which which = All;
    // Buffer with scores (of neurons from `first`), values, or a route with `n_used` experts; or any.
    int by = -1;
    float threshold = 0.0f;
    int64_t first = 0;
    int n_used = 0;
    bool waits = true;       // if false, reads are in flight until FinishFetch
    int rows_per_token = 1;  // rows of `by` per token: one, or one per expert
};

constexpr size_t kLine = 64, kLookBytes = 16 << 10;  // prefetched between two checks of the reads
constexpr int kLearnTokens = 8;  // a longer step is a prompt's and does not show which rows are needed often

// Return the size of the cache that cores share, as reported by the system.
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

    // Set a bit for each row that any token needs.
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

    // Add the bits of neurons from `first` on at their place.
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
    // Only one thread uses these.
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
    // Prefetch the weights that are read next into the shared cache until the disk is done.
    void fetch_next() const {
        if (plan_.n_threads() == 1) return;  // the reading thread has no core of its own
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

// next: the weights that later operations read, in the order of use. They are prefetched into the shared
// cache while this operation waits for the disk, as far as they fit.
static const Registered kFinishFetch("finish_fetch", [](Facts& facts) -> std::unique_ptr<Op> {
    std::vector<std::pair<const uint8_t*, size_t>> next;
    for (const std::span<const uint8_t> one : facts.list_of_bytes("next"))
        next.emplace_back(one.data(), one.size());
    return std::make_unique<FinishFetch>(facts.plan(), facts.store("store"), std::move(next));
});

static const Registered kFetch("fetch", [](Facts& facts) -> std::unique_ptr<Op> {
    FetchFacts f;
    f.store = &facts.store("store");
    f.group = facts.integer("group", 0, f.store->n_groups() - 1);
    require(f.store->end(), "there is no such group of rows");
    const std::string which = facts.text("which");
    f.by = facts.buffer("by");
    f.waits = facts.flag("waits");
    const int64_t n_rows = f.store->n_rows(f.group), width = facts.width(f.by);
    if (which == "selected") {
        f.which = FetchFacts::Selected;
        f.threshold = facts.real("threshold");
        f.first = facts.integer("first");
        require(f.first >= 0 && width == n_rows - f.first, "there must be one score per neuron");
    } else if (which == "nonzero") {
        f.which = FetchFacts::NonZero;
        require(width == n_rows, "there must be one value per neuron");
    } else if (which == "routed") {
        f.which = FetchFacts::Routed;
        require(width % 2 == 0 && width / 2 <= n_rows, "the route does not fit the experts");
        f.n_used = int(width / 2);
        f.rows_per_token = facts.integer("rows_per_token", 1, INT32_MAX);
    } else if (which == "tokens") {
        f.which = FetchFacts::Tokens;
        require(facts.plan().max_tokens() <= f.store->at_once(f.group) || f.store->is_whole(),
                "a step may have more tokens than the store has room for");
    } else {
        require(which == "all", "there is no kind of fetch named " + which);
        f.which = FetchFacts::All;
    }
    return std::make_unique<Fetch>(facts.plan(), f);
});

}  // namespace hotset
