// Device "emu": streams, events and memory on the host. What is launched has run when the call returns; the checker
// tells whether it might have run in another order.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/function.h>

#include <thread>

namespace emulated {
namespace py = pybind11;

Device& Device::get() {
  static Device* device = new Device;  // never destroyed: tensors may be freed after static objects
  return *device;
}

c10::Device device() { return {kDevice, 0}; }
c10::Stream stream_of(StreamId id) { return c10::Stream(c10::Stream::UNSAFE, device(), id); }

static thread_local StreamId t_stream = 0;
StreamId current_stream() { return t_stream; }
void set_current_stream(StreamId id) { t_stream = id; }

// ------------------------------------------------------------------------------------------------ where it happened

constexpr size_t kMostFrames = 40;

static void add_frames(PythonSite& site, PyThreadState* thread) {
  static auto* known = new std::unordered_set<PyCodeObject*>;  // under the GIL
  // Frames are objects that are made here. A collection then may let go of the GIL, and this thread or the main one
  // may have left a frame before the GIL is back.
  bool collects = PyGC_Disable();
  PyFrameObject* frame = PyThreadState_GetFrame(thread);
  while (frame && site.frames.size() < kMostFrames) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    if (!known->insert(code).second) Py_DECREF(code);
#if PY_VERSION_HEX >= 0x030B0000
    int position = PyFrame_GetLasti(frame);
#else
    int position = PyFrame_GetLineNumber(frame);
#endif
    site.frames.push_back({code, position});
    site.key = site.key * 1000003 ^ reinterpret_cast<uintptr_t>(code) ^ static_cast<uint64_t>(position);
    PyFrameObject* outer = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
  Py_XDECREF(frame);
  if (collects) PyGC_Enable();
}

// The interpreter's list of threads is not to be walked: others enter it without the GIL, half made.
static PyThreadState* g_main_thread_state;

SitePtr site_here(std::string title) {
  auto site = std::make_shared<PythonSite>();
  if (auto node = torch::autograd::get_current_node()) title += " in autograd node " + node->name();
  site->title = std::move(title);
  if (!Py_IsInitialized()) return site;
  py::gil_scoped_acquire gil;
  add_frames(*site, PyThreadState_Get());
  if (site->frames.empty()) {
    site->of_main_thread = true;
    add_frames(*site, g_main_thread_state);
  }
  return site;
}

std::vector<PythonSite::Line> PythonSite::lines() const {
  std::vector<Line> found;
  for (const Frame& frame : frames) {
    auto code = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(frame.code));
#if PY_VERSION_HEX >= 0x030B0000
    int line = PyCode_Addr2Line(frame.code, frame.position);
#else
    int line = frame.position;
#endif
    found.emplace_back(py::str(code.attr("co_filename")), line, py::str(code.attr("co_name")));
  }
  return found;
}

constexpr size_t kEdgeFrames = 4;

// The call site of an edge: the innermost frames of the user's, for a wait may lie in a function that many call.
static std::vector<std::string> edge_here(const char* kind) {
  auto site = std::static_pointer_cast<const PythonSite>(site_here(kind));
  py::gil_scoped_acquire gil;
  std::vector<std::string> found;
  for (auto& [file, line, function] : site->lines()) {
    bool is_passed_over = false;
    for (const char* part : {"/torch/", "/zeroshard_testing/", "/contextlib.py"})
      is_passed_over |= file.find(part) != std::string::npos;
    if (!is_passed_over && found.size() < kEdgeFrames) found.push_back(file + ":" + std::to_string(line));
  }
  return found;
}

static bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), std::string::npos, end) == 0;
}

bool is_dropped(const char* kind) {
  Device& device = Device::get();
  if (!device.watches_edges) return false;
  std::vector<std::string> edge = edge_here(kind);
  std::lock_guard lock(device.mutex);
  device.edges.insert(edge);
  const auto& dropped = device.dropped_edge;
  if (dropped.empty() || dropped.size() > edge.size()) return false;
  for (size_t i = 0; i < dropped.size(); i++)
    if (!ends_with(edge[i], dropped[i])) return false;
  return true;
}

