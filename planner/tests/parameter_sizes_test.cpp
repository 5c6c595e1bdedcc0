// Sizes of parameters, from models, files and thin air.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <tessera/planner/plan_report.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <thread>

#include "support/models.h"
#include "support/paper_net.h"
#include "support/scratch_directory.h"

namespace tessera {
namespace parameter_sizes_test {

using namespace testing;

void expect_same_sizes(const std::vector<ParameterSize>& actual,
                       const std::vector<ParameterSize>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(actual[i].names, expected[i].names);
    EXPECT_EQ(actual[i].shape, expected[i].shape) << expected[i].names[0];
    EXPECT_EQ(actual[i].dtype, expected[i].dtype) << expected[i].names[0];
    EXPECT_EQ(actual[i].trainable, expected[i].trainable) << expected[i].names[0];
  }
}

std::string write_text(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path) << text;
  return path;
}

// Writes a safetensors file with this header and so many bytes of data.
std::string write_safetensors(const std::filesystem::path& path, const std::string& header,
                              size_t nbytes) {
  const uint64_t length = header.size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&length), sizeof(length));
  file << header << std::string(nbytes, '\0');
  return path;
}

TEST(ParameterSizes, OfAModelAreItsDistinctParametersInOrder) {
  const PaperNet net;
  const auto sizes = parameter_sizes(net);
  ASSERT_EQ(sizes.size(), 11U);
  EXPECT_EQ(sizes[0].names, (std::vector<std::string>{"empty"}));
  EXPECT_EQ(sizes[1].names, (std::vector<std::string>{"tied", "in.weight"}));
  EXPECT_EQ(sizes[1].shape, (std::vector<int64_t>{7, 13}));
  EXPECT_TRUE(sizes[1].trainable);
  const auto frozen = std::find_if(sizes.begin(), sizes.end(), [](const ParameterSize& size) {
    return size.names[0] == "frozen.weight";
  });
  ASSERT_NE(frozen, sizes.end());
  EXPECT_FALSE(frozen->trainable);
}

TEST(ParameterSizes, AreReadFromALineEach) {
  const ScratchDirectory directory;
  const auto path = write_text(directory / "model.sizes",
                               "# a model\n\nfc.weight float32 4 3  # rows, columns\n"
                               "fc.bias\tBF16 4\nscale fp64\nembed half 7 2 frozen\nids int64 5\n");
  expect_same_sizes(read_parameter_sizes(path), {{{"fc.weight"}, {4, 3}, at::kFloat},
                                                 {{"fc.bias"}, {4}, at::kBFloat16},
                                                 {{"scale"}, {}, at::kDouble},
                                                 {{"embed"}, {7, 2}, at::kHalf, false},
                                                 {{"ids"}, {5}, at::kLong, false}});
}

TEST(ParameterSizes, AreReadFromTheHeadersOfSafetensorsFilesInTheOrderOfTheirBytes) {
  const ScratchDirectory directory;
  const auto path = write_safetensors(
      directory / "model-00001-of-00002.safetensors",
      R"({"__metadata__":{},"b":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},)"
      R"("a":{"dtype":"BF16","shape":[3],"data_offsets":[8,14]}})",
      14);
  const std::vector<ParameterSize> first = {{{"b"}, {2, 1}, at::kFloat},
                                            {{"a"}, {3}, at::kBFloat16}};
  expect_same_sizes(read_parameter_sizes(path), first);
  write_safetensors(directory / "model-00002-of-00002.safetensors",
                    R"({"c":{"dtype":"I64","shape":[],"data_offsets":[0,8]}})", 8);
  expect_same_sizes(read_parameter_sizes(directory.path()),
                    {first[0], first[1], {{"c"}, {}, at::kLong, false}});
}

