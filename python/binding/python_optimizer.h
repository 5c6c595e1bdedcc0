#pragma once

#include <tessera/engine/foreign_optimizer.h>

#include <string>
#include <type_traits>
#include <vector>

#include "binding.h"

namespace tessera::python {

/// An optimizer of Python's `torch.optim`, or of a class derived from its `Optimizer`. Its param
/// groups, options and state stay in Python: this object only passes on the parameters that the
/// engine puts into the groups, and reads and writes the rest. May be called with or without the
/// interpreter's lock.
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

  /// Adds the param groups that the user has added in Python, and parameters added to one. Called
  /// before the engine reads the groups.
  void take_new_groups();
  /// Puts the parameters that the engine holds into Python's groups. Called after it may have
  /// changed them; `step()` does so itself.
  void give_params();

  /// Returns `use` of an engine's optimizer that steps this one; afterwards Python's groups have
  /// the parameters that the engine holds.
  template <class Engine, class Use>
  auto lend(Engine& engine, const Use& use) {
    if constexpr (std::is_void_v<decltype(use(engine))>) {
      use(engine);
      give_params();
    } else {
      auto result = use(engine);
      give_params();
      return result;
    }
  }

  /// Passes these keyword arguments to Python's `step()` from now on.
  void set_step_arguments(const py::dict& arguments) { step_arguments_ = arguments; }

  const py::object& optimizer() const { return optimizer_; }

 private:
  py::object optimizer_;
  py::dict step_arguments_;
};

}  // namespace tessera::python
