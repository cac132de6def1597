// The facts that a target tells the driver.
#pragma once

namespace nf4::fuzz {

// A call of the library, for the report.
void count_call(bool refused);

}  // namespace nf4::fuzz
