// The C interface of the ranks of one host (autopar/runtime/shared.py). Functions give an Outcome unless they say otherwise.
#include <cerrno>
#include <new>

#include "mail.h"
#include "queue.h"

#if defined(__linux__)
#include <unistd.h>
#endif

#define AUTOPAR_API extern "C" __attribute__((visibility("default")))

namespace {

using autopar::shared::Combine;
using autopar::shared::Group;
using autopar::shared::Mail;
using autopar::shared::Outcome;
using autopar::shared::Queue;
using autopar::shared::Segment;
using std::int32_t;
using std::int64_t;

struct Place {
    Place(int32_t rank, double limit_s, Combine combine) : group(rank, limit_s, combine), mail(group) {}
    Group group;
    Mail mail;
    Queue queue;  // ends first
};

// As in native.py.
enum Kind : int32_t { kBarrier, kAllReduce, kAllGather, kReduceScatter, kAllToAll, kBroadcast };

// A collective, as native.py's SharedCall. count: elements of a reduction, else bytes. argument: the dtype of a reduction,
// the root of a broadcast, whether all sizes of an all-to-all are alike.
struct Call {
    int32_t kind, argument, largest;
    const void* in;
    void* out;
    int64_t count;
    const int64_t *give, *take;
};

Outcome run(Group& group, const Call& call) {
    switch (call.kind) {
        case kBarrier:
            return group.barrier();
        case kAllReduce:
            return group.all_reduce(call.in, call.out, call.count, call.argument, call.largest);
        case kAllGather:
            return group.all_gather(call.in, call.out, call.count);
        case kReduceScatter:
            return group.reduce_scatter(call.in, call.out, call.count, call.argument, call.largest);
        case kAllToAll:
            return group.all_to_all(call.in, call.out, call.give, call.take, call.argument != 0);
        case kBroadcast:
            return group.broadcast(call.out, call.count, call.argument);
        default:
            return autopar::shared::kUnknownDtype;
    }
}

}  // namespace

// A file of this process without a name, for a group to map; -errno where there is none. Close it when all have.
AUTOPAR_API int32_t autopar_shared_create(int32_t ranks, int64_t chunk) {
    const int file = Segment::create(ranks, chunk);
    return file < 0 ? -errno : file;
}

// This rank's place in the group of the file at `path`; null and `why` (errno) where it can't be had.
AUTOPAR_API void* autopar_shared_join(const char* path, int32_t rank, double limit_s, Combine combine, int32_t* why) {
    Place* place = new (std::nothrow) Place(rank, limit_s, combine);
    errno = ENOMEM;
    if (place != nullptr && place->group.join(path)) return place;
    *why = errno;
    delete place;
    return nullptr;
}

AUTOPAR_API void autopar_shared_leave(void* place) { delete static_cast<Place*>(place); }

AUTOPAR_API int32_t autopar_shared_run(void* place, const Call* call) {
    Place& at = *static_cast<Place*>(place);
    return at.queue.run([&] { return run(at.group, *call); });
}

// A ticket, or 0 where there is no thread. The tensors must stay until it is waited for.
AUTOPAR_API int64_t autopar_shared_begin(void* place, const Call* call) {
    Place& at = *static_cast<Place*>(place);
    return at.queue.begin([&at, copy = *call] { return run(at.group, copy); });
}

AUTOPAR_API int32_t autopar_shared_wait(void* place, int64_t ticket) { return static_cast<Place*>(place)->queue.wait(ticket); }

// 1 if it has ended.
AUTOPAR_API int32_t autopar_shared_ended(void* place, int64_t ticket) {
    return static_cast<Place*>(place)->queue.done(ticket) ? 1 : 0;
}

AUTOPAR_API int32_t autopar_shared_send(void* place, const void* data, int64_t bytes, int32_t to, int64_t tag) {
    return static_cast<Place*>(place)->mail.send(data, bytes, to, tag);
}

AUTOPAR_API int32_t autopar_shared_receive(void* place, void* data, int64_t bytes, int32_t from, int64_t tag) {
    return static_cast<Place*>(place)->mail.receive(data, bytes, from, tag);
}

AUTOPAR_API int32_t autopar_shared_sent(void* place) { return static_cast<Place*>(place)->mail.sent(); }

// Which rank failed first; only after an outcome that says that one did.
AUTOPAR_API int32_t autopar_shared_culprit(void* place) {
    int32_t rank;
    static_cast<Place*>(place)->group.failure(&rank);
    return rank;
}
