// The memory through which a device and a CPU worker pass the rows of the layers that they share.
#pragma once

#include <functional>

#include "cpu_worker.h"
#include "vulkan/device.h"

namespace hotset::vulkan {

// from_device: h, float [max_tokens][width], and at `asked_offset` what is asked for beside it, in rows of
// whole words. to_device: the answers, as the worker has them. Both are seen by the host.
class Exchange {
  public:
    // worker: outlives this. Throws std::invalid_argument for buffers that are too small.
    Exchange(CpuWorkerPlan& worker, std::shared_ptr<Buffer> from_device, std::shared_ptr<Buffer> to_device,
             uint64_t asked_offset);

    // Lets the worker compute its layer `layer` for a step of n_tokens, and waits. Nothing that writes the
    // rows of from_device or reads to_device may be running. False: the step was given up, or cancelled.
    bool serve(int layer, int n_tokens, const std::function<bool()>& is_cancelled) const;

  private:
    CpuWorkerPlan& worker_;
    std::shared_ptr<Buffer> from_device_, to_device_;
    uint64_t asked_offset_;
};

}  // namespace hotset::vulkan
