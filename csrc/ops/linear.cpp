#include <algorithm>

#include "linear.h"
#include "linear_input.h"
#include "linear_tail.h"

namespace hotset {
namespace {

constexpr int64_t kChunkBytes = 48 * 1024;  // of weights, for few tokens: about four microseconds for one
constexpr int kDecodeChunks = 64;           // most chunks of large matrices
constexpr int kPrefetchPieces = 64;         // pieces of a later phase that a waiting thread prefetches
constexpr int64_t kPrefetchBytes = 512;     // bytes of a piece

// Fold the upper half of 2 * n values onto the lower: maxima, and sums.
template <int n>
void fold(float* most, float* none) {
    for (int l = 0; l < n; l++) {
        most[l] = most[l] > most[l + n] ? most[l] : most[l + n];
        none[l] += none[l + n];
    }
}

// Find the maximum of each group of kLogitGroup values; NaN if one is not finite. The loops have no branches
// and known lengths, so that compilers vectorise them.
void largest_of_groups(const float* values, int64_t n, float* largest) {
    constexpr int kHalf = kLogitGroup / 2;
    static_assert(kHalf == 32);
    for (const float* end = values + n; values < end; values += kLogitGroup) {
        float most[kHalf], none[kHalf];  // none: zeros unless a value is not finite
        for (int l = 0; l < kHalf; l++) {
            most[l] = values[l] > values[l + kHalf] ? values[l] : values[l + kHalf];
            none[l] = values[l] * 0.0f + values[l + kHalf] * 0.0f;
        }
        fold<16>(most, none), fold<8>(most, none), fold<4>(most, none), fold<2>(most, none);
        fold<1>(most, none);
        *largest++ = none[0] == 0.0f ? most[0] : none[0];
    }
}

class Linear : public Op {
  public:
    Linear(const Plan& plan, int x, Norm norm, std::vector<LinearPart> parts, int residual, LinearTail tail,
           float threshold)
        : plan_(plan),
          input_(plan, x, std::move(norm), threshold),
          parts_(std::move(parts)),
          residual_(residual < 0 ? nullptr : &plan.buffer(residual)),
          tail_(tail) {
        for (const LinearPart& part : parts_) {
            input_.serves(part.weight);
            bytes_ += int64_t(part.weight.rows) * int64_t(part.weight.row_bytes);
            if (!gated() || &part == &parts_[0]) rows_ += part.weight.rows;
        }
    }

    int n_phases(const StepTokens& step) const override { return input_.prepares_together(step) ? 2 : 1; }

    int n_chunks(int phase, const StepTokens& step) const override {
        const int n = input_.n_tokens(step);
        if (n == 0) return 0;
        if (phase == 0 && input_.prepares_together(step)) return input_.n_prepare_chunks(step);
        int chunks = 0;
        for (size_t p = 0; p < n_row_parts(); p++) chunks += part_chunks(p, n);
        return chunks;
    }

    void run(int phase, int chunk, const StepTokens& step, Worker& worker) const override {
        if (phase == 0 && input_.prepares_together(step)) return input_.prepare_chunk(chunk, step, worker);
        multiply(chunk, step, worker);
    }

    // Prefetch the first rows of the chunk's weights, half each from gate and up if there are both.
    bool prefetch(int phase, int chunk, int piece, const StepTokens& step) const override {
        if ((phase == 0 && input_.prepares_together(step)) || piece >= kPrefetchPieces) return false;
        const ChunkRows range = chunk_rows(chunk, input_.n_tokens(step));
        const LinearPart& part = gated() && piece % 2 ? parts_[1] : parts_[range.part];
        const uint8_t* at = part.weight.row(range.first) + (gated() ? piece / 2 : piece) * kPrefetchBytes;
        for (int64_t i = 0; i < kPrefetchBytes; i += 64) prefetch_line(at + i);
        return true;
    }

    Needs needs() const override {
        Needs needs = input_.needs();
        for (const int n : {1, std::min(plan_.max_tokens(), kFewTokens), plan_.max_tokens()})
            for (size_t p = 0; p < n_row_parts(); p++) {
                const size_t rows =
                    size_t(largest_panel_chunk(parts_[p].weight.rows, part_chunks(p, n), panel(p)));
                needs.result_floats = std::max(needs.result_floats, size_t(n) * rows * (gated() ? 2 : 1) +
                                                                        size_t(n) * rows / kLogitGroup);
            }
        return needs;
    }

