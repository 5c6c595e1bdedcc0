#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <tessera/dist_tensor.h>
#include <tessera/distribute_module.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <exception>
#include <set>
#include <vector>

#include "mesh/dist_meta.h"
#include "model/sharded_state.h"

namespace tessera {
namespace {

// The distinct DistTensors among the parameters and buffers. This rank must have a part of each.
std::vector<at::Tensor> dist_tensors(const torch::nn::Module& module) {
  std::vector<at::Tensor> tensors;
  std::set<const c10::TensorImpl*> seen;
  const auto add = [&](const std::string& name, const at::Tensor& tensor) {
    const DistMeta* const meta = tensor.defined() ? find_dist_meta(tensor) : nullptr;
    if (!meta || !seen.insert(tensor.unsafeGetTensorImpl()).second) return;
    TORCH_CHECK_VALUE(meta->spec->mesh.is_member(), "[unwrap] '", name, "' must have a part on this rank; its mesh is ",
                      meta->spec->mesh.to_string());
    tensors.push_back(tensor);
  };
  for (const auto& item : module.named_parameters()) add(item.key(), item.value());
  for (const auto& item : module.named_buffers()) add(item.key(), item.value());
  return tensors;
}

}  // namespace

void ShardedState::give_back(GivenValues which) {
  reducer_->uninstall();
  const auto keep_alive = shared_from_this();
  end_reading();
  for (const auto& unit : units_) unit->give_back(which);
  // The memory may be freed when no peer reads it any more.
  wait_until_unread(stop_reading());
  is_given_back_ = true;
}

void ShardedState::check_unwrap() {
  check_no_join("unwrap()");
  check_on_all_ranks(mesh(), [&] {
    TORCH_CHECK(!reducer_->is_no_sync(), "[unwrap] must be called after the no_sync() guard has ended");
    TORCH_CHECK(!residency_->is_held(), "[unwrap] must be called after the keep_unsharded() guard has ended");
  });
}

void ShardedState::unwrap() {
  check_unwrap();
  check_on_all_ranks(mesh(), [&] {
    TORCH_CHECK(!context_.watch.has_optimizers(), "[unwrap] a ShardedOptimizer steps on parts of the parameters: call "
                "its unwrap() first, or destroy it");
  });
  finish_sync_buffers();
  residency_->free_everything();  // so that all ranks gather the same units
  give_back(GivenValues::kUsed);
}

void ShardedState::release() noexcept {
  is_released_ = true;
  const bool is_here =
      std::all_of(units_.begin(), units_.end(), [](const auto& unit) { return unit->is_whole(); });
  if (is_given_back_ || !is_here || std::uncaught_exceptions() > 0) return;
  try {
    const auto keep_alive = shared_from_this();
    reducer_->uninstall();
    for (const auto& unit : units_) unit->give_back(GivenValues::kUsed);
    is_given_back_ = true;
  } catch (const std::exception&) {  // a rank is gone, and with it data that it had to send
  }
}

void unwrap(torch::nn::Module& module) {
  at::NoGradGuard no_grad;
  const std::vector<at::Tensor> tensors = dist_tensors(module);
  const auto state = state_of(module);
  TORCH_CHECK_VALUE(state || !tensors.empty(),
                    "[unwrap] the module must be sharded or distributed; none of its tensors is");
  if (state) state->unwrap();
  std::vector<at::Tensor> values;
  for (const at::Tensor& tensor : tensors) values.push_back(full_tensor(tensor.detach()).clone());
  for (size_t i = 0; i < tensors.size(); ++i) {
    tensors[i].mutable_grad().reset();
    tensors[i].set_data(values[i]);
  }
}

}  // namespace tessera
