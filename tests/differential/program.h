#pragma once

#include <tessera/comm/world.h>
#include <tessera/engine/plan_fields.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

/// Training programs as plain data: drawn from a seed, printed, run, and shrunk.
namespace tessera::differential {

/// A layer of a model, in the order of use. It maps rows to rows of the same width.
struct Layer {
  std::string kind;         ///< a class of layers.h
  int ranks = 15;           ///< a bit for each rank that uses it
  int times = 1;            ///< that it is used in a row; 0: registered, and never used
  bool residual = false;    ///< its result is added to its input
  bool checkpoint = false;  ///< its activations are computed again in backward
  bool frozen = false;      ///< from the start; the operation `kThaw` ends it
  int tied = -1;            ///< number of the layer whose first parameter it shares
  at::ScalarType dtype = at::kFloat;
  bool is_partial() const { return ranks != 15; }
  bool operator==(const Layer&) const = default;
};

/// An optimizer over the parameters whose number leaves `index` when divided by the number of
/// optimizers.
struct Optimizer {
  std::string kind = "SGD";
  double lr = 0.125, decay = 0, momentum = 0, beta2 = 0.999, eps = 1e-8;
  bool flag = false;      ///< nesterov, amsgrad, centered, adamw_mode
  int groups = 1;         ///< param groups, of which each has half the rate of the one before
  bool reversed = false;  ///< the order of its parameters
  bool fused = false;
  bool schedule = false;
  bool declared = true;  ///< that it is elementwise (`ShardedOptimizerOptions::elementwise`)
  at::ScalarType state = at::kFloat;  ///< `CPUAdamOptions::state_dtype`
  bool operator==(const Optimizer&) const = default;

  bool is_own_whole() const { return kind == "Lamb" || kind == "Factored"; }  ///< of the user
};

enum class OpKind : uint8_t {
  kForward,    ///< value: number of the batch; how: bits of `ForwardHow`
  kBackward,   ///< how: 1: under no_sync()
  kZeroGrad,   ///< value: the optimizer; how: by the optimizer, the handle, with zeros, the module
  kClip,       ///< value: the optimizer whose model it is; how: number of the norm
  kClampGrad,  ///< of the parameter `value`; how: through its local gradient, or through the whole
               ///< one; 2: makes it zeros, 3: clears it
  kStep,       ///< value: the optimizer
  kSchedule,   ///< value: the optimizer
  kEvaluate,   ///< value: number of the batch
  kFullState,  ///< reads the whole state and writes it back
  kEdit,       ///< value: the parameter; how: the operator
  kAverage,    ///< updates the moving average; how: 1: and evaluates with it on batch `value`
  kSave,       ///< a checkpoint; how: 1: with whole parameters
  kLoad,       ///< the last checkpoint
  kThrow,      ///< an exception at layer `value`, caught by each rank; how: 0 forward, 1 backward
  kThaw,       ///< all frozen layers
  kReduce,     ///< what no_sync() kept
};
enum ForwardHow : int { kByHandle = 1, kNoSync = 2, kInfinite = 4 };
struct Op {
  OpKind kind;
  int value = 0, how = 0;
  bool operator==(const Op&) const = default;
};

struct Program {
  uint64_t seed = 0;
  int ranks = 1;
  Transport transport = Transport::kGloo;
  bool simulated = false;  ///< on the simulated accelerator, and so is the plain run
  bool processes = false;  ///< ranks are processes, in a world of their own, and not threads
  int reload_ranks = 0;    ///< of another world that reads the state at the end; 0: none does
  ShardLevel reload_level = ShardLevel::kNone;
  int shard_size = 0;  ///< ranks of a replica (`ShardPlan::replicate_group`); 0: no replicas
  int width = 4, rows = 2;
  bool uneven_rows = false;  ///< rank r has r more rows
  bool own_start = false;    ///< each rank begins with other values; rank 0's are taken
  bool own_units = false;    ///< units of every second parameter (`ShardPlan::units`)
  bool owners = false;       ///< owners of some parameters are given (`ShardPlan::owners`)
  bool grouped = false;      ///< every second parameter has a process group (`ShardPlan::groups`)
  bool whole = false;        ///< every third parameter stays whole (`ShardPlan::whole`)
  bool ignored = false;      ///< every fifth parameter is left alone (`ShardPlan::ignored`)
  bool is_ignored(size_t parameter) const { return ignored && parameter % 5 == 3; }
  int joined = 0;         ///< operations under join(); 0: it is not called
  std::vector<int> ends;  ///< of these, operations of each rank; one makes all
  at::ScalarType dtype = at::kFloat;
  ShardPlan plan;
  std::vector<Layer> layers;
  std::vector<int> registration;  ///< numbers of layers in the order in which they are registered
  std::vector<Optimizer> optimizers{{}};
  double scale = 0;  ///< of a GradScaler; 0: none
  std::vector<Op> ops;
};

Program draw(uint64_t seed);

inline bool has_op(const Program& program, OpKind kind) {
  return std::ranges::find(program.ops, kind, &Op::kind) != program.ops.end();
}

const char* name_of(ShardLevel level);

/// Calls `f(name, value)` for each number, flag and dtype of a plan that is not the usual one.
template <class F>
void for_each_changed(const ShardPlan& plan, const F& f) {
  const ShardPlan usual;
  const auto visit = [&](const char* name, const auto& value, const auto& otherwise) {
    using Value = std::decay_t<decltype(value)>;
    if constexpr (std::is_arithmetic_v<Value>) {
      if (value != otherwise) f(name, value);
    } else if constexpr (std::is_same_v<Value, std::optional<at::ScalarType>> ||
                         std::is_same_v<Value, std::optional<int64_t>>) {
      if (value) f(name, *value);
    }
  };
  visit_fields(visit, plan, usual);
}

/// True if the rank has no more batches in this operation, which others make under join().
bool is_done(const Program& program, int rank, int op);

/// True if a rank that was done must make up for this operation behind join(): it is of each rank
/// alone.
inline bool is_made_up_for(const Op& op) {
  return op.kind == OpKind::kSchedule || op.kind == OpKind::kThaw;
}

/// The dtype in which gradients are sent, if it has 8 bits.
std::optional<at::ScalarType> narrow_sums(const Program& program);

/// The same of parameters.
std::optional<at::ScalarType> narrow_gathers(const Program& program);

/// The program in a few lines of readable text.
std::string describe(const Program& program);

/// The sharded run of the program in C++, for a file of its own.
std::string source_of(const Program& program);

/// Takes parts away from a program while `fails`.
Program shrink(Program program, const std::function<bool(const Program&)>& fails);

}  // namespace tessera::differential