// ---------------------------------------------------------------------------------------------------------- waiting

struct WithoutGil {
  std::optional<py::gil_scoped_release> release;
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) release.emplace();
  }
};

template <typename IsOver>
void Tickets::wait_until(IsOver is_over) {
  WithoutGil without;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, is_over);
}

std::string Tickets::error_of(uint64_t ticket) {
  auto found = errors_.find(ticket);
  return found == errors_.end() ? "" : found->second;
}

uint64_t Tickets::open(const Moment& end, const std::vector<Use>& uses) {
  std::lock_guard lock(mutex_);
  open_[++last_] = end;
  count_++;
  for (const Use& use : uses)
    if (use.writes && use.block) static_cast<DeviceBlock*>(use.block)->pending.push_back({use.begin, use.end, last_});
  return last_;
}

void Tickets::complete(uint64_t ticket, const std::string& error) {
  std::lock_guard lock(mutex_);
  if (!error.empty()) errors_[ticket] = error;
  open_.erase(ticket);
  count_ = open_.size() + errors_.size();
  changed_.notify_all();
}

void Tickets::await(const std::vector<Use>& uses) {
  if (!count_) return;
  std::string error;
  for (const Use& use : uses) {
    auto* block = static_cast<DeviceBlock*>(use.block);
    if (!block) continue;
    wait_until([&] {
      // Where a collective has failed, others may never complete: their ranks have raised its error.
      if (!first_unraised().empty()) return true;
      for (const Pending& one : block->pending)
        if (one.begin < use.end && use.begin < one.end && open_.count(one.ticket)) return false;
      return true;
    });
    std::lock_guard lock(mutex_);
    for (const Pending& one : block->pending)
      if (one.begin < use.end && use.begin < one.end && error.empty())
        error = open_.count(one.ticket) ? first_unraised() : error_of(one.ticket);
    auto is_done = [&](const Pending& one) { return !open_.count(one.ticket) && !errors_.count(one.ticket); };
    block->pending.erase(std::remove_if(block->pending.begin(), block->pending.end(), is_done), block->pending.end());
  }
  raise(error);
}

void Tickets::await_known() {
  if (!count_) return;
  std::vector<uint64_t> known;
  {
    std::lock_guard lock(mutex_);
    for (auto& [ticket, end] : open_)
      if (Device::get().checker.host_knows(end)) known.push_back(ticket);
  }
  for (uint64_t ticket : known) await(ticket);
}

void Tickets::await(uint64_t ticket) {
  wait_until([&] { return !open_.count(ticket) || !first_unraised().empty(); });
  std::unique_lock lock(mutex_);
  std::string error = open_.count(ticket) ? first_unraised() : error_of(ticket);
  lock.unlock();
  raise(error);
}

void Tickets::check(uint64_t ticket) {
  std::unique_lock lock(mutex_);
  std::string error = error_of(ticket);
  lock.unlock();
  raise(error);
}

std::string Tickets::first_unraised() {
  for (auto& [ticket, error] : errors_)
    if (!raised_.count(error)) return error;
  return "";
}

// As torch's own backends do.
void Tickets::raise(const std::string& error) {
  if (error.empty()) return;
  {
    std::lock_guard lock(mutex_);
    raised_.insert(error);
  }
  TORCH_CHECK_WITH(DistBackendError, false, error);
}

std::set<std::string> Tickets::raised() {
  std::lock_guard lock(mutex_);
  return raised_;
}

std::string Tickets::unraised() {
  wait_until([&] { return open_.empty() || !first_unraised().empty(); });
  std::lock_guard lock(mutex_);
  return first_unraised();
}

