#pragma once

#include <tessera/interop/exchange.h>

#include <filesystem>

#include "interop/foreign_files.h"

namespace tessera {

/// Leaves the model under `options.model_key` in the index, and makes the optimizer under
/// `options.optimizer_key` that of the index, if such keys are given.
void select_parts(ForeignFiles& files, const ImportOptions& options);

}  // namespace tessera
