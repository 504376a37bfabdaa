// Reads an operation's facts from a Python dict. Its values are numbers, strings, arrays, stores, streams,
// records (dicts) and tensors, which are tuples (type, data[, scales]) with bytes or StoredRows as data.
#pragma once

#include <set>

#include "bindings/bindings.h"
#include "facts.h"

namespace hotset::bindings {

class PythonFacts : public Facts {
  public:
    // kept: receives the objects that must live as long as the plan.
    PythonFacts(Plan& plan, nb::dict values, std::vector<nb::object>& kept);

    bool has(const char* name) override;
    int64_t integer(const char* name) override;
    double number(const char* name) override;
    bool flag(const char* name) override;
    std::string text(const char* name) override;
    std::vector<float> floats(const char* name) override;
    std::vector<double> doubles(const char* name) override;
    std::span<const uint8_t> bytes(const char* name) override;
    std::span<uint8_t> writable_bytes(const char* name) override;
    std::span<float> writable_floats(const char* name, int64_t& n_rows) override;
    std::vector<std::span<const uint8_t>> list_of_bytes(const char* name) override;
    RowStore& store(const char* name) override;
    Stream& stream(const char* name) override;
    Tensor tensor(const char* name) override;
    std::vector<Tensor> tensors(const char* name) override;
    std::unique_ptr<Facts> record(const char* name) override;
    std::vector<std::unique_ptr<Facts>> records(const char* name) override;

    // Check that every fact was read. An unread name is a mistake of the caller.
    void check_all_read(const std::string& operation) const;

    using Facts::flag;
    using Facts::floats;
    using Facts::integer;

  private:
    nb::object value(const char* name);
    template <class T>
    T as(const char* name, const char* kind);
    std::span<const uint8_t> kept_bytes(nb::handle array, const char* name);
    Tensor tensor_of(nb::handle tuple, const char* name);

    nb::dict values_;
    std::vector<nb::object>& kept_;
    std::set<std::string> read_;
};

}  // namespace hotset::bindings
