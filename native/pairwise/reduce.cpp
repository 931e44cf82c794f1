// Reductions that keep the optimum: strategies that nothing allows or that another is never worse than, pairs of nodes
// of which one decides the other, nodes that can be solved for every choice of at most two neighbours.
#include <algorithm>
#include <limits>

#include "model.h"

namespace autopar::pairwise {
namespace {

using std::int32_t;
using std::int64_t;
using std::size_t;
using std::vector;

constexpr int kRounds = 40;
constexpr int64_t kTableEntries = 1 << 16;       // largest table that an elimination may make
constexpr int64_t kDominanceWork = 400'000'000;  // comparisons in all rounds together
constexpr int64_t kGrowth = 4;                   // a merge may add so many times the entries of the table that it saves

// A table seen from one of its ends: value(mine, other).
struct Seen {
    const Cost* table;
    size_t mine, other;  // strides
    size_t others;       // strategies at the other end
    Cost operator()(size_t x, size_t y) const { return table[x * mine + y * other]; }
};

Cost sum(Cost a, Cost b) { return a >= kForbidden || b >= kForbidden ? kForbidden : a + b; }

// Times at which something starts and nothing starts again before something ends: usage is largest at one of them.
vector<int64_t> peak_times(const Input& in) {
    vector<int64_t> starts, ends;
    for (int64_t n = 0; n < in.nodes; ++n) {
        const int64_t first = in.intervals[2 * n], last = in.intervals[2 * n + 1];
        if (first < last) starts.push_back(first), ends.push_back(last);
    }
    std::sort(starts.begin(), starts.end());
    std::sort(ends.begin(), ends.end());
    vector<int64_t> times;
    for (size_t i = 0; i < starts.size(); ++i) {
        const int64_t next = i + 1 < starts.size() ? starts[i + 1] : std::numeric_limits<int64_t>::max();
        const auto end = std::upper_bound(ends.begin(), ends.end(), starts[i]);
        if (next > starts[i] && end != ends.end() && *end <= next) times.push_back(starts[i]);
    }
    return times;
}

class Reducer {
  public:
    explicit Reducer(Model& model) : m(model), dirty(model.nodes.size(), 1) {}

    void run() {
        for (int round = 0; round < kRounds && !m.impossible; ++round) {
            measure_room();
            bool any = false;
            for (size_t n = 0; n < m.nodes.size() && !m.impossible; ++n) {
                if (!dirty[n] || !m.nodes[n].alive) continue;
                dirty[n] = 0;
                any = true;
                reduce_node(static_cast<int32_t>(n));
            }
            if (!any) break;
        }
    }

    void add_edge(int32_t a, int32_t b, vector<Cost> table) {
        const auto found = m.nodes[a].edges.find(b);
        touch(a), touch(b);
        if (found == m.nodes[a].edges.end()) {
            const auto index = static_cast<int32_t>(m.edges.size());
            m.edges.push_back({a, b, std::move(table)});
            m.nodes[a].edges[b] = m.nodes[b].edges[a] = index;
            return;
        }
        Edge& edge = m.edges[found->second];
        const size_t rows = m.nodes[a].cost.size(), columns = m.nodes[b].cost.size();
        for (size_t x = 0; x < rows; ++x)
            for (size_t y = 0; y < columns; ++y) {
                Cost& into = edge.table[edge.a == a ? x * columns + y : y * rows + x];
                into = sum(into, table[x * columns + y]);
            }
    }

  private:
    Model& m;
    vector<char> dirty;
    vector<vector<Usage>> least;  // least[k][r]: least room in rows r .. r + 2^k
    vector<int32_t> over;         // over[r]: rows before r that some choice may break
    int64_t work = kDominanceWork;

    Seen seen(int32_t edge, int32_t from) const {
        const Edge& e = m.edges[edge];
        const size_t columns = m.nodes[e.b].cost.size();
        if (e.a == from) return {e.table.data(), columns, 1, columns};
        return {e.table.data(), 1, columns, m.nodes[e.a].cost.size()};
    }

