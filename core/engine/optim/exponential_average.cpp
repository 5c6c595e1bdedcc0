#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/engine/exponential_average.h>

#include "engine/optim/averaged_weights.h"

namespace tessera {
namespace {

at::ScalarType average_dtype(const at::Tensor& values) {
  return c10::promoteTypes(values.scalar_type(), at::kFloat);
}

at::Tensor copy_of(const at::Tensor& values) {
  return values.to(values.options().dtype(average_dtype(values)), /*non_blocking=*/false,
                   /*copy=*/true);
}

}  // namespace

void AveragedWeights::prepare(bool of_all) {
  values.resize(state->units().size());
  for (size_t unit = 0; unit < values.size(); ++unit) {
    const at::Tensor& updated = state->units()[unit]->updated();
    const at::Tensor& own = values[unit];
    if (!own.defined() && !of_all && !is_trained(state->units()[unit]->layout())) continue;
    if (!own.defined() || own.numel() != updated.numel() ||
        own.scalar_type() != average_dtype(updated))
      values[unit] = copy_of(updated);
  }
}

at::Tensor AveragedWeights::value(const Unit& unit) const {
  const at::Tensor& own = values[unit.index()];
  return own.defined() ? own : unit.updated().to(average_dtype(unit.updated()));
}

void AveragedWeights::check_usable() const {
  TORCH_CHECK(!state->is_given_back(),
              "[ExponentialAverage] the model was unwrapped, with the values that it had then: "
              "make an average of the module that fully_shard() returns next");
  TORCH_CHECK_VALUE(is_swapped || !state->is_exchanged(),
                    "[ExponentialAverage] the model has the values of another average: call swap() "
                    "of that first");
}

void AveragedWeights::update() {
  check_usable();
  state->check_no_join("ExponentialAverage");
  TORCH_CHECK_VALUE(!is_swapped,
                    "[ExponentialAverage] the model has the averaged values: call swap() before it "
                    "is trained on");
  at::NoGradGuard no_grad;
  prepare();
  for (size_t unit = 0; unit < values.size(); ++unit) {
    at::Tensor& own = values[unit];
    if (!own.defined()) continue;
    const at::Tensor updated = state->units()[unit]->updated().to(own.scalar_type());
    updates == 0 ? own.copy_(updated) : own.lerp_(updated, 1 - decay);
    // One that was loaded, or that was trained before and has caught up.
    if (!is_trained(state->units()[unit]->layout()) && at::equal(own, updated)) own.reset();
  }
  ++updates;
  state->reducer().record(
      [&] { return fmt::format("update {} of an average, decay {}", updates, decay); });
}

void AveragedWeights::swap() {
  check_usable();
  state->check_no_join("ExponentialAverage");
  TORCH_CHECK_VALUE(updates > 0,
                    "[ExponentialAverage] there is no average yet: call update() after a step");
  at::NoGradGuard no_grad;
  prepare();
  const auto write = [&](const std::vector<at::Tensor>& from) {
    for (size_t unit = 0; unit < from.size(); ++unit)
      if (from[unit].defined()) state->units()[unit]->updated().copy_(from[unit]);
  };
  if (is_swapped) {
    state->overwrite([&] { write(trained); }, /*to_stay=*/false);
    trained.clear();
    exchange.reset();
  } else {
    for (const auto& unit : state->units())
      trained.push_back(values[unit->index()].defined() ? unit->updated().clone() : at::Tensor());
    state->overwrite([&] { write(values); }, /*to_stay=*/false);
    exchange = std::make_shared<const char>();
    state->set_exchanged(exchange);
  }
  is_swapped = !is_swapped;
}

void AveragedWeights::check_separate(const char* what) const {
  TORCH_CHECK_VALUE(updates > 0, "[", what,
                    "] there is no average yet: call update() after a step");
  TORCH_CHECK_VALUE(!is_swapped, "[", what,
                    "] the model has the averaged values: call swap() first");
}

ExponentialAverage::ExponentialAverage(const ShardedModule& module, double decay)
    : weights_(std::make_shared<AveragedWeights>(AveragedWeights{module.state(), decay})) {
  TORCH_CHECK_VALUE(decay >= 0 && decay < 1,
                    "[ExponentialAverage] decay must be 0 or more and less than 1; got ", decay);
}

void ExponentialAverage::update() { weights_->update(); }
int64_t ExponentialAverage::updates() const { return weights_->updates; }
void ExponentialAverage::swap() { weights_->swap(); }
bool ExponentialAverage::is_swapped() const { return weights_->is_swapped; }

}  // namespace tessera
