// Waits for a semaphore until a moment that has passed, and posts it: as Triton's Python backend does, if the library
// has its name.
#include <cerrno>
#include <ctime>
#include <semaphore.h>

namespace {
sem_t semaphore;
const bool made = sem_init(&semaphore, 0, 0) == 0;
}  // namespace

extern "C" int wait_for_it() {
  timespec past;
  clock_gettime(CLOCK_REALTIME, &past);
  --past.tv_sec;
  const int status = made ? sem_timedwait(&semaphore, &past) : -1;  // no tail call: the caller counts
  return status == 0 ? 0 : errno;
}

extern "C" void post_it() { sem_post(&semaphore); }
