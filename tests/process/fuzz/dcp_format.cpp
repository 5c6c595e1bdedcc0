#include <tessera/checkpoint/checkpoint.h>
#include <tessera/interop/exchange.h>
#include <tessera/interop/load_safetensors.h>
#include <torch/torch.h>
#include <unistd.h>

#include <map>

#include "process/fuzz/byte_changes.h"
#include "process/fuzz/format.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;

constexpr const char* kMetadata = ".metadata";
constexpr const char* kTensors = "__0_0.distcp";

// The files of a directory with a model and its optimizer.
std::map<std::string, std::string> dcp_files() {
  const fs::path made =
      fs::temp_directory_path() / ("tessera_fuzz_dcp." + std::to_string(::getpid()));
  torch::nn::Linear net(6, 4);
  torch::optim::AdamW adamw(net->parameters());
  net->forward(torch::ones({2, 6})).sum().backward();
  adamw.step();
  save_checkpoint(made / "one", *net, &adamw);
  export_checkpoint(made / "one", made / "dcp",
                    {.format = ExportFormat::kDcp, .optimizer_key = "optim"});
  std::map<std::string, std::string> files;
  for (const char* name : {kMetadata, kTensors}) files[name] = read_bytes(made / "dcp" / name);
  fs::remove_all(made);
  return files;
}

// Replaces a number of 32 bits by another, which is a size, an offset or a length.
void change_number(std::string& pickle, Draw& draw) {
  const std::vector<int32_t> numbers = {-1, 0, 1, 7, 4096, 1 << 30, INT32_MAX, INT32_MIN};
  std::vector<size_t> places;
  for (size_t at = 0; (at = pickle.find('J', at)) != std::string::npos; ++at)
    if (at + 5 <= pickle.size()) places.push_back(at + 1);
  const int32_t number = draw.pick(numbers);
  pickle.replace(draw.pick(places), sizeof(number), reinterpret_cast<const char*>(&number),
                 sizeof(number));
}

}  // namespace

FuzzFormat dcp_format() {
  static const std::map<std::string, std::string> kFiles = dcp_files();
  FuzzFormat format;
  format.write = [](Draw& draw, const fs::path& directory) {
    std::map<std::string, std::string> files = kFiles;
    if (draw.chance(40)) {
      change_number(files[kMetadata], draw);
    } else if (draw.chance(95)) {
      change_bytes(files[draw.chance(70) ? kMetadata : kTensors], draw);
    }
    for (const auto& [name, bytes] : files) write_bytes(directory / name, bytes);
  };
  format.reads.emplace_back(
      "import", [](const fs::path& path, const fs::path& made) { import_and_verify(path, made); });
  format.reads.emplace_back("import optimizer", [](const fs::path& path, const fs::path& made) {
    import_checkpoint(path, made / "two", {.optimizer_key = "optim"});
  });
  format.reads.emplace_back("load", [](const fs::path& path, const fs::path&) {
    torch::nn::Linear net(6, 4);
    load_safetensors(path, *net, {.rename = {{"^optim.*", ""}, {"^model\\.", ""}}});
  });
  return format;
}

}  // namespace tessera::testing
