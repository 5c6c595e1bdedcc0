#include "launcher/flight_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "launcher/rank_list.h"

namespace tessera::tools {
namespace {

constexpr size_t kTableWidth = 120;
constexpr size_t kSubjectWidth = 31;
constexpr size_t kStateWidth = 15;
constexpr size_t kStepWidth = 14;
constexpr size_t kStatesInALine = 4;
/// Rows shown at each end of a channel's rows: the hang is at the first, the news at the last.
constexpr size_t kRowsAtAnEnd = 5;
constexpr size_t kRanksDescribed = 8;

enum class State {
  kDone,
  kWaiting,
  kNotIssued,
  kOther,     ///< another collective than that of most ranks
  kPast,      ///< so long ago that the record does not hold it any more
  kNoMember,  ///< the rank has no record of that process group
};

struct Cell {
  State state = State::kNoMember;
  const FlightEntry* entry = nullptr;
  double waited = 0;  ///< seconds, if it was not complete when the record was written

  bool is_trouble() const {
    return state == State::kWaiting || state == State::kNotIssued || state == State::kOther;
  }
};

/// A collective on all ranks.
struct Row {
  const FlightEntry* usual = nullptr;  ///< that of most ranks
  std::vector<Cell> cells;             ///< one for each record

  bool is_trouble() const {
    return std::any_of(cells.begin(), cells.end(), [](const Cell& c) { return c.is_trouble(); });
  }
};

struct Section {
  std::string title;
  std::vector<Row> rows;
  size_t left_out = 0;  ///< rows between the first and the last ones
};

using ChannelKey = std::pair<std::string, std::string>;
using NumberedEntries = std::map<int64_t, std::vector<const FlightEntry*>>;  // by number and record

const FlightEntry* most_frequent(const std::vector<const FlightEntry*>& entries) {
  std::map<std::string_view, int> counts;
  const FlightEntry* usual = nullptr;
  for (const FlightEntry* entry : entries) {
    if (entry != nullptr) ++counts[entry->text];
  }
  for (const FlightEntry* entry : entries) {
    if (entry != nullptr && (usual == nullptr || counts[entry->text] > counts[usual->text]))
      usual = entry;
  }
  return usual;
}

Cell cell_of(const FlightEntry* entry, const FlightEntry& usual, int64_t written_us) {
  Cell cell{.entry = entry};
  if (!entry->completed_us)
    cell.waited = std::max(0.0, static_cast<double>(written_us - entry->issued_us) * 1e-6);
  cell.state = entry->text != usual.text ? State::kOther
               : entry->completed_us     ? State::kDone
                                         : State::kWaiting;
  return cell;
}

/// The rows of one channel in all records.
class Channel {
 public:
  Channel(const MergedFlight& flight, const NumberedEntries& entries, const std::string& group)
      : flight_(flight), entries_(entries), first_number_(flight.ranks.size(), -1) {
    for (const auto& [number, row] : entries_) {
      for (size_t i = 0; i < row.size(); ++i) {
        if (row[i] != nullptr && first_number_[i] < 0) first_number_[i] = number;
      }
    }
    for (const RankFlight& rank : flight_.ranks) {
      is_member_.push_back(group == "world" ||
                           std::any_of(rank.entries.begin(), rank.entries.end(),
                                       [&](const FlightEntry& e) { return e.group == group; }));
    }
  }

  std::vector<Row> rows() const {
    std::vector<Row> result;
    for (const auto& [number, entries] : entries_) {
      Row row{.usual = most_frequent(entries)};
      for (size_t i = 0; i < entries.size(); ++i) {
        row.cells.push_back(entries[i] != nullptr
                                ? cell_of(entries[i], *row.usual, flight_.ranks[i].written_us)
                                : Cell{.state = state_without_entry(i, number)});
      }
      result.push_back(std::move(row));
    }
    return result;
  }

