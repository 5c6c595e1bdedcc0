#pragma once

#include <tessera/load_safetensors.h>

#include <string>
#include <vector>

#include "checkpoint/chunk_reader.h"
#include "checkpoint/fit.h"
#include "checkpoint/foreign_files.h"
#include "checkpoint/model_view.h"

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
  struct Target {
    const TensorRecord* source;
    std::vector<int64_t> strides;  // the memory order in which `region` counts elements
    Region region;
    at::Tensor out;
  };

  void check_fit(const LoadSafetensorsOptions& options);
  void check_ties();
  void plan();
  void add(const TensorRecord* source, const std::vector<int64_t>& strides, Region region,
           at::Tensor out);

  ModelView view_;
  ChunkReader reader_;
  TensorTable table_;  // of the reader's index
  LoadedTensors loaded_;
  std::vector<Target> targets_;
};

}  // namespace tessera
