#pragma once

#include <tessera/fully_shard.h>
#include <tessera/sharded_optimizer.h>

#include <string>
#include <variant>
#include <vector>

namespace tessera::paddle {

/// The optional arguments of `group_sharded_parallel`, with Paddle's names and defaults. What a
/// value means is the same as in Paddle unless said here.
struct GroupShardedOptions {
  /// Ranks to shard over; null: the default process group. One rank works, as plain training.
  ProcessGroupPtr group;
  bool offload = false;       ///< refused until it is built
  bool sync_buffers = false;  ///< broadcast buffers from rank 0 before every forward of the wrapper
  int64_t buffer_max_size = int64_t{1}
                            << 23;  ///< elements of a unit (not bytes); 0: one per parameter
  int64_t segment_size = int64_t{1}
                         << 20;  ///< `p_g_os`: parameters of at most this many elements stay whole
  bool sync_comm = false;        ///< `p_g_os`: gather when used instead of ahead of use
  ProcessGroupPtr dp_group;      ///< refused until it is built
  /// `p_g_os`: modules whose parameters stay whole, by type name, dotted name or address.
  std::vector<std::variant<std::string, const torch::nn::Module*>> exclude_layer;
};

/// The optimizer as `group_sharded_parallel` returns it.
class GroupShardedOptimizer : public ShardedOptimizer {
 public:
  using ShardedOptimizer::ShardedOptimizer;
  void clear_grad() { zero_grad(); }
  TESSERA_API double get_lr() const;
  TESSERA_API void set_lr(double lr);
  /// Throws `std::runtime_error`, as in Paddle: use `step()`.
  [[noreturn]] TESSERA_API void minimize(const at::Tensor& loss);
};

template <class M>
struct GroupSharded {
  Sharded<M> model;
  GroupShardedOptimizer optimizer;
};

/// Translates Paddle's arguments. Throws `c10::ValueError` for what Paddle refuses, too.
TESSERA_API ShardPlan group_sharded_plan(const torch::nn::Module& model, const std::string& level,
                                         const GroupShardedOptions& options);

namespace detail {
/// The plan, after checks on all ranks: what fails on one fails on all, before anything is changed.
/// Collective.
TESSERA_API ShardPlan check_group_sharded(const torch::nn::Module& model,
                                          const torch::optim::Optimizer& optimizer,
                                          const std::string& level,
                                          const GroupShardedOptions& options);
}  // namespace detail

/// Shards `model` and makes `optimizer` step on the shards. `level`: `os` (as `os_g`), `os_g` or
/// `p_g_os`. Collective. See `docs/dialects/group_sharded.md`.
template <class M>
GroupSharded<M> group_sharded_parallel(std::shared_ptr<M> model, torch::optim::Optimizer& optimizer,
                                       const std::string& level,
                                       const GroupShardedOptions& options = {}) {
  const ShardPlan plan = detail::check_group_sharded(*model, optimizer, level, options);
  auto sharded = fully_shard(std::move(model), plan);
  return {sharded, GroupShardedOptimizer(sharded, optimizer)};
}

}  // namespace tessera::paddle
