// The interface in C trains as that in C++ does, bit for bit.
#include <filesystem>
#include <mutex>
#include <thread>
#include <utility>

#include "c_model.h"
#include "engine/model/memory_count.h"
#include "support/scratch_directory.h"

namespace tessera::testing {
namespace capi_test {

constexpr int kSteps = 4;

struct Case {
  const char* json;
  ShardPlan plan;
  const char* optimizer = R"({"name": "AdamW", "lr": 0.01, "weight_decay": 0.1})";
  std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<torch::Tensor>)> make =
      [](std::vector<torch::Tensor> params) {
        return std::make_unique<torch::optim::AdamW>(
            std::move(params), torch::optim::AdamWOptions(0.01).weight_decay(0.1));
      };
};

template <class Optimizer, class Options>
auto made_by(const Options& options) {
  return [options](std::vector<torch::Tensor> params) {
    return std::make_unique<Optimizer>(std::move(params), options);
  };
}

TrainingRun a_run() {
  return {.make_net = [] { return seeded(7, [] { return std::make_shared<Mlp>(); }); }};
}

// What training leaves: norms of the gradients, values, memory, and steps.
struct Result {
  std::vector<double> norms;
  State state;
  std::vector<int64_t> memory;
};

double rate(int step) { return step < 2 ? -1 : 0.01 / step; }

Result train_in_c(const CWorld& world, const Case& it) {
  const TrainingRun run = a_run();
  const CModel model(world, run.make_net(), it.json, it.optimizer);
  Result result;
  for (int step = 0; step < kSteps; ++step) {
    EXPECT_TRUE(succeeds(tessera_zero_grad(model.handle)));
    model.backward(run, step);
    EXPECT_TRUE(succeeds(tessera_clip(model.handle, 0.5, 2, &result.norms.emplace_back())));
    EXPECT_TRUE(succeeds(tessera_step(model.handle, rate(step))));
  }
  result.state = model.state();
  tessera_bytes bytes;
  EXPECT_TRUE(succeeds(tessera_memory(model.handle, &bytes)));
  result.memory = {bytes.parameters,     bytes.gradients, bytes.optimizer_state,
                   bytes.master_weights, bytes.offloaded, bytes.peak_unsharded};
  EXPECT_GT(bytes.peak_in_flight, 0);  // how much depends on when messages arrive
  return result;
}

Result train_in_cpp(const World& world, const Case& it) {
  const TrainingRun run = a_run();
  const auto net = run.make_net();
  auto sharded = fully_shard(PassedTensors::listed(net->named_parameters()),
                             PassedTensors::listed(net->named_buffers()), it.plan);
  const auto inner = it.make(net->parameters());
  ShardedOptimizer optimizer(sharded, *inner);
  Result result;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const Batch batch = global_batch(step, run.rows, run.in, run.out);
    rank_loss(*net, batch, world.rank(), world.size(), step).backward();
    result.norms.push_back(sharded.clip_grad_norm_(0.5));
    if (rate(step) >= 0) inner->param_groups()[0].options().set_lr(rate(step));
    optimizer.step();
  }
  for (const auto& item : net->named_parameters())
    result.state.push_back({item.key(), sharded.full_value(item.value())});
  const ShardMemory m = optimizer.memory();
  result.memory = {m.parameters,     m.gradients, m.optimizer_state,
                   m.master_weights, m.offloaded, m.peak_unsharded};
  return result;
}

