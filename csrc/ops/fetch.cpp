// Rows of a store that the operations behind this one read: they are there when it is done, or, where it does
// not wait, when FinishFetch is.
#include <algorithm>
#include <bit>

#if __has_include(<unistd.h>)
#include <unistd.h>
#endif

#include "../facts.h"
#include "alone.h"

namespace hotset {
namespace {

// Which rows of a store's group the operations behind it read, of any token.
struct FetchFacts {
    enum Which { All, Selected, NonZero, Routed, Tokens };
    RowStore* store = nullptr;
    int group = -1;
    Which which = All;
    // Buffer: any, scores (of neurons from `first` on), values, or a route of `n_used`; of tokens any, too.
    int by = -1;
    float threshold = 0.0f;
    int64_t first = 0;
    int n_used = 0;
    bool waits = true;       // else the reads are on their way, until add_finish_fetch
    int rows_per_token = 1;  // of `by`: one, or one for each of its experts
};

constexpr size_t kLine = 64, kLookBytes = 16 << 10;  // of what is fetched between two looks at the disk
constexpr int kLearnTokens = 8;  // a step of more is a prompt's: it does not say what is needed often

// Of the cache that cores share, as far as the system reports it.
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

// next: what operations behind it read, in the order of its use: while the disk is waited for it is fetched
// into the cache that threads share, as far as that has room.
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
        require(f.first >= 0 && width == n_rows - f.first, "a predictor has a score for each neuron");
    } else if (which == "nonzero") {
        f.which = FetchFacts::NonZero;
        require(width == n_rows, "a neuron has a value");
    } else if (which == "routed") {
        f.which = FetchFacts::Routed;
        require(width % 2 == 0 && width / 2 <= n_rows, "a route names some of the experts");
        f.n_used = int(width / 2);
        f.rows_per_token = facts.integer("rows_per_token", 1, INT32_MAX);
    } else if (which == "tokens") {
        f.which = FetchFacts::Tokens;
        require(facts.plan().max_tokens() <= f.store->at_once(f.group) || f.store->is_whole(),
                "a step has no more tokens than a store has room for");
    } else {
        require(which == "all", "there is no way to fetch called " + which);
        f.which = FetchFacts::All;
    }
    return std::make_unique<Fetch>(facts.plan(), f);
});

}  // namespace hotset
