// What a plan begins and ends with, what is done row by row, a step, and what is known of the last one.
#include "bindings/plan_builder.h"

#include <algorithm>

namespace hotset::bindings {

PlanBuilder::PlanBuilder(int max_tokens, int n_pages, int max_pages, std::shared_ptr<Runtime> runtime,
                         const std::optional<std::string>& isa)
    : n_pages_(n_pages) {
    require(max_tokens > 0 && n_pages > 0 && max_pages > 0, "a plan needs tokens and pages");
    plan_ = std::make_unique<Plan>(chosen_kernels(isa), max_tokens, max_pages, std::move(runtime));
}

PlanBuilder::~PlanBuilder() {
    // Waits for late threads of the team: whoever runs a step of another plan must get at the GIL.
    nb::gil_scoped_release release;
    plan_.reset();
}

int PlanBuilder::buffer(int64_t width, bool outputs) {
    require(!finished_ && width > 0, "a buffer needs a width");
    widths_.push_back(width);
    outputs_.push_back(outputs);
    return plan_->add_buffer(width, outputs);
}

int PlanBuilder::rope(bool neox, int n_rot, const std::vector<double>& frequencies, float magnitude) {
    require(n_rot > 0 && n_rot % 2 == 0 && int(frequencies.size()) == n_rot / 2,
            "a rope needs n_rot / 2 frequencies");
    return plan_->add_rope({neox, n_rot, magnitude, frequencies});
}

void PlanBuilder::embed(int type, const Rows& data, int64_t rows, bool positions, int first_row, int out) {
    const Matrix weight = make_matrix(type, data, rows, width(out), std::nullopt, weights_, stores_);
    require(!positions || !weight.places, "rows of positions are in memory");
    require(first_row >= 0 && first_row < rows && (positions || first_row == 0), "rows begin in the matrix");
    int64_t& limit = positions ? n_positions_ : n_vocab_;
    limit = limit ? std::min(limit, rows - first_row) : rows - first_row;
    plan_->add_embed(weight, positions, first_row, out);
}

void PlanBuilder::input(int out) {
    require(!finished_ && input_ < 0 && !outputs_[checked(out)], "a plan has one input, a row per token");
    input_ = out;
}

void PlanBuilder::select(int x, int out) {
    require(width(x) == width(out) && !outputs_[x] && outputs_[out],
            "select goes from tokens to outputs of one width");
    plan_->add_select(x, out);
}

void PlanBuilder::norm(bool layer, const Floats& weight, const std::optional<Floats>& bias, float eps,
                       int n_head, int x, int out) {
    require(n_head > 0 && width(x) % n_head == 0 && width(x) == width(out), "a norm keeps its width");
    same_rows(x, out);
    plan_->add_norm(make_norm(layer, weight, bias, eps, width(x) / n_head), n_head, x, out);
}

void PlanBuilder::activate(int kind, float threshold, int x, int out) {
    require(width(x) == width(out), "an activation keeps its width");
    same_rows(x, out);
    plan_->add_activate(checked_activation(kind), threshold, x, out);
}

void PlanBuilder::cutoff(int x, float threshold, int out) {
    require(width(x) == width(out), "a cutoff keeps its width");
    same_rows(x, out);
    require(!outputs_[x], "what is cut belongs to all tokens");
    plan_->add_cutoff(x, threshold, out);
}

void PlanBuilder::multiply(int a, int b, int out) {
    check_pair(a, width(b) == 1 ? a : b, out);
    same_rows(a, b);
    plan_->add_multiply(a, b, out);
}

void PlanBuilder::finish() {
    nb::gil_scoped_release release;
    plan_->finish();
    finished_ = true;
}

void PlanBuilder::run(const Ints& tokens, const Ints& positions, const Ints& sequences,
                      const IntMatrix& pages, const Ints& outputs, const std::optional<FloatMatrix>& x,
                      const std::optional<Bytes>& cut, const std::optional<Ints>& states,
                      const std::optional<Ints>& saves) {
    require(finished_, "the plan is not finished");
    const int n = int(tokens.size()), n_sequences = int(pages.shape(0)), max_pages = int(pages.shape(1));
    require(n > 0 && n <= plan_->max_tokens(),
            "a step takes 1 to " + std::to_string(plan_->max_tokens()) + " tokens, not " + std::to_string(n));
    require(int(positions.size()) == n && int(sequences.size()) == n,
            "every token has a position and a sequence");
    require(max_pages <= plan_->max_pages(), "a sequence has more pages than the plan allows");
    for (int t = 0; t < n; t++) {
        const int token = tokens.data()[t], position = positions.data()[t], sequence = sequences.data()[t];
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
            if (!raised && PyErr_CheckSignals() != 0) raised = std::make_exception_ptr(nb::python_error());
            return bool(raised);
        };
        done = plan_->run(&poll, tokens.data(), positions.data(), sequences.data(), n, pages.data(),
                          n_sequences, max_pages, outputs.data(), n_outputs, cut ? cut->data() : nullptr,
                          has_states_ ? states->data() : nullptr, has_states_ ? saves->data() : nullptr);
    }
    if (raised) std::rethrow_exception(raised);
    if (!done) throw StepCancelled();
}

