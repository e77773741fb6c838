"""Processes and threads of this host, and the system calls behind them.

```
liveness       whether another process lives, is ending or is gone
family         end with the parent, adopt orphans, find and kill descendants
leash          a program that runs a command and ends with whoever started it
python         the command that runs a module of ours
memory         how much memory a process uses
pipe           read what a pipe holds now, in bounded amounts
futex          sleep in the kernel until a number in shared memory changes; memory fences
thread_call    run a call in another thread and return its result or error
```

Standard library only. Imports only `errors`. Start with `liveness`.
"""
