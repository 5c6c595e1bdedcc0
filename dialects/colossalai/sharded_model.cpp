#include <c10/util/Exception.h>

#include <algorithm>

#include "dialects/colossalai/state.h"
#include "engine/model/sharded_state.h"

namespace tessera::colossalai {
namespace detail {

bool ModelState::has_gradients() const {
  const auto& units = sharded.state()->reducer().gradients();
  return std::any_of(units.begin(), units.end(), [](const auto& unit) {
    return unit->any_live() || unit->is_reducing() || unit->any_arrived();
  });
}

void ModelState::begin_backward(LossScale scale) {
  TORCH_CHECK(loss_scale == LossScale::kUnknown || loss_scale == scale || !has_gradients(),
              "[backward] all backwards of a step must go through the model, or all through the "
              "optimizer, which scales the loss; zero_grad() forgets those that are waiting");
  loss_scale = scale;
}

}  // namespace detail

AnyShardedModelV2::AnyShardedModelV2(torch::nn::Module& module, const ShardStrategyPtr& strategy,
                                     const ShardedModelV2Options& options)
    : state_(std::make_shared<detail::ModelState>(detail::make_state(module, strategy, options))) {}

AnyShardedModelV2::~AnyShardedModelV2() = default;

void AnyShardedModelV2::backward_by_grad(const at::Tensor& tensor, const at::Tensor& grad) {
  state_->begin_backward(detail::LossScale::kOne);
  tensor.backward(grad);
}

void AnyShardedModelV2::zero_grad(bool set_to_none) {
  state_->sharded.zero_grad(set_to_none);
  state_->loss_scale = detail::LossScale::kUnknown;  // zeros fit any scale
}

std::vector<NamedTensor> AnyShardedModelV2::state_dict() {
  std::vector<NamedTensor> state = state_->sharded.full_state();
  for (NamedTensor& item : state) item.tensor = item.tensor.cpu();
  return state;
}

void AnyShardedModelV2::load_state_dict(const std::vector<NamedTensor>& state, bool strict) {
  state_->sharded.load_full_state(state, strict);
}

void AnyShardedModelV2::dump_memory_stats(const std::string& filename) const {
  TORCH_CHECK(state_->tracer,
              "[dump_memory_stats] needs use_memory_tracer among the options of ShardedModelV2");
  if (state_->sharded.state()->mesh().rank() != 0) return;
  state_->tracer->dump_memory_stats(filename);
  state_->tracer->write_svg(filename + ".svg");
  state_->tracer->write_chrome_trace(filename + ".json");
}

void AnyShardedModelV2::unwrap() { state_->sharded.unwrap(); }

ShardedModule AnyShardedModelV2::sharded() const { return state_->sharded; }

}  // namespace tessera::colossalai
