#include "vulkan/exchange.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace hotset::vulkan {
namespace {

constexpr int64_t kTick = 20'000'000;  // nanoseconds between two checks for cancellation

// Bytes of a token's row of bits in device memory.
size_t stride(int64_t request_bytes) {
    return size_t(request_bytes + 3) / 4 * 4;
}

}  // namespace

Exchange::Exchange(CpuWorkerPlan& worker, std::shared_ptr<Buffer> from_device,
                   std::shared_ptr<Buffer> to_device, uint64_t bits_offset)
    : worker_(worker),
      from_device_(std::move(from_device)),
      to_device_(std::move(to_device)),
      bits_offset_(bits_offset) {
    const uint64_t tokens = uint64_t(worker.max_tokens());
    uint64_t requested = 0, answered = 0;
    for (int i = 0; i < worker.n_layers(); i++) {
        requested = std::max<uint64_t>(requested, tokens * stride(worker.request_bytes(i)));
        answered = std::max<uint64_t>(answered, tokens * worker.answer_width(i) * sizeof(float));
    }
    if (!from_device_->mapped() || !to_device_->mapped() ||
        bits_offset < tokens * worker.width() * sizeof(float) ||
        from_device_->size() < bits_offset + requested || to_device_->size() < answered)
        throw std::invalid_argument("the buffers of an exchange are too small or not host-visible");
}

bool Exchange::serve(int layer, int n_tokens, const std::function<bool()>& is_cancelled) const {
    check(injected_failure("Exchange::serve"), "computing a layer on the CPU");
    const size_t n = size_t(n_tokens), requested = size_t(worker_.request_bytes(layer));
    const uint8_t* from = from_device_->mapped();
    uint8_t* memory = worker_.memory();
    std::memcpy(memory + worker_.h_offset(), from, n * worker_.width() * sizeof(float));
    for (size_t t = 0; t < n; t++)
        std::memcpy(memory + worker_.bits_offset() + t * requested,
                    from + bits_offset_ + t * stride(requested), requested);
    worker_.submit(layer);
    CpuWorkerPlan::Collected waited;
    while ((waited = worker_.collect(layer, kTick)) == CpuWorkerPlan::Collected::TimedOut)
        if (is_cancelled()) return false;
    if (waited == CpuWorkerPlan::Collected::Poisoned) return false;
    const std::vector<int32_t>& route = worker_.route(layer);
    const size_t rows = route.empty() ? n : route.size(), row = worker_.width() * sizeof(float);
    for (size_t i = 0; i < rows; i++)  // in an MoE layer, only the requested experts
        if (route.empty() || route[i] >= 0)
            std::memcpy(to_device_->mapped() + i * row, memory + worker_.out_offset() + i * row, row);
    return true;
}

}  // namespace hotset::vulkan
