// The down projection with one row per neuron.
//
// The neurons are split into kRanges ranges, for any threads and mode. Within a range each output is summed
// over the neurons in order, then over the ranges in order. A neuron of value zero adds nothing, whether its
// row is read or not. With one token, a chunk is a range and reads whole rows; a second phase sums the
// ranges. With several tokens, a chunk is some of the outputs; it decodes a tile of neurons once, and each
// token adds its own neurons.
#include <algorithm>
#include <bit>

#include "../facts.h"
#include "linear_input.h"

namespace hotset {
namespace {

constexpr int kRanges = 16;
constexpr int kTileNeurons = 64;       // one bit each of a word; ranges begin at whole tiles
constexpr int64_t kSumColumns = 1024;  // of a chunk of the phase that sums the ranges
constexpr int64_t kTileColumns = 128;  // columns decoded at a time: 32 KB of floats for a tile of neurons
constexpr int64_t kMostColumns = 512;  // of a chunk of many tokens, so that its sums stay in cache
constexpr int kManyTokens = 16;
constexpr int kChunksPerThread = 4;  // least number, if there are enough columns
constexpr int kMarkedTokens = 4;     // per chunk

class Axpy : public Op {
  public:
    Axpy(const Plan& plan, int x, LinearPart part, int residual, bool sparse)
        : plan_(plan),
          x_(plan.buffer(x)),
          part_(std::move(part)),
          residual_(residual < 0 ? nullptr : &plan.buffer(residual)),
          sparse_(sparse),
          range_(int64_t(ceil_div(words(), kRanges)) * kTileNeurons) {}

    int n_phases(const StepTokens& step) const override { return step.rows(x_) == 1 || sparse_ ? 2 : 1; }
    int n_chunks(int phase, const StepTokens& step) const override {
        const int n = step.rows(x_);
        if (n == 0) return 0;
        if (n == 1) return phase == 0 ? n_ranges() : sum_chunks();
        return phase == 0 && sparse_ ? mark_chunks(n) : column_chunks(n);
    }

    void run(int phase, int chunk, const StepTokens& step, Worker& worker) const override {
        const int n = step.rows(x_);
        if (n == 1 && phase == 0)
            add_range(chunk, worker);
        else if (n == 1)
            add_ranges(chunk, worker);
        else if (phase == 0 && sparse_)
            mark(RowRange(chunk, mark_chunks(n), n), worker);
        else
            add_tiles(chunk, n, worker);
    }

    Needs needs() const override {
        const int n = plan_.max_tokens(), marked = std::max(kMarkedTokens, ceil_div(n, kMaxChunks) + 1);
        size_t floats = std::max(size_t(cols()) + 2 * range_, size_t(marked) * words() * 2);
        for (int several : {std::min(kManyTokens, n), n}) {
            const int64_t columns = (ceil_div(ceil_div(cols(), 32), column_chunks(several)) + 1) * 32;
            floats = std::max(floats, Tiles::floats(several, columns));
        }
        return {
            floats, 0,
            std::max(size_t(n) * words() * sizeof(uint64_t), size_t(n_ranges()) * cols() * sizeof(float))};
    }

  private:
    int64_t rows() const { return part_.weight.rows; }
    int64_t cols() const { return part_.weight.cols; }
    int64_t words() const { return ceil_div(rows(), kTileNeurons); }
    int n_ranges() const { return ceil_div(rows(), range_); }
    int sum_chunks() const { return std::min(ceil_div(cols(), kSumColumns), kMaxChunks); }
    int mark_chunks(int n) const { return std::min(ceil_div(n, kMarkedTokens), kMaxChunks); }
    int column_chunks(int n) const {
        const int64_t fewest = n > kManyTokens ? ceil_div(cols(), kMostColumns) : 1;
        const int64_t most = std::clamp<int64_t>(cols() / kTileColumns, 1, kMaxChunks);
        return int(std::min(std::max<int64_t>(fewest, kChunksPerThread * plan_.n_threads()), most));
    }
    int64_t first_column(int chunk, int chunks) const {
        return chunk == chunks ? cols() : int64_t(ceil_div(cols(), 32)) * chunk / chunks * 32;
    }

