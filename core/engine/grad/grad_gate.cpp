#include "engine/grad/grad_gate.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>
#include <typeinfo>
#include <unordered_map>
#include <utility>

#include "engine/grad/unit_gradients.h"

namespace tessera {
namespace {

using torch::autograd::AutogradMeta;
using torch::autograd::PostAccumulateGradHook;
using HookSlot = std::unique_ptr<PostAccumulateGradHook>;

thread_local int open_gates = 0;

struct GradGate;

// [Note: Gradients that are arriving]
//
// LibTorch locks a leaf while it adds to `.grad`, but not while it calls the following hook, and
// that takes the gradient out. With two threads in backward, one would add to the gradient that the
// other is taking out. So while autograd is at a gated leaf, `.grad` is local to the thread: it
// holds the gradient that has just arrived, and nothing that was there before.
thread_local std::unordered_map<const GradGate*, at::Tensor> arriving;

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
// set meanwhile is called from then on, and one that was replaced is never called, as without
// sharding.
class GradHook final : public PostAccumulateGradHook {
 public:
  GradHook(HookSlot users, GradSource source)
      : users_(std::move(users)), source_(std::move(source)) {}

  void operator()(const at::Tensor& tensor) override {
    if (users_) call_users(tensor);
    if (const auto unit = source_.unit.lock()) unit->take(source_.slot, source_.handle, tensor);
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

// Makes the unit of `source` take gradients after the hook in `place`, a tensor's only place for a
// hook, has been called. Does nothing if the hook is chained already.
void chain_hook(HookSlot& place, const GradSource& source) {
  if (dynamic_cast<GradHook*>(place.get())) return;
  place = std::make_unique<GradHook>(std::move(place), source);
}

// Undoes chain_hook(): the user's hook stays.
void unchain_hook(HookSlot& place) {
  if (auto* own = dynamic_cast<GradHook*>(place.get())) place = own->give_up_users();
}

// [Note: A DistTensor that is freed]
//
// A unit holds its parameters by weak pointers. When only weak pointers to a tensor are left,
// LibTorch releases its storage and its autograd metadata (`TensorImpl::release_resources()`), but
// not the backend's metadata. A DistTensor keeps its local part there, and so the unit alive: the
// model would never be freed. The gate is part of the autograd metadata: it is destroyed when the
// tensor is, and then clears the backend's metadata. The gate's own weak pointer makes LibTorch
// release the tensor's resources before the tensor's memory is freed.
struct GradGate final : AutogradMeta {
  GradGate(const at::Tensor& tensor, GradSource source, std::string error, bool is_segment)
      : tensor(tensor.getIntrusivePtr()),
        source(std::move(source)),
        error(std::move(error)),
        is_segment(is_segment) {}

  ~GradGate() override {
    c10::TensorImpl* const impl = tensor._unsafe_get_target();
    if (tensor.expired() && impl->get_backend_meta()) impl->set_backend_meta(nullptr);
  }

  const at::Tensor& grad() const override {
    if (is_arriving()) return arriving[this];
    TORCH_CHECK(!is_closed(), error);
    return grad_;
  }

  // True where `.grad` can't be read, unless a gradient is arriving.
  bool is_closed() const { return open_gates == 0 && (is_segment || !source.unit.expired()); }

  at::Tensor& mutable_grad() override {
    if (is_arriving()) {
      const std::lock_guard lock(chaining);
      chain_hook(post_acc_grad_hooks_, source);
      return arriving[this];
    }
    if (open_gates == 0) {
      if (const auto unit = source.unit.lock()) unit->clear(source.slot);
    }
    return grad_;
  }

  // Returns true while autograd adds to `.grad` of this tensor and calls the hook that follows.
  bool is_arriving() const {
    if (is_segment || source.unit.expired()) return false;
    const auto node = torch::autograd::get_current_node();
    const auto* adds = dynamic_cast<const torch::autograd::AccumulateGrad*>(node.get());
    return adds && adds->variable.unsafeGetTensorImpl()->autograd_meta() == this;
  }

  c10::weak_intrusive_ptr<c10::TensorImpl> tensor;  // the tensor that has this gate
  GradSource source;
  std::string error;
  bool is_segment;  // the tensor is an optimizer's segment
  std::mutex chaining;
};

const GradGate* gate_of(const at::Tensor& tensor) {
  const auto* meta = tensor.unsafeGetTensorImpl()->autograd_meta();
  return meta && typeid(*meta) == typeid(GradGate) ? static_cast<const GradGate*>(meta) : nullptr;
}

// Newer versions of LibTorch let the user choose a dtype for gradients.
template <class Meta>
void move_grad_dtype(Meta& to, const Meta& from) {
  if constexpr (requires { to.grad_dtype_ = from.grad_dtype_; }) to.grad_dtype_ = from.grad_dtype_;
  if constexpr (requires { to.allow_grad_dtype_mismatch_; })
    to.allow_grad_dtype_mismatch_ = from.allow_grad_dtype_mismatch_;
}

// Replaces the tensor's autograd metadata by `meta`, and moves everything but the gradient there.
void replace_meta(const at::Tensor& tensor, std::unique_ptr<AutogradMeta> meta) {
  auto* old = torch::autograd::impl::materialize_autograd_meta(tensor);
  meta->name_ = std::move(old->name_);
  meta->grad_accumulator_ = std::move(old->grad_accumulator_);
  meta->hooks_ = std::move(old->hooks_);
  meta->cpp_hooks_list_ = std::move(old->cpp_hooks_list_);
  meta->post_acc_grad_hooks_ = std::move(old->post_acc_grad_hooks_);
  meta->requires_grad_ = old->requires_grad_;
  meta->output_nr_ = old->output_nr_;
  move_grad_dtype(*meta, *old);
  tensor.unsafeGetTensorImpl()->set_autograd_meta(std::move(meta));
}

}  // namespace

OpenGates::OpenGates() { ++open_gates; }
OpenGates::~OpenGates() { --open_gates; }

void install_grad_gate(const at::Tensor& tensor, GradSource source, std::string error) {
  auto gate = std::make_unique<GradGate>(tensor, std::move(source), std::move(error),
                                         /*is_segment=*/false);
  GradGate& installed = *gate;
  replace_meta(tensor, std::move(gate));
  chain_hook(installed.post_acc_grad_hooks_, installed.source);
}

void install_segment_gate(const at::Tensor& tensor, std::weak_ptr<UnitGradients> unit, size_t slot,
                          std::string error) {
  replace_meta(tensor, std::make_unique<GradGate>(tensor, GradSource{std::move(unit), slot},
                                                  std::move(error), /*is_segment=*/true));
}

void remove_grad_gate(const at::Tensor& tensor) {
  unchain_hook(torch::autograd::impl::materialize_autograd_meta(tensor)->post_acc_grad_hooks_);
  replace_meta(tensor, std::make_unique<AutogradMeta>());
}

std::shared_ptr<UnitGradients> gradients_behind(const at::Tensor& tensor) {
  const GradGate* const gate = gate_of(tensor);
  return gate ? gate->source.unit.lock() : nullptr;
}

bool has_grad_gate(const at::Tensor& tensor) { return gradients_behind(tensor) != nullptr; }

bool hides_gradient(const at::Tensor& tensor) {
  const GradGate* const gate = gate_of(tensor);
  return gate && !gate->is_arriving() && gate->is_closed();
}

bool holds_gradient(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  return meta && meta->grad_.defined();
}

at::Tensor take_gradient(const at::Tensor& tensor) {
  const GradGate* const gate = gate_of(tensor);
  if (gate && gate->is_arriving()) {
    auto own = arriving.extract(gate);
    return own ? std::move(own.mapped()) : at::Tensor();
  }
  auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  return meta ? std::exchange(meta->grad_, at::Tensor()) : at::Tensor();
}

}  // namespace tessera
