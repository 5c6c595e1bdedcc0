#pragma once

#include <functional>

#include "engine/grad/unit_gradients.h"

namespace tessera {

/// Returns whether the parameter in a unit's slot takes part.
using IsCounted = std::function<bool(size_t unit, size_t slot)>;

/// Returns the norm of all reduced gradients together. Collective; the reductions must be settled.
/// Each element counts once: padding, ties and other ranks' copies do not count. `mesh`: the ranks
/// that the gradients are sharded over. `norm_type`: positive.
double grad_norm(const AllGradients& gradients, const ShardMesh& mesh, double norm_type,
                 const IsCounted& is_counted);

/// Multiplies the reduced gradients by `factor`.
void scale_gradients(const AllGradients& gradients, double factor, const IsCounted& is_counted);

}  // namespace tessera
