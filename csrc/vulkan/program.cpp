#include "vulkan/program.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <exception>
#include <thread>

namespace hotset::vulkan {
namespace {

constexpr uint32_t kSetsOfPool = 512, kBuffersOfPool = 4096;
constexpr size_t kInFlight = 2;  // concurrent submissions
constexpr uint32_t kTimestampsOfPool = 256;
constexpr uint64_t kTick = 20'000'000;  // nanoseconds of one wait
constexpr uint64_t kPoll = 50'000;      // nanoseconds of polling before a wait

void require(bool holds, const char* sentence) {
    if (!holds) throw std::invalid_argument(sentence);
}

}  // namespace

Program::Program(std::shared_ptr<Device> device, bool timed) : device_(std::move(device)), timed_(timed) {
    if (timed && !device_->info().timestamp_bits)
        throw Error("the Vulkan device " + device_->info().name +
                    " has no timestamps to time dispatches with");
    try {
        begin(-1, false);
    } catch (...) {
        free();
        throw;
    }
}

void Program::free() {
    if (device_->is_given_up()) return;
    const DeviceFunctions& fn = device_->functions();
    for (const Segment& segment : segments_)
        fn.vkFreeCommandBuffers(device_->handle(), device_->pool(), 1, &segment.commands);
    for (const Timestamps& one : timestamps_) fn.vkDestroyQueryPool(device_->handle(), one.pool, nullptr);
    for (const VkDescriptorPool pool : pools_) fn.vkDestroyDescriptorPool(device_->handle(), pool, nullptr);
}

void Program::begin(int host_layer, bool is_cut) {
    const DeviceFunctions& fn = device_->functions();
    auto info = made<VkCommandBufferAllocateInfo>(VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO);
    info.commandPool = device_->pool();
    info.level = VK_COMMAND_BUFFER_LEVEL_PRIMARY;
    info.commandBufferCount = 1;
    VkCommandBuffer commands;
    check(fn.vkAllocateCommandBuffers(device_->handle(), &info, &commands), "recording a step");
    segments_.push_back({commands, host_layer, is_cut});
    const auto begin = made<VkCommandBufferBeginInfo>(VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO);
    check(fn.vkBeginCommandBuffer(commands, &begin), "recording a step");
    barrier();  // after earlier batches
    if (host_layer < 0) return;
    auto answer = made<VkMemoryBarrier>(VK_STRUCTURE_TYPE_MEMORY_BARRIER);
    answer.srcAccessMask = VK_ACCESS_HOST_WRITE_BIT;
    answer.dstAccessMask = VK_ACCESS_SHADER_READ_BIT;
    fn.vkCmdPipelineBarrier(commands, VK_PIPELINE_STAGE_HOST_BIT, VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, 0, 1,
                            &answer, 0, nullptr, 0, nullptr);
}

void Program::barrier() {
    auto barrier = made<VkMemoryBarrier>(VK_STRUCTURE_TYPE_MEMORY_BARRIER);
    barrier.srcAccessMask = VK_ACCESS_SHADER_WRITE_BIT;
    barrier.dstAccessMask = VK_ACCESS_SHADER_READ_BIT | VK_ACCESS_SHADER_WRITE_BIT;
    device_->functions().vkCmdPipelineBarrier(commands(), VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT,
                                              VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, 0, 1, &barrier, 0,
                                              nullptr, 0, nullptr);
    since_barrier_.clear();
    n_groups_++;
}

VkDescriptorSet Program::new_set(VkDescriptorSetLayout layout) {
    const DeviceFunctions& fn = device_->functions();
    auto info = made<VkDescriptorSetAllocateInfo>(VK_STRUCTURE_TYPE_DESCRIPTOR_SET_ALLOCATE_INFO);
    info.descriptorPool = pools_.back();
    info.descriptorSetCount = 1;
    info.pSetLayouts = &layout;
    VkDescriptorSet set;
    check(fn.vkAllocateDescriptorSets(device_->handle(), &info, &set), "recording a step");
    return set;
}

void Program::prepare(const std::shared_ptr<Kernel>& kernel, const std::vector<Binding>& bindings,
                      std::span<const uint8_t> push) {
    const DeviceFunctions& fn = device_->functions();
    const VkPhysicalDeviceLimits& limits = device_->info().limits;
    require(!finished_, "the program is finished and takes no more dispatches");
    require(int(bindings.size()) == kernel->n_buffers() && int(push.size()) == kernel->push_bytes(),
            "a dispatch must have the buffers and push constants of its kernel");
    require(kernel->device() == device_, "the kernel belongs to another device");
    std::vector<Range> ranges;
    for (const Binding& one : bindings) {
        require(one.buffer && one.buffer->device() == device_, "the buffer belongs to another device");
        require(
            one.size > 0 && one.offset <= one.buffer->size() && one.size <= one.buffer->size() - one.offset,
            "a binding is outside its buffer");
        require(one.offset % limits.minStorageBufferOffsetAlignment == 0,
                "a binding is not aligned as the device needs it");
        require(one.size <= limits.maxStorageBufferRange, "a binding is larger than the device allows");
        ranges.push_back({one.buffer->handle(), one.offset, one.offset + one.size, one.written});
    }
    const bool conflicts = std::any_of(ranges.begin(), ranges.end(), [&](const Range& a) {
        return std::any_of(since_barrier_.begin(), since_barrier_.end(), [&](const Range& b) {
            return a.buffer == b.buffer && (a.written || b.written) && a.begin < b.end && b.begin < a.end;
        });
    });
    if (conflicts) barrier();
    since_barrier_.insert(since_barrier_.end(), ranges.begin(), ranges.end());

    if (!sets_left_ || buffers_left_ < bindings.size()) {
        const VkDescriptorPoolSize size{VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, kBuffersOfPool};
        auto info = made<VkDescriptorPoolCreateInfo>(VK_STRUCTURE_TYPE_DESCRIPTOR_POOL_CREATE_INFO);
        info.maxSets = sets_left_ = kSetsOfPool;
        buffers_left_ = kBuffersOfPool;
        info.poolSizeCount = 1;
        info.pPoolSizes = &size;
        VkDescriptorPool pool;
        check(fn.vkCreateDescriptorPool(device_->handle(), &info, nullptr, &pool), "recording a step");
        pools_.push_back(pool);
    }
    sets_left_--;
    buffers_left_ -= uint32_t(bindings.size());
    const VkDescriptorSet set = new_set(kernel->set_layout());
    std::vector<VkDescriptorBufferInfo> buffers;
    buffers.reserve(bindings.size());
    for (const Binding& one : bindings) buffers.push_back({one.buffer->handle(), one.offset, one.size});
    auto write = made<VkWriteDescriptorSet>(VK_STRUCTURE_TYPE_WRITE_DESCRIPTOR_SET);
    write.dstSet = set;
    write.descriptorCount = uint32_t(buffers.size());
    write.descriptorType = VK_DESCRIPTOR_TYPE_STORAGE_BUFFER;
    write.pBufferInfo = buffers.data();
    fn.vkUpdateDescriptorSets(device_->handle(), 1, &write, 0, nullptr);
    fn.vkCmdBindPipeline(commands(), VK_PIPELINE_BIND_POINT_COMPUTE, kernel->pipeline());
    fn.vkCmdBindDescriptorSets(commands(), VK_PIPELINE_BIND_POINT_COMPUTE, kernel->layout(), 0, 1, &set, 0,
                               nullptr);
    if (!push.empty())
        fn.vkCmdPushConstants(commands(), kernel->layout(), VK_SHADER_STAGE_COMPUTE_BIT, 0,
                              uint32_t(push.size()), push.data());
    kernels_.push_back(kernel);
    for (const Binding& one : bindings) buffers_.push_back(one.buffer);
}

void Program::dispatch(const std::shared_ptr<Kernel>& kernel, const std::vector<Binding>& bindings,
                       std::span<const uint8_t> push, const std::array<uint32_t, 3>& groups) {
    const uint32_t* most = device_->info().limits.maxComputeWorkGroupCount;
    for (int i = 0; i < 3; i++)
        require(groups[i] > 0 && groups[i] <= most[i],
                "a dispatch has more workgroups than the device allows");
    prepare(kernel, bindings, push);
    begin_timing();
    device_->functions().vkCmdDispatch(commands(), groups[0], groups[1], groups[2]);
    end_timing();
}

void Program::dispatch_indirect(const std::shared_ptr<Kernel>& kernel, const std::vector<Binding>& bindings,
                                std::span<const uint8_t> push, const std::shared_ptr<Buffer>& counts,
                                uint64_t offset) {
    require(counts->mapped() && offset % 4 == 0 && counts->size() >= 12 && offset <= counts->size() - 12,
            "the group counts are outside the host's buffer");
    prepare(kernel, bindings, push);
    buffers_.push_back(counts);
    begin_timing();
    device_->functions().vkCmdDispatchIndirect(commands(), counts->handle(), offset);
    end_timing();
}

void Program::begin_timing() {
    const bool is_open = !timestamps_.empty() && timestamps_.back().segment == segments_.size() &&
                         timestamps_.back().n < kTimestampsOfPool;
    if (!timed_ || is_open) return;
    const DeviceFunctions& fn = device_->functions();
    auto info = made<VkQueryPoolCreateInfo>(VK_STRUCTURE_TYPE_QUERY_POOL_CREATE_INFO);
    info.queryType = VK_QUERY_TYPE_TIMESTAMP;
    info.queryCount = kTimestampsOfPool;
    VkQueryPool pool;
    check(fn.vkCreateQueryPool(device_->handle(), &info, nullptr, &pool), "recording a step");
    timestamps_.push_back({pool, segments_.size(), 0});
    fn.vkCmdResetQueryPool(commands(), pool, 0, kTimestampsOfPool);
    end_timing();
}

void Program::end_timing() {
    if (!timed_) return;
    Timestamps& last = timestamps_.back();
    // The last stage: all earlier dispatches have ended.
    device_->functions().vkCmdWriteTimestamp(commands(), VK_PIPELINE_STAGE_BOTTOM_OF_PIPE_BIT, last.pool,
                                             last.n++);
}

std::vector<std::array<uint64_t, 2>> Program::times() const {
    const uint32_t bits = device_->info().timestamp_bits;
    const uint64_t valid = bits < 64 ? (uint64_t(1) << bits) - 1 : UINT64_MAX;
    std::vector<std::array<uint64_t, 2>> times;
    std::vector<uint64_t> ticks(kTimestampsOfPool);
    for (const Timestamps& one : timestamps_) {
        const VkResult result = device_->functions().vkGetQueryPoolResults(
            device_->handle(), one.pool, 0, one.n, one.n * sizeof(uint64_t), ticks.data(), sizeof(uint64_t),
            VK_QUERY_RESULT_64_BIT);
        require(result != VK_NOT_READY, "the program has not run to its end");
        check(result, "reading the times of a step");
        uint64_t begun = ticks[0] & valid;
        for (uint32_t i = 1; i < one.n; i++) {
            const uint64_t ended = begun + ((ticks[i] - ticks[i - 1]) & valid);  // the clock may wrap around
            times.push_back({begun, ended});
            begun = ended;
        }
    }
    return times;
}

void Program::cut() {
    require(!finished_, "the program is finished and takes no more dispatches");
    end();
    begin(-1, true);
}

void Program::hand_over() {
    require(!finished_, "the program is finished and takes no more dispatches");
    if (!device_->info().has_timelines)
        throw Error("the Vulkan device " + device_->info().name +
                    " has no timeline semaphores, so it can share no layer with the CPU: use split='layers'");
    device_->start_timelines();
    end();
    segments_.back().is_handed_over = true;
    begin(-1, false);
}

void Program::wait_for_host(int layer) {
    require(!finished_, "the program is finished and takes no more dispatches");
    end();
    begin(layer, false);
}

void Program::end() {
    auto barrier = made<VkMemoryBarrier>(VK_STRUCTURE_TYPE_MEMORY_BARRIER);
    barrier.srcAccessMask = VK_ACCESS_SHADER_WRITE_BIT;
    barrier.dstAccessMask = VK_ACCESS_HOST_READ_BIT;
    device_->functions().vkCmdPipelineBarrier(commands(), VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT,
                                              VK_PIPELINE_STAGE_HOST_BIT, 0, 1, &barrier, 0, nullptr, 0,
                                              nullptr);
    check(device_->functions().vkEndCommandBuffer(commands()), "recording a step");
}

void Program::finish() {
    require(!finished_, "the program is already finished");
    end();
    finished_ = true;
    device_->instance().check_messages();
}

// The submissions of some programs, at most kInFlight at a time.
class Run {
  public:
    Run(const std::vector<Program*>& programs, const std::function<bool()>& is_cancelled,
        const std::function<bool(int)>& on_host)
        : device_(*programs.front()->device_),
          fn_(device_.functions()),
          is_cancelled_(is_cancelled),
          on_host_(on_host) {
        device_.check_usable();
        for (const Program* program : programs) {
            require(program->finished_ && program->device_.get() == &device_, "a program is not finished");
            segments_.insert(segments_.end(), program->segments_.begin(), program->segments_.end());
        }
        for (const Program::Segment& segment : segments_)
            require(segment.host_layer < 0 || on_host, "a program waits for the host, but on_host is null");
    }

