#pragma once
// c10d's ProcessGroupGloo.hpp includes this header but needs nothing from it.