    // Room by row and by range, from the loads as they are.
    void measure_room() {
        const size_t rows = m.room.size();
        vector<Usage> most(rows + 1, 0), taken(rows + 1, 0);
        for (Node& node : m.nodes) {
            if (!node.alive) continue;
            for (Load& load : node.loads) {
                const auto [low, high] = std::minmax_element(load.usage.begin(), load.usage.end());
                const Usage base = *low, span = *high - *low;
                taken[load.first] += base, taken[load.last] -= base;
                most[load.first] += span, most[load.last] -= span;
                for (Usage& u : load.usage) u -= base;
            }
        }
        over.assign(rows + 1, 0);
        Usage at_most = 0, base = 0;
        for (size_t r = 0; r < rows; ++r) {
            at_most += most[r], base += taken[r];
            m.room[r] -= base;
            if (m.room[r] < 0) m.impossible = true;
            over[r + 1] = over[r] + (at_most > m.room[r]);
        }
        least.assign(1, m.room);
        for (size_t width = 1; 2 * width <= rows; width *= 2) {
            const vector<Usage>& half = least.back();
            vector<Usage> whole(rows - 2 * width + 1);
            for (size_t r = 0; r < whole.size(); ++r) whole[r] = std::min(half[r], half[r + width]);
            least.push_back(std::move(whole));
        }
    }

    Usage least_room(const Load& load) const {
        int k = 0;
        while ((2 << k) <= load.last - load.first) ++k;
        return std::min(least[k][load.first], least[k][load.last - (1 << k)]);
    }

    void touch(int32_t n) { dirty[n] = 1; }

    void touch_around(int32_t n) {
        touch(n);
        for (const auto& [other, edge] : m.nodes[n].edges) touch(other);
    }

    // Keep the strategies listed, in order.
    void keep(int32_t n, const vector<int32_t>& kept) {
        Node& node = m.nodes[n];
        for (const auto& [other, index] : node.edges) {
            Edge& edge = m.edges[index];
            const Seen value = seen(index, n);
            vector<Cost> table(kept.size() * value.others);
            for (size_t x = 0; x < kept.size(); ++x)
                for (size_t y = 0; y < value.others; ++y)
                    table[edge.a == n ? x * value.others + y : y * kept.size() + x] = value(kept[x], y);
            edge.table.swap(table);
        }
        pick(node.cost, kept);
        for (Load& load : node.loads) pick(load.usage, kept);
        for (Origin& origin : node.origins) pick(origin.pick, kept);
        touch_around(n);
    }

    template <class T>
    static void pick(vector<T>& values, const vector<int32_t>& kept) {
        vector<T> result;
        result.reserve(kept.size());
        for (int32_t x : kept) result.push_back(values[x]);
        values.swap(result);
    }

    void remove_edge(int32_t index) {
        Edge& edge = m.edges[index];
        m.nodes[edge.a].edges.erase(edge.b);
        m.nodes[edge.b].edges.erase(edge.a);
        vector<Cost>().swap(edge.table);
        touch(edge.a), touch(edge.b);
    }

    void reduce_node(int32_t n) {
        if (drop_unsupported(n)) return;
        normalise(n);
        tidy_loads(n);
        if (merge_with_neighbour(n) || eliminate(n)) return;
        drop_dominated(n);
    }

    // Strategies that are forbidden, that a neighbour has no answer to, or that leave too little room.
    bool drop_unsupported(int32_t n) {
        const Node& node = m.nodes[n];
        vector<char> good(node.cost.size());
        for (size_t x = 0; x < good.size(); ++x) good[x] = node.cost[x] < kForbidden;
        for (const auto& [other, index] : node.edges) {
            const Seen value = seen(index, n);
            for (size_t x = 0; x < good.size(); ++x) {
                bool some = false;
                for (size_t y = 0; y < value.others && good[x] && !some; ++y) some = value(x, y) < kForbidden;
                good[x] &= some;
            }
        }
        for (const Load& load : node.loads) {
            const Usage room = least_room(load);
            for (size_t x = 0; x < good.size(); ++x) good[x] &= load.usage[x] <= room;
        }
        vector<int32_t> kept;
        for (size_t x = 0; x < good.size(); ++x)
            if (good[x]) kept.push_back(static_cast<int32_t>(x));
        if (kept.empty()) return m.impossible = true;
        if (kept.size() == good.size()) return false;
        keep(n, kept);
        return true;
    }

