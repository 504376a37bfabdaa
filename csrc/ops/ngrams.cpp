// Embeddings of the n-grams that end with a token, looked up by a hash of them, and the gate that such an
// embedding passes. Each is described by the class of its name in model/operations.py.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "../facts.h"
#include "row_op.h"

namespace hotset {
namespace {

constexpr int kMaxNgram = 16, kMaxNgramHeads = 1024;
constexpr int64_t kMaxTokens = (1 << 24) - 1;  // whose numbers plus 1 a float holds

// See operations.NgramEmbed. A state: a number for each of the tokens before, plus 1, the oldest first.
struct NgramFacts {
    int out = -1;
    Matrix weight;
    std::vector<uint64_t> multipliers, sizes, offsets;
    int32_t eos = 0;
    StateSlots states;
};

class NgramEmbed : public Op {
  public:
    NgramEmbed(const Plan& plan, NgramFacts facts)
        : plan_(plan),
          f_(std::move(facts)),
          width_(plan.buffer(f_.out).width),
          n_(int(f_.multipliers.size())),
          n_heads_(int(f_.sizes.size()) / (n_ - 1)) {}

    int n_phases(const StepTokens&) const override { return 1; }
    int n_chunks(int, const StepTokens& step) const override {
        return int(std::min<int64_t>(ceil_div(step.n_tokens, rows_per_chunk()), kMaxChunks));
    }
    void run(int, int chunk, const StepTokens& step, Worker& worker) const override {
        const RowRange rows(chunk, n_chunks(0, step), step.n_tokens);
        float* const results = worker.results.as<float>();
        for (int t = rows.first; t < rows.last; t++) embed(step, t, results + (t - rows.first) * width_);
        if (!worker.begin_commit()) return;
        std::copy_n(results, rows.count() * width_, plan_.buffer(f_.out).row(rows.first));
        for (int t = rows.first; t < rows.last; t++)
            if (step.saves[t] >= 0) save(step, t, f_.states.slot(step.saves[t]));
        worker.end_commit();
    }
    Needs needs() const override {
        const int64_t rows =
            std::max(rows_per_chunk(), int64_t(ceil_div(plan_.max_tokens(), kMaxChunks)) + 1);
        Needs needs;
        needs.result_floats = size_t(rows * width_);
        return needs;
    }

  private:
    static constexpr int64_t kChunkFloats = 16384;

    int64_t rows_per_chunk() const { return std::max<int64_t>(1, kChunkFloats / width_); }

    // The token `back` before token t of the step; -1: there was none.
    int32_t token(const StepTokens& step, int t, int back) const {
        const int sequence = step.sequences[t];
        int in_step = 0;  // tokens of the sequence before it, as far as they count
        while (in_step < back && in_step < t && step.sequences[t - in_step - 1] == sequence) in_step++;
        if (in_step == back) return step.tokens[t - back];
        const int slot = step.states[sequence];
        return slot < 0 ? -1 : int32_t(f_.states.slot(slot)[n_ - 1 - (back - in_step)]) - 1;
    }

    void embed(const StepTokens& step, int t, float* out) const {
        uint64_t mix = uint64_t(step.tokens[t]) * f_.multipliers[0];
        bool cut = false;  // what is further back lies before an eos
        const int64_t dim = f_.weight.cols;
        for (int n = 2; n <= n_; n++) {
            const int32_t before = cut ? -1 : token(step, t, n - 1);
            cut = before < 0 || before == f_.eos;
            mix ^= uint64_t(cut ? f_.eos : before) * f_.multipliers[n - 1];
            for (int i = 0; i < n_heads_; i++, out += dim) {
                const int head = (n - 2) * n_heads_ + i;
                const int64_t row = int64_t(mix % f_.sizes[head] + f_.offsets[head]);
                dequantize_row(f_.weight.type, f_.weight.row(row), dim, out);
            }
        }
    }

    // Within a commit: no thread writes the slot that is read.
    void save(const StepTokens& step, int t, float* state) const {
        for (int i = 0; i < n_ - 1; i++) state[i] = float(token(step, t, n_ - 2 - i) + 1);
    }

