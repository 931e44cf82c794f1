#include "group.h"

#include <cstring>
#include <utility>
#include <vector>

#include "../kernel.h"

#if defined(__linux__)
#include <sched.h>
#include <unistd.h>
#endif

namespace autopar::shared {

namespace {

constexpr int kSpins = 1000;          // some 10 µs, where each rank has a core
constexpr double kLookEvery_s = 0.25;  // at the process of a rank that is waited for
constexpr double kStopped_s = 2.0;     // a rank may be stopped for so long
constexpr std::int64_t kSmall = 1 << 15;  // bytes of a sum that every rank makes whole

std::int64_t least(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
std::int64_t pieces(std::int64_t bytes, std::int64_t each) { return (bytes + each - 1) / each; }

inline void rest() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

int cores() {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
    return 1;
}

std::int64_t width_of(std::int32_t dtype) {
    switch (dtype) {
        case kFloat64:
        case kInt64:
            return 8;
        case kFloat32:
        case kInt32:
            return 4;
        case kBFloat16:
        case kFloat16:
        case kInt16:
            return 2;
        case kInt8:
        case kUInt8:
        case kBool:
            return 1;
        default:
            return 0;
    }
}

void transfer(std::byte* to, const std::byte* from, std::int64_t bytes) {
    if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

}  // namespace

bool Group::join(const char* path) {
    std::shared_ptr<Segment> segment = std::make_shared<Segment>();
    if (!segment->open(path)) return false;
    join(std::move(segment));
    return true;
}

void Group::join(std::shared_ptr<Segment> segment) {
    segment_ = std::move(segment);
    ranks_ = segment_->header().ranks;
    chunk_ = segment_->header().chunk;
    spins_ = ranks_ <= cores() ? kSpins : 0;
#if defined(__linux__)
    char state;
    Member& me = segment_->member(rank_);
    me.began.store(process_start(getpid(), &state));
    me.pid.store(getpid(), std::memory_order_release);
#endif
}

Outcome Group::failure(std::int32_t* rank) const {
    const std::int64_t broken = segment_->header().broken.load();
    *rank = static_cast<std::int32_t>(broken & 0xFFFFFFFF);
    return static_cast<Outcome>(broken >> 32);
}

Outcome Group::fail(Outcome what, int rank) {
    std::int64_t none = 0;
    segment_->header().broken.compare_exchange_strong(none, static_cast<std::int64_t>(what) << 32 | rank);
    std::int32_t first;
    return failure(&first);
}

// Whether rank `of` is still to come. `stopped`: since when it has been seen stopped, or 0.
Outcome Group::check(int of, double began, double* stopped) {
    std::int32_t first;
    if (const Outcome known = failure(&first); known != kDone) return known;
    const double now = now_s();
    if (now - began > limit_s_) return fail(kLate, of);
    const Member& member = segment_->member(of);
    const std::int32_t pid = member.pid.load(std::memory_order_acquire);
    if (pid == 0) return kDone;  // it has not joined yet
    char state = 'X';
    const std::int64_t start = process_start(pid, &state);
    if (start != member.began.load() || state == 'Z' || state == 'X') return fail(kDead, of);
    const bool halted = state == 'T' || state == 't';
    if (!halted) *stopped = 0;
    if (halted && *stopped == 0) *stopped = now;
    return halted && now - *stopped > kStopped_s ? fail(kStopped, of) : kDone;
}

Outcome Group::await(Word& word, std::uint32_t wanted, int of) {
    for (int i = 0; i < spins_; ++i) {
        if (word.reached(wanted)) return kDone;
        rest();
    }
    Outcome outcome = kDone;
    double began = 0, looked = 0, stopped = 0;
    word.sleepers.fetch_add(1, std::memory_order_seq_cst);
    while (true) {
        const std::uint32_t seen = word.value.load(std::memory_order_seq_cst);
        if (static_cast<std::int32_t>(seen - wanted) >= 0) break;
        sleep_on(word.value, seen, kLookEvery_s);
        if (word.reached(wanted)) break;
        const double now = now_s();
        if (began == 0) began = looked = now;
        if (now - looked < kLookEvery_s / 2) continue;
        looked = now;
        outcome = check(of, began, &stopped);
        if (outcome != kDone) break;
    }
    word.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    return outcome;
}

Outcome Group::step() {
    segment_->member(rank_).posted.advance();
    for (int i = 1; i < ranks_; ++i) {
        const int q = (rank_ + i) % ranks_;
        if (const Outcome outcome = await(segment_->member(q).posted, sequence_ + 1, q); outcome != kDone) return outcome;
    }
    return kDone;
}

template <class Put, class Take>
Outcome Group::steps(std::int64_t count, Put put, Take take) {
    for (std::int64_t k = 0; k < count; ++k) {
        put(k);
        if (const Outcome outcome = step(); outcome != kDone) return outcome;
        take(k);
        ++sequence_;
    }
    return kDone;
}

Outcome Group::barrier() {
    return steps(1, [](std::int64_t) {}, [](std::int64_t) {});
}

Outcome Group::all_gather(const void* in, void* out, std::int64_t bytes) {
    const std::byte* from = static_cast<const std::byte*>(in);
    std::byte* to = static_cast<std::byte*>(out);
    auto put = [&](std::int64_t k) { transfer(slot(rank_), from + k * chunk_, least(chunk_, bytes - k * chunk_)); };
    auto take = [&](std::int64_t k) {
        const std::int64_t at = k * chunk_, n = least(chunk_, bytes - at);
        for (int q = 0; q < ranks_; ++q) transfer(to + q * bytes + at, q == rank_ ? from + at : slot(q), n);
    };
    return steps(pieces(bytes, chunk_), put, take);
}

Outcome Group::broadcast(void* data, std::int64_t bytes, std::int32_t root) {
    std::byte* at = static_cast<std::byte*>(data);
    const bool gives = rank_ == root;
    auto put = [&](std::int64_t k) {
        if (gives) transfer(slot(root), at + k * chunk_, least(chunk_, bytes - k * chunk_));
    };
    auto take = [&](std::int64_t k) {
        if (!gives) transfer(at + k * chunk_, slot(root), least(chunk_, bytes - k * chunk_));
    };
    return steps(pieces(bytes, chunk_), put, take);
}

std::int64_t Group::part_bytes() const { return chunk_ / ranks_ / kLine * kLine; }

Outcome Group::all_reduce(const void* in, void* out, std::int64_t count, std::int32_t dtype, std::int32_t largest) {
    const std::int64_t width = width_of(dtype), bytes = count * width;
    if (width == 0) return kUnknownDtype;
    const std::byte* from = static_cast<const std::byte*>(in);
    std::byte* to = static_cast<std::byte*>(out);
    if (ranks_ > 2 && bytes > kSmall) return reduce_in_two(from, to, bytes, dtype, largest);
    std::vector<const void*> parts(static_cast<std::size_t>(ranks_));
    auto put = [&](std::int64_t k) { transfer(slot(rank_), from + k * chunk_, least(chunk_, bytes - k * chunk_)); };
    auto take = [&](std::int64_t k) {
        const std::int64_t at = k * chunk_;
        for (int q = 0; q < ranks_; ++q) parts[static_cast<std::size_t>(q)] = q == rank_ ? from + at : slot(q);
        combine_(to + at, parts.data(), ranks_, least(chunk_, bytes - at) / width, dtype, largest);
    };
    return steps(pieces(bytes, chunk_), put, take);
}

// Each rank sums one part of every chunk, and the others take it in the step after.
Outcome Group::reduce_in_two(const std::byte* in, std::byte* out, std::int64_t bytes, std::int32_t dtype,
                             std::int32_t largest) {
    const std::int64_t part = part_bytes(), chunk = part * ranks_, chunks = pieces(bytes, chunk), mine = rank_ * part;
    std::vector<const void*> parts(static_cast<std::size_t>(ranks_));
    auto length = [&](std::int64_t k, int q) {  // of part q of chunk k
        const std::int64_t left = bytes - k * chunk - q * part;
        return k >= chunks || left < 0 ? 0 : least(part, left);
    };
    auto put = [&](std::int64_t k) {
        for (int q = 0; q < ranks_; ++q) {
            if (q != rank_) transfer(slot(rank_) + q * part, in + k * chunk + q * part, length(k, q));
        }
    };
    auto take = [&](std::int64_t k) {
        for (int q = 0; q < ranks_; ++q) {
            parts[static_cast<std::size_t>(q)] = q == rank_ ? in + k * chunk + mine : slot(q) + mine;
        }
        combine_(segment_->result(sequence_) + mine, parts.data(), ranks_, length(k, rank_) / width_of(dtype), dtype, largest);
        if (k == 0) return;
        for (int q = 0; q < ranks_; ++q) {  // the chunk before: its input has been read, so `out` may be `in`
            transfer(out + (k - 1) * chunk + q * part, segment_->result(sequence_ - 1) + q * part, length(k - 1, q));
        }
    };
    return steps(chunks + 1, put, take);
}

Outcome Group::reduce_scatter(const void* in, void* out, std::int64_t count, std::int32_t dtype, std::int32_t largest) {
    const std::int64_t width = width_of(dtype), bytes = count * width, part = part_bytes();
    if (width == 0) return kUnknownDtype;
    const std::byte* from = static_cast<const std::byte*>(in);
    std::byte* to = static_cast<std::byte*>(out);
    std::vector<const void*> parts(static_cast<std::size_t>(ranks_));
    auto put = [&](std::int64_t k) {
        for (int q = 0; q < ranks_; ++q) {
            if (q != rank_) transfer(slot(rank_) + q * part, from + q * bytes + k * part, least(part, bytes - k * part));
        }
    };
    auto take = [&](std::int64_t k) {
        for (int q = 0; q < ranks_; ++q) {
            parts[static_cast<std::size_t>(q)] = q == rank_ ? from + q * bytes + k * part : slot(q) + rank_ * part;
        }
        combine_(to + k * part, parts.data(), ranks_, least(part, bytes - k * part) / width, dtype, largest);
    };
    return steps(pieces(bytes, part), put, take);
}

Outcome Group::all_to_all(const void* in, void* out, const std::int64_t* give, const std::int64_t* take, bool alike) {
    const std::byte* from = static_cast<const std::byte*>(in);
    std::byte* to = static_cast<std::byte*>(out);
    const std::int64_t part = part_bytes();
    std::int64_t most = 0, own = 0;  // bytes from any rank to any other; where this rank's for itself begin
    for (int q = 0; q < ranks_; ++q) most = give[q] > most ? give[q] : most;
    for (int q = 0; q < rank_; ++q) own += give[q];
    if (!alike) {
        auto tell = [&](std::int64_t) { segment_->member(rank_).told[sequence_ & 1].store(most); };
        auto hear = [&](std::int64_t) {
            for (int q = 0; q < ranks_; ++q) {
                const std::int64_t theirs = segment_->member(q).told[sequence_ & 1].load();
                most = theirs > most ? theirs : most;
            }
        };
        if (const Outcome outcome = steps(1, tell, hear); outcome != kDone) return outcome;
    }
    auto length = [&](std::int64_t all, std::int64_t k) { return all < k * part ? 0 : least(part, all - k * part); };
    auto put_parts = [&](std::int64_t k) {
        std::int64_t at = k * part;
        for (int q = 0; q < ranks_; at += give[q], ++q) {
            if (q != rank_) transfer(slot(rank_) + q * part, from + at, length(give[q], k));
        }
    };
    auto take_parts = [&](std::int64_t k) {
        std::int64_t at = k * part;
        for (int q = 0; q < ranks_; at += take[q], ++q) {
            transfer(to + at, q == rank_ ? from + own + k * part : slot(q) + rank_ * part, length(take[q], k));
        }
    };
    return steps(pieces(most, part), put_parts, take_parts);
}

}  // namespace autopar::shared
