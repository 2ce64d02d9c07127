/* The native operations of a CPU rank, as one library: they share the pool of threads. */
#include "../attention/cpu.h"
#include "../gdn/cpu.h"
#include "../linear/cpu.h"
#include "../norm/cpu.h"
