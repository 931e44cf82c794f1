#include <thread>
#include <vector>

#include "kernel.h"

namespace autopar {

void parallel(std::int64_t count, std::int64_t grain, std::int32_t threads, Part run, void* context) {
    const std::int64_t grains = (count + grain - 1) / grain;
    const std::int64_t parts = threads < grains ? threads : grains;
    if (parts <= 1) {
        run(context, 0, count);
        return;
    }
    const std::int64_t each = (grains + parts - 1) / parts * grain;
    std::int64_t first = each;  // the calling thread takes the first part
    std::vector<std::thread> others;
    try {
        for (; first < count; first += each) {
            const std::int64_t last = first + each < count ? first + each : count;
            others.emplace_back(run, context, first, last);
        }
    } catch (...) {  // no thread, or no memory for one: the rest runs here
        run(context, first, count);
    }
    run(context, 0, each < count ? each : count);
    for (std::thread& other : others) other.join();
}

}  // namespace autopar
