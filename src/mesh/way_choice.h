#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/device_mesh.h>
#include <tessera/placement.h>

#include <optional>
#include <vector>

#include "mesh/rules.h"

namespace tessera {

/// A tensor among the arguments of a call, and how it lies.
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

/// Of the ways that the rule of `entry` allows, along one mesh dim after the other, the one that
/// moves least; nothing if none leaves the tensors it writes to where they are.
std::optional<ChosenWay> choose_way(const OpCall& call, const RuleEntry& entry,
                                    const std::vector<PlacedInput>& inputs, const DeviceMesh& mesh);

}  // namespace tessera
