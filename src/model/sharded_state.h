#pragma once

#include <tessera/fully_shard.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "access/residency.h"
#include "grad/reducer.h"
#include "model/taken_from_first.h"
#include "unit/unit.h"

namespace tessera {

class JoinScope;
class MemoryBudget;
class ShardedState;

/// The state of a module that was sharded in place; null for another.
std::shared_ptr<ShardedState> state_of(const torch::nn::Module& module);

/// Where a parameter lies.
struct ParamIndex {
  size_t unit = 0;
  size_t slot = 0;
};

/// All that belongs to one sharded model. Owned by the storages of its parameters and by handles.
class ShardedState : public UseListener,
                     public std::enable_shared_from_this<ShardedState>,
                     public BackwardListener {
 public:
  /// Collective; see `fully_shard`.
  static std::shared_ptr<ShardedState> create(std::vector<NamedTensor> parameters,
                                              std::vector<NamedTensor> buffers,
                                              const ShardPlan& plan);
  ~ShardedState() override;

  std::shared_ptr<UseListener> on_use(const std::vector<Unit*>& units, bool writes) override;
  void on_write(const std::vector<Unit*>& units) override;
  void on_used() noexcept override;

  /// Undoes `create()`: the parameters are ordinary tensors again, and gradients are forgotten.
  /// Collective. Nothing else may be asked of the state then.
  void give_back(GivenValues which);
  /// True after it.
  bool is_given_back() const { return is_given_back_; }
  /// See `ShardedModule::unwrap()`. Collective; the first part checks only, and says nothing of
  /// optimizers.
  void check_unwrap();
  void unwrap();
  /// All ranks, each in its own time: the same for those who are gone. Starts no collective: where
  /// parameters are not here, or an exception is on its way, the next `create()` with them does it.
  void release() noexcept;

  /// Collective: takes rank 0's buffers, in two steps. The second does nothing without the first.
  void start_sync_buffers();
  void finish_sync_buffers();
  at::Tensor full_grad(const ParamIndex& place);
  std::vector<NamedTensor> full_state();
  void load_full_state(const std::vector<NamedTensor>& state, bool strict);
  /// All ranks, before shards are changed: says that this rank reads no parameters until they are.
  /// Null where ranks share no memory, and so need not know.
  WorkPtr stop_reading();
  /// Under `join()`: tells the ranks that are done what this one is about to do. Null otherwise.
  JoinScope* join_scope() const { return join_scope_; }
  void set_join_scope(JoinScope* scope) { join_scope_ = scope; }
  /// Throws under `join()`, where `what` would leave ranks that are done behind.
  void check_no_join(const char* what) const;

  /// Waits until no rank reads this one's shards any more. `stopped`: of `stop_reading()`.
  void wait_until_unread(const WorkPtr& stopped);
  /// Gives units that were frozen and are trained now their master copies.
  void thaw_trained();
  /// All ranks: lets `write` give every unit's `updated()` new values, when nobody reads the old
  /// ones.
  void overwrite(const std::function<void()>& write);
  /// True if this rank's user has given a parameter other data: see [Note: Replaced data].
  bool has_replaced() const;
  /// Takes such data in. Collective. Throws on every rank, and changes nothing, if it does not fit,
  /// or ranks have given it to different parameters.
  void take_in_replaced();
  /// Gathers the units one after another, and calls `visit` with each while it is whole. Never is
  /// more than one whole that is freed between uses. Collective, and so `visit` must not throw
  /// unless it does on all ranks.
  void visit_whole_units(const std::function<void(const Unit&)>& visit);

  /// All ranks, after the optimizer has changed the shards: lets as many units stay gathered as the
  /// plan's budget of memory allows. Returns an error, the same on all ranks, if it is too small.
  std::string fit_memory();

  /// The place of a parameter by name (any of its names) or tensor; empty if it is not the model's.
  std::optional<ParamIndex> find(const std::string& name) const;
  std::optional<ParamIndex> find(const at::Tensor& tensor) const;

  const std::vector<std::unique_ptr<Unit>>& units() const { return units_; }
  /// What every rank has whole, and no unit: buffers, and parameters that the plan ignores.
  const std::vector<NamedTensor>& buffers() const { return buffers_; }
  c10::ArrayRef<NamedTensor> module_buffers() const { return synced_; }  ///< the first of them
  c10::ArrayRef<NamedTensor> ignored_parameters() const {                ///< the others
    return c10::ArrayRef<NamedTensor>(buffers_).slice(synced_.size());
  }
  const ShardPlan& plan() const { return plan_; }
  /// Throws `c10::NotImplementedError` if ranks have parameters of their own, of which `what` would
  /// keep one rank's.
  void check_replicated(const char* what) const;
  const ShardMesh& mesh() const { return context_.mesh; }
  /// The ranks that the model is sharded over.
  ProcessGroup& process_group() const { return context_.mesh.shard(); }
  UnitContext& context() { return context_; }
  const UnitContext& context() const { return context_; }
  Residency& residency() { return *residency_; }
  Reducer& reducer() { return *reducer_; }
  const Reducer& reducer() const { return *reducer_; }
  std::weak_ptr<GradSink> grad_sink(size_t unit) const { return reducer_->gradients()[unit]; }
  const ParamSlot& slot(const ParamIndex& place) const {
    return units_[place.unit]->layout().slots[place.slot];
  }

 private:
  ShardedState(std::vector<NamedTensor> buffers, const ShardPlan& plan, UnitContext context,
               std::vector<UnitLayout> layouts);
  static void take_over_released(const std::vector<NamedTensor>& parameters);
  void adopt();
  void convert_buffers();
  void on_settle() override;
  void on_backward_end() override;
  void on_agreement(bool has_earlier) override;
  PassVote vote() override;
  void on_pass_end(bool synced, const PassVote& most) override;
  void warn_of_lone_evaluation(const PassVote& most);
  void learn_order();

  ShardPlan plan_;
  std::vector<std::string> parameter_names_;  // in the order of registration
  std::vector<NamedTensor> synced_;           // the model's buffers
  std::vector<NamedTensor> buffers_;          // these and ignored parameters
  std::optional<TakenFromFirst> arriving_;    // values of `synced_`
  UnitContext context_;
  UnitContext own_context_;  // of parameters that each rank has its own of
  std::vector<std::unique_ptr<Unit>> units_;
  std::unique_ptr<Residency> residency_;
  std::unique_ptr<Reducer> reducer_;
  JoinScope* join_scope_ = nullptr;
  bool is_given_back_ = false;
  bool warned_ = false;                   // of an evaluation that this rank took no part in
  bool is_released_ = false;              // the next `create()` with the parameters may have them
  std::unique_ptr<MemoryBudget> budget_;  // null: the plan has none
};

}  // namespace tessera
