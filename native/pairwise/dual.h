// A lower bound by message passing, with a price on each row of usage.
#pragma once

#include <cstdint>
#include <vector>

#include "compact.h"

namespace autopar::pairwise {

// Steps that Dual::step counts: about as long as so many of a Search.
std::int64_t sweep_work(const Compact& problem);

class Dual {
  public:
    explicit Dual(const Compact& problem);

    // One sweep forward and one back, then new prices. `known`: what the cheapest choice known costs, or infinity.
    void step(double known);

    double bound() const { return best; }  // no choice costs less, the model's constant not in it
    const std::vector<double>& priced() const { return best_paid; }  // costs with the prices of the best bound

    // The cheapest choice that fits of those that the sweeps came by; infinity and any choice where there is none.
    double cost() const { return fitting; }
    const std::vector<std::int32_t>& choice() const { return fitting < infinite() ? fits : decoded; }
    const std::vector<std::int32_t>& latest() const { return decoded; }

    std::int64_t work() const { return steps; }

  private:
    const Compact& p;
    std::vector<std::int64_t> slot;   // of a link's message
    std::vector<double> message;      // per link and strategy: what the neighbour says to node n
    std::vector<double> price, paid;  // per row; per strategy, the cost with what it pays for usage
    std::vector<double> belief, share, used, slope;
    std::vector<double> best_price, best_paid;
    std::vector<std::int32_t> decoded, fits;
    double best, last, fitting, pace;
    std::int32_t idle = 0;  // steps since the bound rose
    std::int64_t steps = 0;

    static double infinite();
    void pay();
    double pass(bool forward);
    void decode(std::int32_t n, bool forward);
    void look();
    void settle();
    void reprice(double known);
};

}  // namespace autopar::pairwise
