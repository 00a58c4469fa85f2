// A stand-in for libnccl.so.2 and for CUDA's streams, on the host. Prototypes are those of nccl.h 2.30.
//
// A stream does one operation after the other. Streams share hardware queues (CUDA_DEVICE_MAX_CONNECTIONS): a queue
// issues in the order of submission, and an operation that cannot start yet holds up all operations behind it.
// A communicator is a ring buffer in /dev/shm: a send blocks its stream while the ring is full and no receive runs, as
// NCCL's does beyond its buffers. Its first operation waits for the other rank's, as NCCL's connection set-up does.
// NCCL_HOSTID and NCCL_MULTI_RANK_GPU_ENABLE are read once per process, as in NCCL 2.23 and 2.30.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

typedef struct {
  char internal[128];
} ncclUniqueId;
typedef enum {
  ncclSuccess = 0,
  ncclSystemError = 2,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
} ncclResult_t;
typedef struct {
  size_t size;
  unsigned int magic, version;
  int blocking, cgaClusterSize, minCTAs, maxCTAs;
  const char *netName;
} ncclConfig_t;

#define RING (1u << 20)
#define MAX_QUEUES 64

typedef struct {
  atomic_int joined[2], connected[2];
  atomic_ulong written, read;
  char host[2][256], gpu[2][64];
  char ring[RING];
} shared_t;
typedef struct comm {
  shared_t *shm;
  int rank, is_blocking;
  char name[256];
  atomic_int abort, has_connected, in_call, pending, freed, state, helpers;
} comm_t;
typedef struct {
  atomic_ulong queued, done;
  int id;
} stream_t;

enum { WAIT, SLEEP, COPY, FILL, SEND, RECV };
typedef struct op {
  int kind, value;
  void *to, *from;
  size_t size;
  stream_t *other, *stream;
  uint64_t number, after;
  comm_t *comm;
  struct op *next;
} op_t;

static atomic_int stream_ids, races;

static void nap(long us) {
  struct timespec t = {us / 1000000, (us % 1000000) * 1000};
  nanosleep(&t, NULL);
}

static void start(void *(*function)(void *), void *argument) {
  pthread_t thread;
  pthread_create(&thread, NULL, function, argument);
  pthread_detach(thread);
}

static void transfer(op_t *o) {
  shared_t *s = o->comm->shm;
  char *memory = o->to;
  for (size_t at = 0; at < o->size && !o->comm->abort;) {
    uint64_t in_ring = s->written - s->read, room = o->kind == SEND ? RING - in_ring : in_ring;
    if (!room) {
      nap(50);
      continue;
    }
    size_t place = (o->kind == SEND ? s->written : s->read) % RING, count = o->size - at;
    if (count > room) count = room;
    if (count > RING - place) count = RING - place;
    if (o->kind == SEND) {
      memcpy(s->ring + place, memory + at, count);
      s->written += count;
    } else {
      memcpy(memory + at, s->ring + place, count);
      s->read += count;
    }
    at += count;
  }
  o->comm->pending--;
}

static void run(op_t *o) {
  if (o->kind == WAIT) {
    while (o->other->done < o->after) nap(50);
  } else if (o->kind == SLEEP) {
    nap(o->size);
  } else if (o->kind == COPY) {
    memcpy(o->to, o->from, o->size);
  } else if (o->kind == FILL) {
    for (size_t i = 0; i < o->size / sizeof(double); i++) ((double *)o->to)[i] = o->value;
  } else {
    transfer(o);
  }
  stream_t *stream = o->stream;
  free(o);
  stream->done++;
}

// Hardware queues

typedef struct {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  op_t *head, *tail;
} queue_t;
static queue_t queues[MAX_QUEUES];
static int queue_count;
static pthread_once_t queues_once = PTHREAD_ONCE_INIT;

static void *run_alone(void *operation) {
  run(operation);
  return NULL;
}

