#include "optim/deferred_step.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <map>
#include <span>
#include <utility>

#include "dispatch/unit_key.h"
#include "group/shard_update.h"
#include "optim/fused_adam.h"
#include "optim/fused_state.h"
#include "optim/param_state.h"

namespace tessera {

// [Note: Steps that wait for their use]
//
// Ranks that share their parameters need no gather after a step, but they do need each other: no
// rank may overwrite values that another one still reads, or use a unit whose other shards are not
// updated. So each of them would wait for the slowest, twice a step, and all would read and write
// their state at the same time, when memory is what they wait for.
//
// Instead, a step only counts itself and shows, with each unit, what is to be computed (AdamW, of
// these tensors, with these numbers). Who needs a unit computes what nobody has, also for others,
// and waits for the rest; the gather of that unit is over then. So steps are spread over the next
// forward, a unit's new values are in the caches when they are used, and ranks that are ahead do
// more of the work. The numbers are those of the call to step(), whatever is set afterwards; who
// computes changes no bit.
//
// Until a unit is gathered, its shards, its gradients and the state of its optimizer are in other
// hands. All of Tessera that looks at them waits for that first: Unit::finish_update(). What the
// user may hold of them, through the optimizer, is guarded: see UpdatedStorage.
namespace {

constexpr int kAdamRule = 0;

enum Tensor : size_t { kParam, kGrad, kExpAvg, kExpAvgSq, kMaxExpAvgSq };

bool is_like(const at::Tensor& tensor, const at::Tensor& param) {
  return tensor.scalar_type() == param.scalar_type() && tensor.device() == param.device() &&
         tensor.sizes() == param.sizes() && tensor.strides() == param.strides();
}

ShardUpdate update_of(const FusedAdam& call, size_t i, const Segment& segment) {
  ShardUpdate update{.begin = segment.begin,
                     .numel = segment.end - segment.begin,
                     .dtype = call.params[i].scalar_type(),
                     .rule = kAdamRule,
                     .numbers = {call.lr, call.beta1, call.beta2, call.weight_decay, call.eps,
                                 call.is_adamw ? 1. : 0., call.steps[i].item<double>()}};
  const auto put = [&](Tensor place, const at::Tensor& tensor) {
    update.tensors[place] = static_cast<std::byte*>(tensor.mutable_data_ptr());
  };
  put(kGrad, call.grads[i]);
  put(kExpAvg, call.exp_avgs[i]);
  put(kExpAvgSq, call.exp_avg_sqs[i]);
  if (!call.max_exp_avg_sqs.empty()) put(kMaxExpAvgSq, call.max_exp_avg_sqs[i]);
  return update;
}

void guard_state(torch::optim::Optimizer& optimizer, Unit& unit, const at::Tensor& param) {
  ParamState state = read_param_state(optimizer, param);
  bool is_new = false;
  for (auto& [name, tensor] : state.tensors) {
    const at::Tensor guarded = unit.guard(tensor);
    is_new = is_new || !guarded.is_same(tensor);
    tensor = guarded;
  }
  if (is_new) write_param_state(optimizer, param, state);
}

void compute_adam(std::span<const ShardUpdate> updates) {
  // In whatever the waiting thread is: a forward, a recording of deferred tensors, inference.
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard not_a_use(kUnitKey);
  StepTensors step_tensors;
  FusedAdam call;
  for (size_t i = 0; i < updates.size(); ++i) {
    const ShardUpdate& update = updates[i];
    const auto add = [&](std::vector<at::Tensor>& list, Tensor place) {
      std::byte* const data = update.tensors[place];
      if (data) list.push_back(at::from_blob(data, {update.numel}, update.dtype));
    };
    add(call.params, kParam);
    add(call.grads, kGrad);
    add(call.exp_avgs, kExpAvg);
    add(call.exp_avg_sqs, kExpAvgSq);
    add(call.max_exp_avg_sqs, kMaxExpAvgSq);
    call.steps.push_back(step_tensors(static_cast<int64_t>(update.numbers[6])));
    const bool is_last = i + 1 == updates.size() || updates[i + 1].numbers != update.numbers ||
                         updates[i + 1].dtype != update.dtype ||
                         !updates[i + 1].tensors[kMaxExpAvgSq] != !update.tensors[kMaxExpAvgSq];
    if (!is_last) continue;
    call.lr = update.numbers[0];
    call.beta1 = update.numbers[1];
    call.beta2 = update.numbers[2];
    call.weight_decay = update.numbers[3];
    call.eps = update.numbers[4];
    call.is_adamw = update.numbers[5] != 0;
    std::exchange(call, {}).run();
  }
}

[[maybe_unused]] const bool is_set = [] {
  set_update_rule(kAdamRule, compute_adam);
  return true;
}();

}  // namespace

bool can_defer_step(const ShardedState& state, const torch::optim::Optimizer& optimizer,
                    const std::vector<const Segment*>& live) {
  if (!is_adam(optimizer)) return false;
  return std::all_of(live.begin(), live.end(), [&](const Segment* segment) {
    const at::Tensor& param = segment->tensor;
    if (!state.units()[segment->place.unit]->can_defer() || !param.is_floating_point() ||
        !param.is_non_overlapping_and_dense())
      return false;
    const ParamState kept = read_param_state(optimizer, param);
    return std::all_of(kept.tensors.begin(), kept.tensors.end(),
                       [&](const auto& entry) { return is_like(entry.second, param); });
  });
}

void defer_step(ShardedState& state, torch::optim::Optimizer& optimizer,
                const std::vector<const Segment*>& live) {
  std::map<size_t, PendingUpdates> of_unit;
  std::map<const c10::TensorImpl*, const Segment*> segment_of;
  for (const Segment* segment : live) segment_of[segment->tensor.unsafeGetTensorImpl()] = segment;
  collect_adam(optimizer, [&](const FusedAdam& call) {
    for (size_t i = 0; i < call.params.size(); ++i) {
      const Segment& segment = *segment_of.at(call.params[i].unsafeGetTensorImpl());
      auto& [updates, kept] = of_unit[segment.place.unit];
      updates.push_back(update_of(call, i, segment));
      kept.insert(kept.end(), {call.grads[i], call.exp_avgs[i], call.exp_avg_sqs[i]});
      if (!call.max_exp_avg_sqs.empty()) kept.push_back(call.max_exp_avg_sqs[i]);
    }
  });
  for (const Segment* segment : live)
    guard_state(optimizer, *state.units()[segment->place.unit], segment->tensor);
  for (auto& [unit, pending] : of_unit) state.units()[unit]->defer(std::move(pending));
}

}  // namespace tessera
