"""What the processes of a job (`jax.distributed`) tell each other, and how one leaves.

    job            this process's part: starts with a program over several processes
    mailbox        the thread that reads what others say, and writes what this one says
    after_failure  keeps this process out of programs over several
    answers        what each process is doing, for hc.monitor.status(processes="all")

Nothing here is imported in a job of one process, except by the last, which is asked
for. A program waits for none of it, and what a job without failures computes is
the same without it.
"""
