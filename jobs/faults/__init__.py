"""Faults put into runs, collections and services at seeded moments: rows lost, doubled, different or wrongly failed.

One cascade whose every answer is known, of a model that misbehaves where it is ordered to (`cascade`), one small real
Ray cluster (`cluster`), one list of kinds (`kinds`), one trial of a run or collection and of a service (`trial`), one
object store at a distance (`store`). `python -m jobs.faults` makes trials of every kind with ten seeds; `--seed N
--seeds 1` repeats one. Of five trials or more of a kind, some must show what it sometimes brings about: a call that is
made again, an attempt that goes on.

| kinds | run | service |
| --- | --- | --- |
| none: nothing is struck | yes | yes |
| replica-killed, replica-killed-last, replicas-killed: one replica of a stage, or all at once | yes | yes |
| replica-hangs, replica-hangs-on: two calls do not end, or all calls of a process | yes | yes |
| replica-turns-bad, -nan, -shape, -deadly, replicas-turn-bad: processes fail every call | yes | yes |
| bad-for-a-while: all replicas of a stage fail every call for some seconds | yes | yes |
| nan, shape, raises: a few calls of every stage | yes | yes |
| row-raises, row-kills: certain rows fail their batch, or kill their process | yes | yes |
| dies-loading: replicas that take another's place die | yes | yes |
| stage-down: a stage is gone, and rows are answered without it and marked | yes | yes |
| controller-killed: the run's controller, Serve's controller | yes | yes |
| node-killed, node-replaced: a raylet with its workers and its object store | yes | yes |
| network-cut, network-stalls: no packet passes to or from a node until it is given up, or for a moment | yes | yes |
| stage-down-resumed: a stage is gone, the run ends, and is resumed | yes | – |
| reader-killed, driver-killed (and resumed), input-away, input-damaged | yes | – |
| store-full, store-full-no-spilling: an object store that others fill | yes | – |
| driver-doubled: a second process resumes the run while the first is at work | yes | – |
| reader-node-killed: a node with a task that reads from a store at a distance | yes | – |
| answers-node-killed, collection-controller-killed: with large logits on their way to a far store | collection | – |
| router-killed, proxy-killed | – | yes |
| version-next: another pool and policy are deployed, on a busy machine, too; each answer is of one, whole | – | yes |
| bodies-hostile: large and slow bodies, connections without a byte; no other client may notice | – | yes |

The network kinds have every node in a Linux network namespace of its own and take its link off their bridge: both
sides keep their interfaces and addresses and hear nothing of each other. This takes root; disks and memory are shared.

A client whose request is lost by what holds it (a router, a proxy, a node) asks again, as does one that is asked to:
these are counted, under "again", and nowhere else. "refused" counts requests for good rows that were not answered whole
because of others' bad rows. A row that must fail may also be answered without its stage, and marked.
"""
