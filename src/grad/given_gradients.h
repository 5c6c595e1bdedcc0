#pragma once

#include "grad/unit_gradients.h"

namespace tessera {

/// The gradients of a unit where somebody else reduces them: they stay in `.grad`, whole, and this
/// rank's part of them is what `reduced()` shows. Nothing is copied or sent, and ranks need not
/// agree on which parameters have one.
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
