#include "engine/grad/capture_watch.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace tessera {
namespace {

// The backward in which this thread last used a parameter to build a graph; expires when that
// backward ends.
struct RecomputedCapture {
  int backward = -1;
  std::weak_ptr<void> alive;
};
thread_local RecomputedCapture recomputation;

bool is_inside_recomputation() {
  return !recomputation.alive.expired() &&
         recomputation.backward != torch::autograd::get_current_graph_task_id();
}

// Returns true if the backward that runs on this thread returns the gradient of `tensor` to its
// caller instead of adding it to `.grad`.
bool is_captured(const at::Tensor& tensor) {
  const auto* nodes = torch::autograd::get_current_graph_task_exec_info();
  if (!nodes || nodes->empty() || is_inside_recomputation()) return false;
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(tensor);
  const auto found = accumulator ? nodes->find(accumulator.get()) : nodes->end();
  return found != nodes->end() && found->second.captures_ != nullptr;
}

void warn(const std::string& name) {
  TORCH_WARN(
      "[tessera] torch::autograd::grad() returns this rank's own gradient of parameter '", name,
      "', not the mean over ranks: nothing reduces it. To get the mean, call backward() and then "
      "ShardedModule::full_grad(), or average it over the ranks yourself. This warning is given "
      "once per model");
}

}  // namespace

void note_use_in_backward() {
  if (!at::GradMode::is_enabled() || !torch::autograd::get_current_node()) return;
  const int backward = torch::autograd::get_current_graph_task_id();
  if (recomputation.backward == backward && !recomputation.alive.expired()) return;
  const auto token = std::make_shared<int>(0);  // destroyed with the backward, however it ends
  recomputation = {backward, token};
  torch::autograd::Engine::get_default_engine().queue_callback([token] {});
}

void watch_captures(const at::Tensor& tensor, const std::string& name,
                    std::shared_ptr<std::atomic<bool>> warned) {
  auto* meta = torch::autograd::impl::materialize_autograd_meta(tensor);
  if (!meta->cpp_hooks_list_) {
    if (!meta->hooks_.empty()) return;  // set from Python; they would be lost
    torch::autograd::impl::create_cpp_hook(tensor);
  }
  // The tensor owns its hooks: they must not own it.
  const c10::weak_intrusive_ptr<c10::TensorImpl> weak(tensor.getIntrusivePtr());
  // Not by register_hook(): it refuses parameters that are frozen now.
  meta->cpp_hooks_list_->push_back([weak, name, warned](const at::TensorBase&) -> at::TensorBase {
    if (*warned) return {};
    const auto alive = weak.lock();
    if (alive && is_captured(at::Tensor(alive)) && !warned->exchange(true)) warn(name);
    return {};
  });
}

}  // namespace tessera
