// Checkpoints of DistTensors, exchanged with all other layouts.
#include <fmt/format.h>

#include "checkpoint/tests/saved_model.h"

namespace tessera::testing::dist_test {

using torch::optim::AdamW;

/// A layout of a model: the number of ranks, and the placements of its parameters.
struct Layout {
  std::string name;
  int ranks;
  std::vector<int64_t> mesh;      // empty: no DistTensors
  Placements matrix, vector;      // of parameters with two dims and one
  std::optional<ShardPlan> plan;  // none: not sharded
};

ShardPlan plan_of(ShardLevel level, Partition partition = Partition::kFlatEven) {
  return {.level = level, .partition = partition, .unit_bytes = 700};
}

const std::vector<Layout>& layouts() {
  const auto level = [](const char* name, int ranks, ShardPlan plan) {
    return Layout{fmt::format("{} on {}", name, ranks), ranks, {}, {}, {}, std::move(plan)};
  };
  const auto dist = [](const char* name, std::vector<int64_t> mesh, Placements matrix,
                       Placements vector) {
    int64_t ranks = 1;
    for (const int64_t size : mesh) ranks *= size;
    return Layout{fmt::format("{} on {}", name, ranks),
                  static_cast<int>(ranks),
                  std::move(mesh),
                  std::move(matrix),
                  std::move(vector),
                  std::nullopt};
  };
  static const std::vector<Layout> kLayouts = [&] {
    std::vector<Layout> all;
    for (const int ranks : {1, 2, 3, 4}) {
      all.push_back(level("none", ranks, plan_of(ShardLevel::kNone)));
      all.push_back(level("os", ranks, plan_of(ShardLevel::kOptimizerState)));
      all.push_back(
          level("os_g whole", ranks, plan_of(ShardLevel::kGradients, Partition::kWholeParam)));
      all.push_back(level("p_g_os", ranks, plan_of(ShardLevel::kParameters)));
      all.push_back(
          level("p_g_os whole", ranks, plan_of(ShardLevel::kParameters, Partition::kWholeParam)));
      all.push_back(dist("replicated", {ranks}, {Replicate{}}, {Replicate{}}));
      all.push_back(dist("rows", {ranks}, {Shard{0}}, {Shard{0}}));
      all.push_back(dist("columns", {ranks}, {Shard{1}}, {Replicate{}}));
    }
    all.push_back(dist("rows x columns", {2, 2}, {Shard{0}, Shard{1}}, {Replicate{}, Shard{0}}));
    all.push_back(dist("columns x rows", {2, 2}, {Shard{1}, Shard{0}}, {Shard{0}, Shard{0}}));
    all.push_back(dist("rows, twice", {2, 2}, {Shard{0}, Shard{0}}, {Shard{0}, Replicate{}}));
    all.push_back(dist("blocks of rows", {2}, {Shard{0, 3}}, {Replicate{}}));
    all.push_back(dist("blocks of columns", {2}, {Shard{1, 2}}, {Replicate{}}));
    all.push_back({"hybrid on 4", 4, {}, {}, {}, plan_of(ShardLevel::kParameters)});
    // Parts of DistTensors, sharded along the mesh dim on which the matrices are replicated.
    const auto both = [&](const char* name, std::vector<int64_t> mesh, Placements matrix,
                          ShardPlan plan) {
      all.push_back(dist(name, std::move(mesh), std::move(matrix), {Replicate{}, Replicate{}}));
      plan.mesh_dim = all.back().matrix[0] == Placement(Replicate{}) ? 0 : 1;
      all.back().plan = std::move(plan);
    };
    both("none x columns", {2, 2}, {Replicate{}, Shard{1}}, plan_of(ShardLevel::kNone));
    both("os x columns", {2, 2}, {Replicate{}, Shard{1}}, plan_of(ShardLevel::kOptimizerState));
    both("os_g x rows", {2, 2}, {Shard{0}, Replicate{}}, plan_of(ShardLevel::kGradients));
    both("whole x columns", {2, 2}, {Replicate{}, Shard{1}},
         plan_of(ShardLevel::kParameters, Partition::kWholeParam));
    both("os x 1 of columns", {4, 1}, {Replicate{}, Shard{1}},
         plan_of(ShardLevel::kOptimizerState));
    both("1 of p_g_os x columns", {1, 4}, {Replicate{}, Shard{1}},
         plan_of(ShardLevel::kParameters));
    both("1 of os x columns", {1, 3}, {Replicate{}, Shard{1}},
         plan_of(ShardLevel::kOptimizerState));
    both("p_g_os x 1 of rows", {1, 2}, {Shard{0}, Replicate{}}, plan_of(ShardLevel::kParameters));
    both("1 of os_g x columns", {1, 1}, {Replicate{}, Shard{1}}, plan_of(ShardLevel::kGradients));
    both("p_g_os x columns", {2, 2}, {Replicate{}, Shard{1}}, plan_of(ShardLevel::kParameters));
    return all;
  }();
  return kLayouts;
}

// Sizes that few numbers divide; 12 rows, so that blocks can be cut.
struct Net : torch::nn::Module {
  Net() {
    first = register_module("first", torch::nn::Linear(8, 12));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({12})));
    last = register_module("last", torch::nn::Linear(12, 12));
    count = register_buffer("count", torch::zeros({3}));
  }
  torch::Tensor forward(const torch::Tensor& x) { return last(norm(torch::relu(first(x)))); }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::Tensor count;
};

