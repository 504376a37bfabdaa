#include "cold.h"

#include "bindings/bindings.h"

namespace hotset::bindings {
namespace {

// The CPU's half of a hybrid engine (csrc/cold.h). Steps are begun and ended by one thread; `poison` and
// `close` may come from any.
class Cold {
  public:
    using Part = std::tuple<int, Rows, std::optional<Floats>>;  // type, data, bias
    using Down = std::tuple<int, Rows, std::optional<Bytes>>;   // type, data, scales of planes

    // max_rows: experts of tokens that are computed at a time.
    Cold(int64_t width, int max_tokens, std::shared_ptr<Runtime> runtime, double timeout,
         const std::optional<std::string>& isa, int max_rows) {
        require(width > 0 && max_tokens > 0, "the CPU's half needs a width and tokens");
        require(timeout > 0 && timeout <= 1e6, "a timeout is more than 0 and at most a million seconds");
        plan_ = std::make_unique<ColdPlan>(chosen_kernels(isa), width, max_tokens, max_rows,
                                           std::move(runtime), int64_t(timeout * 1e9));
    }
    ~Cold() {
        nb::gil_scoped_release release;  // as in PlanBuilder
        plan_.reset();
    }

    // cold: bit i % 8 of byte i / 8 for each neuron. cutoffs: of the activation that decides, and of the
    // neurons' values.
    int layer(int number, const std::optional<Part>& gate, const Part& up, int64_t n_neurons,
              const std::pair<int, float>& activation, std::optional<int> up_activation, const Down& down,
              const Bytes& cold, bool predicted, const std::pair<float, float>& cutoffs) {
        require(!started_, "layers are added before the start");
        require(n_neurons > 0 && cold.size() == size_t(n_neurons + 7) / 8, "a layer has a bit per neuron");
        std::vector<uint8_t> bits(cold.data(), cold.data() + cold.size());
        if (n_neurons % 8) bits.back() &= uint8_t((1 << n_neurons % 8) - 1);
        NeuronFacts facts;
        if (gate) facts.gate = make_part(*gate, n_neurons);
        facts.up = make_part(up, n_neurons);
        set_activations(facts, gate.has_value(), activation, up_activation);
        std::tie(facts.gate_cutoff, facts.value_cutoff) = cutoffs;
        require(facts.gate_cutoff >= 0.0f && facts.value_cutoff >= 0.0f, "a cutoff is at least 0");
        const auto& [type, data, scales] = down;
        const Matrix weight = make_matrix(type, data, n_neurons, plan_->width(), scales, weights_, stores_);
        return plan_->add_layer(number, std::move(facts), {weight, {}, -1}, std::move(bits), predicted,
                                groups_of(gate ? &std::get<1>(*gate) : nullptr, std::get<1>(up), data));
    }

    // Of a mixture, n_used experts a token; the parts as PlanBuilder takes them. cutoff: of what is
    // activated.
    int experts(int number, int n_expert, int n_used, int64_t n_neurons,
                const std::optional<ExpertPart>& gate, const ExpertPart& up,
                const std::pair<int, float>& activation,
                const std::optional<std::pair<int, float>>& up_activation, const ExpertPart& down,
                bool by_neuron, bool sparse, float cutoff) {
        require(!started_, "layers are added before the start");
        require(n_expert > 0 && n_expert <= kMaxExperts && n_used > 0 && n_used <= n_expert && n_neurons > 0,
                "a token has some of the experts");
        require(gate || !up_activation, "without a gate there is one activation");
        const int64_t width = plan_->width();
        ExpertFacts facts;
        if (gate) facts.gate = make_experts(*gate, n_expert, n_neurons, width, n_neurons, weights_, stores_);
        facts.up = make_experts(up, n_expert, n_neurons, width, n_neurons, weights_, stores_);
        facts.sparse = sparse, facts.activated = true;
        require(cutoff >= 0.0f, "a cutoff is at least 0");
        facts.cutoff = cutoff;
        facts.activation = checked_activation(activation.first);
        facts.activation_threshold = activation.second;
        if (up_activation) {
            facts.up_activated = true;
            facts.up_activation = checked_activation(up_activation->first);
            facts.up_threshold = up_activation->second;
        }
        ExpertSumFacts sum;
        sum.down = by_neuron ? make_experts(down, n_expert, n_neurons, width, width, weights_, stores_)
                             : make_experts(down, n_expert, width, n_neurons, width, weights_, stores_);
        sum.by_neuron = by_neuron, sum.sparse = sparse;
        const auto data_of = [](const ExpertPart& part) -> const Rows& {
            return std::get<1>(std::get<0>(part).front());
        };
        const StoredGroups groups = groups_of(gate ? &data_of(*gate) : nullptr, data_of(up), data_of(down));
        require(groups.then < 0, "an expert's matrices are read together");
        return plan_->add_experts(number, std::move(facts), std::move(sum), n_used, groups);
    }
    // What was asked for of a mixture's layer in the latest step: [n_tokens * n_used].
    nb::ndarray<nb::numpy, int32_t, nb::ndim<1>> route(int layer) const;

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

