// The operators of the device: each runs by its CPU kernel, as a whole, over the same memory.
#include <ATen/CPUFunctions.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "device.h"

namespace emulated {
namespace {

using at::Tensor;

// Operators after which the host needs a value of the device; on CUDA they wait.
const std::set<std::string> kWaiting = {
    "aten::_local_scalar_dense", "aten::equal",      "aten::nonzero",           "aten::masked_select",
    "aten::_unique",             "aten::_unique2",   "aten::unique_dim",        "aten::unique_consecutive",
    "aten::bincount",            "aten::is_nonzero", "aten::repeat_interleave", "aten::_linalg_check_errors"};

// Operators that have kernels of their own here, or that only CPU tensors have.
const std::set<std::string> kOwn = {
    "empty",         "empty_strided", "as_strided", "view",  "_reshape_alias", "resize_",     "set_",     "record_stream",
    "_copy_from",    "_copy_from_and_resize",       "copy_", "is_set_to",      "_pin_memory", "is_pinned",
    "_has_compatible_shallow_copy_type", "_efficientzerotensor"};

// A tensor on the device over memory that a CPU kernel has allocated.
Tensor adopted(const Tensor& cpu, const SitePtr& site) {
  c10::Storage memory = cpu.storage();
  auto bytes = static_cast<int64_t>(memory.nbytes());
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, adopt(memory, site), c10::GetAllocator(kDevice), true);
  return tensor_over(std::move(storage), kKey, cpu);
}

// One call of one operator.
class Kernel {
 public:
  Kernel(const c10::OperatorHandle& op, c10::Stack* stack)
      : op_(op), schema_(op.schema()), stack_(stack), first_(stack->size() - op.schema().arguments().size()) {}

  void run() {
    site_ = site_here(schema_.name());
    bring_arguments();
    Device::get().tickets.await(uses_);
    {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      op_.callBoxed(stack_);
    }
    take_resized();
    take_results();
    if (is_view_ && !schema_.returns().empty()) return;
    Moment end = launch(uses_, site_);
    if (needs_value() || (has_mask_ && !is_fill())) host_wait(schema_.name(), Device::get().checker.now(current_stream()));
    if (has_host_index_) host_wait(schema_.name() + ", which copies an index", end);
  }

 private:
  struct Argument {
    Tensor own, cpu;
    bool is_written;
  };

  void bring_arguments() {
    size_t count = schema_.arguments().size();
    kept_.assign(stack_->begin() + first_, stack_->end());
    for (size_t place = 0; place < count; place++) {
      c10::IValue& value = (*stack_)[first_ + place];
      auto* alias = schema_.arguments()[place].alias_info();
      bool is_written = alias && alias->isWrite();
      if (value.isTensor()) {
        value = brought(value.toTensor(), is_written);
      } else if (value.isTensorList()) {
        std::vector<Tensor> list;
        for (const Tensor& one : value.toTensorList().vec()) list.push_back(brought(one, is_written));
        value = c10::IValue(std::move(list));
      } else if (value.isOptionalTensorList()) {
        value = brought_index(value.toOptionalTensorList());
      } else if (value.isDevice() && value.toDevice().type() == kDevice) {
        value = c10::Device(c10::kCPU);
      }
    }
    TORCH_CHECK(arguments_.empty() || !stranger_, schema_.name(),
                ": expected all tensors to be on the same device, but found tensors on emu:0 and on the CPU");
  }

  Tensor brought(const Tensor& tensor, bool is_written) {
    if (!is_on_device(tensor)) {
      // A CPU tensor without dimensions is a number.
      stranger_ |= tensor.defined() && tensor.dim() > 0 && tensor.device().is_cpu();
      return tensor;
    }
    arguments_.push_back({tensor, views_.of(tensor), is_written});
    uses_.push_back(use_of(tensor, is_written));
    return arguments_.back().cpu;
  }

  c10::IValue brought_index(const c10::List<std::optional<Tensor>>& list) {
    c10::List<std::optional<Tensor>> brought_list;
    bool stranger = stranger_;
    for (size_t place = 0; place < list.size(); place++) {
      std::optional<Tensor> one = list.get(place);
      if (one && one->defined()) {
        has_mask_ |= one->scalar_type() == at::kBool || one->scalar_type() == at::kByte;
        has_host_index_ |= !is_on_device(*one);
        one = brought(*one, false);
      }
      brought_list.push_back(one);
    }
    stranger_ = stranger;  // indices may come from the CPU
    return brought_list;
  }

