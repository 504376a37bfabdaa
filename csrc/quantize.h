// Converts whole matrices to another type, on several threads, in strips that fit into the caches.
#pragma once

#include "kernels/kernels.h"

namespace hotset {

// Whether `kernels` can encode the type.
static inline bool can_encode(const Kernels& kernels, Type type) {
    return kernels.encode[int(type)] != nullptr;
}

// Weights of the squared errors: `cols` numbers for each `rows_per_matrix` rows. `first_row` rows precede
// `from`. null: each type's default.
struct Importance {
    const float* weights = nullptr;
    int64_t rows_per_matrix = 1, first_row = 0;
};
// Encode the rows of `from` at `out`, whole blocks each. Returns -1, or a row with a value that the type
// cannot store: NaN, infinity or a value too large for the type's f16 (F32 and BF16 store all). `out` is then
// invalid.
int64_t quantize_matrix(const Kernels& kernels, const Matrix& from, Type to, uint8_t* out, int n_threads,
                        const Importance& importance);

}  // namespace hotset
