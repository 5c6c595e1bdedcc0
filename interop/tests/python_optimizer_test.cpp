// Training that goes on in C++ after steps in Python, and the other way round.
#include <tessera/interop/load_safetensors.h>

#include <cstdlib>

#include "checkpoint/tests/python_lines.h"
#include "checkpoint/tests/saved_model.h"

namespace tessera::testing {
namespace python_optimizer_test {

namespace fs = std::filesystem;

/// That of exchange_optimizer.py.
struct Net : torch::nn::Module {
  Net() {
    first = register_module("first", torch::nn::Linear(6, 8));
    norm = register_module("norm", torch::nn::BatchNorm1d(8));
    last = register_module("last", torch::nn::Linear(torch::nn::LinearOptions(8, 4).bias(false)));
  }
  torch::Tensor forward(const torch::Tensor& x) { return last(norm(torch::tanh(first(x)))); }
  torch::nn::Linear first{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear last{nullptr};
};

std::shared_ptr<Net> make_net() {
  manual_seed(2);
  return on_test_device(std::make_shared<Net>());
}

template <class Module>
void train(Module& net, ShardedOptimizer& optimizer, int64_t from, int64_t to) {
  for (int64_t step = from; step < to; ++step) {
    const torch::Tensor numbers = torch::arange(30.).view({5, 6}) + step;
    optimizer.zero_grad();
    const torch::Tensor x = on_test_device(torch::sin(numbers));
    const torch::Tensor y = on_test_device(torch::cos(numbers.narrow(1, 0, 4)));
    torch::mse_loss(net.forward(x), y).backward();
    optimizer.step();
  }
}

using Params = std::vector<torch::optim::OptimizerParamGroup>;
using OptimizerPtr = std::shared_ptr<torch::optim::Optimizer>;

const std::vector<std::string> kKinds = {"AdamW", "Adam", "SGD", "Adagrad", "RMSprop"};

/// An optimizer of the script's class, with other options than the script's.
OptimizerPtr make_optimizer(const std::string& kind, const Params& params) {
  if (kind == "AdamW")
    return std::make_shared<torch::optim::AdamW>(params, torch::optim::AdamWOptions(1));
  if (kind == "Adam")
    return std::make_shared<torch::optim::Adam>(params, torch::optim::AdamOptions(1));
  if (kind == "SGD")
    return std::make_shared<torch::optim::SGD>(params, torch::optim::SGDOptions(1));
  if (kind == "Adagrad")
    return std::make_shared<torch::optim::Adagrad>(params, torch::optim::AdagradOptions(1));
  return std::make_shared<torch::optim::RMSprop>(params, torch::optim::RMSpropOptions(1));
}

/// A sharded Net with its optimizer.
struct NetJob {
  explicit NetJob(const std::string& kind)
      : net(make_net()),
        sharded(fully_shard(net, {.unit_bytes = 200})),
        inner(make_optimizer(kind, {net->parameters()})),
        optimizer(sharded, *inner) {}

  std::shared_ptr<Net> net;
  Sharded<Net> sharded;
  OptimizerPtr inner;
  ShardedOptimizer optimizer;
};

/// The state dict in a file of torch.save.
std::map<std::string, torch::Tensor> read_model(const fs::path& file) {
  const auto net = make_net();
  load_safetensors(file, *net);
  std::map<std::string, torch::Tensor> state;
  for (const auto& [name, value] : plain_state(*net)) state[name] = value.cpu();
  return state;
}

void expect_close(const std::vector<NamedTensor>& state,
                  const std::map<std::string, torch::Tensor>& expected, const std::string& what) {
  EXPECT_EQ(state.size(), expected.size()) << what;
  for (const auto& [name, value] : state)
    EXPECT_TRUE(torch::allclose(value.cpu(), expected.at(name), 1e-5, 1e-6))
        << what << ": " << name << "\n"
        << value << "\n"
        << expected.at(name);
}

class CheckpointPythonOptimizer : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::string(TESSERA_PYTHON).empty()) GTEST_SKIP() << "CMake found no Python";
    if (directory_.empty()) {
      directory_ =
          fs::temp_directory_path() / fmt::format("tessera_python_optimizer.{}", ::getpid());
      fs::create_directories(directory_);
      ::setenv("PYTHONPATH", PYTHON_PACKAGE, /*overwrite=*/1);
      said_ = run_python(script(), {"save", directory_});
    }
    if (said_ == "no torch\n") GTEST_SKIP() << "the Python that CMake found has no PyTorch";
    if (said_ == "no tessera\n") GTEST_SKIP() << "the Python package was not built";
    ASSERT_EQ(said_, "");
  }
  static void TearDownTestSuite() {
    if (!directory_.empty()) fs::remove_all(directory_);
  }
  static std::string script() {
    return (fs::path(EXCHANGE_SCRIPT).parent_path() / "exchange_optimizer.py").string();
  }
  static fs::path file(const std::string& name) { return directory_ / name; }

  /// Expects that training goes on from the checkpoint as Python's did.
  static void expect_goes_on(const fs::path& checkpoint, const std::string& kind,
                             const std::string& after) {
    const auto expected = read_model(file(after));
    for (const int ranks : {1, 2, 3}) {
      run_world(ranks, [&](World&) {
        NetJob job(kind);
        load_checkpoint(checkpoint, job.sharded, &job.optimizer);
        train(*job.net, job.optimizer, 3, 6);
        expect_close(job.sharded.full_state(), expected, fmt::format("{}, {} ranks", kind, ranks));
      });
    }
  }

