#pragma once

#include <vector>

#include "engine/optim/segments.h"

namespace tessera {

/// Makes LibTorch's way of saving an optimizer throw for the state of these segments, where the
/// class of the optimizer is known. Throws `c10::ValueError` if the state of one has not the
/// segment's shape. See [Note: State of parts] in part_state.cpp.
void guard_parts(const ShardedState& state, torch::optim::Optimizer& optimizer,
                 const std::vector<const Segment*>& segments);

/// Undoes that for the state of one parameter.
void unguard_part(torch::optim::Optimizer& optimizer, const at::Tensor& param);

/// While it lives, this thread can save guarded state.
class SavesParts {
 public:
  SavesParts();
  ~SavesParts();
  SavesParts(const SavesParts&) = delete;
  SavesParts& operator=(const SavesParts&) = delete;
};

/// Throws, unless this thread has a `SavesParts`, that LibTorch would save a part of the state.
void check_saves_parts();

}  // namespace tessera
