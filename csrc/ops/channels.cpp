// Matrix products whose inputs are cut (graph.Cutoff): one token reads the channels that are not zero, from a
// copy of the matrix by channel, where these are few enough; else, and for several tokens, whole rows. The
// result is the same to the bit, so that nobody need know which it was.
#include <algorithm>
#include <memory>
#include <new>

#include "channel_input.h"
#include "linear_tail.h"

namespace hotset {
namespace {

constexpr int64_t kFewestColumns = 256;  // of a chunk of a part that has no copy

class ChannelLinear : public Op {
  public:
    ChannelLinear(const Plan& plan, int x, Norm norm, std::vector<LinearPart> parts,
                  std::vector<ChannelMatrix> channels, int residual, LinearTail tail, float cutoff)
        : plan_(plan),
          several_(make_linear(plan, x, norm, parts, residual, tail, cutoff)),
          input_(plan, x, std::move(norm), cutoff),
          parts_(std::move(parts)),
          channels_(std::move(channels)),
          residual_(residual < 0 ? nullptr : &plan.buffer(residual)),
          tail_(tail) {
        several_->counted = &counters;
        for (const LinearPart& part : parts_) input_.serves(part.weight);
        for (size_t p = 0; p < n_column_parts(); p++) columns_.push_back(chunk_columns(p));
    }

    int n_phases(const StepTokens& step) const override {
        return is_one(step) ? 1 : several_->n_phases(step);
    }
    int n_chunks(int phase, const StepTokens& step) const override {
        if (!is_one(step)) return several_->n_chunks(phase, step);
        int chunks = 0;
        for (size_t p = 0; p < n_column_parts(); p++) chunks += part_chunks(p);
        return chunks;
    }
    void run(int phase, int chunk, const StepTokens& step, Worker& worker) const override {
        if (!is_one(step)) return several_->run(phase, chunk, step, worker);
        size_t p = 0;
        while (chunk >= part_chunks(p)) chunk -= part_chunks(p++);
        multiply(p, chunk * columns_[p], step, worker);
    }
    bool prefetch(int phase, int chunk, int piece, const StepTokens& step) const override {
        return !is_one(step) && several_->prefetch(phase, chunk, piece, step);
    }

    Needs needs() const override {
        Needs needs = several_->needs();
        const Needs one = input_.needs();
        const int64_t most = *std::max_element(columns_.begin(), columns_.end());
        needs.result_floats = std::max({needs.result_floats, one.result_floats, size_t(18 * most)});
        needs.input_width = std::max(needs.input_width, one.input_width);
        needs.private_bytes = std::max(needs.private_bytes, one.private_bytes);
        return needs;
    }

  private:
    bool gated() const { return tail_.kind == LinearTail::Gated; }
    bool is_one(const StepTokens& step) const { return input_.n_tokens(step) == 1; }
    size_t n_column_parts() const { return gated() ? 1 : parts_.size(); }  // gate and up go together
    int part_chunks(size_t p) const { return ceil_div(parts_[p].weight.rows, columns_[p]); }
    // A tile, which lies side by side in memory, or less where there are more threads than tiles.
    int64_t chunk_columns(size_t p) const {
        const ChannelMatrix& copy = gated() && !channels_[p].data ? channels_[1] : channels_[p];
        const int64_t share = ceil_div(parts_[p].weight.rows, plan_.n_threads() * kChannelColumns);
        return std::min(share * kChannelColumns, copy.data ? copy.tile : kFewestColumns);
    }

    void multiply(size_t p, int64_t first, const StepTokens& step, Worker& worker) const {
        const Kernels& kernels = plan_.kernels();
        const ChannelInput::One in = input_.one(step, worker);
        const LinearPart& part = parts_[p];
        const int64_t last = std::min(first + columns_[p], part.weight.rows), count = last - first;
        float *results = worker.results.as<float>(), *up = results + columns_[p], *lanes = up + columns_[p];
        FfnCounts counts;
        auto product = [&](size_t of, float* out) {
            const LinearPart& its = parts_[of];
            if (in.pays(channels_[of])) {
                kernels.channel_linear[int(its.weight.type)](channels_[of], *in.active, in.inputs, first,
                                                             count, lanes, out);
                counts.left_out += in.left_out(channels_[of], count);
            } else {
                kernels.linear[int(its.weight.type)](its.weight, first, last, in.inputs, 0, 1, out, count,
                                                     worker.kernel_scratch.data());
            }
            add_bias(kernels, its.bias, first, 1, count, out);
        };
        product(p, results);
        if (gated()) product(1, up);
        finish_products(kernels, tail_, step.cut.data(), 1, count, results, up, counts);
        if (residual_) kernels.add(results, residual_->row(0) + first, count, results);
        if (!worker.begin_commit()) return;
        std::copy_n(results, count, plan_.buffer(part.out).row(0) + first);
        counters.add(counts);
        worker.end_commit();
    }

    const Plan& plan_;
    const std::unique_ptr<Op> several_;
    ChannelInput input_;
    const std::vector<LinearPart> parts_;
    const std::vector<ChannelMatrix> channels_;
    const Buffer* residual_;
    const LinearTail tail_;
    std::vector<int64_t> columns_;  // of a chunk of each part
};

}  // namespace

std::unique_ptr<Op> make_channel_linear(const Plan& plan, int x, Norm norm, std::vector<LinearPart> parts,
                                        std::vector<ChannelMatrix> channels, int residual, LinearTail tail,
                                        float cutoff) {
    return std::make_unique<ChannelLinear>(plan, x, std::move(norm), std::move(parts), std::move(channels),
                                           residual, tail, cutoff);
}

}  // namespace hotset
