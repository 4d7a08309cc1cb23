// The state of the emulated device that its parts share: who waits for what, what it cost, and its memory.
#pragma once
#include <ATen/ATen.h>
#include <Python.h>

#include <atomic>
#include <condition_variable>
#include <map>
#include <optional>

#include "checker.h"

namespace emulated {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr auto kKey = c10::DispatchKey::PrivateUse1;

// The Python frames at which something happened, innermost first. Code objects are never freed once they are here.
struct PythonSite final : Site {
  struct Frame {
    PyCodeObject* code;
    int position;  // an offset into the byte code, or before Python 3.11 a line
  };
  std::vector<Frame> frames;
  bool of_main_thread = false;  // this thread has none: autograd's
  using Line = std::tuple<std::string, int, std::string>;
  std::vector<Line> lines() const;  // file, line, function; with the GIL
};

// Describes who is about to do something. Takes the GIL, so no lock may be held.
SitePtr site_here(std::string title);

// One range that a collective will write, once its data have come.
struct Pending {
  int64_t begin, end;
  uint64_t ticket;
};

// The memory of one storage on the device: that of a CPU storage.
struct DeviceBlock final : Block {
  c10::Storage memory;
  std::vector<Pending> pending;  // under the lock of Tickets
};

DeviceBlock* block_of(const at::Tensor& tensor);
bool is_on_device(const at::Tensor& tensor);
Use use_of(const at::Tensor& tensor, bool writes);
c10::Device device();
c10::Stream stream_of(StreamId id);
StreamId current_stream();
void set_current_stream(StreamId id);
void refuse_other(c10::Device other);
void record_stream(DeviceBlock* block, c10::Stream stream);

// CPU tensors over the memory of tensors on the device, one storage for each of theirs.
class CpuViews {
 public:
  // With keeps_memory the view may outlive the tensor.
  at::Tensor of(const at::Tensor& tensor, bool keeps_memory = false);

 private:
  std::vector<std::pair<c10::StorageImpl*, c10::Storage>> made_;
};

// A tensor that lies in memory as another one lies in its own.
at::Tensor tensor_over(c10::Storage memory, c10::DispatchKey key, const at::Tensor& like);

// Memory of the device over that of a CPU storage; a storage's own memory in another size.
c10::DataPtr adopt(c10::Storage memory, SitePtr site);
void resize_storage(const c10::Storage& storage, size_t size);

// A copy to pinned memory for which the host has not waited: until it does, the target holds NaN.
struct LateCopy {
  at::Tensor to, values;
  Moment end;
};
bool is_pinned(const void* data);
void add_late_copy(LateCopy copy);
// Brings what the current stream may read in this memory: the values of copies that it comes after.
void bring_late_copies(const at::Tensor& to);

// Collectives whose data have not come yet, and errors of those that have failed.
class Tickets {
 public:
  uint64_t open(const Moment& end, const std::vector<Use>& uses);
  void complete(uint64_t ticket, const std::string& error);
  // Waits for the data of what is about to be used, of all that the host has waited for, of one, of all.
  void await(const std::vector<Use>& uses);
  void await_known();
  void await(uint64_t ticket);
  // Raises the error of a ticket that has failed already; never waits.
  void check(uint64_t ticket);
  // Waits for all, or until one has failed, and returns an error that was never raised.
  std::string unraised();
  std::set<std::string> raised();
  void forget_errors();

 private:
  template <typename IsOver>
  void wait_until(IsOver is_over);
  std::string error_of(uint64_t ticket);
  std::string first_unraised();
  void raise(const std::string& error);
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t last_ = 0;
  std::map<uint64_t, Moment> open_;
  std::map<uint64_t, std::string> errors_;
  std::set<std::string> raised_;
  std::atomic<size_t> count_{0};
};

struct HostWait {
  std::string what;
  SitePtr site;
};

// What was used since the last reset.
struct Costs {
  int64_t kernels = 0;
  std::map<std::string, int64_t> collectives;
  std::vector<HostWait> host_waits;
  size_t allocated = 0, peak = 0;
};

struct Device {
  Checker checker;
  Tickets tickets;
  std::mutex mutex;  // of what follows
  Costs costs;
  std::map<char*, size_t> pinned;
  bool watches_edges = false;
  std::vector<std::string> dropped_edge;  // the ends of its frames, innermost first
  std::set<std::vector<std::string>> edges;
  std::atomic<bool> checks{true}, forbids_host_waits{false};
  std::atomic<size_t> taken_from_pool{0};
  static Device& get();
};

// Runs one kernel on the current stream.
Moment launch(const std::vector<Use>& uses, const SitePtr& site);
// The host waits for a moment, or for everything.
void host_wait(const std::string& what, const std::optional<Moment>& moment);
// Whether the edge that the caller is about to make is the one to leave out.
bool is_dropped(const char* kind);

void install_device();
void install_kernels();

}  // namespace emulated
