// Loading other tools' files into models without a checkpoint in between, and exports as Hugging
// Face lays out its models.
#include <tessera/interop/load_safetensors.h>

#include <regex>

#include "checkpoint/tests/python_lines.h"
#include "checkpoint/tests/saved_job.h"

namespace tessera::testing {
namespace load_safetensors_test {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int64_t kWidth = 12, kLayers = 2, kWords = 20;

struct Block : torch::nn::Module {
  Block() {
    qkv = register_module("qkv", torch::nn::Linear(kWidth, 3 * kWidth));
    out = register_module("out", torch::nn::Linear(kWidth, kWidth));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
  }
  torch::nn::Linear qkv{nullptr}, out{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};

/// A model in the form of GPT-2, with names of its own.
struct Gpt : torch::nn::Module {
  Gpt() {
    words = register_module("words", torch::nn::Embedding(kWords, kWidth));
    for (int64_t i = 0; i < kLayers; ++i)
      register_module(fmt::format("block{}", i), std::make_shared<Block>());
    head = register_parameter("head", words->weight);
  }
  torch::nn::Embedding words{nullptr};
  torch::Tensor head;
};

std::shared_ptr<Gpt> make_gpt(uint64_t seed) {
  manual_seed(seed);
  return on_test_device(std::make_shared<Gpt>());
}

/// How Hugging Face's GPT-2 calls the parameters.
std::vector<NamedTensor> as_hugging_face(const std::vector<NamedTensor>& state) {
  std::vector<NamedTensor> result;
  for (const auto& [name, value] : state) {
    if (name == "head") continue;  // tied
    std::string other = std::regex_replace(name, std::regex("^block(\\d)\\."), "transformer.h.$1.");
    other = std::regex_replace(other, std::regex("qkv"), "attn.c_attn");
    other = std::regex_replace(other, std::regex("out"), "attn.c_proj");
    other = std::regex_replace(other, std::regex("norm"), "ln_1");
    other = std::regex_replace(other, std::regex("^words"), "transformer.wte");
    const bool is_conv1d = value.dim() == 2 && other.find("attn") != std::string::npos;
    result.push_back(
        {other, is_conv1d ? value.detach().cpu().t().contiguous() : value.detach().cpu()});
  }
  for (int64_t i = 0; i < kLayers; ++i)
    result.push_back({fmt::format("transformer.h.{}.attn.bias", i), torch::ones({1, 1, 8, 8})});
  return result;
}

const RenameRules kGptNames = {
    {R"(^transformer\.)", ""},  {R"(^h\.\d+\.attn\.bias$)", ""}, {R"(^h\.(\d+)\.)", "block$1."},
    {R"(attn\.c_attn)", "qkv"}, {R"(attn\.c_proj)", "out"},      {"ln_1", "norm"},
    {"^wte", "words"}};
const std::vector<std::string> kGptTransposed = {R"(block\d\.(qkv|out)\.weight)"};

void write_file(const fs::path& path, const std::vector<NamedTensor>& tensors) {
  json header = json::object();
  std::string data;
  for (const auto& [name, value] : tensors) {
    const torch::Tensor ordered = value.cpu().contiguous();
    const size_t begin = data.size();
    data.append(static_cast<const char*>(ordered.data_ptr()), ordered.nbytes());
    const auto dtype = value.scalar_type();
    header[name] = {{"dtype", dtype == torch::kLong       ? "I64"
                              : dtype == torch::kBFloat16 ? "BF16"
                                                          : "F32"},
                    {"shape", value.sizes().vec()},
                    {"data_offsets", {begin, data.size()}}};
  }
  const std::string text = header.dump();
  const uint64_t length = text.size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&length), 8) << text << data;
}

std::set<std::string> lines_of(const std::vector<NamedTensor>& state) {
  std::set<std::string> lines;
  for (const auto& [name, value] : state) lines.insert(line_of(name, value));
  return lines;
}

/// Expects that modules made by `make` hold these lines after a load: a plain one, and sharded
/// ones.
template <class Make>
void expect_loads(const fs::path& path, const std::set<std::string>& expected, const Make& make,
                  const LoadSafetensorsOptions& options = {}) {
  const auto plain = make();
  load_safetensors(path, *plain, options);
  EXPECT_EQ(lines_of(plain_state(*plain)), expected);
  for (const int ranks : {1, 2, 3}) {
    for (const ShardPlan& plan : plans()) {
      run_world(ranks, [&](World&) {
        auto sharded = fully_shard(make(), plan);
        load_safetensors(path, sharded, options);
        EXPECT_EQ(lines_of(sharded.full_state()), expected) << describe(ranks, plan);
      });
    }
  }
}

TEST(LoadSafetensors, Gpt2IsReadUnderOtherNamesAndTransposed) {
  const ScratchDirectory scratch;
  const auto state = plain_state(*make_gpt(1));
  write_file(scratch / "model.safetensors", as_hugging_face(state));
  const auto make = [] { return make_gpt(2); };
  const LoadSafetensorsOptions options{.rename = kGptNames, .transpose = kGptTransposed};
  expect_loads(scratch / "model.safetensors", lines_of(state), make, options);
  expect_loads(scratch.path(), lines_of(state), make, options);
  // The same as an import.
  import_checkpoint(scratch.path(), scratch / "one",
                    {.rename = kGptNames, .transpose = kGptTransposed});
  const auto gpt = make();
  EXPECT_EQ(load_checkpoint(scratch / "one", *gpt, nullptr, {.allow_missing = true}).missing,
            std::vector<std::string>{"head"});
  EXPECT_EQ(lines_of(plain_state(*gpt)), lines_of(state));
}

TEST(LoadSafetensors, AFunctionRenamesAfterTheRules) {
  const ScratchDirectory scratch;
  const auto state = plain_state(*make_gpt(1));
  std::vector<NamedTensor> stored;
  for (const auto& [name, value] : state) stored.push_back({"net." + name, value});
  stored.push_back({"net.other", torch::zeros({3})});
  write_file(scratch / "a.safetensors", stored);
  const auto strip = [](const std::string& name) {
    EXPECT_FALSE(name.starts_with("net.")) << name;
    return name == "other" ? std::string() : name;
  };
  expect_loads(scratch / "a.safetensors", lines_of(state), [] { return make_gpt(2); },
               {.rename = {{"^net\\.", ""}}, .rename_by = strip});
}

TEST(LoadSafetensors, EverySpecialCaseOfParametersAndBuffersIsRead) {
  const ScratchDirectory scratch;
  const auto state = plain_state(*make_picture(1));
  write_file(scratch / "a.safetensors", state);
  expect_loads(scratch / "a.safetensors", lines_of(state), [] { return make_picture(2); });
}

TEST(LoadSafetensors, HalfPrecisionIsConverted) {
  const ScratchDirectory scratch;
  std::vector<NamedTensor> halves, floats;
  for (const auto& [name, value] : plain_state(*make_gpt(1))) {
    halves.push_back({name, value.to(torch::kBFloat16)});
    floats.push_back({name, halves.back().tensor.to(torch::kFloat)});
  }
  write_file(scratch / "a.safetensors", halves);
  expect_loads(scratch / "a.safetensors", lines_of(floats), [] { return make_gpt(2); });
}

TEST(LoadSafetensors, DistTensorsReadTheirBoxes) {
  const ScratchDirectory scratch;
  const torch::Tensor value = torch::arange(96.).view({8, 12});
  write_file(scratch / "a.safetensors", {{"w", value}, {"turned", value.t().contiguous()}});
  run_world(4, [&](World& world) {
    const auto mesh = DeviceMesh::over_world(world, {2, 2});
    auto bag = std::make_shared<Bag>();
    for (const char* name : {"w", "turned"})
      bag->add(name, distribute(on_test_device(torch::zeros({8, 12})), mesh, {Shard{1}, Shard{0}}));
    load_safetensors(scratch / "a.safetensors", *bag, {.transpose = {"turned"}});
    for (const auto& item : bag->named_parameters())
      EXPECT_TRUE(torch::equal(full_tensor(item.value()).cpu(), value)) << item.key();
  });
}

int64_t bytes_read() {
  std::ifstream file("/proc/self/io");
  std::string name;
  int64_t count = 0;
  file >> name >> count;  // rchar
  return count;
}

TEST(LoadSafetensors, RanksReadTheirOwnBytes) {
  const ScratchDirectory scratch;
  const auto make = [](double value) {
    auto bag = std::make_shared<Bag>();
    for (int i = 0; i < 8; ++i) bag->add(fmt::format("w{}", i), torch::full({500, 500}, value + i));
    return on_test_device(bag);
  };
  write_file(scratch / "a.safetensors", plain_state(*make(1)));
  const auto size = static_cast<int64_t>(fs::file_size(scratch / "a.safetensors"));
  int64_t before = 0, after = 0;
  run_world(4, [&](World& world) {
    auto sharded = fully_shard(make(0), {.unit_bytes = 1 << 20});
    default_process_group()->barrier({"test"});
    if (world.rank() == 0) before = bytes_read();
    default_process_group()->barrier({"test"});
    load_safetensors(scratch / "a.safetensors", sharded);
    default_process_group()->barrier({"test"});
    if (world.rank() == 0) after = bytes_read();
  });
  EXPECT_GE(after - before, size - 1000);
  EXPECT_LE(after - before, size + size / 4);
}

TEST(LoadSafetensors, DifferencesAreListedOnEveryRankAndNothingChanges) {
  const ScratchDirectory scratch;
  auto stored = as_hugging_face(plain_state(*make_gpt(1)));
  std::erase_if(stored, [](const auto& item) { return item.name.ends_with("1.ln_1.bias"); });
  write_file(scratch / "a.safetensors", stored);
  run_world(3, [&](World&) {
    auto sharded = fully_shard(make_gpt(2), {.unit_bytes = 1000});
    const auto before = lines_of(sharded.full_state());
    const std::string all = error_of([&] { load_safetensors(scratch / "a.safetensors", sharded); });
    expect_contains(all, {"[load_safetensors]", "a.safetensors' must fit the model",
                          "missing in the files: ", "not in the model: ", "options.rename"});
    const LoadSafetensorsOptions names{.rename = kGptNames};
    const std::string some =
        error_of([&] { load_safetensors(scratch / "a.safetensors", sharded, names); });
    expect_contains(some,
                    {"missing in the files: 'block1.norm.bias' [12]",
                     "other shapes or dtypes: 'block0.qkv.weight' has the shape [36, 12] (the "
                     "checkpoint's: [12, 36])"});
    EXPECT_EQ(some.find("not in the model"), std::string::npos) << some;
    EXPECT_EQ(lines_of(sharded.full_state()), before);
  });
}

TEST(LoadSafetensors, AMissingNameIsShownWithTheMostSimilarOne) {
  const ScratchDirectory scratch;
  write_file(scratch / "a.safetensors",
             {{"encoder.weight_", torch::zeros({2})}, {"something else", torch::zeros({2})}});
  auto bag = std::make_shared<Bag>();
  bag->add("encoder_weight", torch::ones({2}));
  on_test_device(bag);
  expect_contains(error_of([&] { load_safetensors(scratch / "a.safetensors", *bag); }),
                  {"'encoder_weight' [2] (similar: 'encoder.weight_')", "'something else'"});
  const LoadedTensors loaded = load_safetensors(scratch / "a.safetensors", *bag,
                                                {.allow_missing = true, .allow_unexpected = true});
  EXPECT_EQ(loaded.missing, std::vector<std::string>{"encoder_weight"});
  EXPECT_EQ(loaded.unexpected.size(), 2u);
  EXPECT_TRUE(torch::equal(bag->parameters()[0].cpu(), torch::ones({2})));
}

TEST(LoadSafetensors, CopiesOfATiedTensorMustBeEqual) {
  const ScratchDirectory scratch;
  auto stored = plain_state(*make_gpt(1));
  const auto expected = lines_of(stored);
  for (NamedTensor& item : stored)
    if (item.name == "head") item.tensor = item.tensor.clone();
  write_file(scratch / "same.safetensors", stored);
  expect_loads(scratch / "same.safetensors", expected, [] { return make_gpt(2); });
  for (NamedTensor& item : stored)
    if (item.name == "head") item.tensor = item.tensor + 1;
  write_file(scratch / "other.safetensors", stored);
  const auto gpt = make_gpt(2);
  expect_contains(error_of([&] { load_safetensors(scratch / "other.safetensors", *gpt); }),
                  {"the model ties", "'head'", "'words.weight'", "they differ"});
}

TEST(LoadSafetensors, OptionsAreChecked) {
  const ScratchDirectory scratch;
  const auto gpt = make_gpt(1);
  write_file(scratch / "a.safetensors", plain_state(*gpt));
  const auto error = [&](const LoadSafetensorsOptions& options) {
    return error_of([&] { load_safetensors(scratch / "a.safetensors", *gpt, options); });
  };
  expect_contains(error({.rename = {{"(", ""}}}), {"options.rename", "'('"});
  expect_contains(error({.transpose = {"[a"}}), {"options.transpose", "'[a'"});
  expect_contains(error({.transpose = {".*bias"}}),
                  {"options.transpose", "must have two dims", "[36]"});
  expect_contains(error({.rename = {{"block1", "block0"}}}), {"get the name 'block0."});
  expect_contains(error_of([&] { load_safetensors(scratch / "none.safetensors", *gpt); }),
                  {"none.safetensors'"});
  // Ranks that see different files find out.
  write_file(scratch / "1.safetensors", {{"w", torch::ones({4})}});
  write_file(scratch / "0.safetensors", {{"w", torch::ones({4})}, {"v", torch::ones({4})}});
  run_world(2, [&](World& world) {
    auto bag = std::make_shared<Bag>();
    bag->add("w", torch::zeros({4}));
    auto sharded = fully_shard(on_test_device(bag));
    const fs::path path = scratch / fmt::format("{}.safetensors", world.rank());
    expect_contains(error_of([&] { load_safetensors(path, sharded, {.allow_unexpected = true}); }),
                    {"all ranks must see the same files"});
  });
}

// --- exports for Hugging Face ------------------------------------------------------------------

std::vector<NamedTensor> save_gpt(const fs::path& path) {
  const auto gpt = make_gpt(1);
  save_checkpoint(path, *gpt, nullptr);
  return plain_state(*gpt);
}

TEST(CheckpointHuggingFace, AnExportIsASetOfFilesWithAnIndex) {
  const ScratchDirectory scratch;
  const auto state = save_gpt(scratch / "one");
  fs::create_directories(scratch / "model");
  std::ofstream(scratch / "model" / "config.json") << "{}";
  const ExportOptions options{.rename = {{"^block(\\d)", "h.$1"}}, .max_shard_bytes = 2000};
  export_checkpoint(scratch / "one", scratch / "model/", options);
  const json index = json::parse(read_text(scratch / "model" / "model.safetensors.index.json"));
  const auto map = index.at("weight_map").get<std::map<std::string, std::string>>();
  std::set<std::string> files;
  int64_t total = 0;
  for (const auto& [name, file] : map) {
    const ParsedFile parsed = parse_safetensors(scratch / "model" / file);
    EXPECT_TRUE(parsed.header.contains(name)) << name;
    if (files.insert(file).second) total += std::ssize(parsed.data);
    EXPECT_TRUE(parsed.data.size() <= 2000 || parsed.header.size() == 2) << file;
  }
  EXPECT_EQ(index.at("metadata").at("total_size"), total);
  EXPECT_GT(files.size(), 3u);
  EXPECT_EQ(*files.begin(), fmt::format("model-00001-of-{:05}.safetensors", files.size()));
  EXPECT_EQ(names_in(scratch / "model").size(), files.size() + 2);
  EXPECT_EQ(map.count("h.0.qkv.weight"), 1u);
  for (const char* path : {"model", "model/model.safetensors.index.json"})
    expect_loads(scratch / path, lines_of(state), [] { return make_gpt(2); },
                 {.rename = {{"^h\\.(\\d)", "block$1"}}});
  expect_contains(error_of([&] { export_checkpoint(scratch / "one", scratch / "model", options); }),
                  {"/model' must have no model's files", "safetensors"});
  EXPECT_EQ(names_in(scratch.path()), (std::vector<std::string>{"model", "one"}));
}

TEST(CheckpointHuggingFace, ASmallModelIsOneFile) {
  const ScratchDirectory scratch;
  save_gpt(scratch / "one");
  export_checkpoint(scratch / "one", scratch / "model");
  EXPECT_EQ(names_in(scratch / "model"), std::vector<std::string>{"model.safetensors"});
  export_checkpoint(scratch / "one", scratch / "model.safetensors");
  EXPECT_EQ(read_text(scratch / "model" / "model.safetensors"),
            read_text(scratch / "model.safetensors"));
}

TEST(CheckpointHuggingFace, OptionsAreChecked) {
  const ScratchDirectory scratch;
  save_gpt(scratch / "one");
  const auto error = [&](const std::string& to, const ExportOptions& options) {
    return error_of([&] { export_checkpoint(scratch / "one", scratch / to, options); });
  };
  expect_contains(error("a", {.max_shard_bytes = 0}),
                  {"options.max_shard_bytes must be 1 or more"});
  expect_contains(error("a.safetensors", {.max_shard_bytes = 10}),
                  {"options.max_shard_bytes is for"});
  expect_contains(error("a", {.rename = {{"block.", "block"}}}), {"get the name"});
  EXPECT_EQ(names_in(scratch.path()), std::vector<std::string>{"one"});
}

// --- other formats -----------------------------------------------------------------------------

class LoadSafetensorsPython : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::string(TESSERA_PYTHON).empty()) GTEST_SKIP() << "CMake found no Python";
    if (directory_.empty()) {
      directory_ = fs::temp_directory_path() / fmt::format("tessera_layouts.{}", ::getpid());
      fs::create_directories(directory_);
      const fs::path script = fs::path(EXCHANGE_SCRIPT).parent_path() / "exchange_layouts.py";
      said_ = run_python(script.string(), {directory_});
    }
    if (said_ == "no torch\n") GTEST_SKIP() << "the Python that CMake found has no PyTorch";
    ASSERT_EQ(said_, "");
  }
  static void TearDownTestSuite() {
    if (!directory_.empty()) fs::remove_all(directory_);
  }

  static fs::path file(const std::string& name) { return directory_ / name; }
  static std::set<std::string> expected() { return lines_in(read_text(file("lines.txt"))); }

 private:
  static inline fs::path directory_;
  static inline std::string said_;
};

