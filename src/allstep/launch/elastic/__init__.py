"""Runs whose world changes while they run: the launcher's side of D14.

```
host_poll           asks the discovery script for hosts, in a thread
host_agents         the agents of the hosts: started when a worker needs one, ended with the host
worker_table        the workers by number and ticket; their requests for a place
change_line         the lines about worlds
loss_lines          the lines about lost workers without which a run continues
worker_order        the message that starts a worker
fault_ranks         which injected faults a worker has
worker_keys         what the store has of single workers
elastic_run         the state of such a run, as the launcher's loop uses it, around a roster
elastic_launcher    the loop: requests and exits to events, the roster's actions to messages
```

`launch.roster` decides, this package acts. Imports: everything else in `launch`. Start with
`elastic_launcher`.
"""

from allstep.launch.elastic.elastic_launcher import ElasticLauncher

__all__ = ["ElasticLauncher"]
