#pragma once

// Tensors as lines of text, in the format that the Python scripts of this folder print.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdio>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace tessera::testing {

/// Returns the stdout and stderr of `script`. Fails the test if the script fails.
inline std::string run_python(const std::string& script,
                              const std::vector<std::string>& arguments) {
  std::string command = fmt::format("'{}' -B '{}'", TESSERA_PYTHON, script);
  for (const std::string& argument : arguments) command += fmt::format(" '{}'", argument);
  std::FILE* pipe = ::popen((command + " 2>&1").c_str(), "r");
  std::string text;
  char buffer[4096];
  while (const size_t count = std::fread(buffer, 1, sizeof(buffer), pipe))
    text.append(buffer, count);
  EXPECT_EQ(::pclose(pipe), 0) << text;
  return text;
}

inline std::string hex_of(const torch::Tensor& value) {
  const torch::Tensor ordered = value.cpu().contiguous();
  const auto* bytes = static_cast<const unsigned char*>(ordered.data_ptr());
  std::string text;
  for (size_t i = 0; i < ordered.nbytes(); ++i) text += fmt::format("{:02x}", bytes[i]);
  return text.empty() ? "-" : text;
}

/// Formats a tensor as NAME DTYPE SHAPE BYTES.
inline std::string line_of(const std::string& name, const torch::Tensor& value) {
  static const std::map<torch::Dtype, std::string> kDtypes = {
      {torch::kDouble, "F64"},    {torch::kFloat, "F32"},       {torch::kHalf, "F16"},
      {torch::kBFloat16, "BF16"}, {torch::kLong, "I64"},        {torch::kInt, "I32"},
      {torch::kShort, "I16"},     {torch::kChar, "I8"},         {torch::kByte, "U8"},
      {torch::kBool, "BOOL"},     {torch::kComplexFloat, "C64"}};
  return fmt::format(
      "{} {} {} {}", name, kDtypes.at(value.scalar_type()),
      value.dim() == 0 ? "-" : fmt::format("{}", fmt::join(value.sizes().vec(), ",")),
      hex_of(value));
}

inline std::set<std::string> lines_in(const std::string& text) {
  std::set<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.insert(line);
  return lines;
}

}  // namespace tessera::testing