  // With output_size, repeat_interleave knows its result's size.
  bool needs_value() const {
    return kWaiting.count(schema_.name()) && !(schema_.name() == "aten::repeat_interleave" && kept_.back().isInt());
  }

  // What `x[mask] = 1.0` does needs no number of places; CUDA runs masked_fill_.
  bool is_fill() const {
    return schema_.name() == "aten::_index_put_impl_" && kept_[2].toTensor().dim() == 0 && !kept_[3].toBool();
  }

  // An out= argument that its CPU kernel has resized is resized here; only one without memory, which nothing has used.
  void take_resized() {
    for (Argument& one : arguments_) {
      if (!one.is_written) continue;
      is_view_ = false;
      bool has_moved = one.cpu.storage().data() != one.own.storage().data();
      if (!has_moved && one.cpu.sizes().equals(one.own.sizes())) continue;
      size_t size = one.cpu.storage().nbytes();
      size_t before = one.own.storage().nbytes();
      TORCH_CHECK_NOT_IMPLEMENTED(!before || size <= before, schema_.name(), ": out= of another size on the emulated accelerator");
      if (size > before) resize_storage(one.own.storage(), size);
      if (size && has_moved) memcpy(one.own.storage().mutable_data(), one.cpu.storage().data(), size);
      one.own.unsafeGetTensorImpl()->set_sizes_and_strides(one.cpu.sizes(), one.cpu.strides(), one.cpu.storage_offset());
      uses_.push_back(use_of(one.own, true));
    }
  }

  void take_results() {
    size_t count = schema_.returns().size(), first = stack_->size() - count;
    for (size_t place = 0; place < count; place++) {
      c10::IValue& value = (*stack_)[first + place];
      if (value.isTensor()) {
        value = taken(value.toTensor());
      } else if (value.isTensorList()) {
        std::vector<Tensor> list;
        for (const Tensor& one : value.toTensorList().vec()) list.push_back(taken(one));
        value = c10::IValue(std::move(list));
      } else {
        is_view_ = false;
      }
    }
  }

  // A result is an argument, a view of one, or new.
  Tensor taken(const Tensor& cpu) {
    if (!cpu.defined()) return cpu;
    TORCH_CHECK_NOT_IMPLEMENTED(cpu.layout() == at::kStrided, schema_.name(), ": the emulated accelerator has no sparse tensors");
    for (Argument& one : arguments_)
      if (one.is_written && one.cpu.is_same(cpu)) return one.own;
    for (Argument& one : arguments_)
      if (one.cpu.storage().unsafeGetStorageImpl() == cpu.storage().unsafeGetStorageImpl()) return tensor_over(one.own.storage(), kKey, cpu);
    is_view_ = false;
    Tensor made = adopted(cpu, site_);
    uses_.push_back({block_of(made), 0, static_cast<int64_t>(made.storage().nbytes()), true});
    made_.push_back(made);
    return made;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  c10::Stack* stack_;
  size_t first_;
  SitePtr site_;
  CpuViews views_;
  std::vector<c10::IValue> kept_;  // the caller's references, which the stack loses
  std::vector<Argument> arguments_;
  std::vector<Tensor> made_;
  std::vector<Use> uses_;
  bool is_view_ = true, stranger_ = false, has_mask_ = false, has_host_index_ = false;
};

void run_on_cpu(const c10::OperatorHandle& op, c10::Stack* stack) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), op.schema().name(),
      " has no CPU kernel, by which the emulated accelerator would run it");
  Kernel(op, stack).run();
}

void refuse_sparse(const c10::OperatorHandle& op, c10::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(), ": the emulated accelerator has no sparse tensors");
}

// at::convolution asks devices that it does not know for these two, which do not exist on the CPU.
void convolution(const c10::OperatorHandle&, c10::Stack* stack) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  Kernel(op, stack).run();
}

