// The process group: a collective runs on a stream, in the order of issue; `mover.py` moves its data meanwhile.
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include "device.h"

namespace emulated {
namespace py = pybind11;
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

c10::intrusive_ptr<c10::ivalue::Future> completed_future(const Tensors& outputs, StreamId stream) {
  auto type = c10::ListType::create(c10::TensorType::get());
  auto future = c10::make_intrusive<c10::ivalue::Future>(type, std::vector<c10::Device>{device()});
  c10::StreamGuard guard(stream_of(stream));
  future->markCompleted(c10::IValue(outputs));
  return future;
}

struct EmulatedWork final : c10d::Work {
  uint64_t ticket = 0;
  Moment end;
  StreamId stream = 0;
  bool blocks_host = false, was_queried = false;
  Tensors held, outputs;
  c10::intrusive_ptr<c10::ivalue::Future> future;

  explicit EmulatedWork(c10d::OpType type) : Work(-1, type) {}
  // NCCL keeps the memory of a collective that nobody waits for until it has ended.
  ~EmulatedWork() override {
    for (const at::Tensor& tensor : held)
      if (DeviceBlock* block = block_of(tensor)) Device::get().checker.record_stream(*block, stream);
  }
  bool isCompleted() override {
    if (Device::get().checker.host_knows(end)) return true;
    if (!std::exchange(was_queried, true)) return false;
    Device::get().checker.host_wait(end);
    Device::get().tickets.await_known();
    return true;
  }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds = kNoTimeout) override {
    if (is_dropped("a work is waited for")) return true;
    if (ticket) Device::get().tickets.check(ticket);
    Device::get().checker.wait(current_stream(), end);
    if (blocks_host) host_wait("barrier", end);
    held.clear();
    return true;
  }
  void synchronize() override { wait(); }
  Tensors result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    TORCH_CHECK(future, "a call of a batch has no future of its own: the end of the batch returns the work of all");
    return future;
  }
};

// What one rank brings to a collective: see Mover.issue for the names.
struct Call {
  std::string name;
  Tensors in, out;
  int64_t root = -1;
  std::string reduce_op;
  std::vector<int64_t> sizes;
};

std::string name_of(const c10d::ReduceOp& op) {
  switch (static_cast<c10d::ReduceOp::RedOpType>(op.op_)) {
    case c10d::ReduceOp::SUM: return "SUM";
    case c10d::ReduceOp::AVG: return "AVG";
    case c10d::ReduceOp::PRODUCT: return "PRODUCT";
    case c10d::ReduceOp::MIN: return "MIN";
    case c10d::ReduceOp::MAX: return "MAX";
    case c10d::ReduceOp::BAND: return "BAND";
    case c10d::ReduceOp::BOR: return "BOR";
    case c10d::ReduceOp::BXOR: return "BXOR";
    default: return "PREMUL_SUM";
  }
}

