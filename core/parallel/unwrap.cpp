#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <tessera/parallel/distribute_module.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/nn/module.h>

#include <set>
#include <vector>

#include "engine/model/unwrap_module.h"
#include "tensor/dist_meta.h"

namespace tessera {
namespace {

// The distinct DistTensors among the parameters and buffers. This rank must have a part of each.
std::vector<at::Tensor> dist_tensors(const torch::nn::Module& module) {
  std::vector<at::Tensor> tensors;
  std::set<const c10::TensorImpl*> seen;
  const auto add = [&](const std::string& name, const at::Tensor& tensor) {
    const DistMeta* const meta = tensor.defined() ? find_dist_meta(tensor) : nullptr;
    if (!meta || !seen.insert(tensor.unsafeGetTensorImpl()).second) return;
    TORCH_CHECK_VALUE(meta->spec->mesh.is_member(), "[unwrap] '", name,
                      "' must have a part on this rank; its mesh is ",
                      meta->spec->mesh.to_string());
    tensors.push_back(tensor);
  };
  for (const auto& item : module.named_parameters()) add(item.key(), item.value());
  for (const auto& item : module.named_buffers()) add(item.key(), item.value());
  return tensors;
}

}  // namespace

void unwrap(torch::nn::Module& module) {
  at::NoGradGuard no_grad;
  const std::vector<at::Tensor> tensors = dist_tensors(module);
  const auto state = state_of(module);
  TORCH_CHECK_VALUE(state || !tensors.empty(),
                    "[unwrap] the module must be sharded or distributed; none of its tensors is");
  if (state) unwrap(*state);
  std::vector<at::Tensor> values;
  for (const at::Tensor& tensor : tensors) values.push_back(full_tensor(tensor.detach()).clone());
  for (size_t i = 0; i < tensors.size(); ++i) {
    tensors[i].mutable_grad().reset();
    tensors[i].set_data(values[i]);
  }
}

}  // namespace tessera
