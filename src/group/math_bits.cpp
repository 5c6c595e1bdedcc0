#include "group/math_bits.h"

#include <ATen/core/grad_mode.h>

#include <memory>
#include <utility>

namespace tessera {
namespace {

class PlainWork : public Work {
 public:
  PlainWork(WorkPtr inner, std::vector<PlainArguments::Output> outputs)
      : inner_(std::move(inner)), outputs_(std::move(outputs)) {}

  void wait() override {
    inner_->wait();
    at::NoGradGuard no_grad;
    for (const auto& output : std::exchange(outputs_, {})) output.target.copy_(output.plain);
  }
  void wait_inputs() override { inner_->wait_inputs(); }
  bool is_completed() override { return inner_->is_completed(); }

 private:
  const WorkPtr inner_;
  std::vector<PlainArguments::Output> outputs_;
};

}  // namespace

at::Tensor with_plain_memory(const at::Tensor& tensor) {
  if (!has_math_bits(tensor)) return tensor;
  at::NoGradGuard no_grad;
  return tensor.resolve_conj().resolve_neg();
}

PlainArguments::PlainArguments(Collective& collective) {
  std::visit([this](auto& call) { replace(call); }, collective.call);
}

WorkPtr PlainArguments::finish(WorkPtr work) && {
  if (outputs_.empty()) return work;
  return std::make_shared<PlainWork>(std::move(work), std::move(outputs_));
}

void PlainArguments::replace_input(at::Tensor& tensor) {
  if (has_math_bits(tensor)) tensor = with_plain_memory(tensor);
}

void PlainArguments::replace_output(at::Tensor& tensor) {
  if (!has_math_bits(tensor)) return;
  at::Tensor plain = with_plain_memory(tensor);
  outputs_.push_back({std::exchange(tensor, plain), plain});
}

void PlainArguments::replace(AllGather& call) {
  replace_output(call.flat);
  replace_input(call.shard);
}

void PlainArguments::replace(ReduceScatter& call) {
  replace_output(call.out);
  for (Piece& piece : call.pieces) replace_input(piece.data);
}

void PlainArguments::replace(AllReduce& call) { replace_output(call.tensor); }

void PlainArguments::replace(Broadcast& call) { replace_output(call.tensor); }

void PlainArguments::replace(AllToAll& call) {
  for (at::Tensor& tensor : call.from) replace_output(tensor);
  for (at::Tensor& tensor : call.to) replace_input(tensor);
}

}  // namespace tessera
