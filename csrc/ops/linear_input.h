// The inputs of matrix products: rows of a buffer, normalised and quantised if needed.
//
// With up to kPrivateInputs tokens, every worker prepares them itself, which is cheaper than a phase to share
// them. More tokens are prepared in a phase of their own and stored in the plan's shared memory.
#pragma once

#include <algorithm>

#include "../plan.h"

namespace hotset {

constexpr int kPrepareTokens = 4;  // per chunk, when inputs are prepared together

// Which inputs the products read: `floats` for float matrices.
struct InputKinds {
    bool floats = false, quantized = false;
    void serves(const Matrix& weight) { (is_float(weight.type) ? floats : quantized) = true; }
};

// The inputs of up to n rows of width k in one block of memory, only the needed kinds.
class InputsMemory {
  public:
    InputsMemory(uint8_t* memory, int64_t n, int64_t k, InputKinds kinds)
        : k_(k), width_(padded(k)), kinds_(kinds) {
        x_ = reinterpret_cast<float*>(memory);
        first_.scale = x_ + (kinds.floats ? n * width_ : 0);
        first_.sum = first_.scale + n * width_ / 32;
        first_.isum = reinterpret_cast<int32_t*>(first_.sum + n * width_ / 32);
        first_.isum8 = first_.isum + n * width_ / 16;
        first_.q = reinterpret_cast<int8_t*>(first_.isum8 + n * width_ / 32);
    }
    static size_t bytes(int64_t n, int64_t k, bool floats = true) {
        return size_t(n) * padded(k) * (floats ? 6 : 2);  // 1 + 5/8, plus 4 for floats, rounded up
    }

    float* x(int64_t row) const { return x_ + row * k_; }
    // Set row `at` to x. Its floats may already be in place.
    void set(const Kernels& kernels, int64_t at, const float* x) const {
        if (kinds_.floats && x != this->x(at)) std::copy_n(x, k_, this->x(at));
        if (kinds_.quantized) kernels.quantize(x, k_, row(at));
    }
    // Copy row `from` of other inputs to row `at`.
    void copy(int64_t at, const Inputs& in, int64_t from) const {
        if (kinds_.floats) std::copy_n(in.x + from * k_, k_, x(at));
        if (!kinds_.quantized) return;
        const QuantizedRow out = row(at);
        std::copy_n(in.q + from * width_, width_, out.q);
        std::copy_n(in.scale + from * (width_ / 32), width_ / 32, out.scale);
        std::copy_n(in.sum + from * (width_ / 32), width_ / 32, out.sum);
        std::copy_n(in.isum + from * (width_ / 16), width_ / 16, out.isum);
        std::copy_n(in.isum8 + from * (width_ / 32), width_ / 32, out.isum8);
    }
    // x: the floats, if they are stored elsewhere.
    Inputs inputs(int n, const float* x = nullptr) const {
        return {n, k_, x ? x : x_, first_.q, first_.scale, first_.sum, first_.isum, first_.isum8};
    }

  private:
    QuantizedRow row(int64_t at) const {
        return {first_.q + at * width_, first_.scale + at * (width_ / 32), first_.sum + at * (width_ / 32),
                first_.isum + at * (width_ / 16), first_.isum8 + at * (width_ / 32)};
    }

    int64_t k_, width_;
    InputKinds kinds_;
    float* x_;
    QuantizedRow first_;
};

// Return the inputs of one token.
inline Inputs token_of(const Inputs& in, int64_t t) {
    const int64_t width = padded(in.k), blocks = width / 32;
    return {1,
            in.k,
            in.x + t * in.k,
            in.q + t * width,
            in.scale + t * blocks,
            in.sum + t * blocks,
            in.isum + t * 2 * blocks,
            in.isum8 + t * blocks};
}

class LinearInput {
  public:
    // threshold: for thresholded tokens, smaller values become zero after the norm.
    LinearInput(const Plan& plan, int x, Norm norm, float threshold = 0.0f)
        : plan_(plan), x_(plan.buffer(x)), norm_(std::move(norm)), threshold_(threshold) {}

    // Call for every matrix that will be multiplied: the prepared kinds depend on their types.
    void serves(const Matrix& weight) { kinds_.serves(weight); }

    InputKinds kinds() const { return kinds_; }
    int64_t width() const { return x_.width; }
    int n_tokens(const StepTokens& step) const { return step.rows(x_); }

