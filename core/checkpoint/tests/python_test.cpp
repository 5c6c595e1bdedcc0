#include <tessera/interop/exchange.h>

#include "checkpoint/tests/python_lines.h"
#include "checkpoint/tests/saved_job.h"

namespace tessera::testing::python_test {

// Returns read_safetensors.py's output for the checkpoint's files whose names start with `prefix`.
std::string read_by_python(const std::filesystem::path& checkpoint, const std::string& prefix) {
  std::vector<std::string> files;
  for (const std::string& name : names_in(checkpoint)) {
    if (name.starts_with(prefix)) files.push_back(checkpoint / name);
  }
  const std::string text = run_python(SAFETENSORS_SCRIPT, files);
  expect_contains(text, {"\npackage "});
  if (text.ends_with("package none\n")) {
    std::printf("read by the script alone: its Python has no package 'safetensors'\n");
  }
  return text;
}

class CheckpointPython : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::string(TESSERA_PYTHON).empty()) GTEST_SKIP() << "CMake found no Python";
  }
};

TEST_F(CheckpointPython, ReadsWholeParametersAsAStateDict) {
  const ScratchDirectory scratch;
  std::vector<NamedTensor> state;
  run_world(3, [&](World& world) {
    auto module = make_picture(1);
    module->norm->weight.set_data(module->norm->weight.detach().to(torch::kBFloat16));
    auto sharded = fully_shard(module, {.unit_bytes = 1000});
    save_checkpoint(scratch / "one", sharded, nullptr, {.whole_parameters = true});
    const auto full = sharded.full_state();
    if (world.rank() == 0) state = full;
  });
  const std::string text = read_by_python(scratch / "one", "model-");
  std::set<std::string> expected;
  for (const auto& [name, value] : state) {
    if (name != "encode.weight") expected.insert(line_of(name, value));  // stored as 'decode'
  }
  EXPECT_EQ(lines_in(text.substr(0, text.rfind("package "))), expected);
}

TEST_F(CheckpointPython, ReadsTheRankFilesOfEitherKind) {
  const ScratchDirectory scratch;
  for (const bool whole : {false, true}) {
    run_world(2, [&](World&) {
      Job job(1, plans()[3]);
      job.train(0, 2);
      save_checkpoint(scratch / "one", job.sharded, &job.optimizer, {.whole_parameters = whole});
    });
    const std::string text = read_by_python(scratch / "one", "rank-");
    int64_t lines = 0;
    const auto index = read_index(scratch / "one");
    for (const auto& tensor : index.at("tensors")) {
      const bool in_rank_file =
          !whole || tensor.at("kind") == "state" || tensor.at("kind") == "rank";
      for (const auto& chunk : tensor.at("chunks")) {
        if (!in_rank_file) continue;
        ++lines;
        const auto numel = chunk.at("end").get<int64_t>() - chunk.at("begin").get<int64_t>();
        expect_contains(text, {fmt::format("{} {} {} ", chunk.at("key").get<std::string>(),
                                           tensor.at("dtype").get<std::string>(), numel)});
      }
    }
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), lines + 1);
  }
}

TEST_F(CheckpointPython, TheReaderOfTheGuideReadsShardsAndBoxes) {
  const ScratchDirectory scratch;
  run_world(3, [&](World&) {
    Job job(1, plans()[3]);
    save_checkpoint(scratch / "shards", job.sharded, &job.optimizer);
  });
  run_world(4, [&](World& world) {
    const auto mesh = DeviceMesh::over_world(world, {2, 2});
    const torch::Tensor values = on_test_device(torch::arange(120.).view({12, 10}));
    save_state_dict(scratch / "boxes",
                    {{"cut", distribute(values, mesh, {Shard{1}, Shard{0}})},
                     {"in blocks", distribute(values, mesh, {Replicate{}, Shard{0, 3}})},
                     {"whole", distribute(values, mesh, {})}});
  });
  const std::filesystem::path folder = std::filesystem::path(SAFETENSORS_SCRIPT).parent_path();
  for (const char* name : {"shards", "boxes"}) {
    const std::filesystem::path file = scratch / (name + std::string(".safetensors"));
    export_checkpoint(scratch / name, file);
    const std::string text =
        run_python((folder / "compare_with_guide.py").string(),
                   {folder.parent_path().parent_path().parent_path() / "docs" / "guide",
                    scratch / name, file});
    if (text.find("no safetensors") != std::string::npos)
      GTEST_SKIP() << "its Python has no package 'safetensors'";
    expect_contains(text, {" tensors"});
  }
}

}  // namespace tessera::testing::python_test
