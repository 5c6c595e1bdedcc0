#include "grad/grad_gate.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/variable.h>

namespace tessera {
namespace {

thread_local int open_gates = 0;

struct GradGate final : torch::autograd::AutogradMeta {
  GradGate(std::weak_ptr<GradSink> sink, size_t slot, std::string error)
      : sink(std::move(sink)), slot(slot), error(std::move(error)) {}

  const at::Tensor& grad() const override {
    TORCH_CHECK(open_gates > 0 || sink.expired(), error);
    return grad_;
  }

  at::Tensor& mutable_grad() override {
    const bool is_autograd = torch::autograd::get_current_node() != nullptr;
    if (open_gates == 0 && !is_autograd) {
      if (auto owner = sink.lock()) owner->clear(slot);
    }
    return grad_;
  }

  std::weak_ptr<GradSink> sink;
  size_t slot;
  std::string error;
};

// Gives the tensor another metadata that knows what the one it has knows, but for the gradient.
void replace_meta(const at::Tensor& tensor, std::unique_ptr<torch::autograd::AutogradMeta> meta) {
  auto* old = torch::autograd::impl::materialize_autograd_meta(tensor);
  meta->name_ = std::move(old->name_);
  meta->grad_accumulator_ = std::move(old->grad_accumulator_);
  meta->hooks_ = std::move(old->hooks_);
  meta->cpp_hooks_list_ = std::move(old->cpp_hooks_list_);
  meta->post_acc_grad_hooks_ = std::move(old->post_acc_grad_hooks_);
  meta->requires_grad_ = old->requires_grad_;
  meta->output_nr_ = old->output_nr_;
  tensor.unsafeGetTensorImpl()->set_autograd_meta(std::move(meta));
}

}  // namespace

OpenGates::OpenGates() { ++open_gates; }
OpenGates::~OpenGates() { --open_gates; }

void install_grad_gate(const at::Tensor& tensor, std::weak_ptr<GradSink> sink, size_t slot,
                       std::string error) {
  replace_meta(tensor, std::make_unique<GradGate>(std::move(sink), slot, std::move(error)));
}

void remove_grad_gate(const at::Tensor& tensor) {
  replace_meta(tensor, std::make_unique<torch::autograd::AutogradMeta>());
}

std::shared_ptr<GradSink> grad_sink_of(const at::Tensor& tensor) {
  const auto* gate = dynamic_cast<const GradGate*>(tensor.unsafeGetTensorImpl()->autograd_meta());
  return gate ? gate->sink.lock() : nullptr;
}

bool has_grad_gate(const at::Tensor& tensor) { return grad_sink_of(tensor) != nullptr; }

}  // namespace tessera
