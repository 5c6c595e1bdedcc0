#include "model/taken_from_first.h"

#include <ATen/core/grad_mode.h>

#include "mesh/dist_meta.h"

namespace tessera {

TakenFromFirst::TakenFromFirst(const ShardMesh& mesh, const std::vector<NamedTensor>& tensors) {
  at::NoGradGuard no_grad;
  std::vector<std::string> names;
  for (const NamedTensor& item : tensors) {
    if (!item.tensor.defined()) continue;
    names.push_back(item.name);
    tensors_.push_back(local_of(item.tensor).detach());
    packed_.push_back(tensors_.back().contiguous());
  }
  // The second dim broadcasts the values that the first one has brought.
  for (ProcessGroup* process_group : {&mesh.shard(), &mesh.replicate()}) {
    if (process_group->size() == 1) continue;
    for (const WorkPtr& work : works_) work->wait();
    works_.clear();
    for (size_t i = 0; i < packed_.size(); ++i)
      works_.push_back(process_group->broadcast(packed_[i], 0, {names[i], Channel::kControl}));
  }
}

void TakenFromFirst::finish() {
  at::NoGradGuard no_grad;
  for (const WorkPtr& work : works_) work->wait();
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (!packed_[i].is_same(tensors_[i])) tensors_[i].copy_(packed_[i]);
  }
}

}  // namespace tessera