// The directory of a model as Hugging Face's tools write it.
TEST(ParameterSizes, OfADirectoryWithAnIndexAreThoseOfTheFilesThatItNames) {
  const ScratchDirectory directory;
  const auto header = [](const std::string& name) {
    return R"({")" + name + R"(":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  };
  const std::string first = "model-00001-of-00002.safetensors",
                    second = "model-00002-of-00002.safetensors";
  write_safetensors(directory / first, header("a"), 8);
  write_safetensors(directory / second, header("b"), 8);
  write_safetensors(directory / "consolidated.safetensors", header("a"), 8);
  write_text(directory / "model.safetensors.index.json",
             R"({"weight_map":{"a":")" + first + R"(","b":")" + second + R"("}})");
  expect_same_sizes(read_parameter_sizes(directory.path()),
                    {{{"a"}, {2}, at::kFloat}, {{"b"}, {2}, at::kFloat}});
  std::filesystem::remove(directory / second);
  expect_error([&] { read_parameter_sizes(directory.path()); },
               {directory / second, "No such file"});
  // Without the index, the numbers in the names still tell, and show that there are two models.
  std::filesystem::remove(directory / "model.safetensors.index.json");
  expect_error([&] { read_parameter_sizes(directory.path()); }, {"lacks '" + second + "'"});
  write_safetensors(directory / second, header("b"), 8);
  expect_error([&] { read_parameter_sizes(directory.path()); },
               {"files of one model", "consolidated.safetensors"});
}

TEST(ParameterSizes, AreReadFromTiesOfASafetensorsFile) {
  const ScratchDirectory directory;
  const auto path = write_safetensors(
      directory / "model.safetensors",
      R"({"__metadata__":{"b":"a"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8);
  expect_same_sizes(read_parameter_sizes(path), {{{"a", "b"}, {2}, at::kFloat}});
}

TEST(ParameterSizes, AreReadFromAnImportedCheckpoint) {
  const ScratchDirectory directory;
  save_state_dict(directory / "saved", {{"a", torch::ones({2, 3})}});
  expect_same_sizes(read_parameter_sizes(directory / "saved"), {{{"a"}, {2, 3}, at::kFloat}});
}

TEST(ParameterSizes, AreReadFromAPipe) {
  const ScratchDirectory directory;
  const std::string path = directory / "list";
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  const int reader = ::open(path.c_str(), O_RDONLY | O_NONBLOCK);  // so that the writer can open it
  std::thread writer([&] {
    std::ofstream file(path);
    file << "a float32 2\n" << std::flush;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    file << "b float32 3\n";
  });
  const auto sizes = read_parameter_sizes(path);
  ::close(reader);
  writer.join();
  expect_same_sizes(sizes, {{{"a"}, {2}, at::kFloat}, {{"b"}, {3}, at::kFloat}});
}

TEST(ParameterSizes, AreReadFromACheckpointWithTies) {
  const ScratchDirectory directory;
  const auto net = std::make_shared<PaperNet>();
  for (auto& param : net->parameters()) param.requires_grad_();  // a checkpoint does not say
  const auto sizes = parameter_sizes(*net);
  auto sharded = fully_shard(net);
  save_checkpoint(directory / "saved", sharded, nullptr);
  auto read = read_parameter_sizes(directory / "saved");
  ASSERT_EQ(read.size(), sizes.size());
  for (const ParameterSize& size : sizes) {
    const auto found = std::find_if(read.begin(), read.end(), [&](const ParameterSize& other) {
      return other.names == size.names;
    });
    ASSERT_NE(found, read.end()) << size.names[0];
    EXPECT_EQ(found->shape, size.shape);
    EXPECT_EQ(found->dtype, size.dtype);
  }
  // The directory of a run stands for its latest checkpoint.
  std::filesystem::rename(directory / "saved", directory / "step-7");
  std::filesystem::create_directory(directory / "step-8");
  expect_same_sizes(read_parameter_sizes(directory / ""), read);
}

TEST(ParameterSizes, AreMadeUpEqualToOneElement) {
  expect_same_sizes(made_up_parameter_sizes(11, 3, at::kHalf), {{{"layers.0"}, {4}, at::kHalf},
                                                                {{"layers.1"}, {4}, at::kHalf},
                                                                {{"layers.2"}, {3}, at::kHalf}});
  expect_error([] { made_up_parameter_sizes(2, 3, at::kHalf); }, {"3 layers", "2 elements"});
  expect_error([] { made_up_parameter_sizes(2, 0, at::kHalf); }, {"0 layers"});
}

TEST(ParameterSizes, RefuseWhatIsNoList) {
  const ScratchDirectory directory;
  const auto expect_refused = [&](const std::string& text, const std::vector<std::string>& parts) {
    const auto path = write_text(directory / "list", text);
    expect_error([&] { read_parameter_sizes(path); }, parts);
  };
  expect_refused("", {"holds no parameters"});
  expect_refused("a\n", {"line 1", "name dtype size", "'a' alone"});
  expect_refused("a float32 2\n\nb float9 2\n", {"line 3", "float9"});
  expect_refused("a float32 2 x\n", {"line 1", "'x' for a size"});
  expect_refused("a float32 -2\n", {"'-2' for a size"});
  expect_refused("a float32 2.5\n", {"'2.5' for a size"});
  expect_refused("a float32 4611686018427387904 4\n", {"sizes of 'a'"});
  expect_refused("a float32 0 4611686018427387904 4611686018427387904\n", {"sizes of 'a'"});
  expect_refused("a float32 4294967296 4294967296 4\n", {"sizes of 'a'"});
  expect_refused("a int8 9000000000000000\nb int8 1\n", {"with parameter 'b' it has more"});
  expect_refused(std::string(100'000, 'a') + "\n", {"line 1", "aaa...' alone"});
  expect_error([&] { read_parameter_sizes(directory / "none"); },
               {"there is no file or directory '", "none"});
  std::filesystem::create_directory(directory / "empty");
  expect_error([&] { read_parameter_sizes(directory / "empty"); }, {"must have safetensors files"});
  const auto text = write_text(directory / "a.safetensors", "no header at all, but long enough");
  expect_error([&] { read_parameter_sizes(text); }, {"a.safetensors", "safetensors file"});
  const auto odd = write_safetensors(directory / "a.safetensors",
                                     R"({"a":{"dtype":"Q4","shape":[2],"data_offsets":[0,1]}})", 1);
  expect_error([&] { read_parameter_sizes(odd); }, {"Q4"});
}

}  // namespace parameter_sizes_test
}  // namespace tessera
