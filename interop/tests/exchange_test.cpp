// Checkpoints imported from other tools' files, and files exported from checkpoints.
#include "checkpoint/tests/python_lines.h"
#include "checkpoint/tests/saved_job.h"
#include "support/pickle_program.h"

namespace tessera::testing {
namespace exchange_test {

namespace fs = std::filesystem;
using nlohmann::json;

std::set<std::string> lines_of(const std::vector<NamedTensor>& state) {
  std::set<std::string> lines;
  for (const auto& [name, value] : state) lines.insert(line_of(name, value));
  return lines;
}

/// Saves a Picture on two ranks. Returns its full state.
std::vector<NamedTensor> save_picture(const fs::path& path, bool with_half = false) {
  std::vector<NamedTensor> state;
  run_world(2, [&](World& world) {
    auto module = make_picture(1);
    if (with_half) {
      auto& weight = module->norm->weight;
      weight.set_data(weight.detach().to(torch::kBFloat16));
    }
    auto sharded = fully_shard(module, {.unit_bytes = 1000});
    save_checkpoint(path, sharded, nullptr, {.numbers = {{"step", 2}}});
    const auto full = sharded.full_state();
    if (world.rank() == 0) state = full;
  });
  return state;
}

/// Expects that modules made by `make` hold these lines after a load: a plain one, and ones that
/// are sharded over one to three ranks.
template <class Make>
void expect_loads(const fs::path& checkpoint, const std::set<std::string>& expected,
                  const Make& make, const LoadOptions& options = {}) {
  const auto plain = make();
  load_checkpoint(checkpoint, *plain, nullptr, options);
  EXPECT_EQ(lines_of(plain_state(*plain)), expected);
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [&](World&) {
      auto sharded = fully_shard(make(), {.unit_bytes = 1000});
      load_checkpoint(checkpoint, sharded, nullptr, options);
      EXPECT_EQ(lines_of(sharded.full_state()), expected) << ranks << " ranks";
    });
  }
}

std::shared_ptr<Picture> other_picture() { return make_picture(2); }

// --- with Python
// -----------------------------------------------------------------------------------

/// Files that PyTorch writes and reads, through exchange.py.
class CheckpointExchangePython : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::string(TESSERA_PYTHON).empty()) GTEST_SKIP() << "CMake found no Python";
    if (directory_.empty()) {
      directory_ = fs::temp_directory_path() / fmt::format("tessera_exchange.{}", ::getpid());
      fs::create_directories(directory_);
      said_ = run_python(EXCHANGE_SCRIPT, {"save", directory_});
    }
    if (said_ == "no torch\n") GTEST_SKIP() << "the Python that CMake found has no PyTorch";
    ASSERT_EQ(said_, "");
  }
  static void TearDownTestSuite() {
    if (!directory_.empty()) fs::remove_all(directory_);
  }

  static fs::path file(const std::string& name) { return directory_ / name; }
  /// Returns the lines that Python wrote about the tensors in the file.
  static std::set<std::string> lines_of_file(const std::string& name) {
    return lines_in(read_text(file(name + ".txt")));
  }

 private:
  static inline fs::path directory_;
  static inline std::string said_;
};

TEST_F(CheckpointExchangePython, ReadsAnExportAsSafetensors) {
  const ScratchDirectory scratch;
  const auto state = save_picture(scratch / "one", /*with_half=*/true);
  export_checkpoint(scratch / "one", scratch / "one.safetensors");
  const std::string text = run_python(SAFETENSORS_SCRIPT, {scratch / "one.safetensors"});
  std::set<std::string> expected = lines_of(state), found = lines_in(text);
  std::erase_if(expected, [](const auto& line) { return line.starts_with("encode.weight "); });
  std::erase_if(found, [](const auto& line) { return line.starts_with("package "); });
  EXPECT_EQ(found, expected);
  EXPECT_EQ(parse_safetensors(scratch / "one.safetensors").header.at("__metadata__"),
            json({{"format", "pt"}, {"encode.weight", "decode"}}));
}

