// Whole matrices from one type to another: decoded and encoded in strips that stay in cache, by threads.
#pragma once

#include "kernels/kernels.h"

namespace hotset {

// Whether `kernels` can write the type.
static inline bool can_encode(const Kernels& kernels, Type type) {
    return kernels.encode[int(type)] != nullptr;
}

// Encodes the rows of `from` one after another at `out`, whole blocks each. -1, or a row that holds a value
// which the type cannot store: NaN, an infinity, or one too large for the type's f16 (F32 and BF16 store
// any); `out` is then of no use. importance: how much errors count, `cols` numbers for each `rows_per_matrix`
// rows, of which `first_row` lie before `from`; null: what the type does without.
struct Importance {
    const float* weights = nullptr;
    int64_t rows_per_matrix = 1, first_row = 0;
};
int64_t quantize_matrix(const Kernels& kernels, const Matrix& from, Type to, uint8_t* out, int n_threads,
                        const Importance& importance);

}  // namespace hotset
