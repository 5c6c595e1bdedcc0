#pragma once

#include <tessera/checkpoint.h>

#include <map>
#include <string>
#include <vector>

#include "checkpoint/index.h"
#include "checkpoint/model_view.h"

namespace tessera {

/// The tensors of a checkpoint by kind and name.
class TensorTable {
 public:
  /// `index` must outlive the table.
  explicit TensorTable(const CheckpointIndex& index);

  /// A parameter or buffer by any of its names, or what was saved by that name alone; null if there
  /// is none.
  const TensorRecord* find(const std::string& kind, const std::string& name) const;
  /// A parameter, else a buffer.
  const TensorRecord* find_any(const std::string& name) const;
  /// What a parameter is read from: its master weights, unless what was in use has the dtype that
  /// is wanted. Null if it is not there.
  const TensorRecord* source_of(const ParamView& param) const;
  /// The optimizer's tensors for a parameter.
  const std::vector<const TensorRecord*>& states_of(const TensorRecord& param) const;
  /// The optimizer's counts for a parameter.
  const std::map<std::string, int64_t>& counts_of(const TensorRecord& param) const;

 private:
  const CheckpointIndex& index_;
  std::map<std::string, const TensorRecord*> by_id_;
  std::map<std::string, std::vector<const TensorRecord*>> states_;  // by the parameter's first name
};

/// Empty, or what keeps a stored tensor from being read into `tensor`.
std::string describe_misfit(const TensorRecord& record, const std::string& name,
                            const at::Tensor& tensor);

/// Throws one `c10::ValueError` that lists everything in which the checkpoint does not fit the
/// model, the optimizer or what else is to be loaded. What `options` allow is added to `loaded`.
void check_fit(const CheckpointIndex& index, const TensorTable& table, const ModelView& view,
               const LoadOptions& options, const std::string& path, LoadedCheckpoint& loaded);

}  // namespace tessera