    // Whether a phase of n_prepare_chunks chunks must run before `inputs`.
    bool prepares_together(const StepTokens& step) const {
        return n_tokens(step) > kPrivateInputs && (kinds_.quantized || changes());
    }
    int n_prepare_chunks(const StepTokens& step) const {
        return std::min(ceil_div(n_tokens(step), kPrepareTokens), kMaxChunks);
    }
    void prepare_chunk(int chunk, const StepTokens& step, Worker& worker) const {
        const RowRange rows(chunk, n_prepare_chunks(step), n_tokens(step));
        const InputsMemory own(worker.results.data(), rows.count(), x_.width, kept());
        for (int r = rows.first; r < rows.last; r++)
            prepare(own, r - rows.first, x_.row(r), step.thresholded[r]);
        if (!worker.begin_commit()) return;
        const InputsMemory all(plan_.shared(), plan_.max_tokens(), x_.width, kept());
        const Inputs prepared = own.inputs(rows.count(), 0);
        uint8_t* const tiles = this->tiles(step);
        for (int r = rows.first; r < rows.last; r++) {
            all.copy(r, prepared, r - rows.first);
            if (tiles) plan_.kernels().pack_token(prepared, r - rows.first, r, tiles);
        }
        worker.end_commit();
    }

    Inputs inputs(const StepTokens& step, Worker& worker) const {
        return inputs(step, worker, [](const Inputs&) {});
    }
    // prepared: called with the inputs if this worker has just prepared them.
    template <class F>
    Inputs inputs(const StepTokens& step, Worker& worker, F prepared) const {
        const int n = n_tokens(step);
        const bool together = prepares_together(step);
        const InputsMemory memory(together ? plan_.shared() : worker.inputs.data(),
                                  together ? plan_.max_tokens() : kPrivateInputs, x_.width, kept());
        Inputs in = memory.inputs(n, changes() ? nullptr : x_.row(0));
        in.tiles = tiles(step);
        if (!together && n <= kPrivateInputs && worker.enter_inputs()) {
            for (int r = 0; r < n; r++) prepare(memory, r, x_.row(r), step.thresholded[r]);
            prepared(in);
        }
        return in;
    }

    Needs needs() const {
        const int n = plan_.max_tokens();
        const int64_t prepared = std::max<int64_t>(kPrepareTokens, ceil_div(n, kMaxChunks) + 1);
        return {InputsMemory::bytes(int(prepared), x_.width) / sizeof(float) + 1, x_.width,
                tiles_at() + (plan_.kernels().pack_token ? tiles_bytes(n, x_.width) : 0)};
    }

  protected:
    const Plan& plan_;

  private:
    // Whether products read other values than the buffer's.
    bool changes() const { return !norm_.weight.empty() || threshold_ != 0.0f; }

    // Offset of the tokens packed for many-token kernels, after the shared inputs.
    size_t tiles_at() const { return (InputsMemory::bytes(plan_.max_tokens(), x_.width) + 63) / 64 * 64; }
    uint8_t* tiles(const StepTokens& step) const {
        const bool packs = plan_.kernels().pack_token && kinds_.quantized && n_tokens(step) > kFewTokens;
        return packs ? plan_.shared() + tiles_at() : nullptr;
    }

    // The stored kinds: floats only if they differ from the buffer's.
    InputKinds kept() const { return {changes(), kinds_.quantized}; }

    void prepare(const InputsMemory& memory, int at, const float* x, bool thresholded) const {
        const int64_t k = x_.width;
        const Kernels& kernels = plan_.kernels();
        if (!norm_.weight.empty()) {
            norm_.apply(kernels, x, k, memory.x(at));
            x = memory.x(at);
        }
        if (threshold_ != 0.0f) {
            zero_small(thresholded ? threshold_ : 0.0f, x, k, memory.x(at));
            x = memory.x(at);
        }
        memory.set(kernels, at, x);
    }

    const Buffer& x_;
    const Norm norm_;
    const float threshold_;
    InputKinds kinds_;
};

// Add a part of a bias to each of n rows of `rows` results.
inline void add_bias(const Kernels& kernels, const std::vector<float>& bias, int64_t first, int n,
                     int64_t rows, float* results) {
    if (bias.empty()) return;
    for (int t = 0; t < n; t++)
        kernels.add(results + t * rows, bias.data() + first, rows, results + t * rows);
}

// Return the first row of a chunk out of `chunks`. Chunks begin at whole panels of `panel` rows.
inline int64_t panel_chunk(int64_t rows, int chunks, int chunk, int panel = 16) {
    return chunk == chunks ? rows : int64_t(ceil_div(rows, panel)) * chunk / chunks * panel;
}
// Return the most rows of such a chunk.
inline int64_t largest_panel_chunk(int64_t rows, int chunks, int panel = 16) {
    return int64_t(ceil_div(ceil_div(rows, panel), chunks)) * panel;
}
// Return the number of chunks of a matrix for several tokens: whole panels, but enough for all threads.
inline int many_token_chunks(int64_t rows, int n_threads, int most = kMaxChunks) {
    const int64_t panel = rows >= 8 * kPanelRows * n_threads ? kPanelRows : 16;
    return int(std::min<int64_t>(ceil_div(rows, panel), most));
}

}  // namespace hotset