const std::vector<Case>& cases() {
  static const std::vector<Case> list = {
      {nullptr, {}},
      {R"({"level": "none"})", {.level = ShardLevel::kNone}},
      {R"({"level": "os", "average": false})",
       {.level = ShardLevel::kOptimizerState, .average = false},
       R"({"name": "SGD", "lr": 0.05, "momentum": 0.9, "nesterov": true})",
       made_by<torch::optim::SGD>(torch::optim::SGDOptions(0.05).momentum(0.9).nesterov(true))},
      {R"({"level": "os_g", "partition": "whole_param", "owners": {"norm.bias": 0}})",
       {.level = ShardLevel::kGradients,
        .partition = Partition::kWholeParam,
        .owners = {{"norm.bias", 0}}},
       R"({"name": "Adam", "lr": 0.01, "beta1": 0.8, "beta2": 0.95, "amsgrad": true})",
       made_by<torch::optim::Adam>(
           torch::optim::AdamOptions(0.01).betas({0.8, 0.95}).amsgrad(true))},
      {R"({"unit_bytes": 0, "prefetch": 1, "whole": ["norm.weight"], "memory_budget": null,
           "param_dtype": "bfloat16", "reduce_dtype": "float32"})",
       {.unit_bytes = 0,
        .whole = {"norm.weight"},
        .prefetch = 1,
        .precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}},
       R"({"name": "RMSprop", "lr": 0.001, "alpha": 0.9, "centered": true})",
       made_by<torch::optim::RMSprop>(
           torch::optim::RMSpropOptions(0.001).alpha(0.9).centered(true))},
      {R"({"units": [["head.weight", "head.bias"]], "resident_bytes": -1})",
       {.units = {{"head.weight", "head.bias"}}, .resident_bytes = -1},
       R"({"name": "CPUAdam", "lr": 0.01, "state_dtype": "bfloat16", "seed": 3})",
       made_by<CPUAdam>(CPUAdamOptions(0.01).state_dtype(torch::kBFloat16).seed(3))},
      {R"({"offload": "host"})",
       {.offload = Offload::kHost},
       R"({"name": "Adagrad", "lr": 0.02, "lr_decay": 0.1})",
       made_by<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.02).lr_decay(0.1))}};
  return list;
}

class CInterface : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, CInterface, ::testing::Values(1, 2, 3));

TEST_P(CInterface, TrainsToTheBitAsCppDoes) {
  for (const Case& it : cases()) {
    std::vector<Result> in_c(GetParam()), in_cpp(GetParam());
    run_c_world(GetParam(), [&](CWorld& world) {
      EXPECT_EQ(world.size, GetParam());
      in_c[world.rank] = train_in_c(world, it);
    });
    spawn(GetParam(), [&] {
      const World world = init();
      in_cpp[world.rank()] = train_in_cpp(world, it);
    });
    for (int rank = 0; rank < GetParam(); ++rank) {
      const std::string what = std::string(it.json ? it.json : "no plan") + it.optimizer;
      expect_same_state(in_c[rank].state, in_cpp[rank].state, 0, what);
      EXPECT_EQ(in_c[rank].norms, in_cpp[rank].norms) << what;
      EXPECT_EQ(in_c[rank].memory, in_cpp[rank].memory) << what;
    }
  }
}

TEST_P(CInterface, GoesOnFromACheckpoint) {
  const ScratchDirectory scratch;
  const std::string path = scratch / "step-2";
  const TrainingRun run = a_run();
  run_c_world(GetParam(), [&](CWorld& world) {
    const char* const optimizer = R"({"name": "Adam", "lr": 0.01})";
    const auto train = [&](const CModel& model, int64_t first, int64_t last) {
      for (int64_t step = first; step < last; ++step) {
        EXPECT_TRUE(succeeds(tessera_zero_grad(model.handle)));
        model.backward(run, static_cast<int>(step));
        EXPECT_TRUE(succeeds(tessera_step(model.handle, -1)));
      }
    };
    const CModel model(world, run.make_net(), nullptr, optimizer);
    train(model, 0, 2);
    EXPECT_TRUE(succeeds(tessera_save(model.handle, path.c_str())));
    train(model, 2, kSteps);

    const CModel resumed(world, run.make_net(), R"({"level": "os_g"})", optimizer);
    int64_t steps = -1;
    EXPECT_TRUE(succeeds(tessera_load(resumed.handle, path.c_str(), &steps)));
    EXPECT_EQ(steps, 2);
    train(resumed, steps, kSteps);
    expect_same_state(resumed.state(), model.state(), 0, "resumed");

    const CModel evaluated(world, run.make_net(), nullptr, nullptr);
    EXPECT_TRUE(succeeds(tessera_load(evaluated.handle, path.c_str(), nullptr)));
  });
}

