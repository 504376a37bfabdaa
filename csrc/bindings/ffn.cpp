// Matrix products, neurons, experts and what selects them.
#include "bindings/plan_builder.h"

namespace hotset::bindings {
namespace {

// Of neurons or experts those alone whose rows a store missed, or had.
template <class Facts>
void set_missed(Facts& facts, const Rows& up, int64_t n, bool which) {
    const auto* const rows = std::get_if<StoredRows>(&up);
    require(rows && rows->store->n_rows(rows->group) == n, "a store says what it missed");
    facts.missed = rows->store->missed(rows->group), facts.missed_which = which;
}

}  // namespace

void PlanBuilder::linear(int x, const NormArguments& norm, const std::vector<Part>& parts, int residual,
                         bool gated, const std::optional<ActivationArguments>& activation,
                         const std::tuple<float, float, float>& cutoffs,
                         const std::vector<std::optional<Channels>>& channels, int largest) {
    require(!parts.empty() && parts.size() <= kMaxChunks && (!gated || (parts.size() == 2 && activation)) &&
                (residual < 0 || parts.size() == 1) && (gated || !activation || parts.size() == 1),
            "a matrix product has parts");
    std::vector<LinearPart> built;
    for (const Part& part : parts) {
        require(std::holds_alternative<Bytes>(std::get<1>(part)), "a product of all rows has them in order");
        built.push_back(make_part(part, x));
    }
    require(!gated || built[0].weight.rows == built[1].weight.rows, "gate and up have the same rows");
    LinearTail tail;
    const auto& [cutoff, gate_cutoff, value_cutoff] = cutoffs;
    if (activation)
        tail = {gated ? LinearTail::Gated : LinearTail::Activated, checked_activation(activation->first),
                activation->second, gate_cutoff, value_cutoff};
    require(activation || (gate_cutoff == 0.0f && value_cutoff == 0.0f), "what is activated is cut");
    if (residual >= 0) {
        same_rows(x, residual);
        require(width(residual) == width(built[0].out) && residual != built[0].out,
                "a residual has the width of the output");
    }
    require(channels.empty() || channels.size() == parts.size(), "every part has channels or none");
    if (largest >= 0) {
        same_rows(built[0].out, largest);
        require(parts.size() == 1 && channels.empty() && width(largest) * kLogitGroup == width(built[0].out),
                "one product by rows has a largest value in each group");
        built[0].largest = largest;
    }
    std::vector<ChannelMatrix> by_channel;
    for (size_t p = 0; p < channels.size(); p++)
        by_channel.push_back(channels[p] ? make_channels(*channels[p], built[p].weight) : ChannelMatrix());
    plan_->add_linear(x, make_norm(norm, x), std::move(built), residual, tail, cutoff, std::move(by_channel));
}

void PlanBuilder::neurons(int x, const NormArguments& norm, const std::optional<Part>& gate, const Part& up,
                          const ActivationArguments& activation, std::optional<int> up_activation,
                          const std::optional<std::tuple<int, float, int64_t>>& predictor, bool sparse,
                          int out, const std::tuple<float, float, float>& cutoffs,
                          const std::vector<std::optional<Channels>>& channels, std::optional<bool> missed) {
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
    if (missed) set_missed(facts, std::get<1>(up), width(out), *missed);
    plan_->add_neurons(std::move(facts));
}

void PlanBuilder::axpy(int x, int type, const Rows& data, const std::optional<Bytes>& scales,
                       const std::optional<Floats>& bias, int residual, bool sparse, int out) {
    same_rows(x, out);
    require(!bias || int64_t(bias->size()) == width(out), "a bias has the width of its output");
    const Matrix weight = make_matrix(type, data, width(x), width(out), scales, weights_, stores_);
    if (residual >= 0) {
        same_rows(x, residual);
        require(width(residual) == width(out) && residual != out, "a residual has the width of the output");
    }
    plan_->add_axpy(x, {weight, to_vector(bias), out}, residual, sparse);
}

void PlanBuilder::fetch(std::shared_ptr<RowStore> store, int group, int which, int by, float threshold,
                        int64_t first, bool waits) {
    require(group >= 0 && group < store->n_groups() && store->end(), "there is no such group of rows");
    require(which >= FetchFacts::All && which <= FetchFacts::Tokens, "there is no such way to fetch");
    const int64_t n_rows = store->n_rows(group);
    FetchFacts facts;
    facts.store = store.get(), facts.group = group, facts.which = FetchFacts::Which(which);
    facts.threshold = threshold, facts.first = first, facts.waits = waits;
    if (which == FetchFacts::Selected)
        require(first >= 0 && width(by) == n_rows - first, "a predictor has a score for each neuron");
    if (which == FetchFacts::NonZero) require(width(by) == n_rows, "a neuron has a value");
    if (which == FetchFacts::Routed) facts.n_used = check_route(by, int(n_rows), by);
    if (which == FetchFacts::Tokens)
        require(plan_->max_tokens() <= store->at_once(group) || store->is_whole(),
                "a step has no more tokens than a store has room for");
    facts.by = checked(by);
    stores_.push_back(std::move(store));
    plan_->add_fetch(facts);
}

void PlanBuilder::finish_fetch(std::shared_ptr<RowStore> store, const std::vector<Bytes>& next) {
    std::vector<std::pair<const uint8_t*, size_t>> pieces;
    for (const Bytes& one : next) {
        pieces.emplace_back(one.data(), one.size());
        weights_.push_back(one);
    }
    plan_->add_finish_fetch(*store, std::move(pieces));
    stores_.push_back(std::move(store));
}

void PlanBuilder::await_piece(std::shared_ptr<Stream> stream, int piece, bool waits) {
    require(stream->allocated() && piece >= 0 && piece < stream->n_pieces(), "there is no such piece");
    plan_->add_await_piece(*stream, piece, waits);
    streams_.push_back(std::move(stream));
}

void PlanBuilder::route(int x, int n_used, int scoring, const std::optional<Floats>& bias, bool normalised,
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

void PlanBuilder::expert_neurons(int x, int route, int n_expert, const std::optional<ExpertPart>& gate,
                                 const ExpertPart& up, const std::optional<ActivationArguments>& activation,
                                 const std::optional<ActivationArguments>& up_activation,
                                 const std::optional<std::pair<int, float>>& predictor, float cutoff,
                                 bool sparse, int out, std::optional<bool> missed) {
    same_rows(x, out);
    const int n_used = check_route(route, n_expert, out);
    require(width(out) % n_used == 0, "experts have neurons of their own");
    require((!gate || activation) && (gate || !up_activation), "a gate has an activation");
    const int64_t rows = width(out) / n_used;
    ExpertFacts facts;
    facts.x = x, facts.route = route, facts.out = out, facts.n_used = n_used, facts.sparse = sparse;
    if (gate) facts.gate = make_experts(*gate, n_expert, rows, width(x), rows, weights_, stores_);
    facts.up = make_experts(up, n_expert, rows, width(x), rows, weights_, stores_);
    require(cutoff >= 0.0f && (activation || cutoff == 0.0f), "what is cut is an activation");
    facts.cutoff = cutoff;
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
        require(width(facts.scores) == width(out) && activation, "a predictor has a score for each neuron");
    }
    if (missed) set_missed(facts, std::get<1>(std::get<0>(up).front()), n_expert, *missed);
    plan_->add_expert_neurons(std::move(facts));
}

void PlanBuilder::expert_sum(int x, int route, int n_expert, const ExpertPart& down, int residual,
                             bool by_neuron, bool apart, bool sparse, int out) {
    same_rows(x, out);
    const int n_used = check_route(route, n_expert, out);
    require(width(x) % n_used == 0, "experts have neurons of their own");
    if (residual >= 0) {
        same_rows(x, residual);
        require(width(residual) == width(out) && residual != out, "a residual has the width of the output");
    }
    require(!apart || (!by_neuron && residual < 0 && width(out) % n_used == 0),
            "products side by side are by output, and not added to anything");
    const int64_t neurons = width(x) / n_used, outputs = width(out) / (apart ? n_used : 1);
    const int64_t rows = by_neuron ? neurons : outputs, cols = by_neuron ? outputs : neurons;
    plan_->add_expert_sum({x, route, residual, out, n_used,
                           make_experts(down, n_expert, rows, cols, outputs, weights_, stores_), by_neuron,
                           apart, sparse});
}

void PlanBuilder::mask(int x, int scores, float threshold, int64_t first, int out) {
    require(width(x) == width(out) && first >= 0 && width(scores) == width(out) - first,
            "a mask has a score for each column from `first` on");
    same_rows(x, out);
    same_rows(scores, out);
    plan_->add_mask(x, scores, threshold, first, out);
}

void PlanBuilder::sign_scores(int x, const Bytes& rows, const std::optional<Floats>& bias, int out) {
    same_rows(x, out);
    require(int64_t(rows.size()) == width(out) * ((width(x) + 7) / 8), "signs are a bit per channel and row");
    require(!bias || int64_t(bias->size()) == width(out), "a bias has the width of its output");
    weights_.push_back(rows);
    plan_->add_sign_scores(x, rows.data(), to_vector(bias), out);
}

LinearPart PlanBuilder::make_part(const Part& part, int x) {
    const auto& [type, data, bias, out] = part;
    same_rows(x, out);
    require(!bias || int64_t(bias->size()) == width(out), "a bias has the width of its output");
    const Matrix weight = make_matrix(type, data, width(out), width(x), std::nullopt, weights_, stores_);
    return {weight, to_vector(bias), out};
}

ChannelMatrix PlanBuilder::make_channels(const Channels& channels, const Matrix& by_row) {
    const auto& [data, cols, tile, first, below] = channels;
    require(plan_->kernels().channel_linear[int(by_row.type)],
            std::string(type_facts(by_row.type).name) + " is not laid out by channel");
    require(cols > 0 && cols % 32 == 0 && first >= 0 && first % 32 == 0 && by_row.rows % 32 == 0 &&
                first + by_row.rows <= cols && tile > 0 && tile % 32 == 0,
            "outputs of a matrix by channel are whole groups of 32");
    const ChannelFormat format = channel_format(by_row.type);
    require(by_row.cols % 32 == 0 && data.size() == size_t(format.output_bytes(by_row.cols) * cols),
            "a matrix by channel has the numbers of its rows");
    weights_.push_back(data);
    ChannelMatrix made;
    made.type = by_row.type, made.data = data.data(), made.rows = by_row.cols, made.cols = cols;
    made.tile = tile, made.first_col = first, made.below = below;
    return made;
}

int PlanBuilder::check_route(int route, int n_expert, int out) const {
    same_rows(route, out);
    require(n_expert > 0 && n_expert <= kMaxExperts && width(route) % 2 == 0 && width(route) / 2 <= n_expert,
            "a route names some of the experts");
    return int(width(route) / 2);
}

}  // namespace hotset::bindings
