#pragma once

#include <tessera/comm/process_group.h>

#include <cstdint>
#include <string>

namespace tessera {

/// Where a parameter may be cut between ranks.
enum class Cut : uint8_t {
  kAnywhere,  ///< between any two elements
  kRows,      ///< between blocks of rows: indices of the first dim
  kElements,  ///< between blocks of elements, in the order of memory
  kWhole,     ///< nowhere: it is on one rank, its owner
};

/// Says where parameters may be cut.
struct CutRule {
  /// A parameter's name, or a pattern of names, in which `*` stands for any characters.
  std::string names;
  Cut cut = Cut::kWhole;
  /// Rows or elements of a block that stays together, from the parameter's start; the last block
  /// may be smaller. Several blocks stay together where a border between them would not be at a
  /// multiple of 64 bytes.
  int64_t size = 1;
  /// The rule is for parameters of at least so many dims.
  int64_t min_dim = 0;

  bool operator==(const CutRule&) const = default;
};

/// Names parameters that fewer ranks share than the rest of the model, such as the experts of a
/// mixture, and those ranks.
struct GroupRule {
  /// A parameter's name, or a pattern of names, as in `CutRule`.
  std::string names;
  /// The ranks that have equal values of these parameters, this one among them: a part of the ranks
  /// that train the model. `single_process_group()`: this rank alone.
  ProcessGroupPtr process_group;
};

}  // namespace tessera
