#pragma once

#include <tessera/engine/fully_shard.h>

#include <compare>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/access/residency.h"
#include "engine/grad/reducer.h"
#include "engine/model/join_scope.h"
#include "engine/model/model_buffers.h"
#include "engine/model/pass_ends.h"
#include "engine/unit/unit.h"

namespace tessera {

class ShardedState;

/// Returns the state of a module that was sharded in place; null for another.
std::shared_ptr<ShardedState> state_of(const torch::nn::Module& module);

/// The position of a parameter.
struct ParamIndex {
  size_t unit = 0;
  size_t slot = 0;

  auto operator<=>(const ParamIndex&) const = default;
};

/// Returns the items of `named_parameters()` or `named_buffers()` of a module, scripted or not.
template <class Items>
std::vector<NamedTensor> named_tensors(const Items& items) {
  std::vector<NamedTensor> result;
  for (const auto& item : items) {
    if constexpr (requires { item.key(); }) {
      result.push_back({item.key(), item.value()});
    } else {
      result.push_back({item.name, item.value});
    }
  }
  return result;
}

/// The state of one sharded model. Owned by the storages of its parameters and by handles.
class ShardedState : public UseListener, public std::enable_shared_from_this<ShardedState> {
 public:
  /// Collective; see `fully_shard`.
  static std::shared_ptr<ShardedState> create(std::vector<NamedTensor> parameters,
                                              std::vector<NamedTensor> buffers,
                                              const ShardPlan& plan);
  ~ShardedState() override;

  std::shared_ptr<UseListener> on_use(const std::vector<Unit*>& units, bool writes) override;
  void on_write(const std::vector<Unit*>& units) override;
  void on_used() noexcept override;

  /// Undoes `create()`: the parameters are ordinary tensors again, and gradients are dropped.
  /// Collective. Afterwards, no other function of the state may be called.
  void give_back(GivenValues which);
  /// True after that.
  bool is_given_back() const { return is_given_back_; }
  /// Called by each rank in its own time, when its handle is destroyed: gives the parameters back.
  /// Starts no collective: if parameters are not gathered on this rank, or an exception unwinds the
  /// stack, the next `create()` with them gives them back.
  void release() noexcept;

  /// Called by all ranks before shards are changed: announces that this rank reads no parameters
  /// until they are. Returns null where ranks share no memory, and so need not know.
  WorkPtr stop_reading();
  /// Tells the ranks that are done which call this rank is about to make; null outside `join()`.
  JoinScope* join_scope() const { return join_scope_; }
  void set_join_scope(JoinScope* scope) { join_scope_ = scope; }
  /// Under `join()`: tells the ranks that are done that a call follows, and how often each gradient
  /// was cleared since the last one.
  void announce(JoinCall call, const std::vector<double>& values = {});
  /// On a rank that is done, when it has heard that: clears the gradients that the others have
  /// cleared. Returns the call's own values.
  std::vector<double> follow(const std::vector<double>& heard);
  /// Throws under `join()`: ranks that are done would not take part in `what`.
  void check_no_join(const char* what) const;

  /// Waits until no rank reads this rank's shards. `stopped`: the result of `stop_reading()`.
  void wait_until_unread(const WorkPtr& stopped);
  /// Runs `stop_reading()`, and waits for its result and for this rank's own gathers.
  void end_reading();
  /// Gives master copies to units that were frozen and are trained now.
  void thaw_trained();
  /// Called by all ranks: runs `write` when no rank reads the old values of any unit's `updated()`
  /// any more; it may set new ones. A backward of an earlier forward throws then. `to_stay`: false
  /// if the old ones will be put back.
  void overwrite(const std::function<void()>& write, bool to_stay = true);
  /// Returns how often that was called to stay.
  int64_t overwrites() const { return overwrites_; }
  /// Says that the parameters' values are exchanged, as long as `until` lives: they will be put
  /// back, and what is written meanwhile will be lost.
  void set_exchanged(std::weak_ptr<const void> until) { exchanged_ = std::move(until); }
  bool is_exchanged() const { return !exchanged_.expired(); }
  /// Throws if they are: called before `what` writes values that are to stay.
  void check_not_exchanged(const char* what) const;
  /// The parameters that this rank's user has given other data: see [Note: Replaced data].
  std::vector<std::pair<Unit*, const ParamSlot*>> replaced() const;
  /// Copies such data into the shards. Collective. Throws on every rank, and changes nothing, if it
  /// does not fit, or if ranks have given other data to different parameters.
  void take_in_replaced();
  /// Gathers the units one after another, and calls `visit` with each while it is whole. At most
  /// one of the units that are freed between uses is whole at a time. Collective, and so `visit`
  /// must not throw unless it does on all ranks.
  void visit_whole_units(const std::function<void(const Unit&)>& visit);

  /// Finds a parameter by name (any of its names) or tensor; nullopt if it is not the model's.
  std::optional<ParamIndex> find(const std::string& name) const;
  std::optional<ParamIndex> find(const at::Tensor& tensor) const;

  const std::vector<std::unique_ptr<Unit>>& units() const { return units_; }
  ModelBuffers& buffers() { return buffers_; }
  const ModelBuffers& buffers() const { return buffers_; }
  /// The names of all parameters, ties included, in the order of registration.
  const std::vector<std::string>& parameter_names() const { return parameter_names_; }
  PassEnds& ends() { return ends_; }
  const ShardPlan& plan() const { return plan_; }
  /// Throws `c10::NotImplementedError` if ranks have ordinary parameters of their own, or of
  /// process groups of their own, as `what` would keep those of one rank only.
  void check_replicated(const char* what) const;
  const ShardMesh& mesh() const { return context_.mesh; }
  /// The ranks that the model is sharded over.
  ProcessGroup& process_group() const { return context_.mesh.shard(); }
  UnitContext& context() { return context_; }
  const UnitContext& context() const { return context_; }
  Residency& residency() { return *residency_; }
  Reducer& reducer() { return *reducer_; }
  const Reducer& reducer() const { return *reducer_; }
  std::weak_ptr<UnitGradients> grad_sink(size_t unit) const { return reducer_->gradients()[unit]; }
  const ParamSlot& slot(const ParamIndex& place) const {
    return units_[place.unit]->layout().slots[place.slot];
  }

 private:
  ShardedState(std::vector<NamedTensor> buffers, const std::vector<NamedTensor>& ignored,
               const ShardPlan& plan, UnitContext context, std::vector<UnitLayout> layouts);
  static void take_over_released(const std::vector<NamedTensor>& parameters);
  void adopt(const ShardMesh& all);
  // As `overwrite()`, but of parameters that the caller has noted as written.
  void set_shards(const std::function<void()>& write, bool to_stay = true);

  ShardPlan plan_;
  std::vector<std::string> parameter_names_;
  ModelBuffers buffers_;
  UnitContext context_;
  std::vector<std::unique_ptr<Unit>> units_;
  std::unique_ptr<Residency> residency_;
  PassEnds ends_;
  std::unique_ptr<Reducer> reducer_;
  JoinScope* join_scope_ = nullptr;
  int64_t overwrites_ = 0;
  std::weak_ptr<const void> exchanged_;  // see set_exchanged()
  bool is_given_back_ = false;
  bool is_released_ = false;  // the next `create()` with the parameters may take them
};

}  // namespace tessera
