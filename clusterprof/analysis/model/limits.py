"""Every limit that a finding depends on, in one place, each with its reason.

Shares are of the mean steady-state step. What has no reason of its own is chosen low enough to be
of use and high enough that the recordings of healthy jobs stay below it; `make truth` shows what
they give on jobs that were not looked at when they were chosen.
"""

from __future__ import annotations

#: severities: a seventh of the step is worth dropping everything for, a twentieth is worth a
#: look; healthy recordings vary by 1 to 2% from step to step, below which there is no finding
CRITICAL_FRAC = 0.15
WARNING_FRAC = 0.05
LEAST_FRAC = 0.02
#: a straggler needs twice what chance gives: a wrong name costs more trust than a missed 3%
STRAGGLER_FRAC = 0.03
#: in a pipeline every host's jitter makes some stage wait: of three recordings of a balanced
#: pipeline the irregular hosts alone make up to 10%
PIPELINE_STRAGGLER_FRAC = 0.15
#: in fewer steps, it must cost a lot in the worst: a single pause of a few ms is ordinary
PEAK_FRAC = 0.2
#: where the other ranks' GPUs idle this much themselves, idle time does not show a slow host:
#: the hosts' own times do
USUAL_IDLE_FRAC = 0.2

#: a host hidden by queued work: slower than the step that it will bound, and than the other
#: hosts, by more than hosts of one job differ (up to 10% in the recordings)
HIDDEN_STEP = 1.15
HIDDEN_PEERS = 1.3
#: one that fits into the step is reported (as information) if it differs clearly
SLACK_PEERS = 1.5
SLACK_FRAC = 0.2
#: confidence in a rank that arrives late with a host no slower than the others: its lag is
#: carried over from before the window
INHERITED = 0.75
#: nor is it a straggler where a host as fast as the others' would save less than this part of
#: what they wait
SAVED_FRAC = 0.5
#: where the job is host-bound on all ranks alike, the last rank's GPU idles as long as faster
#: hosts would save, 1.1 times that in simulated jobs without a straggler; one that makes the
#: others wait longer than this is named
BEHIND_TIMES = 1.15
#: and for a fifth of the step: less is the order in which equally slow hosts have resumed
BEHIND_FRAC = 0.2

#: one rank is last everywhere if nine tenths of all waiting are for it, and that is reported
#: from a good third of the step on, whatever a faster rank would save
LAST_FRAC, WAITED_FRAC = 0.9, 0.4

#: GPUs of one model differ by up to 2% in clocks; kernels compared must be this part of all
SLOWER_FRAC = 0.03
COMPARED_FRAC = 0.1
#: stages whose compute differs by less can hardly be made more even: a layer is the unit
UNEQUAL_FRAC = 0.1

#: launching a kernel takes a host some 5 to 15 µs: shorter ones are launched no faster than run
SHORT_KERNEL_NS = 15_000
#: a gap between kernels longer than this is not due to launching alone
LAUNCH_GAP_NS = 1_000_000
#: a kernel that is queued starts 1 to 10 µs after what it waits for
QUEUED_GAP_NS = 50_000
#: eager training idles 1 to 5% between its launches in the recordings that are not launch-bound
LAUNCH_FRAC = 0.1
#: a job is host-bound if its hosts need this much of the step: their own jitter takes the rest
PACING_FRAC = 0.85
#: a pause of half a step is named however rare it is
PAUSE_PEAK_FRAC = 0.5
#: launches that pause for this part of the host's step are not what it spends its time in
PAUSE_FRAC = 0.25
#: a cause is common if the middle rank's host spends at least half of what the worst one does
SHARED_FRAC = 0.5
#: CUDA calls that may wait for the device are taken to wait from this length on (they cost 5 to
#: 20 µs themselves), any other call from this: a launch into a full queue
WAITING_CALL_NS = 50_000
BLOCKED_CALL_NS = 1_000_000

#: an unprofiled rank: transfers so many times their quickest are more than transfers;
#: networks vary by less than three times in the recordings
LONGER = 3.0
LEAST_CALLS = 4
#: in three of four steps it is no congestion; else it must cost a lot
STEADY_FRAC = 0.75
MUCH_FRAC = 0.2
