// Loads Vulkan at run time. Nothing links with it, and without it the rest of hotset works.
#pragma once

#define VK_NO_PROTOTYPES
#include <vulkan/vulkan_core.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace hotset::vulkan {

// The driver is missing, refuses or fails. The message is meant for users.
struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};
struct OutOfMemory : Error {
    using Error::Error;
};

// Return a zeroed Vulkan structure of a type. If an enumeration has no zero, the caller must set it.
template <class T>
T made(VkStructureType type) {
    T structure{};  // NOLINT(bugprone-invalid-enum-default-initialization)
    structure.sType = type;
    return structure;
}

// For tests: make the n-th next call of a Vulkan function return `result`, and the later ones too if
// `lasting`. n = 0: stop.
void fail_call(const std::string& name, int n, VkResult result, bool lasting);
// Count a call and return the result that it must return; VK_SUCCESS: call the function.
VkResult injected_failure(const char* name);

// A Vulkan function. A call that must fail (fail_call) is not made; only a wait is made first, so that
// nothing is in use when it is freed.
template <class P>
class Function;
template <class R, class... A>
class Function<R(VKAPI_PTR*)(A...)> {
  public:
    void load(PFN_vkVoidFunction address, const char* name) {
        call_ = reinterpret_cast<R(VKAPI_PTR*)(A...)>(address);
        name_ = name;
    }
    R operator()(A... given) const {
        if constexpr (std::is_same_v<R, VkResult>) {
            const bool waits = !std::strcmp(name_, "vkWaitForFences");
            if (waits)
                if (const VkResult waited = call_(given...); waited != VK_SUCCESS) return waited;
            const VkResult failure = injected_failure(name_);
            if (waits || failure != VK_SUCCESS) return failure;
        }
        return call_(given...);
    }

  private:
    R(VKAPI_PTR* call_)(A...) = nullptr;
    const char* name_ = "";
};

// Throw OutOfMemory or Error unless the result is success. what: for example "allocating 3 MiB".
void check(VkResult result, const std::string& what);

#define HOTSET_VULKAN_INSTANCE_FUNCTIONS(F)     \
    F(vkDestroyInstance)                        \
    F(vkEnumeratePhysicalDevices)               \
    F(vkGetPhysicalDeviceProperties2)           \
    F(vkGetPhysicalDeviceFeatures2)             \
    F(vkGetPhysicalDeviceMemoryProperties2)     \
    F(vkGetPhysicalDeviceQueueFamilyProperties) \
    F(vkEnumerateDeviceExtensionProperties)     \
    F(vkCreateDevice)                           \
    F(vkGetDeviceProcAddr)

#define HOTSET_VULKAN_DEVICE_FUNCTIONS(F) \
    F(vkDestroyDevice)                    \
    F(vkGetDeviceQueue)                   \
    F(vkQueueSubmit)                      \
    F(vkDeviceWaitIdle)                   \
    F(vkAllocateMemory)                   \
    F(vkFreeMemory)                       \
    F(vkMapMemory)                        \
    F(vkCreateBuffer)                     \
    F(vkDestroyBuffer)                    \
    F(vkGetBufferMemoryRequirements)      \
    F(vkBindBufferMemory)                 \
    F(vkCreateFence)                      \
    F(vkDestroyFence)                     \
    F(vkResetFences)                      \
    F(vkWaitForFences)                    \
    F(vkCreateSemaphore)                  \
    F(vkDestroySemaphore)                 \
    F(vkGetSemaphoreCounterValueKHR)      \
    F(vkWaitSemaphoresKHR)                \
    F(vkSignalSemaphoreKHR)               \
    F(vkCreateShaderModule)               \
    F(vkDestroyShaderModule)              \
    F(vkCreateDescriptorSetLayout)        \
    F(vkDestroyDescriptorSetLayout)       \
    F(vkCreatePipelineLayout)             \
    F(vkDestroyPipelineLayout)            \
    F(vkCreateComputePipelines)           \
    F(vkDestroyPipeline)                  \
    F(vkCreatePipelineCache)              \
    F(vkDestroyPipelineCache)             \
    F(vkGetPipelineCacheData)             \
    F(vkCreateDescriptorPool)             \
    F(vkDestroyDescriptorPool)            \
    F(vkAllocateDescriptorSets)           \
    F(vkUpdateDescriptorSets)             \
    F(vkCreateCommandPool)                \
    F(vkDestroyCommandPool)               \
    F(vkAllocateCommandBuffers)           \
    F(vkFreeCommandBuffers)               \
    F(vkBeginCommandBuffer)               \
    F(vkEndCommandBuffer)                 \
    F(vkCmdBindPipeline)                  \
    F(vkCmdBindDescriptorSets)            \
    F(vkCmdPushConstants)                 \
    F(vkCmdDispatch)                      \
    F(vkCmdDispatchIndirect)              \
    F(vkCmdPipelineBarrier)               \
    F(vkCmdCopyBuffer)                    \
    F(vkCmdFillBuffer)                    \
    F(vkCreateQueryPool)                  \
    F(vkDestroyQueryPool)                 \
    F(vkGetQueryPoolResults)              \
    F(vkCmdResetQueryPool)                \
    F(vkCmdWriteTimestamp)

