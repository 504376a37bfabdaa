// Operations that mix tokens, and those on heads before them.
#include "bindings/plan_builder.h"

namespace hotset::bindings {

void PlanBuilder::rotate(int x, int out, int n_head, int head_dim, int rope, int first) {
    require(width(x) == int64_t(n_head) * head_dim && width(out) == width(x), "heads fill the width");
    require(rope >= 0 && rope < plan_->n_ropes() && first >= 0 && first <= head_dim &&
                plan_->rope(rope).n_rot <= head_dim - first,
            "a rope fits its head");
    same_rows(x, out);
    plan_->add_rotate(x, out, n_head, head_dim, rope, first);
}

void PlanBuilder::heads(int x, int shared, int n_head, int first, int out) {
    require(n_head > 0 && width(x) % n_head == 0 && width(out) % n_head == 0, "heads fill the width");
    same_rows(x, out);
    if (shared >= 0) same_rows(shared, out);
    const int64_t count = width(out) / n_head - (shared < 0 ? 0 : width(shared));
    require(first >= 0 && count > 0 && first + count <= width(x) / n_head, "channels are some of each head");
    plan_->add_heads(x, shared, n_head, first, out);
}

void PlanBuilder::transposed_heads(int x, int type, const Bytes& data, int n_head, int out) {
    require(n_head > 0 && n_head <= kMaxChunks && width(out) % n_head == 0, "heads fill the width");
    same_rows(x, out);
    const Matrix all = make_matrix(type, data, width(x) * n_head, width(out) / n_head);
    weights_.push_back(data);
    std::vector<Matrix> weights;
    for (int h = 0; h < n_head; h++)
        weights.push_back({all.type, all.row(h * width(x)), width(x), all.cols, all.row_bytes, nullptr});
    plan_->add_transposed_heads(x, std::move(weights), out);
}

void PlanBuilder::attention(int q, int k, int v, int out, int n_head, int n_head_kv, int head_dim,
                            int head_dim_v, float scale, float softcap, int window, int rope,
                            const std::optional<std::pair<Floats, float>>& q_norm,
                            const std::optional<std::pair<Floats, float>>& k_norm,
                            const std::optional<Floats>& sinks, int kv_type, const WritableBytes& k_cache,
                            const WritableBytes& v_cache, const std::optional<WritableBytes>& k_scale,
                            const std::optional<WritableBytes>& v_scale) {
    require(n_head > 0 && n_head_kv > 0 && n_head % n_head_kv == 0 && n_head / n_head_kv <= kMaxGroup,
            "query heads come in groups of equal size");
    require(head_dim > 0 && head_dim <= kMaxHeadDim && head_dim_v > 0 && head_dim_v <= kMaxHeadDim,
            "a head has 1 to " + std::to_string(kMaxHeadDim) + " channels");
    require(width(q) == int64_t(n_head) * head_dim && width(k) == int64_t(n_head_kv) * head_dim &&
                width(v) == int64_t(n_head_kv) * head_dim_v && width(out) == int64_t(n_head) * head_dim_v,
            "heads fill the widths of q, k, v and out");
    for (int id : {q, k, v, out}) require(!outputs_[id], "attention works on all tokens");
    require(rope < plan_->n_ropes() && (rope < 0 || plan_->rope(rope).n_rot <= head_dim),
            "a rope fits its head");
    AttentionFacts facts;
    facts.q = q, facts.k = k, facts.v = v, facts.out = out;
    facts.n_head = n_head;
    facts.scale = scale;
    facts.softcap = softcap;
    facts.window = window;
    facts.rope = rope;
    if (q_norm) facts.q_norm = make_norm(false, q_norm->first, std::nullopt, q_norm->second, head_dim);
    if (k_norm) facts.k_norm = make_norm(false, k_norm->first, std::nullopt, k_norm->second, head_dim);
    require(!sinks || int(sinks->size()) == n_head, "every query head has a sink");
    facts.sinks = to_vector(sinks);
    require(kv_type >= 0 && kv_type <= 2, "a cache is F32, F16 or Q8_0");
    facts.kv = {KvType(kv_type), n_head_kv,      head_dim, head_dim_v,
                k_cache.data(),  v_cache.data(), nullptr,  nullptr};
    require(k_cache.size() == n_pages_ * facts.kv.k_page_bytes() &&
                v_cache.size() == n_pages_ * facts.kv.v_page_bytes(),
            "the cache has the size of its pages");
    if (facts.kv.type == KvType::Q8_0) {
        require(head_dim % 32 == 0 && head_dim_v % 32 == 0, "a Q8_0 cache needs heads of whole 32-blocks");
        const size_t per_page = size_t(n_head_kv) * kPageSize * 2;
        require(k_scale && v_scale && k_scale->size() == n_pages_ * per_page * (head_dim / 32) &&
                    v_scale->size() == n_pages_ * per_page * (head_dim_v / 32),
                "a Q8_0 cache has scales");
        facts.kv.k_scale = reinterpret_cast<uint16_t*>(k_scale->data());
        facts.kv.v_scale = reinterpret_cast<uint16_t*>(v_scale->data());
    }
    caches_.insert(caches_.end(), {k_cache, v_cache});
    if (k_scale) caches_.push_back(*k_scale);
    if (v_scale) caches_.push_back(*v_scale);
    plan_->add_attention(std::move(facts));
}

void PlanBuilder::short_conv(int x, const FloatMatrix& weight, const WritableFloats& states, int out) {
    require(width(x) == width(out) && int64_t(weight.shape(1)) == width(x) && weight.shape(0) > 0 &&
                weight.shape(0) <= kMaxConvKernel,
            "a short convolution has some weights for each channel");
    const int kernel = int(weight.shape(0));
    plan_->add_short_conv({x, out, kernel, std::vector<float>(weight.data(), weight.data() + weight.size()),
                           make_states(x, out, states, (kernel - 1) * width(x))});
}

void PlanBuilder::delta_net(int x, int alpha, int beta, const Floats& rate, const Floats& step, int n_head,
                            int n_head_k, int dim_k, int dim_v, bool tiled, const WritableFloats& states,
                            int out) {
    require(n_head > 0 && n_head_k > 0 && n_head % n_head_k == 0 && n_head <= kMaxStateHeads && dim_k > 0 &&
                dim_k <= kMaxHeadDim && dim_v > 0 && dim_v <= kMaxHeadDim,
            "heads of values share those of keys");
    require(width(x) == 2 * int64_t(n_head_k) * dim_k + int64_t(n_head) * dim_v &&
                width(out) == int64_t(n_head) * dim_v && width(alpha) == n_head && width(beta) == n_head &&
                int(rate.size()) == n_head && int(step.size()) == n_head,
            "heads fill the widths of a delta net");
    for (int id : {alpha, beta}) require(!outputs_[id], "an operation with a state works on all tokens");
    plan_->add_delta_net({x, alpha, beta, out, n_head, n_head_k, dim_k, dim_v, tiled, to_vector(rate),
                          to_vector(step), make_states(x, out, states, int64_t(n_head) * dim_k * dim_v)});
}

StateSlots PlanBuilder::make_states(int x, int out, const WritableFloats& states, int64_t size) {
    require(!outputs_[checked(x)] && !outputs_[checked(out)] && x != out,
            "an operation with a state works on all tokens");
    const int n = int(states.shape(0));
    require(n > 0 && int64_t(states.shape(1)) == size && (!has_states_ || n == n_states_),
            "a state has " + std::to_string(size) + " numbers, and every operation as many of them");
    has_states_ = true;
    n_states_ = n;
    state_slots_.push_back(states);
    return {states.data(), size};
}

}  // namespace hotset::bindings
