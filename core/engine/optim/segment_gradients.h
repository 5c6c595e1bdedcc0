#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <optional>
#include <vector>

#include "engine/optim/segments.h"

namespace tessera {

/// The reduced gradients of segments of one unit, or of any segments on the device of their
/// gradients, in the memory in which the optimizer steps.
class SegmentGradients {
 public:
  /// Takes the gradients of `segments`; all must have one. If the segments are offloaded, it queues
  /// copies to page-locked memory beside the kernels of the device, and the host goes on.
  void begin(ShardedState& state, const std::vector<const Segment*>& segments);
  /// Returns the gradients, one for each segment, once they are there.
  std::vector<at::Tensor> take();

 private:
  std::vector<at::Tensor> gradients_;
  std::optional<c10::Event> copied_;
};

/// Clears the gradients of the parameters in the optimizer's param groups, or turns those that
/// exist into zeros (`set_to_none` false). Gradients of the model's other parameters stay.
/// `segments`: the optimizer's, as adopted last.
void clear_gradients(ShardedState& state, const torch::optim::Optimizer& optimizer,
                     const std::vector<Segment>& segments, bool set_to_none);

}  // namespace tessera
