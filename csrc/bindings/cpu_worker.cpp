#include <algorithm>
#include "cpu_worker.h"

#include "bindings/plan_builder.h"

namespace hotset::bindings {
namespace {

// The CPU worker of a hybrid engine (csrc/cpu_worker.h). One thread begins and ends steps; any thread may
// call `poison` and `close`.
class CpuWorker {
  public:
    // plan: not finished; it limits the rows per computation. An expert of a token is one row.
    CpuWorker(nb::object plan, int64_t width, int max_tokens, double timeout)
        : owner_(std::move(plan)), builder_(nb::cast<PlanBuilder&>(owner_)) {
        require(width > 0 && max_tokens > 0 && max_tokens <= builder_.plan().max_tokens(),
                "the CPU worker needs a width and tokens");
        require(timeout > 0 && timeout <= 1e6, "a timeout is more than 0 and at most a million seconds");
        plan_ = std::make_unique<CpuWorkerPlan>(builder_.plan(), width, max_tokens, int64_t(timeout * 1e9));
    }
    ~CpuWorker() {
        nb::gil_scoped_release release;  // see PlanBuilder
        plan_.reset();
    }

    // Add a layer: the operations [first_op, end_op) of the plan, which read buffer x and write `sum`. cold:
    // bit i % 8 of byte i / 8 for neuron i. gates: operations that compute only gates. of_firing: operations
    // that compute the neurons that fire.
    int layer(int number, int first_op, int end_op, const std::vector<int>& gates,
              const std::vector<int>& of_firing, int x, int sum, int64_t n_neurons, int64_t neuron_bytes,
              const Bytes& cold, bool predicted, int scores) {
        CpuWorkerLayer layer = described(number, first_op, end_op, gates, of_firing, x, sum);
        require(n_neurons > 0 && cold.size() == size_t(n_neurons + 7) / 8, "a layer has a bit per neuron");
        require(neuron_bytes > 0, "a neuron has weights");
        layer.n_neurons = n_neurons, layer.neuron_bytes = neuron_bytes;
        layer.cold.assign(cold.data(), cold.data() + cold.size());
        if (n_neurons % 8) layer.cold.back() &= uint8_t((1 << n_neurons % 8) - 1);
        layer.predicted = predicted;
        require(builder_.width(scores) == n_neurons, "every neuron has a score");
        layer.scores = scores;
        return plan_->add_layer(std::move(layer));
    }

    // Add an MoE layer with n_used experts per token.
    int experts(int number, int first_op, int end_op, int x, int sum, int n_expert, int n_used, int route) {
        CpuWorkerLayer layer = described(number, first_op, end_op, {}, {}, x, sum);
        require(n_expert > 0 && n_expert <= kMaxExperts && n_used > 0 && n_used <= n_expert,
                "the number of experts per token must be between 1 and the number of experts");
        require(builder_.width(route) == 2, "a row of the plan is one expert of a token");
        layer.n_expert = n_expert, layer.n_used = n_used, layer.route = route;
        return plan_->add_layer(std::move(layer));
    }
    // Return the experts submitted for an MoE layer in the latest step, [n_tokens * n_used].
    nb::ndarray<nb::numpy, int32_t, nb::ndim<1>> route(int layer) const;

    void start() {
        require(!started_ && plan_->n_layers() > 0, "the CPU worker starts once, with at least one layer");
        started_ = true;
        nb::gil_scoped_release release;
        plan_->start();
    }

    nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> memory(nb::handle self) {
        check_started();
        return {plan_->memory(), {plan_->memory_bytes()}, self};
    }
    // Offsets in memory() of request, done, h, bits and out.
    std::vector<size_t> offsets() const {
        check_started();
        return {plan_->request_offset(), plan_->done_offset(), plan_->h_offset(), plan_->bits_offset(),
                plan_->out_offset()};
    }