TEST_F(CheckpointExchangePython, LoadsAnExportIntoAModelWithTies) {
  const ScratchDirectory scratch;
  const auto state = save_picture(scratch / "one");
  export_checkpoint(scratch / "one", scratch / "one.safetensors");
  const std::string text = run_python(EXCHANGE_SCRIPT, {"load_model", scratch / "one.safetensors"});
  if (text == "no safetensors\n") GTEST_SKIP() << "its Python has no package 'safetensors'";
  EXPECT_EQ(lines_in(text), lines_of(state));
}

TEST_F(CheckpointExchangePython, StateDictsAreImported) {
  const ScratchDirectory scratch;
  import_checkpoint(file("state_dict.pt"), scratch / "one");
  EXPECT_EQ(verify_checkpoint(scratch / "one"), std::vector<std::string>());
  expect_loads(scratch / "one", lines_of_file("state_dict.pt"), other_picture);
}

/// A module that has the Picture as `model`.
struct Trainee : torch::nn::Module {
  Trainee() { register_module("model", other_picture()); }
};

TEST_F(CheckpointExchangePython, DictsInDictsAreImportedWithoutWhatIsNoTensor) {
  const ScratchDirectory scratch;
  import_checkpoint(file("nested.pt"), scratch / "one");
  EXPECT_FALSE(fs::exists(file("executed"))) << "something of the file was executed";
  std::set<std::string> expected = lines_of_file("nested.pt"), names, expected_names;
  for (const CheckpointTensor& tensor : inspect_checkpoint(scratch / "one").tensors)
    names.insert(tensor.names.begin(), tensor.names.end());
  for (const auto& line : expected) expected_names.insert(line.substr(0, line.find(' ')));
  EXPECT_EQ(names, expected_names);
  EXPECT_EQ(names.count("optimizer.state.1.exp_avg"), 1u);
  std::erase_if(expected, [](const auto& line) { return line.starts_with("optimizer"); });
  expect_loads(scratch / "one", expected, [] { return std::make_shared<Trainee>(); },
               {.allow_unexpected = true});
}

TEST_F(CheckpointExchangePython, AModelIsImportedFromUnderItsKey) {
  const ScratchDirectory scratch;
  import_checkpoint(file("nested.pt"), scratch / "one", {.model_key = "model"});
  expect_loads(scratch / "one", lines_of_file("state_dict.pt"), other_picture);
  expect_contains(error_of([&] {
                    import_checkpoint(file("nested.pt"), scratch / "two", {.model_key = "net"});
                  }),
                  {"nested.pt'", "no tensors under the key 'net'"});
}

TEST_F(CheckpointExchangePython, ViewsAreImportedAsTheyLookAndEqualOnesAreTied) {
  const ScratchDirectory scratch;
  import_checkpoint(file("views.pt"), scratch / "one");
  expect_loads(scratch / "one", lines_of_file("views.pt"), [] {
    auto bag = std::make_shared<Bag>();
    const torch::Tensor row = torch::zeros({6});
    bag->add("all", torch::zeros({4, 6}));
    bag->add("row", row);
    bag->add("again", row);
    bag->add("column", torch::zeros({4}));
    bag->add("turned", torch::zeros({6, 4}));
    bag->add("wide", torch::zeros({3, 2}));
    bag->add("some", torch::zeros({3, 3}));
    return on_test_device(bag);
  });
}

