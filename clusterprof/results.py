"""The form of `results.json`, schema version 3: the contract between analysis and every reader.

Times are integers in nanoseconds. Lists of ranks and steps are in their order. `docs/design.md` has
the definitions behind each number, and what each version has that those before it had not.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal, TypedDict

from msgspec import Meta

if sys.version_info >= (3, 11):
    from typing import NotRequired
else:
    from typing_extensions import NotRequired

SCHEMA_VERSION = 3

#: no step takes 104 days; beyond it doubles no longer count nanoseconds
LONGEST_NS = 1 << 53
# ranges of values, by which a file is checked when it is read

#: differences of whole numbers have 64 bits, and so have those of all times and sizes
Whole = Annotated[int, Meta(gt=-(1 << 62), lt=1 << 62)]
Real = Annotated[float, Meta(ge=-1e300, le=1e300)]
Rank = Annotated[int, Meta(ge=0, lt=1 << 31)]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Number = Annotated[int, Meta(ge=1, lt=1 << 62)]
#: how long something takes
Length = Annotated[int, Meta(ge=0, le=LONGEST_NS)]
StepLength = Annotated[int, Meta(gt=0, le=LONGEST_NS)]
#: the number of a step, of which none is so high
Step = Annotated[int, Meta(ge=0, lt=LONGEST_NS)]
#: a time, or how much longer or shorter one is
Time = Annotated[int, Meta(ge=-LONGEST_NS, le=LONGEST_NS)]
Share = Annotated[float, Meta(ge=0, le=1)]
Percent = Annotated[float, Meta(ge=0, le=100)]
Amount = Annotated[float, Meta(ge=0, le=1e300)]

#: the uncertainty of a rank that nothing connects with the reference rank: an hour. It stands for
#: "unbounded" (a warning says so); nothing smaller than the uncertainty is ever reported
UNBOUNDED_NS = 3_600_000_000_000

Severity = Literal["critical", "warning", "info"]
Recurrence = Literal["persistent", "intermittent", "once"]
What = Literal["host", "compute", "communication", "copy", "idle"]
GroupKind = Literal["pipeline", "tensor", "expert", "data", "world", "unknown"]

#: stands in a command line for `--ranks` and what the next run is to capture
RANKS = "{ranks}"

#: nsys' option to record the kernels in CUDA graphs
NODES = "--cuda-graph-trace=node"

#: options of a launch that nsys alone has a use for: `--profiler torch` refuses them
FOR_NSYS = frozenset({"--nsys", "--nsys-arg", "--trace", "--pytorch", "--cpu-sampling", "--arm"})

#: the finding that flight recorders alone show: how much its repair saves may be unknown
SHALLOW_STRAGGLER = "straggler.shallow"


class RankEntry(TypedDict):
    """One rank with a report. A rank without one is in `missing`, and a warning."""

    rank: Rank
    host: str
    source: str
    profiler: str
    world_size: Whole | None
    device: str
    #: of what it ran on, as far as its report says: `driver`, `CUDA driver`, `CUDA`, `NCCL`
    versions: dict[str, str]


class MissingRank(TypedDict):
    """A missing report: the rank that it should be of, and why there is none."""

    rank: Rank | None
    source: str
    reason: str


class RankClock(TypedDict):
    """`offset_ns` is this rank's wall clock minus the reference rank's at `middle_ns`."""

    rank: Rank
    offset_ns: Whole
    drift_ppm: Real
    uncertainty_ns: Whole


class ClockEntry(TypedDict):
    """aligned = wall - offset_ns - drift_ppm * 1e-6 * (wall - middle_ns)."""

    reference_rank: Rank
    middle_ns: Whole
    method: str
    ranks: list[RankClock]
    #: the ranks whose bound rests on an assumption (a warning says which) and is not guaranteed
    assumed: list[Rank]


class RankAccount(TypedDict):
    """One rank's step, closing exactly: the first five of these add up to its duration."""

    rank: Rank
    duration_ns: Whole
    compute_ns: Whole
    exposed_communication_ns: Whole
    exposed_copy_ns: Whole
    idle_ns: Whole
    #: union of all collectives, exposed or overlapped
    communication_ns: Whole
    #: the part of the exposed communication that is waiting for a later rank
    exposed_wait_ns: Whole