    std::string begin(int n_tokens, const std::optional<Bytes>& thresholded) {
        check_started();
        require(n_tokens > 0 && n_tokens <= plan_->max_tokens(),
                "a step of the CPU worker takes 1 to " + std::to_string(plan_->max_tokens()) +
                    " tokens, not " + std::to_string(n_tokens));
        require(!thresholded || int64_t(thresholded->size()) == n_tokens,
                "one flag per token says whether it is thresholded");
        nb::gil_scoped_release release;
        return plan_->begin(n_tokens, thresholded ? thresholded->data() : nullptr);
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

    void submit(int layer) { plan_->submit(checked(layer)); }
    // Return false if the step was poisoned. Signals such as Ctrl-C are handled meanwhile.
    bool collect(int layer) {
        checked(layer);
        for (;;) {
            CpuWorkerPlan::Collected result;
            {
                nb::gil_scoped_release release;
                result = plan_->collect(layer, kSignal_ns);
            }
            if (result != CpuWorkerPlan::Collected::TimedOut) return result == CpuWorkerPlan::Collected::Done;
            if (PyErr_CheckSignals() != 0) throw nb::python_error();
        }
    }

    // Addresses of the functions void(void*) for a device's stream: submit, collect.
    static std::pair<uintptr_t, uintptr_t> host_functions() {
        return {reinterpret_cast<uintptr_t>(&cpu_worker_submit_on_stream),
                reinterpret_cast<uintptr_t>(&cpu_worker_collect_on_stream)};
    }
    uintptr_t host_argument(int layer) {
        return reinterpret_cast<uintptr_t>(plan_->host_call(checked(layer)));
    }

    // Bytes of buffers and exchange memory, without the runtime's.
    size_t bytes() const { return plan_->bytes(); }

    // For native code that runs the device's side; valid as long as this object.
    CpuWorkerPlan& started_plan() {
        check_started();
        return *plan_;
    }

    // [n_layers, 6]: requests and FfnCounts. Seconds: [n_layers].
    nb::ndarray<nb::numpy, int64_t, nb::ndim<2>> counts() const;
    nb::ndarray<nb::numpy, double, nb::ndim<1>> seconds() const;

  private:
    static constexpr int64_t kSignal_ns = 20'000'000;

    void check_started() const { require(started_, "the CPU worker was not started"); }
    int checked(int layer) const {
        check_started();
        require(layer >= 0 && layer < plan_->n_layers(), "there is no layer " + std::to_string(layer));
        return layer;
    }
    CpuWorkerLayer described(int number, int first_op, int end_op, const std::vector<int>& gates,
                             const std::vector<int>& of_firing, int x, int sum) const {
        require(!started_, "layers are added before the start");
        require(first_op >= 0 && first_op < end_op && end_op <= builder_.n_ops(),
                "a layer has operations of the plan");
        require(builder_.width(x) == plan_->width() && builder_.width(sum) == plan_->width(),
                "the input and the result of a layer have the width of the exchange");
        CpuWorkerLayer layer;
        layer.number = number, layer.first_op = first_op, layer.end_op = end_op;
        layer.x = x, layer.sum = sum;
        layer.counted.resize(size_t(end_op - first_op), Counted::All);
        for (const auto& [ops, counted] : {std::pair(gates, Counted::Gates), {of_firing, Counted::OfFiring}})
            for (const int op : ops) {
                require(op >= first_op && op < end_op, "a counted operation belongs to the layer");
                layer.counted[op - first_op] = counted;
            }
        return layer;
    }

    nb::object owner_;  // of the plan that plan_ runs; its threads read the plan until they end
    PlanBuilder& builder_;
    std::unique_ptr<CpuWorkerPlan> plan_;
    bool started_ = false;
};

nb::ndarray<nb::numpy, int64_t, nb::ndim<2>> CpuWorker::counts() const {
    int64_t* out;
    auto result = new_array<int64_t>(out, plan_->n_layers(), 6);
    for (int i = 0; i < plan_->n_layers(); i++, out += 6) {
        const CpuWorkerCounts& c = plan_->counts(i);
        out[0] = c.requests, out[1] = c.ffn.selected, out[2] = c.ffn.active, out[3] = c.ffn.gate_rows,
        out[4] = c.ffn.up_rows, out[5] = c.ffn.down_rows;
    }
    return result;
}

nb::ndarray<nb::numpy, int32_t, nb::ndim<1>> CpuWorker::route(int layer) const {
    int32_t* out;
    const std::vector<int32_t>& route = plan_->route(checked(layer));
    auto result = new_array<int32_t>(out, route.size());
    std::ranges::copy(route, out);
    return result;
}

nb::ndarray<nb::numpy, double, nb::ndim<1>> CpuWorker::seconds() const {
    double* out;
    auto result = new_array<double>(out, plan_->n_layers());
    for (int i = 0; i < plan_->n_layers(); i++) out[i] = plan_->counts(i).seconds;
    return result;
}

}  // namespace

void bind_cpu_worker(nb::module_& m) {
    [[maybe_unused]] const nb::class_<CpuWorkerPlan> plan(
        m, "CpuWorkerPlan", "The native part of a CpuWorker (csrc/cpu_worker.h).");
    nb::class_<CpuWorker>(m, "CpuWorker", "The CPU worker of a hybrid engine (csrc/cpu_worker.h).")
        .def(nb::init<nb::object, int64_t, int, double>(), "plan"_a, "width"_a, "max_tokens"_a, "timeout"_a)
        .def("layer", &CpuWorker::layer, "number"_a, "first_op"_a, "end_op"_a, "gates"_a, "of_firing"_a,
             "x"_a, "sum"_a, "n_neurons"_a, "neuron_bytes"_a, "cold"_a, "predicted"_a, "scores"_a)
        .def("experts", &CpuWorker::experts, "number"_a, "first_op"_a, "end_op"_a, "x"_a, "sum"_a,
             "n_expert"_a, "n_used"_a, "route"_a)
        .def("route", &CpuWorker::route, "layer"_a)
        .def("start", &CpuWorker::start)
        .def("memory", [](nb::handle self) { return nb::cast<CpuWorker&>(self).memory(self); })
        .def("offsets", &CpuWorker::offsets)
        .def("begin", &CpuWorker::begin, "n_tokens"_a, "thresholded"_a.none() = nb::none())
        .def("end", &CpuWorker::end)
        .def("poison", &CpuWorker::poison, "reason"_a)
        .def("poisoned", &CpuWorker::poisoned)
        .def("close", &CpuWorker::close)
        .def("submit", &CpuWorker::submit, "layer"_a)
        .def("collect", &CpuWorker::collect, "layer"_a)
        .def_static("host_functions", &CpuWorker::host_functions)
        .def("host_argument", &CpuWorker::host_argument, "layer"_a)
        .def_prop_ro("nbytes", &CpuWorker::bytes)
        .def_prop_ro("plan", &CpuWorker::started_plan, nb::rv_policy::reference_internal)
        .def("counts", &CpuWorker::counts)
        .def("seconds", &CpuWorker::seconds);
}

}  // namespace hotset::bindings