TEST_F(CheckpointExchangePython, EveryDtypeIsImportedAndExportedAgain) {
  const ScratchDirectory scratch;
  import_checkpoint(file("dtypes.pt"), scratch / "one");
  const auto expected = lines_of_file("dtypes.pt");
  EXPECT_EQ(expected.size(), 11u);
  export_checkpoint(scratch / "one", scratch / "again.safetensors");
  import_checkpoint(scratch / "again.safetensors", scratch / "again");
  EXPECT_EQ(compare_checkpoints(scratch / "one", scratch / "again"), std::vector<std::string>());
  const auto make = [] {
    const std::map<std::string, torch::Dtype> dtypes = {{"float64", torch::kDouble},
                                                        {"float32", torch::kFloat},
                                                        {"float16", torch::kHalf},
                                                        {"bfloat16", torch::kBFloat16},
                                                        {"int64", torch::kLong},
                                                        {"int32", torch::kInt},
                                                        {"int16", torch::kShort},
                                                        {"int8", torch::kChar},
                                                        {"uint8", torch::kByte},
                                                        {"bool", torch::kBool},
                                                        {"complex64", torch::kComplexFloat}};
    auto bag = std::make_shared<Bag>();
    for (const auto& [name, dtype] : dtypes) {
      const torch::Tensor value = torch::zeros({7}, dtype);
      name == "float32" ? bag->add(name, value) : bag->add_buffer(name, value);
    }
    return on_test_device(bag);
  };
  expect_loads(scratch / "one", expected, make);
}

TEST_F(CheckpointExchangePython, WhatIsNoStateDictIsRefused) {
  const ScratchDirectory scratch;
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"module.pt", "it must hold a dict of tensors"},
      {"legacy.pt", "since PyTorch 1.6"},
      {"quantized.pt", "QInt8Storage"},
      {"sparse.pt", "_rebuild_sparse_tensor"},
      {"conjugated.pt", "a conjugated or negated view"},
      {"compressed.pt", "is compressed"},
      {"big_endian.pt", "big-endian"}};
  for (const auto& [name, reason] : cases) {
    expect_contains(error_of([&] { import_checkpoint(file(name), scratch / "one"); }),
                    {"[import_checkpoint]", file(name), reason});
    EXPECT_EQ(names_in(scratch.path()), std::vector<std::string>()) << name;
  }
  for (const char* name : {"rezipped.pt", "storage.pt"}) {
    import_checkpoint(file(name), scratch / "one");
    EXPECT_EQ(inspect_checkpoint(scratch / "one").tensors.size(), 1u) << name;
  }
}

// --- without
// ---------------------------------------------------------------------------------------

/// A safetensors file as other tools write it.
void write_safetensors(const fs::path& path, const std::vector<NamedTensor>& tensors,
                       const std::map<std::string, std::string>& metadata = {{"format", "pt"}}) {
  json header = {{"__metadata__", metadata}};
  std::string data;
  for (const auto& [name, value] : tensors) {
    const torch::Tensor ordered = value.contiguous();
    const size_t begin = data.size();
    data.append(static_cast<const char*>(ordered.data_ptr()), ordered.nbytes());
    header[name] = {{"dtype", value.scalar_type() == torch::kLong ? "I64" : "F32"},
                    {"shape", value.sizes().vec()},
                    {"data_offsets", {begin, data.size()}}};
  }
  const std::string text = header.dump();
  const uint64_t length = text.size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&length), 8) << text << data;
}

/// A model in three files, without the second name of its tied weight.
std::vector<std::vector<NamedTensor>> three_parts(const std::vector<NamedTensor>& state) {
  std::vector<std::vector<NamedTensor>> parts(3);
  size_t next = 0;
  for (const NamedTensor& item : state)
    if (item.name != "encode.weight") parts[next++ % 3].push_back(item);
  return parts;
}

std::string part_name(size_t part) {
  return fmt::format("model-0000{}-of-00003.safetensors", part + 1);
}

/// Those three files with their index, as Hugging Face's tools lay them out.
void write_indexed(const fs::path& directory, const std::vector<NamedTensor>& state) {
  fs::create_directories(directory);
  json map;
  const auto parts = three_parts(state);
  for (size_t part = 0; part < 3; ++part) {
    write_safetensors(directory / part_name(part), parts[part]);
    for (const NamedTensor& item : parts[part]) map[item.name] = part_name(part);
  }
  std::ofstream(directory / "model.safetensors.index.json")
      << json({{"metadata", {{"total_size", 0}}}, {"weight_map", map}});
}

