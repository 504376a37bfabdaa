// The plan's beginning and end, the checks of a step, and the counters of the latest one.
#include "bindings/plan_builder.h"

#include <algorithm>

#include "bindings/python_facts.h"

namespace hotset::bindings {

PlanBuilder::PlanBuilder(int max_tokens, int n_kv_blocks, int max_kv_blocks, std::shared_ptr<Runtime> runtime,
                         const std::optional<std::string>& isa) {
    require(max_tokens > 0 && n_kv_blocks > 0 && max_kv_blocks > 0, "a plan needs tokens and KV blocks");
    plan_ = std::make_unique<Plan>(chosen_kernels(isa), max_tokens, max_kv_blocks, std::move(runtime));
    plan_->limits().n_kv_blocks = n_kv_blocks;
}

PlanBuilder::~PlanBuilder() {
    // Waits for stragglers of the thread pool. A thread that runs another plan's step may need the GIL.
    nb::gil_scoped_release release;
    plan_.reset();
}

int PlanBuilder::buffer(int64_t width, bool outputs) {
    require(!finished_ && width > 0, "a buffer needs a width");
    return plan_->add_buffer(width, outputs);
}

void PlanBuilder::input(int out) {
    require(!finished_ && input_ < 0 && !plan_->buffer(checked(out)).outputs,
            "a plan has at most one input, with a row per token");
    input_ = out;
}

void PlanBuilder::add(const std::string& operation, const nb::kwargs& facts) {
    const Registered::Make make = find_operation(operation);
    require(make, "there is no operation " + operation);
    PythonFacts read(*plan_, nb::borrow<nb::dict>(facts), kept_);
    plan_->add(make(read));
    read.check_all_read(operation);
}

void PlanBuilder::finish() {
    nb::gil_scoped_release release;
    plan_->finish();
    finished_ = true;
}

void PlanBuilder::run(const Ints& tokens, const Ints& positions, const Ints& sequences,
                      const IntMatrix& kv_blocks, const Ints& outputs, const std::optional<FloatMatrix>& x,
                      const std::optional<Bytes>& thresholded, const std::optional<Ints>& states,
                      const std::optional<Ints>& saves, const std::optional<FloatMatrix>& scales,
                      const std::optional<IntMatrix>& rotary, const std::optional<IntMatrix>& groups) {
    require(finished_, "the plan is not finished");
    const Plan::Limits& limits = plan_->limits();
    const int n = int(tokens.size()), n_sequences = int(kv_blocks.shape(0)),
              max_kv_blocks = int(kv_blocks.shape(1));
    const int n_outputs = int(outputs.size());
    require(max_kv_blocks <= plan_->max_kv_blocks(), "a sequence has more KV blocks than the plan allows");
    const std::optional<int64_t> n_vocab = embeds_tokens() ? std::optional(limits.n_vocab) : std::nullopt;
    check_batch({plan_->max_tokens(), limits.n_kv_blocks, n_vocab, limits.n_positions},
                {tokens, positions, sequences, kv_blocks, outputs});
    require(n_outputs == 0 || outputs.data()[0] + 1 >= limits.n_joined,
            "an output joins " + std::to_string(limits.n_joined) + " tokens, and the first has fewer");
    if (limits.n_states) check_states(positions, sequences, n_sequences, states, saves);
    require((input_ >= 0) == x.has_value(),
            "a plan that begins with tokens takes no rows; one that begins with rows needs them");
    if (x) {
        require(int(x->shape(0)) == n && int64_t(x->shape(1)) == width(input_),
                "the input rows must be [" + std::to_string(n) + ", " + std::to_string(width(input_)) +
                    "], a row per token");
        // Like any buffer of a new step: a straggler of the previous step may read it, but never commits.
        std::copy_n(x->data(), n * width(input_), plan_->buffer(input_).row(0));
    }
    require(!thresholded || int(thresholded->size()) == n,
            "one flag per token says whether it is thresholded");
    require(
        bool(limits.n_adapters) == scales.has_value() &&
            (!scales || (int(scales->shape(0)) == n_sequences && int(scales->shape(1)) == limits.n_adapters)),
        "a plan with adapters needs one scale per adapter and sequence; other plans take no scales");
    const StepPlaces places = checked_places(positions, sequences, rotary, groups);
    n_tokens_ = n;
    n_outputs_ = n_outputs;
    bool done;
    std::exception_ptr raised;  // by a signal handler during the step
    {
        nb::gil_scoped_release release;
        const Poll poll = [&] {
            nb::gil_scoped_acquire acquire;
            if (!raised && PyErr_CheckSignals() != 0) raised = std::make_exception_ptr(nb::python_error());
            return bool(raised);
        };
        done = plan_->run(
            &poll, tokens.data(), positions.data(), sequences.data(), n, kv_blocks.data(), n_sequences,
            max_kv_blocks, outputs.data(), n_outputs, thresholded ? thresholded->data() : nullptr,
            limits.n_states ? states->data() : nullptr, limits.n_states ? saves->data() : nullptr,
            scales ? scales->data() : nullptr, places);
    }
    if (raised) std::rethrow_exception(raised);
    if (!done) throw StepCancelled();
}

nb::ndarray<nb::numpy, float, nb::ndim<2>> PlanBuilder::rows(nb::handle self, int id) {
    const Buffer& buffer = plan_->buffer(checked(id));
    return {buffer.row(0), {size_t(buffer.outputs ? n_outputs_ : n_tokens_), size_t(buffer.width)}, self};
}

int PlanBuilder::checked(int id) const {
    require(id >= 0 && id < plan_->n_buffers(), "there is no buffer " + std::to_string(id));
    return id;
}

void PlanBuilder::check_states(const Ints& positions, const Ints& sequences, int n_sequences,
                               const std::optional<Ints>& states, const std::optional<Ints>& saves) const {
    const int n = int(sequences.size());
    require(states && saves && int(states->size()) == n_sequences && int(saves->size()) == n,
            "a model with recurrent layers needs state slots for the batch");
    const int n_states = plan_->limits().n_states;
    std::vector<char> used(n_states), seen(n_sequences);
    int left = 0;  // tokens of the same sequence from t on
    const auto use = [&](int slot) -> char* {
        require(slot >= -1 && slot < n_states,
                "a state slot of the batch is outside the cache's " + std::to_string(n_states) + " slots");
        return slot < 0 ? nullptr : &used[slot];
    };
    for (int t = 0; t < n; t++) {
        const int sequence = sequences.data()[t], position = positions.data()[t];
        if (t > 0 && sequences.data()[t - 1] == sequence) {
            require(positions.data()[t - 1] + 1 == position,
                    "tokens of a sequence with a state must be consecutive");
            continue;
        }
        require(!seen[sequence], "tokens of a sequence with a state must be consecutive");
        seen[sequence] = 1;
        const int slot = states->data()[sequence];
        if (char* mark = use(slot)) *mark = 1;
        require((slot < 0) == (position == 0), "a sequence needs a state exactly if it does not begin");
    }
    for (int t = n - 1; t >= 0; t--) {
        left = t + 1 < n && sequences.data()[t + 1] == sequences.data()[t] ? left + 1 : 1;
        char* mark = use(saves->data()[t]);
        if (!mark) continue;
        require(!*mark, "a step must write a state only once, and none that it reads");
        *mark = 1;
        require(left <= kSavedTokens || (positions.data()[t] + 1) % kKvBlockSize == 0,
                "a state can be saved only at the end of a KV block or among a sequence's last tokens");
    }
}

StepPlaces PlanBuilder::checked_places(const Ints& positions, const Ints& sequences,
                                       const std::optional<IntMatrix>& rotary,
                                       const std::optional<IntMatrix>& groups) const {
    const Plan::Limits& limits = plan_->limits();
    const int n = int(sequences.size());
    StepPlaces places;
    if (rotary) {
        const int n_axes = int(rotary->shape(1));
        require(int(rotary->shape(0)) == n && n_axes >= limits.n_axes,
                "rotary positions are [" + std::to_string(n) + ", " + std::to_string(limits.n_axes) +
                    "], a row per token");
        require(std::all_of(rotary->data(), rotary->data() + int64_t(n) * n_axes,
                            [](int32_t position) { return position >= 0; }),
                "a rotary position is negative");
        places.rotary = rotary->data(), places.n_axes = n_axes;
    }
    require(!limits.needs_groups || groups, "a plan whose tokens see only their groups needs groups");
    if (groups) {
        require(int(groups->shape(0)) == n && int(groups->shape(1)) == 2,
                "a group is two positions per token");
        int end = 0;  // one past the last position of the sequence of token t
        for (int t = n - 1; t >= 0; t--) {
            const int32_t position = positions.data()[t], *group = groups->data() + 2 * int64_t(t);
            if (t == n - 1 || sequences.data()[t + 1] != sequences.data()[t]) end = position + 1;
            require(group[0] >= 0 && group[0] <= position && position < group[1] && group[1] <= end,
                    "the group of a token must be around its position, and end within the step");
        }
        places.groups = groups->data();
    }
    return places;
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
    constexpr int kAhead = 16;  // operations whose counters are prefetched: weights have evicted them
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
            "there must be " + std::to_string(n_each) + " cells per operation");
    const int32_t* cell = cells.data();
    require(std::all_of(cell, cell + cells.size(), [&](int32_t c) { return c >= 0 && c < n_cells; }),
            "a cell is outside the sums");
}

