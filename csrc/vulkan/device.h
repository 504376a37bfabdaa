// An open device: its memory and its kernels.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "device_tiles.h"
#include "vulkan/loader.h"

namespace hotset::vulkan {

class Device;

// Where a buffer's memory is.
enum class Place {
    Device,      // the device's own memory
    ToDevice,    // written by the host, read by the device: host-visible device memory
    FromDevice,  // host memory that the host reads
    Staging,     // host memory used only for copies
};

// Choose the memory type for a place from the allowed ones (one bit each). Empty: the device has no such
// memory.
std::optional<uint32_t> choose_memory(const VkPhysicalDeviceMemoryProperties& memories, uint32_t allowed,
                                      Place place);

// Whether pipeline cache data from an earlier run belongs to this device and driver, according to its header.
// Only the driver can read the rest.
bool is_cache_of(const DeviceInfo& info, std::span<const uint8_t> data);

// A buffer with its memory. `write` and `read` work for every place.
class Buffer {
  public:
    Buffer(std::shared_ptr<Device> device, uint64_t size, Place place);
    ~Buffer();
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    // Copy bytes into or out of the buffer and wait. No running program may use these bytes. The range must
    // be inside the buffer.
    void write(uint64_t offset, std::span<const uint8_t> bytes);
    void read(uint64_t offset, std::span<uint8_t> bytes);
    void clear();
    // The host address; null if the memory is not host-visible.
    uint8_t* mapped() const { return mapped_; }
    uint64_t size() const { return size_; }
    uint64_t reserved() const { return reserved_; }  // bytes of device memory
    VkBuffer handle() const { return buffer_; }
    const std::shared_ptr<Device>& device() const { return device_; }

  private:
    // Allocate memory for a place, within the device's limit. Sets `flags` to its properties.
    VkResult allocate(const VkMemoryRequirements& needs, Place place, VkMemoryPropertyFlags& flags);

    std::shared_ptr<Device> device_;
    uint64_t size_ = 0, reserved_ = 0;
    VkBuffer buffer_ = VK_NULL_HANDLE;
    VkDeviceMemory memory_ = VK_NULL_HANDLE;
    uint8_t* mapped_ = nullptr;
    bool is_read_ = false;  // whether the host may read mapped memory directly, not word by word
};

// A range of a buffer.
struct Target {
    Buffer* buffer = nullptr;
    uint64_t offset = 0, size = 0;
};
// Fills `to` with a slice, on any thread, and returns the targets of its consecutive bytes.
using Fill = std::function<std::vector<Target>(uint64_t slice, uint8_t* to)>;

using Constants = std::vector<std::pair<uint32_t, uint32_t>>;  // specialisation constants: id and value

// A compute pipeline over `n_buffers` storage buffers, bound in order, with some bytes of push constants.
class Kernel {
  public:
    Kernel(std::shared_ptr<Device> device, std::span<const uint32_t> spirv, int n_buffers, int push_bytes,
           const Constants& constants);
    ~Kernel() { free(); }
    Kernel(const Kernel&) = delete;
    Kernel& operator=(const Kernel&) = delete;

    int n_buffers() const { return n_buffers_; }
    int push_bytes() const { return push_bytes_; }
    VkPipeline pipeline() const { return pipeline_; }
    VkPipelineLayout layout() const { return layout_; }
    VkDescriptorSetLayout set_layout() const { return set_layout_; }
    const std::shared_ptr<Device>& device() const { return device_; }

  private:
    void make(std::span<const uint32_t> spirv, const Constants& constants);
    void free();

    std::shared_ptr<Device> device_;
    int n_buffers_, push_bytes_;
    VkDescriptorSetLayout set_layout_ = VK_NULL_HANDLE;
    VkPipelineLayout layout_ = VK_NULL_HANDLE;
    VkPipeline pipeline_ = VK_NULL_HANDLE;
};

// An open device. Only one thread at a time may use it.
class Device : public std::enable_shared_from_this<Device> {
  public:
    // staged: write device memory through copies even if it is host-visible (for tests). cache: an earlier
    // result of `compiled`; ignored if damaged or of another device. Throws Error if the device does not
    // exist or cannot be used.
    static std::shared_ptr<Device> open(std::shared_ptr<Instance> instance, int index, bool staged,
                                        std::span<const uint8_t> cache);
    ~Device();
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    const DeviceInfo& info() const { return info_; }
    uint64_t allocated() const { return allocated_; }  // bytes of device memory that buffers hold
    // Set the limit above which allocating buffers throws OutOfMemory.
    void limit(uint64_t bytes) { limit_ = bytes; }
    VkDevice handle() const { return device_; }
    VkQueue queue() const { return queue_; }
    VkCommandPool pool() const { return pool_; }
    VkPipelineCache cache() const { return cache_; }
    // Return the driver's pipeline cache with all kernels so far; empty if the driver provides none.
    std::vector<uint8_t> compiled() const;
    const DeviceFunctions& functions() const { return fn_; }
    // A timeline semaphore. last: the largest value that a submission signals or waits for.
    struct Timeline {
        VkSemaphore semaphore = VK_NULL_HANDLE;
        uint64_t last = 0;
    };
    // They count how often the device handed data over to the host, and the host's answers; null before
    // start_timelines.
    Timeline handed_over, answered;
    void start_timelines();
    // Mark the queue as one that will never end, since no answer can be signalled. Later runs and copies are
    // refused, and nothing that the queue may use is freed.
    void give_up() { given_up_ = true; }
    bool is_given_up() const { return given_up_; }
    // Throw Error if the device was given up.
    void check_usable() const;
    Instance& instance() const { return *instance_; }
    // Copy n slices of up to `bytes` bytes to buffers that are not host-visible. The next slice is filled
    // while one is copied.
    void write_slices(uint64_t n, uint64_t bytes, const Fill& fill);

  private:
    friend class Buffer;
    Device(std::shared_ptr<Instance> instance, DeviceInfo info, bool staged);
    void start(std::span<const uint8_t> cache);
    uint32_t memory_type(uint32_t allowed, Place place) const;
    // Record with `record`, submit and wait.
    template <class F>
    void run_once(const std::string& what, F record);

    std::shared_ptr<Instance> instance_;
    DeviceInfo info_;
    bool staged_;
    VkDevice device_ = VK_NULL_HANDLE;
    VkQueue queue_ = VK_NULL_HANDLE;
    VkCommandPool pool_ = VK_NULL_HANDLE;
    VkPipelineCache cache_ = VK_NULL_HANDLE;
    DeviceFunctions fn_;
    std::atomic<uint64_t> allocated_{0};
    std::atomic<bool> given_up_{false};
    uint64_t limit_ = UINT64_MAX;
    std::array<std::unique_ptr<Buffer>, 2> staging_;  // for write_slices; grows as needed
};

// Write all tiles of these rows (device_tiles.h) at an offset of buffers that no running program uses. more:
// for types that have it.
void upload(const TileRows& rows, Target codes, Target more, int n_threads);

}  // namespace hotset::vulkan
