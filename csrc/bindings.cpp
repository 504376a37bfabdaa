// The only file that knows Python: checks every argument, releases the GIL, turns errors into sentences.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdlib>

#include "bandwidth.h"
#include "cold.h"
#include "mapped.h"
#include "plan.h"
#include "quantize.h"
#include "replacement.h"
#include "store/store.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace hotset;

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WritableFloats = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using WritableBytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatMatrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IntMatrix = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using IntCube = nb::ndarray<const int32_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

void require(bool condition, const std::string& sentence) {
    if (!condition) throw nb::value_error(sentence.c_str());
}

const Kernels& chosen_kernels(const std::optional<std::string>& isa) {
    const char* forced = isa ? isa->c_str() : std::getenv("HOTSET_ISA");
    const char* error = nullptr;
    const Kernels* kernels = select_kernels(forced, &error);
    if (!kernels && forced && *forced)
        throw nb::value_error((std::string("HOTSET_ISA=") + forced + " cannot be used: " + error).c_str());
    if (!kernels) throw nb::value_error(error);
    return *kernels;
}

// scales: of planes, whose type is then that of their codes.
Matrix make_matrix(int type, const Bytes& data, int64_t rows, int64_t cols,
                   const std::optional<Bytes>& scales = std::nullopt) {
    require(type >= 0 && type < kTypeCount && type_facts(Type(type)).block_bytes > 0 &&
                is_planes(Type(type)) == scales.has_value(),
            "tensor type " + std::to_string(type) + " has no kernel");
    const TypeFacts facts = type_facts(Type(type));
    require(rows > 0 && cols > 0 && rows < INT32_MAX && cols < INT32_MAX, "a matrix needs rows and columns");
    require(cols % facts.block_size == 0,
            "rows of " + std::to_string(cols) + " weights are not whole blocks of type " + facts.name);
    const size_t row_bytes = size_t(cols / facts.block_size) * facts.block_bytes;
    require(data.size() == size_t(rows) * row_bytes,
            "a " + std::string(facts.name) + " matrix of " + std::to_string(rows) + " x " +
                std::to_string(cols) + " takes " + std::to_string(size_t(rows) * row_bytes) + " bytes, not " +
                std::to_string(data.size()));
    require(!scales || scales->size() == size_t((rows + kPlaneRows - 1) / kPlaneRows) * size_t(cols) * 2,
            "planes have a scale for each column and 32 rows");
    return {Type(type), data.data(), rows,
            cols,       row_bytes,   scales ? reinterpret_cast<const uint16_t*>(scales->data()) : nullptr};
}

// The rows of one part of a group of a store, in place of the bytes of a matrix.
struct StoredRows {
    std::shared_ptr<RowStore> store;
    int group, part;
};
using Rows = std::variant<Bytes, StoredRows>;

// As make_matrix; keeps what it lies in alive in `weights` or `stores`.
Matrix make_matrix(int type, const Rows& data, int64_t rows, int64_t cols, const std::optional<Bytes>& scales,
                   std::vector<Bytes>& weights, std::vector<std::shared_ptr<RowStore>>& stores) {
    if (scales) weights.push_back(*scales);
    if (const Bytes* bytes = std::get_if<Bytes>(&data)) {
        weights.push_back(*bytes);
        return make_matrix(type, *bytes, rows, cols, scales);
    }
    const StoredRows& stored = std::get<StoredRows>(data);
    require(type >= 0 && type < kTypeCount && type_facts(Type(type)).block_bytes > 0 &&
                is_planes(Type(type)) == scales.has_value() && cols % type_facts(Type(type)).block_size == 0,
            "tensor type " + std::to_string(type) + " has no kernel");
    const size_t row_bytes =
        size_t(cols / type_facts(Type(type)).block_size) * type_facts(Type(type)).block_bytes;
    require(stored.store->n_rows(stored.group) == rows &&
                stored.store->row_bytes(stored.group, stored.part) == row_bytes && stored.store->end(),
            "a store's rows are those of the matrix");
    require(!scales || scales->size() == size_t((rows + kPlaneRows - 1) / kPlaneRows) * size_t(cols) * 2,
            "planes have a scale for each column and 32 rows");
    stores.push_back(stored.store);
    return {Type(type),
            stored.store->end(),
            rows,
            cols,
            row_bytes,
            scales ? reinterpret_cast<const uint16_t*>(scales->data()) : nullptr,
            stored.store->places(stored.group, stored.part)};
}

std::vector<float> to_vector(const std::optional<Floats>& array) {
    return array ? std::vector<float>(array->data(), array->data() + array->size()) : std::vector<float>();
}

Activation checked_activation(int kind) {
    require(kind >= 0 && kind <= int(Activation::ClampedPlusOne),
            "there is no activation " + std::to_string(kind));
    return Activation(kind);
}

// Activations of an FFN, as Python names them: (kind, threshold) of the gate, or of up without one, and up's.
void set_activations(NeuronFacts& facts, bool gated, std::pair<int, float> activation,
                     std::optional<int> up_activation) {
    facts.activation = checked_activation(activation.first);
    facts.activation_threshold = activation.second;
    require(gated || !up_activation, "without a gate there is one activation");
    if (up_activation) {
        facts.up_activated = true;
        facts.up_activation = checked_activation(*up_activation);
    }
}

nb::object error_class(const char* name) {
    return nb::module_::import_("hotset.errors").attr(name);
}

struct StepCancelled : std::exception {};

// What needs another type than ValueError.
void translate(const std::exception_ptr& thrown, void*) {
    try {
        std::rethrow_exception(thrown);
    } catch (const ThreadError& error) {
        PyErr_SetString(error_class("InvalidRequestError").ptr(), error.what());
    } catch (const ReadError& error) {
        PyErr_SetString(error_class("ReadError").ptr(), error.what());
    } catch (const StepCancelled&) {
        PyErr_SetNone(error_class("StepCancelledError").ptr());
    }
}

std::shared_ptr<Runtime> make_runtime(int n_threads) {
    require(n_threads > 0 && n_threads <= kMaxThreads,
            "the number of threads must be 1 to " + std::to_string(kMaxThreads));
    return std::make_shared<Runtime>(n_threads);
}

// A plan as Python builds it: the same operations, with every argument checked.
class PlanBuilder {
  public:
    PlanBuilder(int max_tokens, int n_pages, int max_pages, std::shared_ptr<Runtime> runtime,
                const std::optional<std::string>& isa)
        : n_pages_(n_pages) {
        require(max_tokens > 0 && n_pages > 0 && max_pages > 0, "a plan needs tokens and pages");
        plan_ = std::make_unique<Plan>(chosen_kernels(isa), max_tokens, max_pages, std::move(runtime));
    }
    ~PlanBuilder() {
        // Waits for late threads of the team: whoever runs a step of another plan must get at the GIL.
        nb::gil_scoped_release release;
        plan_.reset();
    }

    int buffer(int64_t width, bool outputs) {
        require(!finished_ && width > 0, "a buffer needs a width");
        widths_.push_back(width);
        outputs_.push_back(outputs);
        return plan_->add_buffer(width, outputs);
    }

    int rope(bool neox, int n_rot, const std::vector<double>& frequencies, float magnitude) {
        require(n_rot > 0 && n_rot % 2 == 0 && int(frequencies.size()) == n_rot / 2,
                "a rope needs n_rot / 2 frequencies");
        return plan_->add_rope({neox, n_rot, magnitude, frequencies});
    }

    // Rows of tokens, or of positions + first_row.
    void embed(int type, const Bytes& data, int64_t rows, bool positions, int first_row, int out) {
        const Matrix weight = make_matrix(type, data, rows, width(out));
        weights_.push_back(data);
        require(first_row >= 0 && first_row < rows && (positions || first_row == 0),
                "rows begin in the matrix");
        int64_t& limit = positions ? n_positions_ : n_vocab_;
        limit = limit ? std::min(limit, rows - first_row) : rows - first_row;
        plan_->add_embed(weight, positions, first_row, out);
    }

    // The step begins with rows that `run` is given, one per token, in place of an embedding.
    void input(int out) {
        require(!finished_ && input_ < 0 && !outputs_[checked(out)], "a plan has one input, a row per token");
        input_ = out;
    }

    void select(int x, int out) {
        require(width(x) == width(out) && !outputs_[x] && outputs_[out],
                "select goes from tokens to outputs of one width");
        plan_->add_select(x, out);
    }

