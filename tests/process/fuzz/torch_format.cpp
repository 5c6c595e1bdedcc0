#include "process/fuzz/format.h"
#include "process/fuzz/pickle_changes.h"
#include "support/byte_changes.h"
#include "support/pickle_program.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;

// Mostly changes the part behind the records: their list, and its position.
void change_zip(std::string& bytes, Draw& draw) {
  const size_t list = bytes.find("PK\1\2");
  if (list == std::string::npos || draw.chance(20)) return change_bytes(bytes, draw);
  std::string end = bytes.substr(list);
  change_bytes(end, draw);
  bytes = bytes.substr(0, list) + end;
}

}  // namespace

FuzzFormat torch_format() {
  FuzzFormat format;
  format.write = [](Draw& draw, const fs::path& directory) {
    const fs::path file = directory / "a.pt";
    const std::string storage(96, '\1');
    write_torch_file(file, draw.chance(97) ? some_pickle(draw) : costly_pickle(draw),
                     {{"data/0", storage}, {"data/1", storage}});
    if (!draw.chance(20)) return;
    std::string bytes = read_bytes(file);
    change_zip(bytes, draw);
    write_bytes(file, bytes);
  };
  format.reads.emplace_back("import", [](const fs::path& path, const fs::path& made) {
    import_and_verify(path / "a.pt", made);
  });
  return format;
}

}  // namespace tessera::testing