nb::ndarray<nb::numpy, float, nb::ndim<2>> PlanBuilder::rows(nb::handle self, int id) {
    const Buffer& buffer = plan_->buffer(checked(id));
    return {buffer.row(0), {size_t(buffer.outputs ? n_outputs_ : n_tokens_), size_t(buffer.width)}, self};
}

int PlanBuilder::checked(int id) const {
    require(id >= 0 && id < int(widths_.size()), "there is no buffer " + std::to_string(id));
    return id;
}

void PlanBuilder::check_states(const Ints& positions, const Ints& sequences, int n_sequences,
                               const std::optional<Ints>& states, const std::optional<Ints>& saves) const {
    const int n = int(sequences.size());
    require(states && saves && int(states->size()) == n_sequences && int(saves->size()) == n,
            "a model with recurrent layers needs slots for the states of a batch");
    std::vector<char> used(n_states_), seen(n_sequences);
    const auto use = [&](int slot) -> char* {
        require(slot >= -1 && slot < n_states_,
                "a state of the batch lies outside the " + std::to_string(n_states_) + " slots of the cache");
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

void PlanBuilder::same_rows(int a, int b) const {
    require(outputs_[checked(a)] == outputs_[checked(b)], "rows of tokens and of outputs do not mix");
}

void PlanBuilder::check_pair(int a, int b, int out) const {
    require(width(a) == width(b) && width(a) == width(out), "both sides have the same width");
    same_rows(a, b);
    same_rows(a, out);
}

Norm PlanBuilder::make_norm(const NormArguments& norm, int x) const {
    if (!norm) return {};
    const auto& [layer, weight, bias, eps] = *norm;
    return make_norm(layer, weight, bias, eps, width(x));
}

Norm PlanBuilder::make_norm(bool layer, const Floats& weight, const std::optional<Floats>& bias, float eps,
                            int64_t width) {
    require(int64_t(weight.size()) == width && (!bias || int64_t(bias->size()) == width),
            "a norm has the width of its input");
    return {layer, to_vector(weight), to_vector(bias), eps};
}

nb::ndarray<nb::numpy, double, nb::ndim<1>> PlanBuilder::op_seconds(const Ints& cells, int n_cells) const {
    check_cells(cells, 1, n_cells);
    double* out;
    auto result = new_array<double>(out, n_cells);
    std::fill_n(out, n_cells, 0.0);
    const std::vector<double> seconds = plan_->op_seconds();
    for (int i = 0; i < plan_->n_ops(); i++) out[cells.data()[i]] += seconds[i];
    return result;
}

nb::ndarray<nb::numpy, int64_t, nb::ndim<1>> PlanBuilder::op_counts(const Ints& cells, int n_cells) const {
    constexpr int kAhead = 16;  // operations whose counters are fetched: weights have driven them out
    check_cells(cells, 6, n_cells);
    int64_t* out;
    auto result = new_array<int64_t>(out, n_cells);
    std::fill_n(out, n_cells, int64_t(0));
    const int32_t* cell = cells.data();
    for (int i = 0; i < plan_->n_ops(); i++) {
        prefetch_line(&plan_->op(std::min(i + kAhead, plan_->n_ops() - 1)).counters);
        const FfnCounts c = plan_->op(i).counters.get();
        for (const int64_t count : {c.selected, c.active, c.gate_rows, c.up_rows, c.down_rows, c.left_out})
            out[*cell++] += count;
    }
    return result;
}

void PlanBuilder::check_cells(const Ints& cells, int n_each, int n_cells) const {
    require(int64_t(cells.size()) == int64_t(plan_->n_ops()) * n_each,
            "there are " + std::to_string(n_each) + " cells for each operation");
    const int32_t* cell = cells.data();
    require(std::all_of(cell, cell + cells.size(), [&](int32_t c) { return c >= 0 && c < n_cells; }),
            "a cell lies outside of the sums");
}

void bind_plan(nb::module_& m) {
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
             "activation"_a.none(), "cutoffs"_a = std::tuple<float, float, float>(),
             "channels"_a = std::vector<std::optional<PlanBuilder::Channels>>(), "largest"_a = -1)
        .def("neurons", &PlanBuilder::neurons, "x"_a, "norm"_a.none(), "gate"_a.none(), "up"_a,
             "activation"_a, "up_activation"_a.none(), "predictor"_a.none(), "sparse"_a, "out"_a,
             "cutoffs"_a = std::tuple<float, float, float>(),
             "channels"_a = std::vector<std::optional<PlanBuilder::Channels>>(), "missed"_a = nb::none())
        .def("axpy", &PlanBuilder::axpy, "x"_a, "type"_a, "data"_a, "scales"_a.none(), "bias"_a.none(),
             "residual"_a, "sparse"_a, "out"_a)
        .def("fetch", &PlanBuilder::fetch, "store"_a, "group"_a, "which"_a, "by"_a, "threshold"_a, "first"_a,
             "waits"_a)
        .def("finish_fetch", &PlanBuilder::finish_fetch, "store"_a, "next"_a)
        .def("await_piece", &PlanBuilder::await_piece, "stream"_a, "piece"_a, "waits"_a)
        .def("route", &PlanBuilder::route, "x"_a, "n_used"_a, "scoring"_a, "bias"_a.none(), "normalised"_a,
             "scale"_a, "n_groups"_a, "n_groups_used"_a, "group_best"_a, "out"_a)
        .def("expert_neurons", &PlanBuilder::expert_neurons, "x"_a, "route"_a, "n_expert"_a, "gate"_a.none(),
             "up"_a, "activation"_a.none(), "up_activation"_a.none(), "predictor"_a.none(), "cutoff"_a,
             "sparse"_a, "out"_a, "missed"_a.none())
        .def("expert_sum", &PlanBuilder::expert_sum, "x"_a, "route"_a, "n_expert"_a, "down"_a, "residual"_a,
             "by_neuron"_a, "apart"_a, "sparse"_a, "out"_a)
        .def("sign_scores", &PlanBuilder::sign_scores, "x"_a, "rows"_a, "bias"_a.none(), "out"_a)
        .def("mask", &PlanBuilder::mask, "x"_a, "scores"_a, "threshold"_a, "first"_a, "out"_a)
        .def("op_seconds", &PlanBuilder::op_seconds, "cells"_a, "n_cells"_a)
        .def("op_counts", &PlanBuilder::op_counts, "cells"_a, "n_cells"_a)
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
        .def_prop_ro("nbytes", &PlanBuilder::bytes)
        .def_prop_ro("own_nbytes", &PlanBuilder::own_bytes);
}

}  // namespace hotset::bindings