    void norm(bool layer, const Floats& weight, const std::optional<Floats>& bias, float eps, int n_head,
              int x, int out) {
        require(n_head > 0 && width(x) % n_head == 0 && width(x) == width(out), "a norm keeps its width");
        same_rows(x, out);
        plan_->add_norm(make_norm(layer, weight, bias, eps, width(x) / n_head), n_head, x, out);
    }

    using NormArguments = std::optional<std::tuple<bool, Floats, std::optional<Floats>, float>>;
    using Part = std::tuple<int, Rows, std::optional<Floats>, int>;  // type, data, bias, out
    using ActivationArguments = std::pair<int, float>;               // kind, threshold
    // A matrix by channel: codes, scales, minimums; its outputs, and which of them is the part's first; the
    // share of channels below which these are read.
    using Channels = std::tuple<Bytes, Bytes, std::optional<Bytes>, int64_t, int64_t, float>;

    // cutoff, channels: see Plan::add_linear. With an activation and two parts, these are gate and up; with
    // one part, it is applied to the result.
    void linear(int x, const NormArguments& norm, const std::vector<Part>& parts, int residual, bool gated,
                const std::optional<ActivationArguments>& activation, float cutoff,
                const std::vector<std::optional<Channels>>& channels) {
        require(!parts.empty() && parts.size() <= kMaxChunks &&
                    (!gated || (parts.size() == 2 && activation)) && (residual < 0 || parts.size() == 1) &&
                    (gated || !activation || parts.size() == 1),
                "a matrix product has parts");
        std::vector<LinearPart> built;
        for (const Part& part : parts) {
            require(std::holds_alternative<Bytes>(std::get<1>(part)),
                    "a product of all rows has them in order");
            built.push_back(make_part(part, x));
        }
        require(!gated || built[0].weight.rows == built[1].weight.rows, "gate and up have the same rows");
        LinearTail tail;
        if (activation)
            tail = {gated ? LinearTail::Gated : LinearTail::Activated, checked_activation(activation->first),
                    activation->second};
        if (residual >= 0) {
            same_rows(x, residual);
            require(width(residual) == width(built[0].out) && residual != built[0].out,
                    "a residual has the width of the output");
        }
        require(channels.empty() || channels.size() == parts.size(), "every part has channels or none");
        std::vector<ChannelMatrix> by_channel;
        for (size_t p = 0; p < channels.size(); p++)
            by_channel.push_back(channels[p] ? make_channels(*channels[p], built[p].weight)
                                             : ChannelMatrix());
        plan_->add_linear(x, make_norm(norm, x), std::move(built), residual, tail, cutoff,
                          std::move(by_channel));
    }

    // The values of an FFN's neurons (csrc/ops/neurons.cpp). predictor: buffer of scores, threshold, and how
    // many leading neurons have no score.
    void neurons(int x, const NormArguments& norm, const std::optional<Part>& gate, const Part& up,
                 const ActivationArguments& activation, std::optional<int> up_activation,
                 const std::optional<std::tuple<int, float, int64_t>>& predictor, bool sparse, int out,
                 const std::tuple<float, float, float>& cutoffs,
                 const std::vector<std::optional<Channels>>& channels) {
        NeuronFacts facts;
        facts.x = x, facts.out = out, facts.sparse = sparse;
        std::tie(facts.input_cutoff, facts.gate_cutoff, facts.value_cutoff) = cutoffs;
        facts.norm = make_norm(norm, x);
        if (gate) facts.gate = make_part(*gate, x);
        facts.up = make_part(up, x);
        require(std::get<3>(up) == out && (!gate || std::get<3>(*gate) == out),
                "gate and up have a row per neuron");
        set_activations(facts, gate.has_value(), activation, up_activation);
        require(channels.empty() || channels.size() == (gate ? 2 : 1), "gate and up have channels or none");
        if (!channels.empty() && channels.back())
            facts.up_channels = make_channels(*channels.back(), facts.up.weight);
        if (channels.size() == 2 && channels[0])
            facts.gate_channels = make_channels(*channels[0], facts.gate.weight);
        if (predictor) {
            std::tie(facts.scores, facts.threshold, facts.first) = *predictor;
            same_rows(facts.scores, out);
            require(facts.first >= 0 && width(facts.scores) == width(out) - facts.first,
                    "a predictor has a score for each neuron");
        }
        plan_->add_neurons(std::move(facts));
    }

    // x times a matrix with a row per input (csrc/ops/axpy.cpp).
    void axpy(int x, int type, const Rows& data, const std::optional<Bytes>& scales,
              const std::optional<Floats>& bias, int residual, bool sparse, int out) {
        same_rows(x, out);
        require(!bias || int64_t(bias->size()) == width(out), "a bias has the width of its output");
        const Matrix weight = make_matrix(type, data, width(x), width(out), scales, weights_, stores_);
        if (residual >= 0) {
            same_rows(x, residual);
            require(width(residual) == width(out) && residual != out,
                    "a residual has the width of the output");
        }
        plan_->add_axpy(x, {weight, to_vector(bias), out}, residual, sparse);
    }

    // Rows of a group that operations behind it read (FetchFacts). by: any buffer, scores from neuron `first`
    // on, values, or a route.
    void fetch(std::shared_ptr<RowStore> store, int group, int which, int by, float threshold,
               int64_t first) {
        require(group >= 0 && group < store->n_groups() && store->end(), "there is no such group of rows");
        require(which >= FetchFacts::All && which <= FetchFacts::Routed, "there is no such way to fetch");
        const int64_t n_rows = store->n_rows(group);
        FetchFacts facts;
        facts.store = store.get(), facts.group = group, facts.which = FetchFacts::Which(which);
        facts.threshold = threshold, facts.first = first;
        if (which == FetchFacts::Selected)
            require(first >= 0 && width(by) == n_rows - first, "a predictor has a score for each neuron");
        if (which == FetchFacts::NonZero) require(width(by) == n_rows, "a neuron has a value");
        if (which == FetchFacts::Routed) facts.n_used = check_route(by, int(n_rows), by);
        facts.by = checked(by);
        stores_.push_back(std::move(store));
        plan_->add_fetch(facts);
    }

    // See RouteFacts.
    void route(int x, int n_used, int scoring, const std::optional<Floats>& bias, bool normalised,
               float scale, int n_groups, int n_groups_used, int group_best, int out) {
        same_rows(x, out);
        const int64_t n = width(x);
        require(n <= kMaxExperts && n_used > 0 && n_used <= n && width(out) == 2 * n_used,
                "a route has ids and weights of some of the experts");
        require(scoring >= RouteFacts::Softmax && scoring <= RouteFacts::SoftmaxChosen,
                "there is no scoring " + std::to_string(scoring));
        require(!bias || int64_t(bias->size()) == n, "a route's bias has a number for each expert");
        require(n_groups > 0 && n % n_groups == 0 && n_groups_used > 0 && n_groups_used <= n_groups &&
                    n / n_groups * n_groups_used >= n_used,
                "groups of experts have equal sizes, and hold those that are used");
        require(group_best == 1 || group_best == 2, "one or two experts of a group count for it");
        plan_->add_route({x, out, n_used, RouteFacts::Scoring(scoring), to_vector(bias), normalised, scale,
                          n_groups, n_groups_used, group_best});
    }

    // Tensors (type, data) of all experts or of one each; rows of an expert in them, and the first that
    // counts; a bias for each such row.
    using ExpertPart = std::tuple<std::vector<std::pair<int, Rows>>, int64_t, int64_t, std::optional<Floats>>;

    // Neurons of a route's experts, as `neurons`; without an activation the products of up.
    void expert_neurons(int x, int route, int n_expert, const std::optional<ExpertPart>& gate,
                        const ExpertPart& up, const std::optional<ActivationArguments>& activation,
                        const std::optional<ActivationArguments>& up_activation,
                        const std::optional<std::pair<int, float>>& predictor, bool sparse, int out) {
        same_rows(x, out);
        const int n_used = check_route(route, n_expert, out);
        require(width(out) % n_used == 0, "experts have neurons of their own");
        require((!gate || activation) && (gate || !up_activation), "a gate has an activation");
        const int64_t rows = width(out) / n_used;
        ExpertFacts facts;
        facts.x = x, facts.route = route, facts.out = out, facts.n_used = n_used, facts.sparse = sparse;
        if (gate) facts.gate = make_experts(*gate, n_expert, rows, width(x), rows);
        facts.up = make_experts(up, n_expert, rows, width(x), rows);
        if (activation) {
            facts.activated = true;
            facts.activation = checked_activation(activation->first);
            facts.activation_threshold = activation->second;
        }
        if (up_activation) {
            facts.up_activated = true;
            facts.up_activation = checked_activation(up_activation->first);
            facts.up_threshold = up_activation->second;
        }
        if (predictor) {
            std::tie(facts.scores, facts.threshold) = *predictor;
            same_rows(facts.scores, out);
            require(width(facts.scores) == width(out) && activation,
                    "a predictor has a score for each neuron");
        }
        plan_->add_expert_neurons(std::move(facts));
    }

