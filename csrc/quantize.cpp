#include "quantize.h"

#include <algorithm>
#include <atomic>

#include "threads.h"

namespace hotset {

namespace {

constexpr int64_t kStrip = 4096;              // weights decoded at a time: whole blocks of every type
constexpr int64_t kClaim = int64_t(1) << 16;  // approximate weights that a thread takes at a time

}  // namespace

int64_t quantize_matrix(const Kernels& kernels, const Matrix& from, Type to, uint8_t* out, int n_threads,
                        const Importance& importance) {
    const TypeFacts facts = type_facts(to);
    const EncodeKernel encode = kernels.encode[int(to)];
    const DecodeKernel decode = kernels.decode[int(from.type)];
    const int64_t row_bytes = from.cols / facts.block_size * facts.block_bytes;
    const int64_t claim = std::max<int64_t>(kClaim / from.cols, 1);
    std::atomic<int64_t> next{0}, bad{-1};
    auto work = [&] {
        const DefaultFloats floats;
        alignas(64) float strip[kStrip];
        while (bad.load(std::memory_order_relaxed) < 0) {
            const int64_t first = next.fetch_add(claim), last = std::min(first + claim, from.rows);
            if (first >= from.rows) return;
            for (int64_t row = first; row < last; row++) {
                const int64_t matrix = (importance.first_row + row) / importance.rows_per_matrix;
                const float* weights = importance.weights ? importance.weights + matrix * from.cols : nullptr;
                for (int64_t col = 0; col < from.cols; col += kStrip) {
                    const int64_t n = std::min(kStrip, from.cols - col);
                    decode(from, row, col, n, strip);
                    uint8_t* to_bytes = out + row * row_bytes + col / facts.block_size * facts.block_bytes;
                    if (!encode(strip, weights ? weights + col : nullptr, n, to_bytes)) {
                        bad = row;
                        return;
                    }
                }
            }
        }
    };
    run_on_threads(int(std::min<int64_t>(n_threads, (from.rows + claim - 1) / claim)), work);
    return bad;
}

}  // namespace hotset
