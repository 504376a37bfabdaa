// Embeddings of n-grams that end at a token, found by their hash, and the gate of such an embedding. Each is
// described by the class of the same name in model/operations.py.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "../facts.h"
#include "row_op.h"
#include "token_states.h"

namespace hotset {
namespace {

constexpr int kMaxNgram = 16, kMaxNgramHeads = 1024;
constexpr int64_t kMaxTokens = (1 << 24) - 1;  // a float holds these ids plus 1 exactly

// See operations.NgramEmbed. A state holds the previous tokens' ids plus 1, oldest first.
struct NgramFacts {
    int out = -1;
    Matrix weight;
    std::vector<uint64_t> multipliers, sizes, offsets;
    int32_t eos = 0;
    StateSlots states;
};

class NgramEmbed : public TokenStates {
  public:
    NgramEmbed(const Plan& plan, NgramFacts facts)
        : TokenStates(plan, facts.out, facts.states),
          f_(std::move(facts)),
          n_(int(f_.multipliers.size())),
          n_heads_(int(f_.sizes.size()) / (n_ - 1)) {}

  private:
    // Return the token `back` tokens before token t; -1 if it does not exist.
    int32_t token(const StepTokens& step, int t, int back) const {
        const int in_step = tokens_in_step(step, t, back);
        if (in_step == back) return step.tokens[t - back];
        const float* const state = before(step, t);
        return state ? int32_t(state[n_ - 1 - (back - in_step)]) - 1 : -1;
    }

    void compute(const StepTokens& step, int t, float* out) const override {
        uint64_t mix = uint64_t(step.tokens[t]) * f_.multipliers[0];
        bool cut = false;  // whether earlier tokens are separated by an eos
        const int64_t dim = f_.weight.cols;
        for (int n = 2; n <= n_; n++) {
            const int32_t earlier = cut ? -1 : token(step, t, n - 1);
            cut = earlier < 0 || earlier == f_.eos;
            mix ^= uint64_t(cut ? f_.eos : earlier) * f_.multipliers[n - 1];
            for (int i = 0; i < n_heads_; i++, out += dim) {
                const int head = (n - 2) * n_heads_ + i;
                const int64_t row = int64_t(mix % f_.sizes[head] + f_.offsets[head]);
                dequantize_row(f_.weight.type, f_.weight.row(row), dim, out);
            }
        }
    }

    void save(const StepTokens& step, int t, float* state) const override {
        for (int i = 0; i < n_ - 1; i++) state[i] = float(token(step, t, n_ - 2 - i) + 1);
    }

    const NgramFacts f_;
    const int n_, n_heads_;
};

// Read integers that a double cannot hold, from the bytes of an array.
std::vector<uint64_t> whole_numbers(Facts& facts, const char* name) {
    const std::span<const uint8_t> bytes = facts.bytes(name);
    require(bytes.size() % sizeof(uint64_t) == 0, std::string(name) + " must be 64-bit integers");
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
            "n-grams of each length need the same number of heads");
    require(f.offsets.size() == n_heads && facts.width(f.out) % int64_t(n_heads) == 0,
            "the width must be a multiple of the heads");
    f.weight = facts.matrix("weight", -1, facts.width(f.out) / int64_t(n_heads));
    require(!f.weight.places, "n-gram embeddings must be in memory");
    const uint64_t rows = uint64_t(f.weight.rows);
    for (size_t h = 0; h < n_heads; h++)
        require(f.sizes[h] > 0 && f.sizes[h] <= rows && f.offsets[h] <= rows - f.sizes[h],
                "a head's rows are outside the table");
    f.eos = facts.integer("eos", 0, kMaxTokens - 1);
    int64_t& limit = facts.plan().limits().n_vocab;
    limit = limit ? std::min(limit, kMaxTokens) : kMaxTokens;
    f.states = facts.states("states", int64_t(n) - 1);
    return std::make_unique<NgramEmbed>(facts.plan(), std::move(f));
});

// The gates' products are summed in double, in order: near 0 the root would magnify rounding errors.
static const Registered kSimilarityGate("similarity_gate", [](Facts& facts) -> std::unique_ptr<Op> {
    const int x = facts.buffer("x"), a = facts.buffer("a"), b = facts.buffer("b"), out = facts.buffer("out");
    const int n = facts.integer("n_streams", 1, kMaxNgramHeads);
    facts.same_shape(a, b);
    facts.same_shape(a, out);
    facts.same_rows(x, out);
    const int64_t width = facts.width(x);
    require(facts.width(out) == n * width, "the output must have n_streams times the width of x");
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
