/* Load generator and fake engine for the gateway's bench: epoll, one thread each, so that neither is what is measured.
 *
 *   load upstream PORT [BODY-FILE]                        an engine: one fixed answer, or 50 chunks 20 ms apart
 *   load closed   PORT CONNS SECONDS REQUEST-FILE         as many requests as go, CONNS at a time
 *   load open     PORT RATE  SECONDS REQUEST-FILE         RATE requests/s; latency counts from the scheduled time
 *   load streams  PORT CONNS SECONDS REQUEST-FILE         CONNS streams at a time; counts chunks
 *
 * Prints one JSON object. REQUEST-FILE is the request as it goes over the wire.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

#define CHUNKS 50
#define CHUNK_NS 20000000ull
#define BUF (1 << 18)
#define MAX_CONNS 8192
#define MAX_SAMPLES 2000000

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void die(const char *what) { perror(what); exit(1); }

struct conn {
  int fd, busy, left;
  uint64_t started, next;
  size_t len, scanned, need; /* need: whole length when known, 1 = chunked */
  char *buf;
};

static struct conn conns[MAX_CONNS];

static int nonblock(int fd) {
  int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  return fcntl(fd, F_SETFL, O_NONBLOCK);
}

static void put(int fd, const char *data, size_t size) {
  while (size) {
    ssize_t n = write(fd, data, size);
    if (n < 0) {
      if (errno == EAGAIN) continue;
      return;
    }
    data += n;
    size -= (size_t)n;
  }
}

/* --- the engine ------------------------------------------------------------------------------------------------- */

static const char CHAT[] =
    "{\"id\":\"chatcmpl-0000000000000000\",\"object\":\"chat.completion\",\"created\":1760000000,\"model\":\"bench/model\","
    "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"The quick brown fox jumps over the lazy "
    "dog.\"},\"logprobs\":null,\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":200,\"total_tokens\":212,"
    "\"completion_tokens\":12,\"prompt_tokens_details\":{\"cached_tokens\":64}}}";

static const char *whole_answer = CHAT;

static const char STREAM_HEAD[] =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";

static void chunk(int fd, const char *payload) {
  char out[1024];
  int n = snprintf(out, sizeof out, "%zx\r\n%s\r\n", strlen(payload), payload);
  put(fd, out, (size_t)n);
}

