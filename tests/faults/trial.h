#pragma once

#include <string>
#include <vector>

#include "fault_case.h"

namespace tessera {

/// The circumstances in which a fault is tried: one row of the table.
struct Cell {
  const FaultCase* fault = nullptr;
  std::string transport;
  int ranks = 2;
  int hosts = 1;  ///< in network namespaces, if there are several
};

/// The result of one trial.
struct Outcome {
  int survivors = 0;      ///< ranks that should report
  int named = 0;          ///< of these, ranks that name the culprit and blame no other rank
  int blamed_others = 0;  ///< ranks that blame another one
  int placed = 0;         ///< ranks that name a step and a collective
  std::vector<double>
      seconds;  ///< from the fault to the culprit's name, for each rank that names it
  std::vector<std::string>
      leftovers;        ///< processes, files and mounts that are left, and ranks that hang
  std::string account;  ///< the ranks' own words, with times
};

/// Starts a job, commits the fault and reads the reports of the ranks. `number` counts the trials
/// of the cell: it selects the culprit and the moment. Throws `std::runtime_error` if the fault
/// can't be committed.
Outcome try_fault(const Cell& cell, int number);

/// The reason why the cell can't be tried here; empty if it can.
std::string obstacle_to(const Cell& cell);

}  // namespace tessera
