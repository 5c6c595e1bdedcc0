#include "grad/grad_hook.h"

#include <utility>

#include "grad/grad_gate.h"

namespace tessera {

// [Note: One place for two hooks]
//
// LibTorch keeps one post-accumulate hook per tensor, and setting one discards the previous one. So
// a user's hook set before the model was sharded would be lost, and one set later would replace
// ours: gradients would stay in `.grad`, unreduced. Therefore our hook holds the user's and calls
// it first, with `.grad` as autograd has left it: this rank's own gradient of this backward. The
// gradient that the user's hook leaves in `.grad` is reduced; if the hook clears `.grad`, the
// parameter got no gradient in this backward.
//
// Autograd requests `.grad` for writing before it looks up the hook, and GradGate intercepts that
// request. It then wraps our hook around the hook that is set (`chain_hook`), so a hook that was
// set meanwhile is called from then on, and one that was replaced is gone, as without sharding.
namespace {

class GradHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  GradHook(HookSlot users, GradSource source)
      : users_(std::move(users)), source_(std::move(source)) {}

  void operator()(const at::Tensor& tensor) override {
    if (users_) call_users(tensor);
    if (const auto sink = source_.sink.lock()) sink->take(source_.slot, source_.handle, tensor);
  }

  HookSlot give_up_users() { return std::move(users_); }

 private:
  void call_users(const at::Tensor& tensor) {
    try {
      (*users_)(tensor);
    } catch (...) {
      take_gradient(tensor);  // this backward has failed: the next must not find it
      throw;
    }
  }

  HookSlot users_;
  GradSource source_;
};

}  // namespace

void chain_hook(HookSlot& place, const GradSource& source) {
  if (dynamic_cast<GradHook*>(place.get())) return;
  place = std::make_unique<GradHook>(std::move(place), source);
}

void unchain_hook(HookSlot& place) {
  if (auto* own = dynamic_cast<GradHook*>(place.get())) place = own->give_up_users();
}

}  // namespace tessera
