#include "vulkan/loader.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <utility>

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace hotset::vulkan {
namespace {

constexpr uint32_t kNvidia = 0x10DE;  // whose driver versions have a format of their own

// The loader stays open: drivers do not survive being unloaded.
PFN_vkGetInstanceProcAddr open_loader() {
#ifdef _WIN32
    // Drivers install the library there; a plain name would search the current folder and PATH.
    if (HMODULE library = LoadLibraryExA("vulkan-1.dll", nullptr, LOAD_LIBRARY_SEARCH_SYSTEM32))
        return reinterpret_cast<PFN_vkGetInstanceProcAddr>(
            reinterpret_cast<void*>(GetProcAddress(library, "vkGetInstanceProcAddr")));
#else
#ifdef __APPLE__
    constexpr std::array kNames = {"libvulkan.1.dylib", "libvulkan.dylib", "libMoltenVK.dylib"};
#else
    constexpr std::array kNames = {"libvulkan.so.1", "libvulkan.so"};
#endif
    for (const char* name : kNames)
        if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL))
            if (void* symbol = dlsym(library, "vkGetInstanceProcAddr"))
                return reinterpret_cast<PFN_vkGetInstanceProcAddr>(symbol);
#endif
    throw Error(
        "there is no Vulkan loader on this machine; install the driver of the GPU (on Debian and its "
        "relatives libvulkan1 and mesa-vulkan-drivers)");
}

const char* name_of(VkResult result) {
    switch (result) {
        case VK_ERROR_DEVICE_LOST:
            return "the device was lost (its driver was reset, or its watchdog ended the step); load the "
                   "model again, or leave `device` out";
        case VK_ERROR_INITIALIZATION_FAILED:
            return "it could not be initialised";
        case VK_ERROR_LAYER_NOT_PRESENT:
            return "the layer is not installed";
        case VK_ERROR_EXTENSION_NOT_PRESENT:
            return "an extension is missing";
        case VK_ERROR_FEATURE_NOT_PRESENT:
            return "a feature is missing";
        case VK_ERROR_INCOMPATIBLE_DRIVER:
            return "no driver was found";
        case VK_ERROR_TOO_MANY_OBJECTS:
            return "too many allocations";
        default:
            return nullptr;
    }
}

const char* kind_of(VkPhysicalDeviceType type) {
    switch (type) {
        case VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU:
            return "discrete";
        case VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU:
            return "integrated";
        case VK_PHYSICAL_DEVICE_TYPE_VIRTUAL_GPU:
            return "virtual";
        case VK_PHYSICAL_DEVICE_TYPE_CPU:
            return "software";
        default:
            return "other";
    }
}

struct Injected {
    std::mutex mutex;
    std::string name;
    int left = 0;
    bool lasting = false;
    VkResult result = VK_SUCCESS;
};
std::atomic<bool> is_armed{false};

Injected& injected() {
    static Injected one;
    return one;
}

}  // namespace

void fail_call(const std::string& name, int n, VkResult result, bool lasting) {
    const std::scoped_lock lock(injected().mutex);
    injected().name = name;
    injected().left = n;
    injected().lasting = lasting;
    injected().result = result;
    is_armed = n > 0;
}

VkResult injected_failure(const char* name) {
    if (!is_armed.load(std::memory_order_relaxed)) return VK_SUCCESS;
    const std::scoped_lock lock(injected().mutex);
    if (injected().left <= 0 || injected().name != name) return VK_SUCCESS;
    if (injected().left > 1) {
        injected().left--;
        return VK_SUCCESS;
    }
    if (!injected().lasting) is_armed = false;
    return injected().result;
}

void check(VkResult result, const std::string& what) {
    if (result == VK_SUCCESS) return;
    if (result == VK_ERROR_OUT_OF_DEVICE_MEMORY)
        throw OutOfMemory("the Vulkan device ran out of memory while " + what);
    if (result == VK_ERROR_OUT_OF_HOST_MEMORY)
        throw OutOfMemory("the machine ran out of memory while " + what);
    const char* name = name_of(result);
    throw Error("Vulkan failed while " + what + ": " + (name ? name : "error " + std::to_string(result)));
}