TEST(CheckpointExchange, DirectoriesWithAnIndexAreImported) {
  const ScratchDirectory scratch;
  const auto state = plain_state(*make_picture(1));
  write_indexed(scratch / "model", state);
  std::ofstream((scratch / "model") / "config.json") << "{}";
  // Nothing is taken from a file that the index does not name.
  write_safetensors((scratch / "model") / "consolidated.safetensors", state);
  import_checkpoint(scratch / "model", scratch / "one");
  // Such files store a tied weight under only one of its names.
  auto picture = other_picture();
  expect_contains(error_of([&] { load_checkpoint(scratch / "one", *picture, nullptr); }),
                  {"missing in the checkpoint: 'encode.weight'"});
  EXPECT_EQ(load_checkpoint(scratch / "one", *picture, nullptr, {.allow_missing = true}).missing,
            std::vector<std::string>{"encode.weight"});
  expect_loads(scratch / "one", lines_of(state), other_picture, {.allow_missing = true});
}

TEST(CheckpointExchange, DirectoriesWithoutAnIndexAndSingleFilesAreImportedWithTheirTies) {
  const ScratchDirectory scratch;
  const auto state = plain_state(*make_picture(1));
  const auto parts = three_parts(state);
  const std::map<std::string, std::string> tie = {{"format", "pt"}, {"encode.weight", "decode"}};
  fs::create_directories(scratch / "model");
  std::vector<NamedTensor> all;
  for (size_t part = 0; part < 3; ++part) {
    write_safetensors((scratch / "model") / part_name(part), parts[part], tie);
    all.insert(all.end(), parts[part].begin(), parts[part].end());
  }
  write_safetensors(scratch / "model.safetensors", all, tie);
  for (const char* from : {"model", "model.safetensors"}) {
    import_checkpoint(scratch / from, scratch / "one");
    expect_loads(scratch / "one", lines_of(state), other_picture);
  }
}

TEST(CheckpointExchange, ExportsAreImportedAgain) {
  const ScratchDirectory scratch;
  const auto state = save_picture(scratch / "one");
  for (const char* name : {"one.safetensors", "one_model"}) {
    export_checkpoint(scratch / "one", scratch / name);
    import_checkpoint(scratch / name, scratch / "again");
    expect_loads(scratch / "again", lines_of(state), other_picture);
  }
  export_checkpoint(scratch / "one", scratch / "one.weights",
                    {.format = ExportFormat::kSafetensors});
  EXPECT_EQ(read_text(scratch / "one.weights"), read_text(scratch / "one.safetensors"));
}

TEST(CheckpointExchange, AnExportConvertsFloatingTensorsOnly) {
  const ScratchDirectory scratch;
  std::vector<NamedTensor> state = save_picture(scratch / "one", /*with_half=*/true);
  for (NamedTensor& item : state) {
    if (item.tensor.is_floating_point())
      item.tensor = item.tensor.to(torch::kHalf).to(torch::kFloat);
  }
  for (const char* name : {"half.safetensors", "half_model"}) {
    export_checkpoint(scratch / "one", scratch / name, {.dtype = torch::kHalf});
    import_checkpoint(scratch / name, scratch / "half");
    for (const CheckpointTensor& tensor : inspect_checkpoint(scratch / "half").tensors)
      EXPECT_EQ(tensor.dtype, tensor.names[0] == "norm.num_batches_tracked" ? "I64" : "F16");
    expect_loads(scratch / "half", lines_of(state), other_picture);
  }
}

