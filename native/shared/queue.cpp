#include "queue.h"

#include <utility>

namespace autopar::shared {

Queue::~Queue() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        leaving_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
}

Outcome Queue::run(const Job& job) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return finished_ == begun_; });
    return job();
}

std::int64_t Queue::begin(Job job) {
    std::int64_t ticket;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        try {
            if (!thread_.joinable()) thread_ = std::thread(&Queue::work, this);
            waiting_.push_back(std::move(job));
        } catch (...) {  // no thread, or no memory
            return 0;
        }
        ticket = ++begun_;
    }
    changed_.notify_all();
    return ticket;
}

void Queue::work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        changed_.wait(lock, [&] { return leaving_ || !waiting_.empty(); });
        if (waiting_.empty()) return;
        const Job job = std::move(waiting_.front());
        waiting_.pop_front();
        lock.unlock();
        const Outcome outcome = job();
        lock.lock();
        outcomes_[++finished_] = outcome;
        changed_.notify_all();
    }
}

Outcome Queue::wait(std::int64_t ticket) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return finished_ >= ticket; });
    const auto at = outcomes_.find(ticket);
    if (at == outcomes_.end()) return kDone;  // asked for before
    const Outcome outcome = at->second;
    outcomes_.erase(at);
    return outcome;
}

bool Queue::done(std::int64_t ticket) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return finished_ >= ticket;
}

}  // namespace autopar::shared