class StepEntry(TypedDict):
    """One step over all ranks; `duration_ns` is the median over ranks.

    `begin_ns` is when the first rank began it, on the reference rank's clock.
    """

    step: Whole
    settled: bool
    begin_ns: Whole
    duration_ns: Length
    ranks: list[RankAccount]


class OperationEntry(TypedDict):
    """The calls of one operation on one communicator, per step: in steady state, if any is.

    Times are the mean over all profiled ranks, so that they add up to the accounts; calls and
    bytes are of one of `ranks`.
    """

    operation: str
    communicator: str
    ranks: list[Rank]
    calls_per_step: Real
    bytes_per_step: Whole
    communication_ns_per_step: Whole
    #: the part of it that no compute overlaps with, each moment counted once
    exposed_ns_per_step: Whole
    #: the part of the exposed time before the last member's arrival
    exposed_wait_ns_per_step: Whole


class CollectivesEntry(TypedDict):
    """How many collectives were matched over all their profiled members, and how many not."""

    matched: Whole
    incomplete: Whole
    unmatched: Whole
    #: the most exposed first
    by_operation: list[OperationEntry]


class GroupEntry(TypedDict):
    """One communicator, or one pipeline: its profiled members, and what it is for.

    A pipeline's ranks are in the order of its stages. `size` is the true number of members,
    None where it is unknown.
    """

    kind: GroupKind
    communicator: str
    #: what the program calls it (`mesh_dp`); empty where neither reports nor flight recorders say
    description: str
    ranks: list[Rank]
    size: Whole | None
    operations: list[str]
    calls_per_step: Real
    confidence: Real
    why: str


class StageEntry(TypedDict):
    """One pipeline stage and its profiled ranks."""

    stage: Whole
    ranks: list[Rank]


class TopologyEntry(TypedDict):
    """Which groups the ranks form; `stage_count` is None where it is not known."""

    groups: list[GroupEntry]
    stages: list[StageEntry]
    stage_count: Whole | None


class Replayed(TypedDict):
    """The replayed step (ns) with a finding's cause, and without it."""

    step_ns: Whole
    without_ns: Whole


class Repaired(TypedDict):
    """A finding whose cause is repaired in both replays of a saving."""

    code: str
    ranks: list[Rank]


class LooksSaving(TypedDict):
    """A saving by the looks at a running job: a share of how late the rank was in their steps."""

    #: how many steps, in which no profiler was
    steps: Count
    lateness_ns: Whole
    bound_ns: Count
    #: which part of a lateness the step loses, by the window's replay, and how far it may be wrong
    share: Amount
    share_uncertainty: Amount


class Saving(TypedDict):
    """Where `saved_ns_per_step` is from: replays of one graph with and without the cause."""

    #: the mean of the window's steps
    window: Replayed
    #: the same steps again and again, so that queued work hides nothing for ever
    long_run: Replayed
    #: which of both is stated: the long run where the pace without the profiler is known, or where
    #: queued work hides the cause in the window; `looks` where these have shown the rank late
    stated: Literal["window", "long_run", "looks"]
    #: what the window's steady-state steps save, one after the other
    each_ns: list[Whole]
    #: what the clocks add to the uncertainty: by how much the saving changes within their bounds
    clocks_ns: Whole
    #: what is repaired already in both replays, in the order of its repair
    net_of: list[Repaired]
    #: not there where the looks do not tell a saving
    looks: NotRequired[LooksSaving]


