// Texts that come from outside of a process: none that is damaged does more than give an error.
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/memory/shared_memory.h"
#include "comm/group/authentication.h"
#include "comm/start/arrival.h"
#include "comm/watch/message_seal.h"
#include "support/byte_changes.h"

namespace tessera::wire_parsers_test {

using testing::Draw;

// Runs `parse` on changes of `texts`; it may throw `c10::Error` or `std::runtime_error`.
void expect_no_harm(const std::vector<std::string>& texts,
                    const std::function<void(const std::string&)>& parse) {
  for (uint64_t number = 0; number < 20'000; ++number) {
    Draw draw(number);
    std::string text = draw.pick(texts);
    testing::change_bytes(text, draw);
    if (std::ranges::find(texts, text) != texts.end()) continue;  // cut and put in again
    try {
      parse(text);
    } catch (const c10::Error&) {
    } catch (const std::runtime_error&) {
    }
  }
}

std::vector<std::string> messages() {
  Answer answer;
  answer.view.last = "barrier #1 of unit 'a'";
  answer.view.wait = {{"world", 2, 9}, "barrier #9 of unit ''", 1.5, {0, 3}};
  answer.issued.push_back({{"world", 1, 4}, 5, 0xFFFFFFFFFFFFFFFFull, "all_reduce"});
  const WaitCause cause{1, "bad", Evidence::kReported};
  std::vector<std::string> texts;
  for (const Content& content :
       std::vector<Content>{Question{{{"world", 1, 4}}}, answer, Failure{{"world", 1, 4}, cause},
                            Farewell{.cause = cause, .issued = {{"world", {1, 2, 3}}}}, Receipt{}})
    texts.push_back(to_text({7, 1, content}));
  return texts;
}

TEST(WireParsers, OfMessagesTakeNothingThatIsDamaged) {
  expect_no_harm(messages(), [](const std::string& text) {
    if (const auto message = message_from(text)) static_cast<void>(to_text(*message));
  });
  MessageSeal seal("key", 0, 2);
  int64_t taken = 0, tried = 0;
  std::vector<std::string> sealed;
  for (const std::string& text : messages()) sealed.push_back(authenticated("key", "", text));
  expect_no_harm(sealed, [&](const std::string& bytes) {
    ++tried;
    taken += seal.message_in(bytes).has_value();
  });
  EXPECT_EQ(taken, 0) << "a damaged message has another code";
  EXPECT_EQ(seal.dropped(), tried);
}

TEST(WireParsers, OfValuesOfTheStoreAndOfHandlesGiveErrors) {
  Arrival arrival{.rank = 1, .size = 3, .host = "a", .host_name = "a", .pid = 7, .backend = "gloo"};
  arrival.launched = {101, {{0, 100, 7}, {1, 101, 0xFFFFFFFFFFFFFFFFull}}};
  expect_no_harm({to_text(arrival)}, [](const std::string& text) {
    const Arrival read = arrival_from_text(text);
    EXPECT_TRUE(read.rank >= 0 && read.rank < read.size) << text;
  });
  expect_no_harm({SharedMemoryHandle{.pid = 1, .fd = 3, .nbytes = 4096, .id = 5}.to_text()},
                 [](const std::string& text) { SharedMemoryHandle::from_text(text); });
}

}  // namespace tessera::wire_parsers_test
