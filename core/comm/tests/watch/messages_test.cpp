#include "comm/watch/messages.h"

#include <gtest/gtest.h>

#include "comm/watch/datagrams.h"
#include "comm/watch/message_seal.h"

namespace tessera::messages_test {

TEST(WatchMessage, CarriesAnAnswer) {
  Answer answer;
  answer.view.phase = Phase::kBackward;
  answer.view.step = 7;
  answer.view.last = "barrier #1 of unit 'caf\xc3\xa9'";
  answer.view.is_blocked = true;
  answer.view.wait = {{"world/0,2", 2, 9}, "barrier #9 of unit ''", 1.5, {0, 3}};
  answer.issued.push_back({{"world", 1, 4}, 5, 0xFFFFFFFFFFFFFFFFull, "all_reduce"});
  answer.issued.push_back({{"world", 0, 4}, 3, std::nullopt, ""});
  const auto message = message_from(to_text({17, 3, answer}));
  ASSERT_TRUE(message);
  EXPECT_EQ(message->number, 17);
  EXPECT_EQ(message->from, 3);
  const auto& got = std::get<Answer>(message->content);
  EXPECT_EQ(got.view.rank, 3);
  EXPECT_EQ(got.view.phase, Phase::kBackward);
  EXPECT_EQ(got.view.step, 7);
  EXPECT_EQ(got.view.last, answer.view.last);
  ASSERT_TRUE(got.view.wait);
  EXPECT_EQ(got.view.wait->id, answer.view.wait->id);
  EXPECT_EQ(got.view.wait->lacking, (std::vector{0, 3}));
  ASSERT_EQ(got.issued.size(), 2u);
  EXPECT_EQ(got.issued[0].fingerprint, 0xFFFFFFFFFFFFFFFFull);
  EXPECT_EQ(got.issued[1].issued, 3);
  EXPECT_FALSE(got.issued[1].fingerprint);
}

TEST(WatchMessage, CarriesAFarewellThatIsCutToADatagram) {
  Farewell farewell{.cause = {1, std::string(100'000, 'x'), Evidence::kReported}, .step = 4};
  farewell.cause.found = {{"world", 1, 4}, 5, std::string(100'000, 'x')};
  for (int i = 0; i < 1000; ++i) farewell.issued["group " + std::to_string(i)] = {1, 2, 3};
  const std::string text = to_text({0, 1, farewell});
  EXPECT_LT(text.size(), Datagrams::kMaxText);
  const auto message = message_from(text);
  ASSERT_TRUE(message);
  EXPECT_EQ(std::get<Farewell>(message->content).step, 4);
}

TEST(WatchMessage, CarriesWhatTheSenderHasIssuedItself) {
  Failure failure{.id = {"world", 1, 4}, .cause = {2, "rank 2", Evidence::kSeen}};
  EXPECT_FALSE(std::get<Failure>(message_from(to_text({0, 1, failure}))->content).cause.found);
  failure.cause.found = {{"world", 1, 4}, 0xFFFFFFFFFFFFFFFFull, "barrier"};
  const auto message = message_from(to_text({0, 1, failure}));
  ASSERT_TRUE(message);
  const auto& found = std::get<Failure>(message->content).cause.found;
  ASSERT_TRUE(found);
  EXPECT_EQ(found->at, failure.id);
  EXPECT_EQ(found->fingerprint, 0xFFFFFFFFFFFFFFFFull);
  EXPECT_EQ(found->issued, "barrier");
}

TEST(WatchMessage, IsNotAStrangersText) {
  for (const char* const text :
       {"", "GET / HTTP/1.1", "{}", "[1, 2]", R"({"from": "x", "number": 1, "kind": "ask"})",
        R"({"from": 1, "number": 1, "kind": "answer"})",
        R"({"from": 1, "number": 1, "kind": "ask", "ids": [[1]]})"}) {
    EXPECT_FALSE(message_from(text)) << text;
  }
}

TEST(MessageWindow, TakesEachNumberOnceAlsoIfTheyOvertakeEachOther) {
  MessageWindow window;
  EXPECT_FALSE(window.take(-1));
  for (const int64_t number : {0, 2, 1, 5, 70}) {
    EXPECT_TRUE(window.take(number)) << number;
    EXPECT_FALSE(window.take(number)) << number;
  }
  EXPECT_TRUE(window.take(7)) << "63 before the newest";
  EXPECT_FALSE(window.take(6)) << "it may have come before";
  EXPECT_FALSE(window.take(5));
  EXPECT_TRUE(window.take(int64_t{1} << 62));
  EXPECT_FALSE(window.take(71));
}

TEST(Datagrams, BringTextsAndSayThatNobodyIsThere) {
  Datagrams a("127.0.0.1"), b("127.0.0.1");
  std::string gone;
  {
    const Datagrams c("127.0.0.1");
    gone = c.endpoint();
  }
  const std::vector<std::string> endpoints{a.endpoint() + " token", b.endpoint(), gone};
  a.set_endpoints(endpoints);
  b.set_endpoints(endpoints);
  a.send(2, "nobody hears this");
  a.send(1, "hello");
  EXPECT_EQ(b.receive(std::chrono::seconds(5)).texts, std::vector<std::string>{"hello"});
  std::vector<int> refused;
  for (int i = 0; i < 20 && refused.empty(); ++i)
    refused = a.receive(std::chrono::milliseconds(100)).refused;
  EXPECT_EQ(refused, std::vector{2});
  a.send(1, "again");  // an earlier refusal does not hold this up
  EXPECT_EQ(b.receive(std::chrono::seconds(5)).texts, std::vector<std::string>{"again"});
}

TEST(Datagrams, WakeUpTheReceiver) {
  Datagrams a("127.0.0.1");
  a.set_endpoints({a.endpoint()});
  a.wake();
  EXPECT_TRUE(a.receive(std::chrono::hours(1)).texts.empty());
}

}  // namespace tessera::messages_test