TEST(CheckpointExchange, WhatCantBeExportedIsRefusedAndTheFileStays) {
  const ScratchDirectory scratch;
  save_picture(scratch / "one");
  std::ofstream(scratch / "old.safetensors") << "old";
  const auto error = [&](const fs::path& from, const fs::path& to,
                         const ExportOptions& options = {}) {
    return error_of([&] { export_checkpoint(from, to, options); });
  };
  expect_contains(error(scratch / "one", scratch / "model.onnx"),
                  {"[export_checkpoint] options.format", "model.onnx'"});
  for (const char* name : {"a.pt", "a.pth", "a.bin"})
    expect_contains(error(scratch / "one", scratch / name),
                    {"run `python -m tessera.exchange export CKPT '" + (scratch / name).string()});
  expect_contains(error(scratch / "one", scratch / "one", {.format = ExportFormat::kSafetensors}),
                  {"/one' must be a file"});
  expect_contains(error(scratch / "one", scratch / "old.safetensors", {.dtype = torch::kLong}),
                  {"options.dtype must be a floating one; got Long"});
  expect_contains(error(scratch / "none", scratch / "old.safetensors"), {"/none'"});
  expect_contains(error(scratch / "one", scratch / "none/one.safetensors"),
                  {(scratch / "none").string()});
  fs::resize_file((scratch / "one") / "rank-00001-of-00002.safetensors", 100);
  for (const char* name : {"old.safetensors", "new.safetensors", "new"})
    expect_contains(error(scratch / "one", scratch / name), {"one/rank-00001-of-00002"});
  EXPECT_EQ(read_text(scratch / "old.safetensors"), "old");
  EXPECT_EQ(names_in(scratch.path()), (std::vector<std::string>{"old.safetensors", "one"}));
}

TEST(CheckpointExchange, BrokenFilesAreRefusedByName) {
  const ScratchDirectory scratch;
  const fs::path sources = scratch / "sources";
  fs::create_directories(sources);
  const auto make_file = [&](const std::string& name, const std::string& text) {
    std::ofstream(sources / name, std::ios::binary) << text;
  };
  std::vector<std::pair<std::string, torch::Tensor>> state;
  for (const auto& [name, value] : save_picture(scratch / "saved")) state.emplace_back(name, value);
  write_torch_state(sources / "whole.pt", state);
  import_checkpoint(sources / "whole.pt", scratch / "whole");
  fs::remove_all(scratch / "whole");
  export_checkpoint(scratch / "saved", sources / "whole.safetensors");
  const std::string zip = read_text(sources / "whole.pt"),
                    safetensors = read_text(sources / "whole.safetensors");
  make_file("half.pt", zip.substr(0, zip.size() / 2));
  make_file("tail.pt", zip.substr(zip.size() / 2));
  make_file("empty.pt", "");
  make_file("text.pt", "not a zip file");
  make_file("half.safetensors", safetensors.substr(0, safetensors.size() / 2));
  make_file("short.safetensors", safetensors.substr(0, 20));
  make_file("empty.safetensors", "");
  const auto with_header = [](const json& header) {
    const std::string text = header.dump();
    const uint64_t length = text.size();
    return std::string(reinterpret_cast<const char*>(&length), 8) + text + std::string(8, 'x');
  };
  const auto tensor = [](const char* dtype, const json& shape) {
    return json({{"a", {{"dtype", dtype}, {"shape", shape}, {"data_offsets", {0, 8}}}}});
  };
  make_file("dtype.safetensors", with_header(tensor("F3", {2})));
  make_file("shape.safetensors", with_header(tensor("F32", {3})));
  make_file("negative.safetensors", with_header(tensor("F32", {-1, -2})));
  make_file("nothing.safetensors", with_header(json::object()));
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"none.pt", "No such file"},
      {"half.pt", "torch.save"},
      {"tail.pt", "torch.save"},
      {"empty.pt", "torch.save"},
      {"text.pt", "torch.save"},
      {"none.safetensors", "No such file"},
      {"half.safetensors", "is cut off"},
      {"short.safetensors", "too few for a header"},
      {"empty.safetensors", "too few for a header"},
      {"dtype.safetensors", "'F3'"},
      {"shape.safetensors", "must be 3 elements of F32"},
      {"negative.safetensors", "whole number from 0 to"},
      {"nothing.safetensors", "has no tensors"}};
  for (const auto& [name, reason] : cases) {
    expect_contains(error_of([&] { import_checkpoint(sources / name, scratch / "one"); }),
                    {(sources / name).string(), reason});
    EXPECT_EQ(names_in(scratch.path()), (std::vector<std::string>{"saved", "sources"})) << name;
  }
}

