#include "model/clip_call.h"

#include <c10/util/Exception.h>

#include "grad/clip_grad.h"
#include "model/sharded_state.h"

namespace tessera {

void ClipCall::count_all(const ShardedState& state) {
  for (const auto& unit : state.units()) counted.emplace_back(unit->layout().slots.size(), true);
}

ClipCall::ClipCall(const ShardedState& state, double max_norm, const ClipOptions& options)
    : max_norm(max_norm), norm_type(options.norm_type), epsilon(options.epsilon) {
  TORCH_CHECK_VALUE(max_norm >= 0, "[clip_grad_norm_] max_norm must not be negative; got ", max_norm);
  TORCH_CHECK_VALUE(norm_type > 0, "[clip_grad_norm_] norm_type must be positive or infinity; got ", norm_type);
  TORCH_CHECK_VALUE(epsilon >= 0, "[clip_grad_norm_] epsilon must not be negative; got ", epsilon);
  count_all(state);
  for (const std::string& name : options.exclude) {
    const auto place = state.find(name);
    TORCH_CHECK_VALUE(place, "[clip_grad_norm_] options.exclude names '", name,
                      "', which the model does not have");
    counted[place->unit][place->slot] = false;
  }
}

ClipCall::ClipCall(const ShardedState& state, const std::vector<double>& values)
    : max_norm(values[0]), norm_type(values[1]), epsilon(values[2]) {
  count_all(state);
  size_t i = 3;
  for (auto& unit : counted) {
    for (size_t slot = 0; slot < unit.size(); ++slot) unit[slot] = values[i++] != 0;
  }
}

std::vector<double> ClipCall::values() const {
  std::vector<double> values = {max_norm, norm_type, epsilon};
  for (const auto& unit : counted) values.insert(values.end(), unit.begin(), unit.end());
  return values;
}

double ClipCall::run(ShardedState& state) const {
  state.reducer().settle();
  const auto& gradients = state.reducer().gradients();
  const auto is_counted = [&](size_t unit, size_t slot) { return counted[unit][slot]; };
  const double norm = grad_norm(gradients, state.mesh(), norm_type, is_counted);
  const double factor = max_norm / (norm + epsilon);
  if (!(factor >= 1)) scale_gradients(gradients, factor, is_counted);
  return norm;
}

}  // namespace tessera
