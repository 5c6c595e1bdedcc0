#pragma once

// Overloads that are found for calls that can't work, to say at compile time what to write in their
// place. `fully_shard.h` and `sharded_optimizer.h` include this file.

#include <tessera/engine/shard_plan.h>

#include <concepts>
#include <exception>
#include <memory>
#include <type_traits>

namespace torch {
namespace nn {
class Module;
}
namespace serialize {
class InputArchive;
class OutputArchive;
}  // namespace serialize
}  // namespace torch

namespace tessera {

class ShardedModule;
class ShardedOptimizer;
template <class M>
class Sharded;

namespace detail {

// False, but known only when a template with `T` is instantiated.
template <class T>
inline constexpr bool kWorks = false;

template <class T>
concept ModuleItself = std::derived_from<std::remove_cvref_t<T>, torch::nn::Module>;

template <class T>
concept ShardedHandle = std::derived_from<T, ShardedModule> || std::same_as<T, ShardedOptimizer>;

}  // namespace detail

template <detail::ModuleItself M>
Sharded<std::remove_cvref_t<M>> fully_shard(M&&, const ShardPlan& = {}) {
  static_assert(detail::kWorks<M>,
                "fully_shard() shares the module with its caller, so it takes a std::shared_ptr: "
                "auto net = std::make_shared<Net>(...); auto sharded = fully_shard(net, plan);");
  std::terminate();
}

template <detail::ModuleItself M>
Sharded<M> fully_shard(M*, const ShardPlan& = {}) {
  static_assert(detail::kWorks<M>,
                "fully_shard() shares the module with its caller, so it takes a std::shared_ptr, "
                "not a pointer: auto net = std::make_shared<Net>(...); fully_shard(net, plan)");
  std::terminate();
}

template <class M, class Deleter>
Sharded<M> fully_shard(const std::unique_ptr<M, Deleter>&, const ShardPlan& = {}) {
  static_assert(detail::kWorks<M>,
                "fully_shard() shares the module with its caller, so it takes a std::shared_ptr, "
                "not a unique_ptr: fully_shard(std::shared_ptr<Net>(std::move(net)), plan)");
  std::terminate();
}

template <class M, std::same_as<ShardLevel> Level>
Sharded<std::remove_cvref_t<M>> fully_shard(M&&, Level) {
  static_assert(detail::kWorks<M>,
                "the level is a field of the plan: fully_shard(net, {.level = ShardLevel::...})");
  std::terminate();
}

template <detail::ShardedHandle Handle>
torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive&, const Handle&) {
  static_assert(detail::kWorks<Handle>,
                "torch::save() would store this rank's part: call save_checkpoint(directory, "
                "sharded, &optimizer), or sharded.full_state() and store that; on all ranks");
  std::terminate();
}

template <detail::ShardedHandle Handle>
torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive&, Handle&) {
  static_assert(
      detail::kWorks<Handle>,
      "torch::load() reads no sharded model or optimizer: call load_checkpoint(directory, "
      "sharded, &optimizer), or give values to sharded.load_full_state()");
  std::terminate();
}

}  // namespace tessera
