// Matrix products of one input: an optional norm before, bias, gate or residual after.
#include <algorithm>

#include "../plan.h"

namespace hotset {
namespace {

constexpr int64_t kChunkBytes = 48 * 1024;  // of weights, for one token: about four microseconds
constexpr int kDecodeChunks = 64;           // at most, for large matrices
constexpr int kPrefetchPieces = 64;         // that a waiting thread fetches of a phase to come,
constexpr int64_t kPrefetchBytes = 512;     // each of this size
constexpr int kPrepareTokens = 4;           // per chunk, when inputs are prepared together

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

class Linear : public Op {
  public:
    Linear(const Plan& plan, int x, Norm norm, std::vector<LinearPart> parts, int residual, bool gated,
           Activation activation, float threshold)
        : plan_(plan),
          x_(plan.buffer(x)),
          norm_(std::move(norm)),
          parts_(std::move(parts)),
          residual_(residual < 0 ? nullptr : &plan.buffer(residual)),
          gated_(gated),
          activation_(activation),
          threshold_(threshold) {
        for (const LinearPart& part : parts_) {
            quantized_ |= !is_float(part.weight.type);
            bytes_ += int64_t(part.weight.rows) * int64_t(part.weight.row_bytes);
            if (!gated_ || &part == &parts_[0]) rows_ += part.weight.rows;
        }
    }

    int n_phases(const StepTokens& step) const override { return prepares_together(step) ? 2 : 1; }

    int n_chunks(int phase, const StepTokens& step) const override {
        const int n = step.rows(x_);
        if (n == 0) return 0;
        if (phase == 0 && prepares_together(step)) return std::min(ceil_div(n, kPrepareTokens), kMaxChunks);
        int chunks = 0;
        for (size_t p = 0; p < n_row_parts(); p++) chunks += part_chunks(p, n);
        return chunks;
    }

    void run(int phase, int chunk, const StepTokens& step, Worker& worker) const override {
        if (phase == 0 && prepares_together(step)) return prepare_chunk(chunk, step, worker);
        multiply(chunk, step, worker);
    }

    // The first rows of the chunk's weights, half from the gate and half from up where there are both.
    bool prefetch(int phase, int chunk, int piece, const StepTokens& step) const override {
        if ((phase == 0 && prepares_together(step)) || piece >= kPrefetchPieces) return false;
        const int n = step.rows(x_);
        const ChunkRows range = chunk_rows(chunk, n);
        const LinearPart& part = gated_ && piece % 2 ? parts_[1] : parts_[range.part];
        const uint8_t* at = part.weight.row(range.first) + (gated_ ? piece / 2 : piece) * kPrefetchBytes;
        for (int64_t i = 0; i < kPrefetchBytes; i += 64) prefetch_line(at + i);
        return true;
    }

    Needs needs() const override {
        const int64_t n = plan_.max_tokens();
        int64_t rows = 0;
        for (size_t p = 0; p < n_row_parts(); p++)
            rows = std::max(rows, largest_chunk_rows(parts_[p].weight.rows, part_chunks(p, 2)));
        const size_t many = size_t(n) * size_t(rows) * (gated_ ? 2 : 1);
        int64_t single = 0;
        for (size_t p = 0; p < n_row_parts(); p++)
            single = std::max(single, largest_chunk_rows(parts_[p].weight.rows, part_chunks(p, 1)));
        const int64_t prepared = std::max<int64_t>(kPrepareTokens, ceil_div(n, kMaxChunks) + 1);
        const size_t prepare = InputsMemory::bytes(int(prepared), x_.width) / sizeof(float) + 1;
        return {std::max({many, size_t(single) * 2, prepare}), x_.width,
                InputsMemory::bytes(int(n), x_.width)};
    }

  private:
    bool prepares_together(const StepTokens& step) const {
        return step.rows(x_) > kPrivateInputs && (quantized_ || !norm_.weight.empty());
    }

    // Gate and up are computed together: their rows count once.
    size_t n_row_parts() const { return gated_ ? 1 : parts_.size(); }

    int part_chunks(size_t p, int n) const {
        const int64_t rows = parts_[p].weight.rows;
        if (n > 1) {  // whole panels, but enough chunks for the threads to share
            const int64_t panel = rows >= 8 * kPanelRows * plan_.n_threads() ? kPanelRows : 16;
            return int(std::min<int64_t>(ceil_div(rows, panel), kMaxChunks / int64_t(n_row_parts())));
        }
        const int64_t share = bytes_ * rows / rows_;
        return int(
            std::clamp<int64_t>(share / kChunkBytes, 1, std::min<int64_t>(kDecodeChunks, ceil_div(rows, 4))));
    }

