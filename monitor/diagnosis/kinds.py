"""The kinds of verdict, and what each means.

A hang, culprits named:
  dead-rank              a rank's process is gone or a zombie, the others wait for it
  stopped-rank           a rank is stopped (SIGSTOP, a debugger)
  d-state                a rank sleeps uninterruptibly in the kernel: driver, storage
  undumpable             a rank gives no stack while the others do
  teardown               a rank is shutting down (often after a swallowed exception) while others wait
  data-loader            a rank waits for a data loader or its workers that do not move
  lock                   a rank, or its worker, waits for a lock, a thread or a finalizer, also after fork
  store                  a rank waits for a key of the store, or the store's owner is gone
  rendezvous             ranks wait for others that have not come
  storage                a rank is blocked in reading or writing files
  rank-outside-collective  a rank is in other code, outside any collective, and does not get on
  save-on-one-rank       only some ranks are in a save that gathers
  eval-on-one-rank       only some ranks are in an evaluation that gathers
  phase-mismatch         ranks stand in different phases; the odd or earlier ones are named
  collective-mismatch    ranks call different collectives
  order-mismatch         ranks call the same collectives in another order or from another place
  size-mismatch          ranks call the same collective with other sizes or types
  rank-missing           flight recorder: a rank has not made the call the others wait in
  external-peer          a rank waits for a process outside the job (a vLLM server)
No hang, nobody named:
  slow                   somebody is working, the others wait; nobody is stuck
  healthy                everybody moves
  all-ranks-outside      all ranks wait in their own code for what no rank gives: nobody differs
  network-or-hardware    all ranks do the same and it does not end: nobody differs
  no-evidence            nothing could be read
After the fact, from logs:
  out-of-memory          GPU memory; the culprit is the first rank that ran out
  host-out-of-memory     killed by the kernel for host memory
  crash                  a rank raised or died; the first one, not the cascade
  address-in-use         a port was taken (reported as such when nothing else failed before)
  stopped-from-outside   a signal, a person or the scheduler ended the job; no rank failed before
"""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    DEAD_RANK = "dead-rank"
    STOPPED_RANK = "stopped-rank"
    D_STATE = "d-state"
    UNDUMPABLE = "undumpable"
    TEARDOWN = "teardown"
    DATA_LOADER = "data-loader"
    LOCK = "lock"
    STORE = "store"
    RENDEZVOUS = "rendezvous"
    STORAGE = "storage"
    OUTSIDE = "rank-outside-collective"
    SAVE_ON_ONE = "save-on-one-rank"
    EVAL_ON_ONE = "eval-on-one-rank"
    PHASE_MISMATCH = "phase-mismatch"
    COLLECTIVE_MISMATCH = "collective-mismatch"
    ORDER_MISMATCH = "order-mismatch"
    SIZE_MISMATCH = "size-mismatch"
    RANK_MISSING = "rank-missing"
    EXTERNAL_PEER = "external-peer"
    SLOW = "slow"
    HEALTHY = "healthy"
    ALL_OUTSIDE = "all-ranks-outside"
    NETWORK = "network-or-hardware"
    NO_EVIDENCE = "no-evidence"
    OUT_OF_MEMORY = "out-of-memory"
    HOST_OUT_OF_MEMORY = "host-out-of-memory"
    CRASH = "crash"
    ADDRESS_IN_USE = "address-in-use"
    FROM_OUTSIDE = "stopped-from-outside"


# Kinds that name nobody.
NO_CULPRIT = frozenset(
    {Kind.SLOW, Kind.HEALTHY, Kind.ALL_OUTSIDE, Kind.NETWORK, Kind.NO_EVIDENCE, Kind.FROM_OUTSIDE}
)
