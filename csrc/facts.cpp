#include "facts.h"

#include <algorithm>
#include <map>
#include <stdexcept>

namespace hotset {
namespace {

std::map<std::string, Registered::Make>& registry() {
    static std::map<std::string, Registered::Make> operations;  // constructed when the first file registers
    return operations;
}

constexpr std::pair<const char*, Activation> kActivations[] = {
    {"silu", Activation::Silu},
    {"gelu", Activation::Gelu},
    {"gelu_tanh", Activation::GeluTanh},
    {"relu", Activation::Relu},
    {"relu2", Activation::Relu2},
    {"fatrelu", Activation::FatRelu},
    {"sigmoid", Activation::Sigmoid},
    {"clamped_silu", Activation::ClampedSilu},
    {"clamped_plus_one", Activation::ClampedPlusOne},
    {"capped_silu", Activation::CappedSilu},
    {"clamp", Activation::Clamp},
    {"exp", Activation::Exp},
    {"softplus", Activation::Softplus},
    {"scale", Activation::Scale},  // threshold * x
};

}  // namespace

Registered::Registered(const char* name, Make make) {
    registry().emplace(name, make);
}

Registered::Make find_operation(const std::string& name) {
    const auto found = registry().find(name);
    return found == registry().end() ? nullptr : found->second;
}

void require(bool condition, const std::string& message) {
    if (!condition) throw std::invalid_argument(message);
}

int Facts::integer(const char* name, int64_t least, int64_t most) {
    const int64_t value = integer(name);
    require(value >= least && value <= most, std::string(name) + " is " + std::to_string(value) +
                                                 ", and must be from " + std::to_string(least) + " to " +
                                                 std::to_string(most));
    return int(value);
}

int Facts::buffer(const char* name) {
    const int64_t id = integer(name);
    require(id >= 0 && id < plan_.n_buffers(), "there is no buffer " + std::to_string(id));
    return int(id);
}

int Facts::buffer_or_none(const char* name) {
    return has(name) ? buffer(name) : -1;
}

void Facts::same_rows(int a, int b) const {
    require(of_outputs(a) == of_outputs(b), "rows of tokens and of outputs do not mix");
}

void Facts::same_shape(int a, int b) const {
    require(width(a) == width(b), "both sides have the same width");
    same_rows(a, b);
}

void Facts::of_all_tokens(int buffer) const {
    require(!of_outputs(buffer), "the operation works on all tokens");
}

int Facts::residual(int x, int out) {
    const int id = buffer_or_none("residual");
    if (id < 0) return id;
    same_rows(x, id);
    require(width(id) == width(out) && id != out, "a residual has the width of the output");
    return id;
}

std::vector<float> Facts::floats(const char* name, int64_t n) {
    std::vector<float> found = floats(name);
    require(int64_t(found.size()) == n, std::string(name) + " has " + std::to_string(n) + " numbers, not " +
                                            std::to_string(found.size()));
    return found;
}

std::vector<float> Facts::floats_or_none(const char* name, int64_t n) {
    return has(name) ? floats(name, n) : std::vector<float>();
}

Activation Facts::activation(const char* name) {
    const std::string kind = text(name);
    const auto* const found = std::find_if(std::begin(kActivations), std::end(kActivations),
                                           [&](auto& one) { return one.first == kind; });
    require(found != std::end(kActivations), "there is no activation " + kind);
    return found->second;
}

Norm Facts::norm(const char* name, int64_t width) {
    if (!has(name)) return {};
    const std::unique_ptr<Facts> of = record(name);
    return {of->flag("layer"), of->floats("weight", width), of->floats_or_none("bias", width),
            of->real("eps")};
}

int Facts::rope(const char* name) {
    const std::unique_ptr<Facts> of = record(name);
    Rope rope;
    rope.neox = of->text("kind") == "neox";
    rope.n_rot = of->integer("n_rot", 2, INT32_MAX);
    rope.magnitude = of->real("magnitude");
    rope.frequencies = of->doubles("freq");
    rope.every = of->integer("every", 1, INT32_MAX);
    require(rope.n_rot % 2 == 0 && int(rope.frequencies.size()) == rope.n_rot / 2,
            "a rope needs n_rot / 2 frequencies");
    if (of->has("axes")) {
        for (const double axis : of->doubles("axes")) rope.axes.push_back(int(axis));
        require(rope.axes.size() == rope.frequencies.size(), "a rope with axes has one for each frequency");
        const auto [least, most] = std::ranges::minmax(rope.axes);
        require(least >= 0 && most < kMaxAxes, "a rope has " + std::to_string(kMaxAxes) + " axes at most");
        plan_.limits().n_axes = std::max(plan_.limits().n_axes, most + 1);
    }
    return plan_.add_rope(std::move(rope));
}

Matrix Facts::matrix(const char* name, int64_t rows, int64_t cols) {
    return matrix(tensor(name), rows, cols);
}

Matrix Facts::matrix(const Tensor& tensor, int64_t rows, int64_t cols) {
    const TypeFacts facts = type_facts(tensor.type);
    require(facts.block_bytes > 0 && is_planes(tensor.type) == (tensor.scales.data() != nullptr),
            "tensor type " + std::to_string(int(tensor.type)) + " has no kernel");
    require(cols > 0 && cols < INT32_MAX && cols % facts.block_size == 0,
            "rows of " + std::to_string(cols) + " weights are not whole blocks of type " + facts.name);
    const size_t row_bytes = size_t(cols / facts.block_size) * facts.block_bytes;
    const auto& [store, group, part] = tensor.stored;
    if (rows < 0) rows = store ? store->n_rows(group) : int64_t(tensor.data.size() / row_bytes);
    require(rows > 0 && rows < INT32_MAX, "a matrix needs rows and columns");
    require(!tensor.scales.data() ||
                tensor.scales.size() == size_t((rows + kPlaneRows - 1) / kPlaneRows) * size_t(cols) * 2,
            "planes have a scale for each column and 32 rows");
    const auto* const scales = reinterpret_cast<const uint16_t*>(tensor.scales.data());
    if (store) {
        require(store->n_rows(group) == rows && store->row_bytes(group, part) == row_bytes && store->end(),
                "a store's rows are those of the matrix");
        return {tensor.type, store->end(), rows, cols, row_bytes, scales, store->places(group, part)};
    }
    require(tensor.data.size() == size_t(rows) * row_bytes,
            "a " + std::string(facts.name) + " matrix of " + std::to_string(rows) + " x " +
                std::to_string(cols) + " takes " + std::to_string(size_t(rows) * row_bytes) + " bytes, not " +
                std::to_string(tensor.data.size()));
    return {tensor.type, tensor.data.data(), rows, cols, row_bytes, scales};
}

namespace {

// Return experts whose matrices are rows of a store, starting at matrix row `first`.
ExpertMatrices stored_experts(const Facts::Tensor& tensor, int n_expert, int64_t rows, int64_t cols,
                              int64_t stored, int64_t first) {
    const auto& [store, group, part] = tensor.stored;
    const TypeFacts facts = type_facts(tensor.type);
    require(facts.block_bytes > 0 && !is_planes(tensor.type) && cols % facts.block_size == 0,
            "tensor type " + std::to_string(int(tensor.type)) + " has no kernel");
    const size_t row_bytes = size_t(cols / facts.block_size) * facts.block_bytes;
    require(store->end() && store->n_rows(group) == n_expert &&
                store->row_bytes(group, part) == row_bytes * size_t(stored),
            "a store's rows are the matrices of the experts");
    ExpertMatrices made;
    made.weights.assign(size_t(n_expert), {tensor.type, nullptr, rows, cols, row_bytes, nullptr});
    made.places = store->places(group, part);
    made.skipped = size_t(first) * row_bytes;
    return made;
}

}  // namespace

ExpertMatrices Facts::experts(const char* name, int n_expert, int64_t rows, int64_t cols, int64_t n_bias) {
    const std::unique_ptr<Facts> of = record(name);
    const std::vector<Tensor> tensors = of->tensors("tensors");
    const int64_t stored = of->integer("n_rows"), first = of->integer("first_row");
    require(stored > 0 && stored < INT32_MAX / n_expert && first >= 0 && first + rows <= stored,
            "an expert's rows are some of its matrix");
    require(tensors.size() == 1 || int(tensors.size()) == n_expert,
            "experts are in one tensor, or in one each");
    ExpertMatrices made;
    const int64_t of_tensor = n_expert / int64_t(tensors.size());
    for (const Tensor& tensor : tensors) {
        if (tensor.stored.store) {
            made = stored_experts(tensor, n_expert, rows, cols, stored, first);
            break;
        }
        const Matrix all = matrix(tensor, of_tensor * stored, cols);
        for (int64_t e = 0; e < of_tensor; e++)
            made.weights.push_back(
                {all.type, all.row(e * stored + first), rows, cols, all.row_bytes, nullptr});
    }
    made.bias = of->floats_or_none("bias", n_expert * n_bias);
    return made;
}

const uint8_t* Facts::missed_rows(const StoredPart& rows, int64_t n) const {
    require(rows.store && rows.store->n_rows(rows.group) == n, "a store says which rows it missed");
    return rows.store->missed(rows.group);
}

StateSlots Facts::states(const char* name, int64_t size) {
    int64_t n = 0;
    const std::span<float> states = writable_floats(name, n);
    int& known = plan_.limits().n_states;
    require(n > 0 && n < INT32_MAX && int64_t(states.size()) == n * size && (known == 0 || known == n),
            "a state has " + std::to_string(size) + " numbers, and every operation as many of them");
    known = int(n);
    return {states.data(), size};
}

}  // namespace hotset
