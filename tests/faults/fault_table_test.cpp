// Ranks, one of whose kind commits a fault: the others must name it soon, and nothing may be left
// over.
//
// TESSERA_FAULT_TRIALS: trials of each cell, by default 1 or, in the nightly tests, 5.
// TESSERA_FAULT_TABLE: a file for the table. TESSERA_FAULT_VERBOSE=1 prints the ranks' own words.
#include "fault_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iostream>
#include <tuple>

#include "process/own_shared_memory.h"

namespace tessera::fault_table_test {

FaultTable& table() {
  static FaultTable result;
  return result;
}

// Prints the table when all tests have run. What other programs leave in /dev/shm is not in it.
class PrintedTable : public ::testing::Environment {
 public:
  void SetUp() override { take_own_shared_memory(); }
  void TearDown() override {
    if (table().is_empty()) return;
    std::cout << table().text();
    if (const char* const path = std::getenv("TESSERA_FAULT_TABLE"))
      std::ofstream(path) << table().text();
  }
};
[[maybe_unused]] const auto* const printed_table =
    ::testing::AddGlobalTestEnvironment(new PrintedTable);

int trials(int otherwise) {
  const char* const text = std::getenv("TESSERA_FAULT_TRIALS");
  return text == nullptr ? otherwise : std::max(1, std::atoi(text));
}

void expect_named(const Outcome& outcome) {
  std::string left;
  for (const std::string& thing : outcome.leftovers) left += ", left over: " + thing;
  EXPECT_TRUE(outcome.named == outcome.survivors && left.empty())
      << outcome.named << " of " << outcome.survivors << " survivors name the culprit, "
      << outcome.blamed_others << " blame another" << left << "\n"
      << outcome.account;
}

void try_cell(const Cell& cell, int count) {
  if (const auto obstacle = obstacle_to(cell); !obstacle.empty()) GTEST_SKIP() << obstacle;
  const bool is_verbose = std::getenv("TESSERA_FAULT_VERBOSE") != nullptr;
  std::vector<Outcome> outcomes;
  for (int number = 0; number < count; ++number) {
    SCOPED_TRACE("trial " + std::to_string(number));
    try {
      outcomes.push_back(try_fault(cell, number));
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
      continue;
    }
    if (is_verbose) std::cout << "trial " << number << "\n" << outcomes.back().account;
    expect_named(outcomes.back());
  }
  if (!outcomes.empty()) table().add(cell, outcomes);
}

using Shape = std::pair<int, int>;  // hosts, and ranks on each
using Parameters = std::tuple<std::string, std::string, Shape>;

Cell cell_of(const Parameters& parameters) {
  const auto& [name, transport, shape] = parameters;
  const auto& [hosts, ranks] = shape;
  const FaultCase& fault = fault_named(name);
  const bool needs_link = hosts == 1 && fault.deed == Deed::kLinkDown;
  return {&fault, transport, hosts * ranks, needs_link ? 2 : hosts};
}

std::string name_of(const ::testing::TestParamInfo<Parameters>& info) {
  const auto& [fault, transport, shape] = info.param;
  const auto& [hosts, ranks] = shape;
  return fault + "_" + transport + "_" + (hosts > 1 ? std::to_string(hosts) + "x" : "") +
         std::to_string(ranks);
}

std::vector<std::string> names_of_all() {
  std::vector<std::string> names;
  for (const FaultCase& fault : all_faults()) names.push_back(fault.name);
  return names;
}

class FaultTableOf : public ::testing::TestWithParam<Parameters> {};
class FaultTableNightly : public ::testing::TestWithParam<Parameters> {};

TEST_P(FaultTableOf, SurvivorsNameTheCulprit) { try_cell(cell_of(GetParam()), trials(1)); }
TEST_P(FaultTableNightly, SurvivorsNameTheCulprit) {
  try_cell(cell_of(GetParam()), trials(std::get<Shape>(GetParam()).first > 1 ? 1 : 5));
}

using ::testing::Combine;
using ::testing::Values;
using ::testing::ValuesIn;
INSTANTIATE_TEST_SUITE_P(Few, FaultTableOf,
                         Combine(Values("killed", "throw_in_backward", "different_order",
                                        "missing"),
                                 Values("arena", "gloo"), Values(Shape(1, 2))),
                         name_of);
INSTANTIATE_TEST_SUITE_P(FewOnHosts, FaultTableOf,
                         Combine(Values("killed"), Values("arena", "gloo"), Values(Shape(2, 2))),
                         name_of);
INSTANTIATE_TEST_SUITE_P(All, FaultTableNightly,
                         Combine(ValuesIn(names_of_all()), Values("arena", "gloo"),
                                 Values(Shape(1, 2), Shape(1, 4))),
                         name_of);
INSTANTIATE_TEST_SUITE_P(OnHosts, FaultTableNightly,
                         Combine(ValuesIn(names_of_all()), Values("arena", "gloo"),
                                 Values(Shape(2, 1), Shape(2, 2), Shape(3, 2))),
                         name_of);

}  // namespace tessera::fault_table_test