    std::string begin(int n_tokens, const std::optional<Bytes>& cut) {
        check_started();
        require(n_tokens > 0 && n_tokens <= plan_->max_tokens(),
                "a step of the CPU's half takes 1 to " + std::to_string(plan_->max_tokens()) +
                    " tokens, not " + std::to_string(n_tokens));
        require(!cut || int64_t(cut->size()) == n_tokens, "every token is cut or not");
        nb::gil_scoped_release release;
        return plan_->begin(n_tokens, cut ? cut->data() : nullptr);
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

    // Of buffers and exchange, without what the runtime has.
    size_t bytes() const { return plan_->bytes(); }

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
        return {make_matrix(type, data, n_neurons, plan_->width(), std::nullopt, weights_, stores_),
                to_vector(bias), -1};
    }
    // What comes from a store, of the matrices of a layer. gate: null: none.
    static StoredGroups groups_of(const Rows* gate, const Rows& up, const Rows& down) {
        StoredGroups groups;
        for (const Rows* data : {gate ? gate : &up, &up, &down}) {
            const StoredRows* const rows = std::get_if<StoredRows>(data);
            if (!rows) continue;
            require(!groups.store || groups.store == rows->store.get(), "a layer's rows are in one store");
            groups.store = rows->store.get();
            const bool decides = data == (gate ? gate : &up);
            int& group = decides ? groups.first : groups.then;
            if (rows->group == groups.first) continue;
            require(group < 0 || group == rows->group, "a layer's rows are in two groups at most");
            group = rows->group;
            if (gate && data == &up) groups.apart = true;
        }
        return groups;
    }

    // Before plan_, whose threads read them until its end.
    std::vector<Bytes> weights_;
    std::vector<std::shared_ptr<RowStore>> stores_;
    std::unique_ptr<ColdPlan> plan_;
    bool started_ = false;
};

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

nb::ndarray<nb::numpy, int32_t, nb::ndim<1>> Cold::route(int layer) const {
    int32_t* out;
    const std::vector<int32_t>& route = plan_->route(checked(layer));
    auto result = new_array<int32_t>(out, route.size());
    std::ranges::copy(route, out);
    return result;
}

nb::ndarray<nb::numpy, double, nb::ndim<1>> Cold::seconds() const {
    double* out;
    auto result = new_array<double>(out, plan_->n_layers());
    for (int i = 0; i < plan_->n_layers(); i++) out[i] = plan_->counts(i).seconds;
    return result;
}

}  // namespace

void bind_cold(nb::module_& m) {
    nb::class_<Cold>(m, "Cold", "The CPU's half of a hybrid engine (csrc/cold.h).")
        .def(nb::init<int64_t, int, std::shared_ptr<Runtime>, double, const std::optional<std::string>&,
                      int>(),
             "width"_a, "max_tokens"_a, "runtime"_a, "timeout"_a, "isa"_a.none() = nb::none(),
             "max_rows"_a = 0)
        .def("layer", &Cold::layer, "number"_a, "gate"_a.none(), "up"_a, "n_neurons"_a, "activation"_a,
             "up_activation"_a.none(), "down"_a, "cold"_a, "predicted"_a,
             "cutoffs"_a = std::pair<float, float>())
        .def("experts", &Cold::experts, "number"_a, "n_expert"_a, "n_used"_a, "n_neurons"_a, "gate"_a.none(),
             "up"_a, "activation"_a, "up_activation"_a.none(), "down"_a, "by_neuron"_a, "sparse"_a,
             "cutoff"_a = 0.0f)
        .def("route", &Cold::route, "layer"_a)
        .def("start", &Cold::start)
        .def("memory", [](nb::handle self) { return nb::cast<Cold&>(self).memory(self); })
        .def("offsets", &Cold::offsets)
        .def("begin", &Cold::begin, "n_tokens"_a, "cut"_a.none() = nb::none())
        .def("end", &Cold::end)
        .def("poison", &Cold::poison, "reason"_a)
        .def("poisoned", &Cold::poisoned)
        .def("close", &Cold::close)
        .def("post", &Cold::post, "layer"_a)
        .def("wait", &Cold::wait, "layer"_a)
        .def_static("host_functions", &Cold::host_functions)
        .def("host_argument", &Cold::host_argument, "layer"_a)
        .def_prop_ro("nbytes", &Cold::bytes)
        .def("counts", &Cold::counts)
        .def("seconds", &Cold::seconds);
}

}  // namespace hotset::bindings
