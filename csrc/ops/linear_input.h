// What matrix products read: the rows of a buffer, normalised and quantised where that is asked for.
//
// Up to kPrivateInputs tokens every worker prepares them for itself, which is cheaper than a phase to share
// them. More tokens: a phase of their own, after which they lie in the plan's shared memory.
#pragma once

#include <algorithm>

#include "../plan.h"

namespace hotset {

constexpr int kPrepareTokens = 4;  // per chunk, when inputs are prepared together

// Activations of up to n tokens of width k, quantised, in one block of memory.
struct InputsMemory {
    float* x;
    int8_t* q;
    float* scale;
    float* sum;
    int32_t* isum;

    InputsMemory(uint8_t* memory, int n, int64_t k) {
        const int64_t width = padded(k);
        x = reinterpret_cast<float*>(memory);
        scale = x + n * width;
        sum = scale + n * width / 32;
        isum = reinterpret_cast<int32_t*>(sum + n * width / 32);
        q = reinterpret_cast<int8_t*>(isum + n * width / 16);
    }
    static size_t bytes(int n, int64_t k) {
        return size_t(n) * padded(k) * 6;
    }  // 4 + 1/8 + 1/8 + 1/4 + 1, rounded up
};

class LinearInput {
  public:
    // cutoff: below which values are zero, behind the norm, of tokens that are cut.
    LinearInput(const Plan& plan, int x, Norm norm, float cutoff = 0.0f)
        : plan_(plan), x_(plan.buffer(x)), norm_(std::move(norm)), cutoff_(cutoff) {}

    // Every matrix that will be multiplied: what is prepared depends on their types.
    void serves(const Matrix& weight) { quantized_ |= !is_float(weight.type); }

    int64_t width() const { return x_.width; }
    int n_tokens(const StepTokens& step) const { return step.rows(x_); }

    // Whether a phase (of n_prepare_chunks chunks) must run before `inputs`.
    bool prepares_together(const StepTokens& step) const {
        return n_tokens(step) > kPrivateInputs && (quantized_ || changes());
    }
    int n_prepare_chunks(const StepTokens& step) const {
        return std::min(ceil_div(n_tokens(step), kPrepareTokens), kMaxChunks);
    }
    void prepare_chunk(int chunk, const StepTokens& step, Worker& worker) const {
        const RowRange rows(chunk, n_prepare_chunks(step), n_tokens(step));
        const int64_t k = x_.width, width = padded(k);
        const InputsMemory own(worker.results.data(), rows.count(), k);
        for (int r = rows.first; r < rows.last; r++) prepare(own, r - rows.first, x_.row(r), step.cut[r]);
        if (!worker.begin_commit()) return;
        const InputsMemory all(plan_.shared(), plan_.max_tokens(), k);
        const int n = rows.count();
        if (changes()) std::copy_n(own.x, n * k, all.x + rows.first * k);
        if (quantized_) {
            std::copy_n(own.q, n * width, all.q + rows.first * width);
            std::copy_n(own.scale, n * width / 32, all.scale + rows.first * (width / 32));
            std::copy_n(own.sum, n * width / 32, all.sum + rows.first * (width / 32));
            std::copy_n(own.isum, n * width / 16, all.isum + rows.first * (width / 16));
        }
        worker.end_commit();
    }

    Inputs inputs(const StepTokens& step, Worker& worker) const {
        return inputs(step, worker, [](const Inputs&) {});
    }
    // prepared: called with the inputs when this worker has just prepared them for itself.
    template <class F>
    Inputs inputs(const StepTokens& step, Worker& worker, F prepared) const {
        const int n = n_tokens(step);
        const bool together = prepares_together(step);
        const InputsMemory memory(together ? plan_.shared() : worker.inputs.data(),
                                  together ? plan_.max_tokens() : kPrivateInputs, x_.width);
        const Inputs in = {n,           x_.width,     changes() ? memory.x : x_.row(0),
                           memory.q,    memory.scale, memory.sum,
                           memory.isum, plan_.ahead()};
        if (!together && n <= kPrivateInputs && worker.enter_inputs()) {
            for (int r = 0; r < n; r++) prepare(memory, r, x_.row(r), step.cut[r]);
            prepared(in);
        }
        return in;
    }

    Needs needs() const {
        const int n = plan_.max_tokens();
        const int64_t prepared = std::max<int64_t>(kPrepareTokens, ceil_div(n, kMaxChunks) + 1);
        return {InputsMemory::bytes(int(prepared), x_.width) / sizeof(float) + 1, x_.width,
                InputsMemory::bytes(n, x_.width)};
    }

  protected:
    const Plan& plan_;

  private:
    // Whether products read other values than those of the buffer.
    bool changes() const { return !norm_.weight.empty() || cutoff_ != 0.0f; }

    void prepare(const InputsMemory& memory, int at, const float* x, bool cut) const {
        const int64_t k = x_.width, width = padded(k);
        const Kernels& kernels = plan_.kernels();
        if (!norm_.weight.empty()) {
            norm_.apply(kernels, x, k, memory.x + at * k);
            x = memory.x + at * k;
        }
        if (cutoff_ != 0.0f) {
            cut_small(cut ? cutoff_ : 0.0f, x, k, memory.x + at * k);
            x = memory.x + at * k;
        }
        if (quantized_)
            kernels.quantize(x, k, memory.q + at * width, memory.scale + at * (width / 32),
                             memory.sum + at * (width / 32), memory.isum + at * (width / 16));
    }

    const Buffer& x_;
    const Norm norm_;
    const float cutoff_;
    bool quantized_ = false;
};

// Adds a part of a bias to each of n rows of `rows` results.
inline void add_bias(const Kernels& kernels, const std::vector<float>& bias, int64_t first, int n,
                     int64_t rows, float* results) {
    if (bias.empty()) return;
    for (int t = 0; t < n; t++)
        kernels.add(results + t * rows, bias.data() + first, rows, results + t * rows);
}

// The first row of a chunk of `chunks`, where chunks begin at whole panels of so many rows.
inline int64_t panel_chunk(int64_t rows, int chunks, int chunk, int panel = 16) {
    return chunk == chunks ? rows : int64_t(ceil_div(rows, panel)) * chunk / chunks * panel;
}
// The most rows that such a chunk has.
inline int64_t largest_panel_chunk(int64_t rows, int chunks, int panel = 16) {
    return int64_t(ceil_div(ceil_div(rows, panel), chunks)) * panel;
}
// Chunks of a matrix for several tokens: whole panels, but enough for the threads to share.
inline int many_token_chunks(int64_t rows, int n_threads, int most = kMaxChunks) {
    const int64_t panel = rows >= 8 * kPanelRows * n_threads ? kPanelRows : 16;
    return int(std::min<int64_t>(ceil_div(rows, panel), most));
}

}  // namespace hotset