void bind_plan(nb::module_& m) {
    nb::class_<PlanBuilder>(m, "Plan",
                            "The operations of one step; built once, run once per step (csrc/plan.h).")
        .def(nb::init<int, int, int, std::shared_ptr<Runtime>, const std::optional<std::string>&>(),
             "max_tokens"_a, "n_kv_blocks"_a, "max_kv_blocks"_a, "runtime"_a, "isa"_a.none() = nb::none())
        .def("buffer", &PlanBuilder::buffer, "width"_a, "outputs"_a)
        .def("input", &PlanBuilder::input, "out"_a)
        .def("add", &PlanBuilder::add, "operation"_a, "facts"_a)
        .def("op_seconds", &PlanBuilder::op_seconds, "cells"_a, "n_cells"_a)
        .def("op_counts", &PlanBuilder::op_counts, "cells"_a, "n_cells"_a)
        .def("finish", &PlanBuilder::finish)
        .def("cancel", &PlanBuilder::cancel)
        .def("run", &PlanBuilder::run, "tokens"_a, "positions"_a, "sequences"_a, "kv_blocks"_a, "outputs"_a,
             "x"_a.none() = nb::none(), "thresholded"_a.none() = nb::none(), "states"_a.none() = nb::none(),
             "saves"_a.none() = nb::none(), "scales"_a.none() = nb::none(), "rotary"_a.none() = nb::none(),
             "groups"_a.none() = nb::none())
        .def(
            "rows", [](nb::handle self, int id) { return nb::cast<PlanBuilder&>(self).rows(self, id); },
            "buffer"_a)
        .def_prop_ro("isa", &PlanBuilder::isa)
        .def_prop_ro("n_ops", &PlanBuilder::n_ops)
        .def_prop_ro("nbytes", &PlanBuilder::bytes)
        .def_prop_ro("own_nbytes", &PlanBuilder::own_bytes);
}

}  // namespace hotset::bindings
