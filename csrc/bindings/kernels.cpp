// Single kernels, for tests, benchmarks and the conversion of whole matrices.
#include "bindings/bindings.h"

#include "bandwidth.h"
#include "plan.h"
#include "quantize.h"

namespace hotset::bindings {
namespace {

// Multiply one matrix by rows of activations.
nb::object linear(int type, const Bytes& data, int64_t rows, const FloatMatrix& x,
                  const std::optional<std::string>& isa) {
    const int n = int(x.shape(0));
    const int64_t k = int64_t(x.shape(1)), width = padded(k);
    const Matrix weight = make_matrix(type, data, rows, k);
    require(n > 0, "a product needs a row of activations");
    const Kernels& kernels = chosen_kernels(isa);
    Memory q(n * width), scale(n * width / 8), sum(n * width / 8), isum(n * width / 4), isum8(n * width / 8),
        scratch(kernel_scratch_bytes(k));
    const DefaultFloats floats;
    if (!is_float(weight.type))
        for (int t = 0; t < n; t++)
            kernels.quantize(x.data() + t * k, k,
                             {q.as<int8_t>() + t * width, scale.as<float>() + t * width / 32,
                              sum.as<float>() + t * width / 32, isum.as<int32_t>() + t * width / 16,
                              isum8.as<int32_t>() + t * width / 32});
    const Inputs inputs = {n,
                           k,
                           x.data(),
                           q.as<int8_t>(),
                           scale.as<float>(),
                           sum.as<float>(),
                           isum.as<int32_t>(),
                           isum8.as<int32_t>()};
    float* out;
    auto result = new_array<float>(out, n, rows);
    {
        nb::gil_scoped_release release;
        kernels.linear[type](weight, 0, rows, inputs, 0, n, out, rows, scratch.data());
    }
    return nb::cast(result);
}

nb::object dequantize(int type, const Bytes& data, int64_t rows, int64_t cols) {
    const Matrix weight = make_matrix(type, data, rows, cols);
    const DefaultFloats floats;
    float* out;
    auto result = new_array<float>(out, rows, cols);
    nb::gil_scoped_release release;
    for (int64_t r = 0; r < rows; r++) dequantize_row(weight.type, weight.row(r), cols, out + r * cols);
    nb::gil_scoped_acquire acquire;
    return nb::cast(result);
}

// Encode a matrix as another type into `out`. Returns -1, or a row that the type cannot store.
int64_t quantize(int from, const Bytes& data, int64_t rows, int64_t cols, int to, const WritableBytes& out,
                 int n_threads, const std::optional<FloatMatrix>& importance, int64_t rows_per_matrix,
                 int64_t first_row) {
    const Matrix matrix = make_matrix(from, data, rows, cols);
    const Kernels& kernels = chosen_kernels(std::nullopt);
    require(to >= 0 && to < kTypeCount && can_encode(kernels, Type(to)),
            "tensor type " + std::to_string(to) + " has no encoder");
    check_threads(n_threads);
    const TypeFacts facts = type_facts(Type(to));
    require(cols % facts.block_size == 0 &&
                out.size() == size_t(rows) * size_t(cols / facts.block_size) * facts.block_bytes,
            "the result takes whole blocks of " + std::string(facts.name));
    Importance weights;
    if (importance) {
        require(rows_per_matrix > 0 && first_row >= 0 && int64_t(importance->shape(1)) == cols &&
                    (first_row + rows - 1) / rows_per_matrix < int64_t(importance->shape(0)),
                "importance has a number for each column of each matrix");
        weights = {importance->data(), rows_per_matrix, first_row};
    }
    nb::gil_scoped_release release;
    return quantize_matrix(kernels, matrix, Type(to), out.data(), n_threads, weights);
}

double measured_read_bandwidth(const Bytes& data, int n_threads) {
    check_threads(n_threads);
    const Kernels& kernels = chosen_kernels(std::nullopt);
    nb::gil_scoped_release release;
    return read_bandwidth(kernels, data.data(), data.size(), n_threads);
}

using Offsets = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

double measured_gather_bandwidth(const Bytes& data, const Offsets& pieces, int64_t piece_bytes,
                                 int n_threads) {
    check_threads(n_threads);
    require(piece_bytes > 0 && piece_bytes % 256 == 0, "piece_bytes must be a positive multiple of 256");
    for (size_t i = 0; i < pieces.size(); i++)
        require(pieces.data()[i] >= 0 && pieces.data()[i] % 64 == 0 &&
                    pieces.data()[i] + piece_bytes <= int64_t(data.size()),
                "pieces must be in the data, at multiples of 64 bytes");
    const Kernels& kernels = chosen_kernels(std::nullopt);
    nb::gil_scoped_release release;
    return gather_bandwidth(kernels, data.data(), pieces.data(), pieces.size(), size_t(piece_bytes),
                            n_threads);
}

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (int i = 0; const char* name = isa_name(i); i++) {
        const char* error = nullptr;
        if (select_kernels(name, &error)) names.push_back(name);
    }
    return names;
}

}  // namespace

void bind_kernels(nb::module_& m) {
    m.def(
        "isa", [] { return std::string(chosen_kernels(std::nullopt).isa); },
        "Return the instruction set whose kernels are used: HOTSET_ISA, or this processor's best.");
    m.def("available_isas", &available_isas, "Return the instruction sets of this processor, best first.");
    m.def("read_bandwidth", &measured_read_bandwidth, "data"_a, "n_threads"_a,
          "Return the bytes per second of reading `data`; a small array is read several times.");
    m.def("gather_bandwidth", &measured_gather_bandwidth, "data"_a, "pieces"_a, "piece_bytes"_a,
          "n_threads"_a,
          "Return the bytes per second of reading pieces of `data` at the offsets `pieces`, int64 [n].");
    m.def("linear", &linear, "type"_a, "data"_a, "rows"_a, "x"_a, "isa"_a.none() = nb::none(),
          "Multiply x [n, k] by a matrix of `rows` rows of k weights of a GGML type, with a plan's kernel.");
    m.def("dequantize", &dequantize, "type"_a, "data"_a, "rows"_a, "cols"_a,
          "Decode a matrix to float32 [rows, cols].");
    m.def(
        "quantize", &quantize, "from_type"_a, "data"_a, "rows"_a, "cols"_a, "to_type"_a, "out"_a,
        "n_threads"_a, "importance"_a = nb::none(), "rows_per_matrix"_a = 1, "first_row"_a = 0,
        "Encode a matrix of one GGML type as another into `out`. Returns -1, or a row with a value that the "
        "type cannot store. importance: of each column, float32 [n_matrices, cols].");
}

}  // namespace hotset::bindings
