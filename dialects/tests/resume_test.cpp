// A run that is saved and resumed gives the same bits as an uninterrupted one, in each dialect:
// parameters, optimizer state, scaler, schedulers and random numbers are restored.
#include <gtest/gtest.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "support/models.h"
#include "support/scratch_directory.h"

namespace tessera::testing::resume_test {

namespace fs = std::filesystem;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

/// Draws random numbers in each forward, and has buffers.
struct DrawingNetImpl : torch::nn::Module {
  DrawingNetImpl()
      : first(register_module("first", torch::nn::Linear(6, 14))),
        norm(register_module("norm", torch::nn::BatchNorm1d(14))),
        second(register_module("second", torch::nn::Linear(14, 10))),
        last(register_module("last", torch::nn::Linear(10, 3))) {}
  at::Tensor forward(const at::Tensor& x) {
    return last(torch::dropout(torch::relu(second(norm(first(x)))), 0.3, is_training()));
  }
  torch::nn::Linear first;
  torch::nn::BatchNorm1d norm;
  torch::nn::Linear second, last;
};
TORCH_MODULE(DrawingNet);

/// One rank's training job.
class Job {
 public:
  virtual ~Job() = default;
  virtual double step(int64_t step) = 0;
  virtual void save(const fs::path& path) = 0;
  virtual void load(const fs::path& path) = 0;
  virtual std::vector<NamedTensor> state() = 0;
};

Batch batch_of(World& world, int64_t step) {
  const Batch batch = global_batch(step, 12, 6, 3);
  return {rows_of(batch.x, world.rank(), world.size()),
          rows_of(batch.y, world.rank(), world.size())};
}

template <class Model>
at::Tensor loss_of(Model&& forward, const Batch& batch) {
  return torch::mse_loss(forward(batch.x).to(torch::kFloat), batch.y);
}

class NativeJob : public Job {
 public:
  NativeJob(World& world, ShardPlan plan)
      : world_(world),
        sharded_(fully_shard(net_, plan)),
        adamw_(net_->parameters(), AdamWOptions(0.02)),
        optimizer_(sharded_, adamw_),
        schedule_(adamw_, 2, 0.7) {}
  double step(int64_t step) override {
    optimizer_.zero_grad();
    const at::Tensor loss = loss_of(sharded_, batch_of(world_, step));
    scaler_.scale(loss).backward();
    scaler_.step(optimizer_);
    scaler_.update();
    schedule_.step();
    return loss.item<double>();
  }
  void save(const fs::path& path) override {
    save_checkpoint(path, sharded_, &optimizer_, {.scaler = &scaler_, .schedulers = {&schedule_}});
  }
  void load(const fs::path& path) override {
    load_checkpoint(path, sharded_, &optimizer_, {.scaler = &scaler_, .schedulers = {&schedule_}});
  }
  std::vector<NamedTensor> state() override { return sharded_.full_state(); }

 private:
  World& world_;
  DrawingNet net_ = on_test_device(DrawingNet());
  Sharded<DrawingNetImpl> sharded_;
  AdamW adamw_;
  ShardedOptimizer optimizer_;
  torch::optim::StepLR schedule_;
  GradScaler scaler_{{.init_scale = 64, .growth_interval = 2}};
};

class GroupShardedJob : public Job {
 public:
  GroupShardedJob(World& world, const std::string& level)
      : world_(world),
        adamw_(net_->parameters(), AdamWOptions(0.02)),
        parts_(paddle::group_sharded_parallel(net_, adamw_, level,
                                              {.scaler = &scaler_, .segment_size = 0})) {}
  double step(int64_t step) override {
    parts_.optimizer.clear_grad();
    const at::Tensor loss = loss_of(parts_.model, batch_of(world_, step));
    scaler_.scale(loss).backward();
    scaler_.step(parts_.optimizer);
    scaler_.update();
    return loss.item<double>();
  }
  void save(const fs::path& path) override {
    paddle::save_group_sharded_model(parts_.model, path, &parts_.optimizer);
  }
  void load(const fs::path& path) override {
    paddle::load_group_sharded_model(parts_.model, path, &parts_.optimizer);
  }
  std::vector<NamedTensor> state() override { return parts_.model.full_state(); }

