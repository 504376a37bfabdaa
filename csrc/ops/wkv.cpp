// RWKV's linear attention: each head has a state matrix, which each token decays row by row, adds to and
// reads (operations.Wkv).
#include "../facts.h"
#include "head_states.h"
#include "row_op.h"

namespace hotset {
namespace {

// See operations.Wkv. r, w, k, a, b: [n_head][dim_k]. v: [n_head][dim_v]. a and b may be missing (< 0). A
// state is [n_head][dim_k][dim_v].
struct WkvFacts {
    int r = -1, w = -1, k = -1, v = -1, a = -1, b = -1, out = -1;
    int n_head = 0, dim_k = 0, dim_v = 0;
    StateSlots states;
};

class Wkv : public HeadStates {
  public:
    Wkv(const Plan& plan, const WkvFacts& facts)
        : HeadStates(plan, {facts.out, facts.n_head, facts.dim_k, facts.dim_v, 0, facts.states}), f_(facts) {}

  private:
    void advance(const StepTokens&, int t, int head, float* state, float*, float* out) const override {
        auto of = [&](int buffer, int dim) {
            return buffer < 0 ? nullptr : plan_.buffer(buffer).row(t) + int64_t(head) * dim;
        };
        plan_.kernels().wkv(f_.dim_k, f_.dim_v, of(f_.r, f_.dim_k), of(f_.w, f_.dim_k), of(f_.k, f_.dim_k),
                            of(f_.v, f_.dim_v), of(f_.a, f_.dim_k), of(f_.b, f_.dim_k), state, out);
    }

    const WkvFacts f_;
};

}  // namespace

static const Registered kWkv("wkv", [](Facts& facts) -> std::unique_ptr<Op> {
    WkvFacts f;
    f.r = facts.buffer("r"), f.w = facts.buffer("w"), f.k = facts.buffer("k"), f.v = facts.buffer("v");
    f.a = facts.buffer_or_none("a"), f.b = facts.buffer_or_none("b"), f.out = facts.buffer("out");
    require((f.a < 0) == (f.b < 0), "a correction needs both a and b");
    f.n_head = facts.integer("n_head", 1, kMaxStateHeads);
    const int64_t keys = facts.width(f.k), values = facts.width(f.v);
    for (int id : {f.r, f.w, f.k, f.v, f.a, f.b, f.out}) {
        if (id < 0) continue;
        facts.of_all_tokens(id);
        require(facts.width(id) == (id == f.v || id == f.out ? values : keys), "the widths do not match");
    }
    for (int id : {f.r, f.w, f.k, f.v, f.a, f.b})
        require(id != f.out, "an operation with a state cannot write its input");
    require(keys % f.n_head == 0 && values % f.n_head == 0 && keys <= int64_t(f.n_head) * kMaxHeadDim &&
                values <= int64_t(f.n_head) * kMaxHeadDim,
            "the widths must be multiples of the heads");
    f.dim_k = int(keys / f.n_head), f.dim_v = int(values / f.n_head);
    f.states = facts.states("states", values * f.dim_k);
    return std::make_unique<Wkv>(facts.plan(), f);
});

// See operations.HeadDot.
static const Registered kHeadDot("head_dot", [](Facts& facts) -> std::unique_ptr<Op> {
    const int x = facts.buffer("x"), a = facts.buffer("a"), b = facts.buffer("b"), out = facts.buffer("out");
    facts.same_shape(x, out);
    facts.same_shape(a, b);
    facts.same_rows(a, out);
    const int n_head = facts.integer("n_head", 1, INT32_MAX);
    require(facts.width(x) % n_head == 0 && facts.width(a) % n_head == 0, "heads must fill the widths");
    const int64_t dim = facts.width(a) / n_head, dim_x = facts.width(x) / n_head;
    std::vector<float> weight = facts.floats("weight", facts.width(a));
    const Buffer &in = facts.plan().buffer(x), &left = facts.plan().buffer(a),
                 &right = facts.plan().buffer(b);
    auto dots = [=, weight = std::move(weight), &in, &left, &right](const StepTokens&, int r, float* result) {
        for (int h = 0; h < n_head; h++) {
            const float *p = left.row(r) + h * dim, *q = right.row(r) + h * dim, *w = weight.data() + h * dim;
            float sum = 0.0f;
            for (int64_t i = 0; i < dim; i++) sum += p[i] * q[i] * w[i];
            for (int64_t i = 0; i < dim_x; i++) result[h * dim_x + i] = sum * in.row(r)[h * dim_x + i];
        }
    };
    return make_row_op(facts.plan(), out, std::move(dots));
});

}  // namespace hotset
