#pragma once

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "program_run.h"

namespace tessera {

/// A text for the examples to learn.
inline void write_text(const std::string& path) {
  std::ofstream text(path);
  for (int i = 0; i < 400; ++i) text << "line " << i * i << " of a text\n";
}

/// The loss of each step, as an example wrote them with `--losses`.
inline std::vector<double> read_losses(const std::string& path) {
  std::istringstream text(read_file(path));
  std::vector<double> losses;
  for (double loss = 0; text >> loss;) losses.push_back(loss);
  return losses;
}

}  // namespace tessera