 private:
  State state_without_entry(size_t i, int64_t number) const {
    if (!is_member_[i]) return State::kNoMember;
    return first_number_[i] > number ? State::kPast : State::kNotIssued;
  }

  const MergedFlight& flight_;
  const NumberedEntries& entries_;
  std::vector<int64_t> first_number_;  ///< of each record; -1: none
  std::vector<bool> is_member_;
};

/// Keeps the rows from the one before the first trouble on, without the middle of many.
Section section_of(const std::string& title, std::vector<Row> rows) {
  Section section{.title = title};
  const auto trouble =
      std::find_if(rows.begin(), rows.end(), [](const Row& row) { return row.is_trouble(); });
  if (trouble == rows.end()) return section;
  rows.erase(rows.begin(), trouble == rows.begin() ? trouble : trouble - 1);
  if (rows.size() > 2 * kRowsAtAnEnd) {
    section.left_out = rows.size() - 2 * kRowsAtAnEnd;
    const auto first = rows.begin() + kRowsAtAnEnd;
    rows.erase(first, first + static_cast<ptrdiff_t>(section.left_out));
  }
  section.rows = std::move(rows);
  return section;
}

std::vector<Section> sections_of(const MergedFlight& flight) {
  std::map<ChannelKey, NumberedEntries> channels;
  for (size_t i = 0; i < flight.ranks.size(); ++i) {
    for (const FlightEntry& entry : flight.ranks[i].entries) {
      auto& row = channels[{entry.group, entry.channel}][entry.number];
      row.resize(flight.ranks.size());
      row[i] = &entry;
    }
  }
  std::vector<Section> sections;
  for (const auto& [key, entries] : channels) {
    const auto& [group, channel] = key;
    Section section = section_of(fmt::format("process group {}, channel {}", group, channel),
                                 Channel(flight, entries, group).rows());
    if (!section.rows.empty()) sections.push_back(std::move(section));
  }
  return sections;
}

std::string seconds_text(double seconds) {
  return seconds < 1000 ? fmt::format("{:.1f} s", seconds) : fmt::format("{:.0f} s", seconds);
}

/// Records with the same states in all rows.
using Column = std::vector<size_t>;

std::vector<Column> columns_of(const std::vector<Section>& sections, size_t records) {
  std::map<std::string, Column> by_states;
  for (size_t i = 0; i < records; ++i) {
    std::string states;
    for (const Section& section : sections) {
      for (const Row& row : section.rows) {
        const Cell& cell = row.cells[i];
        states += static_cast<char>('0' + static_cast<int>(cell.state));
        if (cell.state == State::kOther) states += cell.entry->text + '\n';
      }
    }
    by_states[states].push_back(i);
  }
  std::vector<Column> columns;
  for (auto& [states, column] : by_states) columns.push_back(std::move(column));
  std::sort(columns.begin(), columns.end());
  return columns;
}

std::string state_text(const Row& row, const Column& column) {
  double waited = 0;
  for (const size_t i : column) waited = std::max(waited, row.cells[i].waited);
  switch (row.cells[column.front()].state) {
    case State::kDone:
      return "done";
    case State::kWaiting:
      return "waiting " + seconds_text(waited);
    case State::kNotIssued:
      return "not issued";
    case State::kOther:
      return "other, below";
    case State::kPast:
      return "past";
    case State::kNoMember:
      break;
  }
  return "-";
}

std::string padded(const std::string& text, size_t width) {
  const std::string line = one_line(text, width);
  return line + std::string(width - text_width(line), ' ');
}

/// The lines of one table: a few columns of all sections.
class TablePage {
 public:
  TablePage(const MergedFlight& flight, const Column* first, const Column* last)
      : flight_(flight), columns_(first, last) {}