void Tickets::forget_errors() {
  std::lock_guard lock(mutex_);
  errors_.clear();
  raised_.clear();
  count_ = open_.size();
}

static std::vector<LateCopy>& late_copies() {
  static auto* copies = new std::vector<LateCopy>;
  return *copies;
}
static std::mutex late_copies_mutex;

template <typename IsKnown>
static void bring_late_copies_if(IsKnown is_known) {
  std::vector<LateCopy> due;  // dies after the lock, for the end of a tensor may take the GIL
  std::lock_guard lock(late_copies_mutex);
  auto& copies = late_copies();
  auto first = std::stable_partition(copies.begin(), copies.end(), [&](LateCopy& copy) { return !is_known(copy); });
  std::move(first, copies.end(), std::back_inserter(due));
  copies.erase(first, copies.end());
  for (LateCopy& copy : due) memcpy(copy.to.mutable_data_ptr(), copy.values.data_ptr(), copy.values.nbytes());
}

// All that the host may read.
static void bring_late_copies() {
  bring_late_copies_if([](LateCopy& copy) { return Device::get().checker.host_knows(copy.end); });
}

void bring_late_copies(const at::Tensor& to) {
  bring_late_copies_if([&](LateCopy& copy) {
    return copy.to.is_alias_of(to) && Device::get().checker.is_before(copy.end, current_stream());
  });
}

void add_late_copy(LateCopy copy) {
  memset(copy.to.mutable_data_ptr(), 0xFF, copy.to.nbytes());
  std::lock_guard lock(late_copies_mutex);
  late_copies().push_back(std::move(copy));
}

void host_wait(const std::string& what, const std::optional<Moment>& moment) {
  Device& device = Device::get();
  SitePtr site = site_here(what);
  {
    std::lock_guard lock(device.mutex);
    device.costs.host_waits.push_back({what, site});
  }
  TORCH_CHECK(!device.forbids_host_waits, "the host waits for the device here, inside host_never_waits(): ", what);
  if (moment) device.checker.host_wait(*moment);
  else device.checker.host_wait_all();
  device.tickets.await_known();
  bring_late_copies();
}

Moment launch(const std::vector<Use>& uses, const SitePtr& site) {
  Device& device = Device::get();
  {
    std::lock_guard lock(device.mutex);
    device.costs.kernels++;
  }
  if (!device.checks) return device.checker.launch(current_stream(), {}, site);
  return device.checker.launch(current_stream(), uses, site);
}

// ----------------------------------------------------------------------------------------------------------- memory

static std::thread::id g_main_thread;

static void forget(void* context) {
  auto* block = static_cast<DeviceBlock*>(context);
  Device& device = Device::get();
  // Without the GIL a thread of autograd may hold some lock of torch, so it must not be taken there. The main thread
  // lets go of the GIL for `del` too, and holds none.
  bool may_take_gil = Py_IsInitialized() && (PyGILState_Check() || std::this_thread::get_id() == g_main_thread);
  SitePtr site = may_take_gil ? site_here("free") : [] {
    auto plain = std::make_shared<PythonSite>();
    plain->title = "free by C++";
    return plain;
  }();
  device.checker.freed(*block, site);
  {
    std::lock_guard lock(device.mutex);
    device.costs.allocated -= block->size;
  }
  delete block;
}

// Memory of the device over that of a CPU storage.
c10::DataPtr adopt(c10::Storage memory, SitePtr site) {
  Device& device = Device::get();
  auto* block = new DeviceBlock;
  block->memory = std::move(memory);
  size_t size = block->memory.nbytes();
  device.checker.allocated(*block, size, current_stream(), std::move(site));
  std::lock_guard lock(device.mutex);
  device.costs.allocated += size;
  device.costs.peak = std::max(device.costs.peak, device.costs.allocated);
  return {block->memory.mutable_data(), block, &forget, emulated::device()};
}

