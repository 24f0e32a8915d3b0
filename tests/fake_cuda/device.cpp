// A CUDA device without memory or kernels, for a torch that was built without CUDA: device guard, hooks, pinned memory
// of the host, and the choice of an attention kernel. Tensors on it are fake ones (device.py).
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cstdlib>
#include <map>
#include <mutex>

namespace {
using namespace c10;

const Device kDevice(DeviceType::CUDA, 0);

struct Guard final : public impl::DeviceGuardImplInterface {
  Guard(DeviceType = DeviceType::CUDA) {}
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return kDevice; }
  Device getDevice() const override { return kDevice; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, kDevice); }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

std::mutex mutex;
std::map<const char*, size_t> pinned;  // where pinned memory begins, and its bytes

void unpin(void* memory) {
  std::lock_guard<std::mutex> lock(mutex);
  pinned.erase(static_cast<const char*>(memory));
  std::free(memory);
}

struct PinnedMemory final : public Allocator {
  DataPtr allocate(size_t bytes) override {
    std::lock_guard<std::mutex> lock(mutex);
    void* memory = std::malloc(bytes ? bytes : 1);
    pinned[static_cast<const char*>(memory)] = bytes ? bytes : 1;
    return {memory, memory, &unpin, Device(DeviceType::CPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
} pinned_memory;

struct Hooks final : public at::CUDAHooksInterface {
  Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> lock(mutex);
    auto after = pinned.upper_bound(static_cast<const char*>(data));
    if (after == pinned.begin()) return false;
    --after;
    return static_cast<const char*>(data) < after->first + after->second;
  }
};

// As a GPU from Ampere on chooses, but for cuDNN: its flash kernel takes half precision without a mask, its
// memory-efficient one the rest.
int64_t choose_attention(const at::Tensor& query, const at::Tensor&, const at::Tensor&,
                         const std::optional<at::Tensor>& mask, double, bool, std::optional<double>, bool) {
  bool is_half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  bool takes_flash = is_half && !mask.has_value();
  return static_cast<int64_t>(takes_flash ? at::SDPBackend::flash_attention : at::SDPBackend::efficient_attention);
}

const bool chosen = [] {
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
  return true;
}();
}  // namespace

namespace at {
using ::Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}  // namespace at
