// Parameters that no optimizer holds: FairScale's classes leave them alone, and checkpoints save
// them like those of any other model.

#include "dialects/fairscale/tests/fairscale.h"
#include "support/scratch_directory.h"

namespace tessera::testing::frozen_parameters_test {

/// Multiplies by a frozen weight.
struct FrozenImpl : torch::nn::Module {
  explicit FrozenImpl(const at::Tensor& weight)
      : weight(register_parameter("weight", weight, /*requires_grad=*/false)) {}
  at::Tensor forward(const at::Tensor& x) { return torch::matmul(x, weight); }
  at::Tensor weight;
};
TORCH_MODULE(Frozen);

/// Two of its layers share a frozen weight.
struct FrozenNetImpl : torch::nn::Module {
  FrozenNetImpl()
      : in(register_module("in", torch::nn::Linear(6, 8))),
        first(register_module("first", Frozen(torch::nn::Linear(8, 8)->weight.detach().clone()))),
        second(register_module("second", Frozen(first->weight))),
        out(register_module("out", torch::nn::Linear(8, 3))) {}
  at::Tensor forward(const at::Tensor& x) {
    return out(torch::tanh(second(torch::tanh(first(torch::tanh(in(x)))))));
  }
  torch::nn::Linear in;
  Frozen first, second;
  torch::nn::Linear out;
};
TORCH_MODULE(FrozenNet);

std::vector<at::Tensor> trainable(const FrozenNet& net) {
  std::vector<at::Tensor> params;
  for (const at::Tensor& param : net->parameters()) {
    if (param.requires_grad()) params.push_back(param);
  }
  return params;
}

/// One rank's training job, through one of the APIs.
struct Job {
  virtual ~Job() = default;
  virtual at::Tensor forward(const at::Tensor& x) = 0;
  virtual void update() = 0;
  virtual void save(const std::filesystem::path& path, const SaveOptions& options) = 0;
  virtual void load(const std::filesystem::path& path) = 0;
  virtual std::vector<NamedTensor> state() = 0;

  void train(World& world, int first, int last) {
    for (int step = first; step < last; ++step) {
      loss_of(*this, step, world.rank(), world.size()).backward();
      update();
    }
  }
};

struct CoreJob final : Job {
  CoreJob(FrozenNet net, ShardLevel level)
      : net(net),
        sharded(fully_shard(net, {.level = level})),
        adamw(trainable(net), AdamWOptions(0.02)),
        optimizer(sharded, adamw) {}
  at::Tensor forward(const at::Tensor& x) override { return sharded.forward(x); }
  void update() override {
    optimizer.step();
    optimizer.zero_grad();
  }
  void save(const std::filesystem::path& path, const SaveOptions& options) override {
    save_checkpoint(path, sharded, &optimizer, options);
  }
  void load(const std::filesystem::path& path) override {
    load_checkpoint(path, sharded, &optimizer);
  }
  std::vector<NamedTensor> state() override {
    const auto keep = sharded.keep_unsharded();
    return plain_state(*net);
  }
  FrozenNet net;
  Sharded<FrozenNetImpl> sharded;
  AdamW adamw;
  ShardedOptimizer optimizer;
};

struct FairScaleJob final : Job {
  explicit FairScaleJob(FrozenNet net)
      : net(net), oss(trainable(net), AdamWOptions(0.02)), model(net, oss) {}
  at::Tensor forward(const at::Tensor& x) override { return model.forward(x); }
  void update() override {
    oss.step();
    oss.zero_grad();
  }
  void save(const std::filesystem::path& path, const SaveOptions& options) override {
    oss.with_sharded([&](ShardedOptimizer& sharded) {
      save_checkpoint(path, model.sharded(), &sharded, options);
    });
  }
  void load(const std::filesystem::path& path) override {
    oss.with_sharded([&](ShardedOptimizer& sharded) {
      ShardedModule module = model.sharded();
      load_checkpoint(path, module, &sharded);
    });
  }
  std::vector<NamedTensor> state() override { return plain_state(*net); }
  FrozenNet net;
  OSS<AdamW> oss;
  ShardedDataParallel<FrozenNet> model;
};

using MakeJob = std::function<std::unique_ptr<Job>(FrozenNet)>;

std::vector<std::pair<std::string, MakeJob>> ways() {
  const auto core = [](ShardLevel level) {
    return [level](FrozenNet net) { return std::make_unique<CoreJob>(net, level); };
  };
  return {{"gradients", core(ShardLevel::kGradients)},
          {"parameters", core(ShardLevel::kParameters)},
          {"fairscale", [](FrozenNet net) { return std::make_unique<FairScaleJob>(net); }}};
}

TEST(FrozenParameters, CheckpointsGoFromAnyWayToAnyOther) {
  const ScratchDirectory scratch;
  for (const int ranks : {1, 2, 3}) {
    for (const bool whole : {false, true}) {
      for (const auto& [from, make] : ways()) {
        std::vector<NamedTensor> expected;
        run_world(ranks, [&](World& world) {
          const auto job = make(make_net<FrozenNet>(3));
          job->train(world, 0, 2);
          job->save(scratch / from, {.whole_parameters = whole});
          job->train(world, 2, 4);
          const auto state = job->state();
          if (world.rank() == 0) expected = state;
        });
        for (const auto& [to, make_other] : ways()) {
          run_world(ranks, [&, what = from + " to " + to](World& world) {
            const auto job = make_other(make_net<FrozenNet>(4));
            job->load(scratch / from);
            job->train(world, 2, 4);
            expect_same_state(job->state(), expected, 1e-6, what);
          });
        }
        FrozenNet plain = make_net<FrozenNet>(4);
        AdamW adamw(trainable(plain), AdamWOptions(0.02));
        run_world(1, [&](World&) { load_checkpoint(scratch / from, *plain, &adamw); });
        EXPECT_TRUE(torch::equal(plain->first->weight, make_net<FrozenNet>(3)->first->weight));
      }
    }
  }
}

// These values are the user's own and may differ: each rank loads its own.
TEST(FrozenParameters, EachRankHasItsOwnValuesBack) {
  const ScratchDirectory scratch;
  const auto set = [](FrozenNet& net, int rank) {
    torch::NoGradGuard no_grad;
    net->first->weight.fill_(rank);
  };
  run_world(2, [&](World& world) {
    FairScaleJob job(make_net<FrozenNet>());
    set(job.net, 5 + world.rank());
    job.save(scratch / "one", {});
  });
  run_world(2, [&](World& world) {
    FairScaleJob job(make_net<FrozenNet>());
    job.load(scratch / "one");
    EXPECT_EQ(job.net->first->weight[0][0].item<float>(), 5 + world.rank());
    EXPECT_EQ(job.net->second->weight[0][0].item<float>(), 5 + world.rank());
  });
}

}  // namespace tessera::testing::frozen_parameters_test
