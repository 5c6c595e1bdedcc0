#include "planner/paper_job.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <utility>

#include "base/dispatch/unit_key.h"
#include "base/files/untrusted.h"
#include "engine/model/check_plan.h"

namespace tessera {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Takes the place of the job's optimizer.
class PaperOptimizer : public torch::optim::SGD {
 public:
  PaperOptimizer(std::vector<at::Tensor> parameters, PaperObserver& observer)
      : SGD(std::move(parameters), torch::optim::SGDOptions(1)), observer_(observer) {}
  at::Tensor step(LossClosure /*closure*/) override {
    observer_.on_update();
    return {};
  }

 private:
  PaperObserver& observer_;
};

// Stands for the operators of a moment: it makes their gradients when `run` says which.
struct MomentOperators : torch::autograd::Function<MomentOperators> {
  using Run = std::function<variable_list()>;
  static at::Tensor forward(AutogradContext* context, const at::Tensor& before,
                            at::TensorList /*parameters*/, const Run* run) {
    context->saved_data["run"] = reinterpret_cast<int64_t>(run);
    return at::empty_like(before);
  }
  static variable_list backward(AutogradContext* context, const variable_list& /*gradients*/) {
    return (*reinterpret_cast<const Run*>(context->saved_data["run"].toInt()))();
  }
};

at::Tensor meta(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::empty(sizes, at::device(at::kMeta).dtype(dtype));
}
// Not an operator on the parameter, which would be a use.
at::Tensor like(const at::Tensor& parameter) {
  return meta(parameter.sizes(), parameter.scalar_type());
}

void check_foreseeable(const ShardPlan& plan) {
  TORCH_CHECK_NOT_IMPLEMENTED(!plan.mesh_dim,
                              "[plan_report] plan.mesh_dim is not supported: a list of sizes does "
                              "not say which parameters are DistTensors");
  TORCH_CHECK_NOT_IMPLEMENTED(!plan.memory_budget,
                              "[plan_report] plan.memory_budget is not supported: the size of "
                              "activations is not known; give plan.resident_bytes");
  TORCH_CHECK_NOT_IMPLEMENTED(
      !plan.sync_buffers,
      "[plan_report] plan.sync_buffers is not supported: the list holds parameters, not buffers");
  TORCH_CHECK_NOT_IMPLEMENTED(
      !plan.outer,
      "[plan_report] plan.outer is not supported: its report would have steps of two kinds. Report "
      "the plan without it and with one replica, for the steps between averages");
  TORCH_CHECK_NOT_IMPLEMENTED(plan.reduce_gradients,
                              "[plan_report] plan.reduce_gradients must be true: the bytes of a "
                              "reduction by the user are not known");
}

void check_sizes(const std::vector<ParameterSize>& parameters, int ranks) {
  std::set<std::string> seen;
  int64_t nbytes = 0;
  for (const ParameterSize& parameter : parameters) {
    TORCH_CHECK_VALUE(!parameter.names.empty(), "[plan_report] each parameter must have a name");
    for (const std::string& name : parameter.names)
      TORCH_CHECK_VALUE(seen.insert(name).second,
                        "[plan_report] parameters must have different names; got '", name,
                        "' twice");
    const auto item = static_cast<int64_t>(c10::elementSize(parameter.dtype));
    nbytes = checked_sum(nbytes, CheckedShape(parameter.shape, item).nbytes());
  }
  checked_product(nbytes, ranks);  // which are sent at most
}

}  // namespace

ShardPlan foreseeable_plan(const std::vector<ParameterSize>& parameters, const ShardPlan& wanted,
                           int ranks) {
  check_foreseeable(wanted);
  check_plan(wanted);
  check_sizes(parameters, ranks);
  ShardPlan plan = wanted;
  // As many bytes lie in files.
  if (plan.offload == Offload::kDirectory) plan.offload = Offload::kHost;
  plan.offload_directory.clear();
  plan.device.reset();
  return plan;
}

std::vector<PaperMoment> moments_in_order(const PaperJob& job, const std::vector<int>& forward,
                                          const std::vector<int>& backward) {
  const int count = static_cast<int>(job.state().units().size());
  const bool is_given = !forward.empty() || !backward.empty();
  const PassOrder pass = is_given ? PassOrder{forward, backward} : registration_order(count);
  std::vector<PaperMoment> moments;
  std::map<int, size_t> last;  // in backward
  for (const auto* order : {&pass.forward, &pass.backward}) {
    const bool is_backward = order == &pass.backward;
    for (const int unit : *order) {
      TORCH_CHECK_VALUE(unit >= 0 && unit < count, "[plan_report] options.",
                        is_backward ? "backward_order" : "forward_order",
                        " must name units from 0 to ", count - 1, "; got ", unit);
      if (is_backward) last[unit] = moments.size();
      moments.push_back({.backward = is_backward, .uses = {unit}});
    }
  }
  for (const auto& [unit, moment] : last) moments[moment].gradients = job.parameters_of(unit);
  return moments;
}