 private:
  World& world_;
  DrawingNet net_ = on_test_device(DrawingNet());
  GradScaler scaler_{{.init_scale = 64, .growth_interval = 2}};
  AdamW adamw_;
  paddle::GroupSharded<DrawingNetImpl> parts_;
};

class ShardLayerJob : public Job {
 public:
  ShardLayerJob(World& world, bool sharded_state)
      : mesh_(DeviceMesh::over_world(world)),
        layer_(paddle::shard_layer(net_, mesh_, place)),
        adamw_(net_->parameters(), AdamWOptions(0.02)),
        optimizer_(sharded_state ? paddle::shard_optimizer(adamw_, place_state)
                                 : paddle::shard_optimizer(adamw_)) {}
  double step(int64_t step) override {
    const Batch batch = global_batch(step, 12, 6, 3);
    optimizer_.zero_grad();
    const at::Tensor out = layer_(distribute(batch.x, mesh_, {}));
    const at::Tensor loss = torch::mse_loss(out, distribute(batch.y, mesh_, {}));
    loss.backward();
    optimizer_.step();
    return full_tensor(loss).item<double>();
  }
  void save(const fs::path& path) override {
    paddle::save_state_dict(state_dict(optimizer_.state_dict()), path);
  }
  void load(const fs::path& path) override {
    const StateDict of_optimizer = optimizer_.state_dict();
    EXPECT_EQ(paddle::load_state_dict(state_dict(of_optimizer), path), std::vector<std::string>());
    optimizer_.load_state_dict(of_optimizer);
  }
  std::vector<NamedTensor> state() override {
    std::vector<NamedTensor> all;
    for (const auto& item : net_->named_parameters())
      all.push_back({item.key(), full_tensor(item.value()).detach().clone()});
    for (const auto& item : net_->named_buffers())
      all.push_back({item.key(), full_tensor(item.value()).clone()});
    return all;
  }

 private:
  StateDict state_dict(const StateDict& of_optimizer) {
    StateDict of_model;
    for (const auto& item : net_->named_parameters()) of_model[item.key()] = item.value();
    for (const auto& item : net_->named_buffers()) of_model[item.key()] = item.value();
    return paddle::flatten_state_dict({{"model", of_model}, {"optimizer", of_optimizer}});
  }
  static void place(const std::string& name, torch::nn::Module& layer, const DeviceMesh& mesh) {
    auto* linear = layer.as<torch::nn::LinearImpl>();
    if (name == "second") linear->weight = paddle::shard_tensor(linear->weight, mesh, {Shard{0}});
    if (name == "last") linear->weight = paddle::shard_tensor(linear->weight, mesh, {Shard{1}});
  }
  static at::Tensor place_state(const std::string&, const at::Tensor& param,
                                const at::Tensor& state) {
    return redistribute(state, {param.dim() == 2 ? Placement(Shard{1}) : Placement(Shard{0})});
  }

  DeviceMesh mesh_;
  DrawingNet net_ = on_test_device(DrawingNet());
  DistModule<DrawingNetImpl> layer_;
  AdamW adamw_;
  DistOptimizer optimizer_;
};

class ShardedDdpJob : public Job {
 public:
  explicit ShardedDdpJob(World& world)
      : world_(world), oss_(net_->parameters(), AdamWOptions(0.02)), model_(net_, oss_) {}
  double step(int64_t step) override {
    oss_.zero_grad();
    const at::Tensor loss = loss_of(model_, batch_of(world_, step));
    loss.backward();
    oss_.step();
    for (auto& group : oss_.param_groups()) group.options().set_lr(group.options().get_lr() * 0.9);
    return loss.item<double>();
  }
  void save(const fs::path& path) override {
    oss_.with_sharded(
        [&](ShardedOptimizer& sharded) { save_checkpoint(path, model_.sharded(), &sharded); });
  }
  void load(const fs::path& path) override {
    oss_.with_sharded([&](ShardedOptimizer& sharded) {
      ShardedModule model = model_.sharded();
      load_checkpoint(path, model, &sharded);
    });
  }
  std::vector<NamedTensor> state() override { return plain_state(*net_); }

 private:
  World& world_;
  DrawingNet net_ = on_test_device(DrawingNet());
  fairscale::OSS<AdamW> oss_;
  fairscale::ShardedDataParallel<DrawingNet> model_;
};

class ShardedModelJob : public Job {
 public:
  explicit ShardedModelJob(World& world)
      : world_(world),
        strategy_(std::make_shared<colossalai::TensorShardStrategy>()),
        net_(make(strategy_)),
        model_(net_, strategy_),
        adamw_(net_->parameters(), AdamWOptions(0.02)),
        optimizer_(model_, adamw_, {.initial_scale = 256}) {}
  double step(int64_t step) override {
    optimizer_.zero_grad();
    const at::Tensor loss = loss_of(model_, batch_of(world_, step));
    optimizer_.backward(loss);
    EXPECT_TRUE(optimizer_.step());
    return loss.item<double>();
  }
  void save(const fs::path& path) override {
    save_checkpoint(path, model_.sharded(), &optimizer_.sharded());
  }
  void load(const fs::path& path) override {
    ShardedModule model = model_.sharded();
    load_checkpoint(path, model, &optimizer_.sharded());
  }
  std::vector<NamedTensor> state() override { return model_.sharded().full_state(); }

