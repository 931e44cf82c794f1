// A reduced model as flat arrays, for the sweeps of dual.cpp and the moves of search.cpp.
#pragma once

#include <cstdint>
#include <vector>

#include "model.h"

namespace autopar::pairwise {

struct Compact {
    std::int32_t nodes = 0, rows = 0;
    std::vector<std::int32_t> original;  // node of the model
    std::vector<std::int32_t> start;     // strategies of node n: start[n] .. start[n + 1]
    double large = 0.0;                  // what a forbidden cost is here: more than a choice worth finding costs
    std::vector<double> cost;            // per strategy
    std::vector<std::int32_t> from;      // links of node n: from[n] .. from[n + 1], by neighbour
    std::vector<std::int32_t> neighbour, reverse;  // per link; reverse: the same edge as the neighbour sees it
    std::vector<std::int64_t> table;     // per link, into entries: strategies of the neighbour x mine
    std::vector<double> entries;
    std::vector<std::int32_t> load_from;  // loads of node n: load_from[n] .. load_from[n + 1]
    std::vector<std::int32_t> first, last;
    std::vector<std::int64_t> usage;  // per load, into amounts: one per strategy
    std::vector<Usage> amounts;
    std::vector<Usage> room;

    std::int32_t size(std::int32_t n) const { return start[n + 1] - start[n]; }
    // Costs of node n's strategies against strategy y of the neighbour at `link`.
    const double* row(std::int32_t link, std::int32_t n, std::int32_t y) const {
        return entries.data() + table[link] + std::int64_t(y) * size(n);
    }
};

// What a choice (a strategy for each node) costs; forbidden costs count `large` each.
double cost_of(const Compact& problem, const std::vector<std::int32_t>& choice);

Compact compact_of(const Model& model);

}  // namespace autopar::pairwise