    // ---- one token

    void add_range(int chunk, Worker& worker) const {
        const int64_t first = chunk * range_, last = std::min(first + range_, rows());
        float* sums = worker.results.as<float>();
        float* values = sums + cols();
        int32_t* neurons = reinterpret_cast<int32_t*>(values + range_);
        uint64_t marked[kTileNeurons] = {};  // for the range, kTileNeurons words at a time
        int n = 0;
        for (int64_t at = first; at < last; at += kTileNeurons * kTileNeurons) {
            const int64_t count = std::min<int64_t>(last - at, kTileNeurons * kTileNeurons);
            std::fill_n(marked, kTileNeurons, ~uint64_t(0));
            if (sparse_) plan_.kernels().nonzero_bits(x_.row(0) + at, count, marked);
            for (int64_t word = 0; word < ceil_div(count, kTileNeurons); word++) {
                uint64_t rest = marked[word];
                if (count - word * kTileNeurons < kTileNeurons)
                    rest &= (uint64_t(1) << count % kTileNeurons) - 1;
                for (; rest; rest &= rest - 1) {
                    neurons[n] = int32_t(at + word * kTileNeurons + std::countr_zero(rest));
                    values[n] = x_.row(0)[neurons[n]];
                    n++;
                }
            }
        }
        std::fill_n(sums, cols(), 0.0f);
        plan_.kernels().axpy[int(part_.weight.type)](part_.weight, neurons, values, n, 0, cols(), sums);
        if (!worker.begin_commit()) return;
        std::copy_n(sums, cols(), shared_sums(chunk));
        FfnCounts counts;
        counts.down_rows = n;
        counters.add(counts, worker.index());
        worker.end_commit();
    }

    void add_ranges(int chunk, Worker& worker) const {
        const RowRange columns(chunk, sum_chunks(), int(cols()));
        float* sums = worker.results.as<float>();
        std::copy_n(shared_sums(0) + columns.first, columns.count(), sums);
        for (int r = 1; r < n_ranges(); r++)
            plan_.kernels().add(sums, shared_sums(r) + columns.first, columns.count(), sums);
        finish(columns.first, columns.count(), 1, sums, {}, worker);
    }

    float* shared_sums(int range) const { return reinterpret_cast<float*>(plan_.shared()) + range * cols(); }

    // ---- several tokens

    // Mark the neurons that are not zero.
    void mark(RowRange tokens, Worker& worker) const {
        uint64_t* own = worker.results.as<uint64_t>();
        for (int t = tokens.first; t < tokens.last; t++)
            plan_.kernels().nonzero_bits(x_.row(t), x_.width, own + (t - tokens.first) * words());
        if (!worker.begin_commit()) return;
        std::copy_n(own, tokens.count() * words(), shared_marks() + tokens.first * words());
        worker.end_commit();
    }

    uint64_t* shared_marks() const { return reinterpret_cast<uint64_t*>(plan_.shared()); }

    // The memory of a chunk of `count` outputs, in the worker's results.
    struct Tiles {
        float* sums;        // [n][count]
        float* range_sums;  // [n][count]
        float* tile;        // [kTileNeurons][kTileColumns] decoded weights
        float* values;      // [n][kTileNeurons] values of a token's neurons in the tile
        int32_t* neurons;   // [n][kTileNeurons] their indices in the tile
        int32_t* found;     // [n] their number

        Tiles(float* memory, int64_t n, int64_t count)
            : sums(memory),
              range_sums(sums + n * count),
              tile(range_sums + n * count),
              values(tile + kTileNeurons * kTileColumns),
              neurons(reinterpret_cast<int32_t*>(values + n * kTileNeurons)),
              found(neurons + n * kTileNeurons) {}
        static size_t floats(int64_t n, int64_t count) {
            return size_t(2 * n * count + kTileNeurons * kTileColumns + n * (2 * kTileNeurons + 1));
        }
    };

