#include "process/fuzz/format.h"
#include "support/byte_changes.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;

std::string some_line(Draw& draw) {
  static const std::vector<std::string> kDtypes = {"float32", "bf16", "int64",
                                                   "half",    "bool", "F3"};
  std::string line =
      (draw.chance(95) ? "layers." + std::to_string(draw.below(1000)) : draw.text()) + " " +
      (draw.chance(97) ? draw.pick(kDtypes) : draw.text());
  for (size_t dims = draw.below(draw.chance(97) ? 4 : 100); dims > 0; --dims)
    line += " " + (draw.chance(85)   ? std::to_string(draw.below(100))
                   : draw.chance(90) ? std::to_string(draw.number())
                                     : draw.text());
  if (draw.chance(20)) line += " frozen";
  if (draw.chance(10)) line += " # " + draw.text();
  return line + "\n";
}

}  // namespace

FuzzFormat sizes_format() {
  FuzzFormat format;
  format.write = [](Draw& draw, const fs::path& directory) {
    std::string text;
    for (size_t lines = draw.below(draw.chance(98) ? 8 : 20'000); lines > 0; --lines)
      text += some_line(draw);
    if (draw.chance(30)) change_bytes(text, draw);
    write_bytes(directory / "list", text);
  };
  format.reads.emplace_back(
      "plan", [](const fs::path& path, const fs::path&) { plan_with(path / "list"); });
  return format;
}

}  // namespace tessera::testing