    const Plan& plan_;
    const NgramFacts f_;
    const int64_t width_;
    const int n_, n_heads_;
};

// Whole numbers that no double holds, as the bytes of an array.
std::vector<uint64_t> whole_numbers(Facts& facts, const char* name) {
    const std::span<const uint8_t> bytes = facts.bytes(name);
    require(bytes.size() % sizeof(uint64_t) == 0, std::string(name) + " are numbers of 64 bits");
    std::vector<uint64_t> numbers(bytes.size() / sizeof(uint64_t));
    std::memcpy(numbers.data(), bytes.data(), bytes.size());
    return numbers;
}

}  // namespace

static const Registered kNgramEmbed("ngram_embed", [](Facts& facts) -> std::unique_ptr<Op> {
    NgramFacts f;
    f.out = facts.buffer("out");
    facts.of_all_tokens(f.out);
    f.multipliers = whole_numbers(facts, "multipliers");
    f.sizes = whole_numbers(facts, "sizes"), f.offsets = whole_numbers(facts, "offsets");
    const size_t n = f.multipliers.size(), n_heads = f.sizes.size();
    require(n >= 2 && n <= kMaxNgram && n_heads > 0 && n_heads <= kMaxNgramHeads && n_heads % (n - 1) == 0,
            "n-grams of each length have as many heads");
    require(f.offsets.size() == n_heads && facts.width(f.out) % int64_t(n_heads) == 0,
            "heads fill the width");
    f.weight = facts.matrix("weight", -1, facts.width(f.out) / int64_t(n_heads));
    require(!f.weight.places, "rows of n-grams are in memory");
    const uint64_t rows = uint64_t(f.weight.rows);
    for (size_t h = 0; h < n_heads; h++)
        require(f.sizes[h] > 0 && f.sizes[h] <= rows && f.offsets[h] <= rows - f.sizes[h],
                "a head's rows lie in the table");
    f.eos = facts.integer("eos", 0, kMaxTokens - 1);
    int64_t& limit = facts.plan().limits().n_vocab;
    limit = limit ? std::min(limit, kMaxTokens) : kMaxTokens;
    f.states = facts.states("states", int64_t(n) - 1);
    return std::make_unique<NgramEmbed>(facts.plan(), std::move(f));
});

// The gates' products are summed in double, in order: near 0 a root would make much of a rounding.
static const Registered kSimilarityGate("similarity_gate", [](Facts& facts) -> std::unique_ptr<Op> {
    const int x = facts.buffer("x"), a = facts.buffer("a"), b = facts.buffer("b"), out = facts.buffer("out");
    const int n = facts.integer("n_streams", 1, kMaxNgramHeads);
    facts.same_shape(a, b);
    facts.same_shape(a, out);
    facts.same_rows(x, out);
    const int64_t width = facts.width(x);
    require(facts.width(out) == n * width, "streams are as wide as what is gated");
    const Plan& plan = facts.plan();
    const Buffer &in = plan.buffer(x), &left = plan.buffer(a), &right = plan.buffer(b);
    const Kernels& kernels = plan.kernels();
    return make_row_op(plan, out, [=, &in, &left, &right, &kernels](const StepTokens&, int r, float* result) {
        for (int64_t i = 0; i < n; i++) {
            const float *p = left.row(r) + i * width, *q = right.row(r) + i * width;
            double sum = 0.0;
            for (int64_t c = 0; c < width; c++) sum += double(p[c]) * double(q[c]);
            sum /= std::sqrt(double(width));
            const double root = std::sqrt(std::max(std::abs(sum), 1e-6));
            float gate = sum > 0.0 ? float(root) : sum < 0.0 ? -float(root) : 0.0f;
            if (std::isnan(sum)) gate = float(sum);
            kernels.activate(Activation::Sigmoid, 0.0f, &gate, 1, &gate);
            kernels.activate(Activation::Scale, gate, in.row(r), width, result + i * width);
        }
    });
});

}  // namespace hotset