  std::vector<std::string> lines(const std::vector<Section>& sections) {
    std::vector<std::string> states;
    for (const Column& column : columns_) states.push_back(rank_list(ranks_of(column)));
    add_line("number", "collective", "step, phase", states);
    for (const Section& section : sections) {
      lines_.push_back(one_line("  " + section.title + ":", kTableWidth));
      for (size_t i = 0; i < section.rows.size(); ++i) {
        if (section.left_out > 0 && i == kRowsAtAnEnd)
          lines_.push_back(fmt::format("  ... {} more ...", section.left_out));
        add_row(section.rows[i]);
      }
    }
    return std::move(lines_);
  }

 private:
  std::vector<int> ranks_of(const Column& column) const {
    std::vector<int> ranks;
    for (const size_t i : column) ranks.push_back(flight_.ranks[i].rank);
    return ranks;
  }

  void add_row(const Row& row) {
    const FlightEntry& usual = *row.usual;
    std::vector<std::string> states;
    for (const Column& column : columns_) states.push_back(state_text(row, column));
    add_line(fmt::format("#{}", usual.number),
             usual.subject.empty() ? usual.collective
                                   : fmt::format("{} of {}", usual.collective, usual.subject),
             fmt::format("{} {}", usual.step, usual.phase), states);
    for (const Column& column : columns_) {
      const Cell& cell = row.cells[column.front()];
      if (cell.state != State::kOther) continue;
      lines_.push_back(one_line(
          fmt::format(
              "          {}: other: {}{}", rank_list(ranks_of(column)), cell.entry->text,
              cell.entry->completed_us ? ", done" : ", waiting " + seconds_text(cell.waited)),
          kTableWidth));
    }
  }

  void add_line(const std::string& number, const std::string& subject, const std::string& step,
                const std::vector<std::string>& states) {
    std::string line = fmt::format("  {} {} {}", padded(number, 7), padded(subject, kSubjectWidth),
                                   padded(step, kStepWidth));
    for (const std::string& state : states) line += " " + padded(state, kStateWidth);
    line.erase(line.find_last_not_of(' ') + 1);
    lines_.push_back(std::move(line));
  }

  const MergedFlight& flight_;
  std::vector<Column> columns_;
  std::vector<std::string> lines_;
};

std::vector<int> missing_ranks(const MergedFlight& flight) {
  std::set<int> present;
  for (const RankFlight& rank : flight.ranks) present.insert(rank.rank);
  std::vector<int> missing;
  for (int rank = 0; rank < flight.ranks.front().size && missing.size() < 1000; ++rank) {
    if (!present.contains(rank)) missing.push_back(rank);
  }
  return missing;
}

}  // namespace

std::vector<std::string> flight_table(const MergedFlight& flight) {
  std::vector<std::string> lines;
  if (flight.ranks.empty()) return lines;
  for (size_t i = 0; i < std::min(flight.ranks.size(), kRanksDescribed); ++i) {
    const RankFlight& rank = flight.ranks[i];
    lines.push_back(one_line(fmt::format("  rank {}: step {}{}{}: {}", rank.rank, rank.step,
                                         rank.phase.empty() ? "" : ", ", rank.phase, rank.reason),
                             kTableWidth));
  }
  if (flight.ranks.size() > kRanksDescribed)
    lines.push_back(fmt::format("  ... {} more ranks ...", flight.ranks.size() - kRanksDescribed));
  if (const auto missing = missing_ranks(flight); !missing.empty())
    lines.push_back(one_line(fmt::format("  no record of {}", rank_list(missing)), kTableWidth));

  const std::vector<Section> sections = sections_of(flight);
  if (sections.empty()) {
    lines.emplace_back("  these ranks have completed the same collectives");
    return lines;
  }
  const std::vector<Column> columns = columns_of(sections, flight.ranks.size());
  for (size_t first = 0; first < columns.size(); first += kStatesInALine) {
    const size_t last = std::min(first + kStatesInALine, columns.size());
    for (std::string& line :
         TablePage(flight, &columns[first], columns.data() + last).lines(sections))
      lines.push_back(std::move(line));
  }
  return lines;
}

}  // namespace tessera::tools