class Combined(TypedDict):
    """The replayed step if some of the findings that save most are repaired at once."""

    #: of the window's own steps, or of the same steps again and again, as for a `Saving`
    view: Literal["window", "long_run"]
    #: the findings, those that save most first
    findings: list[Repaired]
    #: of each choice of them (bit k of its place: findings[k] is repaired) the step that remains
    remaining_ns: list[Time]


#: what a row of the evidence is from
EvidenceSource = Literal["window", "looks", "step logs", "replay", "flight recorders", "hardware"]


class EvidenceRow(TypedDict):
    """One value that sentences rest on, per step (ns)."""

    #: from 1, by which findings and sentences name it
    number: Number
    source: EvidenceSource
    #: "step", "lateness", "cost" or "saving"
    what: str
    ranks: list[Rank]
    #: the first and the last step, and how many; None and 0: those of whole step logs
    first_step: Whole | None
    last_step: Whole | None
    steps: Count
    value_ns: Whole
    #: from where to where it lies; None where that is not known
    least_ns: Whole | None
    most_ns: Whole | None
    #: a profiler was there in these steps, or in some of them
    profiler: bool


class Finding(TypedDict):
    """One finding, with its cost, confidence, evidence and recommendation."""

    code: str
    severity: Severity
    rank: Rank | None
    ranks: list[Rank]
    steps: list[Whole]
    recurrence: Recurrence
    #: what its cause takes of the window's own steps
    cost_ns_per_step: Whole
    #: of the step of `pace`: what is saved; where queued work hides it in the window, of the step
    #: that comes then (`saving.long_run`)
    share_of_step: Share
    #: by how much a step would be shorter without the cause, once what `saving` is net of is
    #: repaired: a step of the job without the profiler, where its step logs tell that (`pace`)
    saved_ns_per_step: Whole
    #: the same where nothing else is repaired
    saved_alone_ns: Whole
    #: from where to where `saved_ns_per_step` lies (95%); the severity is that of the least
    saved_least_ns: Time
    saved_most_ns: Time
    #: how far the farther of both is from it
    saved_uncertainty_ns: Whole
    #: None where nothing can be repaired, and nothing is saved (profiler.perturbation), and where
    #: nothing is replayed: what straggler.shallow saves is its lateness
    saving: Saving | None
    confidence: Share
    summary: str
    evidence: list[dict[str, Any]]
    advice: str
    next: str
    #: the numbers of the rows of `evidence_table` that it rests on
    rows: NotRequired[list[Number]]


class Sentence(TypedDict):
    """A sentence of the verdict, and what it is of."""

    #: the finding that it is the first sentence of, or the second; `unknown`: it says that
    #: stragglers cannot be determined; `none`: that there is no straggler, or no finding
    code: str
    ranks: list[Rank]
    text: str
    #: the numbers of the rows of `evidence_table` that it rests on
    rows: NotRequired[list[Number]]


class KindSlowdown(TypedDict):
    """S_t: "host", "compute", "copy", or a collective's operation."""

    what: str
    slowdown: Real


class RankSlowdown(TypedDict):
    """S_w of one rank."""

    rank: Rank
    slowdown: Real


class Slowdown(TypedDict):
    """What-ifs of Lin et al. (OSDI 2025) over the profiled ranks: how uneven the job is.

    Ideal: everything takes what it takes in the middle of these ranks and all steps. All are
    replays of the job without the profiler, where its step logs tell its pace.
    """

    #: the step over the ideal step; None where `left_out` says why
    S: Real | None
    ideal_step_ns: Whole | None
    #: the same where all but one kind of activity, or all but one rank, is ideal
    S_t: list[KindSlowdown]
    S_w: list[RankSlowdown]
    #: which part of the slowdown goes if only the slowest 3% of these ranks (by S_w), or only the
    #: last pipeline stage, are ideal: at most all. None where S is below 1.01 or there is no such
    #: stage
    M_W: Real | None
    M_S: Real | None
    #: what is not computed, and why; empty where all is
    left_out: str