static void *issue(void *argument) {
  queue_t *queue = argument;
  for (;;) {
    pthread_mutex_lock(&queue->lock);
    while (!queue->head) pthread_cond_wait(&queue->changed, &queue->lock);
    op_t *o = queue->head;
    queue->head = o->next;
    pthread_mutex_unlock(&queue->lock);
    while (o->stream->done < o->number) nap(50);
    if (o->kind == WAIT)
      run(o);
    else
      start(run_alone, o);
  }
  return NULL;
}

static void start_queues(void) {
  const char *wanted = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  queue_count = wanted ? atoi(wanted) : MAX_QUEUES;
  for (int i = 0; i < queue_count; i++) {
    pthread_mutex_init(&queues[i].lock, NULL);
    pthread_cond_init(&queues[i].changed, NULL);
    start(issue, &queues[i]);
  }
}

static void put(stream_t *stream, op_t *o) {
  pthread_once(&queues_once, start_queues);
  queue_t *queue = &queues[stream->id % queue_count];
  pthread_mutex_lock(&queue->lock);
  o->stream = stream;
  o->number = stream->queued++;
  if (queue->head)
    queue->tail->next = o;
  else
    queue->head = o;
  queue->tail = o;
  pthread_cond_signal(&queue->changed);
  pthread_mutex_unlock(&queue->lock);
}

static op_t *new_op(int kind, void *to, void *from, size_t size) {
  op_t *o = calloc(1, sizeof *o);
  o->kind = kind, o->to = to, o->from = from, o->size = size;
  return o;
}

stream_t *fake_stream(void) {
  stream_t *stream = calloc(1, sizeof *stream);
  stream->id = stream_ids++;
  return stream;
}
uint64_t fake_record(stream_t *stream) { return stream->queued; }
int fake_is_done(stream_t *stream, uint64_t number) { return stream->done >= number; }
void fake_wait(stream_t *stream, stream_t *other, uint64_t number) {
  op_t *o = new_op(WAIT, NULL, NULL, 0);
  o->other = other, o->after = number;
  put(stream, o);
}
void fake_sleep(stream_t *stream, uint64_t us) { put(stream, new_op(SLEEP, NULL, NULL, us)); }
void fake_copy(stream_t *stream, void *to, void *from, uint64_t size) { put(stream, new_op(COPY, to, from, size)); }
void fake_fill(stream_t *stream, void *to, uint64_t size, int value) {
  op_t *o = new_op(FILL, to, NULL, size);
  o->value = value;
  put(stream, o);
}
int fake_races(void) { return races; }

// NCCL

static pthread_once_t settings_once = PTHREAD_ONCE_INIT;
static char host[256];
static int may_share_gpu;

static int version(void) {
  const char *wanted = getenv("FAKE_NCCL_VERSION");
  return wanted ? atoi(wanted) : 23003;
}

static void read_settings(void) {
  const char *id = getenv("NCCL_HOSTID"), *shares = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  if (id)
    snprintf(host, sizeof host, "%s", id);
  else
    gethostname(host, sizeof host);
  may_share_gpu = version() >= 23000 && shares && atoi(shares);
}

static void *join(void *argument) {
  comm_t *c = argument;
  while (!c->shm->joined[1 - c->rank] && !c->abort) nap(500);
  unlink(c->name);
  int is_same = !strcmp(c->shm->host[0], c->shm->host[1]) && !strcmp(c->shm->gpu[0], c->shm->gpu[1]);
  c->state = c->abort || (is_same && !may_share_gpu) ? ncclInvalidUsage : ncclSuccess;
  c->helpers--;
  return NULL;
}

const char *ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    default: return "unhandled system error";
  }
}

ncclResult_t ncclGetVersion(int *found) {
  *found = version();
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  if (!id) return ncclInvalidArgument;
  return getrandom(id, sizeof *id, 0) == sizeof *id ? ncclSuccess : ncclSystemError;
}

