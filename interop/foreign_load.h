#pragma once

#include <tessera/interop/load_safetensors.h>

#include <string>

#include "checkpoint/model_view.h"
#include "checkpoint/planned_reads.h"
#include "interop/foreign_files.h"

namespace tessera {

/// A load of other tools' files into a model. The constructor checks everything that can fail, and
/// changes nothing.
class ForeignLoad {
 public:
  ForeignLoad(const std::filesystem::path& path, ModelView view,
              const LoadSafetensorsOptions& options);

  /// Text that differs between ranks that see different files.
  std::string digest() const;
  LoadedTensors load();

 private:
  void check_fit(const LoadSafetensorsOptions& options);
  void check_ties();
  void plan();

  ModelView view_;
  PlannedReads reads_;
  LoadedTensors loaded_;
};

}  // namespace tessera
