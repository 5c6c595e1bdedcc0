#include "engine/optim/part_state.h"

#include <c10/util/Exception.h>
#include <torch/serialize/archive.h>

#include <memory>
#include <typeinfo>

#include "engine/optim/optimizer_kinds.h"
#include "engine/optim/state_shape.h"

// [Note: State of parts]
//
// While a sharded optimizer steps the user's, that has state for this rank's parts of parameters.
// torch::save() of it would store the parts, and torch::load() put whole tensors in their place,
// both without an error. LibTorch saves the state of a parameter by a virtual function of its state
// object, and makes objects of its own when it loads. So the state objects of parts are of a
// derived class that refuses to be saved, and an object of LibTorch's class is one that the
// optimizer has just made, or that was loaded: then its tensors may not fit.
namespace tessera {
namespace {

using torch::serialize::OutputArchive;

thread_local int saves_parts = 0;

template <class State>
struct PartState final : State {
  explicit PartState(const State& state) : State(state) {}
  using State::serialize;
  void serialize(OutputArchive& archive) const override {
    check_saves_parts();
    State::serialize(archive);
  }
};

// Calls `f(kind, state)` with a known optimizer's state for `param`, if it is exactly of the class
// that `Wanted` makes of the kind's.
template <template <class> class Wanted, class F>
void with_state(torch::optim::Optimizer& optimizer, const at::Tensor& param, const F& f) {
  const auto it = optimizer.state().find(param.unsafeGetTensorImpl());
  if (it == optimizer.state().end()) return;
  with_fixed_kind(optimizer, [&](auto kind) {
    using State = typename decltype(kind)::State;
    const torch::optim::OptimizerParamState& state = *it->second;
    if (typeid(state) == typeid(Wanted<State>))
      it->second = f(kind, static_cast<State&>(*it->second));
  });
}

template <class State>
using Same = State;

}  // namespace

SavesParts::SavesParts() { ++saves_parts; }
SavesParts::~SavesParts() { --saves_parts; }

void check_saves_parts() {
  TORCH_CHECK(saves_parts > 0,
              "[tessera] torch::save() of the optimizer of a sharded model would store this rank's "
              "part of its state only. Use save_checkpoint(), or full_state_dict(), whose result "
              "torch::save() takes");
}

void guard_parts(const ShardedState& state, torch::optim::Optimizer& optimizer,
                 const std::vector<const Segment*>& segments) {
  for (const Segment* segment : segments) {
    const at::Tensor& part = segment->tensor;
    if (!part.defined()) continue;
    with_state<Same>(optimizer, part, [&](auto kind, auto& own) {
      using State = typename decltype(kind)::State;
      const auto check = [&](const char* name, const at::Tensor& tensor) {
        TORCH_CHECK_VALUE(
            !tensor.defined() || tensor.sizes() == at::IntArrayRef(state_sizes(name, part.sizes())),
            "[ShardedOptimizer] the optimizer's state must be that of this rank's part of '",
            state.slot(segment->place).name(), "', of shape ", part.sizes(), "; got a '", name,
            "' of shape ", tensor.sizes(), " on rank ", state.mesh().rank(),
            " (by torch::load()?). Load whole state by load_full_state_dict() or "
            "load_checkpoint()");
      };
      kind.visit_state(own, check, [](auto&&...) {});
      return std::make_unique<PartState<State>>(own);
    });
  }
}

void unguard_part(torch::optim::Optimizer& optimizer, const at::Tensor& param) {
  with_state<PartState>(optimizer, param, [](auto kind, auto& own) {
    using State = typename decltype(kind)::State;
    return std::make_unique<State>(static_cast<const State&>(own));
  });
}

}  // namespace tessera
