#include "search.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace autopar::pairwise {

using std::int32_t;
using std::int64_t;
using std::size_t;
using std::vector;

namespace {

constexpr int32_t kLargestTree = 1 << 13;  // nodes
constexpr double kPressures[] = {0.0, 0.25, 0.5, 1.0, 1.0, 1.5};
constexpr int32_t kPressureCount = sizeof(kPressures) / sizeof(kPressures[0]);
constexpr int32_t kEach = 64;  // steps that a tree costs at least
constexpr int kKicks = 4;
constexpr double kNoise = 0.5;

}  // namespace

std::uint64_t Random::next() {
    std::uint64_t z = state += 0x9E3779B97F4A7C15;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
}

// A tree over the rows: high[k] is the most below k with lazy[k] in it, which is added to all below k.
Rows::Rows(const vector<Usage>& room) : width(1) {
    if (room.empty()) return;
    while (width < static_cast<int32_t>(room.size())) width *= 2;
    high.assign(2 * width, std::numeric_limits<Usage>::min() / 4);
    lazy.assign(width, 0);
    for (size_t r = 0; r < room.size(); ++r) high[width + r] = -room[r];
    for (int32_t k = width - 1; k > 0; --k) high[k] = std::max(high[2 * k], high[2 * k + 1]);
}

void Rows::add(int32_t first, int32_t last, Usage amount) {
    const auto apply = [&](int32_t k) {
        high[k] += amount;
        if (k < width) lazy[k] += amount;
    };
    int32_t l = first + width, r = last + width;
    for (; l < r; l /= 2, r /= 2) {
        if (l & 1) apply(l++);
        if (r & 1) apply(--r);
    }
    for (int32_t end : {first + width, last - 1 + width})
        for (int32_t k = end / 2; k > 0; k /= 2) high[k] = std::max(high[2 * k], high[2 * k + 1]) + lazy[k];
}

int32_t Rows::worst() const {
    int32_t k = 1;
    while (k < width) k = 2 * k + (high[2 * k + 1] > high[2 * k]);
    return k - width;
}

Search::Search(const Compact& problem, std::uint64_t seed)
    : p(problem), random(seed), around(problem.cost), paid(problem.cost), rows(problem.room),
      parent_link(problem.nodes, -1), mark(problem.nodes, 0), sum(problem.cost.size(), 0.0), fresh(problem.nodes, 0) {}

void Search::start_from(const vector<int32_t>& choice) {
    now = choice;
    total = cost_of(p, now);
    around = p.cost;
    rows = Rows(p.room);
    for (int32_t n = 0; n < p.nodes; ++n) {
        for (int32_t l = p.from[n]; l < p.from[n + 1]; ++l) {
            const double* row = p.row(l, n, now[p.neighbour[l]]);
            for (int32_t x = 0; x < p.size(n); ++x) around[p.start[n] + x] += row[x];
        }
        for (int32_t k = p.load_from[n]; k < p.load_from[n + 1]; ++k)
            rows.add(p.first[k], p.last[k], p.amounts[p.usage[k] + now[n]]);
    }
}

void Search::move(int32_t n, int32_t strategy) {
    const int32_t before = now[n];
    if (before == strategy) return;
    total += around[p.start[n] + strategy] - around[p.start[n] + before];
    for (int32_t l = p.from[n]; l < p.from[n + 1]; ++l) {
        const int32_t other = p.neighbour[l], back = p.reverse[l];
        const double *add = p.row(back, other, strategy), *drop = p.row(back, other, before);
        double* into = around.data() + p.start[other];
        for (int32_t y = 0; y < p.size(other); ++y) into[y] += add[y] - drop[y];
        steps += p.size(other);
    }
    for (int32_t k = p.load_from[n]; k < p.load_from[n + 1]; ++k) {
        const Usage* amount = p.amounts.data() + p.usage[k];
        if (amount[strategy] != amount[before]) rows.add(p.first[k], p.last[k], amount[strategy] - amount[before]);
    }
    steps += 32 * (p.load_from[n + 1] - p.load_from[n]);
    now[n] = strategy;
}

// A tree of neighbours around a random node: a node joins if exactly one of its neighbours is in it.
void Search::grow(int32_t size) {
    ++stamp;
    tree.clear();
    front.assign(1, random.below(p.nodes));
    front_link.assign(1, -1);
    while (!front.empty() && static_cast<int32_t>(tree.size()) < size) {
        const int32_t at = random.below(static_cast<int32_t>(front.size()));
        const int32_t n = front[at], link = front_link[at];
        front[at] = front.back(), front.pop_back();
        front_link[at] = front_link.back(), front_link.pop_back();
        if (mark[n] == stamp) continue;
        int32_t inside = 0;
        for (int32_t l = p.from[n]; l < p.from[n + 1] && inside < 2; ++l) inside += mark[p.neighbour[l]] == stamp;
        steps += p.from[n + 1] - p.from[n];
        if (inside > 1) continue;
        mark[n] = stamp;
        parent_link[n] = link;
        tree.push_back(n);
        for (int32_t l = p.from[n]; l < p.from[n + 1]; ++l)
            if (mark[p.neighbour[l]] != stamp) front.push_back(p.neighbour[l]), front_link.push_back(p.reverse[l]);
    }
}

