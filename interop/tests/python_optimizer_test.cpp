// Training that goes on in C++ after steps in Python, and the other way round.
#include <tessera/interop/load_safetensors.h>

#include <random>

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

/// The names of the parameters of order.pt, in its optimizer's order.
const std::vector<std::string> kOrder = {"first.weight", "norm.bias", "norm.weight", "first.bias",
                                         "last.weight"};

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
      said_ = run_python(script(), {"save", directory_});
    }
    if (said_ == "no torch\n") GTEST_SKIP() << "the Python that CMake found has no PyTorch";
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
    const ScratchDirectory scratch;
    import_checkpoint(file(kind + ".pt"), scratch / "one", {.optimizer_key = "optimizer"});
    const CheckpointSummary summary = inspect_checkpoint(scratch / "one");
    EXPECT_EQ(summary.optimizer, kind);
    EXPECT_EQ(summary.optimizer_steps, kind == "SGD" ? 0 : 3);
    expect_goes_on(scratch / "one", kind, kind + ".after.pt");
  }
}

TEST_F(CheckpointPythonOptimizer, TrainingGoesOnFromADcpDirectory) {
  for (const std::string& kind : kKinds) {
    const ScratchDirectory scratch;
    import_checkpoint(file(kind + ".dcp"), scratch / "one", {.optimizer_key = "optim"});
    EXPECT_EQ(inspect_checkpoint(scratch / "one").optimizer, kind);
    expect_goes_on(scratch / "one", kind, kind + ".after.pt");
  }
}

TEST_F(CheckpointPythonOptimizer, BothFormatsGiveTheSameCheckpoint) {
  const ScratchDirectory scratch;
  import_checkpoint(file("AdamW.pt"), scratch / "torch", {.optimizer_key = "optimizer"});
  import_checkpoint(file("AdamW.dcp"), scratch / "dcp", {.optimizer_key = "optim"});
  EXPECT_EQ(compare_checkpoints(scratch / "torch", scratch / "dcp"), std::vector<std::string>());
}