    // Moves what every row and column of a table costs at least to the nodes; a table of zeros is no edge.
    void normalise(int32_t n) {
        vector<int32_t> indices;
        for (const auto& [other, index] : m.nodes[n].edges) indices.push_back(index);
        for (int32_t index : indices) {
            Edge& edge = m.edges[index];
            take_least(edge, edge.a);
            take_least(edge, edge.b);
            if (std::all_of(edge.table.begin(), edge.table.end(), [](Cost c) { return c == 0; })) remove_edge(index);
        }
        vector<Cost>& cost = m.nodes[n].cost;
        const Cost low = *std::min_element(cost.begin(), cost.end());
        if (low >= kForbidden) return;
        m.constant += low;
        for (Cost& c : cost)
            if (c < kForbidden) c -= low;
    }

    void take_least(Edge& edge, int32_t end) {
        vector<Cost>& cost = m.nodes[end].cost;
        const size_t columns = m.nodes[edge.b].cost.size();
        const size_t mine = edge.a == end ? columns : 1, other = edge.a == end ? 1 : columns;
        const size_t others = edge.table.size() / cost.size();
        for (size_t x = 0; x < cost.size(); ++x) {
            Cost low = kForbidden;
            for (size_t y = 0; y < others; ++y) low = std::min(low, edge.table[x * mine + y * other]);
            if (low == 0) continue;
            cost[x] = sum(cost[x], low);
            for (size_t y = 0; y < others; ++y) {
                Cost& value = edge.table[x * mine + y * other];
                if (low >= kForbidden) value = 0;  // the node's cost says it now
                else if (value < kForbidden) value -= low;
            }
        }
    }

    // Loads that can't break a row, or are the same for every strategy, are no loads.
    void tidy_loads(int32_t n) {
        vector<Load>& loads = m.nodes[n].loads;
        loads.erase(std::remove_if(loads.begin(), loads.end(), [&](const Load& load) {
            const bool same = std::all_of(load.usage.begin(), load.usage.end(), [](Usage u) { return u == 0; });
            return same || over[load.last] == over[load.first];
        }), loads.end());
    }

    // Where each strategy of one end leaves the other end one answer, both are one node.
    bool merge_with_neighbour(int32_t n) {
        for (const auto& [other, index] : m.nodes[n].edges) {
            vector<int32_t> answer = answers(n, index), back = answers(other, index);
            const bool both = !answer.empty() && !back.empty();
            if (both && m.nodes[other].edges.size() > m.nodes[n].edges.size()) answer.clear();
            if (!answer.empty() && growth(n, other) <= kGrowth * int64_t(m.edges[index].table.size())) {
                merge(n, other, index, answer);
                return true;
            }
            if (!back.empty() && growth(other, n) <= kGrowth * int64_t(m.edges[index].table.size())) {
                merge(other, n, index, back);
                return true;
            }
        }
        return false;
    }

    // For each strategy of `from` the only one of the other end that is allowed; empty if some has more.
    vector<int32_t> answers(int32_t from, int32_t index) const {
        const Seen value = seen(index, from);
        vector<int32_t> result(m.nodes[from].cost.size(), -1);
        for (size_t x = 0; x < result.size(); ++x) {
            for (size_t y = 0; y < value.others; ++y) {
                if (value(x, y) >= kForbidden) continue;
                if (result[x] >= 0) return {};
                result[x] = static_cast<int32_t>(y);
            }
            if (result[x] < 0) return {};
        }
        return result;
    }

    // Table entries that taking `from` into `into` would add.
    int64_t growth(int32_t into, int32_t from) const {
        const Node &target = m.nodes[into], &source = m.nodes[from];
        int64_t around = 0;
        for (const auto& [other, index] : source.edges)
            if (other != into) around += m.nodes[other].cost.size();
        return around * (int64_t(target.cost.size()) - int64_t(source.cost.size()));
    }

    void merge(int32_t into, int32_t from, int32_t index, const vector<int32_t>& answer) {
        Node &target = m.nodes[into], &source = m.nodes[from];
        const Seen link = seen(index, into);
        for (size_t x = 0; x < answer.size(); ++x)
            target.cost[x] = sum(target.cost[x], sum(source.cost[answer[x]], link(x, answer[x])));
        for (const Load& load : source.loads) {
            vector<Usage> usage;
            for (int32_t y : answer) usage.push_back(load.usage[y]);
            add_load(target, {load.first, load.last, std::move(usage)});
        }
        for (const Origin& origin : source.origins) {
            Origin moved{origin.node, {}};
            for (int32_t y : answer) moved.pick.push_back(origin.pick[y]);
            target.origins.push_back(std::move(moved));
        }
        remove_edge(index);
        const vector<std::pair<int32_t, int32_t>> rest(source.edges.begin(), source.edges.end());
        for (const auto& [other, edge] : rest) {
            const Seen value = seen(edge, from);
            vector<Cost> table(answer.size() * value.others);
            for (size_t x = 0; x < answer.size(); ++x)
                for (size_t y = 0; y < value.others; ++y) table[x * value.others + y] = value(answer[x], y);
            remove_edge(edge);
            add_edge(into, other, std::move(table));
        }
        retire(source);
        touch(into);
    }

