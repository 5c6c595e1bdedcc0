#pragma once

#include "grad/unit_gradients.h"

namespace tessera {

/// The gradients of a unit that Tessera does not reduce: they stay whole in `.grad`, and
/// `reduced()` is a view of this rank's part. Nothing is sent, nothing is copied unless a
/// gradient's strides differ from its parameter's, and ranks need not agree on which parameters
/// have a gradient.
class GivenGradients final : public UnitGradients {
 public:
  GivenGradients(Unit& unit, GradTaker& taker)
      : UnitGradients(unit, taker, /*scale=*/1, /*predivide=*/1) {}

  void clear(size_t slot) override;
  void clear_all() override;
  void zero_all() override;
  bool is_live(size_t slot) const override;
  at::Tensor reduced(int64_t begin, int64_t end) const override;
};

}  // namespace tessera
