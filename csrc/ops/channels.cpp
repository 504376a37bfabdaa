// Matrix products with thresholded inputs (operations.Threshold). For one token they read only the channels
// that are not zero, from an input-major copy of the matrix, if these are few enough. Otherwise, and for
// several tokens, they read whole rows. The results are bitwise identical.
#include <algorithm>
#include <memory>

#include "channel_input.h"
#include "linear.h"
#include "linear_tail.h"

namespace hotset {
namespace {

constexpr int64_t kSplitBytes = 2 << 20;  // of weights, from which on a second phase gains more than it costs

// A small matrix needs one phase, in which a chunk computes some outputs. A large one needs two. In the
// first, a chunk is a tile, or the sum of some lanes of it: many threads then read long pieces of memory, as
// the channels of a tile are adjacent. The second phase adds the lanes; a chunk is some outputs.
class ChannelLinear : public Op {
  public:
    ChannelLinear(const Plan& plan, int x, Norm norm, std::vector<LinearPart> parts,
                  std::vector<ChannelMatrix> channels, int residual, LinearTail tail, float threshold)
        : plan_(plan),
          several_(make_linear(plan, x, norm, parts, residual, tail, threshold)),
          input_(plan, x, std::move(norm), threshold),
          parts_(std::move(parts)),
          channels_(std::move(channels)),
          residual_(residual < 0 ? nullptr : &plan.buffer(residual)),
          tail_(tail) {
        several_->counted = &counters;
        int64_t bytes = 0;
        for (const LinearPart& part : parts_) {
            input_.serves(part.weight);
            bytes += int64_t(part.weight.rows) * int64_t(part.weight.row_bytes);
        }
        in_two_ = bytes >= kSplitBytes;
        for (size_t p = 0; p < parts_.size(); p++) pieces_.push_back(pieces_of(p));
    }

    int n_phases(const StepTokens& step) const override {
        return is_one(step) ? 1 + in_two_ : several_->n_phases(step);
    }
    int n_chunks(int phase, const StepTokens& step) const override {
        if (!is_one(step)) return several_->n_chunks(phase, step);
        int chunks = 0;
        const bool multiplies = in_two_ && phase == 0;
        for (size_t p = 0; p < (multiplies ? parts_.size() : n_results()); p++)
            chunks += multiplies ? pieces_[p].chunks() : result_chunks(p);
        return chunks;
    }
    void run(int phase, int chunk, const StepTokens& step, Worker& worker) const override {
        if (!is_one(step)) return several_->run(phase, chunk, step, worker);
        size_t p = 0;
        if (in_two_ && phase == 0) {
            while (chunk >= pieces_[p].chunks()) chunk -= pieces_[p++].chunks();
            return multiply_piece(p, chunk, step, worker);
        }
        while (chunk >= result_chunks(p)) chunk -= result_chunks(p++);
        finish(p, chunk * result_columns(p), step, worker);
    }
    bool prefetch(int phase, int chunk, int piece, const StepTokens& step) const override {
        return !is_one(step) && several_->prefetch(phase, chunk, piece, step);
    }

    Needs needs() const override {
        Needs needs = several_->needs();
        const Needs one = input_.needs();
        for (size_t p = 0; p < parts_.size(); p++) {
            const int64_t most = std::max(pieces_[p].columns, result_columns(p));
            needs.result_floats =
                std::max(needs.result_floats, size_t(2 * most + channel_scratch_floats(most)));
        }
        needs.result_floats = std::max(needs.result_floats, one.result_floats);
        needs.input_width = std::max(needs.input_width, one.input_width);
        needs.private_bytes = std::max(needs.private_bytes, one.private_bytes);
        if (in_two_) needs.shared_bytes = std::max(needs.shared_bytes, shared_floats() * sizeof(float));
        return needs;
    }

  private:
    // How the first of two phases divides a part: into tiles of outputs, and into groups of lanes.
    struct Pieces {
        int64_t columns;
        int tiles, splits;

        int chunks() const { return tiles * splits; }
    };

    bool gated() const { return tail_.kind == LinearTail::Gated; }
    bool is_one(const StepTokens& step) const { return input_.n_tokens(step) == 1; }
    size_t n_results() const { return gated() ? 1 : parts_.size(); }  // gate and up are computed together
    int64_t rows(size_t p) const { return parts_[p].weight.rows; }

    Pieces pieces_of(size_t p) const {
        const int64_t wanted = 2 * plan_.n_threads();
        // The largest number of columns that leaves enough pieces for all threads.
        const int64_t most = ceil_div(rows(p), ceil_div(wanted, kLanes));
        const int64_t tile = channels_[p].data ? channels_[p].tile : rows(p);
        const int64_t columns = std::min(tile, (most + 31) / 32 * 32);
        const int tiles = ceil_div(rows(p), columns);
        int splits = 1;
        while (splits < kLanes && tiles * splits < wanted) splits *= 2;
        return {columns, tiles, splits};
    }
    int64_t result_columns(size_t p) const {
        const int64_t share = ceil_div(rows(p), plan_.n_threads() * kChannelColumns) * kChannelColumns;
        return in_two_ ? share : std::min(share, channels_[p].data ? channels_[p].tile : share);
    }
    int result_chunks(size_t p) const { return ceil_div(rows(p), result_columns(p)); }