// LibTorch lets a parameter on the meta device be replaced by a tensor with the same keys only.
at::Tensor paper_parameter(at::IntArrayRef sizes, at::ScalarType dtype, bool trainable) {
  const at::Tensor memory = meta(sizes, dtype);
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(memory.storage()), c10::DispatchKeySet(c10::DispatchKey::Meta).add(kUnitKey),
      memory.dtype());
  impl->set_sizes_contiguous(sizes);
  return at::Tensor(std::move(impl)).set_requires_grad(trainable);
}

PaperJob::PaperJob(const std::vector<ParameterSize>& parameters, ShardPlan plan,
                   const PaperRanks& ranks, int replicas, PaperObserver& observer)
    : observer_(observer) {
  const c10::InferenceMode no_inference(false);
  const at::AutoGradMode with_gradients(true);
  plan.process_group = paper_process_group(ranks, observer);
  plan.replicate_group = replicas > 1 ? paper_process_group({.size = replicas}, observer) : nullptr;
  std::vector<NamedTensor> named;
  for (const ParameterSize& parameter : parameters) {
    const auto sizes = parameter.shape;
    parameters_.push_back(paper_parameter(sizes, parameter.dtype, parameter.trainable));
    for (const std::string& name : parameter.names) named.push_back({name, parameters_.back()});
  }
  module_ = fully_shard(std::move(named), {}, plan);
  std::vector<at::Tensor> trained;
  for (const at::Tensor& parameter : parameters_) {
    const auto place = state().find(parameter);
    units_.push_back(place ? std::optional(static_cast<int>(place->unit)) : std::nullopt);
    is_trained_.push_back(place && parameter.requires_grad());
    if (is_trained_.back()) trained.push_back(parameter);
  }
  inner_ = std::make_unique<PaperOptimizer>(std::move(trained), observer);
  optimizer_.emplace(*module_, *inner_, ShardedOptimizerOptions{.elementwise = true});
}

PaperJob::~PaperJob() = default;

void PaperJob::pass(size_t index, const PaperMoment& moment) const {
  observer_.on_moment(index);
  for (const int unit : moment.uses)
    state().on_use({state().units()[unit].get()}, /*writes=*/false)->on_used();
  observer_.on_used(index);
}

std::vector<size_t> PaperJob::parameters_of(int unit) const {
  std::vector<size_t> parameters;
  for (size_t i = 0; i < units_.size(); ++i)
    if (units_[i] == unit && is_trained_[i]) parameters.push_back(i);
  return parameters;
}

int64_t PaperJob::copied_gradient() const {
  int64_t most = 0;
  for (const auto& gradient : made_) {
    if (gradient.use_count() != 1) continue;
    most = std::max(most, static_cast<int64_t>(gradient.lock()->nbytes()));
  }
  return most;
}

// Makes a graph in which each moment comes before the one that follows it.
void PaperJob::run_backward(const std::vector<PaperMoment>& moments) {
  std::vector<PaperMoment> backward;
  std::vector<bool> is_made(parameters_.size(), false);
  for (const PaperMoment& moment : moments) {
    for (const size_t parameter : moment.gradients) is_made[parameter] = true;
    if (moment.backward) backward.push_back(moment);
  }
  const size_t first = moments.size() - backward.size();
  PaperMoment& rest = backward.emplace_back();
  for (size_t parameter = 0; parameter < parameters_.size(); ++parameter)
    if (is_trained_[parameter] && !is_made[parameter]) rest.gradients.push_back(parameter);
  std::vector<MomentOperators::Run> runs;
  for (size_t i = 0; i < backward.size(); ++i) {
    runs.emplace_back([this, index = first + i, &moment = backward[i]] {
      pass(index, moment);
      variable_list made = {meta({}, at::kFloat)};
      made_.clear();
      for (const size_t parameter : moment.gradients) {
        made.push_back(like(parameters_[parameter]));
        made_.push_back(made.back().storage().getWeakStorageImpl());
      }
      made.emplace_back();
      return made;
    });
  }
  at::Tensor next = meta({}, at::kFloat).set_requires_grad(true);
  for (size_t i = backward.size(); i-- > 0;) {
    std::vector<at::Tensor> inputs;
    for (const size_t parameter : backward[i].gradients) inputs.push_back(parameters_[parameter]);
    next = MomentOperators::apply(next, at::TensorList(inputs), &runs[i]);
  }
  next.backward(meta({}, at::kFloat));
}

void PaperJob::step(const std::vector<PaperMoment>& moments) {
  const c10::InferenceMode no_inference(false);
  const at::AutoGradMode with_gradients(true);
  optimizer_->zero_grad();
  phase_ = Phase::kForward;
  for (size_t i = 0; i < moments.size() && !moments[i].backward; ++i) pass(i, moments[i]);
  phase_ = Phase::kBackward;
  run_backward(moments);
  phase_ = Phase::kUpdate;
  observer_.on_step();
  // A step without any gradient is an error.
  if (std::ranges::any_of(is_trained_, std::identity())) optimizer_->step();
}

}  // namespace tessera
