#include "launcher/flight_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <system_error>

#include "launcher/flight_trace.h"
#include "launcher/rank_list.h"
#include "launcher/unique_fd.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

/// Of one record; the library's are bounded far below.
constexpr off_t kMostBytes = 16 << 20;
/// A rank that computes writes its record at once; one that is stopped never does.
constexpr milliseconds kRecordWait{2000};
constexpr milliseconds kLookInterval{50};

/// Whatever the file is (a pipe, a link), this returns or throws.
std::string read_bounded(const std::string& path) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  struct stat status {};
  if (!file.is_open() || ::fstat(file.get(), &status) != 0)
    throw std::runtime_error(std::strerror(errno));
  if (!S_ISREG(status.st_mode)) throw std::runtime_error("it is no plain file");
  if (status.st_size > kMostBytes)
    throw std::runtime_error(
        fmt::format("expected at most {} bytes, got {}", kMostBytes, status.st_size));
  std::string text(static_cast<size_t>(status.st_size), '\0');
  size_t filled = 0;
  while (filled < text.size()) {
    const ssize_t count = ::read(file.get(), text.data() + filled, text.size() - filled);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw std::runtime_error(std::strerror(errno));
    if (count == 0) break;
    filled += static_cast<size_t>(count);
  }
  text.resize(filled);
  return text;
}

}  // namespace

void FlightFolder::make() {
  if (!path_.empty()) return;
  try {
    if (log_dir_.empty()) {
      std::string pattern = fs::temp_directory_path() / "tessera-flight-XXXXXX";
      if (::mkdtemp(pattern.data()) == nullptr)
        throw std::system_error(errno, std::generic_category(), pattern);
      path_ = pattern;
    } else {
      const fs::path path = fs::absolute(log_dir_) / "flight";  // ranks may change their directory
      fs::create_directories(path);
      path_ = path;
    }
  } catch (const std::exception& error) {  // the job runs without the records
    problem_ = error.what();
  }
}

FlightFolder::~FlightFolder() {
  if (!log_dir_.empty() || is_kept_ || path_.empty()) return;
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

void FlightFolder::remove_records(const std::vector<int>& ranks) {
  read_.clear();
  for (const int rank : ranks) {
    std::error_code ignored;
    if (!path_.empty()) fs::remove(record_path(rank), ignored);
  }
}

std::vector<int> FlightFolder::new_records(const std::vector<int>& ranks) const {
  std::vector<int> result;
  for (const int rank : ranks) {
    const Version version = version_of(rank);
    const auto before = read_.find(rank);
    if (version != Version() && (before == read_.end() || before->second != version))
      result.push_back(rank);
  }
  return result;
}

MergedFlight FlightFolder::read_asked(const std::vector<int>& ranks) {
  MergedFlight flight;
  for (const int rank : new_records(ranks)) {
    read_[rank] = version_of(rank);
    read_record(rank, flight);
  }
  return flight;
}

MergedFlight FlightFolder::read_failed(const std::vector<int>& ranks) {
  const std::vector<int> added = new_records(ranks);
  MergedFlight all, flight;
  for (const int rank : ranks) {
    if (version_of(rank) != Version()) read_record(rank, all);
  }
  flight.unreadable = std::move(all.unreadable);
  for (RankFlight& rank : all.ranks) {
    const bool is_new = std::find(added.begin(), added.end(), rank.rank) != added.end();
    // A rank that was killed later must not be shown as it was when somebody asked.
    if (is_new || rank.reason != kAskedFor) flight.add(std::move(rank));
  }
  return flight;
}

std::string FlightFolder::write_trace(const MergedFlight& flight, int attempt) {
  make();
  if (path_.empty()) throw std::runtime_error(problem_);
  const std::string restart = attempt == 0 ? "" : fmt::format("_restart_{}", attempt);
  const std::string path = fmt::format("{}/{}{}.json", path_, trace_, restart);
  const std::string draft = path + ".draft";
  std::ofstream file(draft, std::ios::binary);
  file << flight_trace(flight);
  file.close();
  if (!file || ::rename(draft.c_str(), path.c_str()) != 0)
    throw std::runtime_error(fmt::format("cannot write '{}': {}", path, std::strerror(errno)));
  is_kept_ = true;
  return path;
}

std::string FlightFolder::record_path(int rank) const {
  return fmt::format("{}/rank_{}.json", path_, rank);
}

void FlightFolder::read_record(int rank, MergedFlight& flight) const {
  try {
    RankFlight record = parse_flight(read_bounded(record_path(rank)));
    if (record.rank != rank)
      throw std::runtime_error(fmt::format("it is that of rank {}", record.rank));
    flight.add(std::move(record));
  } catch (const std::exception& error) {
    flight.unreadable.push_back(fmt::format("cannot read the flight record '{}': {}",
                                            record_path(rank), one_line(error.what(), 200)));
  }
}

FlightFolder::Version FlightFolder::version_of(int rank) const {
  struct stat status {};
  if (path_.empty() || ::lstat(record_path(rank).c_str(), &status) != 0) return {};
  return {status.st_ino, status.st_mtim.tv_sec, status.st_mtim.tv_nsec, status.st_size};
}

void FlightWatch::begin() {
  is_on_ = true;
  give_up_ = Clock::now() + kRecordWait;
  look_ = Clock::now();
}

FlightWatch::Clock::time_point FlightWatch::next_look() const {
  return is_on_ ? look_ : Clock::time_point::max();
}

bool FlightWatch::ends(const FlightFolder& folder, const std::vector<int>& ranks) {
  const auto now = Clock::now();
  if (!is_on_ || now < look_) return false;
  look_ = now + kLookInterval;
  is_on_ = now < give_up_ && folder.new_records(ranks).size() < ranks.size();
  return !is_on_;
}

}  // namespace tessera::tools
