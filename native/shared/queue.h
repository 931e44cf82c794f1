// Collectives under way: in the order in which they were begun, on a thread of their own.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "segment.h"

namespace autopar::shared {

class Queue {
public:
    using Job = std::function<Outcome()>;

    Queue() = default;
    Queue(const Queue&) = delete;
    Queue& operator=(const Queue&) = delete;
    ~Queue();

    // Does it on this thread, after all that was begun.
    Outcome run(const Job& job);
    // Has it done; the ticket is for `wait`. 0 where there is no thread.
    std::int64_t begin(Job job);
    Outcome wait(std::int64_t ticket);
    bool done(std::int64_t ticket);

private:
    void work();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::thread thread_;
    std::deque<Job> waiting_;
    std::unordered_map<std::int64_t, Outcome> outcomes_;
    std::int64_t begun_ = 0, finished_ = 0;
    bool leaving_ = false;
};

}  // namespace autopar::shared
