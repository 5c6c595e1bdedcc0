#pragma once

#include <set>
#include <string>
#include <vector>

#include "watched_process.h"

namespace tessera {

/// The cause that survivors should find.
struct Culprit {
  std::set<int> ranks;  ///< any of them
  std::string other;    ///< regular expression for a cause that is no rank; may be empty
};

/// The contents of a survivor's report.
struct Blame {
  bool names_culprit = false;
  /// It names ranks, but not the culprit; or it says of another rank, before it comes to the
  /// culprit, that it failed.
  bool blames_another = false;
  bool places = false;  ///< it names a step and a collective
  double at = 0;        ///< when the culprit's name arrived
};

/// Reads the lines that rank `self` wrote to stderr from the fault on.
Blame find_blame(const std::vector<Line>& report, int self, const Culprit& culprit);

}  // namespace tessera
