#include "engine/optim/described_optimizer.h"

#include <c10/util/Exception.h>

#include <list>
#include <mutex>
#include <string>
#include <typeinfo>
#include <utility>

#include "engine/optim/optimizer_kinds.h"

namespace tessera {
namespace {

using detail::DescribedOptimizer;

std::mutex registry_mutex;

std::list<DescribedOptimizer>& registry() {
  static auto* const all = new std::list<DescribedOptimizer>;  // optimizers may outlive statics
  return *all;
}

void check_traits(const DescribedOptimizer& traits) {
  TORCH_CHECK_VALUE(!traits.name.empty() && traits.state && traits.options,
                    "[register_optimizer] traits must have a name, state and options; those of '",
                    traits.name, "' lack ",
                    traits.name.empty() ? "the name"
                    : traits.state      ? "options"
                                        : "state");
  TORCH_CHECK_VALUE(traits.cut != Cut::kElements, "[register_optimizer] the cut of '", traits.name,
                    "' must be kAnywhere, kRows or kWhole; got kElements");
  TORCH_CHECK_VALUE(
      traits.cut == Cut::kWhole || traits.state(*traits.make_state()).others.empty(),
      "[register_optimizer] state of other shapes needs whole parameters: the cut of '",
      traits.name, "' must be kWhole");
}

}  // namespace

void detail::register_optimizer(DescribedOptimizer described) {
  check_traits(described);
  const auto is_known = [&](const std::string& name, const std::type_info& type) {
    return name == described.name || type == *described.type;
  };
  bool known = with_fixed_kind_if(
      [&](auto kind) { return is_known(kind.kName, typeid(typename decltype(kind)::Optimizer)); },
      [](auto) {});
  const std::lock_guard lock(registry_mutex);
  for (const DescribedOptimizer& other : registry())
    known = known || is_known(other.name, *other.type);
  TORCH_CHECK_VALUE(!known,
                    "[register_optimizer] a class of optimizers must be registered once, "
                    "under a name of its own; '",
                    described.name, "' is known");
  registry().push_back(std::move(described));
}

const DescribedOptimizer* find_described(const torch::optim::Optimizer& optimizer) {
  const std::lock_guard lock(registry_mutex);
  const DescribedOptimizer* found = nullptr;
  for (const DescribedOptimizer& traits : registry()) {
    if (typeid(optimizer) == *traits.type) return &traits;
    if (!found && traits.is_one(optimizer)) found = &traits;
  }
  return found;
}

}  // namespace tessera
