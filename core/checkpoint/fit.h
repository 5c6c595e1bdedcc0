#pragma once

#include <tessera/checkpoint/checkpoint.h>

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

  /// Returns a tensor of this kind by any of its names; or else one that was saved by that name
  /// alone; or else, for the kind `param`, a buffer. Null if there is none.
  const TensorRecord* find(const std::string& kind, const std::string& name) const;
  /// Returns the tensor to read a parameter from: its master weights, unless only the weights in
  /// use have the wanted dtype. Null if there is none.
  const TensorRecord* source_of(const ParamView& param) const;
  /// Returns the optimizer's tensors for a parameter.
  const std::vector<const TensorRecord*>& states_of(const TensorRecord& param) const;
  /// Returns the index of the param group in which each parameter was saved, by its first name.
  std::map<std::string, size_t> saved_groups() const;
  /// Returns the optimizer's counts for a parameter.
  const std::map<std::string, double>& counts_of(const TensorRecord& param) const;

 private:
  const CheckpointIndex& index_;
  std::map<std::string, const TensorRecord*> by_id_;
  std::map<std::string, std::vector<const TensorRecord*>> states_;  // by the parameter's first name
};

/// Returns why a stored tensor can't be read into `tensor`; empty if it can.
std::string describe_misfit(const TensorRecord& record, const std::string& name,
                            const at::Tensor& tensor);

/// Throws one `c10::ValueError` that lists every mismatch between the checkpoint and the model, the
/// optimizer or the other objects to load. Mismatches that `options` allow are added to `loaded`.
void check_fit(const CheckpointIndex& index, const TensorTable& table, const ModelView& view,
               const LoadOptions& options, const std::string& path, LoadedCheckpoint& loaded);

}  // namespace tessera
