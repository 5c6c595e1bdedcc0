#include "mesh/generator_check.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera {
namespace {

struct Checked {
  DeviceMesh mesh;
  c10::weak_intrusive_ptr<c10::GeneratorImpl> generator;  // keeps its address from being reused
};

std::string digest_of(at::Generator& generator) {
  const std::lock_guard lock(generator.mutex());
  const at::Tensor state = generator.get_state().contiguous();
  const std::string_view bytes(static_cast<const char*>(state.const_data_ptr()), state.nbytes());
  return std::to_string(std::hash<std::string_view>()(bytes));
}

std::vector<int> ranks_that_differ(const DeviceMesh& mesh, const std::vector<std::string>& states) {
  std::vector<int> ranks;
  for (size_t i = 0; i < states.size(); ++i) {
    if (states[i] != states[0]) ranks.push_back(mesh.ranks()[i]);
  }
  return ranks;
}

}  // namespace

void check_generators_agree(const DeviceMesh& mesh, at::Generator generator,
                            const std::string& subject) {
  if (mesh.size() == 1 || !mesh.is_member()) return;
  thread_local std::vector<Checked> checked;
  const auto is_it = [&](const Checked& known) {
    return known.mesh.is_same(mesh) &&
           known.generator._unsafe_get_target() == generator.unsafeGetGeneratorImpl();
  };
  if (std::any_of(checked.begin(), checked.end(), is_it)) return;
  const auto states = all_gather_bytes(*mesh.process_group(), digest_of(generator),
                                       {"generators of random numbers", Channel::kControl});
  const auto differing = ranks_that_differ(mesh, states);
  TORCH_CHECK_VALUE(differing.empty(), "[", subject, "] the generators of all ranks of a mesh must be in one state, because each "
                    "draws the whole tensor; that of rank ", fmt::format("{}", fmt::join(differing, ", ")),
                    " differs from that of rank ", mesh.ranks()[0],
                    "; seed all alike with torch::manual_seed() (tessera::manual_seed() on ranks of spawn())");
  std::erase_if(checked, [](const Checked& known) { return known.generator.expired(); });
  checked.push_back({mesh, c10::weak_intrusive_ptr(generator.getIntrusivePtr())});
}

}  // namespace tessera