Tensors flat(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const Tensors& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

struct __attribute__((visibility("hidden"))) EmulatedBackend final : c10d::Backend {
  EmulatedBackend(int rank, int size, py::object mover)
      : Backend(rank, size), mover_(std::move(mover)), stream_(Device::get().checker.new_stream()) {}
  ~EmulatedBackend() override {
    py::gil_scoped_acquire gil;
    try {
      mover_.attr("close")();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("the end of a process group");
    }
    mover_ = py::object();
  }
  const std::string getBackendName() const override { return "emulated"; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return issued_; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    bool is_root = options.rootRank == getRank();
    return issue({"broadcast", is_root ? tensors : Tensors{}, is_root ? Tensors{} : tensors, options.rootRank},
                 c10d::OpType::BROADCAST, options.asyncOp);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return issue({"all_reduce", tensors, tensors, -1, name_of(options.reduceOp)}, c10d::OpType::ALLREDUCE, options.asyncOp);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    std::vector<Call> calls;
    for (const at::Tensor& one : tensors) calls.push_back({"all_reduce", {one}, {one}, -1, name_of(options.reduceOp)});
    return issue(std::move(calls), c10d::OpType::ALLREDUCE_COALESCED, options.asyncOp);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    bool is_root = options.rootRank == getRank();
    return issue({"reduce", tensors, is_root ? tensors : Tensors{}, options.rootRank, name_of(options.reduceOp)},
                 c10d::OpType::REDUCE, options.asyncOp);
  }
  WorkPtr allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    return issue({"all_gather", in, flat(out)}, c10d::OpType::ALLGATHER, options.asyncOp);
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    return issue({"all_gather_into_tensor", {in}, {out}}, c10d::OpType::_ALLGATHER_BASE, options.asyncOp);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    std::vector<Call> calls;
    for (size_t i = 0; i < in.size(); i++) calls.push_back({"all_gather_into_tensor", {in[i]}, {out[i]}});
    return issue(std::move(calls), c10d::OpType::COALESCED, options.asyncOp);
  }
  WorkPtr reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& options) override {
    return issue({"reduce_scatter", flat(in), out, -1, name_of(options.reduceOp)}, c10d::OpType::REDUCE_SCATTER, options.asyncOp);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override {
    return issue({"reduce_scatter_tensor", {in}, {out}, -1, name_of(options.reduceOp)}, c10d::OpType::_REDUCE_SCATTER_BASE,
                 options.asyncOp);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& options) override {
    std::vector<Call> calls;
    for (size_t i = 0; i < in.size(); i++)
      calls.push_back({"reduce_scatter_tensor", {in[i]}, {out[i]}, -1, name_of(options.reduceOp)});
    return issue(std::move(calls), c10d::OpType::COALESCED, options.asyncOp);
  }
  WorkPtr gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& options) override {
    return issue({"gather", in, flat(out), options.rootRank}, c10d::OpType::GATHER, options.asyncOp);
  }
  WorkPtr scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& options) override {
    return issue({"scatter", flat(in), out, options.rootRank}, c10d::OpType::SCATTER, options.asyncOp);
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
                        const c10d::AllToAllOptions& options) override {
    std::vector<int64_t> sizes = out_sizes;
    sizes.insert(sizes.end(), in_sizes.begin(), in_sizes.end());
    return issue({"all_to_all_single", {in}, {out}, -1, "", sizes}, c10d::OpType::ALLTOALL_BASE, options.asyncOp);
  }
  WorkPtr alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& options) override {
    return issue({"all_to_all", in, out}, c10d::OpType::ALLTOALL, options.asyncOp);
  }
  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    return issue({"send", tensors, {}, peer, "", {tag}}, c10d::OpType::SEND, true);
  }
  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    return issue({"recv", {}, tensors, peer, "", {tag}}, c10d::OpType::RECV, true);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    auto work = issue({"barrier"}, c10d::OpType::BARRIER, options.asyncOp);
    static_cast<EmulatedWork*>(work.get())->blocks_host = true;
    return work;
  }
  void startCoalescing() override {
    TORCH_CHECK(!batch_, "a batch of collectives begins within another one of the same group");
    batch_.emplace();
  }
  WorkPtr endCoalescing() override {
    TORCH_CHECK(batch_, "a batch of collectives ends that has not begun");
    std::vector<Call> calls = std::move(*batch_);
    batch_.reset();
    return issue(std::move(calls), c10d::OpType::COALESCED, true);
  }

 private:
  WorkPtr issue(Call call, c10d::OpType type, bool is_async) {
    return issue(std::vector<Call>{std::move(call)}, type, is_async);
  }

  WorkPtr issue(std::vector<Call> calls, c10d::OpType type, bool is_async) {
    auto work = c10::make_intrusive<EmulatedWork>(type);
    for (const Call& call : calls) take(call, *work);
    if (batch_) {
      // The end of the batch issues it; until then its calls have no work of their own.
      for (Call& call : calls) batch_->push_back(std::move(call));
      work->held.clear();
      return work;
    }
    if (calls.empty()) return work;
    Device& device = Device::get();
    std::vector<Use> uses;
    std::string title = "collective";
    for (const Call& call : calls) {
      title += " " + call.name;
      for (const at::Tensor& one : call.in) uses.push_back(use_of(one, false));
      for (const at::Tensor& one : call.out) uses.push_back(use_of(one, true));
    }
    device.tickets.await(uses);
    // One that its caller waits for at once runs on the current stream, others on the group's, after the current one.
    work->stream = is_async ? stream_ : current_stream();
    device.checker.wait(work->stream, device.checker.now(current_stream()));
    auto site = std::static_pointer_cast<const PythonSite>(site_here(std::move(title)));
    {
      StreamId before = current_stream();
      set_current_stream(work->stream);
      work->end = launch(uses, site);
      set_current_stream(before);
    }
    work->ticket = device.tickets.open(work->end, uses);
    work->future = completed_future(work->outputs, work->stream);
    issued_++;
    try {
      hand_over(work->ticket, calls, *site);
    } catch (...) {
      device.tickets.complete(work->ticket, "");
      throw;
    }
    return work;
  }

  // Checks the tensors of a call, and keeps them for its work.
  void take(const Call& call, EmulatedWork& work) {
    for (auto* tensors : {&call.in, &call.out}) {
      for (const at::Tensor& one : *tensors) {
        TORCH_CHECK(is_on_device(one), call.name, " of the emulated process group: tensors must be on emu:0, not on ", one.device());
        TORCH_CHECK(one.is_non_overlapping_and_dense(), call.name, " of the emulated process group: tensors must be contiguous");
        work.held.push_back(one);
      }
    }
    const Tensors& result = call.out.empty() ? call.in : call.out;
    work.outputs.insert(work.outputs.end(), result.begin(), result.end());
  }

  // Gives copies of what is sent to the mover, and the memory in which to put what comes.
  void hand_over(uint64_t ticket, const std::vector<Call>& calls, const PythonSite& site) {
    std::vector<std::tuple<std::string, Tensors, Tensors, int64_t, std::string, std::vector<int64_t>>> handed;
    for (const Call& call : calls) {
      {
        std::lock_guard lock(Device::get().mutex);
        Device::get().costs.collectives[call.name]++;
      }
      CpuViews read, written;
      Tensors in, out;
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      for (const at::Tensor& one : call.in) in.push_back(read.of(one).clone(at::MemoryFormat::Contiguous));
      for (const at::Tensor& one : call.out) out.push_back(written.of(one, true));
      handed.emplace_back(call.name, std::move(in), std::move(out), call.root, call.reduce_op, call.sizes);
    }
    py::gil_scoped_acquire gil;
    mover_.attr("issue")(ticket, handed, site.lines());
  }

  py::object mover_;
  StreamId stream_;
  uint64_t issued_ = 0;
  std::optional<std::vector<Call>> batch_;
};

}  // namespace

void bind_backend(py::module_& module) {
  py::class_<EmulatedBackend, c10d::Backend, c10::intrusive_ptr<EmulatedBackend>>(module, "EmulatedBackend")
      .def(py::init([](int rank, int size, py::object mover) {
        return c10::make_intrusive<EmulatedBackend>(rank, size, std::move(mover));
      }));
}

}  // namespace emulated