class PathPart(TypedDict):
    """What one kind of activity takes on the critical path, per step."""

    what: What
    path_ns: Whole
    #: what it takes per rank, on the path or not: the mean over the profiled ranks
    mean_ns: Whole
    #: profiled ranks x max(path_ns - mean_ns, 0): GPU time lost to its imbalance (Scalasca)
    imbalance_gpu_ns: Whole


class PathRank(TypedDict):
    """How long the critical path runs through one rank per step, by what binds it."""

    rank: Rank
    host_ns: Whole
    compute_ns: Whole
    communication_ns: Whole
    copy_ns: Whole
    idle_ns: Whole


class CriticalPath(TypedDict):
    """What the end of the last step waited for, over all profiled ranks, per step (ns).

    Walked backwards over the replayed graph; the parts add up to `step_ns`, and so do the ranks.
    """

    #: the replayed steps: the longest run of steady-state steps without a gap
    steps: list[Whole]
    step_ns: Whole
    #: the replay is of the job as it runs without the profiler
    without_profiler: bool
    parts: list[PathPart]
    ranks: list[PathRank]
    #: the part of "idle" that no recorded length explains; the rest are latencies
    unexplained_ns: Whole


class ComputeAbsent(TypedDict):
    """One rank's time without compute per steady-state step: the last three add up to it (ns).

    The last three are None where a rank computes on its processors, which launch nothing.
    """

    rank: Rank
    compute_absent_ns: Whole
    #: all collectives' time (volume), and the part of it that no compute overlaps with
    communication_ns: Whole
    exposed_communication_ns: Whole
    #: no compute kernel was launched yet
    launch_bound_ns: Whole | None
    #: one was launched, and communication ran: what overlapping can recover
    blocking_ns: Whole | None
    #: one was launched, and waited for something else: a copy, another stream, a latency
    dependency_stalled_ns: Whole | None


class StepTimes(TypedDict):
    """Median step durations over some ranks; None where there were too few steps."""

    before_ns: Whole | None
    inside_ns: Whole | None
    after_ns: Whole | None
    #: by how much `after_ns` may exceed `before_ns` by chance; None: too few steps to tell
    after_uncertainty_ns: Whole | None


class CaptureCost(TypedDict):
    """What profiling cost the training, by the step logs of all ranks."""

    #: the longest stall of a profiled rank when the profiler started, and when it stopped
    stall_start_ns: Whole
    stall_stop_ns: Whole | None
    profiled: StepTimes
    #: the ranks of the job that were not profiled; None where all were
    unprofiled: StepTimes | None


class Pace(TypedDict):
    """The mean step (ns) that all savings and shares of findings are of, and that of the window."""

    step_ns: StepLength
    #: it is that of the job without the profiler, as its step logs tell; else the window's
    without_profiler: bool
    window_step_ns: StepLength


class Suspect(TypedDict):
    """A rank that makes others wait, by the flight recorders of all ranks."""

    rank: Rank
    #: how long its peers wait for it per step, and how far that may be wrong
    lateness_ns: Whole
    bound_ns: Count
    #: the group whose members wait: its name, and its description where it has one
    group: str
    host: str | None
    #: the first step in which it was late, and the last; None where it always was before or after
    since_step: Step | None
    until_step: Step | None
    #: the steps in which it was late, where it was so in some of them only; lateness is their mean
    #: over all steps. None where it was late in all
    late_steps: list[Whole] | None
    #: its peers' work is delayed by as much; else they wait, and whether that delays their work
    #: cannot be determined from flight recorders
    delays: bool
    #: the program's line of the call to which it comes latest; None where no stacks were recorded
    line: str | None
    #: what a step took while it was late (ns), which its lateness is a share of; this and the
    #: following are not there where the window's own flight recorders show it
    step_ns: NotRequired[Length]
    #: over how many steps, in which no profiler was, its lateness is the mean
    looked_steps: NotRequired[Count]
    #: its lateness is how much longer steps were than before; else how long its peers waited
    by_pace: NotRequired[bool]


