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

#: one rank is last everywhere if nine tenths of all waiting are for it, and that is reported
#: from a good third of the step on, whatever a faster rank would save
LAST_FRAC, WAITED_FRAC = 0.9, 0.4

#: stages whose compute differs by less can hardly be made more even: a layer is the unit
UNEQUAL_FRAC = 0.1

#: a gap between kernels longer than this is not due to launching alone
LAUNCH_GAP_NS = 1_000_000
#: eager training idles 1 to 5% between its launches in the recordings that are not launch-bound
LAUNCH_FRAC = 0.1
#: a pause of half a step is named however rare it is
PAUSE_PEAK_FRAC = 0.5
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
