// Parameters that fewer ranks share than the rest: a mixture of experts, each of which is on some
// of the ranks, trained to the bits of one process.

#include <gtest/gtest.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/checkpoint_files.h>
#include <tessera/engine/exponential_average.h>
#include <tessera/parallel/all_to_all.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "support/error_of.h"
#include "support/expect_contains.h"
#include "support/run_world.h"
#include "support/scratch_directory.h"

namespace tessera {
namespace {

using testing::error_of;
using testing::ScratchDirectory;

constexpr int64_t kExperts = 4, kWidth = 4, kHidden = 3, kTokens = 8, kSteps = 2;

// All numbers are small multiples of powers of two, so that every sum is exact in any order.
at::Tensor integers(at::IntArrayRef sizes, int64_t seed) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return torch::randint(-2, 3, sizes, generator, torch::kDouble);
}

struct Batch {
  at::Tensor tokens, experts;
};

enum class Routing { kUneven, kNoneToTheLastRank };

// The tokens of one rank, and the expert of each.
Batch batch_of(int64_t step, int64_t rank, Routing routing) {
  const at::Tensor tokens = integers({kTokens, kWidth}, 100 * step + rank + 1);
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(100 * step + rank + 7);
  const int64_t used = routing == Routing::kUneven ? kExperts : 1;
  const at::Tensor drawn = torch::randint(0, used * used, {kTokens}, generator, torch::kDouble);
  return {tokens, drawn.sqrt().to(torch::kLong)};  // later experts get more
}

struct MixtureImpl : torch::nn::Module {
  MixtureImpl() {
    in = register_module("in", torch::nn::Linear(kWidth, kWidth));
    out = register_module("out", torch::nn::Linear(kWidth, 2));
    up = register_parameter("up", torch::empty({kExperts, kWidth, kHidden}));
    down = register_parameter("down", torch::empty({kExperts, kHidden, kWidth}));
    to(torch::kDouble);
    const torch::NoGradGuard no_grad;
    int64_t seed = 0;
    for (at::Tensor& parameter : parameters())
      parameter.copy_(integers(parameter.sizes(), ++seed) / 4);
  }

  // From now on this rank has a part of the experts only.
  void distribute_experts(const DeviceMesh& mesh) {
    distribute_(up, mesh, {Shard{0}});
    distribute_(down, mesh, {Shard{0}});
    ranks = mesh.process_group();
  }

  at::Tensor mixed(const at::Tensor& tokens, const at::Tensor& experts) const {
    const at::Tensor order = experts.argsort(/*stable=*/true, 0);
    const at::Tensor sorted = experts.index_select(0, order);
    const int64_t local = kExperts / ranks->size();
    const at::Tensor counts = torch::floor_divide(sorted, local).bincount({}, ranks->size());
    const std::vector<int64_t> to(counts.const_data_ptr<int64_t>(),
                                  counts.const_data_ptr<int64_t>() + ranks->size());
    const std::vector<int64_t> from = exchange_split_sizes(to, ranks);
    const at::Tensor here = all_to_all_single(tokens.index_select(0, order), from, to, ranks);
    const at::Tensor ids = all_to_all_single(sorted.remainder(local), from, to, ranks);
    const auto part = [](const at::Tensor& weight) {
      return is_dist(weight) ? to_local(weight) : weight;
    };
    const at::Tensor first = part(up), second = part(down);
    at::Tensor result = torch::zeros_like(here);
    for (int64_t expert = 0; expert < local; ++expert) {
      const at::Tensor rows = ids.eq(expert).nonzero().squeeze(1);
      const at::Tensor own = here.index_select(0, rows);
      result = result.index_add(0, rows, own.matmul(first[expert]).relu().matmul(second[expert]));
    }
    const at::Tensor back = all_to_all_single(result, to, from, ranks);
    return torch::zeros_like(tokens).index_copy(0, order, back);
  }

  at::Tensor loss(const Batch& batch) {
    const at::Tensor hidden = in(batch.tokens);
    return out(hidden + mixed(hidden, batch.experts)).sum() / 8;
  }

