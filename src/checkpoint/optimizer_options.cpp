#include "checkpoint/optimizer_options.h"

#include <c10/util/Exception.h>

#include <type_traits>

#include "optim/optimizer_kinds.h"

namespace tessera {
namespace {

// Calls `f` with each option's name and a reference to its double or bool.
template <class F>
void visit_options(const std::string& kind_name, torch::optim::OptimizerParamGroup& group, F&& f) {
  with_kind(kind_name, [&](auto kind) {
    kind.visit_options(static_cast<typename decltype(kind)::Options&>(group.options()), f);
  });
}

}  // namespace

std::string optimizer_kind(const torch::optim::Optimizer& optimizer) {
  std::string name;
  const bool is_known = with_kind(optimizer, [&](auto kind) { name = kind.kName; });
  TORCH_CHECK_NOT_IMPLEMENTED(
      is_known,
      "[checkpoint] the state of an optimizer can be stored only for Adagrad, Adam, "
      "AdamW, CPUAdam, RMSprop and SGD; got another class");
  return name;
}

std::map<std::string, double> read_options(const std::string& kind,
                                           torch::optim::OptimizerParamGroup& group) {
  std::map<std::string, double> values;
  visit_options(kind, group,
                [&](const char* name, auto& value) { values[name] = static_cast<double>(value); });
  return values;
}

void write_options(const std::string& kind, torch::optim::OptimizerParamGroup& group,
                   const std::map<std::string, double>& values) {
  visit_options(kind, group, [&](const char* name, auto& value) {
    const auto it = values.find(name);
    if (it != values.end())
      value = static_cast<std::remove_reference_t<decltype(value)>>(it->second);
  });
}

}  // namespace tessera