    bool all() {
        for (size_t first = 0, end; first < segments_.size() && goes_on(); first = end) {
            for (end = first + 1; end < segments_.size() && !segments_[end].is_cut;) end++;
            while (in_flight_.size() >= kInFlight) wait_for_first();
            if (!goes_on()) break;
            guarded([&] { submit({&segments_[first], end - first}); });
            serve();
        }
        while (!in_flight_.empty()) wait_for_first();
        if (raised_) std::rethrow_exception(raised_);
        check(result_, "computing a step");
        device_.instance().check_messages();
        return !cancelled_;
    }

  private:
    struct Answer {  // that a submission waits for
        int layer;
        uint64_t handed_over, answered;  // values of the device's semaphores before and after it
    };

    bool goes_on() const { return !cancelled_ && !raised_ && result_ == VK_SUCCESS; }

    // Call f. An exception ends the run, and is thrown again when no submission is in flight.
    template <class F>
    void guarded(F f) {
        try {
            f();
        } catch (...) {
            raised_ = std::current_exception();
        }
    }

    void check_cancelled() {
        guarded([&] {
            if (is_cancelled_()) cancelled_ = true;
        });
    }

    void wait_for_first() {
        VkResult waited;
        do {
            waited = fn_.vkWaitForFences(device_.handle(), 1, &in_flight_.front(), VK_TRUE, kTick);
            check_cancelled();
        } while (waited == VK_TIMEOUT);
        if (result_ == VK_SUCCESS) result_ = waited;
        fn_.vkDestroyFence(device_.handle(), in_flight_.front(), nullptr);
        in_flight_.pop_front();
    }

