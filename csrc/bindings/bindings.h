// What the files of this folder share: arrays as Python gives them, and the checks of what comes with them.
// They are the only ones that know Python: they check every argument, release the GIL and turn errors into
// sentences.
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

// Of the instruction set that is named, else HOTSET_ISA's, else the best.
const Kernels& chosen_kernels(const std::optional<std::string>& isa);

Matrix make_matrix(int type, const Bytes& data, int64_t rows, int64_t cols);

void check_threads(int n_threads);  // of a thread pool, or of one function

// What every backend wants of the batch of a step, whose arrays are those of base.Batch.
struct BatchArrays {
    const Ints &tokens, &positions, &sequences;
    const IntMatrix& pages;
    const Ints& outputs;
};
// n_vocab: none where no token is looked up. n_positions: of learned position embeddings, 0 without.
struct BatchLimits {
    int max_tokens, n_pages;
    std::optional<int64_t> n_vocab;
    int64_t n_positions = 0;
};
void check_batch(const BatchLimits& limits, const BatchArrays& batch);

// The rows of one part of a group of a store, in place of the bytes of a matrix.
struct StoredRows {
    std::shared_ptr<RowStore> store;
    int group, part;
};
// For Python, which frees it.
template <class T, class... Shape>
nb::ndarray<nb::numpy, T, nb::ndim<sizeof...(Shape)>> new_array(T*& data, Shape... shape) {
    data = new T[(size_t(shape) * ... * 1)];
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return {data, {size_t(shape)...}, owner};
}

struct StepCancelled : std::exception {};

// Each adds a subject to the module.
void bind_checks(nb::module_& m);
void bind_kernels(nb::module_& m);
void bind_plan(nb::module_& m);
void bind_cpu_worker(nb::module_& m);
void bind_store(nb::module_& m);
void bind_draw(nb::module_& m);
void bind_replacement(nb::module_& m);
void bind_vulkan(nb::module_& m);

}  // namespace hotset::bindings
