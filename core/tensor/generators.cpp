#include "tensor/generators.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/base/generator.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <string_view>
#include <vector>

#include "base/device/device.h"

namespace tessera {
namespace {

// A mesh whose ranks had a generator in the same state.
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

}  // namespace

at::Generator generator_on(c10::Device device) {
  return is_host(device) || device.is_meta() ? default_generator() : default_generator_of(device);
}

void check_generators_agree(const DeviceMesh& mesh, at::Generator generator,
                            const std::string& subject) {
  if (mesh.size() == 1 || !mesh.is_member()) return;
  thread_local std::vector<Checked> checked;
  const auto is_it = [&](const Checked& known) {
    return known.mesh.is_same(mesh) &&
           known.generator._unsafe_get_target() == generator.unsafeGetGeneratorImpl();
  };
  if (std::ranges::any_of(checked, is_it)) return;
  const auto states = all_gather_bytes(*mesh.process_group(), digest_of(generator),
                                       {"generators of random numbers", Channel::kControl});
  std::vector<int> differing;
  for (size_t i = 0; i < states.size(); ++i) {
    if (states[i] != states[0]) differing.push_back(mesh.ranks()[i]);
  }
  TORCH_CHECK_VALUE(
      differing.empty(), "[", subject,
      "] the generators of all ranks of a mesh must be in one state, because each draws the whole "
      "tensor; that of rank ",
      fmt::format("{}", fmt::join(differing, ", ")), " differs from that of rank ", mesh.ranks()[0],
      "; seed all alike with torch::manual_seed() (tessera::manual_seed() on ranks of spawn())");
  std::erase_if(checked, [](const Checked& known) { return known.generator.expired(); });
  checked.push_back({mesh, c10::weak_intrusive_ptr(generator.getIntrusivePtr())});
}

}  // namespace tessera
