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
