#include "init/recipe.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/CPUAllocator.h>

#include <utility>

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

}  // namespace tessera
