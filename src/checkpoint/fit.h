#pragma once

#include <tessera/grad_scaler.h>

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

  /// A parameter or buffer by any of its names; null if there is none.
  const TensorRecord* find(const std::string& kind, const std::string& name) const;
  /// What a parameter, which must be there, is read from: its master weights, unless what was in
  /// use has the dtype that is wanted.
  const TensorRecord& source_of(const ParamView& param) const;
  /// The optimizer's tensors for a parameter.
  const std::vector<const TensorRecord*>& states_of(const TensorRecord& param) const;
  /// The optimizer's counts for a parameter.
  const std::map<std::string, int64_t>& counts_of(const TensorRecord& param) const;

 private:
  const CheckpointIndex& index_;
  std::map<std::string, const TensorRecord*> by_id_;
  std::map<std::string, std::vector<const TensorRecord*>> states_;  // by the parameter's first name
};

/// Throws one `c10::ValueError` that lists everything in which the checkpoint does not fit the
/// model or the optimizer.
void check_fit(const CheckpointIndex& index, const TensorTable& table, const ModelView& view,
               const GradScaler* scaler, const std::string& path);

}  // namespace tessera