std::shared_ptr<Instance> Instance::open(bool validate) {
    // Kept until the process ends and never destroyed: a driver takes seconds to restart, and may be unloaded
    // before statics are destroyed.
    static std::mutex mutex;
    static auto& open = *new std::array<std::shared_ptr<Instance>, 2>;
    const std::scoped_lock lock(mutex);
    if (!open[validate]) {
        const std::shared_ptr<Instance> fresh(new Instance);  // destroyed if it does not start
        fresh->start(validate);
        open[validate] = fresh;
    }
    return open[validate];
}

void Instance::start(bool validate) {
    get_ = open_loader();
    Function<PFN_vkCreateInstance> create;
    create.load(get_(nullptr, "vkCreateInstance"), "vkCreateInstance");
    const auto extensions_of = reinterpret_cast<PFN_vkEnumerateInstanceExtensionProperties>(
        get_(nullptr, "vkEnumerateInstanceExtensionProperties"));
    auto app = made<VkApplicationInfo>(VK_STRUCTURE_TYPE_APPLICATION_INFO);
    app.pApplicationName = app.pEngineName = "hotset";
    app.apiVersion = VK_API_VERSION_1_1;

    uint32_t n = 0;
    extensions_of(nullptr, &n, nullptr);
    std::vector<VkExtensionProperties> there(n);
    extensions_of(nullptr, &n, there.data());
    std::vector<const char*> wanted;
    VkInstanceCreateFlags flags = 0;
    for (const VkExtensionProperties& one : there)  // without it the loader hides MoltenVK
        if (!std::strcmp(one.extensionName, VK_KHR_PORTABILITY_ENUMERATION_EXTENSION_NAME)) {
            wanted.push_back(VK_KHR_PORTABILITY_ENUMERATION_EXTENSION_NAME);
            flags |= VK_INSTANCE_CREATE_ENUMERATE_PORTABILITY_BIT_KHR;
        }

    const char* layer = "VK_LAYER_KHRONOS_validation";
    const VkValidationFeatureEnableEXT enabled = VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT;
    auto features = made<VkValidationFeaturesEXT>(VK_STRUCTURE_TYPE_VALIDATION_FEATURES_EXT);
    features.enabledValidationFeatureCount = 1;
    features.pEnabledValidationFeatures = &enabled;
    auto messenger =
        made<VkDebugUtilsMessengerCreateInfoEXT>(VK_STRUCTURE_TYPE_DEBUG_UTILS_MESSENGER_CREATE_INFO_EXT);
    messenger.messageSeverity =
        VK_DEBUG_UTILS_MESSAGE_SEVERITY_WARNING_BIT_EXT | VK_DEBUG_UTILS_MESSAGE_SEVERITY_ERROR_BIT_EXT;
    messenger.messageType =
        VK_DEBUG_UTILS_MESSAGE_TYPE_VALIDATION_BIT_EXT | VK_DEBUG_UTILS_MESSAGE_TYPE_PERFORMANCE_BIT_EXT;
    messenger.pfnUserCallback = &Instance::report;
    messenger.pUserData = this;
    messenger.pNext = &features;

    auto info = made<VkInstanceCreateInfo>(VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO);
    info.flags = flags;
    info.pApplicationInfo = &app;
    if (validate) {
        info.pNext = &messenger;
        info.enabledLayerCount = 1;
        info.ppEnabledLayerNames = &layer;
        wanted.push_back(VK_EXT_DEBUG_UTILS_EXTENSION_NAME);
    }
    info.enabledExtensionCount = uint32_t(wanted.size());
    info.ppEnabledExtensionNames = wanted.data();
    check(create(&info, nullptr, &instance_), "starting Vulkan");
#define LOAD(name) fn_.name.load(get_(instance_, #name), #name);
    HOTSET_VULKAN_INSTANCE_FUNCTIONS(LOAD)
#undef LOAD
    if (!validate) return;
    messenger.pNext = nullptr;
    Function<PFN_vkCreateDebugUtilsMessengerEXT> make;
    make.load(get_(instance_, "vkCreateDebugUtilsMessengerEXT"), "vkCreateDebugUtilsMessengerEXT");
    check(make(instance_, &messenger, nullptr, &messenger_), "starting the validation layer");
}

