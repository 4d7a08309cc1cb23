// Finds accesses of device memory that nothing orders, by vector clocks. Nothing of torch is needed here.
//
// Each stream counts its kernels, and knows of each other stream up to which kernel it comes after it: its clock. An
// event is a copy of a stream's clock; a stream that waits for it takes the maximum of both. The host has a clock too:
// what it has waited for comes before everything that it launches later. See Mattern, "Virtual time and global states
// of distributed systems" (1989), and Flanagan and Freund, "FastTrack" (2009).
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace emulated {

using StreamId = int64_t;  // 0 is the default stream
using Clock = std::vector<uint64_t>;

// Who did something: a title, and a key that is the same for the same place in the program.
struct Site {
  std::string title;
  uint64_t key = 0;
  virtual ~Site() = default;
};
using SitePtr = std::shared_ptr<const Site>;

// A moment on a stream. It belongs to the test in which it was recorded, and has passed in every later one.
struct Moment {
  uint64_t test = 0;
  Clock clock;
};

struct Access {
  int64_t begin, end;  // bytes within the block
  size_t stream;
  uint64_t time;
  bool writes;
  SitePtr site;
};

// An allocation. Its owner calls Checker::free once.
struct Block {
  size_t size = 0;
  StreamId stream = 0;
  SitePtr born;
  uint64_t test = 0;
  std::vector<Access> accesses;
  std::set<StreamId> recorded;  // by record_stream
};

struct Use {
  Block* block;
  int64_t begin, end;
  bool writes;
};

struct Report {
  std::string kind, text;
  SitePtr later, earlier, born;
};

class Checker {
 public:
  StreamId new_stream();
  // What the stream was given so far.
  Moment now(StreamId stream);
  // Orders what the stream is given from now on after a moment.
  void wait(StreamId stream, const Moment& moment);
  // Orders what the host launches from now on after a moment, on whatever stream.
  void host_wait(const Moment& moment);
  void host_wait_all();
  bool host_knows(const Moment& moment);
  // Whether what the stream is given now comes after a moment.
  bool is_before(const Moment& moment, StreamId stream);
  // Runs a kernel on a stream: checks its accesses against earlier ones, notes them, and returns its end.
  Moment launch(StreamId stream, const std::vector<Use>& uses, const SitePtr& site);
  void allocated(Block& block, size_t size, StreamId stream, SitePtr site);
  void freed(Block& block, const SitePtr& site);
  void record_stream(Block& block, StreamId stream);
  std::vector<Report> reports();
  // Forgets everything: all that was launched has ended.
  void begin_test();

 private:
  struct Freed {
    std::vector<Access> open;
    size_t size;
    SitePtr born, died;
  };
  size_t slot(StreamId stream);
  Clock& clock_of(size_t slot);
  void renew(Block& block);
  void report(const char* kind, std::string text, SitePtr later, SitePtr earlier, SitePtr born);
  std::string name(size_t slot) const;

  std::mutex mutex_;
  StreamId streams_ = 1;
  uint64_t test_ = 1;
  std::unordered_map<StreamId, size_t> slots_;
  std::vector<Clock> clocks_;                             // by slot
  std::unordered_map<size_t, std::vector<Freed>> freed_;  // by slot of the stream that had allocated it
  Clock host_;
  std::vector<Report> reports_;
  std::unordered_set<std::string> seen_;
};

}  // namespace emulated
