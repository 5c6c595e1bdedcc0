// The files written for a known timeline.
#include "trace/memory_timeline.h"

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "support/well_formed.h"

namespace tessera {
namespace memory_timeline_test {

using nlohmann::json;
using testing::xml_error;

MemorySample sample(int64_t time_us, int64_t step, MemoryEvent event, const std::string& unit,
                    const MemoryBytes& bytes, int64_t peak_other = 0) {
  return {.time_us = time_us,
          .step = step,
          .event = event,
          .unit = unit,
          .bytes = bytes,
          .peak_other = std::max(peak_other, bytes.other),
          .peak_total = bytes.model() + std::max(peak_other, bytes.other)};
}

// A step of a model of one unit, with a name that needs care in XML and JSON.
const char* const kName = "a<b>&\"c\".weight";
MemoryTimeline one_step() {
  using enum MemoryEvent;
  MemoryTimeline timeline{.rank = 3};
  auto& all = timeline.samples;
  all.push_back(sample(10, 0, kStart, "", {.parameters = 1000}));
  all.push_back(sample(20, 0, kForwardBegin, "", {.parameters = 1000, .other = 50}));
  all.push_back(sample(21, 0, kGatherStarted, kName, {.parameters = 1000, .gathered = 2000}));
  all.push_back(sample(25, 0, kUnitGathered, kName, {.parameters = 1000, .gathered = 2000}));
  all.push_back(
      sample(26, 0, kUnitUsed, kName, {.parameters = 1000, .gathered = 2000, .other = 100}, 9000));
  all.push_back(sample(40, 0, kBackwardBegin, "", {.parameters = 1000, .gathered = 2000}));
  all.push_back(
      sample(41, 0, kGradientMade, kName, {.parameters = 1000, .gradients_in_flight = 2}));
  all.push_back(sample(42, 0, kReductionStarted, kName, {.parameters = 1000, .gradients = 7}));
  all.push_back(sample(43, 0, kUnitFreed, kName, {.parameters = 1000, .gradients = 7}));
  all.push_back(sample(44, 0, kBackwardEnd, "", {.parameters = 1000, .gradients = 7}));
  all.push_back(sample(50, 0, kUnitReduced, kName, {.parameters = 1000, .gradients = 7}));
  all.push_back(sample(51, 0, kStepBegin, "", {.parameters = 1000, .gradients = 7}));
  all.push_back(sample(60, 0, kStepEnd, "", {.parameters = 1000, .optimizer_state = 5}));
  all.push_back(sample(61, 1, kGatherStarted, kName, {.parameters = 1000, .other = -5}));
  return timeline;
}

TEST(MemoryTimeline, ThePeakHasTheMostThatThereWasBetweenTwoEvents) {
  const MemoryTimeline timeline = one_step();
  const MemorySample* peak = peak_of(timeline.samples);
  ASSERT_TRUE(peak);
  EXPECT_EQ(peak->event, MemoryEvent::kUnitUsed);
  EXPECT_EQ(peak->peak_total, 1000 + 2000 + 9000);
  EXPECT_EQ(peak_of({}), nullptr);
}

TEST(MemoryTimeline, SpansEndWithTheirEventsOrTheTimeline) {
  std::map<std::string, std::pair<int64_t, int64_t>> spans;
  int count = 0;
  for (const MemorySpan& span : spans_of(one_step().samples)) {
    EXPECT_EQ(span.unit.empty(),
              span.name == "forward" || span.name == "backward" || span.name == "step");
    spans.try_emplace(span.name, span.begin_us, span.end_us);
    ++count;
  }
  const std::map<std::string, std::pair<int64_t, int64_t>> expected = {
      {"forward", {20, 40}}, {"backward", {40, 44}}, {"step", {51, 60}},
      {"gather", {21, 25}},  {"gathered", {25, 43}}, {"reduction", {42, 50}}};
  EXPECT_EQ(spans, expected);
  EXPECT_EQ(count, 7) << "and a gather that has not ended";
}

TEST(MemoryTimeline, TheLastWholeStepIsCutOut) {
  const MemoryTimeline step = last_step_of(one_step());
  EXPECT_EQ(step.samples.size(), one_step().samples.size() - 1);
  EXPECT_EQ(step.rank, 3);
  MemoryTimeline begun = one_step();
  begun.samples.resize(5);
  EXPECT_EQ(last_step_of(begun).samples.size(), 5);
}

// The requirements of chrome://tracing and Perfetto on events.
TEST(MemoryTimeline, ChromeEventsHaveWhatTheirKindsNeed) {
  const MemoryTimeline timeline = one_step();
  const json file = json::parse(chrome_trace(chrome_events(timeline, 1000)));
  std::map<std::string, int> kinds;
  std::map<std::string, int> open;  // asynchronous spans
  for (const json& event : file.at("traceEvents")) {
    const std::string kind = event.at("ph");
    ++kinds[kind];
    EXPECT_EQ(event.at("pid"), 3);
    EXPECT_TRUE(event.at("tid").is_number_integer());
    EXPECT_TRUE(event.at("name").is_string());
    if (kind == "M") continue;
    EXPECT_GE(event.at("ts").get<int64_t>(), 1010);
    EXPECT_LE(event.at("ts").get<int64_t>(), 1061);
    if (kind == "X") {
      EXPECT_GE(event.at("dur").get<int64_t>(), 0);
    } else if (kind == "b" || kind == "e") {
      const std::string key =
          event.at("cat").get<std::string>() + event.at("id").get<std::string>();
      open[key] += kind == "b" ? 1 : -1;
      EXPECT_GE(open[key], 0);
      EXPECT_EQ(event.at("name"), kName);
    } else if (kind == "i") {
      EXPECT_EQ(event.at("s"), "t");
    } else {
      ASSERT_EQ(kind, "C");
      EXPECT_EQ(event.at("args").size(), kMemoryKinds.size());
      for (const json& value : event.at("args")) EXPECT_GE(value.get<int64_t>(), 0);
    }
  }
  const auto samples = static_cast<int>(timeline.samples.size());
  const std::map<std::string, int> expected = {{"M", 3}, {"C", samples}, {"i", samples},
                                               {"X", 3}, {"b", 4},       {"e", 4}};
  EXPECT_EQ(kinds, expected);
  for (const auto& [key, count] : open) EXPECT_EQ(count, 0) << key;
}

TEST(MemoryTimeline, PssIsACounterOfItsOwn) {
  MemoryTimeline timeline{.samples = {sample(1, 0, MemoryEvent::kStart, "", {})}};
  timeline.samples[0].pss = 77;
  int found = 0;
  for (const json& event : chrome_events(timeline)) {
    if (event.at("ph") == "C" && event.at("args").contains("pss")) {
      EXPECT_EQ(event.at("args").at("pss"), 77);
      ++found;
    }
  }
  EXPECT_EQ(found, 1);
}

size_t count_of(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(MemoryTimeline, ThePictureIsWellFormedAndNamesThePeak) {
  const std::string svg = memory_svg(one_step());
  EXPECT_EQ(xml_error(svg), "") << svg;
  EXPECT_NE(svg.find("a&lt;b&gt;&amp;"), std::string::npos);
  EXPECT_NE(svg.find("peak: unit used, unit"), std::string::npos);
  EXPECT_NE(svg.find("rank 3"), std::string::npos);
  // One for each kind in use: parameters, optimizer state, gradients, those in flight, gathered,
  // other. And one for the unit that is used.
  EXPECT_EQ(count_of(svg, "<title>"), 7);
  EXPECT_EQ(count_of(svg, "href"), 0);
  EXPECT_EQ(count_of(svg, "http"), 1) << "the name space alone";
  EXPECT_EQ(xml_error(memory_svg({})), "");
  EXPECT_EQ(xml_error(memory_svg({.samples = {sample(1, 0, MemoryEvent::kStart, "", {})}})), "");
}

TEST(MemoryTimeline, TheCheckOfXmlSeesMistakes) {
  for (const char* text :
       {"<a>", "<a></b>", "<a x=1/>", "<a>&b;</a>", "<a/><b/>", "", "<a x=\"<\"/>"})
    EXPECT_NE(xml_error(text), "") << text;
}

TEST(MemoryTimeline, TheTableHasALineForEachSample) {
  const MemoryTimeline timeline = one_step();
  const std::string table = memory_table(timeline);
  EXPECT_EQ(count_of(table, "\n"), timeline.samples.size() + 3);
  EXPECT_NE(table.find("peak 12000 bytes, 3000 of them of the model, in step 0: unit used"),
            std::string::npos);
  MemoryTimeline unknown = timeline;
  unknown.knows_other = false;
  EXPECT_NE(memory_table(unknown).find("not known"), std::string::npos);
}

TEST(ReadableBytes, HasOneDigitAfterThePointFromKibibytesOn) {
  EXPECT_EQ(readable_bytes(1023), "1023 B");
  EXPECT_EQ(readable_bytes(1536), "1.5 KiB");
  EXPECT_EQ(readable_bytes(int64_t{5} << 40), "5.0 TiB");
  EXPECT_EQ(readable_bytes(-2048), "-2.0 KiB");
}

}  // namespace memory_timeline_test
}  // namespace tessera
