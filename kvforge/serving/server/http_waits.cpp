// Preloaded into tritonserver (triton_waits.py). It hands each response over HTTP to the thread of the connection, through
// a pair of sockets that holds some 280 of them, and does not look whether there was room. What finds none is lost: the
// answer stops short, or never ends where it was the last. So who sends waits until that thread has read, but not for so
// long that a model's process, which waits for it, counts as hung.
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/types.h>

namespace {

constexpr int kPatienceMs = HTTP_PATIENCE_S * 1000;

bool IsBetweenThreads(int socket, int flags) {
  int domain = 0;
  socklen_t size = sizeof domain;
  return flags == 0 && getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 && domain == AF_UNIX;
}

}  // namespace

extern "C" ssize_t send(int socket, const void* data, size_t size, int flags) {
  static const auto send_once = reinterpret_cast<ssize_t (*)(int, const void*, size_t, int)>(dlsym(RTLD_NEXT, "send"));
  for (;;) {
    const ssize_t sent = send_once(socket, data, size, flags);
    if (sent >= 0 || errno != EAGAIN || !IsBetweenThreads(socket, flags)) return sent;
    pollfd room{socket, POLLOUT, 0};
    const int found = poll(&room, 1, kPatienceMs);
    if (found > 0 || (found < 0 && errno == EINTR)) continue;
    fprintf(stderr, "a response over HTTP is lost, since its thread in tritonserver stood still for %d ms\n", kPatienceMs);
    errno = EAGAIN;
    return -1;
  }
}