class ShallowGroup(TypedDict):
    """A process group of the job, by the name and description that the program gave it."""

    name: str
    description: str
    ranks: list[Rank]


class ShallowNode(TypedDict):
    """A host with several suspects."""

    host: str
    ranks: list[Rank]
    suspects: list[Rank]


class LateSteps(TypedDict):
    """In about how many of the steps of all looks a rank was late."""

    rank: Rank
    steps: Count


class WatchEntry(TypedDict):
    """In which steps all ranks were looked at while the job ran (`--watch`)."""

    looks: Count
    #: the first and the last step that was compared, and how many of those between
    first_step: Step
    last_step: Step
    steps: Count
    #: what a step took in the last of these looks (ns)
    step_ns: Length
    #: of all ranks that were late in any look, whether that delayed others or not; files of earlier
    #: versions do not have it
    late: NotRequired[list[LateSteps]]


class ShallowResults(TypedDict):
    """What the flight recorders and step logs of all ranks show."""

    ranks: list[Rank]
    missing: list[MissingRank]
    #: the steps that are compared; their usual length (ns) by the step logs
    steps: list[Whole]
    step_ns: Whole
    #: how lateness is known: how long each member was in a call, or when it called by one clock
    by: Literal["durations", "clock", "nothing"]
    #: of the window, and of the whole run where it was watched
    suspects: list[Suspect]
    #: those most of whose ranks are suspects
    nodes: list[ShallowNode]
    groups: list[ShallowGroup]
    #: the ranks of each pipeline stage; empty where neither groups nor sends tell
    stages: list[list[Rank]]
    #: not there where no look was made while the job ran
    watch: NotRequired[WatchEntry]


class Sampled(TypedDict):
    """The middle of some samples, and by how much they vary: half of what 68% of them span."""

    median: Amount
    spread: Amount


class SampledShare(TypedDict):
    """The same of a share."""

    median: Share
    spread: Share


class SampledPercent(TypedDict):
    """The same of a percentage."""

    median: Percent
    spread: Percent


class ClockReason(TypedDict):
    """Why the driver limits a GPU's clocks, and in which share of its samples under load."""

    reason: str
    share: Share


class XidEntry(TypedDict):
    """An error that NVIDIA's driver reported of a GPU, and between which times (wall clock, ns)."""

    xid: Whole
    after_ns: Whole
    until_ns: Whole
    #: in which of the rank's steps, from one to the other; None: not known
    first_step: Step | None
    last_step: Step | None


class HardwareEntry(TypedDict):
    """What the GPU and the node of one rank said of themselves around looks and captures.

    Of the GPU's samples those count in which it worked: `working_samples`. None: not known.
    """

    rank: Rank
    host: str | None
    uuid: str | None
    name: str | None
    #: what could not be read, and why; else empty
    note: str
    samples: Count
    working_samples: Count
    sm_mhz: Sampled | None
    #: the highest that the GPU has
    most_sm_mhz: Count | None
    memory_mhz: Count | None
    #: mean, and how far it may be off: twice its standard error
    power_w: Amount | None
    power_uncertainty_w: Amount | None
    power_limit_w: Amount | None
    #: those that there were, the most frequent first
    clock_reasons: list[ClockReason]
    #: the highest
    temperature_c: Count | None
    #: the highest that there was, and that the GPU can have there
    pcie_generation: Count | None
    pcie_width: Count | None
    most_pcie_generation: Count | None
    most_pcie_width: Count | None
    #: uncorrected ones from the first sample to the last
    new_ecc_errors: Count | None
    #: `power_w` over the step that savings are of
    energy_j_per_step: Amount | None
    energy_uncertainty_j: Amount | None
    #: of the node: its load, the share of its processors' time that other virtual machines took,
    #: the percentage of time in which a process waited for memory; of the rank's processors MHz
    load: Amount | None
    steal: SampledShare | None
    memory_pressure: SampledPercent | None
    cpu_mhz: Sampled | None
    #: not there for NVML; else "amdgpu", which does not tell why clocks are limited
    driver: NotRequired[str]
    #: errors that the driver reported, from the first sample to the rank's end
    xids: NotRequired[list[XidEntry]]


