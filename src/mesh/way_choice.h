#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/device_mesh.h>
#include <tessera/placement.h>

#include <optional>
#include <vector>

#include "mesh/rules.h"

namespace tessera {

/// A tensor among the arguments of a call, with its placements.
struct PlacedInput {
  at::Tensor tensor;
  Placements placements;
  bool is_written = false;
  bool is_parameter = false;
};

/// True for a leaf that requires a gradient, and for a view of one.
bool shows_parameter(const at::Tensor& tensor);

/// The placements that the tensors of a call get.
struct ChosenWay {
  std::vector<Placements> inputs, outputs;
};

/// Chooses, along one mesh dim after the other, the strategy of the rule of `entry` that moves
/// least; nullopt if each of them would move a tensor that the operator writes to.
std::optional<ChosenWay> choose_way(const OpCall& call, const RuleEntry& entry,
                                    const std::vector<PlacedInput>& inputs, const DeviceMesh& mesh);

}  // namespace tessera