/// A model in a layout, with an optimizer that has state.
class Job {
 public:
  Job(const Layout& layout, const World& world, uint64_t seed, int steps) : layout_(layout) {
    manual_seed(seed);
    net_ = on_test_device(std::make_shared<Net>());
    net_->count.fill_(static_cast<double>(seed));
    if (!layout.mesh.empty()) place(DeviceMesh::over_world(world, layout.mesh));
    adamw_.emplace(net_->parameters(), torch::optim::AdamWOptions(0.01));
    if (layout.plan) shard(world);
    fill(seed, steps);
  }

  void save(const std::filesystem::path& path, bool whole = false) {
    const SaveOptions options{.numbers = {{"step", 3}}, .whole_parameters = whole};
    layout_.plan ? save_checkpoint(path, *sharded_, &*optimizer_, options)
                 : save_checkpoint(path, *net_, &*adamw_, options);
  }
  void load(const std::filesystem::path& path) {
    const auto loaded = layout_.plan ? load_checkpoint(path, *sharded_, &*optimizer_)
                                     : load_checkpoint(path, *net_, &*adamw_);
    EXPECT_EQ(loaded.numbers.at("step"), 3);
  }

 private:
  void place(const DeviceMesh& mesh) {
    for (auto& parameter : net_->parameters())
      distribute_(parameter, mesh, parameter.dim() == 2 ? layout_.matrix : layout_.vector);
    distribute_(net_->count, mesh, {});
  }

  void shard(const World& world) {
    ShardPlan plan = *layout_.plan;
    if (layout_.name == "hybrid on 4") {
      const auto groups = world.hybrid_process_groups(2);
      plan.process_group = groups.shard, plan.replicate_group = groups.replicate;
    }
    sharded_.emplace(fully_shard(net_, plan));
    optimizer_.emplace(*sharded_, *adamw_);
  }

  // Takes steps, so that the optimizer has state with values unlike the parameters'.
  void fill(uint64_t seed, int steps) {
    auto generator = at::detail::createCPUGenerator(seed);
    torch::Tensor x = on_test_device(torch::randn({4, 8}, generator));
    if (!layout_.mesh.empty()) x = distribute(x, mesh_of(net_->first->weight), {});
    for (int step = 0; step < steps; ++step) {
      layout_.plan ? optimizer_->zero_grad() : adamw_->zero_grad();
      net_->forward(x).pow(2).mean().backward();
      if (layout_.plan) {
        optimizer_->step();
      } else {
        adamw_->step();
      }
    }
  }

  const Layout& layout_;
  std::shared_ptr<Net> net_;
  std::optional<AdamW> adamw_;
  std::optional<Sharded<Net>> sharded_;
  std::optional<ShardedOptimizer> optimizer_;
};

