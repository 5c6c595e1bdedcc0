// The operators for which the DTensor of PyTorch 2.13 has a sharding strategy, by name, beside
// ours.

#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <tessera/tensor/device_mesh.h>
#include <torch/torch.h>

#include <fstream>
#include <iostream>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tensor/decompositions.h"
#include "tensor/dist_dispatch.h"
#include "tensor/rules.h"

namespace tessera::dtensor_names_test {

using Names = std::set<std::string>;

// core/tensor/tests/dtensor_names.txt: the names without namespace and overload.
Names names_of_dtensor() {
  std::ifstream file(DTENSOR_NAMES);
  EXPECT_TRUE(file) << "is missing";
  Names names;
  for (std::string line; std::getline(file, line);) names.insert(line);
  return names;
}

// Those that never meet a DistTensor: they have no tensor among their arguments, or LibTorch has no
// kernel for them on a host.
const std::map<std::string, std::string> kNeedNone = {
    {"eye", "makes a tensor of numbers alone"},
};

bool is_handled(const c10::FunctionSchema& schema) {
  const bool is_in_place = schema.name().ends_with('_');
  return find_rule(schema) || find_decomposition(schema.name()) || takes_lists(schema) ||
         draws_numbers(schema) || (is_in_place && replaces_tensor(schema)) ||
         is_meant_whole(schema.name());
}

// All names of operators that have a kernel of their own, and whether an overload is handled.
std::map<std::string, bool> names_of_libtorch() {
  std::map<std::string, bool> names;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || !has_own_kernel(*op)) continue;
    names[name.name.substr(6)] |= is_handled(op->schema());
  }
  return names;
}

TEST(DTensorNames, AllHaveARuleHere) {
  const Names theirs = names_of_dtensor();
  const auto ours = names_of_libtorch();
  EXPECT_GT(theirs.size(), 600);
  size_t both = 0, more = 0, composed = 0;
  std::vector<std::string> missing;
  for (const std::string& name : theirs) {
    const auto found = ours.find(name);
    if (found == ours.end()) {
      ++composed;  // arrives as the operators it is composed of
    } else if (found->second) {
      ++both;
    } else if (!kNeedNone.contains(name)) {
      missing.push_back(name);
    }
  }
  for (const auto& [name, is_known] : ours) more += is_known && !theirs.contains(name);
  std::cout << "DTensor has strategies for " << theirs.size() << " names; of these, " << both
            << " have a rule here, " << composed << " have no kernel of their own, "
            << kNeedNone.size() << " need none, " << missing.size()
            << " are missing; rules here for " << more << " other names\n";
  for (const std::string& name : missing) ADD_FAILURE() << name << " is missing";
}

}  // namespace tessera::dtensor_names_test
