#include "interop/pickle_writer.h"

#include <c10/util/Exception.h>

#include <limits>
#include <utility>

namespace tessera {
namespace {

// Little endian.
template <class T>
void append(std::string& program, T value) {
  program.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

}  // namespace

PickleWriter::PickleWriter() { program_ = "\x80\x02"; }  // version 2

void PickleWriter::whole(int64_t value) {
  if (value >= std::numeric_limits<int32_t>::min() &&
      value <= std::numeric_limits<int32_t>::max()) {
    program_ += 'J';
    return append(program_, static_cast<int32_t>(value));
  }
  program_ += "\x8a\x08";
  append(program_, value);
}

void PickleWriter::text(std::string_view value) {
  TORCH_CHECK_VALUE(value.size() <= std::numeric_limits<uint32_t>::max(), "a text is too long");
  program_ += 'X';
  append(program_, static_cast<uint32_t>(value.size()));
  program_ += value;
}

void PickleWriter::global(std::string_view module, std::string_view name) {
  program_ += 'c';
  program_ += module;
  program_ += '\n';
  program_ += name;
  program_ += '\n';
}

void PickleWriter::tuple(const Write& items) {
  program_ += '(';
  items();
  program_ += 't';
}

void PickleWriter::list(const Write& items) {
  program_ += "](";
  items();
  program_ += 'e';
}

void PickleWriter::dict(const Write& items) {
  program_ += "}(";
  items();
  program_ += 'u';
}

void PickleWriter::call(std::string_view module, std::string_view name, const Write& arguments) {
  global(module, name);
  tuple(arguments);
  program_ += 'R';
}

void PickleWriter::object(std::string_view module, std::string_view name, const Write& state) {
  global(module, name);
  program_ += ")\x81";
  state();
  program_ += 'b';
}

void PickleWriter::size(const std::vector<int64_t>& sizes) {
  call("torch", "Size", [&] {
    tuple([&] {
      for (const int64_t size : sizes) whole(size);
    });
  });
}

std::string PickleWriter::take() && {
  program_ += '.';
  return std::move(program_);
}

}  // namespace tessera