    static void add_load(Node& node, Load load) {
        for (Load& old : node.loads) {
            if (old.first != load.first || old.last != load.last) continue;
            for (size_t x = 0; x < old.usage.size(); ++x) old.usage[x] += load.usage[x];
            return;
        }
        node.loads.push_back(std::move(load));
    }

    static void retire(Node& node) {
        node.alive = false;
        vector<Cost>().swap(node.cost);
        vector<Load>().swap(node.loads);
        vector<Origin>().swap(node.origins);
    }

    // A node that no row of time can feel, solved for every choice of its neighbours.
    bool eliminate(int32_t n) {
        Node& node = m.nodes[n];
        if (!node.loads.empty() || node.edges.size() > 2) return false;
        int64_t entries = 1;
        for (const auto& [other, index] : node.edges) entries *= m.nodes[other].cost.size();
        if (entries > kTableEntries) return false;
        Eliminated gone{node.cost, node.origins, {}};
        const vector<std::pair<int32_t, int32_t>> edges(node.edges.begin(), node.edges.end());
        for (const auto& [other, index] : edges) {
            const Seen value = seen(index, n);
            vector<Cost> table(node.cost.size() * value.others);
            for (size_t x = 0; x < node.cost.size(); ++x)
                for (size_t y = 0; y < value.others; ++y) table[x * value.others + y] = value(x, y);
            gone.sides.push_back({other, m.nodes[other].origins.front().pick, std::move(table)});
            remove_edge(index);
        }
        fold(gone);
        retire(node);
        m.eliminated.push_back(std::move(gone));
        return true;
    }

    // Adds the least cost of the eliminated node to what its neighbours cost.
    void fold(const Eliminated& gone) {
        const size_t strategies = gone.cost.size();
        if (gone.sides.empty()) {
            m.constant += *std::min_element(gone.cost.begin(), gone.cost.end());
            return;
        }
        const vector<Cost>& one = gone.sides[0].table;
        const size_t rows = one.size() / strategies;
        const bool pair = gone.sides.size() == 2;
        const vector<Cost> two = pair ? gone.sides[1].table : gone.cost;
        const size_t columns = two.size() / strategies;
        vector<Cost> least(rows * columns, kForbidden);
        for (size_t x = 0; x < strategies; ++x)
            for (size_t y = 0; y < rows; ++y) {
                const Cost here = pair ? sum(gone.cost[x], one[x * rows + y]) : one[x * rows + y];
                for (size_t z = 0; z < columns; ++z)
                    least[y * columns + z] = std::min(least[y * columns + z], sum(here, two[x * columns + z]));
            }
        if (pair) return add_edge(gone.sides[0].node, gone.sides[1].node, std::move(least));
        Node& neighbour = m.nodes[gone.sides[0].node];
        for (size_t y = 0; y < rows; ++y) neighbour.cost[y] = sum(neighbour.cost[y], least[y]);
        touch_around(gone.sides[0].node);
    }

    // A strategy goes if another uses no more anywhere and costs no more whatever the neighbours choose.
    void drop_dominated(int32_t n) {
        const Node& node = m.nodes[n];
        const size_t count = node.cost.size();
        vector<Seen> around;
        for (const auto& [other, index] : node.edges) around.push_back(seen(index, n));
        // saves[x][k]: at most so much less does another strategy cost at edges k, k + 1, ...
        vector<Cost> saves(count * (around.size() + 1), 0);
        for (size_t x = 0; x < count; ++x)
            for (size_t k = around.size(); k-- > 0;) {
                Cost high = 0;
                for (size_t y = 0; y < around[k].others; ++y) {
                    const Cost c = around[k](x, y);
                    if (c < kForbidden) high = std::max(high, c);
                }
                saves[x * (around.size() + 1) + k] = sum(saves[x * (around.size() + 1) + k + 1], high);
            }
        vector<char> gone(count, 0);
        bool any = false;
        for (size_t x = 0; x < count && work > 0; ++x)
            for (size_t by = 0; by < count && !gone[x] && work > 0; ++by)
                if (x != by && !gone[by] && dominates(node, around, by, x, &saves[x * (around.size() + 1)]))
                    gone[x] = any = true;
        if (!any) return;
        vector<int32_t> kept;
        for (size_t x = 0; x < count; ++x)
            if (!gone[x]) kept.push_back(static_cast<int32_t>(x));
        keep(n, kept);
    }