    // by_neuron: matrices have a row per neuron; sparse: those of zeros are left out then. apart: what would
    // be weighed and summed stands side by side.
    void expert_sum(int x, int route, int n_expert, const ExpertPart& down, int residual, bool by_neuron,
                    bool apart, bool sparse, int out) {
        same_rows(x, out);
        const int n_used = check_route(route, n_expert, out);
        require(width(x) % n_used == 0, "experts have neurons of their own");
        if (residual >= 0) {
            same_rows(x, residual);
            require(width(residual) == width(out) && residual != out,
                    "a residual has the width of the output");
        }
        require(!apart || (!by_neuron && residual < 0 && width(out) % n_used == 0),
                "products side by side are by output, and not added to anything");
        const int64_t neurons = width(x) / n_used, outputs = width(out) / (apart ? n_used : 1);
        const int64_t rows = by_neuron ? neurons : outputs, cols = by_neuron ? outputs : neurons;
        plan_->add_expert_sum({x, route, residual, out, n_used,
                               make_experts(down, n_expert, rows, cols, outputs), by_neuron, apart, sparse});
    }

    void mask(int x, int scores, float threshold, int64_t first, int out) {
        require(width(x) == width(out) && first >= 0 && width(scores) == width(out) - first,
                "a mask has a score for each column from `first` on");
        same_rows(x, out);
        same_rows(scores, out);
        plan_->add_mask(x, scores, threshold, first, out);
    }

    void sign_scores(int x, const Bytes& rows, const std::optional<Floats>& bias, int out) {
        same_rows(x, out);
        require(int64_t(rows.size()) == width(out) * ((width(x) + 7) / 8),
                "signs are a bit per channel and row");
        require(!bias || int64_t(bias->size()) == width(out), "a bias has the width of its output");
        weights_.push_back(rows);
        plan_->add_sign_scores(x, rows.data(), to_vector(bias), out);
    }

    void rotate(int x, int out, int n_head, int head_dim, int rope, int first) {
        require(width(x) == int64_t(n_head) * head_dim && width(out) == width(x), "heads fill the width");
        require(rope >= 0 && rope < plan_->n_ropes() && first >= 0 && first <= head_dim &&
                    plan_->rope(rope).n_rot <= head_dim - first,
                "a rope fits its head");
        same_rows(x, out);
        plan_->add_rotate(x, out, n_head, head_dim, rope, first);
    }

    void heads(int x, int shared, int n_head, int first, int out) {
        require(n_head > 0 && width(x) % n_head == 0 && width(out) % n_head == 0, "heads fill the width");
        same_rows(x, out);
        if (shared >= 0) same_rows(shared, out);
        const int64_t count = width(out) / n_head - (shared < 0 ? 0 : width(shared));
        require(first >= 0 && count > 0 && first + count <= width(x) / n_head,
                "channels are some of each head");
        plan_->add_heads(x, shared, n_head, first, out);
    }

    void transposed_heads(int x, int type, const Bytes& data, int n_head, int out) {
        require(n_head > 0 && n_head <= kMaxChunks && width(out) % n_head == 0, "heads fill the width");
        same_rows(x, out);
        const Matrix all = make_matrix(type, data, width(x) * n_head, width(out) / n_head);
        weights_.push_back(data);
        std::vector<Matrix> weights;
        for (int h = 0; h < n_head; h++)
            weights.push_back({all.type, all.row(h * width(x)), width(x), all.cols, all.row_bytes, nullptr});
        plan_->add_transposed_heads(x, std::move(weights), out);
    }

