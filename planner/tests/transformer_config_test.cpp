// Parameters of described models: names, shapes, totals, and their agreement with an index.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <tessera/planner/transformer_config.h>
#include <tessera/tessera.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "planner/tests/described_configs.h"
#include "planner/tests/described_models.h"
#include "support/models.h"
#include "support/scratch_directory.h"

namespace tessera {
namespace transformer_config_test {

using namespace testing;
using nlohmann::json;

int64_t elements(const std::vector<ParameterSize>& sizes) {
  int64_t total = 0;
  for (const ParameterSize& size : sizes) {
    int64_t numel = 1;
    for (const int64_t dim : size.shape) numel *= dim;
    total += numel;
  }
  return total;
}

std::string write_json(const std::filesystem::path& path, const json& value) {
  std::ofstream(path) << value.dump();
  return path;
}

struct Known {
  const char* name;
  json config;
  int64_t parameters;
};

// Sums that the models' cards have.
std::vector<Known> known_models() {
  return {{"Llama-3-8B", llama3_8b(), 8'030'261'248},
          {"Llama-3-70B", llama3_70b(), 70'553'706'496},
          {"GPT-2", gpt2(), 124'439'808},
          {"Qwen2-7B", qwen2_7b(), 7'615'616'512},
          {"SmolLM-135M", smollm_135m(), 134'515'008},
          {"Qwen2-0.5B", qwen2_500m(), 494'032'768},
          {"Qwen3-0.6B", qwen3_600m(), 596'049'920}};
}

TEST(TransformerConfig, HasTheParametersOfKnownModels) {
  const ScratchDirectory directory;
  for (const auto& [name, config, parameters] : known_models()) {
    const auto path = write_json(directory / "config.json", config);
    const auto sizes = parameter_sizes(read_transformer_config(path));
    EXPECT_EQ(elements(sizes), parameters) << name;
    EXPECT_EQ(elements(read_parameter_sizes(path)), parameters) << name;
    EXPECT_EQ(elements(read_parameter_sizes(directory.path())), parameters) << name;
  }
}

TEST(TransformerConfig, TakesDtypesByBothNames) {
  const ScratchDirectory directory;
  const auto path = directory / "config.json";
  json config = llama3_8b();
  EXPECT_EQ(read_transformer_config(write_json(path, config)).dtype, at::kBFloat16);
  config.erase("torch_dtype");
  EXPECT_EQ(read_transformer_config(write_json(path, config)).dtype, at::kFloat);
  config["dtype"] = "float16";
  EXPECT_EQ(read_transformer_config(write_json(path, config)).dtype, at::kHalf);
}

// Modules that are written by hand have the described parameters, in the same order.
TEST(TransformerConfig, AgreesWithModules) {
  for (TransformerConfig config : small_configs()) {
    for (const bool tied : {true, false}) {
      config.tied_head = tied;
      const DescribedModel model(config, false);
      const auto described = parameter_sizes(config), real = parameter_sizes(model);
      ASSERT_EQ(described.size(), real.size()) << config.type;
      for (size_t i = 0; i < real.size(); ++i) {
        EXPECT_EQ(described[i].names, real[i].names);
        EXPECT_EQ(described[i].shape, real[i].shape) << real[i].names[0];
      }
    }
  }
}

// An index as Hugging Face's tools write it.
json index_of(const std::vector<ParameterSize>& sizes) {
  json index = {{"metadata", {{"total_size", 0}}}, {"weight_map", json::object()}};
  for (const ParameterSize& size : sizes)
    index["weight_map"][size.names.front()] = "model-00001-of-00004.safetensors";
  index["metadata"]["total_size"] =
      elements(sizes) * static_cast<int64_t>(c10::elementSize(sizes.front().dtype));
  return index;
}

class DescribedDirectory {
 public:
  explicit DescribedDirectory(const json& config) {
    write_json(config_path(), config);
    index = index_of(parameter_sizes(read_transformer_config(config_path())));
    write();
  }
  void write() const { write_json(index_path(), index); }
  std::string config_path() const { return directory_ / "config.json"; }
  std::string index_path() const { return directory_ / "model.safetensors.index.json"; }
  std::string path() const { return directory_.path(); }
  json index;

 private:
  ScratchDirectory directory_;
};

TEST(TransformerConfig, OfADirectoryWithoutWeightsAgreesWithItsIndex) {
  for (const auto& [name, config, parameters] : known_models()) {
    const DescribedDirectory directory(config);
    for (const std::string& path :
         {directory.path(), directory.index_path(), directory.config_path()})
      EXPECT_EQ(elements(read_parameter_sizes(path)), parameters) << path;
  }
}

// Files of GPT-2 may leave out a prefix, and have buffers; those of old Llamas have buffers, too.
TEST(TransformerConfig, AcceptsOtherNamesOfAnIndex) {
  DescribedDirectory directory(gpt2());
  json names = json::object();
  for (const auto& item : directory.index["weight_map"].items())
    names[item.key().substr(std::string("transformer.").size())] = item.value();
  names["h.0.attn.bias"] = names["h.0.attn.masked_bias"] = names["lm_head.weight"] =
      "model-00001-of-00004.safetensors";
  directory.index["weight_map"] = names;
  directory.write();
  EXPECT_EQ(elements(read_parameter_sizes(directory.path())), 124'439'808);
}

TEST(TransformerConfig, NamesWhatAnIndexDisagreesIn) {
  DescribedDirectory directory(llama3_8b());
  const auto refuses = [&](const std::vector<std::string>& parts) {
    directory.write();
    for (const std::string& path : {directory.path(), directory.index_path()})
      expect_error([&] { read_parameter_sizes(path); }, parts);
  };
  const json good = directory.index;
  directory.index["metadata"]["total_size"] = 16'060'522'497;
  refuses({"index.json", "total_size", "16060522496 in BFloat16", "got 16060522497"});
  directory.index = good;
  directory.index["weight_map"].erase("model.layers.7.mlp.up_proj.weight");
  refuses({"lacks model.layers.7.mlp.up_proj.weight"});
  directory.index = good;
  directory.index["weight_map"]["model.layers.0.self_attn.q_proj.bias"] = "a.safetensors";
  refuses({"has model.layers.0.self_attn.q_proj.bias"});
  directory.index = json::array();
  refuses({"weight_map"});
}

TEST(TransformerConfig, OfAnIndexAloneSaysThatShapesAreMissing) {
  const DescribedDirectory directory(llama3_8b());
  std::filesystem::remove(directory.config_path());
  for (const std::string& path : {directory.path(), directory.index_path()})
    expect_error([&] { read_parameter_sizes(path); }, {"config.json' must exist", "no shapes"});
}

TEST(TransformerConfig, RefusesWhatItDoesNotKnow) {
  const ScratchDirectory directory;
  const auto refuses = [&](const json& config, const std::vector<std::string>& parts) {
    const auto path = write_json(directory / "config.json", config);
    expect_error([&] { read_transformer_config(path); }, parts);
  };
  const auto with = [](json config, const char* name, const json& value) {
    config[name] = value;
    return config;
  };
  refuses(json::array(), {"config.json", "model_type"});
  refuses(with(llama3_8b(), "model_type", "bert"), {"gpt2, llama, mistral", "'bert'"});
  refuses(with(llama3_8b(), "quantization_config", json::object()), {"quantization_config"});
  refuses(with(llama3_8b(), "hidden_size", nullptr), {"must have 'hidden_size'"});
  refuses(with(llama3_8b(), "hidden_size", "4096"), {"hidden_size"});
  refuses(with(llama3_8b(), "hidden_size", 0), {"hidden_size"});
  refuses(with(llama3_8b(), "num_hidden_layers", 1e9), {"num_hidden_layers"});
  refuses(with(llama3_8b(), "num_key_value_heads", 7), {"num_key_value_heads", "32 and 7"});
  refuses(with(llama3_8b(), "torch_dtype", "int8"), {"torch_dtype", "floating"});
  refuses(with(llama3_8b(), "tie_word_embeddings", 1), {"tie_word_embeddings"});
  refuses(with(gpt2(), "add_cross_attention", true), {"add_cross_attention"});
  refuses(with(gpt2(), "n_head", 7), {"n_embd", "768 and 7"});
  refuses(with(gpt2(), "resid_pdrop", 1.5), {"resid_pdrop", "1.5"});
  std::ofstream(directory / "config.json") << "{";
  expect_error([&] { read_transformer_config(directory / "config.json"); },
               {"must be a config.json"});
  expect_error([&] { read_transformer_config(directory / "none.json"); },
               {"none.json", "no file or directory"});
}

}  // namespace transformer_config_test
}  // namespace tessera
