#pragma once

#include <memory>
#include <vector>

#include "grad/unit_gradients.h"

namespace tessera {

/// The norm of all reduced gradients together. Collective; they must be settled. Each element
/// counts once: padding, ties and other ranks' copies do not.
double grad_norm(const std::vector<std::shared_ptr<UnitGradients>>& gradients,
                 ProcessGroup& process_group, double norm_type);

/// Multiplies all reduced gradients by `factor`.
void scale_gradients(const std::vector<std::shared_ptr<UnitGradients>>& gradients, double factor);

}  // namespace tessera
