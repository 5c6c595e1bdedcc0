#include <tessera/base/generator.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/engine/exponential_average.h>
#include <tessera/engine/fully_shard.h>
#include <tessera/engine/grad_scaler.h>
#include <tessera/engine/join.h>
#include <tessera/engine/optimizer_state_dict.h>
#include <tessera/engine/sharded_optimizer.h>

#include <numeric>
#include <optional>

#include "differential/state_items.h"
#include "differential/training.h"
#include "support/unchanged_inputs.h"

namespace tessera::differential {

using torch::Tensor;

// clang-format off
// Adds the ranks' sums to the gradients that there were before. Unless some rank has one, none gets one.
WITH_SOURCE(kByHand, void backward_by_hand(const Tensor& loss, std::vector<Tensor> params, tessera::ProcessGroup& ranks, bool average) {
  std::vector<Tensor> earlier;
  for (Tensor& param : params) earlier.push_back(std::exchange(param.mutable_grad(), {}));
  loss.backward();
  const tessera::CollectiveTag tag{"by hand", tessera::Channel::kControl};
  for (size_t i = 0; i < params.size(); ++i) {
    Tensor& grad = params[i].mutable_grad();
    Tensor any = torch::full({1}, grad.defined(), torch::kByte);
    ranks.all_reduce(any, tessera::ReduceOp::kMax, tag)->wait();
    if (any.item<bool>()) {
      grad = grad.defined() ? grad.contiguous() : torch::zeros_like(params[i], torch::MemoryFormat::Contiguous);
      ranks.all_reduce(grad, tessera::ReduceOp::kSum, tag)->wait();
      if (average) grad.mul_(1.0 / ranks.size());
    }
    if (earlier[i].defined()) grad = grad.defined() ? earlier[i] + grad : earlier[i];
  }
})
// clang-format on
const char* const kByHandSource = kByHand;

namespace {

class ShardedTraining : public Training {
 public:
  ShardedTraining(const Program& program, const World& world, Trace& trace)
      : program_(program),
        rank_(world.rank()),
        world_(world.process_group()),
        trace_(trace),
        net_(make_model(program, program.seed + (program.own_start ? rank_ : 0))) {
    net_->rank = rank_;
    net_->recomputes = true;
    for (const NamedTensor& item : net_->distinct()) params_.push_back(item.tensor);
    for (size_t i = 0; i < program.optimizers.size(); ++i) {
      std::vector<Tensor> own;
      for (const size_t number : parameters_of(program, i, params_.size()))
        own.push_back(params_[number]);
      inner_.push_back(make_optimizer(program.optimizers[i], own));
      schedules_.push_back(make_schedule(program.optimizers[i], *inner_.back()));
    }
    sharded_.emplace(fully_shard(net_, plan_of(world)));
    for (size_t i = 0; i < inner_.size(); ++i)
      optimizers_.emplace_back(
          *sharded_, *inner_[i],
          ShardedOptimizerOptions{.fused = program.optimizers[i].fused,
                                  .elementwise = program.optimizers[i].declared});
    if (program.scale > 0)
      scaler_.emplace(GradScalerOptions{.init_scale = program.scale, .growth_interval = 2});
    manual_seed(random_seed_of(program, rank_));
  }