  torch::nn::Linear in = nullptr, out = nullptr;
  at::Tensor up, down;
  ProcessGroupPtr ranks = single_process_group();
};
TORCH_MODULE(Mixture);

using State = std::map<std::string, at::Tensor>;

State state_of(const std::vector<NamedTensor>& tensors) {
  State state;
  for (const NamedTensor& item : tensors) state[item.name] = item.tensor.clone();
  return state;
}

struct Result {
  State state;
  std::vector<double> norms;
};

torch::optim::SGD make_optimizer(const Mixture& model) {
  return torch::optim::SGD(model->parameters(), torch::optim::SGDOptions(0.25).momentum(0.5));
}

// What one process gets from the batches of all `ranks`.
Result train_plain(int ranks, Routing routing, int64_t steps = kSteps, bool average = true) {
  Mixture model;
  torch::optim::SGD optimizer = make_optimizer(model);
  Result result;
  for (int64_t step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    at::Tensor loss = torch::zeros({}, torch::kDouble);
    for (int rank = 0; rank < ranks; ++rank)
      loss = loss + model->loss(batch_of(step, rank, routing));
    (average ? loss / ranks : loss).backward();
    double sum = 0;
    for (const at::Tensor& parameter : model->parameters())
      sum += parameter.grad().square().sum().item<double>();
    result.norms.push_back(std::sqrt(sum));
    optimizer.step();
  }
  for (const auto& item : model->named_parameters())
    result.state[item.key()] = item.value().detach().clone();
  return result;
}

void expect_state(const State& state, const State& expected) {
  ASSERT_EQ(state.size(), expected.size());
  for (const auto& [name, value] : expected)
    EXPECT_TRUE(torch::equal(state.at(name), value)) << name;
}

// A model of which `parts` ranks hold the experts together, and `copies` ranks each part.
struct Job {
  Job(int copies, int parts, ShardPlan plan = {})
      : mesh(DeviceMesh::over_world({copies, parts}, {"copies", "parts"})),
        sharded(shard(mesh, model, std::move(plan))),
        inner(make_optimizer(model)),
        optimizer(sharded, inner, {.fused = false}) {}

  static Sharded<MixtureImpl> shard(const DeviceMesh& mesh, Mixture& model, ShardPlan plan) {
    model->distribute_experts(mesh.sub_mesh("parts"));
    plan.groups = {{"up", mesh.process_group(0)}, {"down", mesh.process_group(0)}};
    if (!plan.unit_bytes) plan.unit_bytes = 200;
    return fully_shard(model.ptr(), plan);
  }

  void train(const Result& expected, Routing routing, int64_t first, int64_t last) {
    for (int64_t step = first; step < last; ++step) {
      optimizer.zero_grad();
      model->loss(batch_of(step, default_process_group()->rank(), routing)).backward();
      EXPECT_NEAR(optimizer.clip_grad_norm_(1e9), expected.norms[step],
                  1e-12 * expected.norms[step]);
      optimizer.step();
    }
  }