  private:
    bool gated() const { return tail_.kind == LinearTail::Gated; }

    // Gate and up are computed together: their rows count once.
    size_t n_row_parts() const { return gated() ? 1 : parts_.size(); }

    // Chunks begin at whole panels of this many rows, or at whole groups.
    int panel(size_t p) const { return parts_[p].largest < 0 ? 16 : kLogitGroup; }

    int part_chunks(size_t p, int n) const {
        const int64_t rows = parts_[p].weight.rows;
        int most = kMaxChunks / int(n_row_parts());
        if (parts_[p].largest >= 0) most = int(std::min<int64_t>(most, rows / kLogitGroup));
        if (n > kFewTokens) return many_token_chunks(rows, plan_.n_threads(), most);
        const int64_t share = (few_chunks() * rows + rows_ / 2) / rows_;
        return int(std::clamp<int64_t>(share, 1, std::min<int64_t>(most, ceil_div(rows, 4))));
    }

    // The chunks of all parts for few tokens. Each thread gets the same number, because all wait for the last
    // one.
    int64_t few_chunks() const {
        const int64_t threads = plan_.n_threads(), chunks = std::max<int64_t>(bytes_ / kChunkBytes, 1);
        const int64_t even = ceil_div(chunks, threads) * threads;
        if (even > 2 * chunks) return chunks;
        return even <= kDecodeChunks || threads > kDecodeChunks ? even : kDecodeChunks / threads * threads;
    }

    struct ChunkRows {
        size_t part;
        int64_t first, last;
    };
    // Chunks are numbered through all parts.
    ChunkRows chunk_rows(int chunk, int n) const {
        size_t p = 0;
        while (chunk >= part_chunks(p, n)) chunk -= part_chunks(p++, n);
        const int64_t rows = parts_[p].weight.rows;
        const int chunks = part_chunks(p, n);
        return {p, panel_chunk(rows, chunks, chunk, panel(p)),
                panel_chunk(rows, chunks, chunk + 1, panel(p))};
    }

    void multiply(int chunk, const StepTokens& step, Worker& worker) const {
        const Kernels& kernels = plan_.kernels();
        const Inputs in = input_.inputs(step, worker);
        const int n = in.n;
        const ChunkRows range = chunk_rows(chunk, n);
        const LinearPart& part = parts_[range.part];
        const int64_t first = range.first, last = range.last, rows = last - first;
        float* results = worker.results.as<float>();
        uint8_t* scratch = worker.kernel_scratch.data();

        auto product = [&](const LinearPart& of, float* out) {
            kernels.linear[int(of.weight.type)](of.weight, first, last, in, 0, n, out, rows, scratch);
            add_bias(kernels, of.bias, first, n, rows, out);
        };
        float* up = results + n * rows;
        FfnCounts counts;
        product(part, results);
        if (gated()) product(parts_[1], up);
        finish_products(kernels, tail_, step.thresholded.data(), n, rows, results, up, counts);
        if (residual_)
            for (int t = 0; t < n; t++)
                kernels.add(results + t * rows, residual_->row(t) + first, rows, results + t * rows);
        float* largest = up;  // gated products have no maxima
        if (part.largest >= 0) largest_of_groups(results, n * rows, largest);
        if (!worker.begin_commit()) return;
        const Buffer& out = plan_.buffer(part.out);
        for (int t = 0; t < n; t++) std::copy_n(results + t * rows, rows, out.row(t) + first);
        if (part.largest >= 0)
            for (int t = 0; t < n; t++)
                std::copy_n(largest + t * (rows / kLogitGroup), rows / kLogitGroup,
                            plan_.buffer(part.largest).row(t) + first / kLogitGroup);
        if (tail_.has_thresholds()) counted->add(counts, worker.index());
        worker.end_commit();
    }

