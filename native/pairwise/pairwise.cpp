// Rounds of equal work: one part raises the bound (dual.h) and later, when it no longer rises, walks too; the other
// walks down from the best choice with the prices of the bound. Parts meet after each round only, so that the result is
// the same on one thread or two, on a fast machine or a slow one, unless time ends it.
#include "pairwise.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <thread>

#include "dual.h"
#include "search.h"

namespace autopar::pairwise {
namespace {

using std::int32_t;
using std::int64_t;
using std::vector;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kLongestRound = 20'000'000, kShortestRound = 20'000;  // steps
constexpr int32_t kRoundSweeps = 20;   // a round is about so many sweeps, within the two above
constexpr int32_t kPatience = 300;     // rounds without progress after which the search ends, if half of all
constexpr int32_t kStalled = 40;       // rounds without a better bound after which no better one is sought
constexpr int32_t kWalk = 12;          // rounds without progress after which a walk starts again from the best
constexpr double kRise = 1e-6;         // relative: a better bound
constexpr double kFall = 1e-6;         // relative: a better choice
constexpr double kTold = 1.0;          // seconds between reports

class Clock {
  public:
    explicit Clock(double limit) : began(std::chrono::steady_clock::now()), limit(limit) {}
    double seconds() const {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    }
    bool over() const { return seconds() >= limit; }

  private:
    std::chrono::steady_clock::time_point began;
    double limit;
};

struct Best {
    vector<int32_t> choice;
    double cost = kInfinity;
    bool take(double other, const vector<int32_t>& from) {
        if (!(other < cost)) return false;
        cost = other, choice = from;
        return true;
    }
};

// A search that starts again from the best choice, kicked, when it has come to its end.
class Walk {
  public:
    Walk(const Compact& problem, std::uint64_t seed) : p(problem), search(problem, seed) {}

    template <class Stop>
    void round(int64_t work, Stop stop) {
        search.improve(work, stop);
    }

    void start(const vector<int32_t>& choice) { search.start_from(choice), lowest = kInfinity, idle = 0; }
    void prices(const vector<double>& priced) { search.set_prices(priced); }
    bool fits() const { return search.over() == 0 && search.cost() < p.large; }

    // After a round: what it found to `best`, and where to go on. While the bound rises, walks are short and start in
    // turns from the best choice and from what the prices say now; later from the best, kicked, when one has come to its
    // end.
    bool report(Best& best, const Dual& dual, bool rising) {
        const bool found = fits() && best.take(search.cost(), search.choice());
        const double reached = fits() ? search.cost() : kInfinity;
        idle = !rising && reached < lowest - kFall * lowest ? 0 : idle + 1;
        lowest = std::min(lowest, reached);
        if (idle < kWalk) return found;
        ++walks;
        const bool known = best.cost < kInfinity;
        start(!known || (rising && walks % 2) ? dual.latest() : best.choice);
        if (!rising && known) search.kick();
        return found;
    }

  private:
    const Compact& p;
    Search search;
    double lowest = kInfinity;
    int32_t idle = 0, walks = 0;
};

int64_t round_work(const Compact& p) {
    return std::clamp(kRoundSweeps * sweep_work(p), kShortestRound, kLongestRound);
}

}  // namespace

Found search(const Compact& p, const Limits& limits) {
    if (p.nodes == 0) return {{}, 0.0, 0.0, true};
    const Clock clock(limits.seconds);
    Dual dual(p);
    Walk walk(p, 1), other(p, 2);
    Best best;
    dual.step(kInfinity);
    best.take(dual.cost(), dual.choice());
    walk.start(dual.choice());
    other.start(dual.choice());
    const int64_t work = round_work(p);
    double bound = dual.bound(), told = -kInfinity;
    int64_t rounds = 0, progress = 0, risen = 0;
    const auto proven = [&] { return best.cost - bound < 1.0 - 1e-6; };
    while (!proven() && rounds < limits.rounds && rounds - progress < kPatience + rounds / 2) {
        if (clock.over()) return {best.choice, best.cost, bound, false};
        if (clock.seconds() - told >= kTold) {
            told = clock.seconds();
            if (limits.told && limits.told(told, best.cost, bound)) return {best.choice, best.cost, bound, false};
        }
        const bool rising = rounds - risen < kStalled;
        const auto first = [&] {
            if (!rising) return other.round(work, [&] { return clock.over(); });
            for (const int64_t end = dual.work() + work; dual.work() < end && !clock.over();) {
                dual.step(best.cost);
                if (std::min(best.cost, dual.cost()) - dual.bound() < 1.0 - 1e-6) break;
            }
        };
        const auto second = [&] { walk.round(work, [&] { return clock.over(); }); };
        if (limits.threads > 1) {
            std::thread thread(second);
            first();
            thread.join();
        } else {
            first(), second();
        }
        ++rounds;
        const double before = best.cost;
        if (rising) {
            if (best.take(dual.cost(), dual.choice())) walk.start(best.choice);
            walk.prices(dual.priced()), other.prices(dual.priced());
            if (dual.bound() > bound + kRise * std::fabs(bound)) risen = rounds, progress = rounds;
            bound = std::max(bound, dual.bound());
        } else {
            other.report(best, dual, false);
        }
        walk.report(best, dual, rising);
        if (best.cost < before) progress = rounds;
    }
    return {best.choice, best.cost, bound, true};
}

}  // namespace autopar::pairwise
