#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/optimizer_state_dict.h>

#include <optional>
#include <set>
#include <utility>

#include "model/sharded_state.h"
#include "optim/full_state_check.h"
#include "optim/master_digits.h"
#include "optim/sharded_optimizer_access.h"
#include "optim/state_replacement.h"
#include "optim/state_shape.h"

namespace tessera {
namespace {

using Values = OptimizerStateDict::Values;

constexpr const char* kLoad = "load_full_state_dict";

// Returns the values in the state for each parameter of the optimizer.
std::vector<ParamValues> values_of_params(ShardedOptimizer& optimizer,
                                          const OptimizerStateDict& state_dict,
                                          const std::vector<int64_t>& numbers) {
  std::vector<ParamValues> params;
  for (size_t i = 0; i < numbers.size(); ++i) {
    const auto values = state_dict.state.find(numbers[i]);
    if (values == state_dict.state.end()) continue;
    const ParamSlot& slot = optimizer.module().state()->slot(segments_of(optimizer)[i].place);
    params.push_back({slot.name(), slot.sizes, values->second});
  }
  return params;
}

// Returns this rank's part of a parameter's state.
std::optional<Values> cut(const ParamSlot& slot, const Segment& segment, const Values& values,
                          const std::set<std::string>& others) {
  if (!segment.tensor.defined()) return {};
  Values parts;
  for (const auto& [name, value] : values) {
    c10::IValue& part = parts[name] = value;
    if (is_elementwise(name, value, slot.sizes, others)) {
      at::Tensor whole = value.toTensor();
      const at::Tensor flat =
          flat_in_order(whole, slot.strides)
              .narrow(0, segment.begin - slot.offset, segment.end - segment.begin)
              .clone();
      // The optimizer keeps its state in the dtype that it updates.
      const bool widens = whole.scalar_type() == slot.dtype && slot.dtype != slot.master_dtype;
      part = at::as_strided(widens ? flat.to(slot.master_dtype) : flat, segment.tensor.sizes(),
                            segment.tensor.strides());
    }
    part = move_to(part, segment.tensor.device());
  }
  return parts;
}

void check_same_state(const ShardMesh& mesh, const OptimizerStateDict& state_dict) {
  size_t values = 0;
  for (const auto& [number, of_param] : state_dict.state) values += of_param.size();
  const auto texts =
      mesh.all_gather_bytes(fmt::format("{} values of {} parameters, and {} param groups", values,
                                        state_dict.state.size(), state_dict.param_groups.size()),
                            {"optimizer state", Channel::kControl});
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    TORCH_CHECK_VALUE(texts[rank] == texts[0],
                      "[load_full_state_dict] every rank must give the same state; expected ", texts[0],
                      " as on rank 0, got ", texts[rank], " on rank ", rank);
  }
}

// Returns this rank's part of the master weights in the state.
std::vector<at::Tensor> load_part(ShardedOptimizer& optimizer, const OptimizerStateDict& state_dict,
                                  std::optional<PreviousState>& previous) {
  torch::optim::Optimizer& inner = optimizer.inner();
  check_segments(optimizer, kLoad);
  const std::vector<int64_t> numbers = match_params(inner, state_dict, kLoad);
  const auto params = values_of_params(optimizer, state_dict, numbers);
  check_shapes(params, kLoad);
  std::vector<at::Tensor> masters = cut_master_weights(optimizer, state_dict, numbers);
  const std::set<std::string> others = names_of_others(params);
  previous.emplace(inner, kLoad);
  const auto convert = [&](int64_t number, const Values& values) {
    const Segment& segment = segments_of(optimizer)[number];
    return cut(optimizer.module().state()->slot(segment.place), segment, values, others);
  };
  set_state(inner, state_dict, numbers, convert, kLoad);
  return masters;
}

}  // namespace

void load_full_state_dict(ShardedOptimizer& optimizer, const OptimizerStateDict& state_dict) {
  at::NoGradGuard no_grad;
  const ShardMesh& mesh = optimizer.module().state()->mesh();
  check_same_state(mesh, state_dict);
  std::optional<PreviousState> previous;
  std::vector<at::Tensor> masters;
  check_on_all_ranks(mesh, [&] { masters = load_part(optimizer, state_dict, previous); });
  previous->drop();
  set_master_digits(optimizer, std::move(masters));
  check_on_all_ranks(mesh, [&] { offload_state(optimizer); });
}

}  // namespace tessera