TEST(CheckpointExchange, BrokenDirectoriesAreRefusedByName) {
  const ScratchDirectory scratch;
  const fs::path model = scratch / "model", index = model / "model.safetensors.index.json";
  const auto expect_refused = [&](const std::vector<std::string>& parts) {
    expect_contains(error_of([&] { import_checkpoint(model, scratch / "one"); }), parts);
    EXPECT_EQ(names_in(scratch.path()), std::vector<std::string>{"model"});
  };
  fs::create_directories(model);
  expect_refused({model, "must have safetensors files"});
  write_indexed(model, plain_state(*make_picture(1)));
  const std::string text = read_text(index);
  fs::rename(model / part_name(1), model / "moved");
  expect_refused({model / part_name(1), "No such file"});
  write_safetensors(model / part_name(1), {{"other", torch::ones({2})}});
  expect_refused({model / part_name(1), "lacks tensors", "model.safetensors.index.json"});
  std::ofstream(index) << R"({"weight_map": {"a": "../other.safetensors"}})";
  expect_refused({index, "beside the index", "../other.safetensors"});
  std::ofstream(index) << R"({"weight_map": ["a"]})";
  expect_refused({index, "weight_map"});
  std::ofstream(index) << text.substr(0, text.size() / 2);
  expect_refused({index, "weight_map"});
  for (const char* name : {"one", "other"})
    fs::copy_file(index, model / (std::string(name) + ".safetensors.index.json"));
  expect_refused({index, "weight_map"});  // the index that is read
  fs::remove(index);
  expect_refused({model, "must have one index", "it has 2"});
  for (const char* name : {"one", "other"})
    fs::remove(model / (std::string(name) + ".safetensors.index.json"));
  fs::copy_file(model / part_name(0), model / "copy.safetensors");
  expect_refused({model, "must have the files of one model", "copy.safetensors"});
  fs::remove(model / part_name(1));
  expect_refused({model, "lacks '" + part_name(1) + "'"});
  for (const size_t part : {0, 2})
    fs::rename(model / part_name(part), model / fmt::format("part{}.safetensors", part));
  expect_refused({model, "twice", "copy.safetensors", "part0.safetensors"});
}

TEST(CheckpointExchange, AnImportReplacesACheckpointAndNothingElse) {
  const ScratchDirectory scratch;
  save_picture(scratch / "one");
  write_safetensors(scratch / "new.safetensors", {{"a", torch::ones({2})}});
  import_checkpoint(scratch / "new.safetensors", scratch / "one");
  EXPECT_EQ(inspect_checkpoint(scratch / "one").tensors.size(), 1u);
  fs::create_directories(scratch / "notes");
  std::ofstream((scratch / "notes") / "notes.txt") << "text";
  expect_contains(
      error_of([&] { import_checkpoint(scratch / "new.safetensors", scratch / "notes"); }),
      {"/notes'", "it has 'notes.txt'"});
  // A model's files are not a checkpoint's, though they have similar names.
  write_indexed(scratch / "model", plain_state(*make_picture(1)));
  EXPECT_NE(error_of([&] { import_checkpoint(scratch / "model", scratch / "model"); }), "");
  EXPECT_EQ(names_in(scratch / "model").size(), 4u);
}

}  // namespace exchange_test
}  // namespace tessera::testing
