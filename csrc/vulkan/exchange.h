// The memory through which a device and a CPU worker exchange rows of the layers that they share.
#pragma once

#include <functional>

#include "cpu_worker.h"
#include "vulkan/device.h"

namespace hotset::vulkan {

// from_device: h, float [max_tokens][width], and from `bits_offset` the worker's bits in rows of whole words.
// to_device: the worker's answers. Both are host-visible.
class Exchange {
  public:
    // worker: must outlive this. Throws std::invalid_argument if a buffer is too small.
    Exchange(CpuWorkerPlan& worker, std::shared_ptr<Buffer> from_device, std::shared_ptr<Buffer> to_device,
             uint64_t bits_offset);

    // Let the worker compute layer `layer` for a step of n_tokens, and wait. No running dispatch may write
    // the rows in from_device or read to_device. Returns false if the step was poisoned or cancelled.
    bool serve(int layer, int n_tokens, const std::function<bool()>& is_cancelled) const;

  private:
    CpuWorkerPlan& worker_;
    std::shared_ptr<Buffer> from_device_, to_device_;
    uint64_t bits_offset_;
};

}  // namespace hotset::vulkan
