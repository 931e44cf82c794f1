// Local search from a choice: whole trees of nodes are solved again with the rest as it is.
#pragma once

#include <cstdint>
#include <vector>

#include "compact.h"

namespace autopar::pairwise {

// 64-bit numbers in a fixed order (SplitMix64).
class Random {
  public:
    explicit Random(std::uint64_t seed) : state(seed) {}
    std::uint64_t next();
    std::int32_t below(std::int32_t n) { return static_cast<std::int32_t>(next() % static_cast<std::uint64_t>(n)); }
    double part() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }

  private:
    std::uint64_t state;
};

// What is used over the room, by row, and the most of it.
class Rows {
  public:
    explicit Rows(const std::vector<Usage>& room);
    void add(std::int32_t first, std::int32_t last, Usage amount);
    Usage most() const { return high.empty() ? 0 : high[1]; }  // of used - room
    std::int32_t worst() const;                                // a row where it is so much

  private:
    std::int32_t width;
    std::vector<Usage> high, lazy;
};

class Search {
  public:
    Search(const Compact& problem, std::uint64_t seed);

    void start_from(const std::vector<std::int32_t>& choice);
    void set_prices(const std::vector<double>& priced) { paid = priced; }

    // Solves trees around random nodes again, and keeps each that is no worse, until `work` steps are done or `stop` says.
    template <class Stop>
    void improve(std::int64_t work, Stop stop) {
        for (const std::int64_t end = steps + work; steps < end && !stop();) improve_once();
    }

    // Goes where costs lie otherwise, for another way down.
    void kick();

    const std::vector<std::int32_t>& choice() const { return now; }
    double cost() const { return total; }
    Usage over() const { return rows.most() > 0 ? rows.most() : 0; }
    std::int64_t work() const { return steps; }

  private:
    const Compact& p;
    Random random;
    std::vector<std::int32_t> now;
    std::vector<double> around;  // per strategy: its cost and that of its links to the neighbours as they are
    std::vector<double> paid;    // per strategy: cost with prices for usage
    double total = 0.0;
    Rows rows;
    std::int64_t steps = 0;

    std::vector<std::int32_t> tree, parent_link;  // nodes in the order in which they joined; the link to where they did
    std::vector<std::int32_t> front, front_link;  // nodes that may join next
    std::vector<std::int32_t> mark;               // stamp: in the tree
    std::vector<double> sum, least;               // per strategy of the tree's nodes; of one node
    std::vector<std::int32_t> fresh, old;
    std::int32_t stamp = 0;

    void grow(std::int32_t size);
    void solve(double pressure, double noise);
    void improve_once();
    bool take(bool any);
    std::int32_t some_size();
    void add_usage(std::int32_t n, std::int32_t row, double each);
    void move(std::int32_t n, std::int32_t strategy);
};

}  // namespace autopar::pairwise