#define HOTSET_VULKAN_MEMBER(name) Function<PFN_##name> name;  // NOLINT(bugprone-macro-parentheses): a member

struct InstanceFunctions {
    HOTSET_VULKAN_INSTANCE_FUNCTIONS(HOTSET_VULKAN_MEMBER)
};
struct DeviceFunctions {
    HOTSET_VULKAN_DEVICE_FUNCTIONS(HOTSET_VULKAN_MEMBER)
};

// The properties of a device that is not open. refusal: why it cannot be used; empty if it can. features:
// optional features, for display. subgroup: lanes per subgroup.
struct DeviceInfo {
    int index = 0;
    std::string name, kind, driver, refusal;
    std::vector<std::string> features;
    uint32_t vendor = 0, device = 0, subgroup = 0;
    std::array<uint8_t, VK_UUID_SIZE> cache_uuid{};  // identifies the driver's compiler
    uint32_t api_version = 0;
    uint64_t memory = 0;  // bytes of its own heaps; an integrated device shares them with the host
    uint64_t free = 0;    // free bytes of `memory` if the driver reports them; otherwise `memory`
    VkPhysicalDevice handle = VK_NULL_HANDLE;
    VkPhysicalDeviceLimits limits{};
    uint64_t max_allocation = 0;
    uint32_t queue_family = 0;
    uint32_t timestamp_bits = 0;    // valid bits of the queue's timestamps; 0: it has none
    bool is_subset = false;         // implements a subset of Vulkan, as MoltenVK does
    bool has_integer_dots = false;  // instructions for dot products of four bytes
    bool has_timelines = false;     // timeline semaphores, needed for layers that the host shares
    VkPhysicalDeviceMemoryProperties memories{};
};

// A Vulkan instance and the messages of its validation layer.
class Instance {
  public:
    // Return the process's instance. validate: use the validation layer with synchronisation validation, and
    // turn each of its warnings into an error of the call that caused it. Throws Error without a loader,
    // driver or layer.
    static std::shared_ptr<Instance> open(bool validate);
    ~Instance();
    Instance(const Instance&) = delete;
    Instance& operator=(const Instance&) = delete;

    std::vector<DeviceInfo> devices() const;
    // Throw Error with the validation layer's messages since the last call.
    void check_messages();
    // For calls that must not throw: keep the messages for `late_messages`.
    void set_messages_aside();
    // Return the messages set aside since the last call, mostly objects that outlived their device.
    std::vector<std::string> late_messages();
    const InstanceFunctions& functions() const { return fn_; }

  private:
    Instance() = default;
    void start(bool validate);
    DeviceInfo describe(int index, VkPhysicalDevice handle) const;
    static VKAPI_ATTR VkBool32 VKAPI_CALL report(VkDebugUtilsMessageSeverityFlagBitsEXT,
                                                 VkDebugUtilsMessageTypeFlagsEXT,
                                                 const VkDebugUtilsMessengerCallbackDataEXT*, void*);

    VkInstance instance_ = VK_NULL_HANDLE;
    VkDebugUtilsMessengerEXT messenger_ = VK_NULL_HANDLE;
    PFN_vkGetInstanceProcAddr get_ = nullptr;
    InstanceFunctions fn_;
    std::mutex mutex_;
    std::vector<std::string> messages_, late_;
};

}  // namespace hotset::vulkan
