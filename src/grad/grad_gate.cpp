#include "grad/grad_gate.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>
#include <typeinfo>
#include <unordered_map>
#include <utility>

namespace tessera {
namespace {

using torch::autograd::AutogradMeta;

thread_local int open_gates = 0;

struct GradGate;

// [Note: Gradients that are arriving]
//
// LibTorch locks a leaf while it adds to `.grad`, but not while it calls the following hook, which
// takes the gradient out. With two threads in backward, one would add to the gradient that the
// other is taking out. So while autograd is at a gated leaf, `.grad` is local to the thread: it
// holds the gradient that has just arrived, and nothing that was there before.
thread_local std::unordered_map<const GradGate*, at::Tensor> arriving;

// [Note: A DistTensor that is gone]
//
// A unit holds its parameters by weak pointers. When only weak pointers to a tensor are left,
// LibTorch releases its storage and its autograd metadata (`TensorImpl::release_resources()`), but
// not the backend's metadata. A DistTensor keeps its local part there, which keeps the unit alive,
// so the model would never be freed. The gate is part of the autograd metadata: it is destroyed
// when the tensor is, and then clears the backend's metadata. The gate's own weak pointer makes
// LibTorch release the tensor's resources before the tensor's memory is freed.
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
    const bool has_ended = !is_segment && source.sink.expired();
    TORCH_CHECK(open_gates > 0 || has_ended, error);
    return grad_;
  }

  at::Tensor& mutable_grad() override {
    if (is_arriving()) {
      const std::lock_guard lock(chaining);
      chain_hook(post_acc_grad_hooks_, source);
      return arriving[this];
    }
    if (open_gates == 0) {
      if (const auto sink = source.sink.lock()) sink->clear(source.slot);
    }
    return grad_;
  }

  // Returns true while autograd adds to `.grad` of this tensor and calls the hook that follows.
  bool is_arriving() const {
    if (is_segment || source.sink.expired()) return false;
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

// Replaces the tensor's autograd metadata by `meta`, which takes over everything but the gradient.
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

void install_segment_gate(const at::Tensor& tensor, std::weak_ptr<GradSink> sink, size_t slot,
                          std::string error) {
  replace_meta(tensor, std::make_unique<GradGate>(tensor, GradSource{std::move(sink), slot},
                                                  std::move(error), /*is_segment=*/true));
}

void remove_grad_gate(const at::Tensor& tensor) {
  unchain_hook(torch::autograd::impl::materialize_autograd_meta(tensor)->post_acc_grad_hooks_);
  replace_meta(tensor, std::make_unique<AutogradMeta>());
}

std::shared_ptr<GradSink> grad_sink_of(const at::Tensor& tensor) {
  const GradGate* const gate = gate_of(tensor);
  return gate ? gate->source.sink.lock() : nullptr;
}

bool has_grad_gate(const at::Tensor& tensor) { return grad_sink_of(tensor) != nullptr; }

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
