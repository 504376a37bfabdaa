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
    Device,      // the device's own
    ToDevice,    // written by the host and read by the device: its own, where the host sees it
    FromDevice,  // the host's, which it reads
    Staging,     // the host's, used for copies only
};

// The type of memory for a place, of those that are allowed (a bit each); none: the device has no such
// memory.
std::optional<uint32_t> choose_memory(const VkPhysicalDeviceMemoryProperties& memories, uint32_t allowed,
                                      Place place);

// Whether what a driver once gave out as its pipeline cache is of this device and this driver: its header
// says so. What is behind the header only the driver can read.
bool is_cache_of(const DeviceInfo& info, std::span<const uint8_t> data);

// A piece of memory with its buffer. The host writes those of the device through `write`.
class Buffer {
  public:
    Buffer(std::shared_ptr<Device> device, uint64_t size, Place place);
    ~Buffer();
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    // Copies bytes into or out of it; waits for the copy, and must not be called while a program runs that
    // uses them. The range must lie inside.
    void write(uint64_t offset, std::span<const uint8_t> bytes);
    void read(uint64_t offset, std::span<uint8_t> bytes);
    void clear();
    // Where the host sees it; null where it does not.
    uint8_t* mapped() const { return mapped_; }
    uint64_t size() const { return size_; }
    uint64_t reserved() const { return reserved_; }  // bytes of the device's memory
    VkBuffer handle() const { return buffer_; }
    const std::shared_ptr<Device>& device() const { return device_; }

  private:
    // Takes memory of a place, within the device's limit, and says what it is.
    VkResult allocate(const VkMemoryRequirements& needs, Place place, VkMemoryPropertyFlags& flags);

    std::shared_ptr<Device> device_;
    uint64_t size_ = 0, reserved_ = 0;
    VkBuffer buffer_ = VK_NULL_HANDLE;
    VkDeviceMemory memory_ = VK_NULL_HANDLE;
    uint8_t* mapped_ = nullptr;
    bool is_read_ = false;  // whether the host reads what is mapped: not across the bus, a word at a time
};

// Bytes of a buffer.
struct Target {
    Buffer* buffer = nullptr;
    uint64_t offset = 0, size = 0;
};
// Writes a slice at `to`, on any thread, and says what its bytes are for, one after the other.
using Fill = std::function<std::vector<Target>(uint64_t slice, uint8_t* to)>;

using Constants = std::vector<std::pair<uint32_t, uint32_t>>;  // of a specialisation: id and value

// A compute pipeline over `n_buffers` storage buffers, bound in order, and some bytes of push constants.
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

// Used by one thread at a time.
class Device : public std::enable_shared_from_this<Device> {
  public:
    // staged: the host writes the device's memory through copies even where it could do so itself (of tests).
    // cache: what `compiled` gave before; another device's, or damaged, it is left out.
    // Throws Error for a device that is not there or cannot be used.
    static std::shared_ptr<Device> open(std::shared_ptr<Instance> instance, int index, bool staged,
                                        std::span<const uint8_t> cache);
    ~Device();
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    const DeviceInfo& info() const { return info_; }
    uint64_t allocated() const { return allocated_; }  // bytes of its memory that buffers hold
    // Buffers throw OutOfMemory where they would take more together.
    void limit(uint64_t bytes) { limit_ = bytes; }
    VkDevice handle() const { return device_; }
    VkQueue queue() const { return queue_; }
    VkCommandPool pool() const { return pool_; }
    VkPipelineCache cache() const { return cache_; }
    // The driver's pipeline cache, with every kernel that was made; empty where it gives none.
    std::vector<uint8_t> compiled() const;
    const DeviceFunctions& functions() const { return fn_; }
    Instance& instance() const { return *instance_; }
    // Copies n slices of up to so many bytes to buffers that the host does not see: one is filled while the
    // one before is copied.
    void write_slices(uint64_t n, uint64_t bytes, const Fill& fill);

  private:
    friend class Buffer;
    Device(std::shared_ptr<Instance> instance, DeviceInfo info, bool staged);
    void start(std::span<const uint8_t> cache);
    uint32_t memory_type(uint32_t allowed, Place place) const;
    // Records with `record`, submits and waits.
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
    uint64_t limit_ = UINT64_MAX;
    std::array<std::unique_ptr<Buffer>, 2> staging_;  // of write_slices, which grows as it needs
};

// Writes all tiles of these rows (device_tiles.h), from an offset on, to buffers that no program uses
// meanwhile. more: of types that have any.
void upload(const TileRows& rows, Target codes, Target more, int n_threads);

}  // namespace hotset::vulkan
