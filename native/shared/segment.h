// Memory that the ranks of one host share: who they are, how they wait for each other, and where their bytes lie.
//
// The memory has no name in any file system (memfd), so nothing can be left behind by a crash. The first rank makes it; the
// others open it through /proc/PID/fd, which only the same user may; then every rank closes what it opened and keeps the map.
//
// Layout: Header, a Member for each rank, a Ring for each ordered pair of ranks (mail.h), then two halves of `chunk` bytes
// for each rank (its slots), and two more (the results of reductions).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace autopar::shared {

// As in native.py.
enum Outcome : std::int32_t {
    kDone = 0,
    kUnknownDtype = 1,
    kDead = 10,     // a rank has ended
    kStopped = 11,  // a rank has been stopped by a signal
    kLate = 12,     // a rank has not come within the time limit
    kSystem = 13,   // the system gave no memory, file or thread: errno says why
    kMismatch = 14, // a message of another length than expected
};

constexpr std::int64_t kLine = 64;  // bytes of a cache line
constexpr std::uint32_t kMagic = 0x61757031;

// A counter that ranks wait for.
struct Word {
    std::atomic<std::uint32_t> value;
    std::atomic<std::uint32_t> sleepers;

    // Adds one and wakes those that sleep on it.
    void advance();
    // Whether it has come to `wanted`, which it may have passed by less than 2^31.
    bool reached(std::uint32_t wanted) const {
        return static_cast<std::int32_t>(value.load(std::memory_order_acquire) - wanted) >= 0;
    }
};

struct alignas(kLine) Member {
    Word posted;                      // steps of collectives that it has begun
    std::atomic<std::int32_t> pid;    // 0: not there yet
    std::atomic<std::int64_t> began;  // start time of the process: another one with its pid has another
    std::atomic<std::int64_t> told[2];
    std::atomic<std::int32_t> heap;   // file in its process that holds its messages, plus 1
};

struct alignas(kLine) Header {
    std::uint32_t magic;
    std::int32_t ranks;
    std::int64_t chunk;
    std::atomic<std::int64_t> broken;  // outcome * 2^32 + rank of the first failure, or 0
};

// A message on its way: in buffer `buffer` of its pair, `capacity` bytes from `offset` of the sender's heap.
struct Record {
    std::int64_t tag, bytes, offset, capacity;
    std::int32_t buffer;
};

constexpr std::uint32_t kRecords = 256;
constexpr std::uint32_t kBuffers = 256;

// Messages from one rank to another.
struct alignas(kLine) Ring {
    Word head;  // records written
    Word tail;  // records read
    Word done;  // messages copied out
    std::atomic<std::uint8_t> busy[kBuffers];
    Record records[kRecords];
};

// The map of one rank.
class Segment {
public:
    Segment() = default;
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;
    ~Segment();

    // A new file without a name for `ranks` ranks. -1 and errno where there is none.
    static int create(std::int32_t ranks, std::int64_t chunk);
    // Maps it. False and errno where it can't be opened or isn't such a file.
    bool open(const char* path);

    Header& header() const { return *reinterpret_cast<Header*>(at_); }
    Member& member(int rank) const { return reinterpret_cast<Member*>(at_ + sizeof(Header))[rank]; }
    Ring& ring(int from, int to) const;
    std::byte* slot(int rank, std::uint32_t step) const { return slots_ + (2 * rank + (step & 1)) * header().chunk; }
    std::byte* result(std::uint32_t step) const { return slot(header().ranks, step); }

private:
    std::byte* at_ = nullptr;
    std::byte* slots_ = nullptr;
    std::size_t bytes_ = 0;
};

// Sleeps until `word` is another number than `seen`, something wakes it, or `seconds` are over.
void sleep_on(std::atomic<std::uint32_t>& word, std::uint32_t seen, double seconds);

// Start time of a process as the system counts it, -1 if there is none; `state`: its letter in /proc/PID/stat.
std::int64_t process_start(std::int32_t pid, char* state);

double now_s();  // of a clock that never goes back

}  // namespace autopar::shared
