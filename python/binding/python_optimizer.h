#pragma once

#include <tessera/engine/foreign_optimizer.h>

#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "binding.h"

namespace tessera::python {

/// An optimizer of Python's `torch.optim`, or of a class derived from its `Optimizer`. Its param
/// groups, options and state stay in Python. Its groups have the model's parameters; during
/// `step()` alone they have the parts that the engine puts into the groups of this object, by which
/// state is kept. May be called with or without the interpreter's lock.
class PythonOptimizer final : public ForeignOptimizer {
 public:
  explicit PythonOptimizer(const py::object& optimizer);
  ~PythonOptimizer() override;

  std::string kind() const override;
  std::string class_name() const override;
  bool elementwise() const override;
  Values read_state(const at::Tensor& param) const override;
  void write_state(const at::Tensor& param, const Values& values) override;
  Values read_options(size_t param_group) const override;
  void write_options(size_t param_group, const Values& values) override;
  at::Tensor step(LossClosure closure = nullptr) override;

  /// Takes over the param groups of Python, to which the user may have added some, or parameters.
  /// Called before the engine reads the groups.
  void take_groups();
  /// Notes which parts the engine holds in place of the parameters in Python's groups. Called after
  /// it may have changed them.
  void note_parts();
  /// Returns what the engine holds in place of `param`, by which Python's state is kept.
  at::Tensor part_of(const at::Tensor& param) const;

  /// Returns `use` of an engine's optimizer that steps this one.
  template <class Engine, class Use>
  auto lend(Engine& engine, const Use& use) {
    if constexpr (std::is_void_v<decltype(use(engine))>) {
      use(engine);
      note_parts();
    } else {
      auto result = use(engine);
      note_parts();
      return result;
    }
  }

  /// Passes these keyword arguments to Python's `step()` from now on.
  void set_step_arguments(const py::dict& arguments) { step_arguments_ = arguments; }

  const py::object& optimizer() const { return optimizer_; }

 private:
  py::object optimizer_;
  py::dict step_arguments_;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> parts_;  // where they differ
};

}  // namespace tessera::python