  void forward(const Op& op) override {
    std::optional<ShardedModule::NoSync> local;
    if (op.how & kNoSync) local.emplace(sharded_->state());
    const auto [x, y] = batch_of(program_, op.value, rank_);
    loss_ = loss_of(op.how & kByHandle ? sharded_->forward(x) : net_->forward(x), y, op);
    see("loss", loss_);
  }
  void backward(const Op& op) override {
    std::optional<ShardedModule::NoSync> local;
    if (op.how & 1) local.emplace(sharded_->state());
    const Tensor loss = std::exchange(loss_, {});
    const Tensor scaled = scaler_ ? scaler_->scale(loss) : loss;
    if (program_.plan.reduce_gradients) {
      scaled.backward();
    } else {
      backward_by_hand(scaled, reduced_params(), *world_, program_.plan.average);
    }
    if ((op.how & 1) == 0) see_sums();
  }
  void zero_grad(const Op& op) override {
    if (op.how == 0) optimizers_[op.value].zero_grad();
    if (op.how == 1) sharded_->zero_grad();
    if (op.how == 2) sharded_->zero_grad(false);
    if (op.how == 3) net_->zero_grad();
    if (op.how == 4) inner_[op.value]->zero_grad();
  }
  void clip(const Op& op) override {
    if (scaler_) scaler_->unscale_(optimizers_[op.value]);
    see("norm", sharded_->clip_grad_norm_(kMaxNorm, norm_type_of(op)));
  }
  void clamp_grad(const Op& op) override {
    if (program_.is_ignored(op.value % params_.size())) return;
    const Tensor param = parameter(op);
    if (op.how >= 2) return sharded_->zero_grad(param, /*set_to_none=*/op.how == 3);
    torch::NoGradGuard no_grad;
    const Tensor grad = op.how == 0 ? sharded_->local_grad(param) : sharded_->full_grad(param);
    if (!grad.defined()) return;
    const Tensor clamped = Tensor(grad).clamp_(-0.125, 0.125);
    if (op.how == 1 && sharded_->has_reduced_grad(param)) sharded_->set_full_grad(param, clamped);
  }
  void step(const Op& op) override {
    if (scaler_) {
      see("stepped", scaler_->step(optimizers_[op.value]));
      if (op.value + 1 == static_cast<int>(optimizers_.size())) scaler_->update();
      see("scale", scaler_->get_scale());
    } else {
      optimizers_[op.value].step();
    }
    if (program_.optimizers[op.value].fused) see_state();
  }
  void advance_schedule(const Op& op) override {
    if (schedules_[op.value]) schedules_[op.value]->step();
  }
  void evaluate(const Op& op) override {
    torch::NoGradGuard no_grad;
    net_->eval();
    see("evaluation", net_->forward(batch_of(program_, op.value, rank_).first));
    net_->train();
  }
  void rewrite_state() override { sharded_->load_full_state(sharded_->full_state()); }
  void edit_parameter(const Op& op) override { edit(parameter(op), op.how); }
  void average(const Op& op) override {
    if (!average_) average_.emplace(*sharded_, 0.75);
    if (op.how == 0) return average_->update();
    average_->evaluate([&] { evaluate(op); });
  }
  void save(const Op& op) override {
    save_checkpoint(directory_of(program_), *sharded_, saved_optimizer(),
                    {.whole_parameters = op.how == 1,
                     .scaler = scaler_ ? &*scaler_ : nullptr,
                     .schedulers = saved_schedulers()});
  }
  void load() override {
    load_checkpoint(directory_of(program_), *sharded_, saved_optimizer(),
                    {.scaler = scaler_ ? &*scaler_ : nullptr, .schedulers = saved_schedulers()});
  }
  void throw_in(const Op& op) override {
    (op.how == 0 ? net_->throws_forward : net_->throws_backward) = op.value;
    try {
      const auto [x, y] = batch_of(program_, 0, rank_);
      loss_of(sharded_->forward(x), y, op).backward();
    } catch (const UserError&) {
    }
    net_->throws_forward = net_->throws_backward = -1;
  }
  void thaw() override {
    for (Tensor& param : params_) param.requires_grad_(true);
  }
  void reduce() override {
    sharded_->reduce();
    see_sums();
  }
  void see_used() override {
    for (const NamedTensor& item : sharded_->full_state()) see(item.name, item.tensor);
  }
  void finish() override {
    trace_.state = std::ssize(trace_.items);
    see_state();
    if (program_.reload_ranks > 0) save({});
  }
  // Reads what ranks of another world have saved at their end.
  void load_saved() {
    if (has_op(program_, OpKind::kThaw)) thaw();
    load();
    if (!saved_optimizer()) optimizers_.clear();
    see_state();
  }
  void train_all(int& at) {
    if (program_.joined > 0) {
      std::vector<ShardedOptimizer*> joined;
      for (ShardedOptimizer& optimizer : optimizers_) joined.push_back(&optimizer);
      join(*sharded_, joined, [&] { train(program_, {this}, 0, program_.ends[rank_] - 1, at); });
      for (int i = program_.ends[rank_]; i < program_.joined; ++i)
        if (is_made_up_for(program_.ops[i])) run(*this, op_at(program_, i));
    }
    train(program_, {this}, program_.joined, static_cast<int>(program_.ops.size()), at);
  }

