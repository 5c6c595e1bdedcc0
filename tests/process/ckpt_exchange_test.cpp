// `tessera ckpt import` and `export` with names that differ, and for Hugging Face.

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "launched.h"

namespace tessera::ckpt_exchange_test {

namespace fs = std::filesystem;
using nlohmann::json;

ProgramEnd ckpt(const Command& arguments) {
  return run_program(with({TESSERA_CLI, "ckpt"}, arguments), {});
}

/// A directory with `model.safetensors`, which has four tensors.
class CkptExchange : public ::testing::Test {
 protected:
  CkptExchange() {
    json header = json::object();
    size_t begin = 0;
    std::string data;
    for (const char* name : {"net.h.0.w", "net.h.1.w", "net.head", "net.mask"}) {
      header[name] = {
          {"dtype", "F32"}, {"shape", {10, 20}}, {"data_offsets", {begin, begin + 800}}};
      begin += 800;
      data += std::string(800, static_cast<char>(header.size()));
    }
    const std::string text = header.dump();
    const uint64_t length = text.size();
    std::ofstream file(path("model.safetensors"), std::ios::binary);
    file.write(reinterpret_cast<const char*>(&length), 8) << text << data;
  }
  std::string path(const std::string& name) const { return directory_.path(name); }

  /// The names and shapes in a checkpoint.
  json tensors_of(const std::string& checkpoint) const {
    const auto end = ckpt({"inspect", path(checkpoint), "--json"});
    EXPECT_EQ(end.status, 0) << end.err;
    const json summary = json::parse(end.out);
    json result = json::object();
    for (const json& tensor : summary.at("tensors"))
      result[tensor.at("names").at(0).get<std::string>()] = tensor.at("shape");
    return result;
  }

  TemporaryDirectory directory_;
};

TEST_F(CkptExchange, NamesAreMappedByRulesAndTensorsTransposed) {
  const auto end = ckpt({"import", path("model.safetensors"), path("one"), "--quiet", "--rename",
                         "^net\\.=", "--rename", "^h\\.(\\d)\\.=blocks.$1.", "--rename",
                         "^mask$=", "--transpose", "blocks\\..*"});
  EXPECT_EQ(end.status, 0) << end.err;
  EXPECT_EQ(tensors_of("one"),
            json({{"blocks.0.w", {20, 10}}, {"blocks.1.w", {20, 10}}, {"head", {10, 20}}}));
}

TEST_F(CkptExchange, RulesAreReadFromAFile) {
  std::ofstream(path("names.json")) << R"({"net.head": "out", "net.mask": "cost $1"})";
  std::ofstream(path("rules.json")) << R"([["^net\\.h\\.", "h"], ["^net\\.", ""]])";
  EXPECT_EQ(ckpt({"import", path("model.safetensors"), path("names"), "--quiet", "--rename-file",
                  path("names.json")})
                .status,
            0);
  EXPECT_TRUE(tensors_of("names").contains("out"));
  EXPECT_TRUE(tensors_of("names").contains("cost $1"));
  EXPECT_TRUE(tensors_of("names").contains("net.h.0.w"));
  EXPECT_EQ(ckpt({"import", path("model.safetensors"), path("rules"), "--quiet", "--rename-file",
                  path("rules.json"), "--rename", "^mask=m"})
                .status,
            0);
  for (const char* name : {"h0.w", "h1.w", "head", "m"})
    EXPECT_TRUE(tensors_of("rules").contains(name)) << name;
}

TEST_F(CkptExchange, NamesOfAMapAreReplacedAllAtOnce) {
  std::ofstream(path("chain.json")) << R"({"net.head": "net.mask", "net.mask": "q"})";
  std::ofstream(path("swap.json")) << R"({"net.head": "net.mask", "net.mask": "net.head"})";
  const auto with_map = [&](const char* verb, const char* from, const char* to, const char* map) {
    const auto end = ckpt({verb, path(from), path(to), "--quiet", "--rename-file", path(map)});
    EXPECT_EQ(end.status, 0) << end.err;
  };
  with_map("import", "model.safetensors", "chained", "chain.json");
  for (const char* name : {"net.mask", "q"}) EXPECT_TRUE(tensors_of("chained").contains(name));
  with_map("import", "model.safetensors", "swapped", "swap.json");
  with_map("export", "swapped", "again.safetensors", "swap.json");
  EXPECT_EQ(ckpt({"import", path("model.safetensors"), path("one"), "--quiet"}).status, 0);
  EXPECT_EQ(ckpt({"import", path("again.safetensors"), path("two"), "--quiet"}).status, 0);
  EXPECT_EQ(ckpt({"diff", path("one"), path("swapped"), "--quiet"}).status, 1);
  EXPECT_EQ(ckpt({"diff", path("one"), path("two"), "--quiet"}).out, "no difference\n");
}

TEST_F(CkptExchange, ADirectoryIsASetOfFilesForHuggingFace) {
  EXPECT_EQ(ckpt({"import", path("model.safetensors"), path("one"), "--quiet"}).status, 0);
  const auto end = ckpt({"export", path("one"), path("model/"), "--quiet", "--max-shard-size",
                         "2kB", "--rename", "^net=module"});
  EXPECT_EQ(end.status, 0) << end.err;
  const json index = json::parse(read_file(path("model/model.safetensors.index.json")));
  EXPECT_EQ(index.at("weight_map").at("module.head"), "model-00002-of-00002.safetensors");
  EXPECT_EQ(index.at("metadata").at("total_size"), 3200);
  EXPECT_EQ(
      ckpt({"import", path("model"), path("two"), "--quiet", "--rename", "^module=net"}).status, 0);
  EXPECT_EQ(ckpt({"diff", path("one"), path("two"), "--quiet"}).out, "no difference\n");
}

TEST_F(CkptExchange, WrongRulesAreStatusTwo) {
  std::ofstream(path("rules.json")) << R"(["net"])";
  const std::vector<std::pair<Command, std::string>> cases = {
      {{"--rename", "net"}, "--rename must be PATTERN=REPLACEMENT; got 'net'"},
      {{"--rename", "(=net"}, "options.rename must be regular expressions; '('"},
      {{"--rename", "^net.*=a"}, "get the name 'a'"},
      {{"--rename-file", path("none.json")}, "could not open"},
      {{"--rename-file", path("rules.json")}, "rules.json' must be a JSON list"},
      {{"--model", "other"}, "no tensors under the key 'other'"}};
  for (const auto& [options, text] : cases) {
    const auto end =
        ckpt(with({"import", path("model.safetensors"), path("one"), "--quiet"}, options));
    EXPECT_EQ(end.status, 2) << text;
    EXPECT_NE(end.err.find(text), std::string::npos) << end.err;
    EXPECT_FALSE(fs::exists(path("one"))) << text;
  }
}

}  // namespace tessera::ckpt_exchange_test
