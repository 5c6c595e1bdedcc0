#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

namespace tessera {

/// The store of ranks that are threads: its waits end when a rank fails, instead of at the timeout.
class RankStore : public c10d::HashStore {
 public:
  /// Makes all waits for missing keys, also later ones, throw an error with `reason`.
  void fail(const std::string& reason);

  using c10d::HashStore::wait;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;
  std::vector<uint8_t> get(const std::string& key) override;

 private:
  std::string failure_;  // guarded by m_
};

}  // namespace tessera
