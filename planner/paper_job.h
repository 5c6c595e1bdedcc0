#pragma once

#include <tessera/engine/sharded_optimizer.h>
#include <tessera/planner/plan_report.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/model/sharded_state.h"
#include "planner/paper_group.h"

namespace tessera {

/// A part of a forward or a backward, in indices of units and of parameters.
struct PaperMoment {
  bool backward = false;
  std::vector<int> uses;          ///< units that operators read, one after the other
  std::vector<size_t> gradients;  ///< parameters whose gradients are made then
};

/// Observes a job on paper, moment by moment.
class PaperObserver : public CollectiveObserver {
 public:
  /// Before the units of a moment are used. `index` is the number of moments for the gradients that
  /// no moment makes.
  virtual void on_moment(size_t /*index*/) {}
  virtual void on_used(size_t /*index*/) {}  ///< when its units are there
  virtual void on_step() {}                  ///< after backward
  virtual void on_update() {}                ///< when the optimizer changes this rank's part
};

/// Returns the distinct parameters of a model that is not sharded yet.
std::vector<ParameterSize> parameter_sizes(const std::vector<NamedTensor>& parameters);

/// Returns a tensor without memory that can be a parameter of a sharded model.
at::Tensor paper_parameter(at::IntArrayRef sizes, at::ScalarType dtype, bool trainable = true);

/// A rank of a job that exists on paper only: the engine runs with meta tensors, among ranks that
/// do not exist.
class PaperJob {
 public:
  /// `observer` must outlive this object.
  PaperJob(const std::vector<ParameterSize>& parameters, ShardPlan plan, const PaperRanks& ranks,
           int replicas, PaperObserver& observer);
  ~PaperJob();

  /// Trains for a step. The moments of backward must follow those of forward. Trainable parameters
  /// whose gradients no moment makes get them at the end of backward.
  void step(const std::vector<PaperMoment>& moments);

  /// The phase of the step.
  enum class Phase : uint8_t { kForward, kBackward, kUpdate };
  Phase phase() const { return phase_; }

  ShardedState& state() const { return *module_->state(); }
  /// The index of the parameter's unit, if the plan shards it.
  std::optional<int> unit_of(size_t parameter) const { return units_[parameter]; }
  /// The trained parameters of a unit.
  std::vector<size_t> parameters_of(int unit) const;
  /// Bytes of the largest gradient that autograd holds now, and the engine has not taken as it is.
  int64_t copied_gradient() const;
  /// As `ShardedOptimizer::memory()` returns it, for an optimizer without state.
  ShardMemory memory() const { return optimizer_->memory(); }

 private:
  void pass(size_t index, const PaperMoment& moment) const;
  void run_backward(const std::vector<PaperMoment>& moments);

  PaperObserver& observer_;
  Phase phase_ = Phase::kForward;
  std::vector<at::Tensor> parameters_;
  std::vector<std::optional<int>> units_;  // by parameter
  std::vector<bool> is_trained_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> made_;  // gradients of the last moment
  std::optional<ShardedModule> module_;
  std::unique_ptr<torch::optim::Optimizer> inner_;
  std::optional<ShardedOptimizer> optimizer_;
};

/// Returns a plan for `PaperJob`. Throws if sizes alone do not tell what it does, or if there are
/// too many bytes to count.
ShardPlan foreseeable_plan(const std::vector<ParameterSize>& parameters, const ShardPlan& wanted,
                           int ranks);

/// Returns the moments of a step that uses units in these orders, or in that of registration and
/// back if none is given. Gradients are made at the last uses.
std::vector<PaperMoment> moments_in_order(const PaperJob& job, const std::vector<int>& forward,
                                          const std::vector<int>& backward);

}  // namespace tessera
