#include "comm/start/job_secret.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <functional>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/memory/shared_memory.h"
#include "comm/group/authentication.h"
#include "comm/start/authentic_store.h"
#include "support/error_of.h"

namespace tessera::job_secret_test {

using Bytes = AuthenticStore::Bytes;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

StorePtr authentic(const StorePtr& store, const std::string& secret = "secret") {
  return c10::make_intrusive<AuthenticStore>(store, secret, nullptr);
}

const Bytes kValue{1, 2, 3}, kOther{4};

TEST(AuthenticStore, ReadsWhatHoldersOfTheSecretWriteUnderTheSameKey) {
  const StorePtr plain = c10::make_intrusive<c10d::HashStore>();
  const StorePtr a = authentic(plain), b = authentic(plain), stranger = authentic(plain, "guess");
  a->set("key", kValue);
  EXPECT_EQ(b->get("key"), kValue);
  EXPECT_EQ(stranger->get("key"), Bytes());
  stranger->set("key", kValue);
  EXPECT_EQ(a->get("key"), Bytes()) << "another secret";
  plain->set("tessera/key", kValue);
  EXPECT_EQ(a->get("key"), Bytes()) << "no code";
  a->set("one", kValue);
  plain->set("tessera/two", plain->get("tessera/one"));
  EXPECT_EQ(a->get("two"), Bytes()) << "the code of another key";
  a->multiSet({"x", "y"}, {kValue, kOther});
  plain->set("tessera/y", kValue);
  EXPECT_EQ(b->multiGet({"x", "y"}), (std::vector<Bytes>{kValue, Bytes()}));
  EXPECT_EQ(a->add("count", 2), 2);
  EXPECT_TRUE(b->check({"x", "count"}));
}

TEST(AuthenticStore, ComparesAndRefusesToAppend) {
  const StorePtr store = authentic(c10::make_intrusive<c10d::HashStore>());
  EXPECT_EQ(store->compareSet("key", Bytes(), kValue), kValue);
  EXPECT_EQ(store->compareSet("key", kOther, kOther), kValue);
  EXPECT_EQ(store->compareSet("key", kValue, kOther), kOther);
  EXPECT_EQ(store->get("key"), kOther);
  EXPECT_THROW(store->append("key", kValue), c10::NotImplementedError);
}

TEST(AuthenticStore, GivesAKeyForEachPurposeBelowPrefixes) {
  const StorePtr store = authentic(c10::make_intrusive<c10d::HashStore>());
  const StorePtr part = c10::make_intrusive<c10d::PrefixStore>("part", store);
  EXPECT_EQ(AuthenticStore::key_of(part, "watch"), AuthenticStore::key_of(store, "watch"));
  EXPECT_NE(AuthenticStore::key_of(part, "watch"), AuthenticStore::key_of(part, "arena"));
  EXPECT_EQ(AuthenticStore::key_of(c10::make_intrusive<c10d::HashStore>(), "watch"), "");
}

RankInfo rank_of(int rank, int local_size, const std::string& source = "torchrun") {
  return {.rank = rank, .size = 2, .local_size = local_size, .source = source};
}

void expect_refused(const std::function<void()>& join, const std::string& why) {
  testing::expect_contains(testing::error_of<c10::DistNetworkError>(join), {why});
}

class JobSecretTest : public ::testing::Test {
 protected:
  JobSecretTest() { ::unsetenv("TESSERA_SECRET"); }
  ~JobSecretTest() override { ::unsetenv("TESSERA_SECRET"); }

  StorePtr join(int rank, int local_size, const std::string& source = "torchrun") {
    return with_secret(plain_, rank_of(rank, local_size, source),
                       Deadline(std::chrono::seconds(5)));
  }
  std::string key_of(const StorePtr& store) { return AuthenticStore::key_of(store, "test"); }

  StorePtr plain_ = c10::make_intrusive<c10d::HashStore>();
};

TEST_F(JobSecretTest, IsMadeByRankZeroAndReadByProcessesOfTheSameUser) {
  const StorePtr zero = join(0, 2), one = join(1, 2);
  EXPECT_EQ(key_of(zero), key_of(one));
  EXPECT_NE(key_of(zero), "");
  const auto handle = SharedMemoryHandle::from_text(plain_->get_to_str("secret"));
  EXPECT_EQ(handle.pid, ::getpid()) << "the store says where it is, not it";
  EXPECT_EQ(key_of(join(1, 1, "environment")), key_of(zero)) << "one that does not know its place";
}

TEST_F(JobSecretTest, IsThatOfTheEnvironment) {
  ::setenv("TESSERA_SECRET", "given", 1);
  const StorePtr zero = join(0, 1), one = join(1, 1);
  EXPECT_EQ(key_of(zero), derived_key("given", "test"));
  EXPECT_EQ(key_of(zero), key_of(one));
  EXPECT_EQ(plain_->get_to_str("secret"), "given") << "the store tells that there is one, not it";
  ::unsetenv("TESSERA_SECRET");
  expect_refused([&] { join(1, 1); }, "rank 0 has TESSERA_SECRET, and this rank");
}

TEST_F(JobSecretTest, OfSeveralHostsIsNoneUnlessItIsGiven) {
  EXPECT_EQ(join(0, 1), plain_);
  EXPECT_EQ(join(1, 1), plain_);
  expect_refused([&] { join(1, 2); }, "though all ranks are on this host");
  ::setenv("TESSERA_SECRET", "given", 1);
  expect_refused([&] { join(1, 1); }, "this rank has TESSERA_SECRET");
}

TEST_F(JobSecretTest, IsNotTakenFromAPlaceThatAStrangerNames) {
  const auto made = SharedMemory::create("own", 64);
  for (const std::string& place : {fmt::format("{} 0 32 0", ::getpid()), std::string("1 0 32 0"),
                                   made->handle().to_text(), std::string("x"), std::string()}) {
    plain_->set("secret", place);
    expect_refused([&] { join(1, 2); }, "could not read rank 0's");
  }
}

}  // namespace tessera::job_secret_test