class RunSize(TypedDict):
    """How many steps a run of clusterprof made in all, and on how many GPUs."""

    steps: Count
    gpus: Number
    #: what the user says that a GPU costs per hour, in any currency
    gpu_hour: Amount | None


#: the job's first steps, which compile and warm up; pauses that are regular; pauses that are not;
#: from the last step of an attempt of the job to the first of the next one
PauseKind = Literal["start", "regular", "single", "restart"]


class PauseEntry(TypedDict):
    """A series of pauses of an attempt, or those that are in none: steps far longer than usual.

    The times of pauses are what exceeds the usual step.
    """

    kind: PauseKind
    #: in which attempt of the job; of a restart, which one it began
    attempt: Number
    #: the ranks that have them; [] where most ranks of the job have each
    ranks: list[Rank]
    count: Number
    #: of a regular series after how many steps, or after which time, a pause follows; else None
    every_steps: Number | None
    every_ns: Number | None
    #: how probable such a series is where pauses come at random; None of other kinds
    chance: Share | None
    mean_ns: Length
    least_ns: Length
    most_ns: Length
    #: the longest single step of them as a whole, and the usual one
    longest_step_ns: Length
    usual_step_ns: Length
    first_step: Step
    last_step: Step
    #: when the first and the last one began (wall clock, ns)
    first_ns: Count
    last_ns: Count
    #: their steps, of many the longest
    steps: list[Step]
    #: the time of all ranks that it took together, and which share of theirs in the whole run
    gpu_ns: Count
    share_of_run: Share
    #: what a capture or a log names in such a step; empty where nothing tells what it is
    name: str


class PausesResults(TypedDict):
    """What interrupted the run, by the step logs of all ranks."""

    #: from the first step of the first attempt to the last one of the last
    run_ns: Number
    world_size: Number
    #: after how long the first process group gives up; None where it is not known
    timeout_ns: Number | None
    #: that is the default of torch's, and not recorded
    timeout_assumed: bool
    #: a rank had so many pauses until this step that of later ones only longer ones were kept
    longer_only_from: Count | None
    entries: list[PauseEntry]


class Results(TypedDict):
    """The whole of results.json."""

    schema_version: Whole
    clusterprof_version: str
    ranks: list[RankEntry]
    missing: list[MissingRank]
    clock: ClockEntry
    steps: list[StepEntry]
    collectives: CollectivesEntry
    topology: TopologyEntry
    #: None where the reports are not of a run of clusterprof
    capture: CaptureCost | None
    #: None where no rank left its flight recorder
    shallow: ShallowResults | None
    #: None without steady-state steps
    pace: Pace | None
    what_if: Slowdown
    #: None without steady-state steps
    critical_path: CriticalPath | None
    compute_absent: list[ComputeAbsent]
    #: those that save most first
    findings: list[Finding]
    #: None where no finding above severity info saves anything by a replay
    combined: Combined | None
    #: the verdict, one or two sentences
    headline: list[Sentence]
    #: the same as text: the first line of the text report
    verdict: str
    warnings: list[str]
    #: by rank; this and the following are not there where they are not known
    hardware: NotRequired[list[HardwareEntry]]
    run_size: NotRequired[RunSize]
    pauses: NotRequired[PausesResults]
    evidence_table: NotRequired[list[EvidenceRow]]


class CalledEntry(TypedDict):
    """One rank's part of a call; what it waits in or called last, where it did not join."""

    rank: Rank
    joined: bool
    operation: str
    sequence: Whole
    input_sizes: str
    output_sizes: str
    input_types: str
    #: `file:line function`; None where no frames were recorded
    line: str | None


