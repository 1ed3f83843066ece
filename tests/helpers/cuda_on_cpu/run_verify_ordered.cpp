// verify_ordered.cu as a CPU library.
#include "verify_ordered.cu"

extern "C" int threads() { return kThreads; }
extern "C" void run(const Params* params, int num_blocks, int shared_bytes) {
    cpu::run(verify_ordered, *params, num_blocks, kThreads, shared_bytes);
}
