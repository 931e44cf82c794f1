// Messages from rank to rank, told apart by tags, received in any order. Sending copies into a buffer of the sender's heap,
// a file without a name that the receiver maps, and goes on; up to kRecords messages of a pair may be under way. Buffers are
// used again once their message has been copied out.
#pragma once

#include <deque>
#include <vector>

#include "group.h"

namespace autopar::shared {

class Mail {
public:
    explicit Mail(Group& group) : group_(group) {}
    Mail(const Mail&) = delete;
    Mail& operator=(const Mail&) = delete;
    ~Mail();

    Outcome send(const void* data, std::int64_t bytes, std::int32_t to, std::int64_t tag);
    Outcome receive(void* data, std::int64_t bytes, std::int32_t from, std::int64_t tag);
    // Waits until all that was sent has been copied out.
    Outcome sent();

private:
    struct Buffer {
        std::byte* at;
        std::int64_t offset, capacity;
    };
    struct Peer {
        std::vector<Buffer> out;    // buffers for it
        std::vector<Buffer> in;     // its buffers, as mapped here
        std::deque<Record> waiting; // its messages that nobody has asked for yet
        int heap = -1;              // its file, as opened here
    };

    bool begin();
    int free_buffer(Ring& ring, Peer& peer, std::int64_t bytes);  // its number, or kNoneFree, or kNoMemory
    const std::byte* message(Peer& peer, int from, const Record& record);
    Outcome take(void* data, std::int64_t bytes, int from, const Record& record);

    Group& group_;
    std::vector<Peer> peers_;
    int heap_ = -1;
    std::int64_t size_ = 0;  // of the heap
};

}  // namespace autopar::shared
