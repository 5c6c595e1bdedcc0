#pragma once

#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

namespace tessera {

/// A store whose values carry the HMAC of a job's secret, with their keys: a value that somebody
/// else wrote reads as empty, and a warning names its key. Counters (`add()`) and the presence of
/// keys are those of the store that it wraps: whoever reaches that can still delay a job.
///
/// `append()` throws `c10::NotImplementedError`: the HMAC of a part is not that of the whole.
class AuthenticStore : public c10d::PrefixStore {
 public:
  /// `kept`: lives as long as the store.
  AuthenticStore(c10::intrusive_ptr<c10d::Store> store, std::string secret,
                 std::shared_ptr<const void> kept);

  /// Returns the job's key for `purpose`; empty if no `AuthenticStore` is below `store`.
  static std::string key_of(c10::intrusive_ptr<c10d::Store> store, const std::string& purpose);

  using Bytes = std::vector<uint8_t>;
  using Store::compareSet;
  using Store::set;
  c10::intrusive_ptr<Store> clone() override;
  void set(const std::string& key, const Bytes& value) override;
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override;
  Bytes get(const std::string& key) override;
  void append(const std::string& key, const Bytes& value) override;
  std::vector<Bytes> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys, const std::vector<Bytes>& values) override;
  void queuePush(const std::string& key, const Bytes& value) override;
  Bytes queuePop(const std::string& key, bool block) override;

 private:
  Bytes sealed(const std::string& key, const Bytes& value) const;
  Bytes opened(const std::string& key, const Bytes& value) const;

  const std::string secret_;
  const std::string key_;
  const std::shared_ptr<const void> kept_;
};

}  // namespace tessera