Instance::~Instance() {
    if (messenger_) {
        const auto destroy = reinterpret_cast<PFN_vkDestroyDebugUtilsMessengerEXT>(
            get_(instance_, "vkDestroyDebugUtilsMessengerEXT"));
        destroy(instance_, messenger_, nullptr);
    }
    if (instance_) fn_.vkDestroyInstance(instance_, nullptr);
}

VkBool32 Instance::report(VkDebugUtilsMessageSeverityFlagBitsEXT, VkDebugUtilsMessageTypeFlagsEXT,
                          const VkDebugUtilsMessengerCallbackDataEXT* data, void* user) {
    auto& self = *static_cast<Instance*>(user);
    const std::scoped_lock lock(self.mutex_);
    self.messages_.emplace_back(data->pMessage);
    return VK_FALSE;
}

void Instance::set_messages_aside() {
    const std::scoped_lock lock(mutex_);
    constexpr size_t kMost = 100;
    for (std::string& one : messages_)
        if (late_.size() < kMost) late_.push_back(std::move(one));
    messages_.clear();
}

std::vector<std::string> Instance::late_messages() {
    const std::scoped_lock lock(mutex_);
    return std::exchange(late_, {});
}

void Instance::check_messages() {
    const std::scoped_lock lock(mutex_);
    if (messages_.empty()) return;
    const std::string first = messages_.front(), more = std::to_string(messages_.size() - 1);
    messages_.clear();
    throw Error("the validation layer reports: " + first + " (and " + more + " more)");
}

std::vector<DeviceInfo> Instance::devices() const {
    uint32_t n = 0;
    check(fn_.vkEnumeratePhysicalDevices(instance_, &n, nullptr), "looking for devices");
    std::vector<VkPhysicalDevice> handles(n);
    check(fn_.vkEnumeratePhysicalDevices(instance_, &n, handles.data()), "looking for devices");
    std::vector<DeviceInfo> found;
    found.reserve(n);
    for (uint32_t i = 0; i < n; i++) found.push_back(describe(int(i), handles[i]));
    return found;
}

