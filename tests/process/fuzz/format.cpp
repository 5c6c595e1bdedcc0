#include "process/fuzz/format.h"

#include <tessera/checkpoint/checkpoint_files.h>
#include <tessera/interop/exchange.h>
#include <tessera/planner/plan_report.h>

#include <fstream>
#include <iterator>
#include <stdexcept>

namespace tessera::testing {

std::string safetensors_bytes(const std::string& header, size_t data_bytes) {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + header +
         std::string(data_bytes, '\1');
}

std::string read_bytes(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_bytes(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

void import_and_verify(const std::filesystem::path& from, const std::filesystem::path& made) {
  import_checkpoint(from, made / "imported");
  const auto damage = verify_checkpoint(made / "imported");
  if (!damage.empty()) throw std::runtime_error("what was imported is damaged: " + damage.front());
}

void plan_with(const std::filesystem::path& from) {
  const auto sizes = read_parameter_sizes(from);
  for (const auto level : {ShardLevel::kNone, ShardLevel::kParameters}) {
    for (const auto partition : {Partition::kFlatEven, Partition::kWholeParam}) {
      try {
        plan_report(sizes, {.level = level, .partition = partition}, {.ranks = 3, .replicas = 2});
      } catch (const c10::ValueError&) {
        // For names that occur twice, say: it has no file to name.
      } catch (const c10::NotImplementedError&) {
        // For dtypes that ranks can't sum.
      }
    }
  }
}

}  // namespace tessera::testing
