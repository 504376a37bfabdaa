#include "vulkan/device.h"

#include <algorithm>
#include <cstring>
#include <future>

namespace hotset::vulkan {
namespace {

constexpr uint64_t kSliceBytes = 8 << 20;  // approximate bytes copied to a device at a time
constexpr uint64_t kTick = 50'000'000;     // nanoseconds of one wait

std::string megabytes(uint64_t n) {
    return std::to_string((n + (1 << 20) - 1) >> 20) + " MiB";
}

}  // namespace

Buffer::Buffer(std::shared_ptr<Device> device, uint64_t size, Place place)
    : device_(std::move(device)), size_(size) {
    const DeviceFunctions& fn = device_->functions();
    const VkDevice vk = device_->handle();
    auto info = made<VkBufferCreateInfo>(VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO);
    info.size = size;
    info.usage = VK_BUFFER_USAGE_STORAGE_BUFFER_BIT | VK_BUFFER_USAGE_TRANSFER_SRC_BIT |
                 VK_BUFFER_USAGE_TRANSFER_DST_BIT | VK_BUFFER_USAGE_INDIRECT_BUFFER_BIT;
    const std::string what = "allocating " + megabytes(size);
    check(fn.vkCreateBuffer(vk, &info, nullptr, &buffer_), what);
    VkMemoryRequirements needs;
    fn.vkGetBufferMemoryRequirements(vk, buffer_, &needs);
    VkMemoryPropertyFlags flags;
    VkResult result;
    try {
        result = allocate(needs, place, flags);
        // The host-visible window of device memory may be full.
        if (result != VK_SUCCESS && place == Place::ToDevice) result = allocate(needs, Place::Staging, flags);
        check(result, what);
        check(fn.vkBindBufferMemory(vk, buffer_, memory_, 0), what);
        if (flags & VK_MEMORY_PROPERTY_HOST_COHERENT_BIT && !(place == Place::Device && device_->staged_))
            check(fn.vkMapMemory(vk, memory_, 0, VK_WHOLE_SIZE, 0, reinterpret_cast<void**>(&mapped_)),
                  "mapping " + megabytes(size));
    } catch (...) {
        fn.vkDestroyBuffer(vk, buffer_, nullptr);
        fn.vkFreeMemory(vk, memory_, nullptr);
        throw;
    }
    device_->allocated_ += reserved_;
    is_read_ = place == Place::FromDevice || flags & VK_MEMORY_PROPERTY_HOST_CACHED_BIT;
}

VkResult Buffer::allocate(const VkMemoryRequirements& needs, Place place, VkMemoryPropertyFlags& flags) {
    auto wanted = made<VkMemoryAllocateInfo>(VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO);
    wanted.allocationSize = needs.size;
    wanted.memoryTypeIndex = device_->memory_type(needs.memoryTypeBits, place);
    flags = device_->info().memories.memoryTypes[wanted.memoryTypeIndex].propertyFlags;
    // The budget limits device memory only.
    reserved_ = flags & VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT ? needs.size : 0;
    const uint64_t there = device_->allocated_, limit = device_->limit_;
    if (reserved_ > limit || there > limit - reserved_)
        throw OutOfMemory("the model needs more than the budget of " + megabytes(limit) + " on " +
                          device_->info().name + "; raise vram_budget, or lower the context");
    return device_->functions().vkAllocateMemory(device_->handle(), &wanted, nullptr, &memory_);
}

Buffer::~Buffer() {
    device_->allocated_ -= reserved_;
    if (device_->is_given_up()) return;
    const DeviceFunctions& fn = device_->functions();
    fn.vkDestroyBuffer(device_->handle(), buffer_, nullptr);
    fn.vkFreeMemory(device_->handle(), memory_, nullptr);
}

void Buffer::write(uint64_t offset, std::span<const uint8_t> bytes) {
    if (mapped_) {
        std::memcpy(mapped_ + offset, bytes.data(), bytes.size());
        return;
    }
    const uint64_t size = bytes.size();
    device_->write_slices((size + kSliceBytes - 1) / kSliceBytes, std::min(size, kSliceBytes),
                          [&](uint64_t slice, uint8_t* to) {
                              const uint64_t at = slice * kSliceBytes, n = std::min(size - at, kSliceBytes);
                              std::memcpy(to, bytes.data() + at, n);
                              return std::vector<Target>{{this, offset + at, n}};
                          });
}

void Buffer::read(uint64_t offset, std::span<uint8_t> bytes) {
    if (mapped_ && is_read_) {
        std::memcpy(bytes.data(), mapped_ + offset, bytes.size());
        return;
    }
    if (bytes.empty()) return;
    Buffer staging(device_, bytes.size(), Place::FromDevice);
    device_->run_once("reading back", [&](VkCommandBuffer commands) {
        const VkBufferCopy region{offset, 0, bytes.size()};
        device_->functions().vkCmdCopyBuffer(commands, buffer_, staging.handle(), 1, &region);
    });
    std::memcpy(bytes.data(), staging.mapped(), bytes.size());
}

void Buffer::clear() {
    device_->run_once("clearing memory", [&](VkCommandBuffer commands) {
        device_->functions().vkCmdFillBuffer(commands, buffer_, 0, VK_WHOLE_SIZE, 0);
    });
}

Kernel::Kernel(std::shared_ptr<Device> device, std::span<const uint32_t> spirv, int n_buffers, int push_bytes,
               const Constants& constants)
    : device_(std::move(device)), n_buffers_(n_buffers), push_bytes_(push_bytes) {
    try {
        make(spirv, constants);
    } catch (...) {
        free();
        throw;
    }
}

void Kernel::make(std::span<const uint32_t> spirv, const Constants& constants) {
    const DeviceFunctions& fn = device_->functions();
    const VkDevice vk = device_->handle();
    const char* what = "compiling a kernel";
    std::vector<VkDescriptorSetLayoutBinding> bindings(n_buffers_);
    for (int i = 0; i < n_buffers_; i++)
        bindings[i] = {uint32_t(i), VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, 1, VK_SHADER_STAGE_COMPUTE_BIT,
                       nullptr};
    auto set = made<VkDescriptorSetLayoutCreateInfo>(VK_STRUCTURE_TYPE_DESCRIPTOR_SET_LAYOUT_CREATE_INFO);
    set.bindingCount = uint32_t(n_buffers_);
    set.pBindings = bindings.data();
    check(fn.vkCreateDescriptorSetLayout(vk, &set, nullptr, &set_layout_), what);
    const VkPushConstantRange range{VK_SHADER_STAGE_COMPUTE_BIT, 0, uint32_t(push_bytes_)};
    auto layout = made<VkPipelineLayoutCreateInfo>(VK_STRUCTURE_TYPE_PIPELINE_LAYOUT_CREATE_INFO);
    layout.setLayoutCount = 1;
    layout.pSetLayouts = &set_layout_;
    layout.pushConstantRangeCount = push_bytes_ ? 1 : 0;
    layout.pPushConstantRanges = &range;
    check(fn.vkCreatePipelineLayout(vk, &layout, nullptr, &layout_), what);

    auto code = made<VkShaderModuleCreateInfo>(VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO);
    code.codeSize = spirv.size_bytes();
    code.pCode = spirv.data();
    VkShaderModule module;
    check(fn.vkCreateShaderModule(vk, &code, nullptr, &module), what);
    std::vector<VkSpecializationMapEntry> entries(constants.size());
    std::vector<uint32_t> values(constants.size());
    for (uint32_t i = 0; i < entries.size(); i++) {
        entries[i] = {constants[i].first, i * 4, 4};
        values[i] = constants[i].second;
    }
    const VkSpecializationInfo special{uint32_t(entries.size()), entries.data(), 4 * values.size(),
                                       values.data()};
    auto pipeline = made<VkComputePipelineCreateInfo>(VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO);
    pipeline.layout = layout_;
    pipeline.stage.sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO;
    pipeline.stage.stage = VK_SHADER_STAGE_COMPUTE_BIT;
    pipeline.stage.module = module;
    pipeline.stage.pName = "main";
    pipeline.stage.pSpecializationInfo = &special;
    const VkResult result =
        fn.vkCreateComputePipelines(vk, device_->cache(), 1, &pipeline, nullptr, &pipeline_);
    fn.vkDestroyShaderModule(vk, module, nullptr);
    check(result, what);
    device_->instance().check_messages();
}

void Kernel::free() {
    if (device_->is_given_up()) return;
    const DeviceFunctions& fn = device_->functions();
    fn.vkDestroyPipeline(device_->handle(), pipeline_, nullptr);
    fn.vkDestroyPipelineLayout(device_->handle(), layout_, nullptr);
    fn.vkDestroyDescriptorSetLayout(device_->handle(), set_layout_, nullptr);
}

std::optional<uint32_t> choose_memory(const VkPhysicalDeviceMemoryProperties& memories, uint32_t allowed,
                                      Place place) {
    constexpr VkMemoryPropertyFlags kOwn = VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT,
                                    kHost = VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT |
                                            VK_MEMORY_PROPERTY_HOST_COHERENT_BIT,
                                    kCached = VK_MEMORY_PROPERTY_HOST_CACHED_BIT;
    // Candidates in order of preference. Host-visible device memory comes first because it saves copies. If
    // it is only a window of 256 MiB, plain device memory comes first.
    uint64_t largest = 0;
    for (uint32_t i = 0; i < memories.memoryHeapCount; i++)
        if (memories.memoryHeaps[i].flags & VK_MEMORY_HEAP_DEVICE_LOCAL_BIT)
            largest = std::max<uint64_t>(largest, memories.memoryHeaps[i].size);
    std::vector<VkMemoryPropertyFlags> wishes;
    if (place == Place::Device) wishes = {kOwn | kHost, kOwn, 0};
    if (place == Place::ToDevice) wishes = {kOwn | kHost, kHost};
    if (place == Place::Staging) wishes = {kHost};
    if (place == Place::FromDevice) wishes = {kHost | kCached, kHost};
    for (const VkMemoryPropertyFlags wish : wishes)
        for (uint32_t i = 0; i < memories.memoryTypeCount; i++) {
            const VkMemoryType& type = memories.memoryTypes[i];
            const bool is_small = memories.memoryHeaps[type.heapIndex].size < largest;
            if (!(allowed >> i & 1) || (type.propertyFlags & wish) != wish) continue;
            if (place == Place::Device && is_small) continue;
            return i;
        }
    return std::nullopt;
}

bool is_cache_of(const DeviceInfo& info, std::span<const uint8_t> data) {
    const auto word = [&](size_t i) {
        uint32_t value;
        std::memcpy(&value, data.data() + 4 * i, 4);
        return value;
    };
    constexpr uint32_t kHeader = 16 + VK_UUID_SIZE;
    return data.size() >= kHeader && word(0) >= kHeader && word(0) <= data.size() &&
           word(1) == VK_PIPELINE_CACHE_HEADER_VERSION_ONE && word(2) == info.vendor &&
           word(3) == info.device && std::equal(info.cache_uuid.begin(), info.cache_uuid.end(), &data[16]);
}

std::shared_ptr<Device> Device::open(std::shared_ptr<Instance> instance, int index, bool staged,
                                     std::span<const uint8_t> cache) {
    std::vector<DeviceInfo> found = instance->devices();
    if (index < 0 || size_t(index) >= found.size())
        throw Error("there is no Vulkan device " + std::to_string(index) + ": the driver has " +
                    std::to_string(found.size()) + ", numbered from 0");
    if (!found[index].refusal.empty())
        throw Error("the Vulkan device " + found[index].name + " cannot be used: " + found[index].refusal);
    std::shared_ptr<Device> device(new Device(std::move(instance), std::move(found[index]), staged));
    device->start(cache);  // its destructor cleans up if this throws
    return device;
}

Device::Device(std::shared_ptr<Instance> instance, DeviceInfo info, bool staged)
    : instance_(std::move(instance)), info_(std::move(info)), staged_(staged) {}

void Device::start(std::span<const uint8_t> cache) {
    const InstanceFunctions& of_instance = instance_->functions();
    const float priority = 1;
    auto queue = made<VkDeviceQueueCreateInfo>(VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO);
    queue.queueFamilyIndex = info_.queue_family;
    queue.queueCount = 1;
    queue.pQueuePriorities = &priority;
    auto device = made<VkDeviceCreateInfo>(VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO);
    device.queueCreateInfoCount = 1;
    device.pQueueCreateInfos = &queue;
    // Only Vulkan 1.1 is needed. A partial implementation (MoltenVK) requires this extension.
    std::vector<const char*> extensions;
    if (info_.is_subset) extensions.push_back("VK_KHR_portability_subset");
    auto dots = made<VkPhysicalDeviceShaderIntegerDotProductFeatures>(
        VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_INTEGER_DOT_PRODUCT_FEATURES);
    if (info_.has_integer_dots) {
        dots.shaderIntegerDotProduct = VK_TRUE;
        device.pNext = &dots;
        extensions.push_back(VK_KHR_SHADER_INTEGER_DOT_PRODUCT_EXTENSION_NAME);
    }
    auto timelines = made<VkPhysicalDeviceTimelineSemaphoreFeatures>(
        VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_TIMELINE_SEMAPHORE_FEATURES);
    if (info_.has_timelines) {
        timelines.timelineSemaphore = VK_TRUE;
        timelines.pNext = const_cast<void*>(device.pNext);
        device.pNext = &timelines;
        extensions.push_back(VK_KHR_TIMELINE_SEMAPHORE_EXTENSION_NAME);
    }
    device.enabledExtensionCount = uint32_t(extensions.size());
    device.ppEnabledExtensionNames = extensions.data();
    const std::string what = "opening " + info_.name;
    check(of_instance.vkCreateDevice(info_.handle, &device, nullptr, &device_), what);
#define LOAD(name) fn_.name.load(of_instance.vkGetDeviceProcAddr(device_, #name), #name);
    HOTSET_VULKAN_DEVICE_FUNCTIONS(LOAD)
#undef LOAD
    fn_.vkGetDeviceQueue(device_, info_.queue_family, 0, &queue_);
    auto pool = made<VkCommandPoolCreateInfo>(VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO);
    pool.queueFamilyIndex = info_.queue_family;
    check(fn_.vkCreateCommandPool(device_, &pool, nullptr, &pool_), what);
    auto kept = made<VkPipelineCacheCreateInfo>(VK_STRUCTURE_TYPE_PIPELINE_CACHE_CREATE_INFO);
    if (is_cache_of(info_, cache)) {
        kept.initialDataSize = cache.size();
        kept.pInitialData = cache.data();
    }
    VkResult result = fn_.vkCreatePipelineCache(device_, &kept, nullptr, &cache_);
    if (result != VK_SUCCESS && kept.initialDataSize) {  // the driver rejects the cache data
        kept.initialDataSize = 0;
        result = fn_.vkCreatePipelineCache(device_, &kept, nullptr, &cache_);
    }
    check(result, what);
}

void Device::start_timelines() {
    auto type = made<VkSemaphoreTypeCreateInfo>(VK_STRUCTURE_TYPE_SEMAPHORE_TYPE_CREATE_INFO);
    type.semaphoreType = VK_SEMAPHORE_TYPE_TIMELINE;
    auto semaphore = made<VkSemaphoreCreateInfo>(VK_STRUCTURE_TYPE_SEMAPHORE_CREATE_INFO);
    semaphore.pNext = &type;
    for (Timeline* one : {&handed_over, &answered})
        if (!one->semaphore)
            check(fn_.vkCreateSemaphore(device_, &semaphore, nullptr, &one->semaphore), "recording a step");
}

std::vector<uint8_t> Device::compiled() const {
    size_t n = 0;
    if (fn_.vkGetPipelineCacheData(device_, cache_, &n, nullptr) != VK_SUCCESS) return {};
    std::vector<uint8_t> data(n);
    if (fn_.vkGetPipelineCacheData(device_, cache_, &n, data.data()) != VK_SUCCESS) return {};
    data.resize(n);
    return data;
}

void Device::check_usable() const {
    if (is_given_up())
        throw Error("the Vulkan device " + info_.name +
                    " waits forever for a result of the CPU, whose signal failed; load the model again");
}

Device::~Device() {
    if (!device_ || is_given_up()) return;
    fn_.vkDeviceWaitIdle(device_);
    staging_ = {};
    fn_.vkDestroyPipelineCache(device_, cache_, nullptr);
    for (const Timeline* one : {&handed_over, &answered})
        if (one->semaphore) fn_.vkDestroySemaphore(device_, one->semaphore, nullptr);
    if (pool_) fn_.vkDestroyCommandPool(device_, pool_, nullptr);
    fn_.vkDestroyDevice(device_, nullptr);
    instance_->set_messages_aside();  // the next device did not cause them
}

uint32_t Device::memory_type(uint32_t allowed, Place place) const {
    const std::optional<uint32_t> found = choose_memory(info_.memories, allowed, place);
    if (!found) throw Error("the Vulkan device " + info_.name + " lacks a kind of memory that hotset needs");
    return *found;
}

template <class F>
void Device::run_once(const std::string& what, F record) {
    check_usable();
    auto info = made<VkCommandBufferAllocateInfo>(VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO);
    info.commandPool = pool_;
    info.level = VK_COMMAND_BUFFER_LEVEL_PRIMARY;
    info.commandBufferCount = 1;
    VkCommandBuffer commands;
    check(fn_.vkAllocateCommandBuffers(device_, &info, &commands), what);
    VkFence fence = VK_NULL_HANDLE;
    const auto ended = [&](VkResult result) {
        if (fence) fn_.vkDestroyFence(device_, fence, nullptr);
        fn_.vkFreeCommandBuffers(device_, pool_, 1, &commands);
        check(result, what);
    };
    auto begin = made<VkCommandBufferBeginInfo>(VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO);
    begin.flags = VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT;
    VkResult result = fn_.vkBeginCommandBuffer(commands, &begin);
    if (result != VK_SUCCESS) return ended(result);
    auto barrier = made<VkMemoryBarrier>(VK_STRUCTURE_TYPE_MEMORY_BARRIER);
    barrier.srcAccessMask = VK_ACCESS_SHADER_WRITE_BIT | VK_ACCESS_TRANSFER_WRITE_BIT;
    barrier.dstAccessMask = VK_ACCESS_TRANSFER_READ_BIT | VK_ACCESS_TRANSFER_WRITE_BIT;
    fn_.vkCmdPipelineBarrier(commands, VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT | VK_PIPELINE_STAGE_TRANSFER_BIT,
                             VK_PIPELINE_STAGE_TRANSFER_BIT, 0, 1, &barrier, 0, nullptr, 0, nullptr);
    record(commands);
    barrier.srcAccessMask = VK_ACCESS_TRANSFER_WRITE_BIT;
    barrier.dstAccessMask = VK_ACCESS_HOST_READ_BIT | VK_ACCESS_SHADER_READ_BIT;
    fn_.vkCmdPipelineBarrier(commands, VK_PIPELINE_STAGE_TRANSFER_BIT,
                             VK_PIPELINE_STAGE_HOST_BIT | VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, 0, 1,
                             &barrier, 0, nullptr, 0, nullptr);
    result = fn_.vkEndCommandBuffer(commands);
    const auto fresh = made<VkFenceCreateInfo>(VK_STRUCTURE_TYPE_FENCE_CREATE_INFO);
    if (result == VK_SUCCESS) result = fn_.vkCreateFence(device_, &fresh, nullptr, &fence);
    auto submit = made<VkSubmitInfo>(VK_STRUCTURE_TYPE_SUBMIT_INFO);
    submit.commandBufferCount = 1;
    submit.pCommandBuffers = &commands;
    if (result == VK_SUCCESS) result = fn_.vkQueueSubmit(queue_, 1, &submit, fence);
    if (result == VK_SUCCESS) {
        do {
            result = fn_.vkWaitForFences(device_, 1, &fence, VK_TRUE, kTick);
        } while (result == VK_TIMEOUT);
    }
    ended(result);
    instance_->check_messages();
}

void Device::write_slices(uint64_t n, uint64_t bytes, const Fill& fill) {
    // The device's own buffers must not keep it alive.
    const std::shared_ptr<Device> self(std::shared_ptr<Device>(), this);
    for (uint64_t i = 0; i < std::min<uint64_t>(n, 2); i++)
        if (!staging_[i] || staging_[i]->size() < bytes)
            staging_[i] = std::make_unique<Buffer>(self, bytes, Place::Staging);
    std::future<std::vector<Target>> filled;  // its destructor waits
    for (uint64_t i = 0; i < n; i++) {
        const std::vector<Target> targets = i ? filled.get() : fill(0, staging_[0]->mapped());
        if (i + 1 < n) filled = std::async(fill, i + 1, staging_[(i + 1) % 2]->mapped());
        run_once("copying to the device", [&](VkCommandBuffer commands) {
            VkBufferCopy region{};
            for (const Target& target : targets) {
                region.dstOffset = target.offset;
                region.size = target.size;
                fn_.vkCmdCopyBuffer(commands, staging_[i % 2]->handle(), target.buffer->handle(), 1, &region);
                region.srcOffset += target.size;
            }
        });
    }
}

void upload(const TileRows& rows, Target codes, Target more, int n_threads) {
    const TileBytes bytes = tile_bytes(rows.type, rows.cols);
    const size_t n = rows.n_tiles(), slice_of = std::max<size_t>(kSliceBytes / (bytes.codes + bytes.more), 1);
    if (codes.buffer->mapped() && (!more.buffer || more.buffer->mapped()))
        return put_tiles(rows, 0, n, codes.buffer->mapped() + codes.offset,
                         more.buffer ? more.buffer->mapped() + more.offset : nullptr, n_threads);
    codes.buffer->device()->write_slices(
        (n + slice_of - 1) / slice_of, std::min(slice_of, n) * (bytes.codes + bytes.more),
        [&](uint64_t slice, uint8_t* to) {
            const size_t first = slice * slice_of, last = std::min(first + slice_of, n);
            const size_t of_codes = (last - first) * bytes.codes;
            put_tiles(rows, first, last, to, to + of_codes, n_threads);
            std::vector<Target> targets{{codes.buffer, codes.offset + first * bytes.codes, of_codes}};
            if (more.buffer)
                targets.push_back(
                    {more.buffer, more.offset + first * bytes.more, (last - first) * bytes.more});
            return targets;
        });
}

}  // namespace hotset::vulkan
