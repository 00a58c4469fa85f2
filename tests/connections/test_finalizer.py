"""Finalizers: they run when an object has gone, also while the interpreter exits."""

import gc

from lp_pipe.connections.finalizer import add_finalizer
from tests.conftest import Script


class Thing:
    """An object that is not hashable."""

    __hash__ = None  # type: ignore[assignment]


def test_it_is_done_once_when_the_last_reference_goes() -> None:
    done: list[str] = []
    thing = Thing()
    add_finalizer(thing, done.append, "gone")
    assert not done
    del thing
    gc.collect()
    assert done == ["gone"]


def test_what_others_clean_up_at_the_exit_is_cleaned_up_while_loans_come_and_go(script: Script) -> None:
    # weakref.finalize's table, which has theirs, must not change while the interpreter goes through it: a node's exit
    # said "dictionary changed size during iteration", and left temporary folders.
    ended = script("""
        import os, sys, threading, weakref
        from lp_pipe.connections import shm_buffers

        sys.setswitchinterval(1e-5)  # threads take turns within that loop, too

        class Mine: pass

        kept = [Mine() for _ in range(100_000)]  # so many that the interpreter takes a while
        for mine in kept:
            weakref.finalize(mine, int)
        weakref.finalize(kept[0], print, "cleaned up")
        descriptor = os.memfd_create("a segment of the peer")
        os.ftruncate(descriptor, 4096)
        inode = os.fstat(descriptor).st_ino

        class Connection:
            def send_return(self, body): pass

        connection = Connection()
        importer = shm_buffers.BufferImporter(connection.send_return)
        importer._arrived[inode] = descriptor
        started = threading.Event()

        def receive():
            while True:
                importer.open(shm_buffers._REFERENCE.pack(inode, 4096, 4096))
                started.set()

        threading.Thread(target=receive, daemon=True).start()
        started.wait()
    """)
    out, err = ended.communicate(timeout=60)
    assert (out, err) == ("cleaned up\n", "")