 private:
  static DrawingNet make(const colossalai::ShardStrategyPtr& strategy) {
    colossalai::ZeroInitContext context(test_device(), strategy, {.shard_param = true});
    return DrawingNet();
  }
  World& world_;
  colossalai::ShardStrategyPtr strategy_;
  DrawingNet net_;
  colossalai::ShardedModelV2<DrawingNet> model_;
  AdamW adamw_;
  colossalai::ShardedOptimizerV2 optimizer_;
};

using MakeJob = std::function<std::unique_ptr<Job>(World&)>;

const std::map<std::string, MakeJob>& jobs() {
  const auto native = [](ShardLevel level, std::optional<at::ScalarType> param_dtype) {
    ShardPlan plan{.level = level, .unit_bytes = 300};
    plan.precision.param_dtype = plan.precision.buffer_dtype = param_dtype;
    return [plan](World& world) { return std::make_unique<NativeJob>(world, plan); };
  };
  static const std::map<std::string, MakeJob> kJobs = {
      {"FullyShardNone", native(ShardLevel::kNone, std::nullopt)},
      {"FullyShardGradients", native(ShardLevel::kGradients, std::nullopt)},
      {"FullyShardParameters", native(ShardLevel::kParameters, std::nullopt)},
      {"FullyShardBfloat16", native(ShardLevel::kParameters, torch::kBFloat16)},
      {"GroupShardedOsG",
       [](World& world) { return std::make_unique<GroupShardedJob>(world, "os_g"); }},
      {"GroupShardedPGOs",
       [](World& world) { return std::make_unique<GroupShardedJob>(world, "p_g_os"); }},
      {"ShardLayer", [](World& world) { return std::make_unique<ShardLayerJob>(world, false); }},
      {"ShardLayerPlacedState",
       [](World& world) { return std::make_unique<ShardLayerJob>(world, true); }},
      {"ShardedDataParallel", [](World& world) { return std::make_unique<ShardedDdpJob>(world); }},
      {"ShardedModelV2", [](World& world) { return std::make_unique<ShardedModelJob>(world); }}};
  return kJobs;
}

class Resume : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Of, Resume, ::testing::ValuesIn([] {
                           std::vector<std::string> names;
                           for (const auto& [name, make] : jobs()) names.push_back(name);
                           return names;
                         }()),
                         [](const auto& info) { return info.param; });

/// Losses of some steps, and the state after them.
struct Outcome {
  std::vector<double> losses;
  std::vector<NamedTensor> state;
};
Outcome run(Job& job, int64_t first, int64_t last) {
  Outcome outcome;
  for (int64_t step = first; step < last; ++step) outcome.losses.push_back(job.step(step));
  outcome.state = job.state();
  return outcome;
}

TEST_P(Resume, GivesTheBitsOfAnUninterruptedRun) {
  const ScratchDirectory scratch;
  const MakeJob& make = jobs().at(GetParam());
  // DistTensors draw the numbers of one process, so all ranks have one seed there. A dict of
  // tensors does not hold it.
  const bool draws_together = GetParam().starts_with("ShardLayer");
  const auto seed = [&](World& world, uint64_t seed) {
    manual_seed(draws_together ? seed : seed + static_cast<uint64_t>(world.rank()));
  };
  for (const int ranks : {1, 2, 3}) {
    std::vector<Outcome> expected(static_cast<size_t>(ranks));
    run_world(ranks, [&](World& world) {
      manual_seed(1);
      const auto job = make(world);
      seed(world, 5);
      run(*job, 0, 3);
      if (draws_together) seed(world, 6);
      job->save(scratch / "one");
      expected[static_cast<size_t>(world.rank())] = run(*job, 3, 7);
    });
    run_world(ranks, [&](World& world) {
      manual_seed(2);
      const auto job = make(world);
      seed(world, 50);
      run(*job, 8, 10);  // state of its own; the load replaces it
      job->load(scratch / "one");
      if (draws_together) seed(world, 6);
      const Outcome resumed = run(*job, 3, 7);
      const Outcome& whole = expected[static_cast<size_t>(world.rank())];
      EXPECT_EQ(resumed.losses, whole.losses) << ranks << " ranks";
      expect_same_state(resumed.state, whole.state, 0, GetParam());
    });
  }
}

}  // namespace tessera::testing::resume_test
