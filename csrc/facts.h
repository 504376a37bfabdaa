// What an operation is built from: named values, as the builder of a plan gives them.
//
// An operation is one file of ops/. It ends in a registration, whose function reads the facts that the
// operation needs, checks them and makes it; nothing else in C++ names the operation:
//
//     const Registered add("add", [](Facts& facts) -> std::unique_ptr<Op> { ... });
//
// A fact that is absent, of another kind or not what the operation can work with is std::invalid_argument.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plan.h"

namespace hotset {

// Throws std::invalid_argument, unless the condition holds.
void require(bool condition, const std::string& message);

// The rows of one part of a group of a store, in place of the bytes of a matrix.
struct StoredPart {
    RowStore* store = nullptr;  // null: bytes
    int group = -1, part = -1;
};

class Facts {
  public:
    explicit Facts(Plan& plan) : plan_(plan) {}
    virtual ~Facts() = default;

    Plan& plan() const { return plan_; }

    // Whether it was given, and is not None.
    virtual bool has(const char* name) = 0;
    virtual int64_t integer(const char* name) = 0;
    virtual double number(const char* name) = 0;
    virtual bool flag(const char* name) = 0;
    virtual std::string text(const char* name) = 0;
    virtual std::vector<float> floats(const char* name) = 0;
    virtual std::vector<double> doubles(const char* name) = 0;
    // Memory that the operation goes on using; its owner is kept alive with the plan.
    virtual std::span<const uint8_t> bytes(const char* name) = 0;
    virtual std::span<uint8_t> writable_bytes(const char* name) = 0;
    virtual std::span<float> writable_floats(const char* name, int64_t& n_rows) = 0;  // of a matrix
    virtual std::vector<std::span<const uint8_t>> list_of_bytes(const char* name) = 0;
    virtual RowStore& store(const char* name) = 0;
    virtual Stream& stream(const char* name) = 0;
    // A tensor: its type, its bytes or its rows in a store, and the scales of planes.
    struct Tensor {
        Type type;
        std::span<const uint8_t> data;
        StoredPart stored;
        std::span<const uint8_t> scales;
    };
    virtual Tensor tensor(const char* name) = 0;
    virtual std::vector<Tensor> tensors(const char* name) = 0;
    // Facts within these.
    virtual std::unique_ptr<Facts> record(const char* name) = 0;
    virtual std::vector<std::unique_ptr<Facts>> records(const char* name) = 0;

    // ---- made of those

    int integer(const char* name, int64_t least, int64_t most);
    float real(const char* name) { return float(number(name)); }
    float real(const char* name, float otherwise) { return has(name) ? real(name) : otherwise; }
    bool flag(const char* name, bool otherwise) { return has(name) ? flag(name) : otherwise; }

    int buffer(const char* name);          // one of the plan's
    int buffer_or_none(const char* name);  // -1: none
    int64_t width(int buffer) const { return plan_.buffer(buffer).width; }
    bool of_outputs(int buffer) const { return plan_.buffer(buffer).outputs; }
    void same_rows(int a, int b) const;  // both have a row per token, or both one per output
    void same_shape(int a, int b) const;
    void of_all_tokens(int buffer) const;  // it has a row per token
    // Buffer that is added to `out`, with which it has rows and width in common; -1: none.
    int residual(int x, int out);

    std::vector<float> floats(const char* name, int64_t n);          // just so many
    std::vector<float> floats_or_none(const char* name, int64_t n);  // empty: none
    Activation activation(const char* name);     // by its name (operations.ActivationKind)
    Norm norm(const char* name, int64_t width);  // a record {layer, weight, bias, eps}; empty weight: none
    int rope(const char* name);                  // a record {kind, n_rot, freq, magnitude}: index in the plan
    // rows < 0: as many as the tensor has.
    Matrix matrix(const char* name, int64_t rows, int64_t cols);
    static Matrix matrix(const Tensor& tensor, int64_t rows, int64_t cols);
    // A record {tensors, n_rows, first_row, bias}: of all experts or one each; rows of an expert in them, and
    // the first that counts; a bias of n_bias numbers for each expert.
    ExpertMatrices experts(const char* name, int n_expert, int64_t rows, int64_t cols, int64_t n_bias);
    // Of a store whose rows are those of a tensor: which of the n rows were missing at the latest fetch.
    const uint8_t* missed_rows(const StoredPart& rows, int64_t n) const;
    // One operation's states of sequences, `size` numbers each; all operations have as many slots.
    StateSlots states(const char* name, int64_t size);

  protected:
    Plan& plan_;
};

// Makes operations of one name. `name`: of the class in model/operations.py, in snake case, where there is
// one.
class Registered {
  public:
    using Make = std::unique_ptr<Op> (*)(Facts& facts);
    Registered(const char* name, Make make);
};

// Null: there is no such operation.
Registered::Make find_operation(const std::string& name);

}  // namespace hotset
