// The input of a matrix product for one token with many zeros: the values and the nonzero channels.
#pragma once

#include <algorithm>
#include <new>

#include "linear_input.h"

namespace hotset {

constexpr int kLanes = 16;  // lanes of a sum

// Add the sums of n parts of the lanes pair by pair; n is a power of two. scratch: [4][count].
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
        // Return the code bytes of the skipped channels, for `count` outputs.
        int64_t left_out(const ChannelMatrix& w, int64_t count) const {
            return (inputs.k - active->n_channels) * w.code_bytes(count);
        }
    };

    // For a step of one token. Each worker makes the list once, like the quantised inputs.
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
