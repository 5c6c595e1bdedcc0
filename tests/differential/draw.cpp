#include <tessera/engine/cpu_adam.h>

#include <algorithm>
#include <functional>

#include "differential/layers.h"
#include "differential/program.h"
#include "differential/random.h"

namespace tessera::differential {
namespace {

void draw_layers(Random& random, Program& program) {
  std::vector<std::string> kinds;
  for (const auto& [kind, known] : block_classes()) kinds.push_back(kind);
  const int count = random.between(1, 6);
  for (int i = 0; i < count; ++i) {
    Layer layer{.kind = kinds[random.between(0, static_cast<int>(kinds.size()) - 1)]};
    if (layer.kind == "Tied") {
      std::vector<int> square;
      for (int j = 0; j < i; ++j) {
        const std::string& kind = program.layers[j].kind;
        if (kind == "Linear" || kind == "NoBias" || kind == "Transposed") square.push_back(j);
      }
      if (square.empty()) {
        layer.kind = "Linear";
      } else {
        layer.tied = square[random.between(0, static_cast<int>(square.size()) - 1)];
      }
    }
    layer.residual = random.once_in(3);
    if (random.once_in(6)) layer.times = random.between(0, 3);
    // What a forward does to buffers, it does twice there.
    const bool has_buffers = layer.kind == "BatchNorm" || layer.kind == "Buffered";
    layer.checkpoint = random.once_in(8) && !has_buffers;
    if (random.once_in(8)) layer.frozen = true;
    if (random.once_in(5)) layer.ranks = random.between(0, 15);
    layer.dtype = random.once_in(12) ? random.one_of({at::kDouble, at::kFloat, at::kBFloat16})
                                     : program.dtype;
    program.layers.push_back(layer);
  }
  program.layers.push_back({.kind = "Linear", .dtype = program.dtype});  // each rank trains
  program.registration = random.permutation(count + 1);
}

std::vector<CutRule> draw_cuts(Random& random) {
  std::vector<CutRule> rules(random.between(1, 2));
  for (CutRule& rule : rules)
    rule = {"*", random.one_of({Cut::kAnywhere, Cut::kRows, Cut::kElements, Cut::kWhole}),
            random.between(1, 40), random.between(0, 2)};
  return rules;
}

void draw_plan(Random& random, Program& program) {
  ShardPlan& plan = program.plan;
  plan.level = static_cast<ShardLevel>(random.between(0, 3));
  if (random.once_in(3)) plan.partition = Partition::kWholeParam;
  if (random.once_in(2)) plan.unit_bytes = random.one_of<int64_t>({0, 64, 256, 1024});
  if (random.once_in(6)) plan.whole_numel = random.between(1, 30);
  if (random.once_in(4)) plan.resident_bytes = random.one_of<int64_t>({-1, 128, 1024});
  if (random.once_in(3)) plan.prefetch = random.between(0, 4);
  if (random.once_in(6)) plan.average = false;
  if (random.once_in(6)) plan.predivide = random.one_of({0.5, 2.0, 4.0});
  if (random.once_in(4)) plan.bucket_bytes = random.one_of<int64_t>({200, 1000, 1 << 20});
  if (random.once_in(6)) plan.offload = Offload::kHost;
  plan.sync_buffers = random.once_in(6);
  program.own_units = random.once_in(6);
  program.owners = plan.partition == Partition::kWholeParam && random.once_in(4);
  if (!program.owners && random.once_in(4)) plan.cuts = draw_cuts(random);
  if (program.ranks > 1 && random.once_in(5)) {
    program.shard_size = program.ranks == 4 ? random.one_of({1, 2, 4}) : 1;
  }
}

void draw_precision(Random& random, Program& program) {
  Precision& precision = program.plan.precision;
  if (random.once_in(4)) precision.param_dtype = at::kBFloat16;
  if (random.once_in(3)) precision.master_dtype = at::kFloat;
  if (random.once_in(3))
    precision.reduce_dtype =
        random.one_of({at::kFloat, at::kBFloat16, at::kHalf, at::kChar, at::kFloat8_e4m3fn});
  if (random.once_in(4)) precision.error_feedback = false;
  if (random.once_in(4)) precision.master_only = true;
  if (random.once_in(4)) precision.buffer_dtype = precision.param_dtype;
}

bool has_masters(const Program& program) {
  return program.plan.precision.param_dtype || program.plan.precision.master_dtype;
}

void draw_optimizers(Random& random, Program& program) {
  program.optimizers.clear();
  const int count = random.once_in(5) ? 2 : 1;
  for (int i = 0; i < count; ++i) {
    Optimizer optimizer;
    optimizer.kind = random.one_of<const char*>(
        {"SGD", "SGD", "Adam", "AdamW", "CPUAdam", "Adagrad", "RMSprop", "Lion", "Muon"});
    optimizer.lr = random.one_of({0.125, 0.01, 0.001});
    optimizer.decay = random.one_of({0.0, 0.0, 0.1});
    const bool is_adam = optimizer.kind.find("Adam") != std::string::npos;
    optimizer.momentum = random.one_of({0.0, 0.9, 0.5});
    if (is_adam && optimizer.momentum == 0) optimizer.momentum = 0.9;
    if (optimizer.kind == "Adagrad") optimizer.eps = 1e-10;
    optimizer.beta2 = random.one_of({0.999, 0.9});
    optimizer.flag = random.once_in(3);
    optimizer.groups = random.once_in(4) ? 2 : 1;
    optimizer.reversed = random.once_in(4);
    optimizer.schedule = random.once_in(4);
    const bool has_kernel = optimizer.kind != "CPUAdam" && optimizer.kind != "RMSprop" &&
                            optimizer.kind != "Lion" && optimizer.kind != "Muon";
    optimizer.fused = has_kernel && !has_masters(program) && random.once_in(3);
    optimizer.declared = !random.once_in(6);
    if (random.once_in(60)) optimizer = {.kind = "LBFGS"};
    program.optimizers.push_back(optimizer);
  }
  const bool any_muon = std::ranges::any_of(
      program.optimizers, [](const Optimizer& optimizer) { return optimizer.kind == "Muon"; });
  if (any_muon && random.once_in(2))
    program.plan.cuts.insert(program.plan.cuts.begin(), {"*", Cut::kWhole, 1, 2});
}

// Puts an unusual operation after each usual one, once in a while.
void draw_odd_op(Random& random, Program& program, int& batch) {
  const int layers = static_cast<int>(program.layers.size());
  const auto add = [&](OpKind kind, int value = 0, int how = 0) {
    program.ops.push_back({kind, value, how});
  };
  switch (random.between(0, 8)) {
    case 0:
      return add(OpKind::kEvaluate, batch++);
    case 1:
      return add(OpKind::kFullState);
    case 2:
      return add(OpKind::kEdit, random.between(0, 99), random.between(0, 4));
    case 3:
      return add(OpKind::kAverage);
    case 4:
      return add(OpKind::kThaw);
    case 5:
      return add(OpKind::kClampGrad, random.between(0, 99), random.between(0, 3));
    case 6:
      return add(OpKind::kThrow, random.between(0, layers - 1), 0);
    case 7:
      return add(OpKind::kZeroGrad, 0, random.between(0, 4));
    default:
      return add(OpKind::kStep);
  }
}

void draw_step(Random& random, Program& program, int& batch) {
  const auto add = [&](OpKind kind, int value = 0, int how = 0) {
    program.ops.push_back({kind, value, how});
    if (random.once_in(30)) draw_odd_op(random, program, batch);
  };
  const int optimizers = static_cast<int>(program.optimizers.size());
  const int backwards = random.once_in(3) ? random.between(2, 3) : 1;
  const bool local = random.once_in(2);
  for (int i = 0; i < backwards; ++i) {
    const bool no_sync = local && i + 1 < backwards;
    const bool is_infinite = program.scale > 0 && random.once_in(4);
    add(OpKind::kForward, batch++,
        (random.once_in(2) ? kByHandle : 0) | (no_sync ? kNoSync : 0) |
            (is_infinite ? kInfinite : 0));
    add(OpKind::kBackward, 0, no_sync);
  }
  if (random.once_in(4)) add(OpKind::kClip, 0, random.between(0, 3));
  for (int i = 0; i < optimizers; ++i) {
    add(OpKind::kStep, i);
    if (program.optimizers[i].schedule) add(OpKind::kSchedule, i);
  }
  if (random.once_in(8)) return;  // gradients of the next step are added
  const int how = random.between(0, 4);
  if (how > 0 && how < 4) return add(OpKind::kZeroGrad, 0, how);  // of the whole model
  const int only = random.once_in(4) ? random.between(0, optimizers - 1) : -1;
  for (int i = 0; i < optimizers; ++i)
    if (only < 0 || i == only) add(OpKind::kZeroGrad, i, how);
}

// Draws ranks that run out of batches; `begins`: of steps, as indices of operations. Under join()
// nothing can be called that ranks which are done would have to call, and it is not to compare what
// has no single result.
void draw_ends(Random& random, Program& program, std::vector<int> begins) {
  const bool has_one_result =
      !narrow_sums(program) && std::none_of(program.optimizers.begin(), program.optimizers.end(),
                                            [](auto& own) { return own.fused; });
  // Parameters that are sent must stay whole.
  const bool is_sent =
      program.plan.level == ShardLevel::kParameters && program.transport == Transport::kGloo;
  if (!random.once_in(4) || !has_one_result || program.scale > 0 || is_sent) return;
  const auto is_joined = [](const Op& op) {
    return op.kind <= OpKind::kClip || op.kind == OpKind::kStep || is_made_up_for(op);
  };
  auto& ops = program.ops;
  begins.push_back(static_cast<int>(ops.size()));
  begins.resize(random.between(2, static_cast<int>(begins.size())));
  const auto last = ops.begin() + begins.back();
  for (int& begin : begins)
    begin = static_cast<int>(std::count_if(ops.begin(), ops.begin() + begin, is_joined));
  ops.erase(std::remove_if(ops.begin(), last, std::not_fn(is_joined)), last);
  if (!has_op(program, OpKind::kSave))
    std::erase_if(ops, [](const Op& op) { return op.kind == OpKind::kLoad; });
  const auto average = std::ranges::find(ops, OpKind::kAverage, &Op::kind);
  if (average != ops.end()) average->how = 0;  // there is none to evaluate with
  program.joined = begins.back();
  if (random.once_in(2)) {  // within steps
    begins.clear();
    for (int i = 0; i < program.joined; ++i)
      if (ops[i].kind == OpKind::kForward) begins.push_back(i);
    begins.push_back(program.joined);
  }
  for (int rank = 0; rank < program.ranks; ++rank)
    program.ends.push_back(begins[random.between(0, static_cast<int>(begins.size()) - 1)]);
  program.ends[random.between(0, program.ranks - 1)] = program.joined;
}

void draw_ops(Random& random, Program& program) {
  if (random.once_in(6)) program.scale = random.one_of({2.0, 1024.0, 0x1p120});
  const int steps = random.between(1, 4);
  const bool averages = random.once_in(6);
  const int save = random.once_in(5) ? random.between(0, steps - 1) : -1;
  int batch = 1;
  std::vector<int> begins;  // of steps
  for (int step = 0; step < steps; ++step) {
    begins.push_back(static_cast<int>(program.ops.size()));
    draw_step(random, program, batch);
    if (averages) program.ops.push_back({OpKind::kAverage, batch++, random.once_in(3) && step > 0});
    if (step == save) program.ops.push_back({OpKind::kSave, 0, random.between(0, 1)});
    if (save >= 0 && step > save && random.once_in(3)) {
      program.ops.push_back({OpKind::kZeroGrad, 0, 1});
      program.ops.push_back({OpKind::kLoad});
    }
    if (random.once_in(10)) {
      // All ranks must throw: not where only some of them have a layer, or a gradient.
      const auto begin = program.layers.begin(), end = program.layers.end() - 1;
      const auto shared =
          static_cast<int>(std::find_if(begin, end, std::mem_fn(&Layer::is_partial)) - begin);
      const bool is_last = shared == 0 || random.once_in(2);
      const int layer = is_last ? static_cast<int>(end - begin) : random.between(0, shared - 1);
      program.ops.push_back({OpKind::kThrow, layer, 1});
      program.ops.push_back({OpKind::kZeroGrad, 0, 1});
    }
  }
  draw_ends(random, program, std::move(begins));
}

// Draws where the ranks are, last, so that the rest of a seed's program stays.
void draw_worlds(Random& random, Program& program) {
  // Of these the simulated accelerator has no kernel, or other random numbers.
  const auto is_on_host = [](const Layer& layer) {
    return layer.kind == "Lstm" || layer.kind == "Gru" || layer.kind == "GruCell" ||
           layer.kind == "Dropout";
  };
  // There, ranks that have come to wait for each other wait for one collective after another; and
  // parameters are sent over the arena, too, which must stay whole under join().
  const bool may_wait =
      has_op(program, OpKind::kThrow) && std::ranges::any_of(program.layers, &Layer::is_partial);
  const bool joins_sent = program.plan.level == ShardLevel::kParameters && program.joined > 0;
  program.simulated = random.once_in(12) && !may_wait && !joins_sent &&
                      std::ranges::none_of(program.layers, is_on_host) &&
                      std::ranges::none_of(program.optimizers, [](const Optimizer& own) {
                        return own.fused || own.kind == "CPUAdam" || own.kind == "Muon";
                      });
  program.processes = random.once_in(16) && !program.simulated;
  if (random.once_in(6)) program.reload_ranks = random.between(1, 4);
  program.reload_level = static_cast<ShardLevel>(random.between(0, 3));
}

// All backwards are made under no_sync(), and what they keep is reduced before anything else.
void keep_gradients(Program& program) {
  std::vector<Op> ops;
  std::vector<int> places;  // of the operations, and of their end
  for (Op op : program.ops) {
    places.push_back(static_cast<int>(ops.size()));
    const bool is_reduced = op.kind == OpKind::kBackward && op.how == 0;
    if (op.kind == OpKind::kForward) op.how |= kNoSync;
    if (is_reduced) op.how = 1;
    ops.push_back(op);
    if (is_reduced) ops.push_back({OpKind::kReduce});
  }
  places.push_back(static_cast<int>(ops.size()));
  for (int& end : program.ends) end = places[end];
  program.joined = places[program.joined];
  program.ops = std::move(ops);
}

// The program makes the gradients equal itself, where it can (`ShardPlan::reduce_gradients`).
void reduce_by_hand(Program& program) {
  ShardPlan& plan = program.plan;
  const auto is_wide = [](at::ScalarType dtype) {
    return dtype == at::kFloat || dtype == at::kDouble;
  };
  const bool are_wide = std::ranges::all_of(program.layers, is_wide, &Layer::dtype);
  const bool can = plan.level <= ShardLevel::kOptimizerState && are_wide && !program.simulated &&
                   !plan.outer && program.shard_size == 0 && program.joined == 0 &&
                   !has_op(program, OpKind::kThrow) && !has_op(program, OpKind::kReduce) &&
                   !has_op(program, OpKind::kClampGrad) && !plan.memory_budget;
  if (!can) return;
  plan.reduce_gradients = false;
  program.reload_level = std::min(program.reload_level, ShardLevel::kOptimizerState);
  plan.precision = {};
  plan.predivide = 1;
  plan.bucket_bytes = 0;
  for (Op& op : program.ops) {
    if (op.kind == OpKind::kForward) op.how &= ~kNoSync;
    if (op.kind == OpKind::kBackward) op.how = 0;
    if (op.kind == OpKind::kZeroGrad && op.how == 2) op.how = 1;
  }
}

// Replaces an optimizer by one of the user's own that needs whole parameters.
void draw_own_whole(Random& random, Program& program) {
  Optimizer& optimizer = program.optimizers[random.between(0, 9) % program.optimizers.size()];
  if (optimizer.kind == "LBFGS" || program.simulated) return;
  optimizer.kind = random.one_of<const char*>({"Lamb", "Factored"});
  optimizer.fused = optimizer.declared = false;
  if (!random.once_in(8))
    program.plan.cuts.insert(program.plan.cuts.begin(), {"*", Cut::kWhole, 1, 0});
}

// Draws what came later, after all else, for the same reason.
void draw_more(Random& random, Program& program) {
  ShardPlan& plan = program.plan;
  const bool is_fused = std::ranges::any_of(program.optimizers, &Optimizer::fused);
  if (random.once_in(8) && !is_fused)
    plan.precision.gather_dtype =
        random.one_of({at::kBFloat16, at::kHalf, at::kChar, at::kFloat8_e4m3fn});
  if (plan.precision.gather_dtype && c10::elementSize(*plan.precision.gather_dtype) == 1) {
    program.reload_ranks = 0;  // where other shards have other scales
    // What is computed from them can't be compared before they are.
    if (has_op(program, OpKind::kAverage) || program.joined > 0)
      plan.precision.gather_dtype = at::kHalf;
  }
  if (random.once_in(2) && plan.precision.param_dtype) plan.precision.cast_inputs = false;
  if (random.once_in(2) && !program.own_start) plan.start_values = StartValues::kKeep;
  program.whole = random.once_in(8);
  if (random.once_in(12) && plan.resident_bytes == 0) plan.memory_budget = int64_t{1} << 30;
  if (random.once_in(12)) plan.offload = Offload::kDirectory;
  const bool averages = random.once_in(2) && program.shard_size > 0 && program.joined == 0 &&
                        !is_fused && !has_op(program, OpKind::kSave) &&
                        !has_op(program, OpKind::kLoad);
  if (averages) {
    plan.outer = {.every = random.between(1, 3),
                  .learning_rate = random.one_of({1.0, 0.5}),
                  .momentum = random.one_of({0.0, 0.0, 0.5}),
                  .nesterov = random.once_in(2)};
    program.reload_ranks = 0;
  }
  if (random.once_in(6)) keep_gradients(program);
  // A layer's parameters must have one dtype.
  program.ignored = random.once_in(10) && !plan.precision.param_dtype;
  if (random.once_in(6)) reduce_by_hand(program);
  if (random.once_in(6)) draw_own_whole(random, program);
  // Adagrad's sums have the dtype of the parameters from which it was made: before the wrap or
  // after.
  const auto is_adagrad = [](const Optimizer& optimizer) { return optimizer.kind == "Adagrad"; };
  plan.precision.round_frozen = random.once_in(3) && plan.precision.param_dtype &&
                                std::ranges::none_of(program.optimizers, is_adagrad);
  // Not with scales of rounded parameters: these are those of shards.
  program.grouped =
      random.once_in(6) && !plan.outer && program.shard_size == 0 && program.joined == 0 &&
      (!plan.precision.gather_dtype || c10::elementSize(*plan.precision.gather_dtype) > 1);
}

// Draws how CPUAdam keeps its state, and lets others be CPUAdam, last of all. Parameters are so
// large that they have several blocks.
void draw_states(Random& random, Program& program) {
  const bool changes = random.once_in(4) && !program.simulated;
  bool has_blocks = false;
  for (Optimizer& own : program.optimizers) {
    const bool is_other =
        own.kind == "Muon" || own.kind == "Lion" || own.kind == "LBFGS" || own.is_own_whole();
    const bool is_own = own.kind == "CPUAdam" ? random.once_in(2) : changes && !is_other;
    if (!is_own) continue;
    own.kind = "CPUAdam", own.fused = false, own.eps = 1e-8;
    own.momentum = std::max(own.momentum, 0.5);
    own.state = random.one_of({at::kFloat, at::kBFloat16, at::kByte, at::kByte});
    has_blocks = has_blocks || own.state == at::kByte;
  }
  if (!has_blocks) return;
  if (random.once_in(2)) program.width = random.between(17, 33);
  const bool is_whole = program.owners || random.once_in(4);
  auto& cuts = program.plan.cuts;
  const auto is_muons = [](const CutRule& rule) { return rule == CutRule{"*", Cut::kWhole, 1, 2}; };
  const auto place = cuts.begin() + (!cuts.empty() && is_muons(cuts.front()) ? 1 : 0);
  if (is_whole) {
    program.plan.partition = Partition::kWholeParam;
    cuts.erase(place, cuts.end());
  } else {
    cuts.insert(place, cpu_adam_cuts().front());
  }
}

}  // namespace

Program draw(uint64_t seed) {
  Random random(seed);
  Program program;
  program.seed = seed;
  program.ranks = random.between(1, 4);
  program.transport = random.once_in(2) ? Transport::kGloo : Transport::kArena;
  program.width = random.between(1, 7);
  program.rows = random.between(2, 4);
  program.uneven_rows = random.once_in(4);
  program.own_start = random.once_in(4);
  program.dtype =
      random.once_in(5) ? random.one_of({at::kBFloat16, at::kDouble, at::kHalf}) : at::kFloat;
  draw_layers(random, program);
  draw_plan(random, program);
  if (random.once_in(3)) draw_precision(random, program);
  draw_optimizers(random, program);
  draw_ops(random, program);
  // What changes a frozen parameter before a layer runs again is not noticed.
  for (Layer& layer : program.layers)
    if (layer.frozen && has_op(program, OpKind::kEdit)) layer.checkpoint = false;
  draw_worlds(random, program);
  draw_more(random, program);
  draw_states(random, program);
  return program;
}

}  // namespace tessera::differential