    void add_tiles(int chunk, int n, Worker& worker) const {
        const int chunks = column_chunks(n);
        const int64_t first = first_column(chunk, chunks), count = first_column(chunk + 1, chunks) - first;
        const Kernels& kernels = plan_.kernels();
        const Tiles m(worker.results.as<float>(), n, count);
        FfnCounts counts;
        std::fill_n(m.sums, 2 * n * count, 0.0f);
        for (int64_t neuron = 0; neuron < rows(); neuron += kTileNeurons) {
            if (worker.cancelled()) return;
            const uint64_t any = list_neurons(neuron, n, m);
            counts.down_rows += std::popcount(any);
            for (int64_t at = 0; at < count && any; at += kTileColumns) {
                const int64_t width = std::min(count - at, kTileColumns);
                for (uint64_t rest = any; rest; rest &= rest - 1) {
                    const int i = std::countr_zero(rest);
                    kernels.decode[int(part_.weight.type)](part_.weight, neuron + i, first + at, width,
                                                           m.tile + i * width);
                }
                for (int t = 0; t < n; t++)
                    kernels.tile_axpy(m.tile, m.neurons + t * kTileNeurons, m.values + t * kTileNeurons,
                                      m.found[t], width, m.range_sums + t * count + at);
            }
            if ((neuron + kTileNeurons) % range_ == 0 || neuron + kTileNeurons >= rows()) {
                kernels.add(m.sums, m.range_sums, n * count, m.sums);
                std::fill_n(m.range_sums, n * count, 0.0f);
            }
        }
        if (chunk != 0) counts = {};  // all chunks read the same rows: count them once
        finish(first, count, n, m.sums, counts, worker);
    }

    // List each token's neurons in the tile at `neuron`. Returns a bit per neuron of any token.
    uint64_t list_neurons(int64_t neuron, int n, const Tiles& m) const {
        const uint64_t all =
            ~uint64_t(0) >> (kTileNeurons - std::min<int64_t>(rows() - neuron, kTileNeurons));
        uint64_t any = 0;
        for (int t = 0; t < n; t++) {
            const uint64_t wanted = sparse_ ? shared_marks()[t * words() + neuron / kTileNeurons] & all : all;
            const float* x = x_.row(t) + neuron;
            int32_t* neurons = m.neurons + t * kTileNeurons;
            float* values = m.values + t * kTileNeurons;
            int found = 0;
            for (uint64_t rest = wanted; rest; rest &= rest - 1) {
                neurons[found] = std::countr_zero(rest);
                values[found] = x[neurons[found]];
                found++;
            }
            m.found[t] = found;
            any |= wanted;
        }
        return any;
    }

    void finish(int64_t first, int64_t count, int n, float* sums, const FfnCounts& counts,
                Worker& worker) const {
        const Kernels& kernels = plan_.kernels();
        add_bias(kernels, part_.bias, first, n, count, sums);
        if (residual_)
            for (int t = 0; t < n; t++)
                kernels.add(sums + t * count, residual_->row(t) + first, count, sums + t * count);
        if (!worker.begin_commit()) return;
        const Buffer& out = plan_.buffer(part_.out);
        for (int t = 0; t < n; t++) std::copy_n(sums + t * count, count, out.row(t) + first);
        counters.add(counts, worker.index());
        worker.end_commit();
    }

    const Plan& plan_;
    const Buffer& x_;
    const LinearPart part_;
    const Buffer* residual_;
    const bool sparse_;
    const int64_t range_;  // neurons of a range
};

}  // namespace

// See operations.TransposedLinear. sparse: skip the rows of neurons that are zero.
static const Registered kTransposedLinear("transposed_linear", [](Facts& facts) -> std::unique_ptr<Op> {
    const int x = facts.buffer("x"), out = facts.buffer("out");
    facts.same_rows(x, out);
    LinearPart part{facts.matrix("weight", facts.width(x), facts.width(out)),
                    facts.floats_or_none("bias", facts.width(out)), out};
    const int residual = facts.residual(x, out);
    return std::make_unique<Axpy>(facts.plan(), x, std::move(part), residual, facts.flag("sparse"));
});

}  // namespace hotset