// A checkpoint that is loaded into another layout and saved again holds the bits of the first one.
// The jobs that load have taken another number of steps. Tries one of `parts` of the layouts that
// could load, so that each loads something.
void expect_loads(int saved_on, size_t parts) {
  const ScratchDirectory scratch;
  for (size_t i = 0; i < layouts().size(); ++i) {
    const Layout& from = layouts()[i];
    if (from.ranks != saved_on) continue;
    std::vector<const Layout*> all;
    for (size_t j = 0; j < layouts().size(); ++j)
      if ((i + j) % parts == 0) all.push_back(&layouts()[j]);
    run_world(from.ranks, [&](World& world) { Job(from, world, 1, 2).save(scratch / "first"); });
    ASSERT_EQ(verify_checkpoint(scratch / "first"), std::vector<std::string>()) << from.name;
    for (const int ranks : {1, 2, 3, 4}) {
      run_world(ranks, [&](World& world) {
        for (const Layout* to : all) {
          if (to->ranks != ranks) continue;
          Job job(*to, world, 2, 1);
          job.load(scratch / "first");
          job.save(scratch / to->name);
        }
      });
    }
    for (const Layout* to : all) {
      std::vector<std::string> differences =
          compare_checkpoints(scratch / "first", scratch / to->name);
      // A plain optimizer does not count its own steps; the steps of its parameters are compared.
      std::erase_if(differences,
                    [](const auto& line) { return line.starts_with("optimizer steps"); });
      EXPECT_EQ(differences, std::vector<std::string>()) << from.name << " -> " << to->name;
    }
  }
}

class CheckpointMatrixSlow : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(SavedOn, CheckpointMatrixSlow, ::testing::Values(1, 2, 3, 4));
TEST_P(CheckpointMatrixSlow, EveryThirdLayoutLoadsWhatEveryOtherSaved) {
  expect_loads(GetParam(), 3);
}

class CheckpointMatrixNightly : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(SavedOn, CheckpointMatrixNightly, ::testing::Values(1, 2, 3, 4));
TEST_P(CheckpointMatrixNightly, EveryLayoutLoadsWhatEveryOtherSaved) {
  expect_loads(GetParam(), 1);
}

TEST(CheckpointDist, WholeParametersAreThoseOfTheParts) {
  const ScratchDirectory scratch;
  const Layout& layout = layouts().back();
  ASSERT_EQ(layout.name, "p_g_os x columns on 4");
  run_world(layout.ranks, [&](World& world) {
    Job job(layout, world, 1, 2);
    job.save(scratch / "parts");
    job.save(scratch / "whole", true);
  });
  EXPECT_EQ(compare_checkpoints(scratch / "parts", scratch / "whole"), std::vector<std::string>());
  EXPECT_EQ(verify_checkpoint(scratch / "whole"), std::vector<std::string>());
}

TEST(CheckpointDist, EachValueIsStoredOnceAndReplicasTakeTurns) {
  const ScratchDirectory scratch;
  run_world(4, [&](World& world) {
    const auto mesh = DeviceMesh::over_world(world, {2, 2});
    StateDict state;
    for (int i = 0; i < 8; ++i)
      state[fmt::format("rows{}", i)] =
          distribute(on_test_device(torch::full({6, 5}, i)), mesh, {Replicate{}, Shard{0}});
    save_state_dict(scratch / "one", state);
  });
  int64_t stored = 0;
  std::map<std::string, int64_t> by_file;
  const auto index = read_index(scratch / "one");
  for (const auto& tensor : index.at("tensors")) {
    for (const auto& chunk : tensor.at("chunks")) {
      const int64_t numel = chunk.at("end").get<int64_t>() - chunk.at("begin").get<int64_t>();
      stored += numel;
      by_file[chunk.at("file")] += numel;
    }
  }
  EXPECT_EQ(stored, 8 * 30);
  EXPECT_EQ(by_file.size(), 4u);
  for (const auto& [file, numel] : by_file) EXPECT_EQ(numel, 60) << file;
}

TEST(CheckpointDist, PartialTensorsAreRefusedByName) {
  const ScratchDirectory scratch;
  run_world(2, [&](World& world) {
    const auto mesh = DeviceMesh::over_world(world);
    const StateDict state = {
        {"terms", from_local(torch::ones({2}, test_device()), mesh, {Partial{}})}};
    expect_contains(error_of([&] { save_state_dict(scratch / "one", state); }),
                    {"'terms' is [Partial(sum)]", "redistribute()"});
  });
  EXPECT_TRUE(names_in(scratch / "").empty());
}

}  // namespace tessera::testing::dist_test
