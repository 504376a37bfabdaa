#include "bindings/python_facts.h"

namespace hotset::bindings {

PythonFacts::PythonFacts(Plan& plan, nb::dict values, std::vector<nb::object>& kept)
    : Facts(plan), values_(std::move(values)), kept_(kept) {}

nb::object PythonFacts::value(const char* name) {
    read_.insert(name);
    if (!values_.contains(name)) return nb::none();
    return values_[name];
}

template <class T>
T PythonFacts::as(const char* name, const char* kind) {
    T result{};
    if (!nb::try_cast<T>(value(name), result))
        throw std::invalid_argument(std::string(name) + " is not " + kind);
    return result;
}

bool PythonFacts::has(const char* name) {
    return !value(name).is_none();
}

int64_t PythonFacts::integer(const char* name) {
    return as<int64_t>(name, "a whole number");
}

double PythonFacts::number(const char* name) {
    return as<double>(name, "a number");
}

bool PythonFacts::flag(const char* name) {
    return as<bool>(name, "true or false");
}

std::string PythonFacts::text(const char* name) {
    return as<std::string>(name, "a string");
}

std::vector<float> PythonFacts::floats(const char* name) {
    using Array = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
    const auto array = as<Array>(name, "an array of float32");
    return {array.data(), array.data() + array.size()};
}

std::vector<double> PythonFacts::doubles(const char* name) {
    return as<std::vector<double>>(name, "a list of numbers");
}

std::span<const uint8_t> PythonFacts::kept_bytes(nb::handle array, const char* name) {
    Bytes bytes;
    if (!nb::try_cast<Bytes>(array, bytes, false))
        throw std::invalid_argument(std::string(name) + " is not an array of bytes");
    kept_.push_back(nb::borrow(array));
    return {bytes.data(), bytes.size()};
}

std::span<const uint8_t> PythonFacts::bytes(const char* name) {
    return kept_bytes(value(name), name);
}

std::span<uint8_t> PythonFacts::writable_bytes(const char* name) {
    WritableBytes bytes;
    if (!nb::try_cast<WritableBytes>(value(name), bytes, false))
        throw std::invalid_argument(std::string(name) + " is not a writable array of bytes");
    kept_.push_back(value(name));
    return {bytes.data(), bytes.size()};
}

std::span<float> PythonFacts::writable_floats(const char* name, int64_t& n_rows) {
    WritableFloats floats;
    if (!nb::try_cast<WritableFloats>(value(name), floats, false))
        throw std::invalid_argument(std::string(name) + " is not a writable matrix of float32");
    kept_.push_back(value(name));
    n_rows = int64_t(floats.shape(0));
    return {floats.data(), floats.size()};
}

std::vector<std::span<const uint8_t>> PythonFacts::list_of_bytes(const char* name) {
    std::vector<std::span<const uint8_t>> found;
    for (nb::handle one : as<nb::list>(name, "a list")) found.push_back(kept_bytes(one, name));
    return found;
}

RowStore& PythonFacts::store(const char* name) {
    const auto found = as<std::shared_ptr<RowStore>>(name, "a store of rows");
    require(bool(found), std::string(name) + " is not a store of rows");
    kept_.push_back(value(name));
    return *found;
}

Stream& PythonFacts::stream(const char* name) {
    const auto found = as<std::shared_ptr<Stream>>(name, "a stream");
    require(bool(found), std::string(name) + " is not a stream");
    kept_.push_back(value(name));
    return *found;
}

Facts::Tensor PythonFacts::tensor_of(nb::handle given, const char* name) {
    nb::tuple tuple;
    int type = -1;
    require(nb::try_cast<nb::tuple>(given, tuple) && (tuple.size() == 2 || tuple.size() == 3) &&
                nb::try_cast<int>(tuple[0], type),
            std::string(name) + " is not a tensor of type, data and optionally scales");
    require(type >= 0 && type < kTypeCount, "tensor type " + std::to_string(type) + " has no kernel");
    Tensor tensor{Type(type), {}, {}, {}};
    StoredRows* rows = nullptr;
    if (nb::try_cast<StoredRows*>(tuple[1], rows) && rows) {
        tensor.stored = {rows->store.get(), rows->group, rows->part};
        kept_.push_back(nb::borrow(tuple[1]));
    } else {
        tensor.data = kept_bytes(tuple[1], name);
    }
    if (tuple.size() == 3 && !tuple[2].is_none()) tensor.scales = kept_bytes(tuple[2], name);
    return tensor;
}

Facts::Tensor PythonFacts::tensor(const char* name) {
    return tensor_of(value(name), name);
}

std::vector<Facts::Tensor> PythonFacts::tensors(const char* name) {
    std::vector<Tensor> found;
    for (nb::handle one : as<nb::list>(name, "a list of tensors")) found.push_back(tensor_of(one, name));
    require(!found.empty(), std::string(name) + " has no tensor");
    return found;
}

std::unique_ptr<Facts> PythonFacts::record(const char* name) {
    return std::make_unique<PythonFacts>(plan_, as<nb::dict>(name, "a record"), kept_);
}

std::vector<std::unique_ptr<Facts>> PythonFacts::records(const char* name) {
    std::vector<std::unique_ptr<Facts>> found;
    for (nb::handle one : as<nb::list>(name, "a list of records")) {
        nb::dict values;
        require(nb::try_cast<nb::dict>(one, values), std::string(name) + " is not a list of records");
        found.push_back(std::make_unique<PythonFacts>(plan_, std::move(values), kept_));
    }
    return found;
}

void PythonFacts::check_all_read(const std::string& operation) const {
    for (auto [key, value] : values_) {
        const std::string name = nb::cast<std::string>(key);
        require(read_.contains(name), "the operation " + operation + " has no fact " + name);
    }
}

}  // namespace hotset::bindings
