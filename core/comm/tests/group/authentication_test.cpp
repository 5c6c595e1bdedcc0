#include "comm/group/authentication.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

namespace tessera::authentication_test {

std::string hexadecimal(const std::string& bytes) {
  std::string text;
  for (const unsigned char byte : bytes) text += fmt::format("{:02x}", byte);
  return text;
}

TEST(Authentication, HasTheCodesOfRfc4231) {
  EXPECT_EQ(hexadecimal(hmac_sha256(std::string(20, '\x0b'), "Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hexadecimal(hmac_sha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hexadecimal(hmac_sha256(std::string(131, '\xaa'),
                                    "Test Using Larger Than Block-Size Key - Hash Key First")),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(Authentication, KnowsATextByItsKeyAndItsPlace) {
  const std::string bytes = authenticated("key", "place", "text");
  EXPECT_EQ(authentic_text("key", "place", bytes), "text");
  EXPECT_FALSE(authentic_text("other", "place", bytes));
  EXPECT_FALSE(authentic_text("key", "other", bytes));
  EXPECT_FALSE(authentic_text("key", "plac", "e" + bytes));
  EXPECT_FALSE(authentic_text("key", "place", "text"));
  EXPECT_FALSE(authentic_text("key", "place", ""));
  for (size_t i = 0; i < bytes.size(); ++i) {
    std::string changed = bytes;
    changed[i] = static_cast<char>(changed[i] ^ 1);
    EXPECT_FALSE(authentic_text("key", "place", changed)) << i;
    EXPECT_FALSE(authentic_text("key", "place", bytes.substr(0, i))) << i;
  }
  EXPECT_EQ(authentic_text("key", "", authenticated("key", "", "")), "");
  EXPECT_EQ(authentic_text("", "place", authenticated("", "other", "text")), "text")
      << "without a key there is no code";
  EXPECT_NE(derived_key("secret", "a"), derived_key("secret", "b"));
  EXPECT_EQ(derived_key("", "a"), "");
}

}  // namespace tessera::authentication_test
