"""Every limit that a finding depends on, in one place, each with its reason.

Shares are of the mean steady-state step. What has no reason of its own is chosen low enough to be
of use and high enough that the recordings of healthy jobs stay below it; `make truth` shows what
they give on jobs that were not looked at when they were chosen.
"""

from __future__ import annotations

#: steps vary by so much from before the window to inside it
VARIES_FRAC = 0.01
#: severities: a seventh of the step is worth dropping everything for, a twentieth is worth a
#: look; healthy recordings vary by 1 to 2% from step to step, below which there is no finding
CRITICAL_FRAC = 0.15
WARNING_FRAC = 0.05
LEAST_FRAC = 0.02

#: more than half of it is most of it: of a step, a window, a list, or what the worst one has
HALF = 0.5
#: fewer values than these do not tell how much they vary; more names than these are counted
FEW = 4
#: so many of a kind are weighed, reported and shown: each of those behind has less than the mean
MOST = 8
#: a rank is named where chance makes one of equals so late in one job of a hundred
CHANCE = 0.01
#: confidence in a finding (`docs/reading.md`): its numbers are recorded, or rest on an assumption
MEASURED, ASSUMED = 0.9, 0.6

#: a host that launches nothing, or is in one call, for so long has paused: launches take 5 to 50 µs
PAUSE_NS = 1_000_000
#: eager training idles 1 to 5% between its launches in the recordings that are not launch-bound
LAUNCH_FRAC = 0.1
#: CUDA calls that may wait for the device are taken to wait from this length on (they cost 5 to
#: 20 µs themselves), any other call from a pause on: a launch into a full queue
WAITING_CALL_NS = 50_000
#: a kernel or a host goes on at most this long after what it waited for, which costs a CUDA call:
#: with 50 µs the transfers of a simulated healthy pipeline are stated 0.25 ms too low
REACTS_NS = 30_000

#: the time of a message or a copy from this size on goes with its size, below it is latency
LARGE_BYTES = 1 << 20

#: an unprofiled rank: transfers so many times their quickest are more than transfers;
#: networks vary by less than three times in the recordings
LONGER = 3.0
#: what is in three of four steps is persistent, and no congestion
STEADY_FRAC = 0.75
