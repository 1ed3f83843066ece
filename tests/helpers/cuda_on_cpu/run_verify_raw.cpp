// verify_raw.cu as a CPU library.
#include "verify_raw.cu"

extern "C" int threads() { return kThreads; }
extern "C" void run(const Params* params, int num_blocks, int shared_bytes) {
    cpu::run(verify_raw, *params, num_blocks, kThreads, shared_bytes);
}
