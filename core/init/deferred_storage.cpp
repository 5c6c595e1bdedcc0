#include "init/deferred_storage.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/CPUAllocator.h>
#include <tessera/init/deferred_init.h>
#include <torch/nn/module.h>

#include <utility>

#include "base/dispatch/storage_memory.h"
#include "init/random_source.h"

namespace tessera {

c10::Storage fresh_storage(size_t nbytes) {
  return {c10::Storage::use_byte_size_t(), static_cast<int64_t>(nbytes), c10::GetCPUAllocator(),
          /*resizable=*/false};
}

at::Tensor on_storage(const at::Tensor& shape, c10::Storage storage) {
  auto impl = shape.unsafeGetTensorImpl()->shallow_copy_and_detach(
      c10::VariableVersion(0), /*allow_tensor_metadata_change=*/true);
  impl->set_storage_keep_dtype(std::move(storage));
  return at::Tensor(std::move(impl));
}

at::Tensor without_memory(const at::Tensor& shape) {
  return on_storage(shape, {c10::Storage::use_byte_size_t(), 0,
                            at::DataPtr(nullptr, c10::Device(c10::DeviceType::CPU)),
                            /*allocator=*/nullptr, /*resizable=*/false});
}

c10::Storage evaluate(const Recipe& recipe) {
  const at::NoGradGuard no_grad;
  torch::jit::Stack stack = recipe->arguments;
  c10::Storage value;
  for (const Node::Input& input : recipe->inputs) {
    c10::Storage storage = input.recipe ? evaluate(input.recipe) : fresh_storage(input.nbytes);
    if (recipe->in_place && input.argument == 0) value = storage;
    stack[input.argument] = on_storage(input.shape, std::move(storage));
  }
  const RandomSource source(recipe->generator);
  recipe->op.callBoxed(stack);
  if (!recipe->in_place) value = stack.back().toTensor().storage();
  TORCH_CHECK(value.nbytes() == recipe->nbytes, "[materialize] ", recipe->op.schema().name(),
              " must make a tensor of the size that it had in the DeferredInit scope; expected ",
              recipe->nbytes, " bytes, got ", value.nbytes(),
              ": did torch::set_default_dtype() change in between?");
  return value;
}

DeferredStorage::DeferredStorage(Recipe recipe)
    : c10::StorageImpl(use_byte_size_t(), c10::SymInt(static_cast<int64_t>(recipe->nbytes)),
                       at::DataPtr(nullptr, c10::Device(c10::DeviceType::CPU)),
                       c10::GetCPUAllocator(), /*resizable=*/true) {
  defer(std::move(recipe));
}

DeferredStorage::DeferredStorage(c10::StorageImpl& storage)
    : c10::StorageImpl(
          use_byte_size_t(), c10::SymInt(static_cast<int64_t>(storage.nbytes())),
          storage.set_data_ptr(at::DataPtr(nullptr, c10::Device(c10::DeviceType::CPU))),
          c10::GetCPUAllocator(), /*resizable=*/true) {}

void DeferredStorage::defer(Recipe recipe) {
  recipe_ = std::move(recipe);
  take_memory(
      *this,
      "[tessera] this tensor was made in a DeferredInit scope and has no memory yet, so it can't "
      "be read by data_ptr(). Call tessera::materialize() on it first, or use it through "
      "operators, which do that");
  has_memory_ = false;
}

void DeferredStorage::make_values() {
  if (!is_deferred()) return;
  const c10::Storage value = evaluate(recipe_);
  give_memory(*this, std::move(value.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()));
  has_memory_ = true;
}

void DeferredStorage::materialize() {
  const std::lock_guard lock(mutex_);
  make_values();
}

void DeferredStorage::settle() {
  const std::lock_guard lock(mutex_);
  make_values();
  recipe_.reset();
}

void DeferredStorage::drop() {
  if (recipe_) defer(std::move(recipe_));
}

void DeferredStorage::release_resources() {
  recipe_.reset();
  c10::StorageImpl::release_resources();
}

at::Tensor make_deferred(const at::Tensor& like, c10::intrusive_ptr<DeferredStorage> storage) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(std::move(storage)),
                                                   like.key_set().add(kUnitKey), like.dtype());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  return at::Tensor(std::move(impl));
}

void read_into(const at::Tensor& tensor, const at::Tensor& target) {
  target.copy_(is_deferred(tensor)
                   ? on_storage(tensor, evaluate(deferred_storage(tensor)->recipe()))
                   : tensor.detach());
}

bool is_deferred(const at::Tensor& tensor) {
  const DeferredStorage* storage = deferred_storage(tensor);
  return storage && storage->is_deferred();
}

void materialize(const at::Tensor& tensor) {
  if (DeferredStorage* storage = deferred_storage(tensor)) storage->settle();
}

void materialize(const torch::nn::Module& module) {
  for (const at::Tensor& parameter : module.parameters()) materialize(parameter);
  for (const at::Tensor& buffer : module.buffers()) materialize(buffer);
}

}  // namespace tessera
