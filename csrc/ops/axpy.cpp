// The down projection by rows = neurons: each output is summed over the neurons in order.
//
// A chunk is a range of outputs, so that no sum crosses chunks, whatever their number. One token adds the
// rows of its neurons one after the other. Several: a tile of neurons is decoded once for all of them, and
// each adds its own.
#include <algorithm>
#include <bit>

#include "linear_input.h"

namespace hotset {
namespace {

constexpr int kChunksPerThread = 4;      // one token
constexpr int64_t kFewestColumns = 256;  // of a chunk
constexpr int kTileNeurons = 64;         // a bit each of a word
constexpr int64_t kTileColumns = 128;    // many tokens: with a tile's neurons 32 KB of floats
constexpr int kManyTokens = 16;
constexpr int kMarkedTokens = 4;  // per chunk

class Axpy : public Op {
  public:
    Axpy(const Plan& plan, int x, LinearPart part, int residual, bool sparse)
        : plan_(plan),
          x_(plan.buffer(x)),
          part_(std::move(part)),
          residual_(residual < 0 ? nullptr : &plan.buffer(residual)),
          sparse_(sparse) {}

    // Of several tokens it is first noted which neurons are not zero: a bit each.
    int n_phases(const StepTokens& step) const override { return marks(step.rows(x_)) ? 2 : 1; }
    int n_chunks(int phase, const StepTokens& step) const override {
        const int n = step.rows(x_);
        if (n == 0) return 0;
        return phase == 0 && marks(n) ? mark_chunks(n) : column_chunks(n);
    }

    void run(int phase, int chunk, const StepTokens& step, Worker& worker) const override {
        if (phase == 0 && marks(step.rows(x_)))
            mark(RowRange(chunk, mark_chunks(step.rows(x_)), step.rows(x_)), worker);
        else
            multiply(chunk, step, worker);
    }

    Needs needs() const override {
        const int marked = std::max(kMarkedTokens, ceil_div(plan_.max_tokens(), kMaxChunks) + 1);
        size_t floats = size_t(marked) * words() * 2;
        for (int n : {1, std::min(kManyTokens, plan_.max_tokens()), plan_.max_tokens()}) {
            const int64_t columns = (ceil_div(ceil_div(cols(), 32), column_chunks(n)) + 1) * 32;
            floats = std::max(floats, size_t(n + kTileNeurons) * columns);
        }
        // The list of one token's neurons lies in `inputs`: 8 bytes each (LinearInput takes 6 a token and
        // channel).
        return {floats, ceil_div(part_.weight.rows * 8, kPrivateInputs * 6) + 64,
                size_t(plan_.max_tokens()) * words() * sizeof(uint64_t)};
    }

  private:
    int64_t cols() const { return part_.weight.cols; }
    int64_t words() const { return ceil_div(part_.weight.rows, kTileNeurons); }
    bool marks(int n) const { return sparse_ && n > 1; }

    int mark_chunks(int n) const { return std::min(ceil_div(n, kMarkedTokens), kMaxChunks); }

    void mark(RowRange tokens, Worker& worker) const {
        uint64_t* own = worker.results.as<uint64_t>();
        for (int t = tokens.first; t < tokens.last; t++)
            plan_.kernels().nonzero_bits(x_.row(t), x_.width, own + (t - tokens.first) * words());
        if (!worker.begin_commit()) return;
        std::copy_n(own, tokens.count() * words(),
                    reinterpret_cast<uint64_t*>(plan_.shared()) + tokens.first * words());
        worker.end_commit();
    }

