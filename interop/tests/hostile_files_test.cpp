// Files that are damaged or crafted to do harm: each quickly gives an error that names the file.
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <tessera/planner/plan_report.h>

#include <ctime>

#include "checkpoint/checksum.h"
#include "checkpoint/tests/saved_model.h"
#include "support/pickle_program.h"

namespace tessera::testing {
namespace hostile_files_test {

namespace fs = std::filesystem;
using nlohmann::json;
using Lines = std::vector<std::string>;

constexpr int64_t kHuge = int64_t{1} << 62, kWraps = int64_t{1} << 32;  // kWraps squared is 2^64

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kLongestSeconds = 60;
#else
constexpr int kLongestSeconds = 10;
#endif

/// Returns the error of `f`, which must be quick (in processor time: others may use the machine).
template <class F>
std::string quick_error_of(F&& f) {
  const std::clock_t begin = std::clock();
  const std::string error = error_of(f);
  EXPECT_LT(std::clock() - begin, kLongestSeconds * CLOCKS_PER_SEC);
  return error;
}

void write_text(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

void make_fifo(const fs::path& path) { ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0); }

// --- files of torch.save
// ----------------------------------------------------------------------------

/// Returns the error of importing a file with this program; the storage "0" has four floats.
std::string import_of(const ScratchDirectory& scratch, const std::string& program) {
  write_torch_file(scratch / "a.pt", program, {{"data/0", std::string(16, 'x')}});
  fs::remove_all(scratch / "one");
  return quick_error_of([&] { import_checkpoint(scratch / "a.pt", scratch / "one"); });
}

std::string repeated(const std::string& text, size_t times) {
  std::string result;
  for (size_t i = 0; i < times; ++i) result += text;
  return result;
}

Lines names_of(const fs::path& checkpoint) {
  Lines names;
  for (const auto& tensor : inspect_checkpoint(checkpoint).tensors)
    names.insert(names.end(), tensor.names.begin(), tensor.names.end());
  return names;
}

TEST(HostilePickle, MillionsOfNestedTuplesAreLeftOut) {
  const ScratchDirectory scratch;
  const std::string nested = ")" + std::string(3'000'000, '\x85');
  const std::string program =
      pickle::program(pickle::dict({{"deep", nested}, {"a", pickle::four_floats()}}));
  EXPECT_EQ(import_of(scratch, program), "");
  EXPECT_EQ(names_of(scratch / "one"), Lines{"a"});
}

/// Nested dicts: each holds the previous one twice, `depth` times; `bottom` is in the innermost.
std::string shared_dicts(int depth, const std::string& bottom) {
  std::string program = pickle::dict({{"t", bottom}}) + pickle::put(0);
  for (int level = 0; level < depth; ++level)
    program = program + "0" + pickle::dict({{"l", pickle::get(0)}, {"r", pickle::get(0)}}) +
              pickle::put(0);
  return pickle::program(program);
}

TEST(HostilePickle, DictsThatShareDictsAreWalkedAFewTimesOnly) {
  const ScratchDirectory scratch;
  expect_contains(import_of(scratch, shared_dicts(60, "N")), {"a.pt", "has no tensors"});
  expect_contains(import_of(scratch, shared_dicts(60, pickle::four_floats())),
                  {"a.pt", "a dict with tensors must be in at most 8 places"});
  EXPECT_EQ(import_of(scratch, shared_dicts(1, pickle::four_floats())), "");
  EXPECT_EQ(names_of(scratch / "one"), (Lines{"l.t", "r.t"}));
}

TEST(HostilePickle, DictsThatHoldThemselvesAreRefused) {
  const ScratchDirectory scratch;
  const std::string self = "}" + pickle::put(0) + pickle::text("a") + pickle::get(0) + "s";
  expect_contains(import_of(scratch, pickle::program(self)), {"a.pt", "hold each other"});
}

TEST(HostilePickle, ManyNamesTakeNoTime) {
  const ScratchDirectory scratch;
  std::vector<std::pair<std::string, std::string>> items;
  for (int i = 0; i < 150'000; ++i) items.emplace_back(fmt::format("layers.{}.weight", i), "N");
  items.emplace_back("a", pickle::four_floats());
  EXPECT_EQ(import_of(scratch, pickle::program(pickle::dict(items))), "");
  EXPECT_EQ(names_of(scratch / "one"), Lines{"a"});
}

TEST(HostilePickle, TensorsThatAreNotInTheirStorageAreRefused) {
  const ScratchDirectory scratch;
  const auto refused = [&](const std::string& tensor, const std::string& part) {
    expect_contains(import_of(scratch, pickle::program(pickle::dict({{"a", tensor}}))),
                    {"a.pt", part});
    EXPECT_FALSE(fs::exists(scratch / "one"));
  };
  const auto view = [](int64_t offset, const std::vector<int64_t>& shape,
                       const std::vector<int64_t>& strides) {
    return pickle::tensor("0", 4, offset, shape, strides);
  };
  refused(view(1, {4}, {1}), "does not fit");
  refused(view(0, {kWraps, kWraps}, {kWraps, 1}), "counted in 64 bits");
  refused(view(kHuge, {4}, {1}), "counted in 64 bits");
  refused(view(0, {2}, {kHuge}), "counted in 64 bits");
  refused(view(0, {3, 3}, {kHuge, kHuge}), "counted in 64 bits");
  refused(view(0, {-1, -4}, {4, 1}), "0 or more; got -1");
  refused(view(0, {4}, {-1}), "0 or more; got -1");
  refused(view(0, {4}, {1, 1}), "a stride for each");
  // Four floats that are to be repeated until memory is full.
  refused(view(0, {int64_t{1} << 33}, {0}), "bytes of its storage");
  refused(pickle::tensor("0", 4, 0, std::vector<int64_t>(65, 1), std::vector<int64_t>(65, 1)),
          "program is broken");
  refused(pickle::tensor("1", 4, 0, {4}, {1}), "data/1");
}

TEST(HostilePickle, NamesThatAreNoTextAreRefused) {
  const ScratchDirectory scratch;
  const auto named = [&](const std::string& name) {
    return import_of(scratch, pickle::program(pickle::dict({{name, pickle::four_floats()}})));
  };
  expect_contains(named("\xff\xfe"), {"a.pt", "must be UTF-8"});
  expect_contains(named(std::string(100'000, 'a')), {"a.pt", "4096 bytes"});
  EXPECT_EQ(named("\xc3\xa4"), "");
}

// --- safetensors
// ----------------------------------------------------------------------------

void write_safetensors(const fs::path& path, const std::string& header, size_t nbytes) {
  const uint64_t length = header.size();
  write_text(path, std::string(reinterpret_cast<const char*>(&length), 8) + header +
                       std::string(nbytes, 'x'));
}

json entry(const char* dtype, const json& shape, const json& offsets) {
  return {{"dtype", dtype}, {"shape", shape}, {"data_offsets", offsets}};
}

/// An import of such a file, and a plan from it, must give errors with these parts.
void expect_refused_file(const ScratchDirectory& scratch, const std::string& header,
                         const Lines& parts, size_t nbytes = 8) {
  const fs::path file = scratch / "a.safetensors";
  write_safetensors(file, header, nbytes);
  Lines all = parts;
  all.push_back(file);
  expect_contains(quick_error_of([&] { import_checkpoint(file, scratch / "one"); }), all);
  expect_contains(quick_error_of([&] { read_parameter_sizes(file); }), all);
  EXPECT_FALSE(fs::exists(scratch / "one")) << header;
}

TEST(HostileSafetensors, SizesAndPlacesThatOverflowAreRefused) {
  const ScratchDirectory scratch;
  const int64_t most = std::numeric_limits<int64_t>::max();
  const auto refused = [&](const json& tensor, const Lines& parts) {
    expect_refused_file(scratch, json({{"a", tensor}}).dump(), parts);
  };
  refused(entry("F32", {kWraps, kWraps}, {0, 0}), {"counted in 64 bits"});
  refused(entry("F32", {kHuge, 4}, {0, 0}), {"counted in 64 bits"});
  refused(entry("F32", {0, kHuge, kHuge}, {0, 0}), {"counted in 64 bits"});
  refused(entry("F32", {2}, {0, most}), {"cut off"});
  refused(entry("F32", {2}, {most - 8, most}), {"cut off"});
  refused(entry("F32", {2}, {8, 0}), {"'a'"});
  refused(entry("F32", {2}, {0, uint64_t{1} << 63}), {"whole number"});
  refused(entry("F32", {2}, {0, 1e300}), {"whole number"});
  refused(entry("F32", {2.5}, {0, 8}), {"whole number"});
  refused(entry("F32", {uint64_t{1} << 63}, {0, 8}), {"whole number"});
  refused(entry("F32", std::vector<int64_t>(1000, 1), {0, 4}), {"64 dims"});
  refused(entry("F32", "text", {0, 4}), {"list of whole numbers"});
}

TEST(HostileSafetensors, TensorsThatLieOverEachOtherAreRefused) {
  const ScratchDirectory scratch;
  const json header = {{"a", entry("F32", {2}, {0, 8})}, {"b", entry("F32", {1}, {4, 8})}};
  expect_refused_file(scratch, header.dump(), {"'a'", "'b'", "over each other"});
}

TEST(HostileSafetensors, HeadersThatNestDeeplyOrAreTooLongAreRefused) {
  const ScratchDirectory scratch;
  for (const char* open : {"[", "{\"a\":"})
    expect_refused_file(scratch, "{\"a\":" + repeated(open, 1'000'000), {"nest at most"});
  const fs::path file = scratch / "a.safetensors";
  const uint64_t length = uint64_t{1} << 30;
  write_text(file, std::string(reinterpret_cast<const char*>(&length), 8) + "{}");
  fs::resize_file(file, (uint64_t{1} << 30) + 8);  // a hole
  expect_contains(quick_error_of([&] { import_checkpoint(file, scratch / "one"); }),
                  {file, "header"});
}

TEST(HostileSafetensors, ATerabyteOfHolesIsRefused) {
  const ScratchDirectory scratch;
  const fs::path file = scratch / "a.safetensors";
  constexpr int64_t kTerabyte = int64_t{1} << 40;
  const json header = {{"a", entry("U8", {kTerabyte}, {0, kTerabyte})}};
  write_safetensors(file, header.dump(), 0);
  fs::resize_file(file, fs::file_size(file) + kTerabyte);
  expect_contains(quick_error_of([&] { import_checkpoint(file, scratch / "one"); }),
                  {file, "tensor/a", "memory"});
  EXPECT_FALSE(fs::exists(scratch / "one"));
}

TEST(HostileSafetensors, ManyNamesTakeNoTime) {
  const ScratchDirectory scratch;
  json header;
  for (int i = 0; i < 60'000; ++i) {
    header[fmt::format("layers.{}", i)] = entry("U8", {0}, {0, 0});
    header["__metadata__"][fmt::format("other.{}", i)] = "tied";
  }
  write_safetensors(scratch / "a.safetensors", header.dump(), 0);
  EXPECT_EQ(quick_error_of([&] { import_checkpoint(scratch / "a.safetensors", scratch / "one"); }),
            "");
  EXPECT_EQ(read_parameter_sizes(scratch / "a.safetensors").size(), 60'000u);
}

// --- not a file
// ----------------------------------------------------------------------------

TEST(HostileFiles, LongNamesAreRefusedByRegularExpressions) {
  const ScratchDirectory scratch;
  const std::string name(4000, 'n');
  const auto error_for = [&](const ImportOptions& options) {
    fs::remove_all(scratch / "one");
    return quick_error_of([&] { import_checkpoint(scratch / "a.pt", scratch / "one", options); });
  };
  write_torch_file(scratch / "a.pt", pickle::program(pickle::dict({{name, pickle::four_floats()}})),
                   {{"data/0", std::string(16, 'x')}});
  const Lines expected = {"must have at most 1000 characters", "nnn...' has 4000"};
  expect_contains(error_for({.rename = {{"(n|m)*", "o"}}}), expected);
  expect_contains(error_for({.transpose = {".*"}}), expected);
  EXPECT_EQ(error_for({}), "");
  // A rule may make a name longer.
  write_torch_file(scratch / "a.pt", pickle::program(pickle::dict({{"a", pickle::four_floats()}})),
                   {{"data/0", std::string(16, 'x')}});
  expect_contains(error_for({.rename = {{"a", name}, {".*", "b"}}}), expected);
}

TEST(HostileFiles, NamedPipesAreNoData) {
  const ScratchDirectory scratch;
  for (const char* name : {"a.safetensors", "a.pt"}) {
    make_fifo(scratch / name);
    expect_contains(quick_error_of([&] { import_checkpoint(scratch / name, scratch / "one"); }),
                    {scratch / name, "must be a file; it is a pipe"});
  }
  expect_contains(quick_error_of([&] { read_parameter_sizes(scratch / "a.safetensors"); }),
                  {scratch / "a.safetensors", "must be a file; it is a pipe"});
  make_fifo(scratch / "list");  // without a writer
  expect_contains(quick_error_of([&] { read_parameter_sizes(scratch / "list"); }),
                  {scratch / "list", "holds no parameters"});
  fs::create_directories(scratch / "model");
  make_fifo((scratch / "model") / "model.safetensors.index.json");
  write_safetensors((scratch / "model") / "model.safetensors", "{}", 0);
  expect_contains(quick_error_of([&] { import_checkpoint(scratch / "model", scratch / "one"); }),
                  {"model.safetensors.index.json", "must be a file; it is a pipe"});
}

TEST(HostileFiles, NamedPipesAreNoPartsOfACheckpoint) {
  const ScratchDirectory scratch;
  for (const char* name : {"index.json", "rank-00000-of-00001.safetensors"}) {
    save_state_dict(scratch / "one", {{"a", torch::ones({2})}});
    fs::remove(scratch / "one" / name);
    make_fifo((scratch / "one") / name);
    const Lines damage = verify_checkpoint(scratch / "one");
    expect_contains(fmt::format("{}", fmt::join(damage, "\n")),
                    {(scratch / "one" / name).string(), "must be a file; it is a pipe"});
    EXPECT_NE(error_of([&] { export_checkpoint(scratch / "one", scratch / "a.safetensors"); }), "");
  }
}

}  // namespace hostile_files_test
}  // namespace tessera::testing