    static int64_t chunk_first_row(int64_t rows, int chunks, int chunk) {
        const int64_t units = ceil_div(rows, 16);  // chunks begin at whole panels
        return chunk == chunks ? rows : units * chunk / chunks * 16;
    }
    struct ChunkRows {
        size_t part;
        int64_t first, last;
    };
    // Chunks are numbered through the parts.
    ChunkRows chunk_rows(int chunk, int n) const {
        size_t p = 0;
        while (chunk >= part_chunks(p, n)) chunk -= part_chunks(p++, n);
        const int64_t rows = parts_[p].weight.rows;
        const int chunks = part_chunks(p, n);
        return {p, chunk_first_row(rows, chunks, chunk), chunk_first_row(rows, chunks, chunk + 1)};
    }
    static int64_t largest_chunk_rows(int64_t rows, int chunks) {
        return int64_t(ceil_div(ceil_div(rows, 16), chunks)) * 16;
    }

    void prepare(const InputsMemory& memory, int at, const float* x) const {
        const int64_t k = x_.width, width = padded(k);
        const Kernels& kernels = plan_.kernels();
        if (!norm_.weight.empty()) {
            norm_.apply(kernels, x, k, memory.x + at * k);
            x = memory.x + at * k;
        }
        if (quantized_)
            kernels.quantize(x, k, memory.q + at * width, memory.scale + at * (width / 32),
                             memory.sum + at * (width / 32), memory.isum + at * (width / 16));
    }

    void prepare_chunk(int chunk, const StepTokens& step, Worker& worker) const {
        const RowRange rows(chunk, n_chunks(0, step), step.rows(x_));
        const int64_t k = x_.width, width = padded(k);
        const InputsMemory own(worker.results.data(), rows.count(), k);
        for (int r = rows.first; r < rows.last; r++) prepare(own, r - rows.first, x_.row(r));
        if (!worker.begin_commit()) return;
        const InputsMemory all(plan_.shared(), plan_.max_tokens(), k);
        const int n = rows.count();
        if (!norm_.weight.empty()) std::copy_n(own.x, n * k, all.x + rows.first * k);
        if (quantized_) {
            std::copy_n(own.q, n * width, all.q + rows.first * width);
            std::copy_n(own.scale, n * width / 32, all.scale + rows.first * (width / 32));
            std::copy_n(own.sum, n * width / 32, all.sum + rows.first * (width / 32));
            std::copy_n(own.isum, n * width / 16, all.isum + rows.first * (width / 16));
        }
        worker.end_commit();
    }

    Inputs inputs(const StepTokens& step, Worker& worker) const {
        const int n = step.rows(x_);
        const bool together = prepares_together(step);
        const InputsMemory memory(together ? plan_.shared() : worker.inputs.data(),
                                  together ? plan_.max_tokens() : kPrivateInputs, x_.width);
        if (!together && n <= kPrivateInputs &&
            (worker.inputs_phase != worker.phase_id() || worker.inputs_slot != worker.slot_index())) {
            for (int r = 0; r < n; r++) prepare(memory, r, x_.row(r));
            worker.inputs_phase = worker.phase_id();
            worker.inputs_slot = worker.slot_index();
        }
        return {n,          x_.width,   norm_.weight.empty() ? x_.row(0) : memory.x, memory.q, memory.scale,
                memory.sum, memory.isum};
    }

    void multiply(int chunk, const StepTokens& step, Worker& worker) const {
        const Kernels& kernels = plan_.kernels();
        const Inputs in = inputs(step, worker);
        const int n = in.n;
        const ChunkRows range = chunk_rows(chunk, n);
        const LinearPart& part = parts_[range.part];
        const int64_t first = range.first, last = range.last, rows = last - first;
        float* results = worker.results.as<float>();
        uint8_t* scratch = worker.kernel_scratch.data();

        auto product = [&](const LinearPart& of, float* out) {
            kernels.linear[int(of.weight.type)](of.weight, first, last, in, 0, n, out, rows, scratch);
            if (!of.bias.empty())
                for (int t = 0; t < n; t++)
                    kernels.add(out + t * rows, of.bias.data() + first, rows, out + t * rows);
        };
        product(part, results);
        if (gated_) {
            float* up = results + n * rows;
            product(parts_[1], up);
            kernels.gated(activation_, threshold_, results, up, n * rows, results);
        }
        if (residual_)
            for (int t = 0; t < n; t++)
                kernels.add(results + t * rows, residual_->row(t) + first, rows, results + t * rows);
        if (!worker.begin_commit()) return;
        const Buffer& out = plan_.buffer(part.out);
        for (int t = 0; t < n; t++) std::copy_n(results + t * rows, rows, out.row(t) + first);
        worker.end_commit();
    }

    const Plan& plan_;
    const Buffer& x_;
    const Norm norm_;
    const std::vector<LinearPart> parts_;
    const Buffer* residual_;
    const bool gated_;
    const Activation activation_;
    const float threshold_;
    bool quantized_ = false;
    int64_t bytes_ = 0;
    int64_t rows_ = 0;
};

}  // namespace

std::unique_ptr<Op> make_linear(const Plan& plan, int x, Norm norm, std::vector<LinearPart> parts,
                                int residual, bool gated, Activation activation, float threshold) {
    return std::make_unique<Linear>(plan, x, std::move(norm), std::move(parts), residual, gated, activation,
                                    threshold);
}

}  // namespace hotset