 private:
  ShardPlan plan_of(const World& world) const {
    ShardPlan plan = program_.plan;
    plan.process_group = world.process_group();
    if (program_.shard_size > 0) {
      const auto groups = world.hybrid_process_groups(program_.shard_size);
      plan.process_group = groups.shard;
      plan.replicate_group = groups.replicate;
    }
    // The check takes time, and may hide what depends on it.
    if (program_.seed % 4 == 0)
      plan.process_group = testing::with_unchanged_inputs(plan.process_group);
    const auto items = net_->distinct();
    std::vector<std::string> unit;
    for (size_t i = 0; i < items.size(); ++i) {
      if (program_.is_ignored(i)) {
        plan.ignored.push_back(items[i].name);
        continue;
      }
      if (program_.own_units && i % 2 == 1) unit.push_back(items[i].name);
      if (program_.owners && i % 3 == 0)
        plan.owners[items[i].name] = static_cast<int>(7 * i) % plan.process_group->size();
      if (program_.whole && i % 3 == 1) plan.whole.push_back(items[i].name);
    }
    if (program_.grouped) {
      std::vector<int> ranks(world.size());
      std::iota(ranks.begin(), ranks.end(), 0);
      const ProcessGroupPtr group = world.new_process_group(ranks);
      for (size_t i = 0; i < items.size(); ++i)
        if (i % 2 == 0 && !program_.is_ignored(i)) plan.groups.push_back({items[i].name, group});
    }
    if (plan.offload == Offload::kDirectory) plan.offload_directory = directory_of(program_);
    if (!unit.empty()) plan.units = {unit};
    return plan;
  }
  const Tensor& parameter(const Op& op) const { return params_[op.value % params_.size()]; }
  // A checkpoint has the state of one optimizer.
  ShardedOptimizer* saved_optimizer() {
    return optimizers_.size() == 1 ? optimizers_.data() : nullptr;
  }
  std::vector<SchedulerPtr> saved_schedulers() const {
    std::vector<SchedulerPtr> all;
    for (const auto& schedule : schedules_)
      if (schedule) all.emplace_back(schedule.get());
    return all;
  }
  // Those that the plan does not ignore.
  std::vector<Tensor> reduced_params() const {
    std::vector<Tensor> reduced;
    for (size_t i = 0; i < params_.size(); ++i)
      if (!program_.is_ignored(i)) reduced.push_back(params_[i]);
    return reduced;
  }
  // Sums of messages of 8 bits, which have no single result.
  void see_sums() {
    if (!narrow_sums(program_)) return;
    for (const Tensor& param : reduced_params()) {
      const Tensor sum = sharded_->full_grad(param);
      if (sum.defined()) see("gradient", sum);
    }
  }
  void see_state() {
    see_used();
    if (program_.plan.outer) return;  // whose momentum is no part of it
    for (size_t i = 0; i < optimizers_.size(); ++i)
      for (const auto& [name, value] : items_of(i, full_state_dict(optimizers_[i], -1)))
        see(name, value);
  }
  void see(const std::string& name, const Tensor& value) {
    trace_.items.push_back({name, value.detach().cpu().clone()});
  }
  void see(const std::string& name, double value) {
    see(name, torch::scalar_tensor(value, torch::kDouble));
  }

  const Program& program_;
  const int rank_;
  const ProcessGroupPtr world_;
  Trace& trace_;
  std::shared_ptr<Model> net_;
  std::vector<Tensor> params_;
  std::vector<std::unique_ptr<torch::optim::Optimizer>> inner_;
  std::vector<std::unique_ptr<Schedule>> schedules_;
  std::optional<Sharded<Model>> sharded_;
  std::vector<ShardedOptimizer> optimizers_;
  std::optional<GradScaler> scaler_;
  std::optional<ExponentialAverage> average_;
  Tensor loss_;
};

}  // namespace

static Trace trace_of(const Program& program, const World& world,
                      const std::function<void(ShardedTraining&, Trace&)>& run) {
  Trace trace;
  try {
    ShardedTraining training(program, world, trace);
    run(training, trace);
  } catch (const c10::Error& error) {
    trace.error = error.what_without_backtrace();
  } catch (const std::exception& error) {
    trace.error = error.what();
  }
  return trace;
}

Trace train_sharded(const Program& program, const World& world) {
  return trace_of(program, world,
                  [](ShardedTraining& training, Trace& trace) { training.train_all(trace.op); });
}

Trace load_sharded(const Program& program, const World& world) {
  return trace_of(program, world, [](ShardedTraining& training, Trace&) { training.load_saved(); });
}

}  // namespace tessera::differential