    bool dominates(const Node& node, const vector<Seen>& around, size_t by, size_t x, const Cost* saves) {
        Cost more = node.cost[by] - node.cost[x];
        --work;
        if (more > saves[0]) return false;
        for (const Load& load : node.loads)
            if (load.usage[by] > load.usage[x]) return false;
        work -= node.loads.size();
        for (size_t k = 0; k < around.size(); ++k) {
            const Seen& value = around[k];
            Cost worst = -kForbidden;
            work -= value.others;
            for (size_t y = 0; y < value.others; ++y) {
                const Cost old = value(x, y), now = value(by, y);
                if (old >= kForbidden) continue;
                if (now >= kForbidden) return false;
                worst = std::max(worst, now - old);
            }
            more += worst;
            if (more > saves[k + 1]) return false;
        }
        return more <= 0;
    }
};

}  // namespace

Model model_of(const Input& in) {
    Model m;
    const vector<int64_t> times = peak_times(in);
    m.room.assign(times.size(), in.limit);
    m.nodes.resize(in.nodes);
    for (int64_t n = 0; n < in.nodes; ++n) {
        Node& node = m.nodes[n];
        const int64_t first = in.start[n], last = in.start[n + 1];
        node.cost.assign(in.cost + first, in.cost + last);
        for (Cost& c : node.cost) c = std::min(c, kForbidden);
        const auto from = std::lower_bound(times.begin(), times.end(), in.intervals[2 * n]);
        const auto to = std::lower_bound(times.begin(), times.end(), in.intervals[2 * n + 1]);
        if (from < to)
            node.loads.push_back({static_cast<int32_t>(from - times.begin()), static_cast<int32_t>(to - times.begin()),
                                  vector<Usage>(in.usage + first, in.usage + last)});
        Origin self{static_cast<int32_t>(n), {}};
        for (int32_t x = 0; x < last - first; ++x) self.pick.push_back(x);
        node.origins.push_back(std::move(self));
    }
    const int64_t* table = in.tables;
    Reducer reducer(m);
    for (int64_t e = 0; e < in.edges; ++e) {
        const auto a = static_cast<int32_t>(in.ends[2 * e]), b = static_cast<int32_t>(in.ends[2 * e + 1]);
        const size_t rows = m.nodes[a].cost.size(), columns = m.nodes[b].cost.size();
        vector<Cost> costs(table, table + rows * columns);
        table += rows * columns;
        for (Cost& c : costs) c = std::min(c, kForbidden);
        if (a == b)
            for (size_t x = 0; x < rows; ++x) m.nodes[a].cost[x] = sum(m.nodes[a].cost[x], costs[x * columns + x]);
        else
            reducer.add_edge(a, b, std::move(costs));
    }
    return m;
}

void reduce(Model& model) { Reducer(model).run(); }

vector<int32_t> lift(const Model& model, const vector<int32_t>& choice, int64_t nodes) {
    vector<int32_t> result(nodes, -1);
    const auto settle = [&](const vector<Origin>& origins, int32_t x) {
        for (const Origin& origin : origins) result[origin.node] = origin.pick[x];
    };
    for (size_t n = 0; n < model.nodes.size(); ++n)
        if (model.nodes[n].alive) settle(model.nodes[n].origins, choice[n]);
    for (size_t k = model.eliminated.size(); k-- > 0;) {
        const Eliminated& gone = model.eliminated[k];
        vector<Cost> cost = gone.cost;
        for (const Eliminated::Side& side : gone.sides) {
            const size_t others = side.pick.size();
            const auto y = std::find(side.pick.begin(), side.pick.end(), result[side.node]) - side.pick.begin();
            for (size_t x = 0; x < cost.size(); ++x) cost[x] = sum(cost[x], side.table[x * others + y]);
        }
        settle(gone.origins, static_cast<int32_t>(std::min_element(cost.begin(), cost.end()) - cost.begin()));
    }
    return result;
}

}  // namespace autopar::pairwise