DeviceInfo Instance::describe(int index, VkPhysicalDevice handle) const {
    DeviceInfo info;
    info.index = index;
    info.handle = handle;
    uint32_t n = 0;
    fn_.vkEnumerateDeviceExtensionProperties(handle, nullptr, &n, nullptr);
    std::vector<VkExtensionProperties> extensions(n);
    fn_.vkEnumerateDeviceExtensionProperties(handle, nullptr, &n, extensions.data());
    const auto has = [&](const char* name) {
        return std::any_of(extensions.begin(), extensions.end(),
                           [&](const auto& one) { return !std::strcmp(one.extensionName, name); });
    };
    const bool has_budget = has(VK_EXT_MEMORY_BUDGET_EXTENSION_NAME);
    info.is_subset = has("VK_KHR_portability_subset");
    if (has(VK_KHR_SHADER_INTEGER_DOT_PRODUCT_EXTENSION_NAME)) {
        auto dots = made<VkPhysicalDeviceShaderIntegerDotProductFeatures>(
            VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_INTEGER_DOT_PRODUCT_FEATURES);
        auto features = made<VkPhysicalDeviceFeatures2>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2);
        features.pNext = &dots;
        fn_.vkGetPhysicalDeviceFeatures2(handle, &features);
        info.has_integer_dots = dots.shaderIntegerDotProduct;
    }
    if (has(VK_KHR_TIMELINE_SEMAPHORE_EXTENSION_NAME)) {
        auto timelines = made<VkPhysicalDeviceTimelineSemaphoreFeatures>(
            VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_TIMELINE_SEMAPHORE_FEATURES);
        auto features = made<VkPhysicalDeviceFeatures2>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2);
        features.pNext = &timelines;
        fn_.vkGetPhysicalDeviceFeatures2(handle, &features);
        info.has_timelines = timelines.timelineSemaphore;
    }

    auto subgroup =
        made<VkPhysicalDeviceSubgroupProperties>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_PROPERTIES);
    auto most = made<VkPhysicalDeviceMaintenance3Properties>(
        VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MAINTENANCE_3_PROPERTIES);
    most.pNext = &subgroup;
    auto properties = made<VkPhysicalDeviceProperties2>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2);
    properties.pNext = &most;
    fn_.vkGetPhysicalDeviceProperties2(handle, &properties);
    const VkPhysicalDeviceProperties& own = properties.properties;
    info.name = own.deviceName;
    info.kind = kind_of(own.deviceType);
    info.api_version = own.apiVersion;
    info.limits = own.limits;
    info.max_allocation = most.maxMemoryAllocationSize;
    info.subgroup = subgroup.subgroupSize;
    info.vendor = own.vendorID;
    info.device = own.deviceID;
    std::copy_n(own.pipelineCacheUUID, VK_UUID_SIZE, info.cache_uuid.begin());
    const uint32_t v = own.driverVersion;
    const auto dotted = [](uint32_t a, uint32_t b, uint32_t c) {
        return std::to_string(a) + "." + std::to_string(b) + "." + std::to_string(c);
    };
    info.driver = own.vendorID == kNvidia
                      ? dotted(v >> 22, v >> 14 & 255, v >> 6 & 255)
                      : dotted(VK_API_VERSION_MAJOR(v), VK_API_VERSION_MINOR(v), VK_API_VERSION_PATCH(v));

    auto budget = made<VkPhysicalDeviceMemoryBudgetPropertiesEXT>(
        VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_BUDGET_PROPERTIES_EXT);
    auto memory =
        made<VkPhysicalDeviceMemoryProperties2>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_PROPERTIES_2);
    memory.pNext = has_budget ? &budget : nullptr;
    fn_.vkGetPhysicalDeviceMemoryProperties2(handle, &memory);
    info.memories = memory.memoryProperties;
    for (uint32_t i = 0; i < info.memories.memoryHeapCount; i++) {
        const VkMemoryHeap& heap = info.memories.memoryHeaps[i];
        if (!(heap.flags & VK_MEMORY_HEAP_DEVICE_LOCAL_BIT)) continue;
        info.memory += heap.size;
        info.free += has_budget ? budget.heapBudget[i] - std::min(budget.heapBudget[i], budget.heapUsage[i])
                                : heap.size;
    }

    // The host-visible part of the largest heap: all of it (resizable BAR), a window, or nothing.
    uint64_t largest = 0, window = 0;
    for (uint32_t i = 0; i < info.memories.memoryTypeCount; i++) {
        const VkMemoryType& type = info.memories.memoryTypes[i];
        const uint64_t size = info.memories.memoryHeaps[type.heapIndex].size;
        if (!(type.propertyFlags & VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT)) continue;
        largest = std::max(largest, size);
        if (type.propertyFlags & VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT) window = std::max(window, size);
    }

    fn_.vkGetPhysicalDeviceQueueFamilyProperties(handle, &n, nullptr);
    std::vector<VkQueueFamilyProperties> families(n);
    fn_.vkGetPhysicalDeviceQueueFamilyProperties(handle, &n, families.data());
    const auto computes = [](const auto& family) { return family.queueFlags & VK_QUEUE_COMPUTE_BIT; };
    info.queue_family = uint32_t(std::find_if(families.begin(), families.end(), computes) - families.begin());
    if (info.queue_family < n) info.timestamp_bits = families[info.queue_family].timestampValidBits;
    const auto feature = [&](bool is_there, const char* what) {
        if (is_there) info.features.emplace_back(what);
    };
    feature(window >= largest, info.kind == "discrete" ? "resizable BAR" : "host-visible memory");
    feature(has_budget, "memory budget");
    feature(info.has_integer_dots, "integer dot products");
    feature(info.has_timelines, "timeline semaphores");
    feature(info.timestamp_bits, "timestamps");
    feature(has("VK_KHR_shader_float16_int8") || own.apiVersion >= VK_API_VERSION_1_2, "float16 and int8");
    feature(has("VK_KHR_cooperative_matrix"), "cooperative matrices");

    if (own.apiVersion < VK_API_VERSION_1_1)
        info.refusal = "its driver supports only Vulkan 1.0, but 1.1 is needed: update the driver";
    else if (info.queue_family == n)
        info.refusal = "it has no compute queue";
    else if (own.limits.maxComputeWorkGroupInvocations < 256 || own.limits.maxComputeSharedMemorySize < 16384)
        info.refusal = "its workgroups are limited to less than 256 invocations with 16 KiB of shared memory";
    return info;
}

}  // namespace hotset::vulkan