static void next_chunk(struct conn *c) {
  char event[600];
  int done = CHUNKS - c->left + 1;
  snprintf(event, sizeof event,
           "data: {\"id\":\"chatcmpl-0000000000000000\",\"object\":\"chat.completion.chunk\",\"created\":1760000000,"
           "\"model\":\"bench/model\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" token\"},\"logprobs\":null,"
           "\"finish_reason\":null}],\"usage\":{\"prompt_tokens\":200,\"total_tokens\":%d,\"completion_tokens\":%d,"
           "\"prompt_tokens_details\":null}}\n\n",
           200 + done, done);
  chunk(c->fd, event);
  c->next += CHUNK_NS;
  if (--c->left) return;
  chunk(c->fd,
        "data: {\"id\":\"chatcmpl-0000000000000000\",\"object\":\"chat.completion.chunk\",\"created\":1760000000,"
        "\"model\":\"bench/model\",\"choices\":[],\"usage\":{\"prompt_tokens\":200,\"total_tokens\":250,"
        "\"completion_tokens\":50,\"prompt_tokens_details\":{\"cached_tokens\":64}}}\n\n");
  put(c->fd, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n", 24);
}

static void serve(struct conn *c) {
  for (;;) {
    char *end = memmem(c->buf, c->len, "\r\n\r\n", 4);
    if (!end) return;
    char *length = strcasestr(c->buf, "content-length:");
    size_t head = (size_t)(end - c->buf) + 4;
    size_t whole = head + (length && length < end ? strtoul(length + 15, 0, 10) : 0);
    if (c->len < whole) return;
    if (memmem(c->buf + head, whole - head, "\"stream\":true", 13)) {
      put(c->fd, STREAM_HEAD, sizeof STREAM_HEAD - 1);
      c->left = CHUNKS;
      c->next = now_ns();
      next_chunk(c);
    } else if (!strncmp(c->buf, "POST", 4)) {
      char out[8192];
      int n = snprintf(out, sizeof out, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s",
                       strlen(whole_answer), whole_answer);
      put(c->fd, out, (size_t)n);
    } else {
      const char *info = "{\"model_path\":\"bench/model\",\"served_model_name\":\"bench/model\",\"tp_size\":1,\"dp_size\":1,"
                         "\"is_generation\":true,\"version\":\"0.5.23\",\"data\":[{\"id\":\"bench/model\",\"object\":\"model\"}]}";
      char out[512];
      int n = snprintf(out, sizeof out, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s",
                       strlen(info), info);
      put(c->fd, out, (size_t)n);
    }
    memmove(c->buf, c->buf + whole, c->len - whole);
    c->len -= whole;
    c->buf[c->len] = 0;
  }
}

static void upstream(int port) {
  int ep = epoll_create1(0), one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (bind(listener, (void *)&a, sizeof a) || listen(listener, 4096)) die("listen");
  nonblock(listener);
  struct epoll_event e = {.events = EPOLLIN, .data.fd = -1}, events[512];
  epoll_ctl(ep, EPOLL_CTL_ADD, listener, &e);
  for (;;) {
    int n = epoll_wait(ep, events, 512, 1);
    for (int i = 0; i < n; i++) {
      if (events[i].data.fd == -1) {
        for (int fd; (fd = accept(listener, 0, 0)) >= 0;) {
          if (fd >= MAX_CONNS) { close(fd); continue; }
          nonblock(fd);
          struct conn *c = &conns[fd];
          if (!c->buf) c->buf = malloc(BUF);
          c->fd = fd; c->len = 0; c->left = 0; c->busy = 1; c->buf[0] = 0;
          e = (struct epoll_event){.events = EPOLLIN, .data.fd = fd};
          epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e);
        }
        continue;
      }
      struct conn *c = &conns[events[i].data.fd];
      ssize_t got = read(c->fd, c->buf + c->len, BUF - c->len - 1);
      if (got <= 0) {
        if (got < 0 && errno == EAGAIN) continue;
        close(c->fd);
        c->busy = c->left = 0;
        continue;
      }
      c->len += (size_t)got;
      c->buf[c->len] = 0;
      serve(c);
    }
    uint64_t now = now_ns();
    for (int fd = 0; fd < MAX_CONNS; fd++)
      while (conns[fd].busy && conns[fd].left && conns[fd].next <= now) next_chunk(&conns[fd]);
  }
}

/* --- the generator ---------------------------------------------------------------------------------------------- */

static float *samples;
static size_t sample_count, errors, chunks, finished;
static char *request;
static size_t request_size;
static int target_port, ep;

static int by_value(const void *a, const void *b) {
  float x = *(const float *)a, y = *(const float *)b;
  return (x > y) - (x < y);
}

static float quantile(double q) { return sample_count ? samples[(size_t)(q * (double)(sample_count - 1))] : 0; }

static void dial(struct conn *c) {
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)target_port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  c->fd = socket(AF_INET, SOCK_STREAM, 0);
  if (connect(c->fd, (void *)&a, sizeof a)) die("connect");
  nonblock(c->fd);
  if (!c->buf) c->buf = malloc(BUF);
  struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
  epoll_ctl(ep, EPOLL_CTL_ADD, c->fd, &e);
  c->busy = 0;
}

static void fire(struct conn *c, uint64_t started) {
  c->started = started;
  c->len = c->scanned = c->need = 0;
  c->busy = 1;
  put(c->fd, request, request_size);
}

/* True when the answer is whole. */
static int take(struct conn *c) {
  ssize_t got = read(c->fd, c->buf + c->len, BUF - c->len - 1);
  if (got < 0 && errno == EAGAIN) return 0;
  if (got <= 0) {
    if (c->busy) errors++;
    close(c->fd);
    dial(c);
    return -1;
  }
  c->len += (size_t)got;
  c->buf[c->len] = 0;
  if (!c->need) {
    char *end = memmem(c->buf, c->len, "\r\n\r\n", 4);
    if (!end) return 0;
    if (strncmp(c->buf + 9, "200", 3)) errors++;
    char *length = strcasestr(c->buf, "content-length:");
    c->need = length && length < end ? (size_t)(end - c->buf) + 4 + strtoul(length + 15, 0, 10) : 1;
    c->scanned = (size_t)(end - c->buf) + 4;
  }
  if (c->need > 1) return c->len >= c->need;
  char *at = c->buf + c->scanned;
  while ((at = memmem(at, c->len - (size_t)(at - c->buf), "data: {", 7))) {
    chunks++;
    at += 7;
    c->scanned = (size_t)(at - c->buf);
  }
  return c->len > 7 && !memcmp(c->buf + c->len - 7, "\r\n0\r\n\r\n", 7);
}