static c10::Storage cpu_storage(size_t size) {
  return c10::Storage(c10::Storage::use_byte_size_t(), static_cast<int64_t>(size), c10::GetCPUAllocator(), true);
}

static DeviceBlock* block_of(const c10::DataPtr& data) {
  return data.get_deleter() == &forget ? static_cast<DeviceBlock*>(data.get_context()) : nullptr;
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    c10::Storage memory = cpu_storage(size);
    // NaN in every floating-point format: what was never written shows in results.
    if (size) memset(memory.mutable_data(), 0xFF, size);
    return adopt(std::move(memory), site_here("allocation of " + std::to_string(size) + " bytes"));
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { record_stream(block_of(data), stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard lock(Device::get().mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& bytes = stats.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
    bytes.current = static_cast<int64_t>(Device::get().costs.allocated);
    bytes.peak = static_cast<int64_t>(Device::get().costs.peak);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard lock(Device::get().mutex);
    Device::get().costs.peak = Device::get().costs.allocated;
  }
};
static DeviceAllocator g_allocator;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    char* data = static_cast<char*>(std::malloc(std::max<size_t>(size, 1)));
    std::lock_guard lock(Device::get().mutex);
    Device::get().pinned[data] = std::max<size_t>(size, 1);
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
  static void release(void* data) {
    {
      std::lock_guard lock(Device::get().mutex);
      Device::get().pinned.erase(static_cast<char*>(data));
    }
    std::free(data);
  }
};
static PinnedAllocator g_pinned;

bool is_pinned(const void* data) {
  Device& device = Device::get();
  std::lock_guard lock(device.mutex);
  auto after = device.pinned.upper_bound(static_cast<char*>(const_cast<void*>(data)));
  if (after == device.pinned.begin()) return false;
  auto found = std::prev(after);
  return static_cast<const char*>(data) < found->first + found->second;
}

DeviceBlock* block_of(const at::Tensor& tensor) { return block_of(tensor.storage().data_ptr()); }
bool is_on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kDevice; }

// From the first byte of a tensor to its last: what lies between, of other tensors, counts too.
Use use_of(const at::Tensor& tensor, bool writes) {
  if (!tensor.numel()) return {nullptr, 0, 0, writes};
  int64_t first = tensor.storage_offset(), last = first, size = static_cast<int64_t>(tensor.itemsize());
  for (int64_t dim = 0; dim < tensor.dim(); dim++) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return {block_of(tensor), first * size, (last + 1) * size, writes};
}

at::Tensor tensor_over(c10::Storage memory, c10::DispatchKey key, const at::Tensor& like) {
  auto made = at::detail::make_tensor<at::TensorImpl>(std::move(memory), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) made._set_conj(true);
  if (like.is_neg()) made._set_neg(true);
  return made;
}

at::Tensor CpuViews::of(const at::Tensor& tensor, bool keeps_memory) {
  auto* impl = tensor.storage().unsafeGetStorageImpl();
  c10::Storage* storage = nullptr;
  for (auto& [known, made] : made_)
    if (known == impl) storage = &made;
  if (!storage) {
    c10::DataPtr data(impl->mutable_data(), c10::Device(c10::kCPU));
    DeviceBlock* block = block_of(tensor);
    if (keeps_memory && block) {
      auto release = [](void* kept) { delete static_cast<c10::Storage*>(kept); };
      data = c10::DataPtr(impl->mutable_data(), new c10::Storage(block->memory), release, c10::Device(c10::kCPU));
    }
    auto bytes = static_cast<int64_t>(impl->nbytes());
    made_.emplace_back(impl, c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(data), c10::GetCPUAllocator(), true));
    storage = &made_.back().second;
  }
  return tensor_over(*storage, c10::DispatchKey::CPU, tensor);
}