void convolution_backward(const c10::OperatorHandle&, c10::Stack* stack) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  auto arguments = stack->end() - 10;  // grad, input, weight, stride, padding, dilation, transposed, ..., groups, mask
  Tensor weight = arguments[2].toTensor();
  bool is_transposed = arguments[6].toBool();
  int64_t channels = is_transposed ? weight.size(1) * arguments[8].toInt() : weight.size(0);
  stack->insert(arguments + 3, c10::IValue(std::vector<int64_t>{channels}));
  Kernel(op, stack).run();
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
             std::optional<at::Device> where, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  refuse_other(where.value_or(device()));
  TORCH_CHECK_NOT_IMPLEMENTED(!layout || *layout == at::kStrided, "the emulated accelerator has no sparse tensors");
  return at::detail::empty_generic(size, c10::GetAllocator(kDevice), c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype), format);
}
// Forward-mode derivatives that are zero; without memory on other devices.
Tensor zeros(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
             std::optional<at::Device> where, std::optional<bool> pinned) {
  return empty(size, dtype, layout, where, pinned, {}).zero_();
}
// Whether `tensor.data = other` may bring a tensor to another device, as it may from the CPU to CUDA.
bool are_interchangeable(const Tensor& one, const Tensor& other) {
  return one.layout() == at::kStrided && other.layout() == at::kStrided;
}
Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> where, std::optional<bool>) {
  refuse_other(where.value_or(device()));
  return at::detail::empty_strided_generic(size, stride, c10::GetAllocator(kDevice), c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype));
}
Tensor as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::cpu::as_strided(self, size, stride, offset);
}
Tensor view(const Tensor& self, c10::IntArrayRef size) { return at::cpu::view(self, size); }
Tensor reshape_alias(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::_reshape_alias(self, size, stride);
}
const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  size_t needed = (impl->storage_offset() + c10::multiply_integers(size)) * self.itemsize();
  if (needed > self.storage().nbytes()) resize_storage(self.storage(), needed);
  if (!self.sizes().equals(size)) impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}
Tensor& set_offset(Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(self, storage, offset, size, stride);
}
Tensor& set_storage(Tensor& self, at::Storage storage) {
  auto size = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return at::cpu::set_(self, storage, 0, {size}, {});
}
Tensor& set_tensor(Tensor& self, const Tensor& other) {
  if (self.is_same(other)) return self;
  return at::cpu::set_(self, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}
void record_tensor(Tensor& self, c10::Stream stream) { record_stream(block_of(self), stream); }

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  bool is_down = !is_on_device(to), is_up = !is_on_device(from);
  const char* name = is_down ? "copy from the device to the host" : is_up ? "copy from the host to the device" : "aten::copy_";
  SitePtr site = site_here(name);
  std::vector<Use> uses;
  if (!is_up) uses.push_back(use_of(from, false));
  if (!is_down) uses.push_back(use_of(to, true));
  Device::get().tickets.await(uses);
  if (is_up && is_pinned(from.data_ptr())) bring_late_copies(from);
  CpuViews views;
  Tensor source = is_up ? from : views.of(from), target = is_down ? to : views.of(to);
  Moment end = launch(uses, site);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (is_down && non_blocking && to.is_contiguous() && is_pinned(to.data_ptr())) {
    Tensor values = at::empty_like(to);
    values.copy_(source);
    add_late_copy({to, values, end});
    return to;
  }
  target.copy_(source);
  // A copy to memory that is not pinned is one for which the host waits, whatever it is asked for.
  if (is_down || (is_up && !non_blocking)) host_wait(name, Device::get().checker.now(current_stream()));
  return to;
}
Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

}  // namespace

// What has a CPU kernel runs by it as a whole, and a foreach operator is one kernel, as on CUDA.
void install_kernels() {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 || kOwn.count(name.name.substr(6))) continue;
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || op->hasKernelForDispatchKey(kKey)) continue;
    bool is_foreach = name.name.rfind("aten::_foreach_", 0) == 0;
    if (!is_foreach && !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    std::string full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }
TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_sparse>()); }
TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_sparse>()); }
// A copy reads what is conjugated or negated lazily as the CPU's does. Their fallbacks would copy, and so on without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_efficientzerotensor", TORCH_FN(zeros));
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(are_interchangeable));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("view", TORCH_FN(view));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_offset));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("record_stream", TORCH_FN(record_tensor));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

// Autocast, by the lists of operators that torch keeps for all devices.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at;
  using namespace at::autocast;
#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FP32_SET_OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FP32_SET_OPT_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(PROMOTE)
}

}  // namespace emulated