class HangEntry(TypedDict):
    """One call that hangs: who did not join it, or joined it otherwise, and who waits."""

    cause: str
    group: str
    description: str
    sequence: Whole
    operation: str
    ranks: list[Rank]
    #: it is one of `ranks`, and which one cannot be determined
    one_of: bool
    waiting: list[Rank]
    called: list[CalledEntry]


class HangResults(TypedDict):
    """What `clusterprof merge FOLDER --json` prints of dumps of flight recorders alone."""

    schema_version: Whole
    clusterprof_version: str
    dumps: list[Rank]
    missing: list[MissingRank]
    #: ranks that wait for others
    waiting: list[Rank]
    hang: list[HangEntry]
    verdict: str
    warnings: list[str]


# --- comparisons


class MeasuredFinding(TypedDict):
    """What a comparison keeps of a finding."""

    code: str
    severity: Severity
    rank: Rank | None
    ranks: list[Rank]
    saved_ns_per_step: Time
    saved_alone_ns: Time
    saved_uncertainty_ns: Time
    share_of_step: Real
    summary: str


class StepParts(TypedDict):
    """One step's account as the mean over the profiled ranks (see `RankAccount`), ns."""

    duration_ns: StepLength
    compute_ns: Time
    exposed_communication_ns: Time
    exposed_copy_ns: Time
    idle_ns: Time
    exposed_wait_ns: Time


class MeasuredRun(TypedDict):
    """What a comparison needs of one run; a baseline keeps several of these."""

    #: the path that the user gave
    name: str
    clusterprof_version: str
    #: None where neither reports nor run say
    world_size: Whole | None
    #: pipeline stages, and the sizes of all communicators; None and [] where they are not known
    stages: Whole | None
    group_sizes: list[Whole]
    devices: list[str]
    profilers: list[str]
    profiled: list[Rank]
    #: the script or module that ran, without its arguments; empty where no manifest says
    program: str
    #: the mean step (ns) of each block of consecutive steps outside of all windows, by the step
    #: log of the middle rank, and of how many steps they are; [] and 0 where these are too few
    outside_ns: list[StepLength]
    outside_steps: Whole
    #: each steady-state step of the window, its parts as the mean over the profiled ranks
    window: list[StepParts]
    #: see `ComputeAbsent`: the mean over ranks; None where it is not known
    blocking_ns: Time | None
    findings: list[MeasuredFinding]


class Baseline(TypedDict):
    """A named baseline: one or several runs of one job."""

    baseline_version: Whole
    clusterprof_version: str
    runs: list[MeasuredRun]


Direction = Literal["longer", "shorter", "none"]


class Change(TypedDict):
    """One time per step of A and of B (ns), and what may be claimed of its change."""

    what: str
    a_ns: Whole
    b_ns: Whole
    change_ns: Whole
    #: half-width of the change's 95% interval
    noise_ns: Whole
    #: "none" where the change is within the noise
    direction: Direction


#: new: in no run of A; gone: in no run of B; worse, better: its repair saves more or less, alone as
#: well as once those before it are repaired; each beyond the noise, and same: within it
State = Literal["new", "gone", "worse", "better", "same"]


class ComparedFinding(TypedDict):
    """A finding of A, of B, or of both, above severity info in one of them."""

    code: str
    ranks: list[Rank]
    rank: Rank | None
    state: State
    severity: Severity
    #: what its repair saves once those before it are repaired, and alone: the mean over the runs (0
    #: where it is not found), ns
    a_saved_ns: Whole
    a_alone_ns: Whole
    b_saved_ns: Whole
    b_alone_ns: Whole
    noise_ns: Whole
    #: by which share of B's step it saves more than in A
    share_of_step: Real
    summary: str


