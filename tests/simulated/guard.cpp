// What a CPU build of torch needs to accept tensors that say they are on "cuda" or "mps": device guards, and the hooks by
// which autograd, autocast and pinned memory ask for CUDA. It holds no kernels: device.py computes on the CPU.
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/DeviceType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdint>
#include <map>
#include <mutex>

namespace {
constexpr c10::DeviceIndex kDevices = 2;
constexpr int kAlreadyRegistered = 712, kNotRegistered = 713;  // cudaErrorHostMemory...
constexpr uintptr_t kPage = 4096;

thread_local c10::DeviceIndex current = 0;
std::mutex pinned_lock;
std::map<uintptr_t, uintptr_t> pinned;  // begin and end of page-locked ranges

template <c10::DeviceType D>
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr bool is_cuda = D == c10::DeviceType::CUDA;
  c10::DeviceType type() const override { return D; }
  c10::Device getDevice() const override { return c10::Device(D, is_cuda ? current : 0); }
  void setDevice(c10::Device d) const override { uncheckedSetDevice(d); }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (is_cuda) current = d.index() < 0 ? 0 : d.index();
  }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto before = getDevice();
    setDevice(d);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return is_cuda ? kDevices : 1; }
  c10::Stream getStream(c10::Device d) const override {
    return c10::Stream(c10::Stream::DEFAULT, d.has_index() ? d : getDevice());
  }
  c10::Stream getDefaultStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getNewStream(c10::Device d, int) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return c10::Stream(c10::Stream::DEFAULT, s.device()); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
Guard<c10::DeviceType::CUDA> cuda_guard;
Guard<c10::DeviceType::MPS> mps_guard;
}  // namespace

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  int getNumGPUs() const override { return kDevices; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex d) const override { current = d; }
  void deviceSynchronize(DeviceIndex) const override {}
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> guard(pinned_lock);
    auto place = reinterpret_cast<uintptr_t>(data);
    auto next = pinned.upper_bound(place);
    return next != pinned.begin() && place < std::prev(next)->second;
  }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at

extern "C" {
void sim_install() {
  auto& registry = c10::impl::device_guard_impl_registry;
  registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&cuda_guard);
  registry[static_cast<size_t>(c10::DeviceType::MPS)].store(&mps_guard);
}
void sim_init() { at::globalContext().lazyInitDevice(c10::DeviceType::CUDA); }
void sim_set_device(int device) { current = static_cast<c10::DeviceIndex>(device); }
int sim_get_device() { return current; }

// As cudaHostRegister: whole pages are locked, and none may be locked twice.
int sim_register(uintptr_t begin, size_t size) {
  uintptr_t first = begin / kPage * kPage, end = (begin + size + kPage - 1) / kPage * kPage;
  std::lock_guard<std::mutex> guard(pinned_lock);
  auto next = pinned.lower_bound(first);
  bool meets_next = next != pinned.end() && next->first < end;
  bool meets_before = next != pinned.begin() && (std::prev(next)->second + kPage - 1) / kPage * kPage > first;
  if (meets_next || meets_before) return kAlreadyRegistered;
  pinned[begin] = begin + size;
  return 0;
}
int sim_unregister(uintptr_t begin) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  return pinned.erase(begin) ? 0 : kNotRegistered;
}
}
