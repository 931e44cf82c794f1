// What autopar/solver/pairwise/native.py calls: reduce, look at what is left, search, lift, free.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "compact.h"
#include "model.h"
#include "pairwise.h"

namespace {

using namespace autopar::pairwise;
using std::int32_t;
using std::int64_t;

struct Held {
    Model model;
    Compact compact;
    int64_t nodes;
};

template <class From, class To>
void put(const std::vector<From>& from, To* to) {
    std::copy(from.begin(), from.end(), to);
}

// Of costs that are whole numbers, none is less than the whole number at or above a bound.
double whole(double bound) { return std::ceil(bound - 1e-6); }

void lift_into(const Held& held, const std::vector<int32_t>& choice, int32_t* out) {
    std::vector<int32_t> by_node(held.model.nodes.size(), 0);
    for (int32_t n = 0; n < held.compact.nodes; ++n) by_node[held.compact.original[n]] = choice[n];
    put(lift(held.model, by_node, held.nodes), out);
}

}  // namespace

#define AUTOPAR_EXPORT extern "C" __attribute__((visibility("default")))

// Null where memory ran out. The arrays are as in Input and are not needed afterwards.
AUTOPAR_EXPORT void* autopar_pairwise_reduce(int64_t nodes, int64_t edges, int64_t limit, const int64_t* start,
                                             const int64_t* intervals, const int64_t* cost, const int64_t* usage,
                                             const int64_t* ends, const int64_t* tables) {
    try {
        auto* held = new Held{model_of({nodes, edges, limit, start, intervals, cost, usage, ends, tables}), {}, nodes};
        reduce(held->model);
        if (!held->model.impossible) held->compact = compact_of(held->model);
        return held;
    } catch (...) {
        return nullptr;
    }
}

// impossible, constant, nodes, strategies, edges, entries of their tables, loads, amounts of the loads, rows
AUTOPAR_EXPORT void autopar_pairwise_counts(const void* handle, int64_t* out) {
    const Held& held = *static_cast<const Held*>(handle);
    const Compact& p = held.compact;
    const int64_t counts[] = {held.model.impossible, held.model.constant, p.nodes, int64_t(p.cost.size()),
                              int64_t(p.neighbour.size() / 2), int64_t(p.entries.size() / 2), int64_t(p.first.size()),
                              int64_t(p.amounts.size()), p.rows};
    std::copy(std::begin(counts), std::end(counts), out);
}

// The reduced problem as autopar/solver/pairwise/model.py has it; forbidden costs are infinite.
AUTOPAR_EXPORT void autopar_pairwise_copy(const void* handle, int64_t* start, double* cost, int64_t* ends, double* tables,
                                          int64_t* load_node, int64_t* load_rows, double* amounts, double* room) {
    const Compact& p = static_cast<const Held*>(handle)->compact;
    const auto shown = [&](double c) { return c >= p.large ? std::numeric_limits<double>::infinity() : c; };
    put(p.start, start);
    for (double c : p.cost) *cost++ = shown(c);
    for (int32_t n = 0; n < p.nodes; ++n) {
        for (int32_t l = p.from[n]; l < p.from[n + 1]; ++l) {
            const int32_t other = p.neighbour[l];
            if (other < n) continue;
            *ends++ = n, *ends++ = other;
            for (int32_t x = 0; x < p.size(n); ++x) {
                const double* row = p.row(p.reverse[l], other, x);
                for (int32_t y = 0; y < p.size(other); ++y) *tables++ = shown(row[y]);
            }
        }
        for (int32_t k = p.load_from[n]; k < p.load_from[n + 1]; ++k) {
            *load_node++ = n;
            *load_rows++ = p.first[k], *load_rows++ = p.last[k];
        }
    }
    put(p.amounts, amounts);
    put(p.room, room);
}

// The original nodes' strategies behind those of the reduced problem's nodes.
AUTOPAR_EXPORT void autopar_pairwise_lift(const void* handle, const int32_t* choice, int32_t* out) {
    const Held& held = *static_cast<const Held*>(handle);
    lift_into(held, {choice, choice + held.compact.nodes}, out);
}

// choice: of the original nodes, where one was found (the result's bit 1); its bit 0: ended by itself. numbers: cost and
// bound, the constant in both. Negative: memory ran out.
AUTOPAR_EXPORT int32_t autopar_pairwise_search(const void* handle, double seconds, int64_t rounds, int32_t threads,
                                               Told told, int32_t* choice, double* numbers) {
    try {
        const Held& held = *static_cast<const Held*>(handle);
        const auto constant = static_cast<double>(held.model.constant);
        const Found found = search(held.compact, {seconds, rounds, threads, told});
        const bool fits = held.compact.nodes == 0 || !found.choice.empty();
        numbers[0] = constant + found.cost;
        numbers[1] = constant + std::max(0.0, whole(std::min(found.bound, found.cost)));
        if (fits) lift_into(held, found.choice, choice);
        return int32_t(found.ended) | int32_t(fits) << 1;
    } catch (...) {
        return -1;
    }
}

AUTOPAR_EXPORT void autopar_pairwise_free(void* handle) { delete static_cast<Held*>(handle); }
