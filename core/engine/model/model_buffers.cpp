#include "engine/model/model_buffers.h"

#include <ATen/core/grad_mode.h>
#include <tessera/init/deferred_init.h>

#include <algorithm>
#include <string>
#include <utility>

#include "engine/unit/layout.h"

namespace tessera {
namespace {

// Starts to give tensors that every rank has whole the values that rank 0 has. Returns a function
// that waits until these have arrived. Collective.
std::function<void()> take_from_first(const ShardMesh& mesh, c10::ArrayRef<NamedTensor> tensors) {
  at::NoGradGuard no_grad;
  std::vector<std::string> names;
  std::vector<at::Tensor> own, packed;
  for (const NamedTensor& item : tensors) {
    if (!item.tensor.defined()) continue;
    names.push_back(item.name);
    own.push_back(local_of(item.tensor).detach());
    packed.push_back(own.back().contiguous());
  }
  std::vector<WorkPtr> works;
  // The second dim broadcasts the values that the first one has brought.
  for (ProcessGroup* process_group : {&mesh.shard(), &mesh.replicate()}) {
    if (process_group->size() == 1) continue;
    for (const WorkPtr& work : works) work->wait();
    works.clear();
    for (size_t i = 0; i < packed.size(); ++i)
      works.push_back(process_group->broadcast(packed[i], 0, {names[i], Channel::kControl}));
  }
  return [own, packed, works] {
    at::NoGradGuard no_grad;
    for (const WorkPtr& work : works) work->wait();
    for (size_t i = 0; i < own.size(); ++i)
      if (!packed[i].is_same(own[i])) own[i].copy_(packed[i]);
  };
}

}  // namespace

ModelBuffers::ModelBuffers(std::vector<NamedTensor> of_module,
                           const std::vector<NamedTensor>& ignored)
    : all_(std::move(of_module)), module_count_(all_.size()) {
  all_.insert(all_.end(), ignored.begin(), ignored.end());
}

void ModelBuffers::leave_out(const std::set<std::string>& names) {
  const auto end = all_.begin() + static_cast<std::ptrdiff_t>(module_count_);
  const auto first_out = std::stable_partition(
      all_.begin(), end, [&](const NamedTensor& buffer) { return !names.contains(buffer.name); });
  saved_count_ = static_cast<size_t>(first_out - all_.begin());
}

void ModelBuffers::convert(const ShardPlan& plan) {
  for (const NamedTensor& item : all_) materialize(item.tensor);
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < all_.size(); ++i) {
    const at::Tensor& buffer = all_[i].tensor;
    if (!buffer.defined()) continue;
    const auto dtype = plan.precision.buffer_dtype;
    const bool converts = dtype && buffer.is_floating_point() && i < module_count_;  // not ignored
    const at::ScalarType new_dtype = converts ? *dtype : buffer.scalar_type();
    const at::Device device = plan.device.value_or(buffer.device());
    if (new_dtype != buffer.scalar_type() || device != buffer.device())
      buffer.set_data(buffer.to(device, new_dtype));
  }
}

void ModelBuffers::broadcast(const ShardMesh& mesh) const { take_from_first(mesh, of_module())(); }

void ModelBuffers::broadcast_ignored(const ShardMesh& mesh) const {
  take_from_first(mesh, ignored())();
}

void ModelBuffers::start_sync(const ShardMesh& mesh) {
  finish_sync();
  arriving_ = take_from_first(mesh, of_module());
}

void ModelBuffers::finish_sync() {
  if (arriving_) std::exchange(arriving_, nullptr)();
}

}  // namespace tessera