  Mixture model;
  DeviceMesh mesh;
  Sharded<MixtureImpl> sharded;
  torch::optim::SGD inner;
  ShardedOptimizer optimizer;
};

struct Case {
  ShardLevel level;
  int copies, parts;
};

class Experts : public ::testing::TestWithParam<Case> {};

TEST_P(Experts, TrainAsInOneProcess) {
  const auto [level, copies, parts] = GetParam();
  for (const Transport transport : kTransports) {
    for (const Routing routing : {Routing::kUneven, Routing::kNoneToTheLastRank}) {
      const bool average = copies != 3;  // else not exact
      const Result expected = train_plain(copies * parts, routing, kSteps, average);
      run_over(transport, copies * parts,
               [&, level = level, copies = copies, parts = parts](World&) {
                 Job job(copies, parts, {.level = level, .average = average});
                 job.train(expected, routing, 0, kSteps);
                 expect_state(state_of(job.sharded.full_state()), expected.state);
                 EXPECT_EQ(job.sharded.full_grad("up").sizes(),
                           at::IntArrayRef({kExperts, kWidth, kHidden}));
               });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Meshes, Experts,
    ::testing::Values(Case{ShardLevel::kNone, 2, 2}, Case{ShardLevel::kOptimizerState, 2, 2},
                      Case{ShardLevel::kGradients, 2, 2}, Case{ShardLevel::kParameters, 2, 2},
                      Case{ShardLevel::kParameters, 1, 4}, Case{ShardLevel::kParameters, 4, 1},
                      Case{ShardLevel::kParameters, 3, 1}, Case{ShardLevel::kGradients, 1, 2},
                      Case{ShardLevel::kParameters, 1, 1}),
    [](const auto& info) {
      return "level" + std::to_string(static_cast<int>(info.param.level)) + "_" +
             std::to_string(info.param.copies) + "x" + std::to_string(info.param.parts);
    });

// Other options of plans, each of which must be honoured for both kinds of units.
TEST(Experts, TrainUnderOtherPlansAsInOneProcess) {
  const Result expected = train_plain(4, Routing::kUneven);
  std::vector<ShardPlan> plans(7);
  plans[0].cuts = {{"*", Cut::kWhole}};
  plans[1].cuts = {{"up", Cut::kRows}, {"*weight", Cut::kRows}};
  plans[2].bucket_bytes = 1000;
  plans[3].offload = Offload::kHost;
  plans[4].resident_bytes = -1;
  plans[5].predivide = 4;
  plans[6].start_values = StartValues::kKeep;
  for (size_t i = 0; i < plans.size(); ++i) {
    SCOPED_TRACE(i);
    run_world(4, [&](World&) {
      Job job(2, 2, plans[i]);
      job.train(expected, Routing::kUneven, 0, kSteps);
      expect_state(state_of(job.sharded.full_state()), expected.state);
    });
  }
}

TEST(Experts, OfAllReplicasArePartsOfOneModel) {
  const Result expected = train_plain(4, Routing::kUneven);
  run_world(4, [&](World&) {
    const auto mesh = DeviceMesh::over_world({2, 2}, {"replicas", "shards"});
    Job job(2, 2,
            {.process_group = mesh.process_group(1), .replicate_group = mesh.process_group(0)});
    job.train(expected, Routing::kUneven, 0, kSteps);
    expect_state(state_of(job.sharded.full_state()), expected.state);
  });
}

TEST(Experts, AreSavedOnceAndLoadedAtOtherDegrees) {
  const ScratchDirectory scratch;
  const std::string path = scratch / "saved";
  const Result half = train_plain(4, Routing::kUneven, 1),
               whole = train_plain(4, Routing::kUneven, 2);
  State averaged;
  run_world(4, [&](World& world) {
    Job job(2, 2);
    ExponentialAverage average(job.sharded, 0.5);
    average.update();
    job.train(half, Routing::kUneven, 0, 1);
    average.update();
    save_checkpoint(path, job.sharded, &job.optimizer);
    average.swap();
    const State values = state_of(job.sharded.full_state());
    if (world.rank() == 0) averaged = values;
    average.swap();
  });
  EXPECT_EQ(verify_checkpoint(path), std::vector<std::string>());
  for (const CheckpointTensor& tensor : inspect_checkpoint(path).tensors)
    if (tensor.names[0] == "up") EXPECT_EQ(tensor.pieces, 4) << tensor.kind;  // once in all
  const Result start = train_plain(4, Routing::kUneven, 0);
  for (const auto& [name, value] : averaged)  // exact: the decay is a half
    EXPECT_TRUE(torch::equal(value, (start.state.at(name) + half.state.at(name)) / 2)) << name;

  for (const auto& [copies, parts] : {std::pair(1, 4), {4, 1}, {2, 2}, {1, 1}, {1, 2}}) {
    SCOPED_TRACE(copies * 10 + parts);
    run_world(copies * parts, [&, copies = copies, parts = parts](World&) {
      Job job(copies, parts, {.level = ShardLevel::kGradients});
      load_checkpoint(path, job.sharded, &job.optimizer);
      expect_state(state_of(job.sharded.full_state()), half.state);
      if (copies * parts != 4) return;
      job.train(whole, Routing::kUneven, 1, 2);
      expect_state(state_of(job.sharded.full_state()), whole.state);
    });
  }
  // In one process, without sharding.
  Mixture plain;
  torch::optim::SGD optimizer = make_optimizer(plain);
  load_checkpoint(path, *plain, &optimizer);
  for (const auto& item : plain->named_parameters())
    EXPECT_TRUE(torch::equal(item.value(), half.state.at(item.key()))) << item.key();
}

TEST(Experts, OrdinaryTensorsOfAProcessGroupAreTrainedAndNotSaved) {
  run_world(4, [](World& world) {
    const auto mesh = DeviceMesh::over_world({2, 2}, {"copies", "parts"});
    torch::nn::Linear layer(3, 2), own(2, 2);
    torch::nn::Sequential model(layer, own);
    const int64_t part = world.rank() % 2;
    const torch::NoGradGuard no_grad;
    for (at::Tensor& parameter : model->parameters()) parameter.fill_(0.25);
    own->weight.fill_(static_cast<double>(1 + part));
    auto sharded = fully_shard(model, {.groups = {{"1.*", mesh.process_group(0)}}});
    torch::optim::SGD inner(model->parameters(), 0.5);
    ShardedOptimizer optimizer(sharded, inner);
    {
      const at::AutoGradMode grad(true);
      (model->forward(torch::ones({1, 3})) * (1 + world.rank())).sum().backward();
    }
    // Hidden values are 1; ranks 0 and 2 have one layer, 1 and 3 another, and the mean is that of
    // four: (1 + 3) / 4 and (2 + 4) / 4.
    EXPECT_TRUE(
        torch::equal(sharded.full_grad("1.weight"), torch::full({2, 2}, part == 0 ? 1.0 : 1.5)));
    EXPECT_TRUE(torch::equal(sharded.full_grad("0.bias"), torch::full({2}, 8.0)));
    const double norm = optimizer.clip_grad_norm_(1e9);
    // 6 weights and 2 biases of (1 * 1 + 2 * 2 + 1 * 3 + 2 * 4) / 4 * 2 = 8 in common.
    EXPECT_FLOAT_EQ(norm, std::sqrt(8 * 64 + 6 * 1.0 + 6 * 2.25));
    optimizer.step();
    const std::string error =
        error_of<c10::NotImplementedError>([&] { save_checkpoint("never", sharded, &optimizer); });
    testing::expect_contains(error, {"'1.weight'", "plan.groups", "Make it a DistTensor"});
  });
}

TEST(Experts, PlansThatDoNotFitAreRefusedOnAllRanks) {
  run_world(4, [](World& world) {
    const auto mesh = DeviceMesh::over_world({2, 2}, {"copies", "parts"});
    const auto error = [&](const std::function<void(ShardPlan&)>& change,
                           bool distribute = true) -> std::string {
      Mixture model;
      if (distribute) model->distribute_experts(mesh.sub_mesh("parts"));
      ShardPlan plan;
      plan.groups = {{"up", mesh.process_group(0)}, {"down", mesh.process_group(0)}};
      change(plan);
      const std::string text = error_of<c10::Error>([&] { fully_shard(model, plan); });
      for (const at::Tensor& parameter : model->parameters()) EXPECT_FALSE(is_sharded(parameter));
      return text;
    };
    using testing::expect_contains;
    expect_contains(error([](ShardPlan& plan) { plan.groups[0].process_group = nullptr; }),
                    {"'up' must have a process group"});
    expect_contains(error([](ShardPlan& plan) { plan.groups[0].names = "middle*"; }),
                    {"plan.groups: 'middle*' fits no parameter"});
    expect_contains(error([](ShardPlan& plan) { plan.unreplicated = {"up"}; }),
                    {"'up' is each rank's own", "plan.groups"});
    // Ranks of the other part.
    expect_contains(
        error([&](ShardPlan& plan) { plan.groups[0].process_group = mesh.process_group(1); }),
        {"'up' must hold the same parts of DistTensors", "part 0 of 2"});
    expect_contains(error([&](ShardPlan& plan) {
                      if (world.rank() % 2 == 1)
                        plan.groups[1].process_group = single_process_group();
                    }),
                    {"the process groups of 'down' must have one size", "2 ranks", "1 ranks"});
    expect_contains(error([&](ShardPlan& plan) {
                      if (world.rank() == 3) plan.groups[1].names = "dow*";
                    }),
                    {"must be the same on all ranks", "plan.groups", "rank 3"});
    expect_contains(error([&](ShardPlan& plan) { plan.process_group = mesh.process_group(1); }),
                    {"'up' must be a part of the ranks that train the model", "of 2"});
    expect_contains(error([](ShardPlan& plan) { plan.groups.pop_back(); }),
                    {"plan.groups can't go with other parameters that are DistTensors"});
    expect_contains(error([&](ShardPlan& plan) {
                      plan.owners = {{"up", 2}};
                      plan.cuts = {{"up"}};
                    }),
                    {"ranks from 0 to 1", "'up'"});
    expect_contains(error([&](ShardPlan& plan) {
                      plan.process_group = mesh.process_group(1);
                      plan.replicate_group = mesh.process_group(0);
                      plan.outer = OuterStep{.every = 2};
                    }),
                    {"plan.groups can't go with outer or mesh_dim"});
  });
}

}  // namespace
}  // namespace tessera