    // Submit segments at once, a batch for each, with the values of the semaphores between device and host.
    void submit(std::span<const Program::Segment> segments) {
        constexpr VkPipelineStageFlags kAll = VK_PIPELINE_STAGE_ALL_COMMANDS_BIT;
        std::vector<VkSubmitInfo> batches(segments.size());
        std::vector<VkTimelineSemaphoreSubmitInfo> timelines(segments.size());
        std::vector<std::array<uint64_t, 2>> values(segments.size());  // to wait for, and to signal
        answers_.clear();
        for (size_t i = 0; i < segments.size(); i++) {
            VkSubmitInfo& batch = batches[i] = made<VkSubmitInfo>(VK_STRUCTURE_TYPE_SUBMIT_INFO);
            batch.commandBufferCount = 1;
            batch.pCommandBuffers = &segments[i].commands;
            const bool waits = segments[i].host_layer >= 0, signals = segments[i].is_handed_over;
            if (!waits && !signals) continue;
            timelines[i] =
                made<VkTimelineSemaphoreSubmitInfo>(VK_STRUCTURE_TYPE_TIMELINE_SEMAPHORE_SUBMIT_INFO);
            batch.pNext = &timelines[i];
            if (waits) {
                values[i][0] = ++device_.answered.last;
                answers_.push_back({segments[i].host_layer, device_.handed_over.last, values[i][0]});
                batch.waitSemaphoreCount = timelines[i].waitSemaphoreValueCount = 1;
                batch.pWaitSemaphores = &device_.answered.semaphore;
                batch.pWaitDstStageMask = &kAll;
                timelines[i].pWaitSemaphoreValues = &values[i][0];
            }
            if (signals) {
                values[i][1] = ++device_.handed_over.last;
                batch.signalSemaphoreCount = timelines[i].signalSemaphoreValueCount = 1;
                batch.pSignalSemaphores = &device_.handed_over.semaphore;
                timelines[i].pSignalSemaphoreValues = &values[i][1];
            }
        }
        const auto fresh = made<VkFenceCreateInfo>(VK_STRUCTURE_TYPE_FENCE_CREATE_INFO);
        VkFence& fence =
            in_flight_.emplace_back(VkFence(VK_NULL_HANDLE));  // nothing may throw once submitted
        result_ = fn_.vkCreateFence(device_.handle(), &fresh, nullptr, &fence);
        if (result_ == VK_SUCCESS)
            result_ = fn_.vkQueueSubmit(device_.queue(), uint32_t(batches.size()), batches.data(), fence);
        if (result_ == VK_SUCCESS) return;
        fn_.vkDestroyFence(device_.handle(), fence, nullptr);
        in_flight_.pop_back();
    }