    const Plan& plan_;
    LinearInput input_;
    const std::vector<LinearPart> parts_;
    const Buffer* residual_;
    const LinearTail tail_;
    int64_t bytes_ = 0;
    int64_t rows_ = 0;
};

}  // namespace

std::unique_ptr<Op> make_linear(const Plan& plan, int x, Norm norm, std::vector<LinearPart> parts,
                                int residual, LinearTail tail, float threshold) {
    return std::make_unique<Linear>(plan, x, std::move(norm), std::move(parts), residual, tail, threshold);
}

LinearPart linear_part(Facts& facts, int x, int out) {
    facts.same_rows(x, out);
    return {facts.matrix("weight", facts.width(out), facts.width(x)),
            facts.floats_or_none("bias", facts.width(out)), out};
}

ChannelMatrix channels_of(Facts& facts, const Matrix& by_row) {
    if (!facts.has("channels")) return {};
    const std::unique_ptr<Facts> of = facts.record("channels");
    return channels_of(*of, by_row, of->bytes("data"));
}

ChannelMatrix channels_of(Facts& of, const Matrix& by_row, std::span<const uint8_t> data) {
    require(of.plan().kernels().channel_linear[int(by_row.type)],
            std::string(type_facts(by_row.type).name) + " has no input-major layout");
    ChannelMatrix made;
    made.type = by_row.type, made.data = data.data(), made.rows = by_row.cols;
    made.cols = of.integer("cols"), made.tile = of.integer("tile"), made.first_col = of.integer("first");
    made.below = of.real("below");
    require(made.cols > 0 && made.cols % 32 == 0 && made.first_col >= 0 && made.first_col % 32 == 0 &&
                by_row.rows % 32 == 0 && made.first_col + by_row.rows <= made.cols && made.tile > 0 &&
                made.tile % 32 == 0,
            "outputs of an input-major matrix must be whole groups of 32");
    require(by_row.cols % 32 == 0 &&
                data.size() == size_t(channel_format(by_row.type).output_bytes(by_row.cols) * made.cols),
            "the size of the input-major copy does not match its matrix");
    return made;
}

// Products of one input. parts: records {weight, bias, out, channels}. norm: applied to the input first.
// input_threshold: for thresholded tokens, smaller inputs become zero after the norm. activation: of the only
// part or, if gated, of the first, which is multiplied by the second. gate_threshold, value_threshold: for
// the activation and the result. residual: added to the only result. largest: buffer for LinearPart::largest.
static const Registered kLinear("linear", [](Facts& facts) -> std::unique_ptr<Op> {
    Plan& plan = facts.plan();
    const int x = facts.buffer("x");
    std::vector<LinearPart> parts;
    std::vector<ChannelMatrix> channels;
    for (const std::unique_ptr<Facts>& part : facts.records("parts")) {
        parts.push_back(linear_part(*part, x, part->buffer("out")));
        require(!parts.back().weight.places, "a product of all rows needs them in order");
        channels.push_back(channels_of(*part, parts.back().weight));
    }
    if (std::ranges::none_of(channels, [](const ChannelMatrix& one) { return one.data; })) channels.clear();
    const bool gated = facts.flag("gated", false), activated = facts.has("activation");
    require(!parts.empty() && parts.size() <= kMaxChunks && (!gated || (parts.size() == 2 && activated)) &&
                (gated || !activated || parts.size() == 1),
            "the number of parts does not fit the activation");
    require(!gated || parts[0].weight.rows == parts[1].weight.rows, "gate and up must have the same rows");
    LinearTail tail;
    if (activated)
        tail = {gated ? LinearTail::Gated : LinearTail::Activated, facts.activation("activation"),
                facts.real("activation_threshold", 0.0f), facts.real("gate_threshold", 0.0f),
                facts.real("value_threshold", 0.0f)};
    const int residual = facts.residual(x, parts[0].out);
    require(residual < 0 || parts.size() == 1, "a residual needs exactly one part");
    if (facts.has("largest")) {
        const int largest = facts.buffer("largest");
        facts.same_rows(parts[0].out, largest);
        require(parts.size() == 1 && channels.empty() &&
                    facts.width(largest) * kLogitGroup == facts.width(parts[0].out),
                "maxima of groups need exactly one part without an input-major copy");
        parts[0].largest = largest;
    }
    Norm norm = facts.norm("norm", facts.width(x));
    const float threshold = facts.real("input_threshold", 0.0f);
    return channels.empty()
               ? make_linear(plan, x, std::move(norm), std::move(parts), residual, tail, threshold)
               : make_channel_linear(plan, x, std::move(norm), std::move(parts), std::move(channels),
                                     residual, tail, threshold);
});

}  // namespace hotset
