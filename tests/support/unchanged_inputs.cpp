#include "support/unchanged_inputs.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <tessera/comm/process_group_decorators.h>

#include <cstring>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "comm/group/capability.h"
#include "comm/group/collective.h"

namespace tessera::testing {
namespace {

struct Input {
  at::Tensor tensor, before;

  bool is_changed() const {
    return std::memcmp(tensor.const_data_ptr(), before.const_data_ptr(), before.nbytes()) != 0;
  }
};

class CheckedWork : public Work {
 public:
  CheckedWork(WorkPtr inner, std::string text, std::vector<Input> inputs)
      : inner_(std::move(inner)), text_(std::move(text)), inputs_(std::move(inputs)) {}

  void wait() override { inner_->wait(); }
  bool is_completed() override { return inner_->is_completed(); }
  void wait_inputs() override {
    for (const Input& input : std::exchange(inputs_, {}))
      TORCH_CHECK(!input.is_changed(), "[test] an input of ", text_,
                  " was changed while peers may have been reading it");
    inner_->wait_inputs();
  }

 private:
  const WorkPtr inner_;
  const std::string text_;
  std::vector<Input> inputs_;
};

class UnchangedInputs : public ProcessGroupDecorator {
 public:
  using ProcessGroupDecorator::ProcessGroupDecorator;

 private:
  WorkPtr issue(Collective collective) override {
    at::NoGradGuard no_grad;
    std::vector<Input> inputs;
    const auto keep = [&](const at::Tensor& tensor, bool is_written) {
      const bool is_host = tensor.defined() && tensor.is_cpu() && tensor.is_contiguous();
      if (is_written || !is_host || tensor.numel() == 0) return;
      inputs.push_back({tensor, tensor.detach().clone()});
    };
    std::visit([&](const auto& call) { for_each_tensor(call, keep); }, collective.call);
    std::string text =
        std::string(collective.name()) + " of " + std::string(collective.tag.subject);
    return std::make_shared<CheckedWork>(pass_on(std::move(collective)), std::move(text),
                                         std::move(inputs));
  }
};

}  // namespace

ProcessGroupPtr with_unchanged_inputs(const ProcessGroupPtr& process_group) {
  // Ranks that read each other's memory wait for each other in another way.
  if (capability<SharesMemory>(*process_group)) return process_group;
  return std::make_shared<UnchangedInputs>(process_group);
}

}  // namespace tessera::testing