TEST_F(CheckpointPythonOptimizer, PythonGoesOnFromAnExport) {
  const ScratchDirectory scratch;
  std::map<std::string, std::vector<NamedTensor>> expected;
  for (const std::string& kind : kKinds) {
    import_checkpoint(file(kind + ".pt"), scratch / "first", {.optimizer_key = "optimizer"});
    run_world(2, [&](World& world) {
      NetJob job(kind);
      load_checkpoint(scratch / "first", job.sharded, &job.optimizer);
      save_checkpoint(scratch / "one", job.sharded, &job.optimizer);
      train(*job.net, job.optimizer, 3, 6);
      const auto state = job.sharded.full_state();
      if (world.rank() == 0) expected[kind] = state;
    });
    export_checkpoint(scratch / "one", scratch / (kind + ".pt"), {.optimizer_key = "optimizer"});
    export_checkpoint(scratch / "one", scratch / (kind + ".dcp"),
                      {.format = ExportFormat::kDcp, .optimizer_key = "optim"});
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
  const ScratchDirectory scratch;
  import_checkpoint(file("tied.dcp"), scratch / "one", {.optimizer_key = "optim"});
  std::map<std::string, torch::Tensor> expected;
  const auto plain = on_test_device(std::make_shared<Tied>());
  load_safetensors(file("tied.after.pt"), *plain);
  for (const auto& [name, value] : plain_state(*plain)) expected[name] = value.cpu();
  run_world(2, [&](World&) {
    const auto net = on_test_device(std::make_shared<Tied>());
    auto sharded = fully_shard(net, {.unit_bytes = 100});
    torch::optim::AdamW inner(net->parameters(), torch::optim::AdamWOptions(1));
    ShardedOptimizer optimizer(sharded, inner);
    load_checkpoint(scratch / "one", sharded, &optimizer);
    train(*net, optimizer, 3, 6);
    expect_close(sharded.full_state(), expected, "tied");
  });
}

TEST_F(CheckpointPythonOptimizer, ExportsAreImportedAgain) {
  const ScratchDirectory scratch;
  import_checkpoint(file("AdamW.pt"), scratch / "one", {.optimizer_key = "optimizer"});
  export_checkpoint(scratch / "one", scratch / "one.pt",
                    {.rename = {{"^first", "1st"}}, .model_key = "net", .optimizer_key = "opt"});
  import_checkpoint(scratch / "one.pt", scratch / "two",
                    {.rename = {{"^1st", "first"}}, .model_key = "net", .optimizer_key = "opt"});
  EXPECT_EQ(compare_checkpoints(scratch / "one", scratch / "two"), std::vector<std::string>());
  export_checkpoint(scratch / "one", scratch / "dcp",
                    {.format = ExportFormat::kDcp, .optimizer_key = "opt"});
  import_checkpoint(scratch / "dcp", scratch / "three", {.optimizer_key = "opt"});
  EXPECT_EQ(compare_checkpoints(scratch / "one", scratch / "three"), std::vector<std::string>());
}

TEST_F(CheckpointPythonOptimizer, ParamGroupsAreKeptWhereTheirParametersHaveNames) {
  const ScratchDirectory scratch;
  import_checkpoint(file("groups.pt"), scratch / "torch", {.optimizer_key = "optimizer"});
  import_checkpoint(file("flat.dcp"), scratch / "dcp", {.optimizer_key = "optim"});
  const auto expected = read_model(file("groups.after.pt"));
  // Parameters of a DCP directory with flattened options are grouped by them, in the model's order.
  for (const std::string name : {"torch", "dcp"}) {
    run_world(2, [&](World&) {
      const auto net = make_net();
      auto sharded = fully_shard(net, {.unit_bytes = 200});
      const auto all = net->parameters();
      const std::vector<torch::Tensor> odd = {all[1], all[3]}, even = {all[0], all[2], all[4]};
      torch::optim::AdamW inner(name == "torch" ? Params{{odd}, {even}} : Params{{even}, {odd}},
                                torch::optim::AdamWOptions(1));
      ShardedOptimizer optimizer(sharded, inner);
      load_checkpoint(scratch / name, sharded, &optimizer);
      train(*net, optimizer, 3, 6);
      expect_close(sharded.full_state(), expected, name);
    });
  }
}

TEST_F(CheckpointPythonOptimizer, NamesAreGivenForAFileWithoutThem) {
  const ScratchDirectory scratch;
  import_checkpoint(file("order.pt"), scratch / "order",
                    {.optimizer_key = "optimizer", .optimizer_params = kOrder});
  expect_goes_on(scratch / "order", "SGD", "order.after.pt");
  import_checkpoint(file("nameless.pt"), scratch / "nameless",
                    {.optimizer_key = "optimizer",
                     .optimizer_params = {"first.bias", "norm.bias", "first.weight", "norm.weight",
                                          "last.weight"}});
  import_checkpoint(file("groups.pt"), scratch / "named", {.optimizer_key = "optimizer"});
  EXPECT_EQ(compare_checkpoints(scratch / "nameless", scratch / "named"),
            std::vector<std::string>());
}

TEST_F(CheckpointPythonOptimizer, TheClassOfAnOlderFileIsGiven) {
  const ScratchDirectory scratch;
  ImportOptions options{.optimizer_key = "optimizer"};
  expect_contains(error_of([&] { import_checkpoint(file("old.pt"), scratch / "one", options); }),
                  {"[import_checkpoint]", "old.pt'", "Adam or AdamW", "options.optimizer_class"});
  options.optimizer_class = "AdamW";
  import_checkpoint(file("old.pt"), scratch / "one", options);
  import_checkpoint(file("AdamW.pt"), scratch / "two", {.optimizer_key = "optimizer"});
  EXPECT_EQ(compare_checkpoints(scratch / "one", scratch / "two"), std::vector<std::string>());
}

TEST_F(CheckpointPythonOptimizer, WhatIsNotKnownForSureIsRefused) {
  const ScratchDirectory scratch;
  const auto error = [&](const std::string& name, const ImportOptions& options) {
    return error_of([&] { import_checkpoint(file(name), scratch / "one", options); });
  };
  const ImportOptions both{.optimizer_key = "optimizer"};
  for (const std::string name : {"order.pt", "nameless.pt", "frozen.pt"})
    expect_contains(error(name, both),
                    {name + "'", "no names of them", "named_parameters()", "--optimizer-params"});
  const auto with_names = [](const std::vector<std::string>& names) {
    return ImportOptions{.optimizer_key = "optimizer", .optimizer_params = names};
  };
  expect_contains(error("frozen.pt", with_names({"first.weight"})), {"2 parameters and 1 names"});
  expect_contains(error("frozen.pt", with_names({"first.weight", "last.weight", "norm.bias"})),
                  {"options.optimizer_params", "expected 2 names, got 3"});
  expect_contains(error("frozen.pt", with_names({"first.weight", "last"})), {"'last'", "has not"});
  expect_contains(error("frozen.pt", with_names({"last.weight", "first.weight"})),
                  {"'last.weight' must have its shape, [4, 8]; got [8, 6]"});
  expect_contains(error("groups.pt", with_names(kOrder)), {"leave options.optimizer_params out"});
  expect_contains(error("AdamW.pt", {.optimizer_params = kOrder}), {"options.optimizer_key"});
  expect_contains(error("nadam.pt", both),
                  {"nadam.pt'", "Adagrad, Adam, AdamW, RMSprop or SGD", "momentum_decay"});
  expect_contains(error("AdamW.pt", {.optimizer_key = "optim"}),
                  {"AdamW.pt'", "it has no 'optim'"});
  expect_contains(error("AdamW.pt", {.model_key = "net"}), {"no tensors under the key 'net'"});
  expect_contains(error("AdamW.pt", {.optimizer_key = "optimizer", .optimizer_class = "SGD"}),
                  {"AdamW.pt'", "'momentum' of SGD"});
  expect_contains(error("AdamW.pt", {.optimizer_class = "SGD"}), {"needs options.optimizer_key"});
  EXPECT_EQ(names_in(scratch.path()), std::vector<std::string>());
}

TEST_F(CheckpointPythonOptimizer, DamagedDcpDirectoriesAreRefusedByName) {
  const ScratchDirectory scratch;
  const auto damaged = [&](const std::string& name,
                           const std::function<void(std::string&)>& change) {
    const fs::path copy = scratch / "copy";
    fs::remove_all(copy);
    fs::copy(file("SGD.dcp"), copy);
    std::string bytes = read_text(copy / name);
    change(bytes);
    std::ofstream(copy / name, std::ios::binary) << bytes;
    return error_of([&] { import_checkpoint(copy, scratch / "one", {.optimizer_key = "optim"}); });
  };
  expect_contains(damaged(".metadata", [](std::string& bytes) { bytes.resize(bytes.size() / 2); }),
                  {"copy/.metadata'", "must be the metadata"});
  expect_contains(
      damaged("__0_0.distcp", [](std::string& bytes) { bytes.resize(bytes.size() / 2); }),
      {"copy/.metadata'", "'__0_0.distcp' is cut off"});
  expect_contains(damaged(".metadata",
                          [](std::string& bytes) {
                            const size_t at = bytes.find("__0_0.distcp");
                            bytes.replace(at, 12, "../../secret");
                          }),
                  {"must be the name of a file"});
  const std::string storage = damaged("__0_0.distcp", [](std::string& bytes) {
    for (size_t at = 0; (at = bytes.find("FloatStorage", at)) != std::string::npos; ++at)
      bytes.replace(at, 12, "OtherStorage");
  });
  expect_contains(storage, {"copy/__0_0.distcp'", "OtherStorage"});
  EXPECT_EQ(names_in(scratch.path()), std::vector<std::string>{"copy"});
}

TEST_F(CheckpointPythonOptimizer, DamagedBytesAreReadOrRefused) {
  const ScratchDirectory scratch;
  std::mt19937 random(1);
  int refused = 0;
  for (int i = 0; i < 200; ++i) {
    const bool is_dcp = i % 2 == 0;
    const fs::path copy = scratch / "copy";
    fs::remove_all(copy);
    fs::copy(file(is_dcp ? "SGD.dcp" : "SGD.pt"), copy);
    const fs::path target = is_dcp ? copy / (i % 4 == 0 ? ".metadata" : "__0_0.distcp") : copy;
    std::string bytes = read_text(target);
    for (int change = 0; change < 4; ++change)
      bytes[random() % bytes.size()] = static_cast<char>(random());
    std::ofstream(target, std::ios::binary) << bytes;
    const std::string error = error_of([&] {
      import_checkpoint(copy, scratch / "one", {.optimizer_key = is_dcp ? "optim" : "optimizer"});
    });
    if (error.empty()) continue;
    ++refused;
    EXPECT_NE(error.find("copy"), std::string::npos) << error;
  }
  EXPECT_GT(refused, 20);
}

}  // namespace python_optimizer_test
}  // namespace tessera::testing
