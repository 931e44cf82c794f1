#include "mail.h"

#include <cstdio>
#include <cstring>

#if defined(__linux__)
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace autopar::shared {

namespace {

constexpr std::int64_t kPage = 4096;
constexpr int kNoneFree = -1, kNoMemory = -2;

std::int64_t room_for(std::int64_t bytes) {
    std::int64_t room = kPage;
    while (room < bytes) room *= 2;  // pages that nothing is written to take no memory
    return room;
}

#if defined(__linux__)

std::byte* mapped(int file, std::int64_t offset, std::int64_t bytes) {
    void* at = ::mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file, offset);
    return at == MAP_FAILED ? nullptr : static_cast<std::byte*>(at);
}

void unmap(std::byte* at, std::int64_t bytes) {
    if (at != nullptr) ::munmap(at, static_cast<std::size_t>(bytes));
}

void close_file(int file) {
    if (file >= 0) ::close(file);
}

int new_heap() {
    const int file = static_cast<int>(syscall(SYS_memfd_create, "autopar", MFD_CLOEXEC));
    if (file >= 0) ::fchmod(file, 0600);
    return file;
}

bool resize(int file, std::int64_t bytes) { return ::ftruncate(file, bytes) == 0; }

int open_heap(std::int32_t pid, int file) {
    char path[64];
    std::snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, file);
    return ::open(path, O_RDWR | O_CLOEXEC);
}

#else

std::byte* mapped(int, std::int64_t, std::int64_t) { return nullptr; }
void unmap(std::byte*, std::int64_t) {}
void close_file(int) {}
int new_heap() { return -1; }
bool resize(int, std::int64_t) { return false; }
int open_heap(std::int32_t, int) { return -1; }

#endif

}  // namespace

Mail::~Mail() {
    for (Peer& peer : peers_) {
        for (const Buffer& buffer : peer.out) unmap(buffer.at, buffer.capacity);
        for (const Buffer& buffer : peer.in) unmap(buffer.at, buffer.capacity);
        close_file(peer.heap);
    }
    close_file(heap_);
}

bool Mail::begin() {
    if (peers_.empty()) peers_.resize(static_cast<std::size_t>(group_.ranks()));
    if (heap_ >= 0) return true;
    heap_ = new_heap();
    if (heap_ < 0) return false;
    group_.segment().member(group_.rank()).heap.store(heap_ + 1, std::memory_order_release);
    return true;
}

int Mail::free_buffer(Ring& ring, Peer& peer, std::int64_t bytes) {
    int found = -1;
    for (std::size_t b = 0; b < peer.out.size(); ++b) {
        const std::int64_t capacity = peer.out[b].capacity;
        if (capacity < bytes || ring.busy[b].load(std::memory_order_acquire) != 0) continue;
        if (found < 0 || capacity < peer.out[static_cast<std::size_t>(found)].capacity) found = static_cast<int>(b);
    }
    if (found >= 0) return found;
    if (peer.out.size() == kBuffers) return kNoneFree;
    const Buffer made{nullptr, size_, room_for(bytes)};
    if (!resize(heap_, size_ + made.capacity)) return kNoMemory;
    peer.out.push_back(made);
    Buffer& buffer = peer.out.back();
    buffer.at = mapped(heap_, buffer.offset, buffer.capacity);
    if (buffer.at == nullptr) {
        peer.out.pop_back();
        return kNoMemory;
    }
    size_ += buffer.capacity;
    return static_cast<int>(peer.out.size()) - 1;
}

Outcome Mail::send(const void* data, std::int64_t bytes, std::int32_t to, std::int64_t tag) {
    if (!begin()) return kSystem;
    Ring& ring = group_.segment().ring(group_.rank(), to);
    Peer& peer = peers_[static_cast<std::size_t>(to)];
    int found;
    while (true) {
        const std::uint32_t seen = ring.done.value.load();
        found = free_buffer(ring, peer, bytes);
        if (found == kNoMemory) return kSystem;
        if (found != kNoneFree) break;
        if (const Outcome o = group_.await(ring.done, seen + 1, to); o != kDone) return o;
    }
    const Buffer& buffer = peer.out[static_cast<std::size_t>(found)];
    if (bytes > 0) std::memcpy(buffer.at, data, static_cast<std::size_t>(bytes));
    const std::uint32_t head = ring.head.value.load(std::memory_order_relaxed);
    if (const Outcome o = group_.await(ring.tail, head - kRecords + 1, to); o != kDone) return o;
    ring.busy[found].store(1, std::memory_order_relaxed);
    ring.records[head % kRecords] = Record{tag, bytes, buffer.offset, buffer.capacity, found};
    ring.head.advance();
    return kDone;
}

const std::byte* Mail::message(Peer& peer, int from, const Record& record) {
    const Member& member = group_.segment().member(from);
    if (peer.heap < 0) {
        peer.heap = open_heap(member.pid.load(), member.heap.load(std::memory_order_acquire) - 1);
        if (peer.heap < 0) return nullptr;
    }
    const std::size_t at = static_cast<std::size_t>(record.buffer);
    if (peer.in.size() <= at) peer.in.resize(at + 1, Buffer{nullptr, 0, 0});
    Buffer& buffer = peer.in[at];
    if (buffer.at == nullptr) buffer = Buffer{mapped(peer.heap, record.offset, record.capacity), record.offset, record.capacity};
    return buffer.at;
}

Outcome Mail::take(void* data, std::int64_t bytes, int from, const Record& record) {
    Ring& ring = group_.segment().ring(from, group_.rank());
    const std::byte* at = message(peers_[static_cast<std::size_t>(from)], from, record);
    if (at == nullptr) return kSystem;
    const bool fits = record.bytes == bytes;
    if (fits && bytes > 0) std::memcpy(data, at, static_cast<std::size_t>(bytes));
    ring.busy[record.buffer].store(0, std::memory_order_release);
    ring.done.advance();
    return fits ? kDone : kMismatch;
}

Outcome Mail::receive(void* data, std::int64_t bytes, std::int32_t from, std::int64_t tag) {
    if (!begin()) return kSystem;
    Ring& ring = group_.segment().ring(from, group_.rank());
    std::deque<Record>& waiting = peers_[static_cast<std::size_t>(from)].waiting;
    for (auto at = waiting.begin(); at != waiting.end(); ++at) {
        if (at->tag != tag) continue;
        const Record record = *at;
        waiting.erase(at);
        return take(data, bytes, from, record);
    }
    while (true) {
        const std::uint32_t tail = ring.tail.value.load(std::memory_order_relaxed);
        if (const Outcome o = group_.await(ring.head, tail + 1, from); o != kDone) return o;
        const Record record = ring.records[tail % kRecords];
        ring.tail.advance();
        if (record.tag == tag) return take(data, bytes, from, record);
        waiting.push_back(record);
    }
}

Outcome Mail::sent() {
    for (std::size_t to = 0; to < peers_.size(); ++to) {
        if (static_cast<int>(to) == group_.rank()) continue;
        Ring& ring = group_.segment().ring(group_.rank(), static_cast<int>(to));
        const Outcome o = group_.await(ring.done, ring.head.value.load(), static_cast<int>(to));
        if (o != kDone) return o;
    }
    return kDone;
}

}  // namespace autopar::shared