ncclResult_t ncclCommInitRankConfig(comm_t **out, int count, ncclUniqueId id, int rank, ncclConfig_t *config) {
  if (count != 2 || rank < 0 || rank > 1 || !out) return ncclInvalidArgument;
  if (config && (config->size < 8 || config->magic != 0xcafebeef || config->version > 23099)) return ncclInvalidArgument;
  const char *forced = getenv("NCCL_COMM_BLOCKING");
  comm_t *c = calloc(1, sizeof *c);
  c->is_blocking = forced ? atoi(forced) : !config || config->blocking != 0;
  c->rank = rank;
  c->state = ncclInProgress;
  int end = snprintf(c->name, 200, "%s/fake-nccl-", getenv("FAKE_NCCL_FOLDER"));
  if (end >= 200) return ncclSystemError;
  for (int i = 0; i < 16; i++) sprintf(c->name + end + 2 * i, "%02x", (unsigned char)id.internal[111 + i]);
  int file = open(c->name, O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, sizeof(shared_t))) return ncclSystemError;
  c->shm = mmap(NULL, sizeof(shared_t), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  pthread_once(&settings_once, read_settings);
  strcpy(c->shm->host[rank], host);
  snprintf(c->shm->gpu[rank], 64, "%s", getenv("FAKE_GPU"));
  c->shm->joined[rank] = 1;
  c->helpers++;
  if (c->is_blocking) {
    join(c);  // nothing ends this wait
    if (c->state) return c->state;
    *out = c;
    return ncclSuccess;
  }
  *out = c;
  start(join, c);
  return ncclInProgress;
}

ncclResult_t ncclCommInitRank(comm_t **out, int count, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(out, count, id, rank, NULL);
}

typedef struct {
  comm_t *comm;
  op_t *op;
  stream_t *stream;
} launch_t;

static void *launch(void *argument) {
  launch_t *l = argument;
  comm_t *c = l->comm;
  if (!c->has_connected) {
    c->has_connected = 1;
    c->shm->connected[c->rank] = 1;
    while (!c->shm->connected[1 - c->rank] && !c->abort) nap(200);
  }
  c->pending++;
  stream_t *stream = l->stream;
  put(stream, l->op);
  uint64_t number = fake_record(stream);
  if (getenv("CUDA_LAUNCH_BLOCKING"))
    while (!fake_is_done(stream, number) && !c->abort) nap(100);
  c->state = ncclSuccess;
  c->helpers--;
  free(l);
  return NULL;
}

static ncclResult_t submit(int kind, void *memory, size_t size, int type, int peer, comm_t *c, stream_t *stream) {
  if (!c || type != 1 || peer != 1 - c->rank || !stream || c->state) return ncclInvalidArgument;
  if (c->in_call++) races++;  // two threads in one communicator
  launch_t *l = calloc(1, sizeof *l);
  l->comm = c, l->stream = stream, l->op = new_op(kind, memory, NULL, size);
  l->op->comm = c;
  c->helpers++;
  if (c->is_blocking) {
    launch(l);
  } else {
    c->state = ncclInProgress;
    start(launch, l);
  }
  c->in_call--;
  return c->is_blocking ? ncclSuccess : ncclInProgress;
}

ncclResult_t ncclSend(void *memory, size_t size, int type, int peer, comm_t *c, stream_t *stream) {
  return submit(SEND, memory, size, type, peer, c, stream);
}

ncclResult_t ncclRecv(void *memory, size_t size, int type, int peer, comm_t *c, stream_t *stream) {
  return submit(RECV, memory, size, type, peer, c, stream);
}

ncclResult_t ncclCommGetAsyncError(comm_t *c, ncclResult_t *error) {
  if (c->freed) abort();
  *error = c->state;
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(comm_t *c) {
  if (c->in_call) races++;
  c->abort = 1;
  while (c->pending || c->helpers) nap(100);
  if (c->freed++) abort();
  return ncclSuccess;
}
