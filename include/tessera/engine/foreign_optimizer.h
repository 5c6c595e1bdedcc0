#pragma once

#include <tessera/engine/optimizer_state_dict.h>
#include <tessera/export.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <string>
#include <vector>

namespace tessera {

/// A base class for optimizers that keep their state and options elsewhere, such as one of another
/// language. Tessera reads and writes both through these functions; `state()` stays empty, and the
/// param groups hold parameters only.
///
/// A `ShardedOptimizer` replaces the parameters in the param groups by this rank's parts of them
/// before `step()`, and sets their `.grad` for those that are to be stepped; `step()` updates these
/// parts in place. Functions are called on the thread that calls Tessera.
class TESSERA_API ForeignOptimizer : public torch::optim::Optimizer {
 public:
  using Values = OptimizerStateDict::Values;

  /// The parameters of each param group.
  explicit ForeignOptimizer(const std::vector<std::vector<at::Tensor>>& param_groups);

  /// Returns the name of the class. State and options of "Adagrad", "Adam", "AdamW", "RMSprop" and
  /// "SGD" must be named as PyTorch names them; their checkpoints and those of LibTorch's classes
  /// are then the same.
  virtual std::string kind() const = 0;

  /// Returns the name of the class in errors: that of a derived one may be another than `kind()`.
  virtual std::string class_name() const { return kind(); }

  /// Returns true if the step treats each element of a parameter by itself. Otherwise parameters
  /// must be sharded by `Partition::kWholeParam`.
  virtual bool elementwise() const { return false; }

  /// Returns the state of a parameter, or of the part that stands for it; empty if it has none. The
  /// tensors are the optimizer's own.
  virtual Values read_state(const at::Tensor& param) const = 0;
  /// Sets the state of a parameter, and keeps its tensors; empty: removes it. Counts are ints, or
  /// tensors without dimensions.
  virtual void write_state(const at::Tensor& param, const Values& values) = 0;

  /// Returns the options of a param group (`lr`, `betas`, ...).
  virtual Values read_options(size_t param_group) const = 0;
  /// Sets those options of a param group that `values` has.
  virtual void write_options(size_t param_group, const Values& values) = 0;

  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
};

}  // namespace tessera
