#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "support/sim_device/backend.h"
#include "support/sim_device/memory.h"
#include "support/sim_device/streams.h"

namespace tessera::testing::sim {
namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

void push_copy(StreamQueue& queue, const char* name, const at::Tensor& from, const at::Tensor& to) {
  queue.push(name, [from = kernel_view(from), to = kernel_view(to)] {
    const PlainDispatch plain;
    to.copy_(from);
  });
}

// `host` is the side of the copy that is host memory.
void copy_with_host(const at::Tensor& from, const at::Tensor& to, const at::Tensor& host,
                    bool is_asynchronous) {
  const at::Tensor& on_device = host.is_same(from) ? to : from;
  StreamQueue& queue = current_queue(on_device.device().index());
  push_copy(queue, host.is_same(from) ? "copy to device" : "copy to host", from, to);
  if (is_asynchronous) {
    pinned_allocator().record_event(host.data_ptr(), nullptr, queue.stream());
  } else {
    queue.synchronize();
  }
}

// Runs on the current stream of the source's device, between events of the target's stream.
void copy_between_devices(const at::Tensor& from, const at::Tensor& to) {
  StreamQueue& source = current_queue(from.device().index());
  StreamQueue& target = current_queue(to.device().index());
  source.wait_for(target.mark());
  push_copy(source, "copy between devices", from, to);
  target.wait_for(source.mark());
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> layout, std::optional<at::Device> device,
                 std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "[sim] only strided tensors");
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(sizes, &device_allocator(), kKeys, c10::dtype_or_default(dtype),
                                   format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                         std::optional<at::Device> device, std::optional<bool> pin_memory) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "[sim] only strided tensors");
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator(), kKeys,
                                           c10::dtype_or_default(dtype));
}

// Autograd's, in place of zeros that have no memory.
at::Tensor zeros_of(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                    std::optional<at::Layout> layout, std::optional<at::Device> device,
                    std::optional<bool> pin_memory) {
  return empty(sizes, dtype, layout, device, pin_memory, std::nullopt).zero_();
}

void ensure_storage(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  const size_t bytes = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.element_size(), tensor.storage_offset());
  auto& storage = *tensor.storage().unsafeGetStorageImpl();
  if (bytes > storage.nbytes()) resize_storage(storage, bytes);
}

const at::Tensor& resize_in_place(const at::Tensor& self, at::IntArrayRef sizes,
                                  std::optional<at::MemoryFormat> format) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  ensure_storage(self);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes,
                        at::IntArrayRef strides) {
  TORCH_CHECK(source.device().is_privateuseone(), "Expected a storage of a sim device, got ",
              source.device());
  auto* const impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (strides.data() == nullptr || strides.size() != sizes.size()) {
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, strides);
  }
  ensure_storage(self);
  return self;
}

at::Tensor& set_to_nothing(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, device_allocator().allocate(0),
                       &device_allocator(), true);
  return set_storage(self, std::move(storage), 0, {0}, {});
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, /*non_blocking=*/false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  const at::Tensor host = at::empty(self.sizes(), self.options().device(c10::kCPU));
  copy_from(self, host, /*non_blocking=*/false);
  return at::_local_scalar_dense(host);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  device_allocator().recordStream(self.storage().data_ptr(), stream);
}

// Module::to() replaces CPU tensors by device tensors in place.
bool can_take_data_of(const at::Tensor& self, const at::Tensor& from) {
  const auto is_plain = [](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && (tensor.is_cpu() || tensor.is_privateuseone());
  };
  return is_plain(self) && is_plain(from);
}

}  // namespace

at::Tensor kernel_view(const at::Tensor& tensor) {
  const at::Storage& storage = tensor.storage();
  void* data = const_cast<void*>(storage.data());
  if (tensor.is_privateuseone()) data = alias_of(data);
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), {data, c10::kCPU}),
      c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* const impl = view.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) impl->_set_conj(true);
  if (tensor.is_neg()) impl->_set_neg(true);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return view;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  const at::Tensor source = from.sizes() == to.sizes() ? from : from.expand(to.sizes());
  if (from.is_privateuseone() && to.is_privateuseone()) {
    if (from.device() == to.device()) {
      push_copy(current_queue(to.device().index()), "copy", source, to);
    } else {
      copy_between_devices(source, to);
    }
    return to;
  }
  const bool is_to_host = to.is_cpu();
  const at::Tensor& host = is_to_host ? to : source;
  TORCH_CHECK(host.is_cpu(), "[sim] cannot copy between ", from.device(), " and ", to.device());
  // As on CUDA, the host's side must be contiguous and, as the source, have the target's dtype;
  // otherwise it is copied first, to or from memory that is not pinned.
  const bool is_direct = host.is_contiguous() && (is_to_host || from.dtype() == to.dtype());
  const bool is_asynchronous = non_blocking && is_direct && is_pinned(host.storage().data());
  copy_with_host(source, to, host, is_asynchronous);
  return to;
}

void resize_out(const at::Tensor& out, at::IntArrayRef sizes) {
  at::native::resize_output_check(out, sizes);  // warns
  resize_in_place(out, sizes, std::nullopt);
}

void resize_storage(c10::StorageImpl& storage, size_t bytes) {
  TORCH_CHECK(storage.resizable(), "Trying to resize storage that is not resizable");
  const c10::DeviceGuard guard(storage.device());
  c10::DataPtr data = device_allocator().allocate(bytes);
  const size_t kept = std::min(bytes, storage.nbytes());
  if (kept > 0) device_allocator().copy_data(data.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(bytes);
}

void register_copies(torch::Library& aten) {
  aten.impl("empty.memory_format", empty);
  aten.impl("empty_strided", empty_strided);
  aten.impl("_efficientzerotensor", zeros_of);
  aten.impl("as_strided", at::native::as_strided_tensorimpl);
  aten.impl("view",
            static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef)>(at::native::view));
  aten.impl("_reshape_alias", at::native::_reshape_alias);
  aten.impl("unfold", at::native::unfold);
  aten.impl("view_as_real", at::native::view_as_real);
  aten.impl("view_as_complex", at::native::view_as_complex);
  aten.impl("resize_", resize_in_place);
  aten.impl("set_.source_Storage",
            static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_));
  aten.impl("set_.source_Storage_storage_offset", set_storage);
  aten.impl("set_.source_Tensor", at::native::set_tensor_);
  aten.impl("set_", set_to_nothing);
  aten.impl("is_set_to", at::native::is_set_to);
  aten.impl("_copy_from", copy_from);
  aten.impl("_copy_from_and_resize", copy_from_and_resize);
  aten.impl("_local_scalar_dense", local_scalar);
  aten.impl("record_stream", record_stream);
  aten.impl("_has_compatible_shallow_copy_type", can_take_data_of);
  // LibTorch would resolve lazy conjugates and signs by copies, endlessly. The CPU's copy does it.
  for (const auto key : {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative})
    library("aten", key).impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace tessera::testing::sim
