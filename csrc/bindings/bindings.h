// Array types and argument checks that the files of this folder share. Only this folder knows Python: it
// checks every argument, releases the GIL and turns C++ exceptions into Python's.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "facts.h"
#include "kernels/kernels.h"
#include "store/store.h"
#include "store/stream.h"
#include "types.h"

namespace hotset::bindings {

namespace nb = nanobind;
using namespace nb::literals;

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WritableFloats = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using WritableBytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatMatrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IntMatrix = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Return the kernels of the named instruction set; by default HOTSET_ISA's, or the best one available.
const Kernels& chosen_kernels(const std::optional<std::string>& isa);

Matrix make_matrix(int type, const Bytes& data, int64_t rows, int64_t cols);

void check_threads(int n_threads);  // for a thread pool or one function

// The batch of a step in the arrays of base.Batch, as every backend needs it.
struct BatchArrays {
    const Ints &tokens, &positions, &sequences;
    const IntMatrix& kv_blocks;
    const Ints& outputs;
};
// n_vocab: none if no token is looked up. n_positions: of learned position embeddings; 0: none.
struct BatchLimits {
    int max_tokens, n_kv_blocks;
    std::optional<int64_t> n_vocab;
    int64_t n_positions = 0;
};
void check_batch(const BatchLimits& limits, const BatchArrays& batch);

// The rows of one part of a store's group, in place of a matrix's bytes.
struct StoredRows {
    std::shared_ptr<RowStore> store;
    int group, part;
};

// Allocate an array that Python frees.
template <class T, class... Shape>
nb::ndarray<nb::numpy, T, nb::ndim<sizeof...(Shape)>> new_array(T*& data, Shape... shape) {
    data = new T[(size_t(shape) * ... * 1)];
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return {data, {size_t(shape)...}, owner};
}

struct StepCancelled : std::exception {};

// Each function adds one subject to the module.
void bind_checks(nb::module_& m);
void bind_kernels(nb::module_& m);
void bind_plan(nb::module_& m);
void bind_cpu_worker(nb::module_& m);
void bind_store(nb::module_& m);
void bind_draw(nb::module_& m);
void bind_replacement(nb::module_& m);
void bind_vulkan(nb::module_& m);

}  // namespace hotset::bindings
