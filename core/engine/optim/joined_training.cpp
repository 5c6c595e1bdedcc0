#include "engine/optim/joined_training.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <tessera/engine/join.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <map>
#include <string>

#include "engine/model/join_scope.h"
#include "engine/model/model_gradients.h"
#include "engine/optim/param_state.h"

namespace tessera {
namespace {

std::vector<const torch::optim::Optimizer*> inner_of(
    const std::vector<JoinedOptimizer>& optimizers) {
  std::vector<const torch::optim::Optimizer*> inner;
  for (const JoinedOptimizer& optimizer : optimizers) inner.push_back(optimizer.inner);
  return inner;
}

bool holds_own_options(const JoinedOptimizer& optimizer) {
  return optimizer.options == optimizer.inner || !knows_state(*optimizer.inner);
}

std::map<std::string, double> options_of(const JoinedOptimizer& optimizer, size_t group) {
  if (holds_own_options(optimizer)) return step_options(*optimizer.options, group);
  return read_options(*optimizer.inner, optimizer.options->param_groups()[group]);
}

std::vector<double> numbers_of(const JoinedOptimizer& optimizer) {
  std::vector<double> numbers;
  for (size_t i = 0; i < optimizer.options->param_groups().size(); ++i)
    for (const auto& [name, value] : options_of(optimizer, i)) numbers.push_back(value);
  return numbers;
}

void set_numbers(const JoinedOptimizer& optimizer, const std::vector<double>& numbers) {
  size_t count = 0;
  for (size_t i = 0; i < optimizer.options->param_groups().size(); ++i) {
    auto options = options_of(optimizer, i);
    TORCH_CHECK(count + options.size() <= numbers.size(),
                "[join] optimizers must have equal param groups and options on all ranks; another "
                "rank's has ",
                numbers.size(), " options");
    for (auto& [name, value] : options) value = numbers[count++];
    if (!holds_own_options(optimizer)) {
      write_options(*optimizer.inner, optimizer.options->param_groups()[i], options);
    } else if (knows_state(*optimizer.inner)) {
      write_options(*optimizer.options, i, options);
    } else if (!options.empty()) {
      set_learning_rate(*optimizer.options, i, options.at("lr"));
    }
  }
}

class Training {
 public:
  Training(ShardedState& state, const std::vector<JoinedOptimizer>& optimizers)
      : state_(state), optimizers_(optimizers), scope_(state.mesh(), inner_of(optimizers)) {
    check_on_all_ranks(state.mesh(), [&] { check(); });
    state_.set_join_scope(&scope_);
    state_.reducer().forget_clears();
  }
  ~Training() { state_.set_join_scope(nullptr); }
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;

  void run(const std::function<void()>& train) {
    try {
      train();
    } catch (...) {
      tell_of_failure();
      throw;
    }
    while (true) {
      const JoinScope::Heard heard = scope_.listen();
      if (heard.call == JoinCall::kDone) return clear_as_others();
      take_part(heard);
    }
  }

 private:
  void check() const {
    TORCH_CHECK(!state_.join_scope(), "[join] calls don't nest");
    TORCH_CHECK_NOT_IMPLEMENTED(state_.plan().reduce_gradients,
                                "[join] the gradients that a rank needs for steps after its last "
                                "batch must be reduced by Tessera: set plan.reduce_gradients");
    TORCH_CHECK_NOT_IMPLEMENTED(!state_.plan().outer,
                                "[join] replicas that are averaged (plan.outer) must make the same "
                                "number of steps: give all of them equally many batches");
    TORCH_CHECK_NOT_IMPLEMENTED(state_.plan().groups.empty(),
                                "[join] plan.groups is for models whose forwards are collective, "
                                "in which a rank that is done would not take part: give all ranks "
                                "equally many batches");
    for (const auto& unit : state_.units()) {
      TORCH_CHECK_NOT_IMPLEMENTED(!unit->frees(),
                                  "[join] parameters must stay whole between uses; those of ",
                                  unit->label(), " are freed. Use a level below kParameters");
    }
  }

  // Those that were done last may have cleared gradients since the last call.
  void clear_as_others() {
    Reducer& reducer = state_.reducer();
    std::vector<double> most = reducer.clears();
    most.push_back(reducer.is_reducing() ? 0 : 1);
    const auto size = static_cast<int64_t>(most.size());
    state_.mesh().all_reduce(at::from_blob(most.data(), {size}, at::kDouble), ReduceOp::kMax,
                             {"uneven steps", Channel::kControl});
    if (most.back() == 0) reducer.settle();
    reducer.clear_as(most);
  }

  // The error being thrown counts, not one from announcing it.
  void tell_of_failure() noexcept {
    try {
      scope_.announce(JoinCall::kFailed);
    } catch (const std::exception&) {
    }
  }

  void take_part(const JoinScope::Heard& heard) {
    switch (heard.call) {
      case JoinCall::kForward:
        state_.buffers().start_sync(state_.mesh());
        return state_.buffers().finish_sync();
      case JoinCall::kSettle:
        return state_.reducer().settle();
      case JoinCall::kBackward:
      case JoinCall::kReduce:
        state_.follow(heard.values);
        return state_.reducer().join_reduction(heard.call == JoinCall::kBackward);
      case JoinCall::kClip:
        clip(state_, ClipCall::from(state_.follow(heard.values)));
        return;
      case JoinCall::kStep:
        return step(state_.follow(heard.values));
      default:
        return;
    }
  }

  // With the others' options, and then this rank's again, from which its schedulers go on.
  void step(const std::vector<double>& values) {
    const JoinedOptimizer& optimizer = optimizers_[static_cast<size_t>(values[0])];
    const std::vector<double> own = numbers_of(optimizer);
    set_numbers(optimizer, {values.begin() + 1, values.end()});
    optimizer.step();
    set_numbers(optimizer, own);
  }

  ShardedState& state_;
  const std::vector<JoinedOptimizer>& optimizers_;
  JoinScope scope_;
};

}  // namespace

void train_joined(ShardedState& state, const std::vector<JoinedOptimizer>& optimizers,
                  const std::function<void()>& train) {
  Training(state, optimizers).run(train);
}

void announce_step(ShardedState& state, torch::optim::Optimizer& inner) {
  JoinScope* const scope = state.join_scope();
  if (!scope) return;
  std::vector<double> values = {static_cast<double>(scope->index_of(inner))};
  const std::vector<double> numbers = numbers_of({&inner, &inner, {}});
  values.insert(values.end(), numbers.begin(), numbers.end());
  state.announce(JoinCall::kStep, values);
}

void join(const ShardedModule& module, const std::vector<ShardedOptimizer*>& optimizers,
          const std::function<void()>& train) {
  std::vector<JoinedOptimizer> joined;
  for (ShardedOptimizer* optimizer : optimizers)
    joined.push_back(
        {&optimizer->inner(), &optimizer->inner(), [optimizer] { optimizer->step(); }});
  train_joined(*module.state(), joined, train);
}

}  // namespace tessera