TEST_F(LoadSafetensorsPython, EveryLayoutOfOneModelIsRead) {
  for (const char* path :
       {"bin", "bin_index", "bin_index/pytorch_model.bin.index.json", "state.pt"}) {
    SCOPED_TRACE(path);
    expect_loads(file(path), expected(), [] { return make_picture(2); });
    const ScratchDirectory scratch;
    import_checkpoint(file(path), scratch / "one");
    EXPECT_EQ(verify_checkpoint(scratch / "one"), std::vector<std::string>());
  }
}

TEST(LoadSafetensors, ADcpDirectoryNamesTheCommandThatConvertsIt) {
  const ScratchDirectory scratch;
  std::ofstream(scratch / ".metadata") << "pickle";
  const auto picture = make_picture(2);
  const std::string command =
      "`python -m tessera.exchange import '" + scratch.path().string() + "' CKPT`";
  expect_contains(error_of([&] { load_safetensors(scratch.path(), *picture); }), {command});
  expect_contains(error_of([&] { import_checkpoint(scratch.path(), scratch / "one"); }), {command});
}

TEST_F(LoadSafetensorsPython, AnIndexThatNamesAMissingFileIsRefused) {
  const ScratchDirectory scratch;
  fs::copy(file("bin_index"), scratch / "copy");
  fs::remove(scratch / "copy" / "pytorch_model-00002-of-00002.bin");
  const auto picture = make_picture(2);
  expect_contains(error_of([&] { load_safetensors(scratch / "copy", *picture); }),
                  {"pytorch_model-00002-of-00002.bin'", "pytorch_model.bin.index.json"});
}

}  // namespace load_safetensors_test
}  // namespace tessera::testing
