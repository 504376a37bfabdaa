#include "bindings/bindings.h"

#include <cstdlib>

#include "plan.h"

namespace hotset::bindings {

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

Matrix make_matrix(int type, const Bytes& data, int64_t rows, int64_t cols,
                   const std::optional<Bytes>& scales) {
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

// Experts whose matrices are rows of a store.
static ExpertMatrices stored_experts(int type, const StoredRows& experts, int n_expert, int64_t rows,
                                     int64_t cols, int64_t stored, int64_t first,
                                     std::vector<std::shared_ptr<RowStore>>& stores) {
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
    stores.push_back(experts.store);
    return made;
}

ExpertMatrices make_experts(const ExpertPart& part, int n_expert, int64_t rows, int64_t cols, int64_t n_bias,
                            std::vector<Bytes>& weights, std::vector<std::shared_ptr<RowStore>>& stores) {
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
            made = stored_experts(type, *experts, n_expert, rows, cols, stored, first, stores);
            break;
        }
        const Matrix all = make_matrix(type, std::get<Bytes>(data), of_tensor * stored, cols);
        weights.push_back(std::get<Bytes>(data));
        for (int64_t e = 0; e < of_tensor; e++)
            made.weights.push_back(
                {all.type, all.row(e * stored + first), rows, cols, all.row_bytes, nullptr});
    }
    made.bias = to_vector(bias);
    return made;
}

std::vector<float> to_vector(const std::optional<Floats>& array) {
    return array ? std::vector<float>(array->data(), array->data() + array->size()) : std::vector<float>();
}

Activation checked_activation(int kind) {
    require(kind >= 0 && kind <= int(Activation::ClampedPlusOne),
            "there is no activation " + std::to_string(kind));
    return Activation(kind);
}

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

}  // namespace hotset::bindings
