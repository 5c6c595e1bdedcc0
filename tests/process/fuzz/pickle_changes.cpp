#include "process/fuzz/pickle_changes.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "support/byte_changes.h"
#include "support/pickle_program.h"

namespace tessera::testing {
namespace {

using Operations = std::vector<std::string>;

// The length in bytes of the operation at `place`.
size_t length_of(const std::string& program, size_t place) {
  const auto byte = [&](size_t at) {
    return at < program.size() ? static_cast<unsigned char>(program[at]) : 0;
  };
  uint32_t size = 0;
  switch (program[place]) {
    case '\x80':
    case 'K':
    case 'q':
    case 'h':
      return 2;
    case 'M':
      return 3;
    case 'J':
    case 'r':
    case 'j':
      return 5;
    case 'G':
    case '\x95':
      return 9;
    case '\x8a':
    case '\x8c':
      return 2 + byte(place + 1);
    case 'X':
      std::memcpy(&size, program.data() + place + 1,
                  std::min<size_t>(4, program.size() - place - 1));
      return 5 + size;
    case 'c':
      return program.find('\n', program.find('\n', place) + 1) + 1 - place;
    default:
      return 1;
  }
}

Operations operations_of(const std::string& program) {
  Operations operations;
  for (size_t place = 0; place < program.size(); place += operations.back().size())
    operations.push_back(program.substr(place, length_of(program, place)));
  return operations;
}

std::string some_tensor(Draw& draw) {
  std::vector<int64_t> shape, strides;
  int64_t stride = 1;
  for (size_t dims = draw.below(4); dims > 0; --dims) {
    shape.insert(shape.begin(), static_cast<int64_t>(draw.below(3) + 1));
    strides.insert(strides.begin(), stride);
    stride *= shape.front();
  }
  if (draw.chance(20)) shape.resize(draw.below(70), draw.number());
  if (draw.chance(20)) strides.resize(shape.size(), draw.number());
  if (!shape.empty() && draw.chance(20)) shape[draw.below(shape.size())] = draw.number();
  if (!strides.empty() && draw.chance(20)) strides[draw.below(strides.size())] = draw.number();
  const int64_t offset = draw.chance(80) ? static_cast<int64_t>(draw.below(3)) : draw.number();
  static const std::vector<std::string> kClasses = {"FloatStorage", "LongStorage", "BoolStorage",
                                                    "ByteStorage",  "HalfStorage", "QInt8Storage"};
  return pickle::tensor(draw.chance(90) ? "0" : draw.text(), 24, offset, shape, strides,
                        draw.chance(80) ? kClasses[0] : draw.pick(kClasses));
}

std::string some_value(Draw& draw, int depth) {
  if (draw.chance(50)) return some_tensor(draw);
  switch (draw.below(depth > 3 ? 4 : 6)) {
    case 0:
      return pickle::number(draw.number());
    case 1:
      return pickle::text(draw.text());
    case 2:
      return "N";
    case 3:
      return pickle::global("collections", "OrderedDict") + ")R";
    case 4:
      return pickle::tuple({some_value(draw, depth + 1), some_value(draw, depth + 1)});
    default:
      return pickle::dict(
          {{"in", some_value(draw, depth + 1)}, {"it", some_value(draw, depth + 1)}});
  }
}

std::string some_operation(Draw& draw) {
  static const std::string kCodes =
      std::string("()]}tlaesubR0Q.N") + "\x85\x86\x87\x88\x89\x81\x93\x94";
  if (draw.chance(60)) return {kCodes[draw.below(kCodes.size())]};
  if (draw.chance(50))
    return (draw.chance(50) ? "q" : "h") + std::string(1, static_cast<char>(draw.below(9)));
  return draw.chance(50) ? pickle::number(draw.number())
                         : std::string(1, static_cast<char>(draw.below(256)));
}

void change_operations(Operations& operations, Draw& draw) {
  for (size_t times = 1 + draw.below(4); times > 0 && !operations.empty(); --times) {
    const auto place =
        operations.begin() + static_cast<std::ptrdiff_t>(draw.below(operations.size()));
    switch (draw.below(5)) {
      case 0:
        operations.erase(place);
        break;
      case 1:
        operations.insert(place, some_operation(draw));
        break;
      case 2:
        operations.insert(place, std::string(*place));
        break;
      case 3:
        std::swap(*place, operations[draw.below(operations.size())]);
        break;
      default:
        *place = some_operation(draw);
    }
  }
}

std::string joined(const Operations& operations) {
  std::string program;
  for (const std::string& operation : operations) program += operation;
  return program;
}

}  // namespace

std::string some_pickle(Draw& draw) {
  std::vector<std::pair<std::string, std::string>> items = {{"first", pickle::four_floats()}};
  for (size_t count = draw.below(5); count > 0; --count)
    items.emplace_back(draw.chance(70) ? "name" + std::to_string(count) : draw.text(),
                       some_value(draw, 0));
  std::string program = pickle::program(pickle::dict(items));
  if (draw.chance(20)) return program;
  if (draw.chance(30)) {
    change_bytes(program, draw);
    return program;
  }
  Operations operations = operations_of(program);
  change_operations(operations, draw);
  return joined(operations);
}

std::string costly_pickle(Draw& draw) {
  const size_t many = size_t{1} << (10 + draw.below(11));  // up to a million
  std::string program = pickle::dict({{"t", pickle::four_floats()}}) + pickle::put(0);
  switch (draw.below(7)) {
    case 0:  // tuples in tuples
      return "\x80\x02}" + pickle::text("deep") + ")" + std::string(many, '\x85') + "s.";
    case 1:  // dicts in dicts
      for (size_t depth = draw.below(300); depth > 0; --depth)
        program = "}" + pickle::text("d") + program + "s";
      return "\x80\x02" + program + ".";
    case 2:  // dicts that share
      for (size_t depth = draw.below(100); depth > 0; --depth)
        program +=
            "0" + pickle::dict({{"l", pickle::get(0)}, {"r", pickle::get(0)}}) + pickle::put(0);
      return "\x80\x02" + program + ".";
    case 3:  // empty values
      return "\x80\x02}" + pickle::text("many") + "(" +
             std::string(many, draw.chance(50) ? ']' : ')') + "ts.";
    case 4: {  // names
      program = "}(";
      for (size_t i = 0; i < many / 8; ++i)
        program += pickle::text("layers." + std::to_string(i)) + "N";
      return "\x80\x02" + program + "u.";
    }
    case 5: {  // one tensor by many names
      program = "}" + pickle::text("t") + pickle::four_floats() + pickle::put(0) + "s(";
      for (size_t i = 0; i < many / 64; ++i)
        program += pickle::text(std::to_string(i)) + pickle::get(0);
      return "\x80\x02" + program + "u.";
    }
    default:  // a memo
      return "\x80\x02}" + std::string(many, '\x94') + std::string(many, '(') + ".";
  }
}

}  // namespace tessera::testing
