"""Processes and threads of this host, and the system calls behind them.

```
liveness       whether another process is alive, ending or gone
family         die with the parent, adopt orphans, find and kill descendants
supervisor     a program that runs a command, and kills it when the process that started it ends
python         the command line that runs a module of allstep
memory         how much memory a process uses
pipe           read the available bytes of a pipe, in bounded amounts
futex          sleep in the kernel until a number in shared memory changes; memory fences
thread_call    run a call in another thread and return its result or error
```

Uses the standard library only; imports only `errors`. Start with `liveness`.
"""