TEST_P(CInterface, TakesTiedParametersAndBuffers) {
  const ScratchDirectory scratch;
  run_c_world(GetParam(), [&](CWorld& world) {
    const torch::Tensor tied =
        torch::full({5, 3}, world.rank == 0 ? 1.0 : 7.0, torch::requires_grad());
    const torch::Tensor buffer = torch::full({2}, 3.0);
    const PassedTensors passed({{"in", tied}, {"out", tied}}, {{"mean", buffer}});
    tessera_model* model = nullptr;
    ASSERT_TRUE(succeeds(tessera_shard(world.handle, passed.names.data(), passed.tensors.data(), 2,
                                       1, nullptr, R"({"name": "SGD", "lr": 0.5})", &model)));
    (tied * tied.detach()).sum().backward();
    EXPECT_TRUE(succeeds(tessera_step(model, -1)));
    for (const char* name : {"in", "out"}) {
      torch::Tensor value;
      EXPECT_TRUE(succeeds(tessera_gather(model, name, &value)));
      EXPECT_TRUE(torch::equal(value, torch::full({5, 3}, 0.5))) << name << "\n" << value;
    }
    EXPECT_TRUE(succeeds(tessera_save(model, (scratch / "saved").c_str())));
    buffer.zero_();
    EXPECT_TRUE(succeeds(tessera_load(model, (scratch / "saved").c_str(), nullptr)));
    EXPECT_TRUE(torch::equal(buffer, torch::full({2}, 3.0)));
    tessera_free(model);
  });
}

TEST_P(CInterface, LeavesIgnoredParametersOutOfTheOptimizer) {
  run_c_world(GetParam(), [&](CWorld& world) {
    const TrainingRun run = a_run();
    const CModel model(world, run.make_net(), R"({"ignored": ["head.bias"]})",
                       R"({"name": "SGD", "lr": 0.1})");
    const torch::Tensor ignored = model.net->named_parameters()["head.bias"];
    const torch::Tensor before = ignored.detach().clone();
    torch::Tensor weight, stepped;
    EXPECT_TRUE(succeeds(tessera_gather(model.handle, "head.weight", &weight)));
    model.backward(run, 0);
    EXPECT_TRUE(succeeds(tessera_step(model.handle, -1)));
    EXPECT_TRUE(succeeds(tessera_gather(model.handle, "head.weight", &stepped)));
    EXPECT_FALSE(torch::equal(weight, stepped));
    EXPECT_TRUE(torch::equal(ignored, before));
    EXPECT_TRUE(ignored.grad().defined());
    expect_failure(tessera_gather(model.handle, "head.bias", &weight), TESSERA_BAD_ARGUMENT,
                   {"[full_value]"});
  });
}

int64_t open_descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
}

TEST_P(CInterface, FreesAllThatItMakes) {
  const TrainingRun run = a_run();
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> parameters;
  std::mutex mutex;
  const auto train = [&](CWorld& world) {
    const LiveMemory live(torch::kCPU);
    const int64_t before = live.now();
    for (int i = 0; i < 2; ++i) {
      const CModel model(world, run.make_net(), nullptr, R"({"name": "AdamW"})");
      model.backward(run, 0);
      EXPECT_TRUE(succeeds(tessera_step(model.handle, -1)));
      model.state();  // no rank leaves while others are in their first collectives
      const std::lock_guard lock(mutex);
      for (const NamedTensor& it : model.passed.held)
        parameters.emplace_back(it.tensor.getIntrusivePtr());
    }
    tessera_free(std::exchange(world.handle, nullptr));
    EXPECT_EQ(live.now(), before) << "bytes of tensors";
  };
  run_c_world(GetParam(), train);
  const int64_t open = open_descriptors();
  for (int i = 0; i < 5; ++i) run_c_world(GetParam(), train);
  for (const auto& parameter : parameters) EXPECT_TRUE(parameter.expired());
  // Connections are closed by threads of their own.
  for (int i = 0; i < 1000 && open_descriptors() > open; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_LE(open_descriptors(), open);
}

TEST_P(CInterface, FreesInAnyOrderAndOnAnyThread) {
  run_c_world(GetParam(), [&](CWorld& world) {
    const TrainingRun run = a_run();
    CModel model(world, run.make_net(), nullptr, R"({"name": "SGD"})");
    tessera_free(std::exchange(world.handle, nullptr));
    model.backward(run, 0);  // the model keeps the world
    EXPECT_TRUE(succeeds(tessera_step(model.handle, -1)));
    model.state();
    std::thread(tessera_free, std::exchange(model.handle, nullptr)).join();
    tessera_free(nullptr);
  });
}

}  // namespace capi_test
}  // namespace tessera::testing
