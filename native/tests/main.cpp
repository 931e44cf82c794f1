// The kernels' own test, for builds with sanitizers (scripts/sanitize): every kernel and collective once over memory of
// exactly its size, with threads, and ranks as threads. What they compute is tested from Python; here it is enough that it
// is the same by one thread and by several, and that it is right where that is said in a line.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "../kernel.h"
#include "../shared/mail.h"
#include "../shared/queue.h"

extern "C" {
std::int32_t autopar_combine_generic(void*, const void* const*, std::int32_t, std::int64_t, std::int32_t, std::int32_t);
std::int32_t autopar_adamw_generic(const void*, std::int64_t, const void*, std::int32_t, std::int32_t, std::int32_t);
std::int32_t autopar_sgd_generic(const void*, std::int64_t, const void*, std::int32_t, std::int32_t, std::int32_t);
std::int32_t autopar_words_generic(void*, std::int32_t, const std::int64_t*, std::int64_t, std::uint64_t, std::uint64_t,
                                   std::int32_t);
}

namespace {

using namespace autopar::shared;
using std::int32_t;
using std::int64_t;

#define CHECK(what)                                                      \
    do {                                                                 \
        if (!(what)) {                                                   \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what); \
            std::abort();                                                \
        }                                                                \
    } while (false)

struct Item {  // as in kernels/optimizer.cpp
    void* parameter;
    const void* gradient;
    void *first, *second, *copy;
    int64_t count;
    double rate, root;
    const int64_t* space;
    std::uint64_t key, step;
};

struct Tensors {
    std::vector<float> parameter, gradient;
    std::vector<std::uint16_t> first, second, copy;

    explicit Tensors(int64_t n) : parameter(n), gradient(n), first(n), second(n), copy(n) {
        for (int64_t i = 0; i < n; ++i) parameter[i] = static_cast<float>(i % 13) - 6, gradient[i] = static_cast<float>(i % 7) - 3;
    }
};

void test_optimizers() {
    const double rule[6] = {0.5, 0.99, 0.1, 0.9, 0.01, 1e-8};
    std::vector<std::vector<float>> results;
    for (int32_t threads : {1, 3}) {
        std::vector<Tensors> tensors;
        for (int64_t n : {0, 1, 17, 70001, 200003}) tensors.emplace_back(n);
        for (auto kernel : {autopar_adamw_generic, autopar_sgd_generic}) {
            std::vector<std::vector<int64_t>> spaces;
            std::vector<Item> items;
            for (Tensors& t : tensors) {
                const int64_t n = static_cast<int64_t>(t.parameter.size());
                spaces.push_back({5, 1, n, 1});
                items.push_back({t.parameter.data(), t.gradient.data(), t.first.data(), t.second.data(), t.copy.data(),
                                 n, 0.1, 1.0, nullptr, 3, 4});
            }
            for (std::size_t i = 0; i < items.size(); i += 2) items[i].space = spaces[i].data();
            CHECK(kernel(items.data(), static_cast<int64_t>(items.size()), rule, autopar::kFloat32, autopar::kBFloat16, threads) == 0);
        }
        for (const Tensors& t : tensors) results.push_back(t.parameter);
    }
    for (std::size_t i = 0; i < results.size() / 2; ++i) CHECK(results[i] == results[i + results.size() / 2]);
}

void test_words() {
    for (int64_t n : {1, 3, 5000}) {
        for (int32_t width : {1, 2, 4}) {
            std::vector<std::uint32_t> one(n * 3 * width), more(n * 3 * width);
            const int64_t space[] = {7, 2, n, 3, 5, 1};
            CHECK(autopar_words_generic(one.data(), width, space, 3 * n, 1, 2, 1) == 0);
            CHECK(autopar_words_generic(more.data(), width, space, 3 * n, 1, 2, 4) == 0);
            CHECK(one == more);
        }
    }
}

void test_combine() {
    for (int32_t dtype = autopar::kFloat32; dtype <= autopar::kBool; ++dtype) {
        for (int64_t bytes : {8, 8000, 100008}) {
            std::vector<unsigned char> a(bytes, 0), b(bytes, 1), c(bytes, 0), out(bytes);
            const int64_t width = dtype == autopar::kFloat64 || dtype == autopar::kInt64 ? 8 : dtype == autopar::kFloat32 || dtype == autopar::kInt32 ? 4 : dtype <= autopar::kInt16 ? 2 : 1;
            const void* parts[] = {a.data(), b.data(), c.data()};
            for (int32_t largest : {0, 1}) {
                CHECK(autopar_combine_generic(out.data(), parts, 3, bytes / width, dtype, largest) == 0);
                CHECK(out == b);
            }
        }
    }
}

constexpr int64_t kChunk = 1 << 12;

// Calls use(rank, group) on threads, for groups on one map and on maps of their own.
void with_ranks(int ranks, const std::function<void(int, Group&)>& use) {
    for (bool one_map : {true, false}) {
        const int file = Segment::create(ranks, kChunk);
        CHECK(file >= 0);
        const std::string path = "/proc/self/fd/" + std::to_string(file);
        auto segment = std::make_shared<Segment>();
        CHECK(segment->open(path.c_str()));
        std::vector<std::thread> threads;
        for (int rank = 0; rank < ranks; ++rank) {
            threads.emplace_back([&, rank] {
                Group group(rank, 60.0, autopar_combine_generic);
                if (one_map) {
                    group.join(segment);
                } else {
                    CHECK(group.join(path.c_str()));
                }
                use(rank, group);
            });
        }
        for (std::thread& thread : threads) thread.join();
        ::close(file);
    }
}