static void generate(const char *mode, int amount, double seconds) {
  int open_loop = !strcmp(mode, "open"), streams = !strcmp(mode, "streams");
  int count = open_loop ? 64 : amount;
  ep = epoll_create1(0);
  samples = malloc(sizeof *samples * MAX_SAMPLES);
  for (int i = 0; i < count; i++) dial(&conns[i]);
  uint64_t begin = now_ns(), warm = begin + 1000000000ull, end = warm + (uint64_t)(seconds * 1e9);
  uint64_t gap = open_loop ? (uint64_t)(1e9 / amount) : streams ? 1000000000ull / (uint64_t)count : 0, due = begin;
  size_t counted_chunks = 0;
  int started = 0, measuring = 0;
  uint64_t scheduled[4096], head = 0, tail = 0;
  if (!open_loop && !streams)
    for (int i = 0; i < count; i++) fire(&conns[i], now_ns());
  struct epoll_event events[512];
  for (;;) {
    uint64_t now = now_ns();
    if (now >= end) break;
    if (!measuring && now >= warm) {
      measuring = 1;
      finished = sample_count = 0;
      counted_chunks = chunks;
    }
    if (open_loop) {
      for (; due <= now; due += gap)
        if (tail - head < 4096) scheduled[tail++ % 4096] = due;
      for (int i = 0; i < count && head < tail; i++)
        if (!conns[i].busy) fire(&conns[i], scheduled[head++ % 4096]);
    } else if (streams) {
      /* Started one after the other over a second, so that their chunks do not all fall together. */
      for (; started < count && due <= now; due += gap) fire(&conns[started++], now);
    }
    int wait = open_loop || started < count ? 0 : 10;
    if (open_loop && due > now_ns() + 1200000) wait = 1;
    int n = epoll_wait(ep, events, 512, wait);
    for (int i = 0; i < n; i++) {
      struct conn *c = events[i].data.ptr;
      int whole = take(c);
      if (!whole) continue;
      uint64_t at = now_ns();
      if (whole > 0) {
        finished++;
        if (sample_count < MAX_SAMPLES) samples[sample_count++] = (float)(at - c->started) / 1e6f;
      }
      c->busy = 0;
      if (!open_loop && (!streams || c - conns < started)) fire(c, at);
    }
  }
  double took = (double)(now_ns() - warm) / 1e9;
  qsort(samples, sample_count, sizeof *samples, by_value);
  printf("{\"requests_per_s\":%.1f,\"p50_ms\":%.4f,\"p99_ms\":%.4f,\"chunks_per_s\":%.1f,\"finished\":%zu,\"errors\":%zu}\n",
         (double)finished / took, quantile(0.5), quantile(0.99), (double)(chunks - counted_chunks) / took, finished, errors);
}

static char *read_file(const char *name, size_t *size) {
  FILE *file = fopen(name, "rb");
  if (!file) die(name);
  char *content = calloc(1, (1 << 20) + 1);
  *size = fread(content, 1, 1 << 20, file);
  fclose(file);
  return content;
}

int main(int argc, char **argv) {
  signal(SIGPIPE, SIG_IGN);
  if (argc >= 3 && !strcmp(argv[1], "upstream")) {
    if (argc > 3) whole_answer = read_file(argv[3], &request_size);
    upstream(atoi(argv[2]));
  }
  if (argc != 6) {
    fprintf(stderr, "see the head of load.c\n");
    return 2;
  }
  target_port = atoi(argv[2]);
  request = read_file(argv[5], &request_size);
  generate(argv[1], atoi(argv[3]), atof(argv[4]));
  return 0;
}