void resize_storage(const c10::Storage& storage, size_t size) {
  auto* impl = storage.unsafeGetStorageImpl();
  size_t kept = std::min(size, impl->nbytes());
  if (impl->nbytes() == size) return;
  DeviceBlock* before = block_of(storage.data_ptr());
  std::vector<Use> uses{{before, 0, static_cast<int64_t>(kept), false}};
  Device::get().tickets.await(uses);
  c10::DataPtr fresh = g_allocator.allocate(size);
  if (kept) {
    memcpy(fresh.get(), impl->data(), kept);
    uses.push_back({block_of(fresh), 0, static_cast<int64_t>(kept), true});
    launch(uses, site_here("resize of a storage"));
  }
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(size);
}

// --------------------------------------------------------------------------------------- streams, events, the device

struct DeviceEvent {
  Moment moment;
  bool was_queried = false;
};

// The first question finds every kernel unfinished, as one may; the next one finds it finished, so that polling ends.
static bool query(const Moment& moment, bool& was_queried) {
  Device& device = Device::get();
  if (!device.checker.host_knows(moment)) {
    if (!was_queried) {
      was_queried = true;
      return false;
    }
    device.checker.host_wait(moment);
  }
  device.tickets.await_known();
  bring_late_copies();
  return true;
}

void refuse_other(c10::Device other) {
  TORCH_CHECK_NOT_IMPLEMENTED(other.index() <= 0, "the emulated accelerator has one device a process, emu:0, not ", other);
}

// As many as CUDA's pool has, in turn: a callback of a future takes one each time.
static c10::Stream stream_of_pool() {
  static auto* pool = [] {
    auto* made = new std::vector<StreamId>;
    for (int i = 0; i < 32; i++) made->push_back(Device::get().checker.new_stream());
    return made;
  }();
  return stream_of(pool->at(Device::get().taken_from_pool++ % pool->size()));
}

void record_stream(DeviceBlock* block, c10::Stream stream) {
  if (block && !is_dropped("record_stream")) Device::get().checker.record_stream(*block, stream.id());
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device other) const override { refuse_other(other); }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream_of(t_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool = false) const override { return stream_of_pool(); }
  c10::Stream getNewStream(c10::Device where, int = 0) const override {
    refuse_other(where);
    return stream_of(Device::get().checker.new_stream());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = stream_of(t_stream);
    t_stream = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<DeviceEvent*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new DeviceEvent;
    *static_cast<DeviceEvent*>(*event) = {Device::get().checker.now(stream.id())};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event || is_dropped("a stream waits")) return;
    Device::get().checker.wait(stream.id(), static_cast<DeviceEvent*>(event)->moment);
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    auto* one = static_cast<DeviceEvent*>(event);
    return query(one->moment, one->was_queried);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream& stream) const override {
    static thread_local std::map<StreamId, Moment> asked;
    Moment now = Device::get().checker.now(stream.id());
    auto& before = asked[stream.id()];
    bool was_queried = before.test == now.test && before.clock == now.clock;
    before = now;
    return query(now, was_queried);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_wait("synchronize of a stream", Device::get().checker.now(stream.id()));
  }
  void synchronizeEvent(void* event) const override {
    if (event) host_wait("synchronize of an event", static_cast<DeviceEvent*>(event)->moment);
  }
  void synchronizeDevice(const c10::DeviceIndex) const override { host_wait("synchronize of the device", {}); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(block_of(data), stream);
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "the emulated accelerator measures no time: use the host's clock");
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(c10::DeviceIndex = -1) const override { return at::make_generator<at::CPUGeneratorImpl>(); }
  at::Device getDeviceFromPtr(void*) const override { return device(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &g_pinned; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override { resize_storage(storage, size); }
};

void install_device() {
  g_main_thread = std::this_thread::get_id();
  g_main_thread_state = PyThreadState_Get();
  static Guard guard;
  c10::impl::DeviceGuardImplRegistrar registrar(kDevice, &guard);
  c10::SetAllocator(kDevice, &g_allocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  Device::get().checker.begin_test();
}

}  // namespace emulated