    // Return a part's place in shared memory: the number of sums per output, then the sums.
    float* shared_of(size_t p) const {
        float* at = reinterpret_cast<float*>(plan_.shared());
        for (size_t q = 0; q < p; q++) at += 16 + pieces_[q].splits * rows(q);
        return at;
    }
    size_t shared_floats() const {
        size_t floats = 0;
        for (size_t p = 0; p < parts_.size(); p++) floats += 16 + pieces_[p].splits * rows(p);
        return floats;
    }

    void multiply_piece(size_t p, int chunk, const StepTokens& step, Worker& worker) const {
        const Kernels& kernels = plan_.kernels();
        const ChannelInput::One in = input_.one(step, worker);
        const Matrix& w = parts_[p].weight;
        const Pieces& pieces = pieces_[p];
        const int splits = pieces.splits, split = chunk % splits;
        int64_t first = chunk / splits * pieces.columns, last = std::min(first + pieces.columns, w.rows);
        float *results = worker.results.as<float>(), *scratch = results + pieces.columns;
        FfnCounts counts;
        const bool input_major = in.pays(channels_[p]);
        if (input_major) {
            kernels.channel_linear[int(w.type)](channels_[p], *in.active, in.inputs, first, last - first,
                                                split * kLanes / splits, kLanes / splits, scratch, results);
            counts.left_out = split ? 0 : in.left_out(channels_[p], last - first);
        } else {  // read a share of the rows instead
            const int64_t begin = first, count = last - first;
            first = begin + count * split / splits, last = begin + count * (split + 1) / splits;
            kernels.linear[int(w.type)](w, first, last, in.inputs, 0, 1, results, last - first,
                                        worker.kernel_scratch.data());
        }
        if (!worker.begin_commit()) return;
        float* shared = shared_of(p);
        if (chunk == 0) shared[0] = float(input_major ? splits : 1);
        std::copy_n(results, last - first, shared + 16 + (input_major ? split * w.rows : 0) + first);
        counters.add(counts, worker.index());
        worker.end_commit();
    }

    // Compute the products of `count` outputs of a part, starting at `first`.
    void product(size_t p, int64_t first, int64_t count, const ChannelInput::One* in, Worker& worker,
                 float* scratch, float* out, FfnCounts& counts) const {
        const Kernels& kernels = plan_.kernels();
        const LinearPart& part = parts_[p];
        if (!in) {
            const float* shared = shared_of(p);
            // A straggler may read undefined data here.
            const int splits = shared[0] == float(pieces_[p].splits) ? pieces_[p].splits : 1;
            fold_lanes(kernels, shared + 16 + first, part.weight.rows, splits, count, scratch, out);
        } else if (in->pays(channels_[p])) {
            kernels.channel_linear[int(part.weight.type)](channels_[p], *in->active, in->inputs, first, count,
                                                          0, kLanes, scratch, out);
            counts.left_out += in->left_out(channels_[p], count);
        } else {
            kernels.linear[int(part.weight.type)](part.weight, first, first + count, in->inputs, 0, 1, out,
                                                  count, worker.kernel_scratch.data());
        }
        add_bias(kernels, part.bias, first, 1, count, out);
    }

    void finish(size_t p, int64_t first, const StepTokens& step, Worker& worker) const {
        const Kernels& kernels = plan_.kernels();
        const int64_t count = std::min(result_columns(p), rows(p) - first);
        float *results = worker.results.as<float>(), *up = results + result_columns(p);
        float* scratch = up + result_columns(p);
        FfnCounts counts;
        const ChannelInput::One one = in_two_ ? ChannelInput::One() : input_.one(step, worker);
        const ChannelInput::One* in = in_two_ ? nullptr : &one;
        product(p, first, count, in, worker, scratch, results, counts);
        if (gated()) product(1, first, count, in, worker, scratch, up, counts);
        finish_products(kernels, tail_, step.thresholded.data(), 1, count, results, up, counts);
        if (residual_) kernels.add(results, residual_->row(0) + first, count, results);
        if (!worker.begin_commit()) return;
        std::copy_n(results, count, plan_.buffer(parts_[p].out).row(0) + first);
        counters.add(counts, worker.index());
        worker.end_commit();
    }

    const Plan& plan_;
    const std::unique_ptr<Op> several_;
    ChannelInput input_;
    const std::vector<LinearPart> parts_;
    const std::vector<ChannelMatrix> channels_;
    const Buffer* residual_;
    const LinearTail tail_;
    bool in_two_ = false;         // whether one token takes two phases
    std::vector<Pieces> pieces_;  // per part
};

}  // namespace

std::unique_ptr<Op> make_channel_linear(const Plan& plan, int x, Norm norm, std::vector<LinearPart> parts,
                                        std::vector<ChannelMatrix> channels, int residual, LinearTail tail,
                                        float threshold) {
    return std::make_unique<ChannelLinear>(plan, x, std::move(norm), std::move(parts), std::move(channels),
                                           residual, tail, threshold);
}

}  // namespace hotset
