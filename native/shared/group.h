// One rank's place in a group, and the collectives of the group.
//
// Every collective is a row of steps. In step s a rank puts bytes into its slot (half s % 2), posts s, waits until all have
// posted s, and takes what it needs from the others' slots. Whoever has passed the wait of step s + 1 knows that all have
// finished step s, so in step s + 2 half s % 2 may be written again: one wait a step is enough.
//
// Sums are made in the order of ranks, so all ranks get the same bits, and so does the next run.
#pragma once

#include <memory>

#include "segment.h"

namespace autopar::shared {

// kernels/combine.cpp, for the target in use.
using Combine = std::int32_t (*)(void* out, const void* const* parts, std::int32_t n, std::int64_t count,
                                 std::int32_t dtype, std::int32_t largest);

class Group {
public:
    Group(std::int32_t rank, double limit_s, Combine combine) : rank_(rank), limit_s_(limit_s), combine_(combine) {}

    // Maps the segment and says who this rank is. False and errno where that fails.
    bool join(const char* path);
    // The same with a map that is there: ranks that are threads may share one.
    void join(std::shared_ptr<Segment> segment);

    Outcome barrier();
    // out: bytes of rank 0, of rank 1, ...
    Outcome all_gather(const void* in, void* out, std::int64_t bytes);
    Outcome broadcast(void* data, std::int64_t bytes, std::int32_t root);
    // in may be out.
    Outcome all_reduce(const void* in, void* out, std::int64_t count, std::int32_t dtype, std::int32_t largest);
    // in: `count` for rank 0, for rank 1, ...; out: the sums of this rank's.
    Outcome reduce_scatter(const void* in, void* out, std::int64_t count, std::int32_t dtype, std::int32_t largest);
    // give, take: bytes for and from each rank, in the order of ranks. `alike`: all those of all ranks are the same.
    Outcome all_to_all(const void* in, void* out, const std::int64_t* give, const std::int64_t* take, bool alike);

    // Waits until `word`, of rank `of`, comes to `wanted`.
    Outcome await(Word& word, std::uint32_t wanted, int of);
    // The first failure of the group: its outcome and, in `rank`, whose it was.
    Outcome failure(std::int32_t* rank) const;

    const Segment& segment() const { return *segment_; }
    int rank() const { return rank_; }
    int ranks() const { return ranks_; }

private:
    Outcome step();  // posts, and waits for all
    // For k = 0 .. count - 1: put(k), a step, take(k).
    template <class Put, class Take>
    Outcome steps(std::int64_t count, Put put, Take take);
    Outcome check(int of, double began, double* stopped);
    Outcome fail(Outcome what, int rank);
    Outcome reduce_in_two(const std::byte* in, std::byte* out, std::int64_t bytes, std::int32_t dtype,
                          std::int32_t largest);
    std::int64_t part_bytes() const;  // of a slot, for each rank
    std::byte* slot(int rank) const { return segment_->slot(rank, sequence_); }

    std::shared_ptr<Segment> segment_;
    std::int32_t rank_, ranks_ = 0;
    double limit_s_;
    Combine combine_;
    std::int64_t chunk_ = 0;
    std::uint32_t sequence_ = 0;  // of the step that is under way
    int spins_ = 0;
};

}  // namespace autopar::shared
