#include <algorithm>

#include "differential/program.h"

namespace tessera::differential {
namespace {

using Change = std::function<void(Program&)>;

// Without layer `number`, and those that are tied to it.
void drop_layer(Program& program, int number) {
  for (int i = static_cast<int>(program.layers.size()); i-- > 0;) {
    if (program.layers[i].tied == number) drop_layer(program, i);
    if (i < number) break;
  }
  program.layers.erase(program.layers.begin() + number);
  std::erase(program.registration, number);
  for (int& i : program.registration) i -= i > number;
  for (Layer& layer : program.layers) layer.tied -= layer.tied > number;
}

std::vector<Change> changes_of(const Program& program) {
  std::vector<Change> changes;
  const auto reset = [&](auto get, auto usual) {
    changes.push_back([=](Program& changed) { get(changed) = usual; });
  };
  // Ends of operations first: what follows a fault, and whole steps.
  for (size_t length = program.ops.size(); length > 0; length /= 2)
    for (size_t begin = 0; begin + length <= program.ops.size(); begin += length)
      changes.push_back([=](Program& changed) {
        changed.ops.erase(changed.ops.begin() + begin, changed.ops.begin() + begin + length);
        const auto move = [&](int& end) {
          end -= std::clamp(end - static_cast<int>(begin), 0, static_cast<int>(length));
        };
        std::ranges::for_each(changed.ends, move);
        move(changed.joined);
      });
  for (int i = static_cast<int>(program.layers.size()); i-- > 0;)
    changes.push_back([=](Program& changed) { drop_layer(changed, i); });
  for (int ranks = 1; ranks < program.ranks; ++ranks)
    changes.push_back([=](Program& changed) {
      changed.ranks = ranks;
      if (changed.joined == 0) return;
      changed.ends.resize(ranks);
      changed.joined = std::ranges::max(changed.ends);
    });
  if (program.optimizers.size() > 1) changes.push_back([](Program& p) { p.optimizers.pop_back(); });
#define RESET(member, usual) reset([](auto& p) -> decltype(auto) { return (p.member); }, usual)
  RESET(shard_size, 0);
  RESET(own_start, false);
  RESET(own_units, false);
  RESET(owners, false);
  RESET(grouped, false);
  RESET(plan.cuts, std::vector<CutRule>());
  RESET(whole, false);
  RESET(ignored, false);
  RESET(uneven_rows, false);
  RESET(scale, 0.0);
  RESET(joined, 0);
  RESET(simulated, false);
  RESET(processes, false);
  RESET(reload_ranks, 0);
  RESET(dtype, at::kFloat);
  RESET(width, 1);
  RESET(width, 2);
  RESET(transport, Transport::kGloo);
  RESET(plan.precision, Precision());
  RESET(plan, ShardPlan());
  const ShardPlan usual;
  RESET(plan.level, ShardLevel::kNone);
  RESET(plan.partition, usual.partition);
  RESET(plan.unit_bytes, usual.unit_bytes);
  RESET(plan.whole_numel, usual.whole_numel);
  RESET(plan.resident_bytes, usual.resident_bytes);
  RESET(plan.prefetch, usual.prefetch);
  RESET(plan.average, true);
  RESET(plan.predivide, 1.0);
  RESET(plan.bucket_bytes, usual.bucket_bytes);
  RESET(plan.offload, Offload::kNone);
  RESET(plan.memory_budget, std::nullopt);
  RESET(plan.outer, std::nullopt);
  RESET(plan.start_values, StartValues::kBroadcast);
  RESET(plan.sync_buffers, false);
  RESET(plan.reduce_gradients, true);
  RESET(plan.precision.round_frozen, false);
  RESET(plan.precision.param_dtype, std::nullopt);
  RESET(plan.precision.master_dtype, std::nullopt);
  RESET(plan.precision.reduce_dtype, std::nullopt);
  RESET(plan.precision.gather_dtype, std::nullopt);
  RESET(plan.precision.cast_inputs, true);
  RESET(plan.precision.error_feedback, true);
  RESET(plan.precision.master_only, false);
  RESET(plan.precision.buffer_dtype, std::nullopt);
#undef RESET
  for (size_t i = 0; i < program.optimizers.size(); ++i) {
    changes.push_back([=](Program& p) { p.optimizers[i] = {}; });
    changes.push_back([=](Program& p) {
      p.optimizers[i] = {.kind = p.optimizers[i].kind, .fused = p.optimizers[i].fused};
    });
    changes.push_back([=](Program& p) { p.optimizers[i].schedule = false; });
    changes.push_back([=](Program& p) { p.optimizers[i].groups = 1; });
    changes.push_back([=](Program& p) { p.optimizers[i].decay = 0; });
    changes.push_back([=](Program& p) { p.optimizers[i].flag = p.optimizers[i].reversed = false; });
  }
  for (size_t i = 0; i < program.layers.size(); ++i) {
    changes.push_back(
        [=](Program& p) { p.layers[i] = {.kind = p.layers[i].kind, .tied = p.layers[i].tied}; });
    changes.push_back([=](Program& p) { p.layers[i] = {.kind = "Scalar"}; });
    changes.push_back([=](Program& p) { p.layers[i].checkpoint = p.layers[i].residual = false; });
    changes.push_back([=](Program& p) { p.layers[i].ranks = 15; });
  }
  changes.push_back([](Program& p) { std::sort(p.registration.begin(), p.registration.end()); });
  for (size_t i = 0; i < program.ops.size(); ++i)
    changes.push_back([=](Program& p) { p.ops[i].how = 0; });
  return changes;
}

}  // namespace

Program shrink(Program program, const std::function<bool(const Program&)>& fails) {
  for (bool changed = true; changed;) {
    changed = false;
    // After a change, the one in its place is the next.
    for (size_t i = 0; i < changes_of(program).size();) {
      Program smaller = program;
      changes_of(program)[i](smaller);
      const bool is_new = !smaller.layers.empty() && describe(smaller) != describe(program);
      const bool stays = is_new && fails(smaller);
      if (stays) program = std::move(smaller);
      changed = changed || stays;
      i += !stays;
    }
  }
  return program;
}

}  // namespace tessera::differential
