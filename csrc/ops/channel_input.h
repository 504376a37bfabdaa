// What a matrix product reads of one token whose small inputs are zero: the inputs, and which are not.
#pragma once

#include <algorithm>
#include <new>

#include "linear_input.h"

namespace hotset {

constexpr int kLanes = 16;  // of a sum

// Adds the sums of n parts of the lanes, n a power of two, pair by pair. scratch: [4][count].
inline void fold_lanes(const Kernels& kernels, const float* sums, int64_t ld, int n, int64_t count,
                       float* scratch, float* out) {
    if (n == 1) {
        std::copy_n(sums, count, out);
        return;
    }
    fold_lanes(kernels, sums, ld, n / 2, count, scratch + count, out);
    fold_lanes(kernels, sums + n / 2 * ld, ld, n / 2, count, scratch + count, scratch);
    kernels.add(out, scratch, count, out);
}

class ChannelInput : public LinearInput {
  public:
    using LinearInput::LinearInput;

    struct One {
        Inputs inputs;
        const ActiveChannels* active;

        bool pays(const ChannelMatrix& w) const { return w.data && share() < w.below; }
        double share() const { return double(active->n_channels) / double(inputs.k); }
        // Bytes of codes of the channels that are not read, of `count` outputs.
        int64_t left_out(const ChannelMatrix& w, int64_t count) const {
            return (inputs.k - active->n_channels) * w.code_bytes(count);
        }
    };

    // Of a step of one token. The list is made once by each worker, as the inputs are.
    One one(const StepTokens& step, Worker& worker) const {
        uint8_t* list = worker.inputs.data() + list_at();
        ActiveChannels* active = reinterpret_cast<ActiveChannels*>(list);
        const Inputs in = inputs(step, worker, [&](const Inputs& prepared) {
            new (active) ActiveChannels(list + sizeof(ActiveChannels), prepared, plan_.kernels().interleaved);
        });
        return {in, active};
    }

    Needs needs() const {
        Needs needs = LinearInput::needs();
        needs.private_bytes = list_at() + sizeof(ActiveChannels) + ActiveChannels::bytes(width());
        return needs;
    }

  private:
    size_t list_at() const { return (InputsMemory::bytes(kPrivateInputs, width()) + 63) / 64 * 64; }
};

}  // namespace hotset
