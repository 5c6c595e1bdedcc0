#include "comm/start/authentic_store.h"

#include <c10/util/Exception.h>

#include <string_view>
#include <utility>

#include "comm/group/authentication.h"

namespace tessera {
namespace {

std::string_view text_of(const AuthenticStore::Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

AuthenticStore::AuthenticStore(c10::intrusive_ptr<c10d::Store> store, std::string secret,
                               std::shared_ptr<const void> kept)
    : PrefixStore("tessera", std::move(store)),
      secret_(std::move(secret)),
      key_(derived_key(secret_, "store")),
      kept_(std::move(kept)) {}

std::string AuthenticStore::key_of(c10::intrusive_ptr<c10d::Store> store,
                                   const std::string& purpose) {
  while (auto* const prefixed = dynamic_cast<PrefixStore*>(store.get())) {
    if (const auto* const found = dynamic_cast<const AuthenticStore*>(prefixed))
      return derived_key(found->secret_, purpose);
    store = prefixed->getUnderlyingStore();
  }
  return "";
}

AuthenticStore::Bytes AuthenticStore::sealed(const std::string& key, const Bytes& value) const {
  const std::string text = authenticated(key_, key, text_of(value));
  return {text.begin(), text.end()};
}

AuthenticStore::Bytes AuthenticStore::opened(const std::string& key, const Bytes& value) const {
  const auto text = authentic_text(key_, key, text_of(value));
  if (!text)
    TORCH_WARN("[tessera] the value of '", key, "' in the store is not this job's, and is dropped");
  return text ? Bytes(text->begin(), text->end()) : Bytes();
}

c10::intrusive_ptr<c10d::Store> AuthenticStore::clone() {
  return c10::make_intrusive<AuthenticStore>(store_->clone(), secret_, kept_);
}

void AuthenticStore::set(const std::string& key, const Bytes& value) {
  PrefixStore::set(key, sealed(key, value));
}

AuthenticStore::Bytes AuthenticStore::compareSet(const std::string& key, const Bytes& expected,
                                                 const Bytes& desired) {
  // An empty one expects that there is no value.
  const Bytes before = expected.empty() ? expected : sealed(key, expected);
  const Bytes now = PrefixStore::compareSet(key, before, sealed(key, desired));
  return now.empty() ? now : opened(key, now);
}

AuthenticStore::Bytes AuthenticStore::get(const std::string& key) {
  return opened(key, PrefixStore::get(key));
}

void AuthenticStore::append(const std::string& key, const Bytes& /*value*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(false,
                              "[append] the store of a job must be written by set(), under a "
                              "new key: each value carries the code by which ranks know it "
                              "as theirs; got a part for '",
                              key, "'");
}

std::vector<AuthenticStore::Bytes> AuthenticStore::multiGet(const std::vector<std::string>& keys) {
  std::vector<Bytes> values = PrefixStore::multiGet(keys);
  for (size_t i = 0; i < values.size(); ++i) values[i] = opened(keys[i], values[i]);
  return values;
}

void AuthenticStore::multiSet(const std::vector<std::string>& keys,
                              const std::vector<Bytes>& values) {
  std::vector<Bytes> result;
  for (size_t i = 0; i < values.size(); ++i) result.push_back(sealed(keys[i], values[i]));
  PrefixStore::multiSet(keys, result);
}

void AuthenticStore::queuePush(const std::string& key, const Bytes& value) {
  PrefixStore::queuePush(key, sealed(key, value));
}

AuthenticStore::Bytes AuthenticStore::queuePop(const std::string& key, bool block) {
  return opened(key, PrefixStore::queuePop(key, block));
}

}  // namespace tessera
