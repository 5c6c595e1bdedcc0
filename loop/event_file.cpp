#include "loop/event_file.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <concepts>

#include "comm/start/host_identity.h"

namespace tessera {
namespace {

constexpr std::array<uint32_t, 256> crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < table.size(); ++byte) {
    uint32_t rest = byte;
    for (int bit = 0; bit < 8; ++bit) rest = (rest >> 1) ^ ((rest & 1) != 0 ? 0x82f63b78U : 0U);
    table[byte] = rest;
  }
  return table;
}

// Returns the bytes of a number, the lowest first.
template <std::unsigned_integral T>
std::string fixed(T value) {
  std::string bytes;
  for (size_t i = 0; i < sizeof(T); ++i) bytes += static_cast<char>((value >> (8 * i)) & 0xff);
  return bytes;
}

std::string varint(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes += static_cast<char>((value & 0x7f) | 0x80);
  bytes += static_cast<char>(value);
  return bytes;
}

// Fields of a message: their number, the kind of their encoding, and the value.
enum class Wire : uint8_t { kVarint = 0, k64Bits = 1, kBytes = 2, k32Bits = 5 };
std::string key(int number, Wire wire) {
  return varint((static_cast<uint64_t>(number) << 3) | static_cast<uint64_t>(wire));
}
std::string field(int number, uint64_t value) { return key(number, Wire::kVarint) + varint(value); }
std::string field(int number, double value) {
  return key(number, Wire::k64Bits) + fixed(std::bit_cast<uint64_t>(value));
}
std::string field(int number, float value) {
  return key(number, Wire::k32Bits) + fixed(std::bit_cast<uint32_t>(value));
}
std::string field(int number, const std::string& bytes) {
  return key(number, Wire::kBytes) + varint(bytes.size()) + bytes;
}

uint32_t masked(uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xa282ead8U; }

double seconds_since_1970() {
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  return now.count();
}

std::string name_of_file() {
  static std::atomic<int> count = 0;  // of this process
  return fmt::format("events.out.tfevents.{:010}.{}.{}.{}",
                     static_cast<int64_t>(seconds_since_1970()), host_name(), ::getpid(), count++);
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  static constexpr std::array<uint32_t, 256> kTable = crc_table();
  uint32_t crc = 0xffffffffU;
  for (const char byte : bytes)
    crc = (crc >> 8) ^ kTable[(crc ^ static_cast<unsigned char>(byte)) & 0xff];
  return ~crc;
}

EventFile::EventFile(const std::filesystem::path& directory, int64_t first_step)
    : path_(directory / name_of_file()), file_(path_, std::ios::binary) {
  const double now = seconds_since_1970();
  write_record(field(1, now) + field(3, std::string("brain.Event:2")));
  if (first_step < 0) return;
  const std::string session_start = field(1, uint64_t{1});  // SessionLog::START
  write_record(field(1, now) + field(2, static_cast<uint64_t>(first_step)) +
               field(7, session_start));
}

void EventFile::write(double wall_time, int64_t step, const std::map<std::string, double>& values) {
  std::string summary;
  for (const auto& [name, value] : values)
    summary += field(1, field(1, name) + field(2, static_cast<float>(value)));
  write_record(field(1, wall_time) + field(2, static_cast<uint64_t>(step)) + field(5, summary));
}

void EventFile::write_record(const std::string& event) {
  const std::string length = fixed(uint64_t{event.size()});
  file_ << length << fixed(masked(crc32c(length))) << event << fixed(masked(crc32c(event)))
        << std::flush;
  TORCH_CHECK(file_, "[MetricsLog] could not write '", path_.string(), "'");
}

}  // namespace tessera
