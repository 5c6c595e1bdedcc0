#include <c10/util/Exception.h>
#include <tessera/comm/comm_debug.h>
#include <tessera/comm/process_group_decorators.h>

#include <memory>
#include <utility>

#include "base/dispatch/math_bits.h"
#include "comm/group/collective.h"

namespace tessera {
namespace {

// A tensor whose memory does not hold its values, and the copy that is written in its place.
struct ReplacedOutput {
  at::Tensor target, plain;
};

class PlainWork : public Work {
 public:
  PlainWork(WorkPtr inner, std::vector<ReplacedOutput> outputs)
      : inner_(std::move(inner)), outputs_(std::move(outputs)) {}

  void wait() override {
    inner_->wait();
    const at::NoGradGuard no_grad;
    for (const auto& output : std::exchange(outputs_, {})) output.target.copy_(output.plain);
  }
  void wait_inputs() override { inner_->wait_inputs(); }
  bool is_completed() override { return inner_->is_completed(); }

 private:
  const WorkPtr inner_;
  std::vector<ReplacedOutput> outputs_;
};

// Replaces, by copies, the tensors of a collective whose memory does not hold their values; returns
// those that are outputs.
std::vector<ReplacedOutput> make_plain(Collective& collective) {
  std::vector<ReplacedOutput> outputs;
  const auto replace = [&](at::Tensor& tensor, bool is_written) {
    if (!has_math_bits(tensor)) return;
    const at::Tensor target = std::exchange(tensor, with_plain_memory(tensor));
    if (is_written) outputs.push_back({target, tensor});
  };
  std::visit([&](auto& call) { for_each_tensor(call, replace); }, collective.call);
  return outputs;
}

}  // namespace

WorkPtr ProcessGroup::start(Collective collective) {
  check_arguments(*this, collective);
  if (const auto* const call = std::get_if<ReduceScatter>(&collective.call))
    TORCH_CHECK_NOT_IMPLEMENTED(!call->options.gather_into.defined() || transport().gathers_sums(),
                                "[reduce_scatter] `gather_into` can't be used over ",
                                backend_name(), "; call all_gather() instead (unit '",
                                collective.tag.subject, "')");
  CommDebug::count(collective);
  std::vector<ReplacedOutput> outputs = make_plain(collective);
  WorkPtr work = issue(std::move(collective));
  if (outputs.empty()) return work;
  return std::make_shared<PlainWork>(std::move(work), std::move(outputs));
}

std::vector<int> ProcessGroup::sends_to() const {
  std::vector<int> ranks;
  for (int r = 0; r < size(); ++r) {
    if (r != rank()) ranks.push_back(r);
  }
  return ranks;
}

ProcessGroupDecorator::ProcessGroupDecorator(ProcessGroupPtr inner) : inner_(std::move(inner)) {
  TORCH_CHECK_VALUE(inner_ != nullptr, "[ProcessGroupDecorator] `inner` must be given");
}

}  // namespace tessera
