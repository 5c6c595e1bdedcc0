#pragma once

#include <gtest/gtest.h>
#include <tessera/tessera.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "support/expect_contains.h"
#include "support/models.h"
#include "support/scratch_directory.h"

namespace tessera::testing {

/// A model with every special case of checkpoints: a weight in channels_last order, buffers, tied
/// and frozen parameters, an empty one, and sizes that nothing divides.
struct Picture : torch::nn::Module {
  explicit Picture(int64_t width = 13) {
    auto options = torch::nn::Conv2dOptions(3, width, 3).padding(1).bias(false);
    conv = register_module("conv", torch::nn::Conv2d(options));
    norm = register_module("norm", torch::nn::BatchNorm2d(width));
    encode = register_module("encode", torch::nn::Linear(width, 17));
    decode = register_parameter("decode", encode->weight);
    scale = register_parameter("scale", torch::full({}, 1.5), /*requires_grad=*/false);
    nothing = register_parameter("nothing", torch::zeros({0, 4}));
    torch::NoGradGuard no_grad;
    conv->weight.set_data(conv->weight.detach().contiguous(torch::MemoryFormat::ChannelsLast));
  }
  torch::Tensor forward(torch::Tensor x) {
    const torch::Tensor y = torch::relu(norm(conv(x))).mean({2, 3});
    return (encode(y) + torch::linear(torch::tanh(y), decode)) * scale;
  }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Linear encode{nullptr};
  torch::Tensor decode, scale, nothing;
};

inline std::shared_ptr<Picture> make_picture(uint64_t seed) {
  manual_seed(seed);
  return on_test_device(std::make_shared<Picture>());
}

/// The same rows on every rank, so that worlds of all sizes compute the same.
inline std::pair<torch::Tensor, torch::Tensor> picture_batch(int64_t step) {
  auto generator = at::detail::createCPUGenerator(1000 + step);
  torch::Tensor x = torch::randn({5, 3, 6, 6}, generator);
  return {on_test_device(x), on_test_device(torch::randn({5, 17}, generator))};
}

inline void train_step(Picture& picture, ShardedOptimizer& optimizer, int64_t step) {
  const auto [x, y] = picture_batch(step);
  optimizer.zero_grad();
  torch::mse_loss(picture.forward(x), y).backward();
  optimizer.step();
}

inline std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline nlohmann::json read_index(const std::filesystem::path& checkpoint) {
  return nlohmann::json::parse(read_text(checkpoint / "index.json"));
}

/// The header and the data of a safetensors file.
struct ParsedFile {
  nlohmann::json header;
  std::string data;
};
inline ParsedFile parse_safetensors(const std::filesystem::path& path) {
  const std::string text = read_text(path);
  uint64_t length = 0;
  std::memcpy(&length, text.data(), 8);
  return {nlohmann::json::parse(text.substr(8, length)), text.substr(8 + length)};
}

/// Reads all tensors of a checkpoint from its files, without the library's code. Optimizer state is
/// under `state/NAME/PARAMETER`; counts are added as tensors.
inline std::map<std::string, torch::Tensor> read_all(const std::filesystem::path& checkpoint) {
  const std::map<std::string, torch::Dtype> dtypes = {{"F32", torch::kFloat},
                                                      {"F64", torch::kDouble},
                                                      {"I64", torch::kLong},
                                                      {"BF16", torch::kBFloat16},
                                                      {"U8", torch::kByte}};
  const nlohmann::json index = read_index(checkpoint);
  std::map<std::string, ParsedFile> files;
  std::map<std::string, torch::Tensor> all;
  for (const auto& tensor : index.at("tensors")) {
    if (tensor.at("kind") == "rank") continue;  // a rank's own state
    const auto shape = tensor.at("shape").get<std::vector<int64_t>>();
    const auto strides = tensor.at("strides").get<std::vector<int64_t>>();
    const torch::Tensor value = torch::empty_strided(shape, strides, dtypes.at(tensor.at("dtype")));
    for (const auto& chunk : tensor.at("chunks")) {
      const std::string name = chunk.at("file");
      if (!files.contains(name)) files[name] = parse_safetensors(checkpoint / name);
      const auto& place =
          files[name].header.at(chunk.at("key").get<std::string>()).at("data_offsets");
      const int64_t from = place.at(0), to = place.at(1), begin = chunk.at("begin");
      EXPECT_EQ(to - from, (chunk.at("end").get<int64_t>() - begin) * value.element_size());
      std::memcpy(static_cast<char*>(value.data_ptr()) + begin * value.element_size(),
                  files[name].data.data() + from, to - from);
    }
    std::string id = tensor.at("kind").get<std::string>() + "/";
    if (tensor.contains("state")) id += tensor.at("state").get<std::string>() + "/";
    for (const auto& name : tensor.at("names")) all[id + name.get<std::string>()] = value;
  }
  if (!index.contains("optimizer")) return all;
  for (const auto& [name, counts] : index.at("optimizer").at("counts").items()) {
    for (const auto& [count, value] : counts.items()) {
      all["state/" + count + "/" + name] = value.is_number_integer()
                                               ? torch::tensor(value.get<int64_t>())
                                               : torch::tensor(value.get<double>());
    }
  }
  return all;
}

inline void expect_same_tensors(const std::map<std::string, torch::Tensor>& actual,
                                const std::map<std::string, torch::Tensor>& expected,
                                const std::string& what) {
  EXPECT_EQ(actual.size(), expected.size()) << what;
  for (const auto& [name, value] : expected) {
    const auto it = actual.find(name);
    ASSERT_NE(it, actual.end()) << what << ": no " << name;
    EXPECT_TRUE(torch::equal(it->second.cpu(), value.cpu())) << what << ": " << name << " differs";
  }
}

/// The message of the `c10::Error` that `f` throws; empty if it throws none.
template <class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

/// Has the parameters and buffers that the test gives it.
struct Bag : torch::nn::Module {
  void add(const std::string& name, torch::Tensor value) {
    register_parameter(name, std::move(value));
  }
  void add_buffer(const std::string& name, torch::Tensor value) {
    register_buffer(name, std::move(value));
  }
};

/// A sharded model whose parameters all have one value.
struct Filled {
  explicit Filled(double value) : module(on_test_device(std::make_shared<Mlp>(11, 2, 3))) {
    torch::NoGradGuard no_grad;
    for (auto& param : module->parameters()) param.fill_(value);
    sharded.emplace(fully_shard(module, {.unit_bytes = 600}));
  }
  std::shared_ptr<Mlp> module;
  std::optional<Sharded<Mlp>> sharded;
};

/// Expects that the checkpoint loads, and that each of its parameters has this value.
inline void expect_holds(const std::filesystem::path& path, double value) {
  Filled other(-1);
  load_checkpoint(path, *other.sharded, nullptr);
  for (const NamedTensor& named : other.sharded->full_state()) {
    EXPECT_TRUE((named.tensor == value).all().item<bool>()) << named.name << " of " << path;
  }
}

inline std::vector<std::string> names_in(const std::filesystem::path& path) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(path))
    names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace tessera::testing