// The cheapest strategies of the tree's nodes with the rest as it is, usage at its prices times `pressure`: fresh[n].
// From the leaves up, sum becomes what a node and all below it cost at least.
void Search::solve(double pressure, double noise) {
    // A row that is over its room has no price yet that keeps it: here it costs as much as everything, or more.
    const double each = over() > 0 ? (1.0 + total) / static_cast<double>(over()) * std::exp2(random.below(8)) : 0.0;
    const int32_t row = each > 0.0 ? rows.worst() : -1;
    for (int32_t n : tree) {
        double* s = sum.data() + p.start[n];
        const double *q = around.data() + p.start[n], *with = paid.data() + p.start[n], *bare = p.cost.data() + p.start[n];
        for (int32_t x = 0; x < p.size(n); ++x) s[x] = q[x] + pressure * (with[x] - bare[x]);
        if (noise > 0.0)
            for (int32_t x = 0; x < p.size(n); ++x) s[x] *= 1.0 + noise * random.part();
        if (row >= 0) add_usage(n, row, each);
    }
    for (int32_t n : tree) {
        const int32_t link = parent_link[n];
        if (link < 0) continue;
        const int32_t up = p.neighbour[link];
        const double *mine = p.row(link, n, now[up]), *theirs = p.row(p.reverse[link], up, now[n]);
        for (int32_t x = 0; x < p.size(n); ++x) sum[p.start[n] + x] -= mine[x];
        for (int32_t y = 0; y < p.size(up); ++y) sum[p.start[up] + y] -= theirs[y];
    }
    for (size_t k = tree.size(); k-- > 1;) {
        const int32_t n = tree[k], back = p.reverse[parent_link[n]], up = p.neighbour[parent_link[n]];
        const int32_t size = p.size(n), others = p.size(up);
        const double* s = sum.data() + p.start[n];
        least.assign(others, std::numeric_limits<double>::infinity());
        for (int32_t x = 0; x < size; ++x) {
            const double* t = p.row(back, up, x);
            for (int32_t y = 0; y < others; ++y) least[y] = s[x] + t[y] < least[y] ? s[x] + t[y] : least[y];
        }
        for (int32_t y = 0; y < others; ++y) sum[p.start[up] + y] += least[y];
        steps += int64_t(size) * others;
    }
    for (int32_t n : tree) {
        double* s = sum.data() + p.start[n];
        if (const int32_t link = parent_link[n]; link >= 0) {
            const double* t = p.row(link, n, fresh[p.neighbour[link]]);
            for (int32_t x = 0; x < p.size(n); ++x) s[x] += t[x];
        }
        fresh[n] = static_cast<int32_t>(std::min_element(s, s + p.size(n)) - s);
        if (s[now[n]] == s[fresh[n]]) fresh[n] = now[n];
    }
}

void Search::add_usage(int32_t n, int32_t row, double each) {
    for (int32_t k = p.load_from[n]; k < p.load_from[n + 1]; ++k) {
        if (row < p.first[k] || row >= p.last[k]) continue;
        const Usage* amount = p.amounts.data() + p.usage[k];
        for (int32_t x = 0; x < p.size(n); ++x) sum[p.start[n] + x] += each * static_cast<double>(amount[x]);
    }
}

// Takes what was solved, or leaves it: `any` if only usage must be no worse.
bool Search::take(bool any) {
    const double before = total;
    const Usage over_before = over();
    old.clear();
    for (int32_t n : tree) old.push_back(now[n]);
    for (int32_t n : tree) move(n, fresh[n]);
    const Usage over_now = over();
    if (over_now < over_before || (over_now == over_before && (any || total <= before))) return true;
    for (size_t k = 0; k < tree.size(); ++k) move(tree[k], old[k]);
    total = before;
    return false;
}

// 1, 2, 4, ... up to all nodes or kLargestTree.
int32_t Search::some_size() {
    int32_t sizes = 1;
    while ((1 << sizes) < std::min(2 * p.nodes, kLargestTree)) ++sizes;
    return 1 << random.below(sizes);
}

void Search::improve_once() {
    steps += kEach;
    grow(some_size());
    const double pressure = kPressures[random.below(kPressureCount)] * (0.5 + random.part());
    solve(pressure, 0.0);
    take(false);
}

void Search::kick() {
    for (int k = 0; k < kKicks; ++k) {
        grow(some_size());
        solve(4.0 * random.part(), kNoise);
        take(total < p.large);
    }
}

}  // namespace autopar::pairwise
