#include <tessera/deferred_init.h>
#include <tessera/page_heap.h>
#include <torch/nn/module.h>

#include "init/deferred_storage.h"
#include "init/recorder.h"

namespace tessera {

DeferredInit::DeferredInit() {
  // Malloc would put small tensors into the holes of freed ones, and grow for the next large one.
  use_page_heap();
  enter_deferred_init();
}

DeferredInit::~DeferredInit() { leave_deferred_init(); }

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