    void attention(int q, int k, int v, int out, int n_head, int n_head_kv, int head_dim, int head_dim_v,
                   float scale, float softcap, int window, int rope,
                   const std::optional<std::pair<Floats, float>>& q_norm,
                   const std::optional<std::pair<Floats, float>>& k_norm, const std::optional<Floats>& sinks,
                   int kv_type, const WritableBytes& k_cache, const WritableBytes& v_cache,
                   const std::optional<WritableBytes>& k_scale, const std::optional<WritableBytes>& v_scale) {
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
            require(head_dim % 32 == 0 && head_dim_v % 32 == 0,
                    "a Q8_0 cache needs heads of whole 32-blocks");
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

    // weight: [kernel, width]. states: [n_states, (kernel - 1) * width].
    void short_conv(int x, const FloatMatrix& weight, const WritableFloats& states, int out) {
        require(width(x) == width(out) && int64_t(weight.shape(1)) == width(x) && weight.shape(0) > 0 &&
                    weight.shape(0) <= kMaxConvKernel,
                "a short convolution has some weights for each channel");
        const int kernel = int(weight.shape(0));
        plan_->add_short_conv({x, out, kernel,
                               std::vector<float>(weight.data(), weight.data() + weight.size()),
                               make_states(x, out, states, (kernel - 1) * width(x))});
    }

    // rate, step: [n_head]. states: [n_states, n_head * dim_k * dim_v].
    void delta_net(int x, int alpha, int beta, const Floats& rate, const Floats& step, int n_head,
                   int n_head_k, int dim_k, int dim_v, bool tiled, const WritableFloats& states, int out) {
        require(n_head > 0 && n_head_k > 0 && n_head % n_head_k == 0 && n_head <= kMaxStateHeads &&
                    dim_k > 0 && dim_k <= kMaxHeadDim && dim_v > 0 && dim_v <= kMaxHeadDim,
                "heads of values share those of keys");
        require(width(x) == 2 * int64_t(n_head_k) * dim_k + int64_t(n_head) * dim_v &&
                    width(out) == int64_t(n_head) * dim_v && width(alpha) == n_head &&
                    width(beta) == n_head && int(rate.size()) == n_head && int(step.size()) == n_head,
                "heads fill the widths of a delta net");
        for (int id : {alpha, beta}) require(!outputs_[id], "an operation with a state works on all tokens");
        plan_->add_delta_net({x, alpha, beta, out, n_head, n_head_k, dim_k, dim_v, tiled, to_vector(rate),
                              to_vector(step), make_states(x, out, states, int64_t(n_head) * dim_k * dim_v)});
    }

    void activate(int kind, float threshold, int x, int out) {
        require(width(x) == width(out), "an activation keeps its width");
        same_rows(x, out);
        plan_->add_activate(checked_activation(kind), threshold, x, out);
    }

    void cutoff(int x, float threshold, int out) {
        require(width(x) == width(out), "a cutoff keeps its width");
        same_rows(x, out);
        require(!outputs_[x], "what is cut belongs to all tokens");
        plan_->add_cutoff(x, threshold, out);
    }

    void add(int a, int b, int out) { check_pair(a, b, out), plan_->add_add(a, b, out); }
    void multiply(int a, int b, int out) {
        check_pair(a, width(b) == 1 ? a : b, out);
        same_rows(a, b);
        plan_->add_multiply(a, b, out);
    }

    void finish() {
        nb::gil_scoped_release release;
        plan_->finish();
        finished_ = true;
    }
    void cancel() { plan_->cancel(); }

    void run(const Ints& tokens, const Ints& positions, const Ints& sequences, const IntMatrix& pages,
             const Ints& outputs, const std::optional<FloatMatrix>& x, const std::optional<Bytes>& cut,
             const std::optional<Ints>& states, const std::optional<Ints>& saves) {
        require(finished_, "the plan is not finished");
        const int n = int(tokens.size()), n_sequences = int(pages.shape(0)), max_pages = int(pages.shape(1));
        require(
            n > 0 && n <= plan_->max_tokens(),
            "a step takes 1 to " + std::to_string(plan_->max_tokens()) + " tokens, not " + std::to_string(n));
        require(int(positions.size()) == n && int(sequences.size()) == n,
                "every token has a position and a sequence");
        require(max_pages <= plan_->max_pages(), "a sequence has more pages than the plan allows");
        for (int t = 0; t < n; t++) {
            const int token = tokens.data()[t], position = positions.data()[t],
                      sequence = sequences.data()[t];
            require(!embeds_tokens() || (token >= 0 && token < n_vocab_),
                    "token " + std::to_string(token) + " is not in the vocabulary");
            require(sequence >= 0 && sequence < n_sequences, "a token's sequence has no page table");
            require(position >= 0 && position / kPageSize < max_pages,
                    "position " + std::to_string(position) + " lies beyond the page table");
            require(!n_positions_ || position < n_positions_, "position " + std::to_string(position) +
                                                                  " lies beyond the model's context of " +
                                                                  std::to_string(n_positions_));
            const bool adjacent = t > 0 && sequences.data()[t - 1] == sequence;
            require(!adjacent || positions.data()[t - 1] < position, "positions of a sequence must rise");
            for (int i = adjacent ? positions.data()[t - 1] / kPageSize : 0; i <= position / kPageSize; i++) {
                const int page = pages.data()[int64_t(sequence) * max_pages + i];
                require(page >= 0 && page < n_pages_, "a position has no page in the cache");
            }
        }
        const int n_outputs = int(outputs.size());
        for (int i = 0; i < n_outputs; i++) {
            const int t = outputs.data()[i];
            require(t >= 0 && t < n && (i == 0 || outputs.data()[i - 1] < t),
                    "outputs must be rising indices of tokens");
        }
        if (has_states_) check_states(positions, sequences, n_sequences, states, saves);
        require((input_ >= 0) == x.has_value(),
                "a plan that begins with tokens takes no rows; one that begins with rows needs them");
        if (x) {
            require(int(x->shape(0)) == n && int64_t(x->shape(1)) == width(input_),
                    "the rows that enter are [" + std::to_string(n) + ", " + std::to_string(width(input_)) +
                        "], a row per token");
            // As any operation's buffer in a new step: a late thread of the last one may read it, never
            // commit.
            std::copy_n(x->data(), n * width(input_), plan_->buffer(input_).row(0));
        }
        require(!cut || int(cut->size()) == n, "every token is cut or not");
        n_tokens_ = n;
        n_outputs_ = n_outputs;
        bool done;
        std::exception_ptr raised;  // by a signal handler, while the step ran
        {
            nb::gil_scoped_release release;
            const Poll poll = [&] {
                nb::gil_scoped_acquire acquire;
                if (!raised && PyErr_CheckSignals() != 0)
                    raised = std::make_exception_ptr(nb::python_error());
                return bool(raised);
            };
            done = plan_->run(&poll, tokens.data(), positions.data(), sequences.data(), n, pages.data(),
                              n_sequences, max_pages, outputs.data(), n_outputs, cut ? cut->data() : nullptr,
                              has_states_ ? states->data() : nullptr, has_states_ ? saves->data() : nullptr);
        }
        if (raised) std::rethrow_exception(raised);
        if (!done) throw StepCancelled();
    }

    // A view of the buffer's rows of the last step.
    nb::ndarray<nb::numpy, float, nb::ndim<2>> rows(nb::handle self, int id) {
        const Buffer& buffer = plan_->buffer(checked(id));
        return {buffer.row(0), {size_t(buffer.outputs ? n_outputs_ : n_tokens_), size_t(buffer.width)}, self};
    }

    std::string isa() const { return plan_->kernels().isa; }
    size_t bytes() const { return plan_->bytes(); }

    // Of each operation in the latest step: seconds, and [n_ops, 6] of FfnCounts.
    nb::ndarray<nb::numpy, double, nb::ndim<1>> op_seconds() const;
    nb::ndarray<nb::numpy, int64_t, nb::ndim<2>> op_counts() const;

  private:
    int checked(int id) const {
        require(id >= 0 && id < int(widths_.size()), "there is no buffer " + std::to_string(id));
        return id;
    }
    bool embeds_tokens() const { return n_vocab_ > 0 || input_ < 0; }
    int64_t width(int id) const { return widths_[checked(id)]; }
    // Of an operation that works on all tokens; all operations have as many slots.
    StateSlots make_states(int x, int out, const WritableFloats& states, int64_t size) {
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
    // Tokens of a sequence follow one another; it begins anew or has a state; nothing that is read is
    // written.
    void check_states(const Ints& positions, const Ints& sequences, int n_sequences,
                      const std::optional<Ints>& states, const std::optional<Ints>& saves) const {
        const int n = int(sequences.size());
        require(states && saves && int(states->size()) == n_sequences && int(saves->size()) == n,
                "a model with recurrent layers needs slots for the states of a batch");
        std::vector<char> used(n_states_), seen(n_sequences);
        const auto use = [&](int slot) -> char* {
            require(slot >= -1 && slot < n_states_, "a state of the batch lies outside the " +
                                                        std::to_string(n_states_) + " slots of the cache");
            return slot < 0 ? nullptr : &used[slot];
        };
        for (int t = 0; t < n; t++) {
            const int sequence = sequences.data()[t], position = positions.data()[t];
            if (t > 0 && sequences.data()[t - 1] == sequence) {
                require(positions.data()[t - 1] + 1 == position,
                        "tokens of a sequence with a state must follow one another");
                continue;
            }
            require(!seen[sequence], "tokens of a sequence with a state must follow one another");
            seen[sequence] = 1;
            const int slot = states->data()[sequence];
            if (char* mark = use(slot)) *mark = 1;
            require((slot < 0) == (position == 0), "a sequence has a state before every token but its first");
        }
        for (int t = 0; t < n; t++) {
            char* mark = use(saves->data()[t]);
            if (!mark) continue;
            require(!*mark, "a step writes a state once, and none that it reads");
            *mark = 1;
            require(t + 1 == n || sequences.data()[t + 1] != sequences.data()[t] ||
                        (positions.data()[t] + 1) % kPageSize == 0,
                    "a state is saved at the end of a page or of a sequence's tokens");
        }
    }
    void same_rows(int a, int b) const {
        require(outputs_[checked(a)] == outputs_[checked(b)], "rows of tokens and of outputs do not mix");
    }
    void check_pair(int a, int b, int out) const {
        require(width(a) == width(b) && width(a) == width(out), "both sides have the same width");
        same_rows(a, b);
        same_rows(a, out);
    }
    Norm make_norm(const NormArguments& norm, int x) const {
        if (!norm) return {};
        const auto& [layer, weight, bias, eps] = *norm;
        return make_norm(layer, weight, bias, eps, width(x));
    }
    LinearPart make_part(const Part& part, int x) {
        const auto& [type, data, bias, out] = part;
        same_rows(x, out);
        require(!bias || int64_t(bias->size()) == width(out), "a bias has the width of its output");
        const Matrix weight = make_matrix(type, data, width(out), width(x), std::nullopt, weights_, stores_);
        return {weight, to_vector(bias), out};
    }
    ChannelMatrix make_channels(const Channels& channels, const Matrix& by_row) {
        const auto& [codes, scales, mins, cols, first, below] = channels;
        require(plan_->kernels().channel_linear[int(by_row.type)],
                std::string(type_facts(by_row.type).name) + " is not laid out by channel");
        require(cols > 0 && cols % 32 == 0 && first >= 0 && first % 32 == 0 && by_row.rows % 32 == 0 &&
                    first + by_row.rows <= cols,
                "outputs of a matrix by channel are whole groups of 32");
        const size_t n_codes = size_t(by_row.cols) * size_t(cols) / (by_row.type == Type::Q8_0 ? 1 : 2);
        const size_t n_scales = size_t(by_row.cols) / 32 * size_t(cols) * 2;
        require(codes.size() == n_codes && scales.size() == n_scales &&
                    mins.has_value() == (by_row.type == Type::Q4_1) && (!mins || mins->size() == n_scales),
                "a matrix by channel has the codes, scales and minimums of its rows");
        weights_.insert(weights_.end(), {codes, scales});
        if (mins) weights_.push_back(*mins);
        auto halves = [](const Bytes& bytes) { return reinterpret_cast<const uint16_t*>(bytes.data()); };
        ChannelMatrix made;
        made.type = by_row.type, made.data = codes.data(), made.rows = by_row.cols, made.cols = cols;
        made.first_col = first, made.scales = halves(scales), made.below = below;
        if (mins) made.mins = halves(*mins);
        return made;
    }
    // Experts that a token has.
    int check_route(int route, int n_expert, int out) const {
        same_rows(route, out);
        require(
            n_expert > 0 && n_expert <= kMaxExperts && width(route) % 2 == 0 && width(route) / 2 <= n_expert,
            "a route names some of the experts");
        return int(width(route) / 2);
    }
    ExpertMatrices make_experts(const ExpertPart& part, int n_expert, int64_t rows, int64_t cols,
                                int64_t n_bias) {
        const auto& [tensors, stored, first, bias] = part;
        require(stored > 0 && stored < INT32_MAX / n_expert && first >= 0 && first + rows <= stored,
                "an expert's rows are some of its matrix");
        require(tensors.size() == 1 || int(tensors.size()) == n_expert,
                "experts are in one tensor, or in one each");
        require(!bias || int64_t(bias->size()) == n_expert * n_bias, "a bias has a number for each output");
        ExpertMatrices made;
        const int64_t of_tensor = n_expert / int64_t(tensors.size());
        for (const auto& [type, data] : tensors) {
            if (const StoredRows* experts = std::get_if<StoredRows>(&data)) {
                made = stored_experts(type, *experts, n_expert, rows, cols, stored, first);
                break;
            }
            const Matrix all = make_matrix(type, std::get<Bytes>(data), of_tensor * stored, cols);
            weights_.push_back(std::get<Bytes>(data));
            for (int64_t e = 0; e < of_tensor; e++)
                made.weights.push_back(
                    {all.type, all.row(e * stored + first), rows, cols, all.row_bytes, nullptr});
        }
        made.bias = to_vector(bias);
        return made;
    }
    // Experts whose matrices are rows of a store.
    ExpertMatrices stored_experts(int type, const StoredRows& experts, int n_expert, int64_t rows,
                                  int64_t cols, int64_t stored, int64_t first) {
        const RowStore& store = *experts.store;
        require(type >= 0 && type < kTypeCount && type_facts(Type(type)).block_bytes > 0 &&
                    !is_planes(Type(type)) && cols % type_facts(Type(type)).block_size == 0,
                "tensor type " + std::to_string(type) + " has no kernel");
        const TypeFacts facts = type_facts(Type(type));
        const size_t row_bytes = size_t(cols / facts.block_size) * facts.block_bytes;
        require(store.end() && store.n_rows(experts.group) == n_expert &&
                    store.row_bytes(experts.group, experts.part) == row_bytes * size_t(stored),
                "a store's rows are the matrices of the experts");
        ExpertMatrices made;
        made.weights.assign(size_t(n_expert), {Type(type), nullptr, rows, cols, row_bytes, nullptr});
        made.places = store.places(experts.group, experts.part);
        made.skipped = size_t(first) * row_bytes;
        stores_.push_back(experts.store);
        return made;
    }
    static Norm make_norm(bool layer, const Floats& weight, const std::optional<Floats>& bias, float eps,
                          int64_t width) {
        require(int64_t(weight.size()) == width && (!bias || int64_t(bias->size()) == width),
                "a norm has the width of its input");
        return {layer, to_vector(weight), to_vector(bias), eps};
    }

    const int n_pages_;
    // A late thread may still read weights and cache when Python drops the plan: they must outlive plan_,
    // whose end waits for such threads. So they stand before it.
    std::vector<Bytes> weights_;
    std::vector<WritableBytes> caches_;
    std::vector<std::shared_ptr<RowStore>> stores_;
    std::vector<WritableFloats> state_slots_;
    std::unique_ptr<Plan> plan_;
    std::vector<int64_t> widths_;
    std::vector<bool> outputs_;
    int input_ = -1;  // buffer of the rows that a step begins with; -1: it begins with tokens
    int64_t n_vocab_ = 0;
    int64_t n_positions_ = 0;  // 0: any
    bool has_states_ = false;
    int n_states_ = 0;
    int n_tokens_ = 0;
    int n_outputs_ = 0;
    bool finished_ = false;
};

// The CPU's half of a hybrid engine (csrc/cold.h). Steps are begun and ended by one thread; `poison` and
// `close` may come from any.
class Cold {
  public:
    using Part = std::tuple<int, Bytes, std::optional<Floats>>;  // type, data, bias
    using Down = std::tuple<int, Bytes, std::optional<Bytes>>;   // type, data, scales of planes

    Cold(int64_t width, int max_tokens, std::shared_ptr<Runtime> runtime, double timeout,
         const std::optional<std::string>& isa) {
        require(width > 0 && max_tokens > 0, "the CPU's half needs a width and tokens");
        require(timeout > 0 && timeout <= 1e6, "a timeout is more than 0 and at most a million seconds");
        plan_ = std::make_unique<ColdPlan>(chosen_kernels(isa), width, max_tokens, std::move(runtime),
                                           int64_t(timeout * 1e9));
    }
    ~Cold() {
        nb::gil_scoped_release release;  // as in PlanBuilder
        plan_.reset();
    }

    // cold: bit i % 8 of byte i / 8 for each neuron.
    int layer(int number, const std::optional<Part>& gate, const Part& up, int64_t n_neurons,
              const std::pair<int, float>& activation, std::optional<int> up_activation, const Down& down,
              const Bytes& cold, bool predicted) {
        require(!started_, "layers are added before the start");
        require(n_neurons > 0 && cold.size() == size_t(n_neurons + 7) / 8, "a layer has a bit per neuron");
        std::vector<uint8_t> bits(cold.data(), cold.data() + cold.size());
        if (n_neurons % 8) bits.back() &= uint8_t((1 << n_neurons % 8) - 1);
        NeuronFacts facts;
        if (gate) facts.gate = make_part(*gate, n_neurons);
        facts.up = make_part(up, n_neurons);
        set_activations(facts, gate.has_value(), activation, up_activation);
        const auto& [type, data, scales] = down;
        const Matrix weight = make_matrix(type, data, n_neurons, plan_->width(), scales);
        weights_.push_back(data);
        if (scales) weights_.push_back(*scales);
        return plan_->add_layer(number, std::move(facts), {weight, {}, -1}, std::move(bits), predicted);
    }

    void start() {
        require(!started_ && plan_->n_layers() > 0, "the CPU's half starts once, with a layer at least");
        started_ = true;
        nb::gil_scoped_release release;
        plan_->start();
    }

    nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> memory(nb::handle self) {
        check_started();
        return {plan_->memory(), {plan_->memory_bytes()}, self};
    }
    // Of memory(): request, done, h, bits, out.
    std::vector<size_t> offsets() const {
        check_started();
        return {plan_->request_offset(), plan_->done_offset(), plan_->h_offset(), plan_->bits_offset(),
                plan_->out_offset()};
    }

    std::string begin(int n_tokens) {
        check_started();
        require(n_tokens > 0 && n_tokens <= plan_->max_tokens(),
                "a step of the CPU's half takes 1 to " + std::to_string(plan_->max_tokens()) +
                    " tokens, not " + std::to_string(n_tokens));
        nb::gil_scoped_release release;
        return plan_->begin(n_tokens);
    }
    std::string end() {
        check_started();
        nb::gil_scoped_release release;
        return plan_->end();
    }
    void poison(const std::string& reason) {
        check_started();
        nb::gil_scoped_release release;
        plan_->poison(reason);
    }
    std::string poisoned() const { return plan_->poisoned(); }
    void close() {
        nb::gil_scoped_release release;
        plan_->close();
    }

    void post(int layer) { plan_->post(checked(layer)); }
    // False: the step was given up. Ctrl-C gets through.
    bool wait(int layer) {
        checked(layer);
        for (;;) {
            ColdPlan::Wait result;
            {
                nb::gil_scoped_release release;
                result = plan_->wait(layer, kSignal_ns);
            }
            if (result != ColdPlan::Wait::TimedOut) return result == ColdPlan::Wait::Done;
            if (PyErr_CheckSignals() != 0) throw nb::python_error();
        }
    }

    // Of functions void(void*) for a device's stream: post, wait.
    static std::pair<uintptr_t, uintptr_t> host_functions() {
        return {reinterpret_cast<uintptr_t>(&cold_post_on_stream),
                reinterpret_cast<uintptr_t>(&cold_wait_on_stream)};
    }
    uintptr_t host_argument(int layer) {
        return reinterpret_cast<uintptr_t>(plan_->host_call(checked(layer)));
    }

    // [n_layers, 6]: requests, and FfnCounts. Seconds: [n_layers].
    nb::ndarray<nb::numpy, int64_t, nb::ndim<2>> counts() const;
    nb::ndarray<nb::numpy, double, nb::ndim<1>> seconds() const;

  private:
    static constexpr int64_t kSignal_ns = 20'000'000;

    void check_started() const { require(started_, "the CPU's half was not started"); }
    int checked(int layer) const {
        check_started();
        require(layer >= 0 && layer < plan_->n_layers(), "there is no layer " + std::to_string(layer));
        return layer;
    }
    LinearPart make_part(const Part& part, int64_t n_neurons) {
        const auto& [type, data, bias] = part;
        require(!bias || int64_t(bias->size()) == n_neurons, "a bias has the width of its output");
        weights_.push_back(data);
        return {make_matrix(type, data, n_neurons, plan_->width()), to_vector(bias), -1};
    }

    std::vector<Bytes> weights_;  // before plan_, whose threads read them until its end
    std::unique_ptr<ColdPlan> plan_;
    bool started_ = false;
};

template <class T, class... Shape>
nb::ndarray<nb::numpy, T, nb::ndim<sizeof...(Shape)>> new_array(T*& data, Shape... shape) {
    data = new T[(size_t(shape) * ... * 1)];
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return {data, {size_t(shape)...}, owner};
}

nb::ndarray<nb::numpy, double, nb::ndim<1>> PlanBuilder::op_seconds() const {
    double* out;
    auto result = new_array<double>(out, plan_->n_ops());
    std::ranges::copy(plan_->op_seconds(), out);
    return result;
}

nb::ndarray<nb::numpy, int64_t, nb::ndim<2>> PlanBuilder::op_counts() const {
    int64_t* out;
    auto result = new_array<int64_t>(out, plan_->n_ops(), 6);
    for (int i = 0; i < plan_->n_ops(); i++, out += 6) {
        const FfnCounts c = plan_->op(i).counters.get();
        out[0] = c.selected, out[1] = c.active, out[2] = c.gate_rows, out[3] = c.up_rows,
        out[4] = c.down_rows, out[5] = c.left_out;
    }
    return result;
}

nb::ndarray<nb::numpy, int64_t, nb::ndim<2>> Cold::counts() const {
    int64_t* out;
    auto result = new_array<int64_t>(out, plan_->n_layers(), 6);
    for (int i = 0; i < plan_->n_layers(); i++, out += 6) {
        const ColdCounts& c = plan_->counts(i);
        out[0] = c.requests, out[1] = c.ffn.selected, out[2] = c.ffn.active, out[3] = c.ffn.gate_rows,
        out[4] = c.ffn.up_rows, out[5] = c.ffn.down_rows;
    }
    return result;
}

nb::ndarray<nb::numpy, double, nb::ndim<1>> Cold::seconds() const {
    double* out;
    auto result = new_array<double>(out, plan_->n_layers());
    for (int i = 0; i < plan_->n_layers(); i++) out[i] = plan_->counts(i).seconds;
    return result;
}

// The product of one matrix and rows of activations, for tests and benchmarks of single kernels.
nb::object linear(int type, const Bytes& data, int64_t rows, const FloatMatrix& x,
                  const std::optional<std::string>& isa) {
    const int n = int(x.shape(0));
    const int64_t k = int64_t(x.shape(1)), width = padded(k);
    const Matrix weight = make_matrix(type, data, rows, k);
    require(n > 0, "a product needs a row of activations");
    const Kernels& kernels = chosen_kernels(isa);
    Memory q(n * width), scale(n * width / 8), sum(n * width / 8), isum(n * width / 4),
        scratch(kernel_scratch_bytes(k));
    const DefaultFloats floats;
    if (!is_float(weight.type))
        for (int t = 0; t < n; t++)
            kernels.quantize(x.data() + t * k, k, q.as<int8_t>() + t * width,
                             scale.as<float>() + t * width / 32, sum.as<float>() + t * width / 32,
                             isum.as<int32_t>() + t * width / 16);
    const Inputs inputs = {
        n, k, x.data(), q.as<int8_t>(), scale.as<float>(), sum.as<float>(), isum.as<int32_t>()};
    float* out;
    auto result = new_array<float>(out, n, rows);
    {
        nb::gil_scoped_release release;
        kernels.linear[type](weight, 0, rows, inputs, 0, n, out, rows, scratch.data());
    }
    return nb::cast(result);
}

nb::object dequantize(int type, const Bytes& data, int64_t rows, int64_t cols) {
    const Matrix weight = make_matrix(type, data, rows, cols);
    const DefaultFloats floats;
    float* out;
    auto result = new_array<float>(out, rows, cols);
    nb::gil_scoped_release release;
    for (int64_t r = 0; r < rows; r++) dequantize_row(weight.type, weight.row(r), cols, out + r * cols);
    nb::gil_scoped_acquire acquire;
    return nb::cast(result);
}

// Encodes a matrix of one type as another into `out`; -1, or the row that cannot be stored.
int64_t quantize(int from, const Bytes& data, int64_t rows, int64_t cols, int to, const WritableBytes& out,
                 int n_threads) {
    const Matrix matrix = make_matrix(from, data, rows, cols);
    const Kernels& kernels = chosen_kernels(std::nullopt);
    require(to >= 0 && to < kTypeCount && can_encode(kernels, Type(to)),
            "tensor type " + std::to_string(to) + " has no encoder");
    require(n_threads > 0 && n_threads <= kMaxThreads,
            "the number of threads must be 1 to " + std::to_string(kMaxThreads));
    const TypeFacts facts = type_facts(Type(to));
    require(cols % facts.block_size == 0 &&
                out.size() == size_t(rows) * size_t(cols / facts.block_size) * facts.block_bytes,
            "the result takes whole blocks of " + std::string(facts.name));
    nb::gil_scoped_release release;
    return quantize_matrix(kernels, matrix, Type(to), out.data(), n_threads);
}

double measured_read_bandwidth(const Bytes& data, int n_threads) {
    require(n_threads > 0 && n_threads <= kMaxThreads,
            "the number of threads must be 1 to " + std::to_string(kMaxThreads));
    const Kernels& kernels = chosen_kernels(std::nullopt);
    nb::gil_scoped_release release;
    return read_bandwidth(kernels, data.data(), data.size(), n_threads);
}

// ---- what is read under a budget (csrc/store/)

using PartArguments =
    std::tuple<std::string, uint64_t, size_t, size_t>;  // path, offset, bytes of a row, stride

int add_group(RowStore& store, int64_t n_rows, const std::vector<PartArguments>& parts) {
    require(n_rows > 0 && n_rows < INT32_MAX && !parts.empty() && !store.end(), "a group has rows and parts");
    std::vector<RowStore::Part> built;
    for (const auto& [path, offset, row_bytes, stride] : parts) {
        const StoredFile* file = store.file(path).get();
        require(row_bytes > 0 && row_bytes <= stride && stride < INT64_MAX / size_t(n_rows) &&
                    offset <= file->bytes() &&
                    stride * size_t(n_rows - 1) + row_bytes <= file->bytes() - offset,
                "rows of " + path + " lie beyond its end; download or convert it again");
        built.push_back({file, offset, row_bytes, stride});
    }
    return store.add_group(n_rows, std::move(built));
}

void allocate(RowStore& store, size_t bytes) {
    require(!store.end() && store.n_groups() > 0 && bytes >= store.least_bytes(),
            "a store needs room for its largest group");
    store.allocate(bytes);
}

std::tuple<int64_t, int64_t, int64_t, int64_t, double> counts_of(const RowStore& store) {
    const RowStore::Counts& c = store.counts();
    return {c.hits, c.misses, c.bytes_read, c.n_reads, c.seconds_waited};
}

// Fills arrays with bytes of a file, many reads at a time.
void read_arrays(Reader& reader, const std::string& path,
                 const std::vector<std::pair<uint64_t, WritableBytes>>& arrays) {
    const StoredFile file(path);
    Reader::Batch batch;
    for (const auto& [offset, array] : arrays) {
        require(offset <= file.bytes() && array.size() <= file.bytes() - offset,
                "bytes of " + path + " lie beyond its end; download or convert it again");
        add_reads(batch, &file, offset, array.size(), array.data(), 0);
    }
    std::exception_ptr raised;
    {
        nb::gil_scoped_release release;
        reader.begin(batch);
        const bool done = reader.wait(batch, [&] {
            nb::gil_scoped_acquire acquire;
            if (!raised && PyErr_CheckSignals() != 0) raised = std::make_exception_ptr(nb::python_error());
            return bool(raised);
        });
        if (done) file.check();
    }
    if (raised) std::rethrow_exception(raised);
}

void bind_store(nb::module_& m) {
    m.def("ring_allowed", &Reader::ring_allowed, "Whether the kernel gives this process a ring for reads.");
    nb::class_<Reader>(m, "Reader", "Reads pieces of files, many at a time (csrc/store/reader.h).")
        .def(nb::new_([](bool ring, int depth) {
                 require(depth > 0 && depth <= 256, "1 to 256 reads are in flight");
                 return std::make_shared<Reader>(ring ? Reader::Kind::Ring : Reader::Kind::Threads, depth);
             }),
             "ring"_a, "depth"_a)
        .def_prop_ro("ring", [](const Reader& reader) { return reader.kind() == Reader::Kind::Ring; })
        .def_prop_ro("depth", &Reader::depth)
        .def_prop_ro("buffer_bytes", &Reader::buffer_bytes)
        .def("read", &read_arrays, "path"_a, "arrays"_a)
        .def(
            "rate",
            [](Reader& reader, const std::string& path, uint32_t size, double seconds) {
                require(size > 0 && size % kReadAlign == 0 && size <= Reader::kMostBytes,
                        "reads are whole pages, of 512 KB at most");
                nb::gil_scoped_release release;
                return read_rate(StoredFile(path), reader, size, seconds);
            },
            "path"_a, "size"_a, "seconds"_a)
        .def("inject_faults", &Reader::inject_faults, "share"_a, "seed"_a);
    m.def(
        "reads_directly", [](const std::string& path) { return StoredFile(path).direct(); }, "path"_a,
        "Whether a file can be read past the page cache.");
    nb::class_<StoredRows>(m, "StoredRows", "Rows of a store, where a plan takes the bytes of a matrix.")
        .def_ro("store", &StoredRows::store)
        .def_ro("group", &StoredRows::group);
    nb::class_<RowStore>(m, "RowStore", "Rows that are read when they are needed (csrc/store/store.h).")
        .def(nb::new_([](std::shared_ptr<Reader> reader, uint64_t gap, int half_life) {
                 require(half_life >= 0 && (half_life & (half_life - 1)) == 0 && gap <= Reader::kMostBytes,
                         "a credit halves in a power of two of requests");
                 return std::make_shared<RowStore>(std::move(reader), gap, half_life);
             }),
             "reader"_a, "gap"_a, "half_life"_a)
        .def("group", &add_group, "n_rows"_a, "parts"_a)
        .def("allocate", &allocate, "bytes"_a)
        .def_prop_ro("least_bytes", &RowStore::least_bytes)
        .def_prop_ro("most_bytes", &RowStore::most_bytes)
        .def(
            "rows",
            [](std::shared_ptr<RowStore> store, int group, int part) {
                require(group >= 0 && group < store->n_groups() && part >= 0 && part < store->n_parts(group),
                        "there is no such part");
                return StoredRows{std::move(store), group, part};
            },
            "group"_a, "part"_a)
        .def("counts", &counts_of)
        .def("check", &RowStore::check);
}

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (const char* name : {"avx512", "avx2", "neon", "scalar"}) {
        const char* error = nullptr;
        if (select_kernels(name, &error)) names.push_back(name);
    }
    return names;
}

std::unique_ptr<Replacement> make_replacement(int n_layers, int n_ids, const std::vector<int32_t>& slots,
                                              int half_life) {
    require(n_layers > 0 && n_ids > 0 && int64_t(n_layers) * n_ids < INT32_MAX,
            "a cache needs layers and entries");
    require(slots.size() == 1 || slots.size() == size_t(n_layers),
            "slots are those of all layers or of each one");
    int64_t n_slots = 0;
    for (int32_t n : slots) {
        require(n >= 0, "there is no negative number of slots");
        n_slots += n;
    }
    require(n_slots < INT32_MAX, "a cache has fewer than 2^31 slots");
    require(half_life >= 0 && half_life <= 1 << 20 && (half_life & (half_life - 1)) == 0,
            "a half-life is a power of two, or 0");
    return std::make_unique<Replacement>(n_layers, n_ids, slots, half_life);
}

void require_entry(const Replacement& policy, int layer, int32_t id) {
    require(layer >= 0 && layer < policy.n_layers(), "there is no layer " + std::to_string(layer));
    require(id >= 0 && id < policy.n_ids(), "there is no entry " + std::to_string(id));
}

// int32 [3][n]: slots, whether each is a hit, what was evicted.
nb::object looked_up(Replacement& policy, int layer, const Ints& ids, bool credit, bool keeps_better) {
    const size_t n = ids.size();
    require_entry(policy, layer, 0);
    for (size_t i = 0; i < n; ++i) require_entry(policy, layer, ids.data()[i]);
    std::vector<Replacement::Place> places(n);
    policy.lookup(layer, ids.data(), n, credit, places.data(), keeps_better);
    auto* answer = new int32_t[3 * n + 1];
    nb::capsule owner(answer, [](void* p) noexcept { delete[] static_cast<int32_t*>(p); });
    for (size_t i = 0; i < n; ++i) {
        answer[i] = places[i].slot;
        answer[n + i] = places[i].hit;
        answer[2 * n + i] = places[i].evicted;
    }
    return nb::cast(nb::ndarray<nb::numpy, int32_t>(answer, {3, n}, owner));
}

std::vector<int64_t> replayed(Replacement& policy, const IntCube& ids, size_t first, bool by_layer,
                              bool keeps_better) {
    require(ids.shape(1) == size_t(policy.n_layers()), "a trace has as many layers as its cache");
    for (size_t i = 0; i < ids.size(); ++i) require_entry(policy, 0, ids.data()[i]);
    std::vector<int64_t> hits(ids.shape(1));
    nb::gil_scoped_release release;
    policy.replay(ids.data(), ids.shape(0), ids.shape(2), first, by_layer, keeps_better, hits.data());
    return hits;
}

}  // namespace

