// Chooses each token's experts, with the highest router scores (the first among equals), and weights.
#include <algorithm>
#include <cmath>
#include <string_view>

#include "../facts.h"
#include "row_op.h"

namespace hotset {
namespace {

// See operations.Route (model/operations.py). out: [n_used] ids, [n_used] weights.
struct RouteFacts {
    enum Scoring { Softmax = 1, Sigmoid = 2, SoftmaxChosen = 3, SqrtSoftplus = 4 };
    int n_used = 1;
    Scoring scoring = Softmax;
    std::vector<float> bias, scales;  // empty: none
    bool normalised = false;
    float scale = 1.0f;
    int n_groups = 1, n_groups_used = 1, group_best = 2;
    std::vector<float> table;  // [n_vocab][n_used], empty: none
};

constexpr std::pair<std::string_view, RouteFacts::Scoring> kScorings[] = {
    {"softmax", RouteFacts::Softmax},
    {"sigmoid", RouteFacts::Sigmoid},
    {"softmax_chosen", RouteFacts::SoftmaxChosen},
    {"sqrt_softplus", RouteFacts::SqrtSoftplus}};

// Whether a comes before b: higher scores first, equal ones by index, NaN last.
bool comes_before(const float* x, int a, int b) {
    const bool number_a = x[a] == x[a], number_b = x[b] == x[b];
    if (!number_a || !number_b) return number_a != number_b ? number_a : a < b;
    return x[a] != x[b] ? x[a] > x[b] : a < b;
}

// Find the n best of `count` numbers, in order, in one pass.
void best_of(const float* x, int count, int n, int32_t* out) {
    int found = 0;
    for (int i = 0; i < count; i++) {
        int at = found;
        while (at > 0 && comes_before(x, i, out[at - 1])) at--;
        if (at == n) continue;
        for (int j = std::min(found, n - 1); j > at; j--) out[j] = out[j - 1];
        out[at] = i;
        found = std::min(found + 1, n);
    }
}

class Router {
  public:
    Router(const Kernels& kernels, RouteFacts facts, int n_expert)
        : kernels_(kernels), f_(std::move(facts)), n_(n_expert) {}

    // token: its id, if there is a table.
    void operator()(const float* x, int token, float* out) const {
        float p[kMaxExperts], wanted[kMaxExperts];
        int32_t ids[kMaxExperts];
        if (f_.scoring == RouteFacts::Softmax)
            kernels_.softmax(x, n_, p);
        else if (f_.scoring == RouteFacts::Sigmoid)
            kernels_.activate(Activation::Sigmoid, 0.0f, x, n_, p);
        else if (f_.scoring == RouteFacts::SqrtSoftplus)
            kernels_.activate(Activation::Softplus, 0.0f, x, n_, p);
        else
            std::copy_n(x, n_, p);
        if (f_.scoring == RouteFacts::SqrtSoftplus)
            for (int i = 0; i < n_; i++) p[i] = std::sqrt(p[i]);
        if (f_.bias.empty() && f_.n_groups == 1)
            std::copy_n(x, n_, wanted);
        else if (f_.bias.empty())
            std::copy_n(p, n_, wanted);
        else
            kernels_.add(p, f_.bias.data(), n_, wanted);
        if (f_.n_groups > 1) leave_groups_out(wanted);
        if (f_.table.empty())
            best_of(wanted, n_, f_.n_used, ids);
        else
            for (int j = 0; j < f_.n_used; j++) ids[j] = int32_t(f_.table[int64_t(token) * f_.n_used + j]);

        float* weights = out + f_.n_used;
        for (int j = 0; j < f_.n_used; j++) {
            out[j] = float(ids[j]);
            weights[j] = p[ids[j]];
        }
        if (f_.scoring == RouteFacts::SoftmaxChosen) kernels_.softmax(weights, f_.n_used, weights);
        float sum = 1.0f;
        if (f_.normalised) {
            sum = 0.0f;
            for (int j = 0; j < f_.n_used; j++) sum += weights[j];
            sum = std::max(sum, 0x1p-14f);
        }
        const bool numbers = std::all_of(x, x + n_, [](float v) { return v == v; });
        for (int j = 0; j < f_.n_used; j++) weights[j] = numbers ? weights[j] / sum * f_.scale : NAN;
        if (!f_.scales.empty())
            for (int j = 0; j < f_.n_used; j++) weights[j] *= f_.scales[ids[j]];
    }