 private:
  static inline fs::path directory_;
  static inline std::string said_;
};

TEST_F(CheckpointPythonOptimizer, TrainingGoesOnFromAFileOfTorchSave) {
  for (const std::string& kind : kKinds) {
    const CheckpointSummary summary = inspect_checkpoint(file(kind + ".pt.ckpt"));
    EXPECT_EQ(summary.optimizer, kind);
    EXPECT_EQ(summary.optimizer_steps, kind == "SGD" ? 0 : 3);
    expect_goes_on(file(kind + ".pt.ckpt"), kind, kind + ".after.pt");
  }
}

TEST_F(CheckpointPythonOptimizer, TrainingGoesOnFromADcpDirectory) {
  for (const std::string& kind : kKinds) {
    EXPECT_EQ(inspect_checkpoint(file(kind + ".dcp.ckpt")).optimizer, kind);
    expect_goes_on(file(kind + ".dcp.ckpt"), kind, kind + ".after.pt");
  }
}

TEST_F(CheckpointPythonOptimizer, BothFormatsGiveTheSameCheckpoint) {
  EXPECT_EQ(compare_checkpoints(file("AdamW.pt.ckpt"), file("AdamW.dcp.ckpt")),
            std::vector<std::string>());
}

TEST_F(CheckpointPythonOptimizer, PythonGoesOnFromAnExport) {
  const ScratchDirectory scratch;
  std::map<std::string, std::vector<NamedTensor>> expected;
  for (const std::string& kind : kKinds) {
    run_world(2, [&](World& world) {
      NetJob job(kind);
      load_checkpoint(file(kind + ".pt.ckpt"), job.sharded, &job.optimizer);
      save_checkpoint(scratch / kind, job.sharded, &job.optimizer);
      train(*job.net, job.optimizer, 3, 6);
      const auto state = job.sharded.full_state();
      if (world.rank() == 0) expected[kind] = state;
    });
  }
  EXPECT_EQ(run_python(script(), {"resume", scratch.path()}), "");
  for (const std::string& kind : kKinds)
    for (const std::string& name : {kind + ".pt", kind + ".dcp"})
      expect_close(expected[kind], read_model(scratch / (name + ".after")), name);
}

/// That of exchange_optimizer.py.
struct Tied : torch::nn::Module {
  Tied() {
    first = register_module("first", torch::nn::Linear(6, 6));
    last = register_module("last", std::make_shared<Bag>());
    last->add("weight", first->weight);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::linear(torch::tanh(first(x)), last->parameters()[0]).narrow(1, 0, 4);
  }
  torch::nn::Linear first{nullptr};
  std::shared_ptr<Bag> last;
};

TEST_F(CheckpointPythonOptimizer, CopiesOfATiedParameterInADcpDirectoryAreTied) {
  std::map<std::string, torch::Tensor> expected;
  const auto plain = on_test_device(std::make_shared<Tied>());
  load_safetensors(file("tied.after.pt"), *plain);
  for (const auto& [name, value] : plain_state(*plain)) expected[name] = value.cpu();
  run_world(2, [&](World&) {
    const auto net = on_test_device(std::make_shared<Tied>());
    auto sharded = fully_shard(net, {.unit_bytes = 100});
    torch::optim::AdamW inner(net->parameters(), torch::optim::AdamWOptions(1));
    ShardedOptimizer optimizer(sharded, inner);
    load_checkpoint(file("tied.dcp.ckpt"), sharded, &optimizer);
    train(*net, optimizer, 3, 6);
    expect_close(sharded.full_state(), expected, "tied");
  });
}

TEST_F(CheckpointPythonOptimizer, ParamGroupsAreKeptWhereTheirParametersHaveNames) {
  const auto expected = read_model(file("groups.after.pt"));
  // Parameters of a DCP directory with flattened options are grouped by them, in the model's order.
  for (const std::string name : {"groups.pt", "flat.dcp"}) {
    run_world(2, [&](World&) {
      const auto net = make_net();
      auto sharded = fully_shard(net, {.unit_bytes = 200});
      const auto all = net->parameters();
      const std::vector<torch::Tensor> odd = {all[1], all[3]}, even = {all[0], all[2], all[4]};
      torch::optim::AdamW inner(name == "groups.pt" ? Params{{odd}, {even}} : Params{{even}, {odd}},
                                torch::optim::AdamWOptions(1));
      ShardedOptimizer optimizer(sharded, inner);
      load_checkpoint(file(name + ".ckpt"), sharded, &optimizer);
      train(*net, optimizer, 3, 6);
      expect_close(sharded.full_state(), expected, name);
    });
  }
}

TEST_F(CheckpointPythonOptimizer, NamesAreGivenForAFileWithoutThem) {
  expect_goes_on(file("order.pt.ckpt"), "SGD", "order.after.pt");
  EXPECT_EQ(compare_checkpoints(file("nameless.pt.ckpt"), file("groups.pt.ckpt")),
            std::vector<std::string>());
}

TEST_F(CheckpointPythonOptimizer, TheClassOfAnOlderFileIsGiven) {
  EXPECT_EQ(compare_checkpoints(file("old.pt.ckpt"), file("AdamW.pt.ckpt")),
            std::vector<std::string>());
}

}  // namespace python_optimizer_test
}  // namespace tessera::testing
