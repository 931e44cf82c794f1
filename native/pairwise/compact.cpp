#include "compact.h"

#include <algorithm>
#include <cmath>

namespace autopar::pairwise {
namespace {

using std::int32_t;
using std::int64_t;
using std::size_t;
using std::vector;

// So large that sums over a node's links are exact (below 2^53), unless finite costs themselves are that large.
double large_for(const Model& model) {
    size_t links = 0;
    Cost high = 0;
    for (const Node& node : model.nodes) {
        links = std::max(links, node.edges.size());
        for (Cost c : node.cost)
            if (c < kForbidden) high = std::max(high, c);
    }
    for (const Edge& edge : model.edges)
        for (Cost c : edge.table)
            if (c < kForbidden) high = std::max(high, c);
    return std::max(std::exp2(std::floor(53.0 - std::log2(links + 2.0))), 16.0 * static_cast<double>(high));
}

// Rows that some choice may break, one for each run of rows with the same loads: the one with the least room.
// place[r]: rows kept before r; a load of [first, last) covers place[first] .. place[last].
vector<int32_t> choose_rows(const Model& model, vector<Usage>& room) {
    const size_t rows = model.room.size();
    vector<Usage> most(rows + 1, 0);
    vector<char> border(rows + 1, 0);
    for (const Node& node : model.nodes) {
        if (!node.alive) continue;
        for (const Load& load : node.loads) {
            const Usage high = *std::max_element(load.usage.begin(), load.usage.end());
            most[load.first] += high, most[load.last] -= high;
            border[load.first] = border[load.last] = 1;
        }
    }
    vector<int32_t> place(rows + 1, 0);
    Usage sum = 0;
    bool open = false;
    for (size_t r = 0; r < rows; ++r) {
        if (border[r]) open = false;
        place[r] = static_cast<int32_t>(room.size());
        sum += most[r];
        if (sum <= model.room[r]) continue;
        if (open) {
            place[r] = static_cast<int32_t>(room.size()) - 1;
            room.back() = std::min(room.back(), model.room[r]);
        } else {
            room.push_back(model.room[r]);
            open = true;
        }
    }
    place[rows] = static_cast<int32_t>(room.size());
    return place;
}

void add_loads(const Node& node, const vector<int32_t>& place, Compact& c) {
    for (const Load& load : node.loads) {
        const int32_t first = place[load.first], last = place[load.last];
        if (first == last) continue;
        c.first.push_back(first);
        c.last.push_back(last);
        c.usage.push_back(static_cast<int64_t>(c.amounts.size()));
        c.amounts.insert(c.amounts.end(), load.usage.begin(), load.usage.end());
    }
    c.load_from.push_back(static_cast<int32_t>(c.first.size()));
}

}  // namespace

double cost_of(const Compact& p, const vector<int32_t>& choice) {
    double sum = 0.0;
    for (int32_t n = 0; n < p.nodes; ++n) {
        sum += p.cost[p.start[n] + choice[n]];
        for (int32_t l = p.from[n]; l < p.from[n + 1]; ++l)
            if (p.neighbour[l] > n) sum += p.row(l, n, choice[p.neighbour[l]])[choice[n]];
    }
    return sum;
}

Compact compact_of(const Model& model) {
    Compact c;
    c.large = large_for(model);
    const auto price = [&](Cost cost) { return cost >= kForbidden ? c.large : static_cast<double>(cost); };
    vector<int32_t> index(model.nodes.size(), -1);
    for (size_t n = 0; n < model.nodes.size(); ++n)
        if (model.nodes[n].alive) {
            index[n] = c.nodes++;
            c.original.push_back(static_cast<int32_t>(n));
        }
    const vector<int32_t> place = choose_rows(model, c.room);
    c.rows = static_cast<int32_t>(c.room.size());
    c.start = c.from = c.load_from = {0};
    vector<vector<int32_t>> links(model.edges.size());
    for (int32_t n = 0; n < c.nodes; ++n) {
        const Node& node = model.nodes[c.original[n]];
        for (Cost cost : node.cost) c.cost.push_back(price(cost));
        c.start.push_back(static_cast<int32_t>(c.cost.size()));
        add_loads(node, place, c);
        for (const auto& [other, edge] : node.edges) {
            links[edge].push_back(static_cast<int32_t>(c.neighbour.size()));
            c.neighbour.push_back(index[other]);
            c.table.push_back(static_cast<int64_t>(c.entries.size()));
            const Edge& e = model.edges[edge];
            const size_t mine = node.cost.size(), others = e.table.size() / mine;
            for (size_t y = 0; y < others; ++y)
                for (size_t x = 0; x < mine; ++x)
                    c.entries.push_back(price(e.a == c.original[n] ? e.table[x * others + y] : e.table[y * mine + x]));
        }
        c.from.push_back(static_cast<int32_t>(c.neighbour.size()));
    }
    c.reverse.resize(c.neighbour.size());
    for (const vector<int32_t>& both : links)
        if (both.size() == 2) c.reverse[both[0]] = both[1], c.reverse[both[1]] = both[0];
    return c;
}

}  // namespace autopar::pairwise