  private:
    // Exclude experts outside the best groups, whose score is the sum of group_best experts.
    void leave_groups_out(float* wanted) const {
        const int size = n_ / f_.n_groups;
        float best[kMaxExperts];
        int32_t kept[kMaxExperts];
        for (int g = 0; g < f_.n_groups; g++) {
            int32_t counted[2] = {};
            const float* of_group = wanted + g * size;
            const int n_best = std::min(size, f_.group_best);
            best_of(of_group, size, n_best, counted);
            best[g] = of_group[counted[0]] + (n_best > 1 ? of_group[counted[1]] : 0.0f);
            for (int i = 0; i < size; i++)
                if (of_group[i] != of_group[i]) best[g] = NAN;
        }
        best_of(best, f_.n_groups, f_.n_groups_used, kept);
        for (int g = 0; g < f_.n_groups; g++)
            if (std::find(kept, kept + f_.n_groups_used, g) == kept + f_.n_groups_used)
                std::fill_n(wanted + g * size, size, -INFINITY);
    }

    const Kernels& kernels_;
    const RouteFacts f_;
    const int n_;
};

}  // namespace

// See operations.Route (model/operations.py).
static const Registered kRoute("route", [](Facts& facts) -> std::unique_ptr<Op> {
    const int x = facts.buffer("x"), out = facts.buffer("out");
    facts.same_rows(x, out);
    const int64_t n = facts.width(x);
    require(n <= kMaxExperts, "a route can have at most " + std::to_string(kMaxExperts) + " experts");
    RouteFacts f;
    f.n_used = facts.integer("n_used", 1, n);
    require(facts.width(out) == 2 * f.n_used, "a route must have ids and weights of n_used experts");
    const std::string scoring = facts.text("scoring");
    const auto known = std::ranges::find(kScorings, scoring, [](const auto& one) { return one.first; });
    require(known != std::end(kScorings), "there is no scoring " + scoring);
    f.scoring = known->second;
    f.bias = facts.floats_or_none("bias", n);
    f.scales = facts.floats_or_none("scales", n);
    f.normalised = facts.flag("normalised");
    f.scale = facts.real("scale");
    f.n_groups = facts.integer("n_groups", 1, n);
    f.n_groups_used = facts.integer("n_groups_used", 1, f.n_groups);
    f.group_best = facts.integer("group_best", 1, 2);
    require(n % f.n_groups == 0 && n / f.n_groups * f.n_groups_used >= f.n_used,
            "groups of experts must have equal sizes and hold n_used experts");
    if (facts.has("table")) {
        facts.of_all_tokens(out);
        f.table = facts.floats("table");
        Plan::Limits& limits = facts.plan().limits();
        const int64_t n_vocab = int64_t(f.table.size()) / f.n_used;
        require(n_vocab > 0 && int64_t(f.table.size()) == n_vocab * f.n_used, "each token needs its experts");
        require(std::ranges::all_of(f.table, [&](float id) { return id >= 0.0f && id < float(n); }),
                "a table names an expert that does not exist");
        limits.n_vocab = limits.n_vocab ? std::min(limits.n_vocab, n_vocab) : n_vocab;
    }
    const bool has_table = !f.table.empty();
    const Buffer& in = facts.plan().buffer(x);
    return make_row_op(facts.plan(), out,
                       [&in, has_table, router = Router(facts.plan().kernels(), std::move(f), int(in.width))](
                           const StepTokens& step, int r, float* result) {
                           router(in.row(r), has_table ? step.tokens[r] : 0, result);
                       });
});

}  // namespace hotset