    void multiply(int chunk, const StepTokens& step, Worker& worker) const {
        const int n = step.rows(x_), chunks = column_chunks(n);
        const int64_t first = first_column(chunk, chunks), count = first_column(chunk + 1, chunks) - first;
        float* sums = worker.results.as<float>();
        std::fill_n(sums, n * count, 0.0f);
        int64_t n_rows = 0;
        if (n == 1)
            n_rows = one_token(first, count, worker, sums);
        else
            n_rows = many_tokens(n, first, count, sums, sums + n * count);
        const Kernels& kernels = plan_.kernels();
        add_bias(kernels, part_.bias, first, n, count, sums);
        if (residual_)
            for (int t = 0; t < n; t++)
                kernels.add(sums + t * count, residual_->row(t) + first, count, sums + t * count);
        if (!worker.begin_commit()) return;
        const Buffer& out = plan_.buffer(part_.out);
        for (int t = 0; t < n; t++) std::copy_n(sums + t * count, count, out.row(t) + first);
        if (chunk == 0) {
            FfnCounts counts;
            counts.down_rows = n_rows;
            counters.add(counts);
        }
        worker.end_commit();
    }

    int column_chunks(int n) const {
        const int64_t smallest = n > kManyTokens ? kTileColumns : kFewestColumns;
        const int most = n > kManyTokens ? kMaxChunks : kChunksPerThread * plan_.n_threads();
        return int(std::clamp<int64_t>(cols() / smallest, 1, most));
    }
    int64_t first_column(int chunk, int chunks) const {
        return chunk == chunks ? cols() : int64_t(ceil_div(cols(), 32)) * chunk / chunks * 32;
    }

    int64_t one_token(int64_t first, int64_t count, Worker& worker, float* sums) const {
        // Which neurons are not zero is found once a phase and thread.
        int32_t* rows = reinterpret_cast<int32_t*>(worker.inputs.data());
        float* values = reinterpret_cast<float*>(rows + x_.width);
        if (worker.enter_inputs()) {
            const float* x = x_.row(0);
            int found = 0;
            for (int64_t i = 0; i < x_.width; i++) {
                const float value = x[i];  // read once: a late thread may see it change
                rows[found] = int32_t(i);
                values[found] = value;
                found += !sparse_ || value != 0.0f;
            }
            worker.n_inputs = found;
        }
        plan_.kernels().axpy[int(part_.weight.type)](part_.weight, rows, values, worker.n_inputs, first,
                                                     count, sums);
        return worker.n_inputs;
    }

    // Returns how many rows were read.
    int64_t many_tokens(int n, int64_t first, int64_t count, float* sums, float* tile) const {
        const Kernels& kernels = plan_.kernels();
        const Matrix& w = part_.weight;
        const Matrix decoded = {Type::F32, reinterpret_cast<const uint8_t*>(tile), kTileNeurons, count,
                                size_t(count) * sizeof(float)};
        const uint64_t* marked = reinterpret_cast<const uint64_t*>(plan_.shared());
        int64_t n_rows = 0;
        for (int64_t word = 0; word < words(); word++) {
            const int64_t neuron = word * kTileNeurons;
            const uint64_t all =
                ~uint64_t(0) >> (kTileNeurons - std::min<int64_t>(w.rows - neuron, kTileNeurons));
            uint64_t any = sparse_ ? 0 : all;
            for (int t = 0; t < n && sparse_; t++) any |= marked[t * words() + word] & all;
            for (uint64_t rest = any; rest; rest &= rest - 1) {
                const int i = std::countr_zero(rest);
                kernels.decode[int(w.type)](w, neuron + i, first, count, tile + i * count);
                n_rows++;
            }
            for (int t = 0; t < n; t++) {
                int32_t rows[kTileNeurons];
                float values[kTileNeurons];
                int found = 0;
                for (uint64_t rest = sparse_ ? marked[t * words() + word] & any : all; rest;
                     rest &= rest - 1) {
                    rows[found] = std::countr_zero(rest);
                    values[found++] = x_.row(t)[neuron + std::countr_zero(rest)];
                }
                if (found)
                    kernels.axpy[int(Type::F32)](decoded, rows, values, found, 0, count, sums + t * count);
            }
        }
        return n_rows;
    }

    const Plan& plan_;
    const Buffer& x_;
    const LinearPart part_;
    const Buffer* residual_;
    const bool sparse_;
};

}  // namespace

std::unique_ptr<Op> make_axpy(const Plan& plan, int x, LinearPart part, int residual, bool sparse) {
    return std::make_unique<Axpy>(plan, x, std::move(part), residual, sparse);
}

}  // namespace hotset
