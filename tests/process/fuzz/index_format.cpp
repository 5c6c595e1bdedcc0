#include <tessera/planner/plan_report.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "process/fuzz/format.h"
#include "process/fuzz/json_changes.h"
#include "support/byte_changes.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

struct Net : torch::nn::Module {
  Net() {
    register_parameter("a", torch::ones({4, 6}));
    tied = register_parameter("b", torch::ones({3, 2, 2}));
    register_parameter("c", tied);
    register_buffer("count", torch::ones({}, torch::kLong));
  }
  torch::Tensor tied;
};

void save_net(const fs::path& path) {
  auto net = std::make_shared<Net>();
  torch::optim::AdamW adamw(net->parameters());
  for (auto& param : net->parameters()) param.mutable_grad() = torch::ones_like(param);
  adamw.step();
  save_checkpoint(path, *net, &adamw,
                  {.numbers = {{"step", 1}}, .rank_state = {{"mine", torch::ones({2})}}});
}

void save_blocks(const fs::path& path) {
  spawn(4, [&] {
    World world = init();
    const auto mesh = DeviceMesh::over_world(world, {2, 2});
    save_state_dict(path,
                    {{"a", distribute(torch::ones({4, 6}), mesh, {Shard{0}, Shard{1}})},
                     {"b", distribute(torch::ones({3, 2, 2}), mesh, {Shard{0}, Replicate{}})}});
  });
}

// The bytes of each file, by name.
using Files = std::map<std::string, std::string>;

Files files_of(const fs::path& directory) {
  Files files;
  for (const auto& entry : fs::directory_iterator(directory))
    files[entry.path().filename()] = read_bytes(entry.path());
  return files;
}

const std::vector<Files>& checkpoints() {
  static const std::vector<Files> kFiles = [] {
    const fs::path path =
        fs::temp_directory_path() / ("tessera_fuzz." + std::to_string(::getpid()));
    std::vector<Files> files;
    for (const auto& save : {save_net, save_blocks}) {
      save(path);
      files.push_back(files_of(path));
      fs::remove_all(path);
    }
    return files;
  }();
  return kFiles;
}

// Changes the places of pieces of one tensor, each to a plausible one.
void change_pieces(json& index, Draw& draw) {
  json& tensors = index.at("tensors");
  json& tensor = tensors[draw.below(tensors.size())];
  if (tensor.at("chunks").empty()) return;
  json& chunk = tensor["chunks"][draw.below(tensor["chunks"].size())];
  if (draw.chance(50) || !chunk.contains("box")) {
    const json shape = tensor.at("shape");
    json zeros = json::array();
    for (size_t dim = 0; dim < shape.size(); ++dim) zeros.push_back(0);
    chunk["box"] = {{"shape", shape}, {"offset", zeros}, {"sizes", shape}};
  }
  for (size_t times = 1 + draw.below(2); times > 0; --times) {
    json& numbers = chunk["box"][draw.pick<std::string>({"shape", "offset", "sizes"})];
    if (!numbers.empty()) numbers[draw.below(numbers.size())] = draw.number();
  }
  if (draw.chance(30)) chunk["end"] = draw.number();
  if (draw.chance(20)) tensor["shape"] = json::array({draw.number(), draw.number()});
  if (draw.chance(20)) tensor["strides"] = json::array({draw.number(), draw.number()});
}

void change_index(std::string& text, Draw& draw) {
  json index = json::parse(text);
  if (draw.chance(95)) index.erase("checksum");  // then its content is trusted
  draw.chance(70) ? change_json(index, draw) : change_pieces(index, draw);
  text = index.dump(-1, ' ', false, json::error_handler_t::replace);
}

void change_files(Files& files, Draw& draw) {
  std::string& index = files.at("index.json");
  if (draw.chance(3)) return;
  if (draw.chance(80)) return change_index(index, draw);
  if (draw.chance(60)) {
    json parsed = json::parse(index);
    parsed.erase("checksum");
    index = parsed.dump();
    return change_bytes(index, draw);
  }
  if (draw.chance(30)) return change_bytes(index, draw);
  change_bytes(std::next(files.begin(), 1)->second, draw, 2000);
}

void load_net(const fs::path& path) {
  auto net = std::make_shared<Net>();
  torch::optim::AdamW adamw(net->parameters());
  load_checkpoint(path, *net, &adamw, {.allow_missing = true, .allow_unexpected = true});
}

}  // namespace

FuzzFormat index_format() {
  checkpoints();  // before there is a limit on memory
  FuzzFormat format;
  format.write = [](Draw& draw, const fs::path& directory) {
    Files files = draw.pick(checkpoints());
    change_files(files, draw);
    for (const auto& [name, bytes] : files) write_bytes(directory / name, bytes);
  };
  const auto add = [&](const char* name, auto read) { format.reads.emplace_back(name, read); };
  add("inspect", [](const fs::path& path, const fs::path&) { inspect_checkpoint(path); });
  add("verify", [](const fs::path& path, const fs::path&) {
    for (const std::string& line : verify_checkpoint(path))
      if (line.find(path.string()) == std::string::npos) throw std::runtime_error(line);
  });
  add("diff", [](const fs::path& path, const fs::path&) { compare_checkpoints(path, path); });
  add("reshard", [](const fs::path& path, const fs::path& made) {
    reshard_checkpoint(path, made / "resharded", 2);
  });
  add("export", [](const fs::path& path, const fs::path& made) {
    export_checkpoint(path, made / "a.safetensors");
  });
  add("read", [](const fs::path& path, const fs::path&) {
    CheckpointTensors tensors(path, /*with_state=*/true);
    const auto count = nlohmann::json::parse(tensors.index()).at("tensors").size();
    for (size_t i = 0; i < count; ++i) tensors.read(i);
  });
  add("load", [](const fs::path& path, const fs::path&) { load_net(path); });
  add("load_state_dict", [](const fs::path& path, const fs::path&) {
    load_state_dict(path, {{"a", torch::zeros({4, 6})}, {"count", torch::zeros({}, torch::kLong)}});
  });
  add("plan", [](const fs::path& path, const fs::path&) { plan_with(path); });
  return format;
}

}  // namespace tessera::testing
