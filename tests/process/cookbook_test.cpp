// The programs of the cookbook, on two ranks: they train, and a run that is taken up again at an
// earlier checkpoint logs the same numbers.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "example_files.h"
#include "launched.h"

namespace tessera::cookbook_test {

namespace fs = std::filesystem;

const std::map<std::string, std::string> kEnvironment = {
    {"OMP_NUM_THREADS", "1"}, {"TESSERA_RUN", ""},          {"RANK", ""},
    {"WORLD_SIZE", ""},       {"OMPI_COMM_WORLD_RANK", ""}, {"SLURM_PROCID", ""}};

ProgramEnd cook(const std::string& recipe, const std::string& runs, const Command& options,
                int ranks = 2) {
  const Command command = {
      TESSERA_CLI, "run", "-n", std::to_string(ranks), std::string(COOKBOOK) + "/" + recipe,
      "--runs",    runs};
  ProgramEnd end = run_program(with(command, options),
                               {.environment = kEnvironment, .limit = std::chrono::seconds(100)});
  EXPECT_EQ(end.status, 0) << recipe << "\n" << end.out << end.err;
  return end;
}

// The rows of a log by step, without the column of times.
std::map<int, std::string> log_of(const std::string& runs) {
  std::istringstream text(read_file(runs + "/metrics.csv"));
  std::map<int, std::string> rows;
  std::string line;
  std::getline(text, line);
  while (std::getline(text, line)) {
    const size_t first = line.find(','), second = line.find(',', first + 1);
    rows[std::stoi(line.substr(0, first))] = line.substr(second + 1);
  }
  return rows;
}

// The checkpoint whose name ends with the highest number.
fs::path latest(const std::string& runs) {
  std::map<int, fs::path> found;
  for (const auto& entry : fs::directory_iterator(runs)) {
    const std::string name = entry.path().filename();
    const size_t dash = name.rfind('-');
    if (entry.is_directory() && dash != std::string::npos)
      found[std::stoi(name.substr(dash + 1))] = entry.path();
  }
  return found.empty() ? fs::path() : found.rbegin()->second;
}

// Returns the numbers of the last line that begins with `beginning`.
std::vector<double> numbers_of(const std::string& out, const std::string& beginning) {
  const size_t at = out.rfind(beginning);
  std::vector<double> numbers;
  if (at == std::string::npos) return numbers;
  std::string line = out.substr(at, out.find('\n', at) - at);
  for (char& c : line)
    if (c != '.' && !std::isdigit(static_cast<unsigned char>(c))) c = ' ';
  std::istringstream text(line);
  for (std::string word; text >> word;)
    if (word != ".") numbers.push_back(std::stod(word));
  return numbers;
}

// Trains, takes the last checkpoint away, trains again from the one before, and expects `steps`
// rows with the same numbers. Returns what the first run printed.
std::string train_and_resume(const std::string& recipe, const TemporaryDirectory& directory,
                             const Command& options, size_t steps) {
  const std::string runs = directory.path("runs");
  const ProgramEnd first = cook(recipe, runs, options);
  const auto log = log_of(runs);
  EXPECT_EQ(log.size(), steps);
  fs::remove_all(latest(runs));
  EXPECT_FALSE(latest(runs).empty()) << "no checkpoint to go on from";
  const ProgramEnd second = cook(recipe, runs, options);
  EXPECT_EQ(log_of(runs), log) << recipe;
  return first.out;
}

TEST(Cookbook, Resnet) {
  const TemporaryDirectory directory;
  std::ofstream digits(directory.path("digits"), std::ios::binary);
  digits << "digits 250\n";  // of class c, row c is black
  std::string labels;
  for (int i = 0; i < 250; ++i) {
    const int label = i * 7 % 8;
    std::string image(64, '\0');
    image.replace(8 * label, 8, 8, '\x10');
    digits << image;
    labels += static_cast<char>(label);
  }
  digits << labels << std::flush;
  const std::string out =
      train_and_resume("resnet", directory,
                       {"--data", directory.path("digits"), "--epochs", "3", "--batch", "10"}, 30);
  const auto numbers = numbers_of(out, "after step 30");
  ASSERT_EQ(numbers.size(), 2u) << out;
  EXPECT_GT(numbers[1], 30) << "per cent; by chance 12.5";
}

TEST(Cookbook, Gpt2) {
  const TemporaryDirectory directory;
  const ProgramEnd made = run_program({TESSERA_PYTHON, "-B", MAKE_GPT2, directory.path()});
  ASSERT_EQ(made.status, 0) << made.err;
  for (const Command& precision : {Command{}, Command{"--bfloat16"}}) {
    fs::remove_all(directory.path("runs"));
    train_and_resume("gpt2", directory,
                     with({"--model", directory.path(), "--tokens", directory.path("tokens.bin"),
                           "--steps", "12", "--length", "32", "--save-every", "5", "--lr", "1e-2"},
                          precision),
                     12);
    const auto log = log_of(directory.path("runs"));
    const double first = std::stod(log.at(1)), last = std::stod(log.at(12));
    EXPECT_NEAR(first, std::log(96), 0.1);
    EXPECT_LT(last, first - 1);
  }
}

TEST(Cookbook, Lora) {
  const TemporaryDirectory directory;
  write_text(directory.path("text"));
  const std::string out = train_and_resume(
      "lora", directory, {"--data", directory.path("text"), "--steps", "12", "--save-every", "5"},
      12);
  const auto log = log_of(directory.path("runs"));
  EXPECT_LT(std::stod(log.at(12)), std::stod(log.at(1)));
  EXPECT_TRUE(fs::exists(directory.path("runs/updates/index.json")));
  const auto numbers = numbers_of(out, "rank 0 keeps");
  ASSERT_EQ(numbers.size(), 3u) << out;
  EXPECT_LT(numbers[2], numbers[1] / 5) << "the frozen weights have no optimizer state";
}

TEST(Cookbook, Experts) {
  const TemporaryDirectory directory;
  write_text(directory.path("text"));
  const auto run = [&](const std::string& runs, int ranks, const std::string& copies) {
    cook("experts", directory.path(runs),
         {"--data", directory.path("text"), "--steps", "12", "--save-every", "5", "--double",
          "--copies", copies},
         ranks);
    return log_of(directory.path(runs));
  };
  const auto alone = run("alone", 1, "1");
  ASSERT_EQ(alone.size(), 12u);
  EXPECT_LT(std::stod(alone.at(12)), std::stod(alone.at(1)));
  const auto expect_as_alone = [&](const std::map<int, std::string>& log) {
    ASSERT_EQ(log.size(), 12u);
    // Sums of about a thousand terms in other orders, in 12 steps.
    for (const auto& [step, loss] : log)
      EXPECT_NEAR(std::stod(loss), std::stod(alone.at(step)), 1e-11) << step;
  };
  expect_as_alone(run("mesh", 4, "2"));
  // From the checkpoint at step 10, at other degrees.
  fs::remove_all(latest(directory.path("mesh")));
  for (const auto& [ranks, copies] : {std::pair(4, "1"), {4, "4"}, {1, "1"}}) {
    const std::string runs = fmt::format("from_{}_{}", ranks, copies);
    fs::copy(directory.path("mesh"), directory.path(runs), fs::copy_options::recursive);
    expect_as_alone(run(runs, ranks, copies));
  }
}

TEST(Cookbook, Gan) {
  const TemporaryDirectory directory;
  const std::string out =
      train_and_resume("gan", directory, {"--steps", "30", "--save-every", "12"}, 30);
  EXPECT_EQ(numbers_of(out, "after step 30").size(), 6u) << out;
  EXPECT_TRUE(fs::exists(latest(directory.path("runs")) / "average/index.json"));
}

TEST(Cookbook, Reinforce) {
  const TemporaryDirectory directory;
  const std::string out =
      train_and_resume("reinforce", directory, {"--rounds", "15", "--moves", "200"}, 15);
  const auto numbers = numbers_of(out, "after round 15");
  ASSERT_EQ(numbers.size(), 3u) << out;
  EXPECT_GT(numbers[1], 5);
}

TEST(Cookbook, EarlyStopping) {
  const TemporaryDirectory directory;
  const std::string out =
      train_and_resume("early_stopping", directory, {"--epochs", "8", "--patience", "8"}, 8);
  const auto numbers = numbers_of(out, "stopped after epoch");
  ASSERT_EQ(numbers.size(), 4u) << out;
  EXPECT_GE(numbers[0], numbers[1]);
  EXPECT_LT(numbers[3], 24) << "the variance of the targets";
}

}  // namespace tessera::cookbook_test
