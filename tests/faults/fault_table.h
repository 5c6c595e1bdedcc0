#pragma once

#include <string>
#include <vector>

#include "trial.h"

namespace tessera {

/// The outcomes of all trials so far, by cell.
class FaultTable {
 public:
  void add(const Cell& cell, const std::vector<Outcome>& outcomes);
  bool is_empty() const { return rows_.empty(); }
  /// As a Markdown table, a row for each cell.
  std::string text() const;

 private:
  std::vector<std::string> rows_;
};

}  // namespace tessera