NB_MODULE(_core, m) {
    m.doc() = "The native core of hotset: kernels, the plan of a step and the threads that run it.";
    m.attr("PAGE_SIZE") = kPageSize;
    nb::register_exception_translator(&translate);
    // Numbers, not objects: maps live as long as any view of them, which may be to the very end.
    m.def(
        "guard_file",
        [](const Bytes& mapping, int descriptor) {
            return reinterpret_cast<uintptr_t>(guard_file(mapping.data(), mapping.size(), descriptor));
        },
        "mapping"_a, "descriptor"_a,
        "Keeps a mapped file that is cut short from ending the process (csrc/mapped.h); a number for the "
        "other two.");
    m.def(
        "is_cut", [](uintptr_t file) { return is_cut(reinterpret_cast<GuardedFile*>(file)); }, "file"_a,
        "Whether a guarded file is shorter than its map, or a page of it could not be read.");
    m.def(
        "unguard_file", [](uintptr_t file) { unguard_file(reinterpret_cast<GuardedFile*>(file)); }, "file"_a,
        "Ends the guard, once.");
    nb::class_<Runtime>(
        m, "Runtime",
        "The team of threads and its memory, which plans and cold services share, a step at a "
        "time (csrc/runtime.h).")
        .def(nb::new_(&make_runtime), "n_threads"_a)
        .def_prop_ro("n_threads", &Runtime::n_threads)
        .def("close", &Runtime::close, nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "isa", [] { return std::string(chosen_kernels(std::nullopt).isa); },
        "The instruction set whose kernels are used: HOTSET_ISA, or the best that this processor has.");
    m.def("available_isas", &available_isas, "The instruction sets that this processor can run, best first.");
    m.def("read_bandwidth", &measured_read_bandwidth, "data"_a, "n_threads"_a,
          "Reads the bytes, a small array several times; bytes per second.");
    m.def("linear", &linear, "type"_a, "data"_a, "rows"_a, "x"_a, "isa"_a.none() = nb::none(),
          "x [n, k] times a matrix of `rows` rows of k weights of a GGML type, by the kernel that a plan "
          "would use.");
    m.def("dequantize", &dequantize, "type"_a, "data"_a, "rows"_a, "cols"_a,
          "Decodes a matrix to float32 [rows, cols].");
    m.def(
        "quantize", &quantize, "from_type"_a, "data"_a, "rows"_a, "cols"_a, "to_type"_a, "out"_a,
        "n_threads"_a,
        "Encodes a matrix of one GGML type as another into `out`; -1, or a row that holds a value which the "
        "type cannot store.");
    nb::class_<Replacement>(m, "Replacement",
                            "Which entries a cache of few slots holds (csrc/replacement.h).")
        .def(nb::new_(&make_replacement), "n_layers"_a, "n_ids"_a, "slots"_a, "half_life"_a)
        .def_prop_ro("n_slots", &Replacement::n_slots)
        .def("begin_step", &Replacement::begin_step)
        .def("lookup", &looked_up, "layer"_a, "ids"_a, "credit"_a, "keeps_better"_a)
        .def(
            "drop",
            [](Replacement& policy, int layer, int32_t id) {
                require_entry(policy, layer, id);
                policy.drop(layer, id);
            },
            "layer"_a, "id"_a)
        .def(
            "find",
            [](const Replacement& policy, int layer, int32_t id) {
                require_entry(policy, layer, id);
                return policy.find(layer, id);
            },
            "layer"_a, "id"_a)
        .def("replay", &replayed, "ids"_a, "first"_a, "by_layer"_a, "keeps_better"_a);
    bind_store(m);
    nb::class_<Cold>(m, "Cold", "The CPU's half of a hybrid engine (csrc/cold.h).")
        .def(nb::init<int64_t, int, std::shared_ptr<Runtime>, double, const std::optional<std::string>&>(),
             "width"_a, "max_tokens"_a, "runtime"_a, "timeout"_a, "isa"_a.none() = nb::none())
        .def("layer", &Cold::layer, "number"_a, "gate"_a.none(), "up"_a, "n_neurons"_a, "activation"_a,
             "up_activation"_a.none(), "down"_a, "cold"_a, "predicted"_a)
        .def("start", &Cold::start)
        .def("memory", [](nb::handle self) { return nb::cast<Cold&>(self).memory(self); })
        .def("offsets", &Cold::offsets)
        .def("begin", &Cold::begin, "n_tokens"_a)
        .def("end", &Cold::end)
        .def("poison", &Cold::poison, "reason"_a)
        .def("poisoned", &Cold::poisoned)
        .def("close", &Cold::close)
        .def("post", &Cold::post, "layer"_a)
        .def("wait", &Cold::wait, "layer"_a)
        .def_static("host_functions", &Cold::host_functions)
        .def("host_argument", &Cold::host_argument, "layer"_a)
        .def("counts", &Cold::counts)
        .def("seconds", &Cold::seconds);
    nb::class_<PlanBuilder>(m, "Plan",
                            "The operations of one step; built once, run once per step (csrc/plan.h).")
        .def(nb::init<int, int, int, std::shared_ptr<Runtime>, const std::optional<std::string>&>(),
             "max_tokens"_a, "n_pages"_a, "max_pages"_a, "runtime"_a, "isa"_a.none() = nb::none())
        .def("buffer", &PlanBuilder::buffer, "width"_a, "outputs"_a)
        .def("rope", &PlanBuilder::rope, "neox"_a, "n_rot"_a, "frequencies"_a, "magnitude"_a)
        .def("embed", &PlanBuilder::embed, "type"_a, "data"_a, "rows"_a, "positions"_a, "first_row"_a,
             "out"_a)
        .def("input", &PlanBuilder::input, "out"_a)
        .def("select", &PlanBuilder::select, "x"_a, "out"_a)
        .def("norm", &PlanBuilder::norm, "layer"_a, "weight"_a, "bias"_a.none(), "eps"_a, "n_head"_a, "x"_a,
             "out"_a)
        .def("linear", &PlanBuilder::linear, "x"_a, "norm"_a.none(), "parts"_a, "residual"_a, "gated"_a,
             "activation"_a.none(), "cutoff"_a = 0.0f,
             "channels"_a = std::vector<std::optional<PlanBuilder::Channels>>())
        .def("neurons", &PlanBuilder::neurons, "x"_a, "norm"_a.none(), "gate"_a.none(), "up"_a,
             "activation"_a, "up_activation"_a.none(), "predictor"_a.none(), "sparse"_a, "out"_a,
             "cutoffs"_a = std::tuple<float, float, float>(),
             "channels"_a = std::vector<std::optional<PlanBuilder::Channels>>())
        .def("axpy", &PlanBuilder::axpy, "x"_a, "type"_a, "data"_a, "scales"_a.none(), "bias"_a.none(),
             "residual"_a, "sparse"_a, "out"_a)
        .def("fetch", &PlanBuilder::fetch, "store"_a, "group"_a, "which"_a, "by"_a, "threshold"_a, "first"_a)
        .def("route", &PlanBuilder::route, "x"_a, "n_used"_a, "scoring"_a, "bias"_a.none(), "normalised"_a,
             "scale"_a, "n_groups"_a, "n_groups_used"_a, "group_best"_a, "out"_a)
        .def("expert_neurons", &PlanBuilder::expert_neurons, "x"_a, "route"_a, "n_expert"_a, "gate"_a.none(),
             "up"_a, "activation"_a.none(), "up_activation"_a.none(), "predictor"_a.none(), "sparse"_a,
             "out"_a)
        .def("expert_sum", &PlanBuilder::expert_sum, "x"_a, "route"_a, "n_expert"_a, "down"_a, "residual"_a,
             "by_neuron"_a, "apart"_a, "sparse"_a, "out"_a)
        .def("sign_scores", &PlanBuilder::sign_scores, "x"_a, "rows"_a, "bias"_a.none(), "out"_a)
        .def("mask", &PlanBuilder::mask, "x"_a, "scores"_a, "threshold"_a, "first"_a, "out"_a)
        .def("op_seconds", &PlanBuilder::op_seconds)
        .def("op_counts", &PlanBuilder::op_counts)
        .def("rotate", &PlanBuilder::rotate, "x"_a, "out"_a, "n_head"_a, "head_dim"_a, "rope"_a, "first"_a)
        .def("heads", &PlanBuilder::heads, "x"_a, "shared"_a, "n_head"_a, "first"_a, "out"_a)
        .def("transposed_heads", &PlanBuilder::transposed_heads, "x"_a, "type"_a, "data"_a, "n_head"_a,
             "out"_a)
        .def("attention", &PlanBuilder::attention, "q"_a, "k"_a, "v"_a, "out"_a, "n_head"_a, "n_head_kv"_a,
             "head_dim"_a, "head_dim_v"_a, "scale"_a, "softcap"_a, "window"_a, "rope"_a, "q_norm"_a.none(),
             "k_norm"_a.none(), "sinks"_a.none(), "kv_type"_a, "k_cache"_a, "v_cache"_a, "k_scale"_a.none(),
             "v_scale"_a.none())
        .def("cutoff", &PlanBuilder::cutoff, "x"_a, "threshold"_a, "out"_a)
        .def("short_conv", &PlanBuilder::short_conv, "x"_a, "weight"_a, "states"_a, "out"_a)
        .def("delta_net", &PlanBuilder::delta_net, "x"_a, "alpha"_a, "beta"_a, "rate"_a, "step"_a, "n_head"_a,
             "n_head_k"_a, "dim_k"_a, "dim_v"_a, "tiled"_a, "states"_a, "out"_a)
        .def("activate", &PlanBuilder::activate, "kind"_a, "threshold"_a, "x"_a, "out"_a)
        .def("add", &PlanBuilder::add, "a"_a, "b"_a, "out"_a)
        .def("multiply", &PlanBuilder::multiply, "a"_a, "b"_a, "out"_a)
        .def("finish", &PlanBuilder::finish)
        .def("cancel", &PlanBuilder::cancel)
        .def("run", &PlanBuilder::run, "tokens"_a, "positions"_a, "sequences"_a, "pages"_a, "outputs"_a,
             "x"_a.none() = nb::none(), "cut"_a.none() = nb::none(), "states"_a.none() = nb::none(),
             "saves"_a.none() = nb::none())
        .def(
            "rows", [](nb::handle self, int id) { return nb::cast<PlanBuilder&>(self).rows(self, id); },
            "buffer"_a)
        .def_prop_ro("isa", &PlanBuilder::isa)
        .def_prop_ro("nbytes", &PlanBuilder::bytes);
}
