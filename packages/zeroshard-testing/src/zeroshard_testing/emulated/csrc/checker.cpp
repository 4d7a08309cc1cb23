#include "checker.h"

#include <algorithm>

namespace emulated {
namespace {

constexpr size_t kMostReports = 100;
constexpr size_t kRounding = 512;  // bytes: the caching allocator gives out multiples

bool covers(const Clock& clock, size_t slot, uint64_t time) { return slot < clock.size() && clock[slot] >= time; }

bool covers(const Clock& clock, const Clock& other) {
  for (size_t slot = 0; slot < other.size(); slot++)
    if (other[slot] && !covers(clock, slot, other[slot])) return false;
  return true;
}

void merge(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t slot = 0; slot < from.size(); slot++) into[slot] = std::max(into[slot], from[slot]);
}

}  // namespace

// Streams of this test have slots from 0 on, so that clocks stay short in a process that runs many tests.
size_t Checker::slot(StreamId stream) {
  auto [found, is_new] = slots_.try_emplace(stream, slots_.size());
  if (is_new) clocks_.emplace_back();
  return found->second;
}

// The clock of a stream as the host's next launch finds it.
Clock& Checker::clock_of(size_t slot) {
  merge(clocks_[slot], host_);
  return clocks_[slot];
}

std::string Checker::name(size_t slot) const {
  for (auto& [stream, taken] : slots_)
    if (taken == slot) return stream == 0 ? "the default stream" : "side stream " + std::to_string(slot);
  return "another stream";
}

StreamId Checker::new_stream() {
  std::lock_guard lock(mutex_);
  return streams_++;
}

Moment Checker::now(StreamId stream) {
  std::lock_guard lock(mutex_);
  return {test_, clock_of(slot(stream))};
}

void Checker::wait(StreamId stream, const Moment& moment) {
  std::lock_guard lock(mutex_);
  if (moment.test == test_) merge(clocks_[slot(stream)], moment.clock);
}

void Checker::host_wait(const Moment& moment) {
  std::lock_guard lock(mutex_);
  if (moment.test == test_) merge(host_, moment.clock);
}

void Checker::host_wait_all() {
  std::lock_guard lock(mutex_);
  for (auto& clock : clocks_) merge(host_, clock);
}

bool Checker::host_knows(const Moment& moment) {
  std::lock_guard lock(mutex_);
  return moment.test != test_ || covers(host_, moment.clock);
}

bool Checker::is_before(const Moment& moment, StreamId stream) {
  std::lock_guard lock(mutex_);
  return moment.test != test_ || covers(clock_of(slot(stream)), moment.clock);
}

// Accesses of an earlier test have ended.
void Checker::renew(Block& block) {
  if (block.test == test_) return;
  block.test = test_;
  block.accesses.clear();
  block.recorded.clear();
}

Moment Checker::launch(StreamId stream, const std::vector<Use>& uses, const SitePtr& site) {
  std::lock_guard lock(mutex_);
  size_t here = slot(stream);
  Clock& clock = clock_of(here);
  if (clock.size() <= here) clock.resize(here + 1);
  uint64_t now = ++clock[here];
  for (const Use& use : uses) {
    if (!use.block || use.begin >= use.end) continue;
    renew(*use.block);
    auto& accesses = use.block->accesses;
    size_t kept = 0;
    for (Access& access : accesses) {
      bool overlaps = access.begin < use.end && use.begin < access.end;
      bool is_ordered = covers(clock, access.stream, access.time);
      if (overlaps && !is_ordered && (access.writes || use.writes)) {
        const char* verb = use.writes ? "write" : "read";
        const char* other = access.writes ? "write" : "read";
        report("race",
               std::string("a ") + verb + " on " + name(here) + " is not ordered after a " + other + " on " +
                   name(access.stream) + " of the same memory",
               site, access.site, use.block->born);
      }
      // Whatever is not ordered after this access later is not ordered after that one either.
      bool is_covered = is_ordered && use.begin <= access.begin && access.end <= use.end && (use.writes || !access.writes);
      if (!is_covered) std::swap(accesses[kept++], access);
    }
    accesses.resize(kept);
    accesses.push_back({use.begin, use.end, here, now, use.writes, site});
  }
  return {test_, clock};
}

void Checker::allocated(Block& block, size_t size, StreamId stream, SitePtr site) {
  std::lock_guard lock(mutex_);
  block.size = size;
  block.stream = stream;
  block.born = std::move(site);
  block.test = test_;
  size_t here = slot(stream);
  Clock& clock = clock_of(here);
  auto found = freed_.find(here);
  if (found == freed_.end() || !size) return;
  // The caching allocator may give any of these out again, once the host has freed it.
  auto& candidates = found->second;
  auto is_done = [&](const Freed& one) {
    for (const Access& access : one.open) {
      if (covers(clock, access.stream, access.time)) continue;
      if (size > (one.size + kRounding - 1) / kRounding * kRounding) return false;
      report("freed in use",
             "memory was freed while " + name(access.stream) + " may still use it, and an allocation on " + name(here) +
                 " may get it: record_stream() is missing",
             one.died, access.site, one.born);
      return true;
    }
    return true;
  };
  candidates.erase(std::remove_if(candidates.begin(), candidates.end(), is_done), candidates.end());
}

void Checker::freed(Block& block, const SitePtr& site) {
  std::lock_guard lock(mutex_);
  renew(block);
  size_t home = slot(block.stream);
  // A recorded stream is waited for as it is now, with all that it comes after.
  Clock clock = clock_of(home);
  for (StreamId stream : block.recorded) merge(clock, clock_of(slot(stream)));
  std::vector<Access> open;
  for (Access& access : block.accesses)
    if (!covers(clock, access.stream, access.time)) open.push_back(std::move(access));
  if (!open.empty()) freed_[home].push_back({std::move(open), block.size, block.born, site});
}

void Checker::record_stream(Block& block, StreamId stream) {
  std::lock_guard lock(mutex_);
  renew(block);
  block.recorded.insert(stream);
}

void Checker::report(const char* kind, std::string text, SitePtr later, SitePtr earlier, SitePtr born) {
  std::string key = std::string(kind) + text;
  for (const SitePtr& site : {later, earlier})
    if (site) key += "|" + site->title + "|" + std::to_string(site->key);
  if (reports_.size() < kMostReports && seen_.insert(key).second)
    reports_.push_back({kind, std::move(text), std::move(later), std::move(earlier), std::move(born)});
}

std::vector<Report> Checker::reports() {
  std::lock_guard lock(mutex_);
  return reports_;
}

void Checker::begin_test() {
  std::lock_guard lock(mutex_);
  test_++;
  slots_.clear();
  clocks_.clear();
  host_.clear();
  freed_.clear();
  reports_.clear();
  seen_.clear();
  slot(0);
}

}  // namespace emulated
