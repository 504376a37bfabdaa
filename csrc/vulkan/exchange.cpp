#include "vulkan/exchange.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace hotset::vulkan {
namespace {

constexpr int64_t kTick = 20'000'000;  // nanoseconds until a waiting host looks whether it was cancelled

// Bytes of a row of what is asked for, in the device's memory.
size_t stride(int64_t asked_bytes) {
    return size_t(asked_bytes + 3) / 4 * 4;
}

}  // namespace

Exchange::Exchange(CpuWorkerPlan& worker, std::shared_ptr<Buffer> from_device,
                   std::shared_ptr<Buffer> to_device, uint64_t asked_offset)
    : worker_(worker),
      from_device_(std::move(from_device)),
      to_device_(std::move(to_device)),
      asked_offset_(asked_offset) {
    const uint64_t tokens = uint64_t(worker.max_tokens());
    uint64_t asked = 0, answered = 0;
    for (int i = 0; i < worker.n_layers(); i++) {
        asked = std::max<uint64_t>(asked, tokens * stride(worker.asked_bytes(i)));
        answered = std::max<uint64_t>(answered, tokens * worker.answer_width(i) * sizeof(float));
    }
    if (!from_device_->mapped() || !to_device_->mapped() ||
        asked_offset < tokens * worker.width() * sizeof(float) ||
        from_device_->size() < asked_offset + asked || to_device_->size() < answered)
        throw std::invalid_argument("an exchange has room for the rows of all tokens, which the host sees");
}

bool Exchange::serve(int layer, int n_tokens, const std::function<bool()>& is_cancelled) const {
    const size_t n = size_t(n_tokens), asked = size_t(worker_.asked_bytes(layer));
    const uint8_t* from = from_device_->mapped();
    uint8_t* memory = worker_.memory();
    std::memcpy(memory + worker_.h_offset(), from, n * worker_.width() * sizeof(float));
    for (size_t t = 0; t < n; t++)
        std::memcpy(memory + worker_.bits_offset() + t * asked, from + asked_offset_ + t * stride(asked),
                    asked);
    worker_.post(layer);
    CpuWorkerPlan::Wait waited;
    while ((waited = worker_.wait(layer, kTick)) == CpuWorkerPlan::Wait::TimedOut)
        if (is_cancelled()) return false;
    if (waited == CpuWorkerPlan::Wait::Poisoned) return false;
    const std::vector<int32_t>& route = worker_.route(layer);
    const size_t rows = route.empty() ? n : route.size(), row = worker_.width() * sizeof(float);
    for (size_t i = 0; i < rows; i++)  // of experts those that the device asked for
        if (route.empty() || route[i] >= 0)
            std::memcpy(to_device_->mapped() + i * row, memory + worker_.out_offset() + i * row, row);
    return true;
}

}  // namespace hotset::vulkan