    // Compute the host's part of each layer of the latest submission. Every answer is signalled, even if the
    // run ends, since the device waits for it.
    void serve() {
        if (!goes_on()) return;
        for (const Answer& one : answers_) {
            await(one.handed_over);
            if (goes_on())
                guarded([&] {
                    if (!on_host_(one.layer)) cancelled_ = true;
                });
            const VkResult first = signal(one.answered);
            if (first == VK_SUCCESS) continue;
            if (goes_on()) result_ = first;
            if (signal(one.answered) == VK_SUCCESS) continue;
            device_.give_up();
            return in_flight_.clear();  // the submission will never end
        }
    }

    // Wait until the device has handed over. The wait polls first, since waking up costs more than the host's
    // part of many layers. Its ticks let a run be cancelled.
    void await(uint64_t value) {
        using Clock = std::chrono::steady_clock;
        auto info = made<VkSemaphoreWaitInfo>(VK_STRUCTURE_TYPE_SEMAPHORE_WAIT_INFO);
        info.semaphoreCount = 1;
        info.pSemaphores = &device_.handed_over.semaphore;
        info.pValues = &value;
        const auto until = Clock::now() + std::chrono::nanoseconds(kPoll);
        for (uint64_t reached = 0; goes_on() && reached < value;) {
            result_ =
                fn_.vkGetSemaphoreCounterValueKHR(device_.handle(), device_.handed_over.semaphore, &reached);
            if (!goes_on() || reached >= value) break;
            if (Clock::now() < until) {
                std::this_thread::yield();
                continue;
            }
            const VkResult waited = fn_.vkWaitSemaphoresKHR(device_.handle(), &info, kTick);
            if (waited != VK_TIMEOUT) result_ = waited;
            check_cancelled();
        }
        std::atomic_thread_fence(std::memory_order_acquire);  // the device's writes come before the counter
    }

    VkResult signal(uint64_t value) {
        auto info = made<VkSemaphoreSignalInfo>(VK_STRUCTURE_TYPE_SEMAPHORE_SIGNAL_INFO);
        info.semaphore = device_.answered.semaphore;
        info.value = value;
        return fn_.vkSignalSemaphoreKHR(device_.handle(), &info);
    }

    Device& device_;
    const DeviceFunctions& fn_;
    const std::function<bool()>& is_cancelled_;
    const std::function<bool(int)>& on_host_;
    std::vector<Program::Segment> segments_;
    std::vector<Answer> answers_;
    std::deque<VkFence> in_flight_;
    bool cancelled_ = false;
    std::exception_ptr raised_;
    VkResult result_ = VK_SUCCESS;
};

bool run(const std::vector<Program*>& programs, const std::function<bool()>& is_cancelled,
         const std::function<bool(int)>& on_host) {
    require(!programs.empty(), "there is no program to run");
    return Run(programs, is_cancelled, on_host).all();
}

}  // namespace hotset::vulkan
