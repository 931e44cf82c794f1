#include "segment.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <new>

#if defined(__linux__)
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace autopar::shared {

double now_s() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

#if defined(__linux__)

namespace {

std::size_t front_bytes(std::int32_t ranks) {
    const std::size_t n = static_cast<std::size_t>(ranks);
    const std::size_t bytes = sizeof(Header) + n * sizeof(Member) + n * n * sizeof(Ring);
    return (bytes + 4095) / 4096 * 4096;
}

std::size_t whole_bytes(std::int32_t ranks, std::int64_t chunk) {
    return front_bytes(ranks) + 2 * (static_cast<std::size_t>(ranks) + 1) * static_cast<std::size_t>(chunk);
}

}  // namespace

void Word::advance() {
    value.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0) {
        syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&value), FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
    }
}

void sleep_on(std::atomic<std::uint32_t>& word, std::uint32_t seen, double seconds) {
    timespec limit;
    limit.tv_sec = static_cast<time_t>(seconds);
    limit.tv_nsec = static_cast<long>((seconds - static_cast<double>(limit.tv_sec)) * 1e9);
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT, seen, &limit, nullptr, 0);
}

std::int64_t process_start(std::int32_t pid, char* state) {
    char path[64], text[1024];
    std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
    const int file = ::open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return -1;
    const ssize_t n = ::read(file, text, sizeof text - 1);
    ::close(file);
    if (n <= 0) return -1;
    text[n] = 0;
    const char* at = std::strrchr(text, ')');  // the name before it may hold anything
    if (at == nullptr || at[1] == 0) return -1;
    *state = at[2];
    at += 2;
    for (int field = 3; field < 22; ++field) {  // proc(5): starttime is field 22
        at = std::strchr(at, ' ');
        if (at == nullptr) return -1;
        ++at;
    }
    return std::atoll(at);
}

int Segment::create(std::int32_t ranks, std::int64_t chunk) {
    const int file = static_cast<int>(syscall(SYS_memfd_create, "autopar", MFD_CLOEXEC));
    if (file < 0) return -1;
    void* at = MAP_FAILED;
    const std::size_t front = front_bytes(ranks);
    if (::fchmod(file, 0600) == 0 && ::ftruncate(file, static_cast<off_t>(whole_bytes(ranks, chunk))) == 0) {
        at = ::mmap(nullptr, front, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    }
    if (at == MAP_FAILED) {
        const int why = errno;
        ::close(file);
        errno = why;
        return -1;
    }
    Header* header = static_cast<Header*>(at);  // the rest of the file is zeros, as every counter begins
    header->ranks = ranks;
    header->chunk = chunk;
    header->magic = kMagic;
    ::munmap(at, front);
    return file;
}

bool Segment::open(const char* path) {
    const int file = ::open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return false;
    struct stat about;
    void* at = MAP_FAILED;
    if (::fstat(file, &about) == 0 && about.st_size > static_cast<off_t>(sizeof(Header))) {
        bytes_ = static_cast<std::size_t>(about.st_size);
        at = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    } else {
        errno = EINVAL;
    }
    const int why = errno;
    ::close(file);
    errno = why;
    if (at == MAP_FAILED) return false;
    at_ = static_cast<std::byte*>(at);
    if (header().magic != kMagic || bytes_ != whole_bytes(header().ranks, header().chunk)) {
        errno = EINVAL;
        return false;
    }
    slots_ = at_ + front_bytes(header().ranks);
    return true;
}

Segment::~Segment() {
    if (at_ != nullptr) ::munmap(at_, bytes_);
}

#else  // no memory without a name: ranks use torch's own backends

void Word::advance() {}
void sleep_on(std::atomic<std::uint32_t>&, std::uint32_t, double) {}
std::int64_t process_start(std::int32_t, char*) { return -1; }
int Segment::create(std::int32_t, std::int64_t) {
    errno = ENOSYS;
    return -1;
}
bool Segment::open(const char*) {
    errno = ENOSYS;
    return false;
}
Segment::~Segment() = default;

#endif

Ring& Segment::ring(int from, int to) const {
    const int n = header().ranks;
    return reinterpret_cast<Ring*>(at_ + sizeof(Header) + static_cast<std::size_t>(n) * sizeof(Member))[from * n + to];
}

}  // namespace autopar::shared
