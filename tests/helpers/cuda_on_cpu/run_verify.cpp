// verify.cu as a CPU library.
#include "verify.cu"

extern "C" void run(const Params* params, int num_blocks) { cpu::run(verify, *params, num_blocks, kThreads); }
