// The input from which an operation is built: named values from the builder of a plan.
//
// Each file of ops/ is an operation. It ends with a registration, whose function reads and checks the facts
// and constructs the operation. No other C++ code names the operation:
//
//     const Registered add("add", [](Facts& facts) -> std::unique_ptr<Op> { ... });
//
// A missing fact, or one of a wrong kind or value, throws std::invalid_argument.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plan.h"

namespace hotset {

// Throw std::invalid_argument unless the condition holds.
void require(bool condition, const std::string& message);

// One part of the rows of a store's group, in place of a matrix's bytes.
struct StoredPart {
    RowStore* store = nullptr;  // null: the tensor has bytes
    int group = -1, part = -1;
};

class Facts {
  public:
    explicit Facts(Plan& plan) : plan_(plan) {}
    virtual ~Facts() = default;

    Plan& plan() const { return plan_; }

    // Whether the fact is present and not None.
    virtual bool has(const char* name) = 0;
    virtual int64_t integer(const char* name) = 0;
    virtual double number(const char* name) = 0;
    virtual bool flag(const char* name) = 0;
    virtual std::string text(const char* name) = 0;
    virtual std::vector<float> floats(const char* name) = 0;
    virtual std::vector<double> doubles(const char* name) = 0;
    // Memory that the operation keeps using. The plan keeps its owner alive.
    virtual std::span<const uint8_t> bytes(const char* name) = 0;
    virtual std::span<uint8_t> writable_bytes(const char* name) = 0;
    virtual std::span<float> writable_floats(const char* name, int64_t& n_rows) = 0;  // of a matrix
    virtual std::vector<std::span<const uint8_t>> list_of_bytes(const char* name) = 0;
    virtual RowStore& store(const char* name) = 0;
    virtual Stream& stream(const char* name) = 0;
    // A tensor: its type, its bytes or its rows in a store, and the scales if its type is planes.
    struct Tensor {
        Type type;
        std::span<const uint8_t> data;
        StoredPart stored;
        std::span<const uint8_t> scales;
    };
    virtual Tensor tensor(const char* name) = 0;
    virtual std::vector<Tensor> tensors(const char* name) = 0;
    // Nested facts.
    virtual std::unique_ptr<Facts> record(const char* name) = 0;
    virtual std::vector<std::unique_ptr<Facts>> records(const char* name) = 0;

    // ---- derived

    int integer(const char* name, int64_t least, int64_t most);
    float real(const char* name) { return float(number(name)); }
    float real(const char* name, float otherwise) { return has(name) ? real(name) : otherwise; }
    bool flag(const char* name, bool otherwise) { return has(name) ? flag(name) : otherwise; }

    int buffer(const char* name);          // the id of an existing buffer
    int buffer_or_none(const char* name);  // -1: none
    int64_t width(int buffer) const { return plan_.buffer(buffer).width; }
    bool of_outputs(int buffer) const { return plan_.buffer(buffer).outputs; }
    void same_rows(int a, int b) const;  // both have one row per token, or both one per output
    void same_shape(int a, int b) const;
    void of_all_tokens(int buffer) const;  // the buffer has one row per token
    // The buffer that is added to `out`, with the same rows and width; -1: none.
    int residual(int x, int out);

    std::vector<float> floats(const char* name, int64_t n);          // exactly n numbers
    std::vector<float> floats_or_none(const char* name, int64_t n);  // empty: none
    Activation activation(const char* name);                         // named as in operations.ActivationKind
    Norm norm(const char* name, int64_t width);  // a record {layer, weight, bias, eps}; missing: empty weight
    int rope(const char* name);  // a record {kind, n_rot, freq, magnitude}; returns the index in the plan
    // rows < 0: take the number of rows from the tensor.
    Matrix matrix(const char* name, int64_t rows, int64_t cols);
    static Matrix matrix(const Tensor& tensor, int64_t rows, int64_t cols);
    // A record {tensors, n_rows, first_row, bias}: one tensor with all experts, or one tensor per expert; the
    // rows of each expert in the file, and the first of them to use; n_bias numbers of bias per expert.
    ExpertMatrices experts(const char* name, int n_expert, int64_t rows, int64_t cols, int64_t n_bias);
    // For each of the n rows of a store, whether the latest fetch missed it.
    const uint8_t* missed_rows(const StoredPart& rows, int64_t n) const;
    // The recurrent states of one operation, `size` numbers each. All operations have equally many slots.
    StateSlots states(const char* name, int64_t size);

  protected:
    Plan& plan_;
};

// Registers the constructor of one operation. name: the snake-case name of its class in model/operations.py,
// if it has one.
class Registered {
  public:
    using Make = std::unique_ptr<Op> (*)(Facts& facts);
    Registered(const char* name, Make make);
};

// Return the operation's constructor; null if the name is unknown.
Registered::Make find_operation(const std::string& name);

}  // namespace hotset
