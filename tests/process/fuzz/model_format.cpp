#include <nlohmann/json.hpp>

#include "process/fuzz/format.h"
#include "process/fuzz/json_changes.h"
#include "support/byte_changes.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr size_t kDataBytes = 96;

json some_header(Draw& draw, const std::string& prefix) {
  json header = {{"__metadata__", {{"format", "pt"}, {"tied", prefix + "0"}}}};
  static const std::vector<std::pair<std::string, size_t>> kDtypes = {
      {"F32", 4}, {"BF16", 2}, {"I64", 8}, {"U8", 1}, {"F64", 8}, {"BOOL", 1}};
  size_t end = 0;
  for (size_t i = 0; i < 4; ++i) {
    const auto& [dtype, item] = draw.pick(kDtypes);
    const size_t numel = draw.below(24 / item + 1);
    header[prefix + std::to_string(i)] = {
        {"dtype", dtype}, {"shape", {1, numel}}, {"data_offsets", {end, end + numel * item}}};
    end += numel * item;
  }
  return header;
}

// Sizes whose products wrap around to the right ones in 64 bits, and the like.
void change_tensor(json& header, Draw& draw) {
  json& tensor = header[std::to_string(draw.below(4))];
  const std::vector<json> shapes = {json({int64_t{1} << 32, int64_t{1} << 32}),
                                    json({0, int64_t{1} << 62, 4}), json({draw.number()}),
                                    json({draw.number(), draw.number()}),
                                    json(std::vector<int64_t>(draw.below(200), 1))};
  if (draw.chance(60)) tensor["shape"] = draw.pick(shapes);
  if (draw.chance(60)) tensor["data_offsets"] = {draw.number(), draw.number()};
  if (draw.chance(20)) tensor["data_offsets"] = {0, kDataBytes};
  if (draw.chance(20)) tensor["dtype"] = draw.text();
}

std::string some_file(Draw& draw, const std::string& prefix, bool is_whole) {
  json header = some_header(draw, prefix);
  if (is_whole) return safetensors_bytes(header.dump(), kDataBytes);
  draw.chance(50) ? change_json(header, draw) : change_tensor(header, draw);
  std::string bytes = safetensors_bytes(header.dump(-1, ' ', false, json::error_handler_t::replace),
                                        draw.chance(90) ? kDataBytes : draw.below(200));
  if (draw.chance(20)) change_bytes(bytes, draw, draw.chance(30) ? 8 : bytes.size());
  return bytes;
}

void add_reads(FuzzFormat& format, const std::string& name) {
  format.reads.emplace_back("import", [name](const fs::path& path, const fs::path& made) {
    import_and_verify(path / name, made);
  });
  format.reads.emplace_back(
      "plan", [name](const fs::path& path, const fs::path&) { plan_with(path / name); });
}

void write_model(Draw& draw, const fs::path& directory) {
  const size_t parts = 1 + draw.below(3);
  json map;
  for (size_t part = 0; part < parts; ++part) {
    const std::string name = "model-0000" + std::to_string(part + 1) + "-of-0000" +
                             std::to_string(parts) + ".safetensors";
    const std::string prefix = "layers." + std::to_string(part) + ".";
    for (size_t i = 0; i < 4; ++i) map[prefix + std::to_string(i)] = name;
    if (draw.chance(95)) write_bytes(directory / name, some_file(draw, prefix, draw.chance(90)));
  }
  if (draw.chance(20))
    write_bytes(directory / "consolidated.safetensors", some_file(draw, "", true));
  if (draw.chance(15)) return;
  json index = {{"metadata", {{"total_size", 96}}}, {"weight_map", map}};
  if (draw.chance(60)) change_json(index, draw);
  std::string text = index.dump(-1, ' ', false, json::error_handler_t::replace);
  if (draw.chance(20)) change_bytes(text, draw);
  write_bytes(
      directory / (std::string(draw.chance(90) ? "model" : "other") + ".safetensors.index.json"),
      text);
}

}  // namespace

FuzzFormat safetensors_format() {
  FuzzFormat format;
  format.write = [](Draw& draw, const fs::path& directory) {
    write_bytes(directory / "a.safetensors", some_file(draw, "", draw.chance(5)));
  };
  add_reads(format, "a.safetensors");
  return format;
}

FuzzFormat model_format() {
  FuzzFormat format;
  format.write = write_model;
  add_reads(format, "");
  return format;
}

}  // namespace tessera::testing