void collectives(int rank, Group& group) {
    const int n = group.ranks();
    for (int64_t count : {1, 1000, 20011}) {
        const float mine = static_cast<float>(rank + 1), total = static_cast<float>(n * (n + 1) / 2);
        std::vector<float> x(count, mine), out(count), all(n * count), rows(n * count, mine);
        CHECK(group.all_reduce(x.data(), out.data(), count, autopar::kFloat32, 0) == kDone);
        CHECK(out == std::vector<float>(count, total));
        CHECK(group.all_gather(x.data(), all.data(), count * 4) == kDone);
        for (int q = 0; q < n; ++q) CHECK(all[q * count] == static_cast<float>(q + 1));
        CHECK(group.reduce_scatter(rows.data(), out.data(), count, autopar::kFloat32, 0) == kDone);
        CHECK(out == std::vector<float>(count, total));
        CHECK(group.all_reduce(x.data(), x.data(), count, autopar::kFloat32, 1) == kDone);
        CHECK(x == std::vector<float>(count, static_cast<float>(n)));
        std::vector<float> told(count, mine);
        CHECK(group.broadcast(told.data(), count * 4, n - 1) == kDone);
        CHECK(told == x);
        std::vector<int64_t> give(n), take(n);
        int64_t gives = 0, takes = 0;
        for (int q = 0; q < n; ++q) {
            gives += give[q] = (rank + 2 * q) % 3 * count;
            takes += take[q] = (q + 2 * rank) % 3 * count;
        }
        std::vector<char> from(gives, static_cast<char>(rank)), to(takes);
        CHECK(group.all_to_all(from.data(), to.data(), give.data(), take.data(), false) == kDone);
        for (int64_t at = 0, q = 0; q < n; at += take[q++]) CHECK(take[q] == 0 || to[at + take[q] - 1] == q);
    }
    CHECK(group.barrier() == kDone);
}

void messages(int rank, Group& group) {
    Mail mail(group);
    const int n = group.ranks(), next = (rank + 1) % n, before = (rank + n - 1) % n;
    for (int turn = 0; turn < 3; ++turn) {
        for (int64_t tag = 0; tag < 4; ++tag) {
            const std::vector<char> data(1000 * (tag + 1), static_cast<char>(rank));
            CHECK(mail.send(data.data(), static_cast<int64_t>(data.size()), next, tag) == kDone);
        }
        for (int64_t tag = 3; tag >= 0; --tag) {
            std::vector<char> data(1000 * (tag + 1));
            CHECK(mail.receive(data.data(), static_cast<int64_t>(data.size()), before, tag) == kDone);
            CHECK(data == std::vector<char>(data.size(), static_cast<char>(before)));
        }
        CHECK(mail.sent() == kDone);
    }
    for (int i = 0; i < 600; ++i) {  // more than there are buffers and records for
        if (i < 500) CHECK(mail.send(&rank, sizeof rank, next, 9) == kDone);
        int got = -1;
        if (i >= 100) CHECK(mail.receive(&got, sizeof got, before, 9) == kDone && got == before);
    }
    CHECK(group.barrier() == kDone);  // until all have mapped what they were sent
}

void queued(int rank, Group& group) {
    Queue queue;
    std::vector<std::vector<float>> x(8, std::vector<float>(3000, static_cast<float>(rank)));
    std::vector<int64_t> tickets;
    for (std::vector<float>& one : x) {
        tickets.push_back(queue.begin([&] { return group.all_reduce(one.data(), one.data(), 3000, autopar::kFloat32, 1); }));
    }
    CHECK(queue.run([&] { return group.barrier(); }) == kDone);
    for (std::size_t i = 0; i < x.size(); ++i) {
        CHECK(queue.done(tickets[i]) && queue.wait(tickets[i]) == kDone);
        CHECK(x[i].back() == static_cast<float>(group.ranks() - 1));
    }
}

void test_a_rank_that_ends() {
    const int file = Segment::create(2, kChunk);
    const std::string path = "/proc/self/fd/" + std::to_string(file);
    const pid_t child = fork();
    Group group(child == 0 ? 1 : 0, 60.0, autopar_combine_generic);
    CHECK(group.join(path.c_str()));
    if (child == 0) {
        group.barrier();
        _exit(0);
    }
    CHECK(group.barrier() == kDone);
    CHECK(group.barrier() == kDead);
    int32_t rank = -1;
    CHECK(group.failure(&rank) == kDead && rank == 1);
    CHECK(group.barrier() == kDead);
    waitpid(child, nullptr, 0);
    ::close(file);
}

}  // namespace

int main() {
    test_a_rank_that_ends();
    test_words();
    test_combine();
    test_optimizers();
    for (int ranks : {1, 2, 3, 5}) {
        with_ranks(ranks, collectives);
        with_ranks(ranks, queued);
        if (ranks > 1) with_ranks(ranks, messages);
    }
    std::puts("ok");
}