class Comparison(TypedDict):
    """What `clusterprof compare A B --json` prints."""

    comparison_version: Whole
    clusterprof_version: str
    verdict: str
    a: list[str]
    b: list[str]
    #: which steps `step` is of: those outside the window by the step logs, or the window's
    steps_from: Literal["step logs", "window"]
    #: how many steps these are of each side, over its runs
    a_steps: Whole
    b_steps: Whole
    step: Change
    #: the window's steps, and the parts that add up to them; [] where a side has none
    parts: list[Change]
    findings: list[ComparedFinding]
    #: why both sides are not runs of one job: nothing is gated on their comparison
    other_job: list[str]
    warnings: list[str]


#: what a repair saved against what was stated; each beyond the uncertainty of both
Outcome = Literal[
    "as predicted",
    "less than predicted",
    "more than predicted",
    "no change beyond the noise",
    "cannot be determined",
]


#: what one finding's repair saves where nothing else is repaired; the sum of what each saves once
#: those before it are; or the replay with all of them repaired (`Combined`)
Basis = Literal["alone", "sum", "replay"]


class PredictedSaving(TypedDict):
    """By how much steps of A are to be shorter where some of its findings are repaired at once."""

    findings: list[Repaired]
    basis: Basis
    saved_ns: Whole
    #: from where to where it lies (95%)
    saved_least_ns: Whole
    saved_most_ns: Whole


class Verification(TypedDict):
    """What `clusterprof verify RUN NEWRUN --json` prints: RUN is A, NEWRUN is B."""

    verification_version: Whole
    clusterprof_version: str
    verdict: str
    a: str
    b: str
    outcome: Outcome
    #: why it cannot be determined; else empty
    why: str
    #: these and the rest are None, 0 and empty as far as they cannot be determined
    predicted: PredictedSaving | None
    #: the undisturbed steps of both, as `clusterprof compare` has them
    step: Change | None
    a_steps: Whole
    b_steps: Whole
    #: what has become of the findings
    findings: list[ComparedFinding]
    notes: list[str]


def step_while_late_ns(shallow: ShallowResults, late: Suspect) -> int:
    """The step that a suspect's lateness is a share of (ns)."""
    return late.get("step_ns") or compared_step_ns(shallow)


def compared_step_ns(shallow: ShallowResults) -> int:
    """The step that lateness is a share of (ns): of the last look at a watched job, else of the
    window.
    """
    watch = shallow.get("watch")
    return shallow["step_ns"] if watch is None else watch["step_ns"]


def usual_step_ns(results: Results) -> int | None:
    """The step that savings are of (ns); of flight recorders alone theirs. None without steps."""
    if pace := results["pace"]:
        return pace["step_ns"]
    shallow = results["shallow"]
    return compared_step_ns(shallow) or None if shallow else None


def finding_key(
    entry: Finding | MeasuredFinding | ComparedFinding | Repaired | Sentence,
) -> tuple[str, tuple[int, ...]]:
    """What tells findings of a run apart, and is the same in another run and in a sentence."""
    return entry["code"], tuple(entry["ranks"])


def steady_steps(results: Results) -> list[int]:
    """The window's steps in which neither the profiler's start nor its stop shows."""
    return [step["step"] for step in results["steps"] if step["settled"]]


def evidence_steps(results: Results) -> list[int]:
    """The steps to judge by: those in steady state; where there is none, all."""
    return steady_steps(results) or [step["step"] for step in results["steps"]]


def steps_to_look_at(results: Results) -> list[int]:
    """The typical step and the worst: the evidence's steps of median and of longest duration.

    The typical one is among the steps that the first finding names, if evidence is among them. One
    step alone is both; none where there is no step.
    """
    steps = {*evidence_steps(results)}
    evidence = [step for step in results["steps"] if step["step"] in steps]
    named = set(results["findings"][0]["steps"]) if results["findings"] else set()
    candidates = [step for step in evidence if step["step"] in named] or evidence
    by_length = sorted(candidates, key=lambda step: step["duration_ns"])
    typical = by_length[(len(by_length) - 1) // 2 :][:1]
    worst = sorted(evidence, key=lambda step: -step["duration_ns"])[:1]
    return list(dict.fromkeys(step["step"] for step in (*typical, *worst)))
