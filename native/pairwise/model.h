// The large problem as it is while it is being reduced: nodes with strategies, a table of costs for each pair of
// neighbours, and what each strategy uses over rows of time. See docs/large-problems.md.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace autopar::pairwise {

using Cost = std::int64_t;
using Usage = std::int64_t;

// A cost of so much, or more, marks what must not be chosen (as in the files of the contest).
constexpr Cost kForbidden = 1000000000000000000;

// What a node uses in rows [first, last), one entry per strategy; the smallest is 0 (it is in Model::room already).
struct Load {
    std::int32_t first, last;
    std::vector<Usage> usage;
};

// An original node whose strategy follows from that of the node that holds this: pick[strategy].
struct Origin {
    std::int32_t node;
    std::vector<std::int32_t> pick;
};

struct Node {
    bool alive = true;
    std::vector<Cost> cost;
    std::vector<Load> loads;
    std::map<std::int32_t, std::int32_t> edges;  // neighbour -> edge
    std::vector<Origin> origins;                 // the first is the node itself, its picks all different
};

// A node that was solved for every choice of its neighbours (none, one or two) and taken out.
struct Eliminated {
    struct Side {
        std::int32_t node;
        std::vector<std::int32_t> pick;  // of the neighbour when this was written
        std::vector<Cost> table;         // strategies of the eliminated node x those of the neighbour
    };
    std::vector<Cost> cost;
    std::vector<Origin> origins;
    std::vector<Side> sides;
};

struct Edge {
    std::int32_t a, b;
    std::vector<Cost> table;  // strategies of a x strategies of b
};

struct Model {
    std::vector<Node> nodes;
    std::vector<Edge> edges;
    std::vector<Eliminated> eliminated;  // in the order in which they went
    std::vector<Usage> room;             // per row: what is left of the limit when every load is at its smallest
    Cost constant = 0;                   // paid whatever is chosen
    bool impossible = false;             // no choice without a forbidden cost fits
};

// What the caller gives. Intervals are [first, last) in time; strategies of node n are start[n] .. start[n + 1].
struct Input {
    std::int64_t nodes, edges, limit;
    const std::int64_t *start, *intervals, *cost, *usage, *ends, *tables;
};

Model model_of(const Input& input);

// Exactly: the cheapest choice of what is left costs what the cheapest choice of all costs.
void reduce(Model& model);

// The original choice behind a choice of the nodes that are alive.
std::vector<std::int32_t> lift(const Model& model, const std::vector<std::int32_t>& choice, std::int64_t nodes);

}  // namespace autopar::pairwise
